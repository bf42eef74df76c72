"""What a cast must not break: buffers, parametrizations, ties, packed weights, layouts, foreign layers and hooks."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same, differs, hook_counts, seeded
from torch import Tensor, nn

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


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)),
    "old spectral_norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
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
    "options", [{}, {"bidirectional": True}, {"batch_first": True, "num_layers": 2}, {"bias": False}]
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
        self.weight = nn.Parameter(torch.randint(-9, 9, (4, 4), dtype=torch.int8), requires_grad=False)
        self.scale, self.bias = nn.Parameter(torch.full((4,), 0.01)), nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float() * self.scale[:, None], self.bias)


def dynamic() -> nn.Module:
    return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})[0]


def weight_only() -> nn.Module:
    quantization = pytest.importorskip("torchao.quantization", reason="needs the extra 'third-party'")
    layer = nn.Sequential(nn.Linear(4, 4).requires_grad_(False))
    quantization.quantize_(layer, quantization.Int8WeightOnlyConfig())
    return layer[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning", "ignore::FutureWarning")  # quantisers'
@pytest.mark.parametrize("make", [Int8, dynamic, weight_only])
def test_quantised_layers_are_left_alone(make: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    """No cast, no hook, the same dtypes; what is around them is half and trains."""
    torch.manual_seed(0)
    layer = make()
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    dtypes = [p.dtype for p in layer.parameters()]
    convert(model := nn.Sequential(nn.Linear(4, 4), layer, nn.Linear(4, 4)), dtype)
    assert [p.dtype for p in layer.parameters()] == dtypes
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks
    assert model[0].weight.dtype == dtype
    if make is Int8:
        assert_same(before, {name: p.detach() for name, p in layer.named_parameters()})
        model(torch.randn(3, 4)).sum().backward()
        assert model[0].weight.grad.isfinite().all()


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


def test_functional_call_takes_other_weights(device: torch.device, dtype: torch.dtype) -> None:
    """``torch.func.functional_call`` on a converted model: hooks cast as ever."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), device)
    convert(model, dtype)
    x = torch.randn(3, 4, device=device)
    weights = {name: p.detach() * 2 for name, p in model.named_parameters()}
    found = torch.func.functional_call(model, weights, (x,))
    assert found.dtype == torch.float32
    assert not torch.equal(found, model(x))


def test_copies_keep_the_norms(device: torch.device, dtype: torch.dtype) -> None:
    """A deepcopy computes the same, with norms of the same kind."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.RMSNorm(4)), device)
    convert(model, dtype)
    twin = copy.deepcopy(model)
    x = torch.randn(3, 4, device=device)
    assert torch.equal(model(x), twin(x))
    assert [type(m) for m in twin] == [type(m) for m in model]
    assert isinstance(twin[1], nn.LayerNorm)
    assert type(twin[1]) is not nn.LayerNorm
