"""What the library of C++ does is what Python and torch do, bit for bit."""

from __future__ import annotations

import contextlib
import itertools
import logging
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from mixedopt import CastPolicy, MixedPrecisionOptimizer, convert, cxx, native, walks
from mixedopt.walks import IN_PYTHON, number_at, numbers, walks_for, with_number

CPU = torch.device("cpu")
library: Any = native.native()
needs_library = pytest.mark.skipif(library is None, reason="no C++ compiler, or no headers of Python")


# -- walks -----------------------------------------------------------------------------------------------------------

SHAPES = ((), (0,), (3,), (2, 3), (2, 1, 3, 2))
STATES = ("absent", "plain", "strided", "sparse")


def parameter(shape: tuple[int, ...], dtype: torch.dtype, state: str, edits: int) -> nn.Parameter:
    """Return a parameter whose gradient is in this state, edited so many times."""
    weight = torch.ones(shape, dtype=dtype)
    param = nn.Parameter(weight.to(memory_format=torch.channels_last) if len(shape) == 4 else weight)
    if state == "plain":
        param.grad = torch.ones_like(param)
    elif state == "strided":
        param.grad = torch.ones(shape[::-1], dtype=dtype).permute(tuple(reversed(range(len(shape)))))
    elif state == "sparse":
        param.grad = torch.ones(shape, dtype=dtype).to_sparse() if shape else torch.ones(shape, dtype=dtype)
    for _ in range(edits):
        with torch.no_grad():
            param.mul_(1)
    return param


@needs_library
@given(
    st.lists(
        st.tuples(
            st.sampled_from(SHAPES),
            st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
            st.sampled_from(STATES),
            st.integers(0, 3),
        ),
        max_size=6,
    )
)
@example([((2, 3), torch.float16, "strided", 0)])
@example([((2, 3), torch.float32, "sparse", 1)])
@example([((3,), torch.float16, "plain", 0), ((3,), torch.float16, "absent", 0)])
@example([((0,), torch.bfloat16, "plain", 2), ((2, 1, 3, 2), torch.float16, "plain", 0)])
def test_walks_of_cxx_find_what_those_of_python_find(specs: list[tuple[Any, ...]]) -> None:
    """Places, versions and gradients; after a bump, and after the gradients were taken."""
    params = [parameter(*spec) for spec in specs]
    for _ in range(2):
        assert library.pointers(params) == IN_PYTHON.pointers(params)
        versions = library.versions(params)
        assert versions == IN_PYTHON.versions(params)
        assert library.gradients(params) == IN_PYTHON.gradients(params)
        by_library = library.bump(params, versions)
        assert by_library == library.versions(params)
        assert IN_PYTHON.bump(params, by_library) == IN_PYTHON.versions(params)
        library.take(params)
        assert all(param.grad is None for param in params)


@needs_library
@pytest.mark.parametrize("way", [library, IN_PYTHON], ids=["cxx", "python"])
@given(st.lists(st.integers(0, 3), max_size=4), st.integers(-1, 9), st.sampled_from(["pointers", "versions"]))
def test_parameters_stand_where_they_were_seen(way: Any, edits: list[int], place: int, what: str) -> None:
    """Unless a place, a version or their number differs; versions may be of no interest."""
    params = [parameter((2, 3), torch.float16, "absent", count) for count in edits]
    seen = {"pointers": way.pointers(params), "versions": way.versions(params)}
    assert way.stand(params, seen["pointers"], seen["versions"])
    changed = with_number(seen[what], place, 1) if 0 <= place < len(params) else seen[what] + bytes(8)
    differs = changed != seen[what]
    seen[what] = changed
    assert way.stand(params, seen["pointers"], seen["versions"]) is not differs
    assert way.stand(params, seen["pointers"], None) is not (differs and what == "pointers")


@needs_library
@pytest.mark.parametrize("way", [library, IN_PYTHON], ids=["cxx", "python"])
def test_gradients_that_were_taken_live_as_long_as_what_keeps_them(way: Any) -> None:
    """Kernels read them by address; then their memory is free."""
    params = {nn.Parameter(torch.ones(5)): "name", nn.Parameter(torch.ones(2)): "other"}
    for param in list(params)[:1]:
        param.grad = torch.ones(5)
    memory = StorageWeakRef(next(iter(params)).grad.untyped_storage())  # type: ignore[union-attr]
    kept = way.take(params)
    assert all(param.grad is None for param in params)
    assert not memory.expired()
    del kept
    assert memory.expired()


