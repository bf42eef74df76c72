"""The nodes that C++ puts into autograd's graph for a GPU, on a CPU: the same code, with kernels of torch's operations.

The library is made once more for that, for another device, and is given a
driver: a function of Python that does with memory what each kernel does.
"""

from __future__ import annotations

import ctypes
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_native import Counting, Special, Watching, library
from torch import Tensor

from mixedopt import losses, native, norms

pytestmark = pytest.mark.skipif(library is None, reason="no C++ compiler, or no headers of Python")

SIZE, CLASSES, EPS, IGNORED = 6, 5, 1e-5, 1
HALF, SINGLE = torch.bfloat16, torch.float32
BRAIN = HALF == torch.bfloat16
# Of gradients of gradients: they are rounded to bf16 in another order.
ROUNDINGS = {"rtol": 2.0**-6, "atol": 2.0**-9}
DRIVER = ctypes.CFUNCTYPE(
    ctypes.c_int,
    ctypes.c_void_p,
    *[ctypes.c_uint] * 7,
    ctypes.c_void_p,
    ctypes.POINTER(ctypes.c_void_p),
    ctypes.c_void_p,
)
WRONG = 999
FORWARD, BACKWARD, SUM, ROWS, REDUCE, SLOPE = range(1, 7)
TAKES = {FORWARD: "****if", BACKWARD: "*****if", SUM: "***i", ROWS: "****", REDUCE: "****i", SLOPE: "******"}


class Arguments:
    """What the driver is given: pointers to the arguments."""

    def __init__(self, pointers: Any) -> None:
        self.pointers = pointers

    def tensor(self, index: int, dtype: torch.dtype, *shape: int) -> Tensor:
        address = ctypes.c_void_p.from_address(self.pointers[index]).value
        assert address % 16 == 0, "kernels are compiled for aligned memory"
        count = torch.Size(shape).numel()
        memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
        return torch.frombuffer(memory, dtype=dtype, count=count).view(shape)

    def count(self, index: int) -> int:
        return ctypes.c_int32.from_address(self.pointers[index]).value

    def number(self, index: int) -> float:
        return ctypes.c_float.from_address(self.pointers[index]).value


class Device:
    """A driver that knows six kernels.

    Attributes:
        launched: what was, in order.
        fails: the error that it answers with, 0 for none.
    """

    def __init__(self) -> None:
        self.launched: list[int] = []
        self.fails = 0
        self.function = DRIVER(self.launch)
        self.address = ctypes.cast(self.function, ctypes.c_void_p).value

    def launch(self, kernel: int, programs: int, *rest: Any) -> int:
        self.launched.append(kernel)
        if self.fails:
            return self.fails
        try:
            with torch.no_grad():
                run(kernel, programs, Arguments(rest[-2]))
        except AssertionError:  # which a driver cannot raise
            return WRONG
        return 0

    def kernel(self, made: Any, kernel: int) -> Any:
        return made.kernel(self.address, kernel, -1, 32, 0, TAKES[kernel])


