"""What a cast must not break: buffers, parametrizations, ties, packed weights, layouts, foreign layers and hooks."""

from __future__ import annotations

import copy
import functools
import gc
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same, differs, hook_counts, seeded
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune
from torch.optim.swa_utils import AveragedModel

from mixedopt import CastPolicy, MixedPrecisionOptimizer, convert

POLICIES = {
    "default": CastPolicy.default(),
    "none": CastPolicy.none(),
    "half": CastPolicy.default().half(nn.Module),
}


def steps(model: nn.Module, x: Any, dtype: torch.dtype, count: int = 2, policy: CastPolicy | None = None) -> Any:
    """Train a converted model; return its optimizer."""
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(params, lr=0.1), model, dtype=dtype, policy=policy, loss_scale=1.0
    )
    for _ in range(count):
        out = model(x)
        optimizer.backward((out[0] if isinstance(out, tuple) else out).square().mean())
        optimizer.step()
        assert optimizer.last_step.applied
    return optimizer


class Buffers(nn.Module):
    """Tables and shadows of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("inv_freq", 1e4 ** (-torch.arange(0, 32, 2) / 32), persistent=False)
        self.register_buffer("freqs", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("shadow", self.layer.weight.detach() + 1e-6)
        self.register_buffer("positions", torch.arange(5000))
        self.register_buffer("mask", torch.ones(2, dtype=torch.bool))
        self.register_buffer("exact", torch.tensor([1 / 3], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        angles = self.positions[:2048, None] * self.inv_freq
        return self.layer(x) + (angles.cos().mean() + self.freqs.abs().sum() + self.exact.float())


@pytest.mark.parametrize("policy", list(POLICIES))
def test_buffers_keep_dtype_and_values(policy: str, device: torch.device, dtype: torch.dtype) -> None:
    """Through conversion, training and the way back; no warning of a lost imaginary part."""
    model = seeded(Buffers, device)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    optimizer = steps(model, torch.randn(3, 4, device=device), dtype, policy=POLICIES[policy])
    assert_same(before, {name: buffer.clone() for name, buffer in model.named_buffers()})
    assert model.layer.weight.dtype == dtype
    optimizer.policy_handle.remove()
    assert_same(before, {name: buffer.clone() for name, buffer in model.named_buffers()})


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(layer)


class Symmetric(nn.Module):
    """A parametrization of the user's own."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def symmetric(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Symmetric())


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "old weight_norm": lambda: old_weight_norm(nn.Linear(4, 4)),
    "user's own": lambda: symmetric(nn.Linear(4, 4)),
    "batch statistics": lambda: nn.BatchNorm1d(4),
}


@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("kind", list(PARAMETRIZED))
def test_what_computes_with_fp32_buffers_stays_fp32(
    kind: str, policy: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Under any policy, a rule that says half included, and it trains."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), PARAMETRIZED[kind](), nn.Linear(4, 4)), device)
    optimizer = steps(model, torch.randn(6, 4, device=device), dtype, policy=POLICIES[policy])
    assert {p.dtype for p in model[1].parameters()} == {torch.float32}
    assert {p.dtype for p in model[0].parameters()} == {dtype}
    assert optimizer.policy_handle.plan.decisions[model[1]].compute == torch.float32


@pytest.mark.parametrize("kind", ["spectral_norm", "orthogonal", "batch statistics"])
def test_fp32_buffers_decide_under_a_rule_that_keeps_parameters(
    kind: str, device: torch.device, dtype: torch.dtype
) -> None:
    """fp32 parameters that a rule casts in every forward would meet fp32 buffers: they are not cast."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), PARAMETRIZED[kind](), nn.Linear(4, 4)), device)
    rule = nn.BatchNorm1d if kind == "batch statistics" else nn.Linear
    policy = CastPolicy.default().rule(rule, param="fp32", compute="half")
    optimizer = steps(model, torch.randn(6, 4, device=device), dtype, policy=policy)
    assert optimizer.policy_handle.plan.decisions[model[1]].compute == torch.float32


def test_a_pruned_layer_trains(device: torch.device, dtype: torch.dtype) -> None:
    """A mask is a buffer, and the weight a product: what was cut stays 0, masters and all."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), device)
    prune.l1_unstructured(model[0], "weight", 0.5)
    gone = model[0].weight_mask == 0
    optimizer = steps(model, torch.randn(3, 4, device=device), dtype)
    model(torch.randn(3, 4, device=device))
    assert model[0].weight_orig.dtype == model[0].weight.dtype == dtype
    assert model[0].weight_mask.dtype == torch.float32
    assert int(gone.sum()) == 8
    assert not model[0].weight[gone].any()
    optimizer.policy_handle.remove()
    assert model(torch.randn(3, 4, device=device)).dtype == torch.float32


@pytest.mark.parametrize("policy", list(POLICIES))
def test_a_tie_into_a_parametrization_is_fp32(policy: str, device: torch.device, dtype: torch.dtype) -> None:
    """One parameter, a weight here and what a weight is computed from there: fp32 at both, one master."""

    def make() -> nn.Module:
        model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), symmetric(nn.Linear(4, 4)))
        model[0].weight = model[2].parametrizations.weight.original
        return model

    model = seeded(make, device)
    optimizer = steps(model, torch.randn(3, 4, device=device), dtype, policy=POLICIES[policy])
    assert model[0].weight is model[2].parametrizations.weight.original
    assert model[0].weight.dtype == torch.float32
    assert [name for name, _ in optimizer.named_masters()] == ["0.weight", "0.bias", "2.bias"]