@needs_library
@given(
    st.lists(
        st.one_of(
            st.none(),
            st.dictionaries(st.sampled_from(["step", "exp_avg", "momentum_buffer"]), st.integers(0, 3), max_size=3),
        ),
        max_size=5,
    )
)
def test_what_state_holds_is_told_by_its_identity(entries: list[Any]) -> None:
    """Both ways alike, and otherwise once a value is another; what is no entry has none."""
    values = [torch.ones(1), torch.zeros(()), None, 7]
    state: dict[Any, Any] = {
        nn.Parameter(torch.ones(1)): entry and {name: values[number] for name, number in entry.items()}
        for entry in entries
    }
    seen = library.held(state)
    assert seen == IN_PYTHON.held(state)
    for entry in (entry for entry in state.values() if entry):
        for name, value in entry.items():
            entry[name] = torch.ones(1)
            assert library.held(state) != seen
            entry[name] = value
        assert library.held(state) == seen


def test_numbers_are_read_and_replaced() -> None:
    """What was packed comes back, one changed."""
    packed = IN_PYTHON.versions([torch.ones(1), torch.ones(1).mul_(2)])
    assert numbers(packed) == [number_at(packed, 0), number_at(packed, 1)] == [0, 1]
    assert numbers(with_number(packed, 0, 7)) == [7, 1]


@needs_library
def test_what_is_no_tensor_is_refused() -> None:
    """Not read as if it were one."""
    with pytest.raises(TypeError, match="must be a tensor, not int"):
        library.pointers([1])
    with pytest.raises(TypeError):
        library.versions(1)
    with pytest.raises(TypeError, match="state must be a dict, not list"):
        library.held([{}])
    with pytest.raises(TypeError, match="takes 3 arguments, given 1"):
        library.linear(torch.ones(2))
    assert len(library.bump([torch.ones(1)], b"123")) == 0


@needs_library
def test_a_launch_that_does_not_fit_is_refused() -> None:
    """Before the driver hears of it; what cannot be launched this way is left to Triton."""
    kernel = library.kernel(1, 1, 0, 32, 0, "*if")
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match=r"a kernel takes \*if, given 1 tensors and 0 numbers"):
        library.launch(kernel, 1, [x], [])
    with pytest.raises(RuntimeError, match="a launch of -1 programs"):
        library.launch(kernel, -1, [x], [1, 1.0])
    with pytest.raises(TypeError):
        library.launch(kernel, 1, [x], ["a", 1.0])
    with pytest.raises(TypeError, match="must be a tensor, not str"):
        library.launch(kernel, 1, ["a"], [1, 1.0])
    with pytest.raises(ValueError, match="PyCapsule"):
        library.launch(library.rows(), 1, [x], [1, 1.0])
    assert library.launch(kernel, 1, [x[1:]], [1, 1.0]) is False
    assert library.launch(kernel, 1, [x], [2**40, 1.0]) is False
    assert library.launch(kernel, 1, [x], [2**70, 1.0]) is False
    assert library.launch(kernel, 0, [x], [1, 1.0]) is True


@needs_library
def test_a_launch_that_is_to_be_made_again_must_fit_too() -> None:
    """When it is made ready, and what it is given later; what cannot be launched this way is left to Triton."""
    kernel, x = library.kernel(1, 1, 0, 32, 0, "**i"), torch.ones(4)
    with pytest.raises(RuntimeError, match=r"a kernel takes \*\*i, given 1 tensors and 1 numbers"):
        library.ready(kernel, 1, [x], [1])
    with pytest.raises(TypeError, match="must be a tensor, not NoneType"):
        library.ready(kernel, 1, [None, None], [1])
    with pytest.raises(TypeError, match="must be a tensor, not NoneType"):
        library.launch(kernel, 1, [x, None], [1])
    assert library.ready(kernel, 1, [x, x[1:]], [1]) is None
    assert library.ready(kernel, 1, [x, x], [2**40]) is None
    whole, part = library.ready(kernel, 0, [x, x], [1]), library.ready(kernel, 0, [x, None], [1])
    assert library.relaunch(whole) is library.relaunch(part, x) is True
    assert library.relaunch(part, x[1:]) is False
    with pytest.raises(TypeError, match="takes 1 arguments, given 2"):
        library.relaunch(whole, x)
    with pytest.raises(TypeError, match="takes 2 arguments, given 1"):
        library.relaunch(part)
    with pytest.raises(TypeError, match="must be a tensor, not int"):
        library.relaunch(part, 1)
    with pytest.raises(TypeError, match="takes a launch"):
        library.relaunch()
    with pytest.raises(ValueError, match="PyCapsule"):
        library.relaunch(kernel)


