"""Half activations, fp32 weights: what the norms return is the cast-up result, rounded once."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mixedopt import norms
from mixedopt.layers import NATIVE, NORMS, MixedGroupNorm, MixedLayerNorm, MixedRMSNorm
from mixedopt.native import native
from mixedopt.norms import group_norm, layer_norm, rms_norm

# Of the greatest value: a kernel may sum in another order than torch, and so round to the neighbour.
ONE_ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
# Of the greatest value of an fp32 sum of up to a few thousand terms, taken in another order.
SUM_ORDER = 1e-5
# Of one rounding: torch's batch norms round partial sums for the weights to half on CUDA (measured: 2, in bf16).
PARTIAL_SUMS = 4


@dataclass(frozen=True)
class Case:
    """A module and the shape of its input."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


CASES = {
    "layer": Case(lambda: nn.LayerNorm(24), (3, 5, 24)),
    "layer, no bias": Case(lambda: nn.LayerNorm(24, bias=False), (7, 24)),
    "layer, two dimensions": Case(lambda: nn.LayerNorm((3, 50)), (4, 3, 50)),
    "layer, one row": Case(lambda: nn.LayerNorm(24), (24,)),
    "layer, no rows": Case(lambda: nn.LayerNorm(24), (0, 24)),
    "layer, odd and wide": Case(lambda: nn.LayerNorm(5001), (3, 5001)),
    "layer, wider than a pass": Case(lambda: nn.LayerNorm(8200), (3, 8200)),
    "layer, wider than a kernel": Case(lambda: nn.LayerNorm(16400), (2, 16400)),
    "layer, many rows": Case(lambda: nn.LayerNorm(8), (3000, 8)),
    "rms": Case(lambda: nn.RMSNorm(24), (3, 5, 24)),
    "rms, eps": Case(lambda: nn.RMSNorm((3, 7), eps=0.1), (2, 3, 7)),
    "group": Case(lambda: nn.GroupNorm(3, 6), (2, 6, 5, 5)),
    "group, aligned": Case(lambda: nn.GroupNorm(2, 12), (3, 12, 8, 8)),
    "group, long lines": Case(lambda: nn.GroupNorm(4, 4), (2, 4, 50, 70)),
    "group, no pixels": Case(lambda: nn.GroupNorm(2, 40), (5, 40)),
    "group, odd sizes": Case(lambda: nn.GroupNorm(1, 3), (1, 3, 7)),
    "group, no samples": Case(lambda: nn.GroupNorm(2, 4), (0, 4, 3)),
}
KINDS = ("layer", "rms", "group")
MIXED = {nn.LayerNorm: MixedLayerNorm, nn.RMSNorm: MixedRMSNorm, nn.GroupNorm: MixedGroupNorm}


def build(name: str, device: torch.device) -> nn.Module:
    """Return the mixed module of a case, with weights that half cannot hold."""
    module = CASES[name].make().to(device)
    for param in module.parameters():
        nn.init.normal_(param, 1.0, 0.5)
    module.__class__ = MIXED[type(module)]
    return module