@pytest.mark.parametrize("kept", [None, "embedding", "head"])
def test_a_tie_stays_one_parameter(kept: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """One parameter, one dtype, one master, whichever name a rule uses."""

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids))

    model = seeded(Tied, device)
    policy = CastPolicy.default() if kept is None else CastPolicy.default().keep(kept)
    optimizer = steps(model, torch.arange(5, device=device), dtype, policy=policy)
    assert model.head.weight is model.embedding.weight
    assert model.head.weight.dtype == (dtype if kept is None else torch.float32)
    assert len(list(optimizer.named_masters())) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"bidirectional": True}, {"batch_first": True, "num_layers": 2}, {"bias": False}],
    ids=["plain", "bidirectional", "batch_first", "no bias"],
)
@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda make: make.__name__)
def test_flattening_packed_weights_keeps_the_masters(
    make: Any, options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """After ``flatten_parameters()`` the weights still follow the optimizer; no warning of scattered chunks."""
    model = seeded(lambda: nn.Sequential(make(4, 4, **options)), device)
    x = torch.randn(3, 2, 4, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer = steps(model, x, dtype)
        model[0].flatten_parameters()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        for _ in range(2):
            optimizer.backward(model(x)[0].square().mean())
            optimizer.step()
    assert differs(before, {name: p.detach() for name, p in model.named_parameters()})
    for name, master in optimizer.named_masters():
        assert torch.equal(master.to(dtype), model.get_parameter(name))


class Recurrent(nn.Module):
    """A recurrent layer that is fed a packed sequence."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 1]))
        return nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0])[0]


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN:UserWarning")
@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(nn.LSTM(4, 4)),
        lambda: Recurrent(nn.GRU(4, 4, bidirectional=True)),
        lambda: Recurrent(nn.LSTM(4, 4, proj_size=2)),
        lambda: nn.Sequential(nn.LSTM(4, 4, proj_size=2, bidirectional=True, bias=False)),
    ],
    ids=["packed LSTM", "packed GRU", "packed projection", "projection"],
)
def test_recurrent_layers_train_and_come_back(
    make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """Packed sequences and projections; afterwards the layer computes what a fresh fp32 one does."""
    model = seeded(make, device)
    x = torch.randn(3, 2, 4, device=device)
    optimizer = steps(model, x, dtype)
    assert {p.dtype for p in model.parameters()} == {dtype}
    optimizer.policy_handle.remove()
    for layer in model.modules():
        if isinstance(layer, nn.RNNBase):
            layer.flatten_parameters()
    twin = seeded(make, device)
    twin.load_state_dict(model.state_dict())
    found, expected = model(x), twin(x)
    if isinstance(found, tuple):
        found, expected = found[0], expected[0]
    assert torch.equal(expected, found)


@pytest.mark.gpu
def test_recurrent_weights_without_an_optimizer_stay_one_chunk(device: torch.device, dtype: torch.dtype) -> None:
    """``convert`` and ``remove`` pack them anew: torch does not warn that it copies them in every forward."""
    model = seeded(lambda: nn.Sequential(nn.LSTM(4, 4)), device)
    handle = convert(model, dtype)
    model(torch.randn(3, 2, 4, device=device))
    handle.remove()
    model(torch.randn(3, 2, 4, device=device))


def repack_(layer: nn.Module) -> None:
    """Move the weights to one new storage, as ``flatten_parameters()`` does on a GPU."""
    flat = torch.cat([p.detach().flatten() for p in layer.parameters()])
    offset = 0
    for param in layer.parameters():
        param.data = flat[offset : offset + param.numel()].view(param.shape)
        offset += param.numel()


@pytest.mark.parametrize("kept", [False, True])
def test_repacked_weights_are_followed(kept: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Moved to another pack they come back, with their values; masters and weights stay one."""
    runs = []
    x = torch.randn(3, 2, 4, device=device)
    for repacked in (False, True):
        model = seeded(lambda: nn.Sequential(nn.LSTM(4, 4)), device)
        repack_(model[0])
        optimizer = steps(model, x, dtype, policy=CastPolicy.default().keep("0") if kept else None)
        for _ in range(2):
            if repacked:
                repack_(model[0])
            optimizer.backward(model(x)[0].square().mean())
            optimizer.step()
        runs.append(optimizer.master_state_dict())
        for name, master in optimizer.named_masters():
            assert torch.equal(master.to(model.get_parameter(name).dtype), model.get_parameter(name))
    assert_same(runs[0], runs[1])


def test_masters_that_were_edited_outlive_a_repack(device: torch.device, dtype: torch.dtype) -> None:
    """Weights that were moved, not written, say nothing about masters."""
    model = seeded(lambda: nn.Sequential(nn.LSTM(4, 4)), device)
    repack_(model[0])
    optimizer = steps(model, torch.randn(3, 2, 4, device=device), dtype)
    name, master = next(optimizer.named_masters())
    with torch.no_grad():
        master.fill_(7.0)
    repack_(model[0])
    optimizer.publish()
    assert bool((model.get_parameter(name) == 7.0).all())
    assert bool((master == 7.0).all())


def test_a_converted_model_is_freed_at_once(device: torch.device, dtype: torch.dtype) -> None:
    """No hook keeps it alive: without waiting for the garbage collector."""
    model = seeded(Lists, device)
    convert(model, dtype, CastPolicy.default().keep_functions("softmax"))
    model(torch.randn(3, 4, device=device))
    gone = weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None
    finally:
        gc.enable()


def test_channels_last_survives(device: torch.device, dtype: torch.dtype) -> None:
    """Strides of weights and of what comes out, through training and the way back."""
    model = seeded(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)), device)
    model = model.to(memory_format=torch.channels_last)
    before = {name: p.stride() for name, p in model.named_parameters()}
    x = torch.randn(2, 3, 9, 9, device=device).to(memory_format=torch.channels_last)
    optimizer = steps(model, x, dtype)
    assert {name: p.stride() for name, p in model.named_parameters()} == before
    assert model(x).is_contiguous(memory_format=torch.channels_last)
    optimizer.policy_handle.remove()
    assert {name: p.stride() for name, p in model.named_parameters()} == before