@needs_library
def test_a_launch_that_is_to_be_made_again_keeps_its_tensors() -> None:
    """Kernels read them by address."""
    x = torch.ones(4)
    memory = StorageWeakRef(x.untyped_storage())
    ready = library.ready(library.kernel(1, 1, 0, 32, 0, "*"), 0, [x], [])
    del x
    assert not memory.expired()
    del ready
    assert memory.expired()


@needs_library
@pytest.mark.parametrize("tier", ["eager", "compiled"])
def test_a_training_walked_by_cxx_is_the_same(tier: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, through an overflow, an absent gradient and an edited weight."""
    found = []
    for way in (IN_PYTHON, library):
        for room in ("bucket", "window", "roster"):
            monkeypatch.setattr(f"mixedopt.{room}.walks_for", lambda devices, way=way: way)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3), nn.Linear(3, 3))
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer = MixedPrecisionOptimizer(inner, model, loss_scale=8.0, max_grad_norm=0.1, tier=tier)
        for step in range(6):
            x = torch.randn(4, 6) * (torch.inf if step == 2 else 1)
            part: nn.Module = model[:3] if step == 3 else model
            optimizer.backward(part(x.half()).float().square().mean())
            optimizer.step()
            if step == 4:
                with torch.no_grad():
                    model[0].weight.mul_(0.5)
        found.append({name: master.detach().clone() for name, master in optimizer.named_masters()})
        found[-1]["skips"] = torch.tensor(optimizer.skipped_steps)
        found[-1]["versions"] = torch.tensor([param._version for param in model.parameters()])
    assert found[0]["skips"] == 1
    for name, value in found[0].items():
        assert torch.equal(value, found[1][name]), name


# -- linear layers ---------------------------------------------------------------------------------------------------

NEEDS = [needs for needs in itertools.product((True, False), repeat=3) if any(needs)]


def operands(
    shape: tuple[int, ...], dtype: torch.dtype, needs: tuple[bool, ...], *, bias: bool, device: torch.device = CPU
) -> list[Tensor | None]:
    torch.manual_seed(0)
    shapes = (shape, (4, shape[-1]), (4,))
    made = [torch.randn(s, device=device).to(dtype).requires_grad_(n) for s, n in zip(shapes, needs, strict=True)]
    return [*made[:2], made[2] if bias else None]


@needs_library
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("needs", NEEDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 5, 6), (2, 3, 5, 6), (1, 1, 6)])
def test_a_linear_layer_has_the_bits_of_torch(
    shape: tuple[int, ...], dtype: torch.dtype, needs: tuple[bool, ...], bias: bool, device: str
) -> None:
    """Result, gradients and their strides, whichever are wanted."""
    given = operands(shape, dtype, needs, bias=bias, device=torch.device(device))
    wanted = [tensor for tensor in given if tensor is not None and tensor.requires_grad]
    if not wanted:
        assert library.linear(*given) is None
        return
    mine, theirs = library.linear(*given), F.linear(*given)  # type: ignore[arg-type]
    assert torch.equal(mine, theirs)
    assert mine.stride() == theirs.stride()
    for slope in (torch.randn_like(theirs), torch.randn_like(theirs.mT.contiguous()).mT):
        pairs = zip(
            torch.autograd.grad(mine, wanted, slope, retain_graph=True),
            torch.autograd.grad(theirs, wanted, slope, retain_graph=True),
            strict=True,
        )
        for found, expected in pairs:
            assert torch.equal(found, expected)
            assert found.stride() == expected.stride()


@needs_library
def test_the_gradients_of_a_linear_layer_have_gradients() -> None:
    """Under ``create_graph``, as those of torch."""
    found = []
    for linear in (library.linear, F.linear):
        given: Any = operands((2, 3, 5), torch.float32, (True, True, True), bias=True)
        slopes = torch.autograd.grad(linear(*given).square().sum(), given, create_graph=True)
        again = torch.autograd.grad(sum(slope.square().sum() for slope in slopes), given)
        found.append([*slopes, *again])
    assert all(map(torch.equal, *found))


@needs_library
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of forward derivatives
def test_a_derivative_of_the_slope_goes_through() -> None:
    """Forward-mode, through backward."""
    found = []
    for linear in (library.linear, F.linear):
        x, weight, bias = operands((2, 3, 5), torch.float32, (True, True, True), bias=True)
        result = linear(x, weight, bias)
        with torch.autograd.forward_ad.dual_level():
            slope = torch.autograd.forward_ad.make_dual(torch.ones_like(result), torch.full_like(result, 2.0))
            (gradient,) = torch.autograd.grad(result, x, slope)
            found.append(torch.autograd.forward_ad.unpack_dual(gradient).tangent)
    assert found[1] is not None
    assert torch.equal(*found)


@needs_library
@pytest.mark.parametrize(("needs", "kept"), [((True, True), 2), ((True, False), 1), ((False, True), 1)])
def test_a_linear_layer_keeps_no_more_than_torch(needs: tuple[bool, bool], kept: int) -> None:
    """The input for the weight's gradient, the weight for the input's: a frozen layer keeps no activations."""
    given = operands((2, 3, 5), torch.float16, (*needs, True), bias=True)
    mine, theirs = ([each * 1 for each in given if each is not None] for _ in range(2))
    results = library.linear(*mine), F.linear(*theirs)
    memory = [[StorageWeakRef(each.untyped_storage()) for each in those[:2]] for those in (mine, theirs)]
    del mine, theirs
    found, expected = ([ref.expired() for ref in refs] for refs in memory)
    assert found == expected
    assert found.count(False) == kept
    del results
    assert all(ref.expired() for refs in memory for ref in refs)


@needs_library
@pytest.mark.parametrize("watched", [False, True])
def test_a_layer_that_runs_again_saves_the_same(watched: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpointing compares what the two forwards save: the library may be loaded, a mode in force, between them."""
    monkeypatch.setattr("mixedopt.layers.loaded", lambda: library)
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    convert(model, torch.bfloat16)
    x = torch.randn(2, 4, 6, dtype=torch.bfloat16, requires_grad=True)
    with Counting() if watched else contextlib.nullcontext():
        result = checkpoint(model[0], x, use_reentrant=False)
    with contextlib.nullcontext() if watched else Counting():
        (slope,) = torch.autograd.grad(result.sum(), x)
    assert torch.equal(slope, torch.autograd.grad(model[0](x).sum(), x)[0])


@needs_library
def test_an_edited_weight_is_noticed_in_backward() -> None:
    """As torch notices it."""
    x, weight, bias = operands((2, 3, 5), torch.float16, (True, True, True), bias=True)
    result = library.linear(x, weight, bias)
    with torch.no_grad():
        weight.mul_(2)  # type: ignore[union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Counting(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class Special(Tensor):
    pass


def under(context: Callable[[], Any]) -> Callable[[list[Any]], Any]:
    def call(given: list[Any]) -> Any:
        with context():
            return library.linear(*given)

    return call


def as_dual(given: list[Any]) -> Any:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(given[0], torch.ones_like(given[0]))
        return library.linear(dual, *given[1:])


def in_vmap(given: list[Any]) -> Any:
    served = []
    torch.func.vmap(lambda row: served.append(library.linear(row[None, None], *given[1:])) or row)(given[0][0])
    return served[0]


REFUSED: dict[str, Callable[[list[Any]], Any]] = {
    "a matrix": lambda given: library.linear(given[0][0], *given[1:]),
    "without gradients": under(torch.no_grad),
    "autocast": under(lambda: torch.autocast("cpu")),
    "a dispatch mode": under(Watching),
    "a function mode": under(Counting),
    "forward derivatives": as_dual,
    "vmap": in_vmap,
    "a subclass": lambda given: library.linear(given[0].as_subclass(Special), *given[1:]),
    "mixed dtypes": lambda given: library.linear(given[0].float(), *given[1:]),
    "a mixed bias": lambda given: library.linear(*given[:2], given[2].float()),
    "columns": lambda given: library.linear(given[0].mT.contiguous().mT, *given[1:]),
    "one row of a wider tensor": lambda given: library.linear(given[0][:, :1].transpose(0, 1)[:, :1], *given[1:]),
    "a weight of columns": lambda given: library.linear(given[0], given[1].t().contiguous().t(), given[2]),
    "every second bias": lambda given: library.linear(*given[:2], given[2].repeat_interleave(2)[::2]),
    "one value": lambda given: library.linear(
        given[0][:1, :1, :1].contiguous(), given[1][:, :1].contiguous(), given[2]
    ),
    "nothing": lambda given: library.linear(given[0][:0], *given[1:]),
    "other sizes": lambda given: library.linear(given[0][..., :2].contiguous(), *given[1:]),
    "hooks on what is saved": under(lambda: torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t)),
    "no tensor": lambda given: library.linear(3, *given[1:]),
}