def run(kernel: int, programs: int, given: Arguments) -> None:
    """Do what a kernel does."""
    if kernel == FORWARD:
        x = given.tensor(0, HALF, given.count(4), SIZE)
        weight, bias = (given.tensor(place, SINGLE, SIZE) for place in (1, 2))
        assert given.number(5) == pytest.approx(EPS)
        given.tensor(3, HALF, *x.shape).copy_(normed(x, weight, bias))
    elif kernel == BACKWARD:
        rows = given.count(5)
        dy, x = (given.tensor(place, HALF, rows, SIZE) for place in (0, 1))
        dx, dweight, dbias = slopes_of(dy, x, given.tensor(2, SINGLE, SIZE))
        given.tensor(3, HALF, rows, SIZE).copy_(dx)
        left = given.tensor(4, SINGLE, programs, 2 * SIZE).zero_()
        left[0, :SIZE], left[0, SIZE:] = dweight, dbias
    elif kernel == SUM:
        left = given.tensor(0, SINGLE, given.count(3), 2 * SIZE).sum(0)
        given.tensor(1, SINGLE, SIZE).copy_(left[:SIZE])
        given.tensor(2, SINGLE, SIZE).copy_(left[SIZE:])
    elif kernel == ROWS:
        x, target = given.tensor(0, HALF, programs, CLASSES), given.tensor(1, torch.int64, programs)
        given.tensor(2, SINGLE, programs).copy_(
            F.cross_entropy(x.float(), target, reduction="none", ignore_index=IGNORED)
        )
        given.tensor(3, SINGLE, programs, 2).copy_(torch.stack([x.float().amax(1), torch.zeros(programs)], 1))
    elif kernel == REDUCE:
        rows = given.count(4)
        counted = (given.tensor(0, torch.int64, rows) != IGNORED).sum()
        given.tensor(2, SINGLE).copy_(given.tensor(1, SINGLE, rows).sum() / counted)
        given.tensor(3, SINGLE).copy_(counted)
    else:
        x, target = given.tensor(1, HALF, programs, CLASSES), given.tensor(2, torch.int64, programs)
        assert torch.equal(given.tensor(3, SINGLE, programs, 2)[:, 0], x.float().amax(1))
        assert given.tensor(4, SINGLE) == (target != IGNORED).sum()
        given.tensor(5, HALF, *x.shape).copy_(loss_slope(given.tensor(0, SINGLE), x, target))