@pytest.mark.parametrize("where", ["root", "inside"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
@pytest.mark.parametrize("how", ["script", "trace"])
def test_torchscript_is_refused_by_name(how: str, where: str, device: torch.device, dtype: torch.dtype) -> None:
    """Its code cannot be given half weights; nothing is changed."""
    layer = nn.Linear(4, 4).to(device)
    scripted = torch.jit.script(layer) if how == "script" else torch.jit.trace(layer, torch.ones(1, 4, device=device))
    model = scripted if where == "root" else nn.Sequential(nn.Linear(4, 4), scripted).to(device)
    with pytest.raises(ValueError, match="is a TorchScript module: its code cannot be given half weights"):
        convert(model, dtype)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
def test_torchscript_without_weights_is_left_alone(device: torch.device, dtype: torch.dtype) -> None:
    """A scripted activation has nothing to convert."""
    model = nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.GELU()), nn.Linear(4, 4)).to(device)
    steps(model, torch.randn(3, 4, device=device), dtype)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch.jit
def test_a_torchscript_root_without_weights_is_refused(dtype: torch.dtype) -> None:
    """A clear error, too: no hook can be put on it."""
    with pytest.raises(ValueError, match="is a TorchScript module"):
        convert(torch.jit.script(nn.GELU()), dtype)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_lazy_module_is_refused_until_it_knows_its_shape(device: torch.device, dtype: torch.dtype) -> None:
    """A clear error before anything is changed; after one forward it converts."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LazyLinear(3)).to(device)
    with pytest.raises(ValueError, match=r"'1.weight' is not initialised yet: run one forward pass before converting"):
        convert(model, dtype)
    assert model[0].weight.dtype == torch.float32
    assert set(hook_counts(model[:1]).values()) == {0}
    model(torch.ones(1, 4, device=device))
    steps(model, torch.randn(3, 4, device=device), dtype)


class Lists(nn.Module):
    """Parameters in lists, dicts, and of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(4)) for _ in range(2)])
        self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(4))})
        self.own, self.layer = nn.Parameter(torch.ones(4)), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x * self.scales[0] * self.own) * self.scales[1] + self.named["shift"]