@needs_library
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of forward derivatives
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_the_common_case_is_left_to_torch(case: str) -> None:
    """So that modes, transforms and errors are torch's."""
    given = operands((2, 3, 5), torch.float16, (True, True, True), bias=True)
    assert REFUSED[case](given) is None


@needs_library
@pytest.mark.parametrize("policy", [CastPolicy.default(), CastPolicy.none()])
def test_layers_of_a_converted_model_use_it(policy: CastPolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    """And train to the same bits as without."""
    found, names = [], []
    for there in (library, None):
        monkeypatch.setattr("mixedopt.layers.loaded", lambda there=there: there)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, policy=policy)
        for _ in range(3):
            loss = model(torch.randn(2, 4, 6)).square().mean()
            optimizer.backward(loss)
            optimizer.step()
        names.append(model[2](torch.ones(1, 1, 8, dtype=torch.float16)).grad_fn.name())
        found.append(torch.cat([master.flatten() for _, master in optimizer.named_masters()]))
    assert torch.equal(*found)
    assert ["Linear" in name for name in names] == [True, False]


# -- the library itself ----------------------------------------------------------------------------------------------


def test_there_is_a_library_where_there_can_be_one() -> None:
    """Else all of this would be skipped when a change to its sources does not compile."""
    headers = Path(sysconfig.get_paths()["include"], "Python.h").exists()
    assert (library is not None) == bool(cxx.compilers() and headers)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing was made or loaded, and what is made is kept in a place of its own."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    native._native.cache_clear()
    yield tmp_path
    native._native.cache_clear()
    if library is not None:
        sys.modules[native.NAME] = library


