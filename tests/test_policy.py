"""The cast policy: what becomes half, what stays fp32, and the way back."""

from __future__ import annotations

import copy
import dataclasses
import io
import warnings
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    assert_same,
    differs,
    fp32_twin,
    hook_counts,
    loss_of,
    masters_of,
    seeded,
    train,
    two_group_model,
    two_groups,
    wrapped,
)
from models import adamw as make_adamw
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from mixedopt import CastPolicy, MixedPrecisionOptimizer, PolicyHandle, convert
from mixedopt.layers import NATIVE, NORMS

# Rotary cosines over 2048 positions: fp32 is exact to 1e-4, half is off by 0.3.
ROTARY_ERROR = 1e-3
# A two-layer encoder in bf16 (8 bits of mantissa) against fp32, outputs of size 1.
ENCODER_ERROR = 0.1

POINTWISE = {2: lambda: nn.Linear(4, 4), 3: lambda: nn.Conv1d(4, 4, 1), 4: lambda: nn.Conv2d(4, 4, 1)}
SHAPES = {2: (6, 4), 3: (3, 4, 5), 4: (2, 4, 3, 3)}


# Torch sums fp32 statistics of half values in another order than those of fp32 values.
STATISTICS = 1e-5


class MyNorm(nn.LayerNorm):
    pass


ISLANDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "LayerNorm": (lambda: nn.LayerNorm(4), 2),
    "LayerNorm-plain": (lambda: nn.LayerNorm(4, elementwise_affine=False), 2),
    "LayerNorm-subclass": (lambda: MyNorm(4), 2),
    "RMSNorm": (lambda: nn.RMSNorm(4), 2),
    "GroupNorm": (lambda: nn.GroupNorm(2, 4), 3),
    "BatchNorm1d": (lambda: nn.BatchNorm1d(4), 2),
    "BatchNorm1d-plain": (lambda: nn.BatchNorm1d(4, affine=False), 2),
    "BatchNorm1d-untracked": (lambda: nn.BatchNorm1d(4, track_running_stats=False), 2),
    "BatchNorm2d": (lambda: nn.BatchNorm2d(4), 4),
    "InstanceNorm1d": (lambda: nn.InstanceNorm1d(4), 3),
    "InstanceNorm2d-affine": (lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True), 4),
    "Softmax": (lambda: nn.Softmax(-1), 2),
    "Softmin": (lambda: nn.Softmin(-1), 2),
    "Softmax2d": (lambda: nn.Softmax2d(), 4),
}