@pytest.mark.parametrize("kept", [None, "scales.0", "own", "named", "scales"])
def test_parameters_in_lists_train(kept: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """In half, or kept in fp32 one by one."""
    model = seeded(Lists, device)
    policy = CastPolicy.default() if kept is None else CastPolicy.default().keep(kept)
    optimizer = steps(model, torch.randn(3, 4, device=device), dtype, policy=policy)
    assert len(list(optimizer.named_masters())) == 6
    fp32 = {name for name, p in model.named_parameters() if p.dtype == torch.float32}
    assert fp32 == {name for name, _ in model.named_parameters() if kept is not None and name.startswith(kept)}


class Lora(nn.Module):
    """A frozen layer, and two small ones that learn."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 8).requires_grad_(False)
        self.lora_a, self.lora_b = nn.Linear(8, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


@pytest.mark.parametrize("kept", [False, True])
def test_adapters_train_beside_a_frozen_half_base(kept: bool, device: torch.device, dtype: torch.dtype) -> None:
    """The base is half and has no master; the adapters are half or, by a glob, fp32."""
    model = seeded(lambda: nn.Sequential(Lora(), nn.ReLU(), Lora()), device)
    policy = CastPolicy.default().keep("*.lora_*") if kept else CastPolicy.default()
    base = model[0].base.weight.detach().clone()
    optimizer = steps(model, torch.randn(3, 8, device=device), dtype, policy=policy)
    assert torch.equal(base.to(dtype), model[0].base.weight)
    assert {p.dtype for n, p in model.named_parameters() if "lora" in n} == {torch.float32 if kept else dtype}
    assert {name for name, _ in optimizer.named_masters()} == {n for n, _ in model.named_parameters() if "lora" in n}


class Int8(nn.Module):
    """A layer with integer weights and a floating scale and bias."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-9, 9, (64, 64), dtype=torch.int8), requires_grad=False)
        self.scale, self.bias = nn.Parameter(torch.full((64,), 0.01)), nn.Parameter(torch.zeros(64))
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.weight.float() * self.scale[:, None], self.bias)