def normed(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return F.layer_norm(x.float(), (SIZE,), weight, bias, EPS).to(HALF)


@torch.no_grad()
def slopes_of(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    return norms._differentiate(norms.Rows((SIZE,), EPS, True), dy, x, weight, (True, True, True))  # type: ignore[return-value]


def loss_slope(slope: Tensor, x: Tensor, target: Tensor) -> Tensor:
    with torch.enable_grad():
        wide = x.detach().float().requires_grad_()
        loss = F.cross_entropy(wide, target, ignore_index=IGNORED)
    return torch.autograd.grad(loss, wide, slope)[0].to(HALF)


@pytest.fixture(scope="module")
def made() -> Iterator[Any]:
    """The library for a CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "FLAGS", (*native.FLAGS, "-DMIXEDOPT_ON_CPU"))
        yield native._loaded(native._made())
    native.sys.modules[native.NAME] = library


@pytest.fixture
def device() -> Device:
    return Device()


# -- launches --------------------------------------------------------------------------------------------------------


def test_a_launch_is_made_again_of_the_same_memory(made: Any, device: Device) -> None:
    """With what stands there by then, and with another tensor each time in the place left open."""
    x, weight, bias = (tensor.detach() for tensor in inputs())
    rows = x.numel() // SIZE
    ready = made.ready(device.kernel(made, FORWARD), rows, (x, weight, bias, None), (rows, EPS))
    for _ in range(3):
        x.mul_(2)
        y = torch.empty_like(x)
        assert made.relaunch(ready, y)
        assert torch.equal(y, normed(x, weight, bias))
    device.fails = 5
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA error 5"):
        made.relaunch(ready, y)
    assert device.launched == [FORWARD] * 4


# -- norms -----------------------------------------------------------------------------------------------------------


class Norm:
    """A LayerNorm that C++ knows; ``asked`` is what it left to Python."""

    def __init__(self, made: Any, device: Device) -> None:
        self.made, self.device, self.asked = made, device, []
        self.rows = made.rows()
        about = -1, BRAIN, (SIZE,), EPS, True, True, device.kernel(made, FORWARD), 2, self.python
        self.plan = made.add_rows(self.rows, *about)

    def python(self, dy: Tensor, x: Tensor, weight: Tensor, bits: int) -> Any:
        self.asked.append(bits)
        needs = tuple(bool(bits >> place & 1) for place in range(3))
        return norms._differentiate(norms.Rows((SIZE,), EPS, True), dy, x, weight, needs)

    def learn(self) -> bool:
        kernels = self.device.kernel(self.made, BACKWARD), self.device.kernel(self.made, SUM)
        return self.made.add_rows_backward(self.plan, 7, *kernels, 2, 3)

    def __call__(
        self, x: Any, weight: Any, bias: Any, shape: Any = (SIZE,), eps: Any = EPS, centred: bool = True
    ) -> Any:
        return self.made.row_norm(self.rows, x, shape, weight, bias, eps, centred)


@pytest.fixture
def norm(made: Any, device: Device) -> Norm:
    return Norm(made, device)


def inputs(*needs: bool) -> list[Tensor]:
    torch.manual_seed(0)
    wanted = needs or (True, True, True)
    shapes = ((3, 5, SIZE), HALF), ((SIZE,), SINGLE), ((SIZE,), SINGLE)
    return [torch.randn(s).to(d).requires_grad_(need) for (s, d), need in zip(shapes, wanted, strict=True)]


def test_a_norm_is_launched_and_its_backward_learnt(norm: Norm, device: Device) -> None:
    """First by Python, then by kernels; the same bits."""
    given = inputs()
    expected = list(slopes_of(torch.ones(3, 5, SIZE, dtype=HALF), *given[:2]))
    for learnt in (False, True):
        if learnt:
            norm.learn()
        y = norm(*given)
        assert torch.equal(y, normed(*given))
        assert all(map(torch.equal, torch.autograd.grad(y, given, torch.ones_like(y)), expected))
    assert device.launched == [FORWARD, FORWARD, BACKWARD, SUM]
    assert norm.asked == [7]


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_norm_makes_the_gradients_that_are_wanted(norm: Norm, bits: int) -> None:
    """Any choice of the three, also where C++ knows no kernels for it."""
    norm.learn()
    needs = [bool(bits >> place & 1) for place in range(3)]
    given = inputs(*needs)
    wanted = [tensor for tensor, need in zip(given, needs, strict=True) if need]
    full = slopes_of(torch.ones(3, 5, SIZE, dtype=HALF), *given[:2])
    expected = [slope for slope, need in zip(full, needs, strict=True) if need]
    found = torch.autograd.grad(norm(*given), wanted, torch.ones(3, 5, SIZE, dtype=HALF))
    assert all(map(torch.equal, found, expected))
    assert norm.asked == ([] if bits == 7 else [bits])


@pytest.mark.parametrize(
    "slope",
    [
        lambda: torch.randn(SIZE, 5, 3).to(HALF).permute(2, 1, 0),
        lambda: torch.ones((), dtype=HALF).expand(3, 5, SIZE),
        lambda: torch.randn(3 * 5 * SIZE + 1).to(HALF)[1:].view(3, 5, SIZE),
    ],
    ids=["strided", "expanded", "at an odd place"],
)
def test_slopes_of_any_layout_go_to_the_kernels(norm: Norm, slope: Callable[[], Tensor]) -> None:
    """Each time, and nothing is learnt twice."""
    assert norm.learn()
    given, dy = inputs(), slope()
    for _ in range(3):
        assert not norm.learn()
        found = torch.autograd.grad(norm(*given), given, dy)
        assert all(map(torch.equal, found, slopes_of(dy, *given[:2])))
    assert not norm.asked


def test_a_gradient_of_the_gradients_is_left_to_python(norm: Norm) -> None:
    """As of the cast-up norm."""
    norm.learn()
    found = []
    for call in (norm, normed):
        given = inputs()
        slopes = torch.autograd.grad(call(*given).float().square().sum(), given, create_graph=True)
        total = torch.stack([slope.float().square().sum() for slope in slopes]).sum()
        found.append([*slopes, *torch.autograd.grad(total, given[:2])])
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, **ROUNDINGS)
    assert norm.asked == [7, 3]  # the second is of the result itself, for input and weight


def test_a_norm_without_a_graph_makes_no_node(norm: Norm) -> None:
    """Under no_grad, inference mode, and of what needs no gradient."""
    given = inputs()
    with torch.no_grad():
        assert norm(*given).grad_fn is None
    with torch.inference_mode():
        assert torch.equal(norm(*given), normed(*given))
    assert not norm(*inputs(False, False, False)).requires_grad


def test_errors_of_the_driver_come_through(norm: Norm, device: Device) -> None:
    """Of the driver, from forward, backward, and a thread of its own."""
    given = inputs()
    device.fails = 7
    with pytest.raises(RuntimeError, match="cuLaunchKernel: CUDA error 7"):
        norm(*given)
    device.fails = 0
    y = norm(*given)

    norm.learn()
    device.fails = 9
    with pytest.raises(RuntimeError, match="CUDA error 9"):
        y.sum().backward()
    assert given[0].grad is None

    said: list[str] = []

    def in_a_thread() -> None:
        try:
            norm.made.row_norm(norm.rows, *given[:1], (SIZE,), *given[1:], EPS, True).sum().backward()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert "CUDA error 9" in said[0]


def test_what_python_raises_in_backward_comes_through(made: Any, device: Device) -> None:
    """With its type and message."""

    def fails(*args: Any) -> Any:
        raise KeyError("from Python")

    rows = made.rows()
    made.add_rows(rows, -1, BRAIN, (SIZE,), EPS, True, True, device.kernel(made, FORWARD), 2, fails)
    given = inputs()
    with pytest.raises(KeyError, match="from Python"):
        made.row_norm(rows, given[0], (SIZE,), *given[1:], EPS, True).sum().backward()


def dual(norm: Norm, given: list[Tensor]) -> Any:
    with torch.autograd.forward_ad.dual_level():
        return norm(torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0])), *given[1:])


def under(context: Any) -> Callable[[Norm, list[Tensor]], Any]:
    def call(norm: Norm, given: list[Tensor]) -> Any:
        with context():
            return norm(*given)

    return call


def moved(x: Tensor) -> Tensor:
    """Return the same values at an odd place."""
    return torch.cat([x.detach().flatten()[:1], x.detach().flatten()])[1:].view(x.shape)


LEFT: dict[str, Callable[[Norm, list[Tensor]], Any]] = {
    "another epsilon": lambda norm, given: norm(*given, eps=1e-6),
    "no epsilon": lambda norm, given: norm(*given, eps=None),
    "a text": lambda norm, given: norm(*given, eps="much"),
    "another shape": lambda norm, given: norm(*given, shape=(5, SIZE)),
    "narrower rows": lambda norm, given: norm(*[t[..., :3].contiguous() for t in given], shape=(3,)),
    "a shape that is none": lambda norm, given: norm(*given, shape=SIZE),
    "not centred": lambda norm, given: norm(*given, centred=False),
    "no bias": lambda norm, given: norm(*given[:2], None),
    "no weight": lambda norm, given: norm(given[0], None, given[2]),
    "fp32": lambda norm, given: norm(given[0].float(), *given[1:]),
    "another half format": lambda norm, given: norm(given[0].half(), *given[1:]),
    "a half weight": lambda norm, given: norm(given[0], given[1].to(HALF), given[2]),
    "strided": lambda norm, given: norm(given[0].transpose(0, 1), *given[1:]),
    "at an odd place": lambda norm, given: norm(moved(given[0]), *given[1:]),
    "a weight at an odd place": lambda norm, given: norm(given[0], moved(given[1]), given[2]),
    "no rows": lambda norm, given: norm(given[0][:0], *given[1:]),
    "short rows": lambda norm, given: norm(given[0][..., :2].contiguous(), *given[1:]),
    "nested": lambda norm, given: norm(torch.nested.nested_tensor([given[0][0].detach()] * 2), *given[1:]),
    "sparse": lambda norm, given: norm(given[0].detach().to_sparse(), *given[1:]),
    "meta": lambda norm, given: norm(given[0].to("meta"), *given[1:]),
    "a subclass": lambda norm, given: norm(given[0].as_subclass(Special), *given[1:]),
    "a dispatch mode": under(Watching),
    "forward derivatives": dual,
}


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of forward derivatives
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype:UserWarning")
@pytest.mark.parametrize("case", LEFT)
def test_norms_that_are_not_the_common_case_are_left_to_python(case: str, norm: Norm, device: Device) -> None:
    """Nothing is launched for them."""
    assert LEFT[case](norm, inputs()) is None
    assert not device.launched


def test_a_function_mode_does_not_matter_to_a_norm(norm: Norm) -> None:
    """The kernels are no function of torch."""
    assert torch.equal(under(Counting)(norm, inputs()), normed(*inputs()))


def test_hooks_on_what_is_saved_see_the_input_and_the_weight(norm: Norm) -> None:
    """As they do when Python launches; what they give back is used."""
    norm.learn()
    given, seen = inputs(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: seen.append(t) or t, lambda t: t.clone()):
        y = norm(*given)
    assert [id(tensor) for tensor in seen] == [id(tensor) for tensor in given[:2]]
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), given), slopes_of(torch.ones_like(y), *given[:2])))


# -- losses ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def loss(made: Any, device: Device) -> Callable[..., Any]:
    """Cross entropy, of a mean, that C++ knows."""
    place = made.losses()
    kernels = [device.kernel(made, kernel) for kernel in (ROWS, REDUCE, SLOPE)]
    python = functools.partial(losses._slope_of, (IGNORED, "mean"))
    made.add_loss(place, -1, BRAIN, CLASSES, IGNORED, "mean", *kernels, python)
    return lambda x, target, ignored=IGNORED, how="mean": made.cross_entropy(place, x, target, ignored, how)


def logits(rows: int = 7) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x, target = torch.randn(rows, CLASSES).to(HALF).requires_grad_(), torch.arange(rows) % CLASSES
    return x, target


@pytest.mark.parametrize("rows", [1, 3, 4, 7, 8])
def test_a_loss_and_its_gradient_are_launched(loss: Callable[..., Any], rows: int, device: Device) -> None:
    """For numbers of rows that fill 16 bytes and that do not; a slope of any kind."""
    x, target = logits(rows)
    expected = F.cross_entropy(x.float(), target, ignore_index=IGNORED)
    for slope in (torch.tensor(3.0), torch.tensor([0.0, 3.0])[1], torch.tensor([3.0]).expand(1)[0]):
        found = loss(x, target)
        assert torch.equal(found, expected.detach())
        assert torch.equal(torch.autograd.grad(found, x, slope)[0], loss_slope(slope, x, target))
    assert device.launched == [ROWS, REDUCE, SLOPE] * 3


def test_a_gradient_of_the_losses_gradient_is_left_to_python(loss: Callable[..., Any], device: Device) -> None:
    """As of torch's loss of fp32 logits."""
    found = []
    for call in (loss, lambda x, target: F.cross_entropy(x.float(), target, ignore_index=IGNORED)):
        x, target = logits()
        (slope,) = torch.autograd.grad(call(x, target), x, create_graph=True)
        found.append([slope, *torch.autograd.grad(slope.float().square().sum(), x)])
    assert SLOPE not in device.launched
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, **ROUNDINGS)


UNKNOWN: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "another ignored class": lambda loss, x, target: loss(x, target, ignored=2),
    "a sum": lambda loss, x, target: loss(x, target, how="sum"),
    "no text": lambda loss, x, target: loss(x, target, how=None),
    "no number": lambda loss, x, target: loss(x, target, ignored="none"),
    "more classes": lambda loss, x, target: loss(torch.cat([x, x], 1), target),
    "columns": lambda loss, x, target: loss(x.t().contiguous().t(), target),
    "fp32": lambda loss, x, target: loss(x.float(), target),
    "probabilities": lambda loss, x, target: loss(x, x),
    "fewer targets": lambda loss, x, target: loss(x, target[:-1]),
    "int32": lambda loss, x, target: loss(x, target.int()),
    "one row": lambda loss, x, target: loss(x[0], target[0]),
    "no rows": lambda loss, x, target: loss(x[:0], target[:0]),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_losses_that_are_not_the_common_case_are_left_to_python(
    case: str, loss: Callable[..., Any], device: Device
) -> None:
    """Nothing is launched for them; nor under hooks on what is saved, which would see other tensors."""
    assert UNKNOWN[case](loss, *logits()) is None
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert loss(*logits()) is None
    assert not device.launched