def watch(model: nn.Module) -> dict[str, torch.dtype]:
    """Return a dict that fills with the input dtype of every module that is called."""
    seen: dict[str, torch.dtype] = {}

    def note(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        return lambda module, args: seen.__setitem__(name, args[0].dtype) if args else None

    for name, module in model.named_modules():
        module.register_forward_pre_hook(note(name))
    return seen


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kind", list(ISLANDS))
def test_norm_and_softmax_modules_compute_in_fp32(
    kind: str, training: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """An island computes what fp32 computes, and its half neighbours see half; a norm layer widens inside."""
    make, dims = ISLANDS[kind]
    model = seeded(lambda: nn.Sequential(POINTWISE[dims](), make(), POINTWISE[dims]()), device).train(training)
    for name, value in model[1].state_dict().items():
        value.fill_(3 if name == "num_batches_tracked" else 0.3)  # fresh statistics would change nothing in eval
    reference = copy.deepcopy(model[1])
    convert(model, dtype)
    inputs, outputs = [], []
    model[0].register_forward_hook(lambda module, args, out: inputs.append(out.detach()))
    model[1].register_forward_hook(lambda module, args, out: outputs.append(out.detach()))
    seen = watch(model)

    result = model(torch.randn(SHAPES[dims], device=device))

    widens_inside = type(reference) in {*NORMS, *NATIVE} and getattr(reference, "weight", None) is not None
    widens_inside |= type(reference) in NORMS
    assert seen == {"": dtype, "0": dtype, "1": dtype if widens_inside else torch.float32, "2": dtype}
    assert result.dtype == torch.float32
    assert {p.dtype for p in (*model[0].parameters(), *model[2].parameters())} == {dtype}
    assert all(value.dtype != dtype for value in model[1].state_dict().values())
    assert inputs[0].dtype == outputs[0].dtype == dtype
    assert torch.equal(outputs[0], reference(inputs[0].float()).to(dtype))
    assert differs(inputs[0], outputs[0])
    torch.testing.assert_close(model[1].state_dict(), reference.state_dict(), rtol=STATISTICS, atol=0)


class InsideLoss(nn.Module):
    """A model that works out its own loss."""

    def __init__(self, loss: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.loss = loss

    def forward(self, x: Tensor, target: Tensor | None = None) -> Any:
        out = self.body(x)
        return self.loss(out) if target is None else self.loss(out, target)


@pytest.mark.parametrize(
    ("make", "floating_target"),
    [(nn.CrossEntropyLoss, False), (nn.MSELoss, True), (nn.BCEWithLogitsLoss, True), (nn.SmoothL1Loss, True)],
)
def test_loss_modules_inside_a_model_compute_in_fp32(
    make: Callable[[], nn.Module], floating_target: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """A loss module meets fp32 inputs and targets, and its result is not rounded."""
    model = seeded(lambda: InsideLoss(make()), device)
    convert(model, dtype)
    seen = watch(model)
    targets = []
    model.loss.register_forward_pre_hook(lambda module, args: targets.append(args[1].dtype))
    outputs = []
    model.loss.register_forward_hook(lambda module, args, out: outputs.append(out))
    target = torch.rand(3, 4, device=device) if floating_target else torch.tensor([0, 3, 1], device=device)
    loss = model(torch.randn(3, 4, device=device), target)
    assert seen == {"": dtype, "body": dtype, "loss": torch.float32}
    assert targets == [torch.float32 if floating_target else torch.int64]
    assert outputs[0].dtype == loss.dtype == torch.float32
    assert not torch.equal(loss, loss.to(dtype).float())


def test_log_softmax_stays_fp32_up_to_the_loss(device: torch.device, dtype: torch.dtype) -> None:
    """The output of ``LogSoftmax`` goes into a loss: it is not rounded to half in between."""
    model = seeded(lambda: InsideLoss(nn.LogSoftmax(-1)), device)
    convert(model, dtype)
    seen = watch(model)
    out = model(torch.randn(3, 4, device=device))
    assert seen["loss"] == torch.float32
    assert differs(out, out.to(dtype).float())


def test_adaptive_log_softmax_is_one_island(device: torch.device, dtype: torch.dtype) -> None:
    """A loss module with layers of its own stays whole in fp32, named tuple and all."""
    model = seeded(lambda: InsideLoss(nn.AdaptiveLogSoftmaxWithLoss(4, 6, [2, 4], div_value=1.0)), device)
    convert(model, dtype)
    out = model(torch.randn(3, 4, device=device), torch.tensor([0, 3, 5], device=device))
    assert {p.dtype for p in model.loss.parameters()} == {torch.float32}
    assert out.output.dtype == out.loss.dtype == torch.float32


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return torch.nn.utils.weight_norm(module)


@pytest.mark.parametrize(
    "reparametrize",
    [parametrizations.weight_norm, parametrizations.spectral_norm, old_weight_norm, torch.nn.utils.spectral_norm],
    ids=["weight_norm", "spectral_norm", "old_weight_norm", "old_spectral_norm"],
)
def test_parametrized_modules_stay_whole_in_fp32(
    reparametrize: Callable[[nn.Module], nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """A weight that is computed from others is computed in fp32, and trains."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), reparametrize(nn.Linear(4, 4)), nn.Linear(4, 2)), device)
    optimizer = MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype, loss_scale=SMALL_SCALE)
    seen = watch(model)
    before = masters_of(optimizer)
    optimizer.backward(model(torch.randn(3, 4, device=device)).square().mean())
    optimizer.step()
    assert optimizer.last_step.applied
    assert (seen["0"], seen["1"], seen["2"]) == (dtype, torch.float32, dtype)
    assert {value.dtype for value in model[1].state_dict().values()} == {torch.float32}
    assert model[1].weight.dtype == torch.float32
    assert all(differs(value, before[name]) for name, value in masters_of(optimizer).items() if name.startswith("1."))


# -- what goes in and what comes out ------------------------------------------


Point = namedtuple("Point", "place index")


@dataclasses.dataclass(frozen=True)
class Sample:
    x: Tensor
    ids: Tensor
    label: str


class Echo(nn.Module):
    """Keeps what it was given, and returns it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.got = args[0] if args else kwargs["value"]
        return self.got


NESTINGS: dict[str, tuple[Callable[[Tensor, Tensor], Any], Callable[[Any], tuple[Tensor, Tensor]]]] = {
    "list": (lambda x, i: [x, [i]], lambda v: (v[0], v[1][0])),
    "tuple": (lambda x, i: (i, (x,)), lambda v: (v[1][0], v[0])),
    "dict": (lambda x, i: {"extra": {"x": x}, "ids": i}, lambda v: (v["extra"]["x"], v["ids"])),
    "namedtuple": (lambda x, i: Point(x, i), lambda v: (v.place, v.index)),
    "dataclass": (lambda x, i: Sample(x, i, "text"), lambda v: (v.x, v.ids)),
    "bare": (lambda x, i: x, lambda v: (v, torch.tensor([5000]))),
}


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
@pytest.mark.parametrize("nesting", list(NESTINGS))
def test_floating_inputs_become_half_and_outputs_fp32(
    nesting: str, keyword: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Wherever a floating tensor sits, the model sees it half and the caller gets it fp32."""
    pack, unpack = NESTINGS[nesting]
    x, ids = torch.tensor([0.1, 3.0], device=device), torch.tensor([5000], device=device)
    value = pack(x, ids)
    model = Echo().to(device)
    convert(model, dtype)
    out = model(value=value) if keyword else model(value)
    inside, inside_ids = unpack(model.got)
    outside, outside_ids = unpack(out)
    assert type(out) is type(model.got) is type(value)
    assert torch.equal(inside, x.to(dtype))
    assert torch.equal(outside, x.to(dtype).float())
    assert inside.dtype == dtype
    assert outside.dtype == torch.float32
    if nesting != "bare":
        assert inside_ids is outside_ids is ids
    assert unpack(value)[0] is x  # the caller's value is not written


def test_doubles_are_cast_too(device: torch.device, dtype: torch.dtype) -> None:
    """A float64 input is a floating input."""
    model = Echo().to(device)
    convert(model, dtype)
    out = model(torch.ones(2, dtype=torch.float64, device=device))
    assert (model.got.dtype, out.dtype) == (dtype, torch.float32)


@pytest.mark.parametrize(
    "value",
    [torch.arange(5001), torch.tensor([True, False]), torch.tensor([1 + 2j]), torch.tensor([3], dtype=torch.uint8)],
    ids=["ids", "bool", "complex", "uint8"],
)
def test_integers_bools_and_complex_pass_untouched(value: Tensor, device: torch.device, dtype: torch.dtype) -> None:
    """Ids over 2048 would be other ids in half: what is not floating is not cast."""
    value = value.to(device)
    model = Echo().to(device)
    convert(model, dtype)
    assert model(value) is value
    assert model.got is value


def test_token_ids_up_to_5000_find_their_rows(device: torch.device, dtype: torch.dtype) -> None:
    """Every id reaches the embedding as it was given."""
    model = seeded(lambda: nn.Sequential(nn.Embedding(5001, 2)), device)
    convert(model, dtype)
    ids = torch.tensor([257, 2049, 4999, 5000], device=device)
    assert torch.equal(model(ids), model[0].weight[ids].float())
    assert model[0].weight.dtype == dtype


def test_gradients_reach_an_fp32_input(device: torch.device, dtype: torch.dtype) -> None:
    """The casts at the model's doors are differentiable."""
    model = seeded(lambda: nn.Linear(4, 1), device)
    convert(model, dtype)
    x = torch.randn(3, 4, device=device, requires_grad=True)
    model(x).sum().backward()
    assert torch.equal(x.grad, model.weight.detach().float().expand(3, 4))


# -- fp32 values on the way ---------------------------------------------------


class Positional(nn.Module):
    """Half embedding plus an fp32 table, into a half layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.register_buffer("table", torch.linspace(0, 1, 4))
        self.mix = nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.mix(self.embedding(ids) + self.table)


class OwnMaths(nn.Module):
    """The user's own fp32 maths between two half layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(input=self.first(x).float().exp().log1p())


@pytest.mark.parametrize(
    ("make", "value", "last"),
    [(Positional, torch.arange(3), "mix"), (OwnMaths, torch.ones(3, 4), "second")],
    ids=["buffer", "maths"],
)
def test_an_fp32_value_is_cast_where_it_meets_a_half_layer(
    make: Callable[[], nn.Module], value: Tensor, last: str, device: torch.device, dtype: torch.dtype
) -> None:
    """fp32 buffers and fp32 maths meet half layers without a dtype error, and train."""
    model = seeded(make, device)
    optimizer = MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype, loss_scale=SMALL_SCALE)
    seen: list[torch.dtype] = []
    model.get_submodule(last).register_forward_hook(lambda module, args, out: seen.append(out.dtype))
    optimizer.backward(model(value.to(device)).square().mean())
    optimizer.step()
    assert optimizer.last_step.applied
    assert seen == [dtype]
    assert all(buffer.dtype == torch.float32 for buffer in model.buffers())


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, 32, 2) / 32.0), persistent=False)

    def forward(self, count: int) -> Tensor:
        positions = torch.arange(count, device=self.inv_freq.device)
        return torch.outer(positions.to(self.inv_freq.dtype), self.inv_freq).cos()


def test_rotary_frequencies_keep_their_precision(device: torch.device, dtype: torch.dtype) -> None:
    """A non-persistent fp32 buffer stays fp32; a model-wide cast would lose the angles."""
    expected = Rotary().to(device)(2048)
    model = Rotary().to(device)
    before = model.inv_freq.clone()
    convert(model, dtype)
    assert model.proj.weight.dtype == dtype
    assert_same(before, model.inv_freq)
    assert float((model(2048) - expected).abs().max()) < ROTARY_ERROR
    assert float((Rotary().to(device, dtype)(2048).float() - expected).abs().max()) > 100 * ROTARY_ERROR


def test_complex_and_integer_buffers_keep_dtype_and_values(device: torch.device, dtype: torch.dtype) -> None:
    """A conversion touches no buffer: the imaginary part survives."""
    model = nn.Sequential(nn.Linear(2, 2)).to(device)
    angles = torch.arange(3.0, device=device)
    buffers = {
        "freqs_cis": torch.polar(torch.ones_like(angles), angles),
        "ids": torch.arange(5000, device=device),
        "wide": angles.double(),
        "mask": torch.tensor([True], device=device),
    }
    for name, value in buffers.items():
        model[0].register_buffer(name, value.clone())
    convert(model, dtype)
    for name, value in buffers.items():
        assert_same(value, getattr(model[0], name))


def test_running_statistics_move_as_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """Small updates do not vanish in the running variance, large ones do not overflow it."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=1e-4)), device)
    reference = copy.deepcopy(model[1])
    convert(model, dtype)

    def follow(module: nn.Module, args: Any, out: Tensor) -> None:
        reference(out.detach().float())

    model[0].register_forward_hook(follow)
    for step in range(60):
        model(torch.randn(8, 4, device=device) * (0.5 if step < 50 else 400.0))
    torch.testing.assert_close(model[1].state_dict(), reference.state_dict(), rtol=STATISTICS, atol=0)
    assert model[1].num_batches_tracked.dtype == torch.int64
    assert int(model[1].num_batches_tracked) == 60
    assert bool(((model[1].running_var != 1) & model[1].running_var.isfinite()).all())


# -- ties ---------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.head = nn.Linear(4, 6, bias=False)
        with torch.no_grad():
            # Eighths: every sum and product below is exact in half, so fp32 is the right value.
            self.embedding.weight.copy_(torch.arange(24).view(6, 4).remainder(7) / 8 - 0.375)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embedding(ids))


@pytest.mark.parametrize("pinned", [None, "head", "head.weight", "embedding"])
def test_tied_weights_stay_one_parameter(pinned: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """A tie stays one object of one dtype with one master, and its gradient counts once."""
    plain = Tied().to(device)
    model = Tied().to(device)
    policy = CastPolicy.default() if pinned is None else CastPolicy.default().keep(pinned)
    inner = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=policy, loss_scale=1.0)
    parameter = model.head.weight
    ids = torch.tensor([0, 1, 1, 5], device=device)

    optimizer.backward(model(ids).sum())
    optimizer.step()
    plain(ids).sum().backward()
    torch.optim.SGD(plain.parameters(), lr=0.125).step()

    masters = masters_of(optimizer)
    assert list(masters) == ["embedding.weight"]
    assert model.head.weight is model.embedding.weight is parameter
    assert parameter.dtype == (dtype if pinned is None else torch.float32)
    assert_same(masters["embedding.weight"], plain.head.weight.detach())
    assert differs(masters["embedding.weight"], Tied().to(device).head.weight.detach())
    for _ in range(2):
        optimizer.backward(model(ids).square().mean())
        optimizer.step()
    assert optimizer.applied_steps == 3
    assert torch.equal(model.head.weight, masters_of(optimizer)["embedding.weight"].to(parameter.dtype))


# -- whole models -------------------------------------------------------------


class ModuleListModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.heads = nn.ModuleDict({"out": nn.Linear(4, 2)})
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(3)])

    def forward(self, x: Tensor) -> Tensor:
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = x + block(x).tanh() * gain
        return self.heads["out"](x)


class Recurrent(nn.Module):
    def __init__(self, cell: type[nn.Module], states: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(9, 4)
        self.cell = cell(4, 5, num_layers=2, batch_first=True)
        self.states = states

    def forward(self, ids: Tensor) -> Tensor:
        hidden = torch.zeros(2, ids.shape[0], 5, device=ids.device)  # fp32: cast at the cell's door
        out, _ = self.cell(self.embedding(ids), (hidden, hidden) if self.states == 2 else hidden)
        return out


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]))
        return nn.utils.rnn.pad_packed_sequence(self.cell(packed)[0])[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, key=x, value=x, attn_mask=torch.zeros(3, 3, device=x.device))[0]


def encoder(**options: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, **options)


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "attention": (SelfAttention, lambda: torch.randn(2, 3, 8)),
    "encoder": (encoder, lambda: torch.randn(2, 3, 8)),
    "lstm": (lambda: Recurrent(nn.LSTM, 2), lambda: torch.arange(6).view(2, 3)),
    "gru": (lambda: Recurrent(nn.GRU, 1), lambda: torch.arange(6).view(2, 3)),
    "packed": (Packed, lambda: torch.randn(3, 2, 4)),
    "embedding": (lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 2)), lambda: torch.arange(6)),
    "module list": (ModuleListModel, lambda: torch.randn(3, 4)),
    "convolution": (
        lambda: nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 2)),
        lambda: torch.randn(2, 1, 5, 5),
    ),
}


@pytest.mark.parametrize("name", list(MODELS))
def test_common_models_train_a_step(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """The models that people have train under the default policy, in both half formats."""
    make, batch = MODELS[name]
    model = seeded(make, device)
    optimizer = MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype, loss_scale=SMALL_SCALE)
    before = masters_of(optimizer)
    out = model(batch().to(device))
    optimizer.backward(out.square().mean())
    optimizer.step()
    assert optimizer.last_step.applied
    assert out.dtype == torch.float32
    after = masters_of(optimizer)
    assert all(differs(after[name], before[name]) for name in after)
    assert all(bool(value.isfinite().all()) for value in after.values())
    assert sum(p.dtype == dtype for p in model.parameters()) > 0


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.filterwarnings("ignore:nested_from_padded CUDA kernels:UserWarning")
@pytest.mark.parametrize("nested", [True, False])
def test_encoder_works_in_eval_without_gradients(nested: bool, device: torch.device, dtype: torch.dtype) -> None:
    """The moment at which torch takes its fused fast path: hooks and dtypes still hold."""
    model = seeded(lambda: encoder(enable_nested_tensor=nested), device).eval()
    x = torch.randn(2, 3, 8, device=device)
    padding = torch.tensor([[False, False, False], [False, False, True]], device=device)
    with torch.no_grad():
        expected = model(x, src_key_padding_mask=padding)
        convert(model, dtype)
        out = model(x, src_key_padding_mask=padding)
    assert out.dtype == torch.float32
    assert differs(out, expected)
    assert float((out - expected)[~padding].abs().max()) < ENCODER_ERROR


# -- other policies -----------------------------------------------------------


def test_policy_none_trains_a_layer_norm_in_half(device: torch.device, dtype: torch.dtype) -> None:
    """``CastPolicy.none()`` makes every parameter half; no island is left."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)), device)
    inner = make_adamw(model.parameters())
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=CastPolicy.none(), loss_scale=SMALL_SCALE)
    seen = watch(model)
    optimizer.backward(model(torch.randn(3, 4, device=device)).square().mean())
    optimizer.step()
    assert optimizer.last_step.applied
    assert set(seen.values()) == {dtype} == {p.dtype for p in model.parameters()}


def test_policy_none_trains_a_batch_norm(device: torch.device, dtype: torch.dtype) -> None:
    """``CastPolicy.none()`` is "all half, as model.half()": a BatchNorm model still runs."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), device)
    inner = make_adamw(model.parameters())
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=CastPolicy.none(), loss_scale=SMALL_SCALE)
    before = model[1].running_mean.clone()
    optimizer.backward(model(torch.randn(3, 4, device=device)).square().mean())
    optimizer.step()
    assert optimizer.last_step.applied
    assert model[0].weight.dtype == dtype
    assert model[1].running_mean.dtype == torch.float32
    assert differs(before, model[1].running_mean)


def test_policy_fp32_changes_no_parameter(device: torch.device, dtype: torch.dtype) -> None:
    """``CastPolicy.fp32()`` leaves every dtype and every value as it was."""
    model = two_group_model(device)
    before = copy.deepcopy(model.state_dict())
    handle = convert(model, dtype, CastPolicy.fp32())
    assert_same(dict(before), dict(model.state_dict()))
    assert set(handle.plan.dtypes.values()) == {torch.float32}
    assert torch.equal(model(torch.arange(3, device=device)), two_group_model(device)(torch.arange(3, device=device)))


@pytest.mark.parametrize(
    ("globs", "fp32"),
    [
        (("hidden",), {"hidden.weight", "hidden.bias"}),
        (("h*n",), {"hidden.weight", "hidden.bias"}),
        (("hidden.weight",), {"hidden.weight", "hidden.bias"}),
        (("branch", "frozen.bias"), {"branch.weight", "branch.bias", "frozen.weight", "frozen.bias"}),
        (("head",), {"embedding.weight", "head.bias"}),
        (("[bf]r*.weight",), {"branch.weight", "branch.bias", "frozen.weight", "frozen.bias"}),
    ],
    ids=lambda names: "+".join(sorted(names)),  # the same in every process
)
def test_kept_names_stay_fp32(globs: tuple[str, ...], fp32: set[str], device: torch.device, dtype: torch.dtype) -> None:
    """A glob keeps modules, and the modules that compute with a kept parameter."""
    model = two_group_model(device)
    convert(model, dtype, CastPolicy.default().keep(*globs))
    kept = {name for name, param in model.named_parameters() if param.dtype == torch.float32}
    assert kept == fp32 | {"norm.weight", "norm.bias"}
    seen = watch(model)
    model(torch.arange(3, device=device), use_branch=True)
    for name, used in seen.items():
        if used.is_floating_point and name:
            own = {p.dtype for p in model.get_submodule(name).parameters(recurse=False)}
            assert own == ({torch.float32} if name == "norm" else {used}), name


@pytest.mark.parametrize("glob", ["nothing", "norm.weigh", "Hidden"])
def test_a_glob_that_matches_nothing_changes_nothing(glob: str, device: torch.device, dtype: torch.dtype) -> None:
    """A misspelt name raises before the first parameter is converted."""
    model = two_group_model(device)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"CastPolicy: {glob}=fp32 matches no module and no parameter\. Names"):
        convert(model, dtype, CastPolicy.default().keep("hidden", glob))
    assert_same(dict(before), dict(model.state_dict()))
    assert set(hook_counts(model).values()) == {0}


def test_a_glob_finds_a_module_by_either_of_its_names(device: torch.device, dtype: torch.dtype) -> None:
    """A module that is registered twice is found under both names, as a parameter is."""
    model = nn.Sequential(nn.Linear(2, 2)).to(device)
    model.add_module("again", model[0])
    convert(model, dtype, CastPolicy.default().keep("again"))
    assert model[0].weight.dtype == torch.float32


def test_policies_are_frozen_values() -> None:
    """Policies compare and hash by value, and ``keep`` returns a new one."""
    policy = CastPolicy.default()
    assert policy == CastPolicy.default()
    assert CastPolicy() == CastPolicy.none() != policy
    assert policy is not CastPolicy.default()
    assert hash(policy.keep("a")) == hash(CastPolicy.default().keep("a"))
    assert len({policy, policy.keep("a"), policy.keep("a"), CastPolicy.none(), CastPolicy.fp32()}) == 4
    assert str(policy.keep("a").keep("b", "c")) == "b=fp32; c=fp32; a=fp32; default"
    assert str(policy) == "default"
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.rules = ()  # type: ignore[misc]


# -- the way back -------------------------------------------------------------


def test_remove_restores_a_converted_model(device: torch.device, dtype: torch.dtype) -> None:
    """Without an optimizer the half values come back widened; hooks are gone."""
    model = two_group_model(device)
    original = copy.deepcopy(model.state_dict())
    identity = [id(p) for p in model.parameters()]
    handle = convert(model, dtype)
    assert isinstance(handle, PolicyHandle)
    assert handle.active
    halves = copy.deepcopy(model.state_dict())
    handle.remove()
    assert not handle.active
    assert_same({name: value.float() for name, value in halves.items()}, dict(model.state_dict()))
    assert differs(dict(original), dict(model.state_dict()))
    assert [id(p) for p in model.parameters()] == identity
    assert set(hook_counts(model).values()) == {0}
    weights = copy.deepcopy(model.state_dict())
    handle.remove()  # a second time does nothing
    assert_same(dict(weights), dict(model.state_dict()))
    convert(model, dtype)  # and the model can be converted again


class WithStatistics(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_remove_hands_the_masters_to_the_inner_optimizer(device: torch.device, dtype: torch.dtype) -> None:
    """After ``remove`` the inner optimizer goes on, bit for bit, as a bare one over the fp32 model."""
    x = torch.randn(3, 4, device=device)
    model = seeded(WithStatistics, device)
    optimizer = MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype, loss_scale=SMALL_SCALE)
    for _ in range(3):
        optimizer.backward(model(x).square().mean())
        optimizer.step()
    assert optimizer.applied_steps == 3
    masters, state = optimizer.master_state_dict(), copy.deepcopy(optimizer.inner.state_dict())
    identity = {name: id(param) for name, param in model.named_parameters()}
    optimizer.policy_handle.remove()

    assert {name: id(param) for name, param in model.named_parameters()} == identity
    assert_same(masters, dict(model.state_dict()))
    assert set(hook_counts(model).values()) == {0}
    plain = seeded(WithStatistics, device)
    plain.load_state_dict(masters, strict=True)
    bare = make_adamw(plain.parameters())
    bare.load_state_dict(state)
    for net, opt in ((model, optimizer.inner), (plain, bare)):
        for _ in range(2):
            opt.zero_grad()
            net(x).square().mean().backward()
            opt.step()
    assert_same(dict(plain.state_dict()), dict(model.state_dict()))
    assert differs(masters, dict(model.state_dict()))
    assert_same(bare.state_dict(), optimizer.inner.state_dict())


@pytest.mark.parametrize("outside", ["frozen", "in no group"])
def test_remove_widens_parameters_without_a_master(outside: str, device: torch.device, dtype: torch.dtype) -> None:
    """After ``remove`` the whole model is fp32, frozen parameters and those of no group too."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), device)
    if outside == "frozen":
        model[0].requires_grad_(False)
    params = list(model.parameters()) if outside == "frozen" else list(model[1].parameters())
    optimizer = MixedPrecisionOptimizer(make_adamw(params), model, dtype=dtype)
    optimizer.policy_handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_users_hooks_survive_and_still_run(device: torch.device, dtype: torch.dtype) -> None:
    """Hooks that the user registered before stay, run, and outlive ``remove``."""
    model = two_group_model(device)
    calls: list[str] = []
    model.hidden.register_forward_pre_hook(lambda module, args: calls.append("before"))
    model.norm.register_forward_hook(lambda module, args, out: calls.append("after"))
    model.head.weight.register_hook(lambda grad: calls.append("grad"))
    counts = hook_counts(model)
    handle = convert(model, dtype)
    model(torch.arange(3, device=device)).sum().backward()
    assert calls == ["before", "after", "grad"]
    handle.remove()
    assert hook_counts(model) == counts
    model(torch.arange(3, device=device))
    assert calls == ["before", "after", "grad", "before", "after"]


@pytest.mark.parametrize("how", ["deepcopy", "torch.save"])
def test_a_converted_model_can_be_copied_and_saved(how: str, device: torch.device, dtype: torch.dtype) -> None:
    """A copy has its own weights and the same casts, also after training with norm statistics."""
    x = torch.randn(3, 4, device=device)
    model = seeded(WithStatistics, device)
    optimizer = MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype, loss_scale=SMALL_SCALE)
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    model(x)  # the statistics of this window are being watched
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))
    assert not {p.data_ptr() for p in model.parameters()} & {p.data_ptr() for p in twin.parameters()}
    out = twin.eval()(x)
    assert out.dtype == torch.float32
    assert torch.equal(out, model.eval()(x))
    weights = copy.deepcopy(twin.state_dict())
    model.train()
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    assert_same(dict(weights), dict(twin.state_dict()))
    assert differs(dict(weights), dict(model.state_dict()))