class Int8Activated(Int8):
    """The same with a child that has no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.activation = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(super().forward(x))


def dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(64, 64)), {nn.Linear})[0]


def weight_only() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="needs the extra 'third-party'")
    layer = nn.Sequential(nn.Linear(64, 64).requires_grad_(False))
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer[0]


def eight_bits() -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra 'third-party'")
    return bitsandbytes.nn.Linear8bitLt(64, 64, has_fp16_weights=False).requires_grad_(False).to("cpu")


def four_bits() -> nn.Module:
    bitsandbytes = pytest.importorskip("bitsandbytes", reason="needs the extra 'third-party'")
    return bitsandbytes.nn.Linear4bit(64, 64).requires_grad_(False).to("cpu")


def plain_values(layer: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters that are plain tensors."""
    return {n: p.detach().clone() for n, p in layer.named_parameters() if type(p.data) is Tensor}


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # quantisers'
@pytest.mark.parametrize(
    "make",
    [
        Int8,
        Int8Activated,
        dynamic,
        weight_only,
        eight_bits,
        four_bits,
    ],
    ids=lambda make: make.__name__,
)
def test_quantised_layers_are_left_alone(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """No cast, no hook, the same dtypes, values and outputs, through conversion and the way back."""
    torch.manual_seed(0)
    layer, x = make(), torch.randn(3, 64)
    if make is four_bits:
        layer(x)  # it gives its bias the dtype of its first input
    expected, before = layer(x), plain_values(layer)
    dtypes = [p.dtype for p in layer.parameters()]
    handle = convert(model := nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64)), dtype)
    assert [p.dtype for p in layer.parameters()] == dtypes
    assert_same(before, plain_values(layer))
    assert torch.equal(expected, layer(x))
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks
    assert model[0].weight.dtype == dtype
    handle.remove()
    assert [p.dtype for p in layer.parameters()] == dtypes
    assert_same(before, plain_values(layer))
    assert torch.equal(expected, layer(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # quantisers'
@pytest.mark.parametrize("policy", ["default", "none"])
@pytest.mark.parametrize(
    "make",
    [
        Int8,
        weight_only,
        eight_bits,
        four_bits,
    ],
    ids=lambda make: make.__name__,
)
def test_what_is_around_a_quantised_layer_trains(
    make: Callable[[], nn.Module], policy: str, dtype: torch.dtype
) -> None:
    """Its neighbours are half and get masters and steps, its own values stay as they are."""
    torch.manual_seed(0)
    layer = make()
    model = nn.Sequential(nn.Linear(64, 64), layer, nn.Linear(64, 64))
    before = {name: value for name, value in plain_values(layer).items() if name != "bias"}
    optimizer = steps(model, torch.randn(3, 64), dtype, policy=POLICIES[policy])
    assert {name for name, _ in optimizer.named_masters()} == {"0.weight", "0.bias", "2.weight", "2.bias"}
    assert_same(before, {name: value for name, value in plain_values(layer).items() if name != "bias"})
    assert not layer._forward_pre_hooks
    optimizer.policy_handle.remove()
    assert model[0].weight.dtype == model[2].weight.dtype == torch.float32


@pytest.mark.parametrize("how", ["parameter", "layer"])
def test_complex_parameters_stay_complex(how: str, device: torch.device, dtype: torch.dtype) -> None:
    """Beside half layers or alone; an optimizer that is given one says so."""

    class Spectral(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.filter = nn.Linear(4, 4), nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(self.layer(x).float()) * self.filter)

    model = seeded(Spectral if how == "parameter" else lambda: nn.Linear(4, 4, dtype=torch.complex64), device)
    given = torch.randn(2, 4, device=device, dtype=torch.float32 if how == "parameter" else torch.complex64)
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.is_complex()}
    handle = convert(model, dtype)
    assert_same(before, {n: p.detach().clone() for n, p in model.named_parameters() if p.is_complex()})
    assert model(given).dtype == given.dtype
    model(given).abs().sum().backward()
    assert all(p.grad is not None for p in model.parameters())
    handle.remove()
    assert_same(before, {n: p.detach().clone() for n, p in model.named_parameters() if p.is_complex()})
    with pytest.raises(ValueError, match="is complex: it has no half format"):
        MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype)
    assert set(hook_counts(model).values()) == {0}