@pytest.mark.parametrize("named", ["no-such-compiler", "false"])
def test_without_a_compiler_python_does_it(
    elsewhere: Path, named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Said once, at INFO; training goes on."""
    monkeypatch.setenv("CXX", named)
    monkeypatch.setattr(cxx, "COMPILERS", ())
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        assert walks_for([torch.device("cuda")]) is IN_PYTHON
        assert walks_for([torch.device("cuda")]) is IN_PYTHON
    assert caplog.text.count("no library of C++, so the host is slower") == 1
    assert not list(elsewhere.rglob("*.so"))


def test_where_nothing_can_be_kept_python_does_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file stands where the folder should."""
    (elsewhere / "mixedopt").write_text("a file")
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        assert native.native() is None
    assert "no library of C++" in caplog.text


@needs_library
@pytest.mark.parametrize("damage", ["cut", "empty", "unnoted"])
def test_a_damaged_library_is_made_anew(damage: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To load it would end the process, each time."""
    made: list[int] = []

    def compile_(command: list[str], **options: Any) -> Any:
        made.append(1)
        Path(command[command.index("-o") + 1]).write_text("a library")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native.subprocess, "run", compile_)
    library = native._made()
    if damage == "unnoted":
        native._note(library).unlink()
    else:
        library.write_text("a lib" if damage == "cut" else "")
    assert native._made() == library
    assert library.read_text() == "a library"
    assert len(made) == 2


@needs_library
def test_what_was_made_is_kept(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process, of the same sources, torch and Python, makes nothing."""
    made: list[list[str]] = []

    def compile_(command: list[str], **options: Any) -> Any:
        made.append(command)
        Path(command[command.index("-o") + 1]).write_text("a library")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(native.subprocess, "run", compile_)
    assert native._made() == native._made()
    assert len(made) == 1
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O3"))
    native._made()
    assert len(made) == 2
    assert len(list(elsewhere.rglob("*.so"))) == 2


@needs_library
def test_the_compiled_tier_of_a_cpu_is_walked_by_cxx(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for speed gets it: the library is asked for, and used."""
    asked: list[bool] = []
    monkeypatch.setattr("mixedopt.tiers.native", lambda: asked.append(True))
    inner = torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0, tier="compiled")
    assert optimizer._tier.window._walks is library
    assert asked


def test_a_cpu_needs_no_library(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for a compiler there."""
    monkeypatch.setattr(walks, "native", lambda: pytest.fail("asked for"))
    model = nn.Linear(2, 2)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.backward(model(torch.ones(1, 2)).sum())
    optimizer.step()