@pytest.mark.filterwarnings("ignore")  # dynamo's own
def test_a_compiled_model_is_unwrapped(device: torch.device) -> None:
    """``torch.compile`` adds no prefix to names, hooks sit on the inner module, and it trains."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), device)
    compiled = torch.compile(model, backend="eager")
    inner = make_adamw(compiled.parameters())
    optimizer = MixedPrecisionOptimizer(inner, compiled, dtype=torch.bfloat16)
    names = {"0.weight", "0.bias", "1.weight", "1.bias"}
    assert set(masters_of(optimizer)) == set(optimizer.master_state_dict()) == names
    assert set(optimizer.state_dict()["mixedopt"]["names"]) == names
    assert hook_counts(model)[""] > 0
    assert hook_counts(compiled)[""] == 0
    before = masters_of(optimizer)
    out = compiled(torch.randn(3, 4, device=device))
    optimizer.backward(out.square().mean())
    optimizer.step()
    assert out.dtype == torch.float32
    assert optimizer.last_step.applied
    assert all(differs(value, before[name]) for name, value in masters_of(optimizer).items())


def test_a_policy_reaches_a_functional_layer_only_as_half(device: torch.device, dtype: torch.dtype) -> None:
    """A softmax that is called, not built, is out of reach: it runs on half values."""
    seen = []

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            seen.append(self.body(x).dtype)
            return F.softmax(self.body(x), -1)

    model = seeded(Functional, device)
    convert(model, dtype)
    assert model(torch.randn(2, 4, device=device)).dtype == torch.float32
    assert seen == [dtype]


def test_the_two_group_model_trains_as_the_fp32_one_does(device: torch.device, dtype: torch.dtype) -> None:
    """The shared model learns in half: its loss falls as that of the fp32 run does."""
    model, optimizer = wrapped(device, dtype)
    plain, bare = fp32_twin(device, make_adamw)
    frozen = model.frozen.weight.detach().clone()
    first = loss_of(model, 0).item()
    train(model, optimizer, [0] * 20)
    for _ in range(20):
        bare.zero_grad()
        loss_of(plain, 0).backward()
        bare.step()
    assert optimizer.applied_steps == 20
    assert loss_of(model, 0).item() < 0.5 * first
    assert loss_of(plain, 0).item() < 0.5 * first
    assert_same(frozen, model.frozen.weight.detach())
    assert len(two_groups(model)) == len(optimizer.param_groups)


@pytest.mark.parametrize("glob", ["", 3, ["head"], int])
def test_keep_takes_what_can_match(glob: object) -> None:
    """What can match nothing is refused where it is written, not when a model comes."""
    with pytest.raises(TypeError, match=r"CastPolicy rule for .*: must be a name such as 'head' or '\*.router', a mod"):
        CastPolicy.default().keep(glob)  # type: ignore[arg-type]


@pytest.mark.parametrize("wrap", [True, False])
def test_half_buffers_of_an_fp32_module_are_refused(wrap: bool, device: torch.device, dtype: torch.dtype) -> None:
    """``model.half()`` rounded the statistics of a norm that is to compute in fp32."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device, dtype)
    match = r"buffer '1.running_mean' is torch.*, but its module computes in fp32\. Call model.float\(\)"
    with pytest.raises(ValueError, match=match):
        MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype) if wrap else convert(model, dtype)
    assert set(hook_counts(model).values()) == {0}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # dynamo looks at an output's grad