def test_a_module_at_two_places_is_cast_at_both(device: torch.device, dtype: torch.dtype) -> None:
    """One norm inside an island and outside of it, one layer called twice."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.LayerNorm(4), nn.Linear(4, 4)
            self.island = nn.Sequential(nn.Linear(4, 4), self.norm)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(self.norm(self.layer(self.island(x))))

    model = seeded(Shared, device)
    steps(model, torch.randn(3, 4, device=device), dtype, policy=CastPolicy.default().keep("island"))
    assert model.island[0].weight.dtype == model.norm.weight.dtype == torch.float32
    assert model.layer.weight.dtype == dtype


@pytest.mark.parametrize("shared", [lambda: nn.Linear(4, 4), lambda: nn.LayerNorm(4)], ids=["Linear", "LayerNorm"])
def test_a_shared_module_in_the_middle_of_an_island(
    shared: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """What comes after it inside the island takes its half output."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.layer = shared(), nn.Linear(4, 4)
            self.island = nn.Sequential(nn.Linear(4, 4), self.shared, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(self.island(self.shared(self.layer(x))))

    model = seeded(Shared, device)
    steps(model, torch.randn(3, 4, device=device), dtype, policy=CastPolicy.default().keep("island"))
    assert model.shared.weight.dtype == torch.float32


class Again(nn.Linear):
    """A layer that calls itself, and notes what its weights are at each product."""

    def forward(self, x: Tensor, depth: int = 2) -> Tensor:
        x = self(x, depth - 1) if depth else x
        self.seen = [*getattr(self, "seen", []), self.weight.dtype]
        return super().forward(x.to(self.weight.dtype))


RECURSIVE = {
    "half": CastPolicy.none(),
    "default": CastPolicy.default().keep_functions("softmax"),
    "kept": CastPolicy.default().keep(Again),
    "half by the call": CastPolicy.none().rule(Again, param="fp32", compute="half"),
    "fp32 by the call": CastPolicy.none().rule(Again, compute="fp32"),
}


@pytest.mark.parametrize("policy", RECURSIVE)
def test_a_module_that_calls_itself_computes_as_its_rule_says(
    policy: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Every call of a nest computes with the same weights, in the same width."""
    model = seeded(lambda: nn.Sequential(Again(4, 4)), device)
    steps(model, torch.randn(3, 4, device=device), dtype, policy=RECURSIVE[policy])
    assert model[0].seen == [torch.float32 if policy in ("kept", "fp32 by the call") else dtype] * 6


class Head(nn.Module):
    """A module with code of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).softmax(-1)


@pytest.mark.parametrize("used", [False, True], ids=["before a forward", "after one"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_module_can_be_taken_out(nested: bool, used: bool, device: torch.device, dtype: torch.dtype) -> None:
    """A head is replaced after the conversion: the next forward runs, in either mode, and so does the way back."""
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(Head()) if nested else Head())  # noqa: E731
    model = seeded(make, device)
    handle = convert(model, dtype, CastPolicy.default().keep_functions("softmax"))
    x = torch.randn(3, 4, device=device)
    if used:
        model(x)
    model[1] = nn.Identity()
    assert model(x).dtype == model.eval()(x).dtype == torch.float32
    handle.remove()
    assert model[0].weight.dtype == model(x).dtype == torch.float32


def test_a_half_layer_can_take_the_place_of_another(device: torch.device, dtype: torch.dtype) -> None:
    """A layer put in later computes as it stands, and comes back in fp32 with the rest."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), device)
    handle = convert(model, dtype)
    model[2] = nn.Linear(4, 2).to(device, dtype)
    out = model(torch.randn(3, 4, device=device))
    assert (out.shape, out.dtype) == ((3, 2), torch.float32)
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert set(hook_counts(model).values()) == {0}


def wrapped_forward(layer: nn.Module) -> nn.Module:
    """Give a layer a ``forward`` of its own around the old one, as accelerate does."""
    old = layer.forward
    layer.forward = functools.wraps(old)(lambda *args: old(*args))
    return layer


@pytest.mark.parametrize(
    "make", [lambda: nn.LayerNorm(4), lambda: nn.RMSNorm(4), lambda: nn.GroupNorm(2, 4)], ids=["layer", "rms", "group"]
)
def test_a_norm_with_a_wrapped_forward_computes_in_fp32(
    make: Callable[[], nn.Module], device: torch.device, dtype: torch.dtype
) -> None:
    """The forward that a user has put on an instance calls the class it was made from: it gets fp32."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), wrapped_forward(make()), nn.Linear(4, 4)), device)
    seen: list[torch.dtype] = []
    old = model[1].forward
    model[1].forward = lambda x: seen.append(x.dtype) or old(x)
    steps(model, torch.randn(3, 4, device=device), dtype)
    assert set(seen) == {torch.float32}


ATTENTIVE = {
    "default": CastPolicy.default(),
    "none": CastPolicy.none(),
    "attention kept": CastPolicy.default().keep(nn.MultiheadAttention),
    "attention fp32 by the call": CastPolicy.default().rule(nn.MultiheadAttention, compute="fp32"),
    "attention half by the call": CastPolicy.default().rule(nn.MultiheadAttention, param="fp32", compute="half"),
    "linear kept": CastPolicy.default().keep(nn.Linear),
    "linear half by the call": CastPolicy.default().rule(nn.Linear, param="fp32", compute="half"),
    "linear fp32 by the call": CastPolicy.default().rule(nn.Linear, compute="fp32"),
    "linear alone half": CastPolicy.fp32().half(nn.Linear),
    "projection kept": CastPolicy.default().keep("*.out_proj"),
}


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize(
    "policy",
    list(ATTENTIVE),
)
def test_attention_runs_under_any_rule(policy: str, training: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Rules on linear layers, on the projection that attention owns, and on attention."""
    make = lambda: nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True))  # noqa: E731
    model = seeded(make, device).train(training)
    reference = copy.deepcopy(model)
    handle = convert(model, dtype, ATTENTIVE[policy])
    x = torch.randn(3, 5, 8, device=device)
    with torch.set_grad_enabled(training):
        found, expected = model(x), reference(x)
    # One layer of half rounding of values of size 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if dtype == torch.float16 else 6e-2)
    handle.remove()


def test_hooks_of_the_user_run_in_their_order(device: torch.device, dtype: torch.dtype) -> None:
    """Those registered before see what the caller gave, those after see what the module gets."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), device)
    seen: list[tuple[str, torch.dtype]] = []
    model.register_forward_pre_hook(lambda m, args: seen.append(("before", args[0].dtype)))
    model.register_forward_hook(lambda m, args, out: seen.append(("out before", out.dtype)))
    model[0].register_full_backward_hook(lambda m, gi, go: seen.append(("backward", go[0].dtype)))
    handle = convert(model, dtype)
    model.register_forward_pre_hook(lambda m, args: seen.append(("after", args[0].dtype)))
    model.register_forward_hook(lambda m, args, out: seen.append(("out after", out.dtype)))
    model(torch.randn(3, 4, device=device, requires_grad=True)).sum().backward()
    expected = [("before", torch.float32), ("after", dtype), ("out before", dtype), ("out after", torch.float32)]
    assert seen == [*expected, ("backward", dtype)]
    handle.remove()
    assert (len(model._forward_pre_hooks), len(model._forward_hooks), len(model[0]._backward_hooks)) == (2, 2, 1)


def test_hooks_put_first_see_what_the_caller_gave(device: torch.device, dtype: torch.dtype) -> None:
    """``prepend=True`` after the conversion: before the casts in, and before the casts out; keywords are cast too."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4)), device)
    convert(model, dtype)
    seen: list[Any] = []
    model.register_forward_pre_hook(lambda m, a, kw: seen.append(kw["input"].dtype), prepend=True, with_kwargs=True)
    model.register_forward_hook(lambda m, a, kw, out: seen.append((kw["input"].dtype, out.dtype)), with_kwargs=True)
    model.register_forward_hook(lambda m, a, out: seen.append(out.dtype), prepend=True)
    model(input=torch.randn(3, 4, device=device))
    assert seen == [torch.float32, dtype, (dtype, torch.float32)]


def test_backward_hooks_see_half_inside_and_fp32_at_the_door(device: torch.device, dtype: torch.dtype) -> None:
    """Full backward hooks and pre-hooks, on norms whose class was changed as on linear layers."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), device)
    seen: dict[str, Any] = {}
    for name, module in model.named_modules():
        module.register_full_backward_pre_hook(lambda m, go, key=f"{name}<": seen.__setitem__(key, go[0].dtype))
        module.register_full_backward_hook(
            lambda m, gi, go, key=f"{name}>": seen.__setitem__(key, (gi[0].dtype, go[0].dtype))
        )
    convert(model, dtype)
    model(torch.randn(3, 4, device=device, requires_grad=True)).sum().backward()
    inside = {"0<": dtype, "0>": (dtype, dtype), "1<": dtype, "1>": (dtype, dtype)}
    assert seen == {**inside, "<": torch.float32, ">": (dtype, torch.float32)}


def test_hooks_on_parameters_and_state_dicts_survive(device: torch.device, dtype: torch.dtype) -> None:
    """They are called in their order while the model is half, and after the way back."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), device)
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *args: calls.append(name)

    model.register_state_dict_pre_hook(note("save"))
    model.register_state_dict_post_hook(note("saved"))
    model.register_load_state_dict_pre_hook(note("load"))
    model.register_load_state_dict_post_hook(note("loaded"))
    model[0].weight.register_post_accumulate_grad_hook(note("grad"))
    handle = convert(model, dtype)
    model.register_load_state_dict_pre_hook(note("load later"))
    expected = ["save", "saved", "load", "load later", "loaded", "grad"]
    for _ in range(2):
        model.load_state_dict(model.state_dict())
        model(torch.randn(3, 4, device=device)).sum().backward()
        assert calls == expected
        handle.remove()
        calls.clear()


def test_modes_and_flags_change_after_the_conversion(device: torch.device, dtype: torch.dtype) -> None:
    """``to(device)``, ``train``, ``eval`` and ``requires_grad_`` do what they say, and no master is lost."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)), device)
    x = torch.randn(3, 4, device=device)
    optimizer = steps(model, x, dtype)
    model.to(device).eval()
    assert model(x).dtype == torch.float32
    model.train()[0].requires_grad_(False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer.zero_grad()
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    after = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert {name for name in before if differs(before[name], after[name])} == {n for n in before if n[0] != "0"}
    assert [module.training for module in model] == [True] * 3
    optimizer.policy_handle.remove()
    assert [p.requires_grad for p in model.parameters()] == [False] * 2 + [True] * 4


@pytest.mark.parametrize("training", [True, False])
def test_torch_transformers_keep_their_fast_path(training: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Encoder and attention, in train and eval mode, against fp32."""
    make = lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 2)  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = seeded(make, device).train(training)
    reference = copy.deepcopy(model)
    convert(model, dtype)
    x = torch.randn(3, 5, 8, device=device)
    with torch.set_grad_enabled(training):
        found, expected = model(x), reference(x)
    assert found.dtype == torch.float32
    # Two layers of half rounding of values of size 1.
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-2 if dtype == torch.float16 else 6e-2)


@pytest.mark.parametrize("policy", ["default", "half by the call"])
def test_functional_call_computes_what_a_model_of_these_weights_does(
    policy: str, device: torch.device, dtype: torch.dtype
) -> None:
    """``torch.func.functional_call`` on a converted model: hooks cast as ever, and gradients reach the weights."""
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), Head())  # noqa: E731
    model, other = seeded(make, device), seeded(make, device)
    rules = CastPolicy.default()
    if policy != "default":
        rules = rules.rule(nn.Linear, param="fp32", compute="half")
    for net in (model, other):
        convert(net, dtype, rules)
    x = torch.randn(3, 4, device=device)
    weights = {name: (p.detach() * 2).requires_grad_() for name, p in model.named_parameters()}
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    found = torch.func.functional_call(model, weights, (x,))
    assert found.dtype == torch.float32
    assert torch.equal(other(x), found)
    assert not torch.equal(model(x), found)
    found.square().sum().backward()
    assert all(value.grad.dtype == value.dtype for value in weights.values())
    assert all(p.grad is None for p in model.parameters())


def test_an_ensemble_runs_under_vmap(dtype: torch.dtype) -> None:
    """``vmap`` over stacked weights: what is a number in each model is many in all of them."""

    class Gain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(4, 4), nn.LayerNorm(4)
            self.register_buffer("gain", torch.rand(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.layer(x)) * self.gain

    models = [Gain() for _ in range(3)]
    for model in models:
        convert(model, dtype)
    x = torch.randn(2, 4)
    weights, buffers = torch.func.stack_module_state(models)

    def call(weights: Any, buffers: Any) -> Tensor:
        return torch.func.functional_call(models[0], (weights, buffers), (x,))

    found = torch.func.vmap(call)(weights, buffers)
    # Batched products sum in another order, by an ulp of half.
    torch.testing.assert_close(found, torch.stack([m(x) for m in models]), rtol=0, atol=2 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("how", ["deepcopy", "torch.save", "average"])
def test_copies_keep_the_norms(how: str, device: torch.device, dtype: torch.dtype) -> None:
    """A copy computes the same, with norms of the same kind, and goes on when the model goes back."""
    model = seeded(
        lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4), nn.GroupNorm(2, 4), Head()), device
    )
    handle = convert(model, dtype, CastPolicy.default().keep_functions("softmax"))
    x = torch.randn(3, 4, device=device)
    model(x)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "average":
        twin = AveragedModel(model).module
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    expected = model(x)
    assert torch.equal(expected, twin(x))
    assert [type(m) for m in twin] == [type(m) for m in model]
    assert isinstance(twin[1], nn.LayerNorm)
    assert type(twin[1]) is not nn.LayerNorm
    handle.remove()
    assert torch.equal(expected, twin(x))
    assert twin[0].weight.dtype == dtype
    assert type(model[1]) is nn.LayerNorm


def test_a_model_without_values_converts(dtype: torch.dtype) -> None:
    """On the meta device there is nothing to round, so nothing that does not fit."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4))
    handle = convert(model, dtype)
    assert (model[0].weight.dtype, model[1].weight.dtype) == (dtype, torch.float32)
    handle.remove()
    assert {p.dtype for p in model.parameters()} == {torch.float32}