def activations(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> Tensor:
    return (torch.randn(shape, device=device) * 2 + 1).to(dtype).requires_grad_()


def plain(module: nn.Module, x: Tensor) -> Tensor:
    """Return what torch's own class computes."""
    return type(module).__bases__[0].forward(module, x)


def cast_up(module: nn.Module, x: Tensor) -> Tensor:
    """Return the reference: up, normalise, round once."""
    return plain(module, x.float()).to(x.dtype)


def gradients(module: nn.Module, x: Tensor, y: Tensor) -> list[Tensor]:
    """Return dx, dweight, dbias for the same gradient of ``y`` each time."""
    generator = torch.Generator().manual_seed(1)
    dy = torch.randn(y.shape, generator=generator).to(y)
    return list(torch.autograd.grad(y, [x, *module.parameters()], dy))


def assert_close(got: Tensor, expected: Tensor) -> None:
    """Assert equal bits on a CPU, where the operations are the same, and one rounding on a GPU."""
    assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
    if got.device.type == "cpu":
        assert torch.equal(expected, got)
    elif expected.numel():
        bound = ONE_ROUNDING.get(got.dtype, SUM_ORDER) * expected.abs().max().item()
        assert (got.double() - expected.double()).abs().max().item() <= bound


def assert_all_close(got: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(got, expected, strict=True):
        assert_close(one, other)


# -- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_a_mixed_norm_is_the_cast_up_norm(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Forward and backward; dx is half, dweight and dbias are fp32."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype)
    y, expected = module(x), cast_up(module, x)
    assert y is not expected
    assert_close(y, expected)
    assert_all_close(gradients(module, x, y), gradients(module, x, expected))
    assert all(grad.dtype is torch.float32 for grad in gradients(module, x, module(x))[1:])


@pytest.mark.parametrize("name", KINDS)
def test_the_weights_are_not_rounded(name: str, device: torch.device) -> None:
    """A weight that half cannot hold counts in full: the result is nearer to it than half weights could bring it."""
    module, x = build(name, device), activations(CASES[name].shape, device, torch.bfloat16)
    nn.init.constant_(module.weight, 1 + 2.0**-8 + 2.0**-9)  # halfway up to the next value of bf16
    rounded = copy.deepcopy(module).bfloat16()
    assert_close(module(x), cast_up(module, x))
    assert not torch.equal(module(x), rounded(x))


@pytest.mark.parametrize("name", KINDS)
def test_gradients_of_the_weights_are_summed_in_fp32(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """4097 ones are 4097, which neither half format has."""
    case = {"layer": (4097, 8), "rms": (4097, 8), "group": (4097, 8)}[name]
    module = {"layer": nn.LayerNorm(8), "rms": nn.RMSNorm(8), "group": nn.GroupNorm(2, 8)}[name].to(device)
    module.__class__ = MIXED[type(module)]
    x = torch.tensor([1.0, -1.0], device=device).repeat(4).expand(case).to(dtype)
    module(x).backward(torch.ones(case, device=device, dtype=dtype))
    last = module.weight.grad.abs() if name == "rms" else module.bias.grad
    assert_close(last, torch.full((8,), 4097.0, device=device))


@pytest.mark.parametrize("name", KINDS)
def test_a_large_mean_costs_no_precision(name: str, device: torch.device) -> None:
    """The variance is taken about the mean, not as a difference of squares."""
    module = build(name, device)
    x = (torch.randn(CASES[name].shape, device=device) + 1000).half().requires_grad_()
    y, expected = module(x), cast_up(module, x)
    assert_close(y, expected)
    assert_close(gradients(module, x, y)[0], gradients(module, x, expected)[0])


@pytest.mark.parametrize("name", KINDS)
def test_layout_changes_nothing(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Strided, channels-last and expanded inputs, and gradients that are no dense memory."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype)
    moved = x.detach().transpose(0, 1).contiguous().transpose(0, 1)
    wide = torch.cat([x.detach(), x.detach()], dim=-1)[..., : x.shape[-1]]
    layouts = [moved, wide, x.detach()[:1].expand_as(x)]
    if x.dim() == 4:
        layouts.append(x.detach().contiguous(memory_format=torch.channels_last))
    for layout in layouts:
        assert not layout.is_contiguous()
        one, other = (layout.detach().requires_grad_() for _ in range(2))
        y, expected = module(one), cast_up(module, other)
        assert_close(y, expected)
        dy = torch.ones((), device=device, dtype=dtype).expand_as(y)
        params = list(module.parameters())
        got = torch.autograd.grad(y, [one, *params], dy)
        assert_all_close(list(got[1:]), list(torch.autograd.grad(expected, [other, *params], dy))[1:])


def test_rms_norm_takes_the_epsilon_of_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """``eps=None`` is what casting up would take, also without a weight."""
    x = torch.full((2, 4), 1e-4, device=device).to(dtype)
    for weight in (None, torch.full((4,), 1.5, device=device)):
        assert_close(rms_norm(x, (4,), weight), F.rms_norm(x.float(), (4,), weight).to(dtype))


def test_without_weights_torch_computes(device: torch.device, dtype: torch.dtype) -> None:
    """Its half kernels are fp32 inside: to one rounding the cast-up result."""
    x = activations((2, 6, 8), device, dtype)
    pairs = [
        (layer_norm(x, (8,)), F.layer_norm(x.float(), (8,))),
        (rms_norm(x, (8,)), F.rms_norm(x.float(), (8,))),
        (group_norm(x, 3), F.group_norm(x.float(), 3)),
    ]
    for got, expected in pairs:
        for one, other in [
            (got, expected.to(dtype)),
            tuple(torch.autograd.grad(y.sum(), x)[0] for y in (got, expected)),
        ]:
            assert one.dtype is dtype
            assert (one - other).abs().max() <= ONE_ROUNDING[dtype] * max(other.abs().max(), 1)


def test_a_bias_alone_is_added_before_rounding(device: torch.device, dtype: torch.dtype) -> None:
    """The functions take a bias without a weight."""
    x, bias = activations((5, 8), device, dtype), torch.randn(8, device=device)
    assert torch.equal(F.layer_norm(x.float(), (8,), None, bias).to(dtype), layer_norm(x, (8,), None, bias))


# -- who else computes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_one_dtype_is_left_to_torch(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """All fp32, all half, all fp64: bit for bit the parent class."""
    for kind in (torch.float32, torch.float64, dtype):
        module, x = build(name, device).to(kind), activations(CASES[name].shape, device, kind)
        assert torch.equal(plain(module, x), module(x))
        assert kind is module(x).dtype


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    ("of_x", "of_weight"), [("float32", "float16"), ("float64", "float32"), ("float16", "bfloat16")]
)
def test_other_pairs_are_computed_in_the_wider(name: str, of_x: str, of_weight: str, device: torch.device) -> None:
    """And come back in the dtype of x."""
    module = build(name, device).to(getattr(torch, of_weight))
    x = activations(CASES[name].shape, device, getattr(torch, of_x))
    wide = torch.promote_types(x.dtype, module.weight.dtype)
    expected = plain(copy.deepcopy(module).to(wide), x.to(wide)).to(x.dtype)
    assert torch.equal(expected, module(x))


def test_what_torch_refuses_is_refused(device: torch.device) -> None:
    """With torch's own words."""
    x, weight = torch.zeros(2, 6, device=device, dtype=torch.half), torch.ones(6, device=device)
    with pytest.raises(RuntimeError, match="normalized_shape"):
        layer_norm(x, (5,), weight[:5])
    with pytest.raises(RuntimeError, match="weight"):
        rms_norm(x, (6,), weight[:5])
    with pytest.raises(RuntimeError, match="divisible by"):
        group_norm(x, 4, weight)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        group_norm(x[:1, :1], 1, weight[:1])


@pytest.mark.parametrize("name", KINDS)
def test_a_compiled_norm_is_one_graph(name: str, device: torch.device) -> None:
    """Traced whole, with the casts for the compiler to fuse."""
    module, x = build(name, device), activations(CASES[name].shape, device, torch.float16)
    torch.compiler.reset()
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(x)
    assert_close(y, cast_up(module, x))
    assert_all_close(gradients(module, x, y), gradients(module, x, cast_up(module, x)))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own jvp
@pytest.mark.parametrize("name", KINDS)
def test_transforms_go_through(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """vmap, grad, jvp, and dual numbers."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype).detach()
    assert_close(torch.func.vmap(module)(torch.stack([x, -x]))[0], cast_up(module, x))
    slope = torch.func.grad(lambda x: module(x).float().square().sum())(x)
    assert_close(slope, torch.func.grad(lambda x: cast_up(module, x).float().square().sum())(x))
    _, tangent = torch.func.jvp(module, (x,), (torch.ones_like(x),))
    assert_close(tangent, torch.func.jvp(lambda x: cast_up(module, x), (x,), (torch.ones_like(x),))[1])
    with torch.autograd.forward_ad.dual_level():
        dual = module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
        assert_close(torch.autograd.forward_ad.unpack_dual(dual).tangent, tangent)


# -- autograd --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", KINDS)
def test_a_gradient_penalty_is_that_of_the_cast_up_norm(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Backward is differentiable: with respect to x, the weights, and the gradient that came in."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype)

    def penalty(forward: Callable[[nn.Module, Tensor], Tensor]) -> list[Tensor]:
        inside = x * 1
        y = forward(module, inside)
        dy = torch.linspace(0, 1, y.numel(), device=device).view_as(y).to(dtype).requires_grad_()
        slopes = torch.autograd.grad(y, [inside, *module.parameters()], dy, create_graph=True)
        total = torch.stack([slope.float().square().sum() for slope in slopes]).sum()
        return list(torch.autograd.grad(total, [x, module.weight, dy]))

    got, expected = penalty(lambda module, x: module(x)), penalty(cast_up)
    assert_all_close(got, expected)
    assert all(grad.abs().max() > 0 for grad in got)


@pytest.mark.parametrize("name", KINDS)
def test_what_is_frozen_gets_no_gradient(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Every choice among x, weight and bias gives the same gradients as all three."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype)
    tensors = [x, *module.parameters()]
    full = gradients(module, x, module(x))
    for choice in range(1, 2 ** len(tensors)):
        wanted = [bool(choice >> place & 1) for place in range(len(tensors))]
        for tensor, want in zip(tensors, wanted, strict=True):
            tensor.grad = None
            tensor.requires_grad_(want)
        y = module(x)
        y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y))
        for tensor, want, expected in zip(tensors, wanted, full, strict=True):
            assert (tensor.grad is not None) == want
            assert not want or torch.equal(expected, tensor.grad)
    for tensor in tensors:
        tensor.requires_grad_(False)
    assert not module(x).requires_grad


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_and_no_grad_change_nothing(name: str, use_reentrant: bool, device: torch.device) -> None:
    """Same bits with the activations made again, and without a graph."""
    module, x = build(name, device), activations(CASES[name].shape, device, torch.bfloat16)
    y = module(x)
    again = checkpoint(module, x, use_reentrant=use_reentrant)
    assert torch.equal(y, again)
    again.backward(torch.ones_like(y))
    assert torch.equal(torch.autograd.grad(y, x, torch.ones_like(y))[0], x.grad)
    with torch.no_grad():
        assert torch.equal(y, module(x))
    with torch.inference_mode():
        assert torch.equal(y, module(x))


@pytest.mark.parametrize("name", KINDS)
def test_only_the_input_itself_is_saved(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """No copy of x, and no fp32 tensor of its size."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        module(x)
    kept = {tensor.data_ptr() for tensor in (x, *module.parameters())}
    own = sum(tensor.nbytes for tensor in saved if tensor.data_ptr() not in kept)
    assert x.data_ptr() in {tensor.data_ptr() for tensor in saved}
    assert own <= 4 * 2 * 6  # mean and rstd of at most six groups


def test_a_write_to_the_input_is_noticed(device: torch.device, dtype: torch.dtype) -> None:
    """As by torch's own norm: the saved x is versioned."""
    module, x = build("layer", device), activations((3, 24), device, dtype)
    inside = x * 1
    y = module(inside)
    inside.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# -- modules ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plain_class", MIXED, ids=lambda cls: cls.__name__)
def test_a_mixed_class_adds_nothing_but_forward(plain_class: type[nn.Module]) -> None:
    """So that ``__class__`` can go either way."""
    mixed = MIXED[plain_class]
    assert (plain_class,) == mixed.__bases__
    assert {"forward", "output"} == {name for name in vars(mixed) if not name.startswith("_")}
    for dtype, kind in NORMS[plain_class].items():
        assert (mixed,) == kind.__bases__
        assert {"output": dtype} == {name: value for name, value in vars(kind).items() if not name.startswith("_")}


@pytest.mark.parametrize("name", KINDS)
def test_a_class_swap_goes_there_and_back(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """The same attributes, parameters and keys; off again, it is what it was."""
    module, x = CASES[name].make().to(device), activations(CASES[name].shape, device, torch.float32)
    before, params, kind = dict(module.__dict__), list(module.parameters()), type(module)
    expected = module(x)
    module.__class__ = MIXED[kind]
    assert dtype is module(x.to(dtype)).dtype
    module.__class__ = kind
    assert before == module.__dict__
    assert all(one is other for one, other in zip(params, module.parameters(), strict=True))
    assert torch.equal(expected, module(x))


@pytest.mark.parametrize("name", KINDS)
def test_a_mixed_norm_survives_a_copy(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """deepcopy, pickle, torch.save."""
    module, x = build(name, device), activations(CASES[name].shape, device, dtype)
    buffer = io.BytesIO()
    torch.save(module, buffer)
    buffer.seek(0)
    copies = [copy.deepcopy(module), pickle.loads(pickle.dumps(module)), torch.load(buffer, weights_only=False)]
    for twin in copies:
        assert type(twin) is type(module)
        assert twin is not module
        assert torch.equal(module(x), twin(x))


@pytest.mark.parametrize("kind", NATIVE, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
def test_torch_serves_the_other_norms(
    kind: type[nn.Module], training: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Half in and out, fp32 weights, statistics and gradients of the weights."""
    module = kind(6, affine=True, track_running_stats=True).to(device).train(training)
    nn.init.normal_(module.weight)
    reference = copy.deepcopy(module)
    x = activations((4, 6, 5, 5, 5)[: 2 + int(kind.__name__[-2])], device, dtype)
    y, expected = module(x), reference(x.float()).to(dtype)
    results = [y, *gradients(module, x, y)], [expected, *gradients(reference, x, expected)]
    for got, other, factor in zip(*results, (1, 1, PARTIAL_SUMS, PARTIAL_SUMS), strict=True):
        assert got.dtype is other.dtype
        assert (got.float() - other.float()).abs().max() <= factor * ONE_ROUNDING[dtype] * other.abs().max()
    for got, other in zip(module.buffers(), reference.buffers(), strict=True):
        torch.testing.assert_close(got, other)


# -- on a GPU --------------------------------------------------------------------------------------------------------


def saved_bytes(call: Callable[[], Tensor]) -> tuple[int, int]:
    """Return what a forward leaves allocated beside its result, and its peak."""
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    y = call()
    left = torch.cuda.memory_allocated() - start - y.nbytes
    return left, torch.cuda.max_memory_allocated() - start


class NothingKnown(norms._Fast):
    """C++ knows no norm, and learns none."""

    def learn_(self, *args: object) -> None:
        """Learn nothing."""


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_memory_is_that_of_the_half_kernel(name: str, dtype: torch.dtype) -> None:
    """What forward leaves and its peak: at most 3 % of an activation more than torch's all-half norm."""
    shape = {"group": (8, 320, 32, 32)}.get(name, (4096, 768))
    make = {"layer": lambda: nn.LayerNorm(768), "rms": lambda: nn.RMSNorm(768), "group": lambda: nn.GroupNorm(32, 320)}
    half = make[name]().cuda().to(dtype)
    mixed = make[name]().cuda()
    mixed.__class__ = MIXED[type(mixed)]
    source = activations(shape, torch.device("cuda"), dtype)

    def total(module: nn.Module) -> tuple[int, int]:
        module(source).sum().backward()  # compiles
        return saved_bytes(lambda: module(source * 1))

    slack = 0.03 * source.nbytes
    for got, expected in zip(total(mixed), total(half), strict=True):
        assert got <= expected + slack


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_are_used_and_give_the_same_bits_again(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No atomics, whether Python or C++ launches; and on this GPU the fallback does not serve."""
    module, x = build(name, torch.device("cuda")), activations(CASES[name].shape, torch.device("cuda"), dtype)
    with monkeypatch.context() as patch:
        patch.setattr(norms, "_fast", NothingKnown)
        y = module(x)
        assert type(y.grad_fn).__name__ == "_FusedBackward"
        first, second = gradients(module, x, y), gradients(module, x, module(x))
        assert all(map(torch.equal, first, second))
    for _ in range(3):  # from the third on C++ launches all of the kernels
        z = module(x)
        assert torch.equal(y, z)
        assert all(map(torch.equal, first, gradients(module, x, z)))
    assert ("RowNorm" in z.grad_fn.name()) == (name != "group" and native() is not None)
    with torch.no_grad():
        assert torch.equal(y, module(x))


@pytest.mark.gpu
@pytest.mark.parametrize("name", KINDS)
def test_memory_at_an_odd_place_is_served(name: str, dtype: torch.dtype) -> None:
    """Views that start at no 16 bytes, before and after one that does."""
    module, shape = build(name, torch.device("cuda")), CASES[name].shape
    flat = torch.randn(torch.Size(shape).numel() + 1, device="cuda").to(dtype)
    weights = torch.randn(module.weight.numel() + 1, device="cuda")
    for start in (1, 0, 1):
        x = flat[start : start + torch.Size(shape).numel()].view(shape).detach().requires_grad_()
        module.weight = nn.Parameter(weights[start : start + module.weight.numel()].view_as(module.weight))
        y, expected = module(x), cast_up(module, x)
        assert_close(y, expected)
        assert_all_close(gradients(module, x, y), gradients(module, x, expected))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
@pytest.mark.parametrize("name", KINDS)
def test_a_norm_runs_where_its_input_is(name: str, dtype: torch.dtype) -> None:
    """Not on the current device."""
    for place in (0, 1):
        device = torch.device("cuda", place)
        module, x = build(name, device), activations(CASES[name].shape, device, dtype)
        y, expected = module(x), cast_up(module, x)
        assert_close(y, expected)
        assert_all_close(gradients(module, x, y), gradients(module, x, expected))


@pytest.mark.gpu
def test_without_the_kernels_the_result_is_the_same(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU without Triton: casts within the call, nothing more saved."""
    module, x = build("layer", torch.device("cuda")), activations((64, 24), torch.device("cuda"), dtype)
    y, slopes = module(x), gradients(module, x, module(x))
    monkeypatch.setattr(norms, "_kernels", lambda device: None)
    monkeypatch.setattr(norms, "_fast", NothingKnown)
    other = module(x)
    assert "_TransientBackward" == type(other.grad_fn).__name__
    assert_close(y, other)
    assert_all_close(slopes, gradients(module, x, other))


@pytest.mark.gpu
@pytest.mark.parametrize("calls", [1, 3])
def test_a_cuda_graph_holds_forward_and_backward(calls: int, dtype: torch.dtype) -> None:
    """Nothing syncs, and the launches go to the stream that captures."""
    module, x = build("layer", torch.device("cuda")), activations((64, 24), torch.device("cuda"), dtype)
    dy = torch.ones_like(x)
    for _ in range(calls):
        torch.autograd.grad(module(x), [x, module.weight], dy)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        slopes = torch.autograd.grad(module(x), [x, module.weight], dy)
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    assert_all_close(list(slopes), list(torch.autograd.grad(module(x), [x, module.weight], dy)))