@pytest.mark.parametrize("training", [True, False])
def test_a_converted_model_compiles_into_one_graph(training: bool, device: torch.device, dtype: torch.dtype) -> None:
    """The cast hooks break no graph: ``fullgraph=True`` traces them, nested inputs included."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 2))

        def forward(self, batch: dict[str, Any]) -> dict[str, Tensor]:
            return {"y": self.body(batch["x"][0])}

    model = seeded(Nested, device).train(training)
    convert(model, dtype)
    batch = {"x": [torch.randn(3, 4, device=device)], "n": 3}
    expected = model(batch)["y"]
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.equal(expected, compiled(batch)["y"])
    assert expected.dtype == torch.float32


def test_a_half_model_may_be_given(device: torch.device, dtype: torch.dtype) -> None:
    """What the policy keeps in fp32 is widened before a master is made of it."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(device, dtype)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype, loss_scale=1.0)
    assert {master.dtype for _, master in optimizer.named_masters()} == {torch.float32}
    before = model[1].bias.detach().clone()
    optimizer.backward(model(torch.ones(2, 4, device=device)).square().mean())
    optimizer.step()
    assert optimizer.last_step.applied
    assert differs(before, model[1].bias)


def test_a_symbolic_trace_keeps_the_casts(device: torch.device, dtype: torch.dtype) -> None:
    """Of layers that have them inside."""
    model = nn.Sequential(nn.Linear(4, 4)).to(device)
    convert(model, dtype, CastPolicy.none().returning("half"))
    x = torch.ones(2, 4, device=device)
    assert torch.equal(model(x), torch.fx.symbolic_trace(model)(x))


def test_a_layer_that_was_parametrized_since_is_torchs_again(device: torch.device, dtype: torch.dtype) -> None:
    """After ``remove()``, and after the parametrization is gone."""
    model = nn.Sequential(nn.Linear(4, 4)).to(device)
    handle = convert(model, dtype)
    nn.utils.parametrizations.weight_norm(model[0])
    handle.remove()
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    assert type(model[0]) is nn.Linear
