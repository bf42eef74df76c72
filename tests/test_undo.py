"""The way back: what ``remove()`` leaves is what was there before."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from models import assert_same, differs, seeded
from torch import Tensor, nn
from torch.nn.utils import prune

from mixedopt import CastPolicy, MixedPrecisionOptimizer, PolicyHandle, convert

HOOKS = [
    "_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
]  # fmt: skip


def is_norm(module: nn.Module) -> bool:
    return isinstance(module, (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm))


POLICIES = {
    "default": CastPolicy.default(),
    "none": CastPolicy.none(),
    "fp32": CastPolicy.fp32(),
    "functions": CastPolicy.default().keep_functions("softmax", "cumsum"),
    "widths": CastPolicy.default().rule(nn.Linear, param="fp32", compute="half", output="fp32"),
    "fp32 by the call": CastPolicy.default().rule(nn.Linear, compute="fp32"),
    "norms too": CastPolicy.default().half(nn.Module),
    "norms by the call": CastPolicy.default().rule(lambda name, module: name == "0" or is_norm(module), compute="fp32"),
}


class Scaled(nn.Module):
    """A parameter of its own, and a function call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale).softmax(-1)


class Recurrent(nn.Module):
    """A recurrent layer without its state."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]


def old_weight_norm() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return nn.utils.weight_norm(nn.Linear(4, 4))


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(4, 4), "weight", 0.5)


PARTS: dict[str, Any] = {
    "linear": lambda: nn.Linear(4, 4),
    "layer norm": lambda: nn.LayerNorm(4),
    "rms norm": lambda: nn.RMSNorm(4),
    "group norm": lambda: nn.GroupNorm(2, 4),
    "batch norm": lambda: nn.BatchNorm1d(4),
    "softmax": lambda: nn.Softmax(-1),
    "dropout": lambda: nn.Dropout(0.0),
    "weight norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    "own": lambda: Scaled(4),
    "block": lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)),
    "old weight norm": old_weight_norm,
    "old spectral norm": lambda: nn.utils.spectral_norm(nn.Linear(4, 4)),
    "pruned": pruned,
    "lstm": lambda: Recurrent(nn.LSTM(4, 4, num_layers=2)),
    "gru": lambda: Recurrent(nn.GRU(4, 2, bidirectional=True)),
    "untracked": lambda: nn.BatchNorm1d(4, affine=False, track_running_stats=False),
    "frozen": lambda: nn.Linear(4, 4).requires_grad_(False),
}


def build(parts: list[str], device: torch.device) -> nn.Module:
    """Return a chain of parts, ends tied if both are linear."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), *(PARTS[part]() for part in parts), nn.Linear(4, 4)), device)
    model[-1].weight = model[0].weight
    return model


def structure(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model but the values of its parameters."""
    taken: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        taken[name] = (type(module), module.training, sorted(vars(module)), {h: dict(vars(module)[h]) for h in HOOKS})
    for name, param in model.named_parameters(remove_duplicate=False):
        taken[f"{name}!"] = (id(param), param.dtype, param.stride(), param.requires_grad, param.shape, param.is_leaf)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        taken[f"{name}?"] = (buffer.dtype, buffer.stride(), buffer.shape)
    return taken


def there_and_back(model: nn.Module, policy: CastPolicy, dtype: torch.dtype, x: Tensor, used: bool = True) -> Tensor:
    """Convert, use and restore a model; fail if anything but weights and statistics changed. Return its output."""
    before = structure(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handle = convert(model, dtype, policy)
    assert structure(model) != before
    if used:
        model(x).float().square().sum().backward()
        model.zero_grad()
    else:
        assert_same(buffers, {name: buffer.clone() for name, buffer in model.named_buffers()})
    values = {name: p.detach().float() for name, p in model.named_parameters()}
    handle.remove()
    handle.remove()
    assert structure(model) == before
    assert_same(values, {name: p.detach().clone() for name, p in model.named_parameters()})
    return model(x)


@given(
    st.lists(st.sampled_from(list(PARTS)), max_size=4), st.sampled_from(list(POLICIES)), st.booleans(), st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_the_way_there_and_back_changes_no_structure(
    parts: list[str], policy: str, training: bool, used: bool, dtype: torch.dtype
) -> None:
    """Any model, policy and mode: classes, attributes, hooks, identity, dtypes, strides; and it computes as ever."""
    device = torch.device("cpu")
    model, plain = (build(parts, device).train(training) for _ in range(2))
    x = torch.randn(6, 4)
    weights: dict[str, Tensor] = {}
    look = model.register_forward_pre_hook(lambda module, args: weights.update(copy.deepcopy(module.state_dict())))
    found = there_and_back(model, POLICIES[policy], dtype, x, used)
    look.remove()
    plain.load_state_dict(weights)  # as they were when the last forward began
    assert torch.equal(plain(x), found)


@pytest.mark.parametrize("part", list(PARTS))
def test_every_part_comes_back(part: str, device: torch.device, dtype: torch.dtype) -> None:
    """Each kind of layer by itself, under every policy, one after the other."""
    model, x = build([part], device), torch.randn(6, 4, device=device)
    for policy in POLICIES.values():
        there_and_back(model, policy, dtype, x)


@pytest.mark.parametrize(
    "policy",
    list(POLICIES),
)
def test_attention_comes_back(policy: str, device: torch.device, dtype: torch.dtype) -> None:
    """A layer of attention, whose projection is a child that is never called."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.TransformerEncoderLayer(4, 2, 8, 0.0)), device)
    there_and_back(model, POLICIES[policy], dtype, torch.randn(6, 4, device=device))


@pytest.mark.parametrize("policy", ["default", "none"])
def test_layouts_come_back(policy: str, device: torch.device, dtype: torch.dtype) -> None:
    """Weights in channels_last and transposed ones keep their strides, without an optimizer."""

    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3, 4).t())

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    make = lambda: nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4), nn.Flatten(2), Transposed())  # noqa: E731
    model = seeded(make, device).to(memory_format=torch.channels_last)
    there_and_back(model, POLICIES[policy], dtype, torch.randn(2, 3, 3, 3, device=device))
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last)
    assert model[3].weight.stride() == (1, 4)


@pytest.mark.parametrize("policy", list(POLICIES))
def test_masters_come_back_and_training_goes_on(policy: str, device: torch.device, dtype: torch.dtype) -> None:
    """The weights are the masters, bit for bit, and the inner optimizer goes on as an fp32 one would."""
    model = build(["block", "own", "batch norm", "weight norm", "frozen"], device)
    before = structure(model)
    inner = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=POLICIES[policy])
    x = torch.randn(6, 4, device=device)
    for _ in range(3):
        optimizer.backward(model(x).square().mean())
        optimizer.step()
    masters = {name: master.detach().clone() for name, master in optimizer.named_masters()}
    optimizer.policy_handle.remove()
    assert structure(model) == before
    found = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert_same(masters, found)
    assert differs(masters, {name: value.to(dtype).float() for name, value in masters.items()})
    optimizer.policy_handle.remove()
    assert_same(masters, {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad})

    twin = copy.deepcopy(model)
    other = torch.optim.AdamW([p for p in twin.parameters() if p.requires_grad], lr=1e-2)
    other.load_state_dict(copy.deepcopy(inner.state_dict()))
    for net, plain in ((model, inner), (twin, other)):
        plain.zero_grad()
        net(x).square().mean().backward()
        plain.step()
    assert_same(
        {n: p.detach() for n, p in model.named_parameters()}, {n: p.detach() for n, p in twin.named_parameters()}
    )


def test_a_model_that_was_half_is_half_again(device: torch.device, dtype: torch.dtype) -> None:
    """``convert`` of a half model: islands were widened, and are half again."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), device).to(dtype)
    before = structure(model), {name: p.detach().clone() for name, p in model.named_parameters()}
    handle = convert(model, dtype)
    assert model[1].weight.dtype == torch.float32
    handle.remove()
    assert structure(model) == before[0]
    assert_same(before[1], {name: p.detach() for name, p in model.named_parameters()})


def test_a_half_model_that_was_trained_is_fp32_as_a_whole(device: torch.device, dtype: torch.dtype) -> None:
    """Trained weights come from the masters; the frozen ones follow them, or no input would fit both."""
    make = lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4))  # noqa: E731
    model = seeded(make, device).to(dtype)
    inner = torch.optim.SGD(model[1].parameters(), lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=1.0)
    x = torch.randn(2, 4, device=device)
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    frozen = model[0].weight.detach().float()
    optimizer.policy_handle.remove()
    assert model(x).dtype == torch.float32
    assert_same(frozen, model[0].weight.detach())


def test_what_was_taken_out_comes_back_too(device: torch.device, dtype: torch.dtype) -> None:
    """A layer that was replaced since the conversion is an fp32 layer of torch again, without hooks."""
    model = build(["block", "own"], device)
    block, own = model[1], model[2]
    before = structure(block), structure(own)
    handle = convert(model, dtype, POLICIES["functions"])
    model[1], model[2] = nn.Identity(), nn.Identity()
    handle.remove()
    assert (structure(block), structure(own)) == before


class Breaks(nn.Linear):
    """A layer whose forward does not end."""

    fault: type[BaseException] = RuntimeError

    def forward(self, x: Tensor) -> Tensor:
        raise self.fault


@pytest.mark.parametrize("again", [False, True], ids=["at once", "after another forward"])
@pytest.mark.parametrize("policy", list(POLICIES))
@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_the_way_back_after_an_exception(
    fault: type[BaseException],
    policy: str,
    again: bool,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """A forward that broke off leaves nothing that ``remove`` would not take away."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Scaled(4), nn.LayerNorm(4), Breaks(4, 4)), device)
    model[3].fault = fault
    before = structure(model)
    handle = convert(model, dtype, POLICIES[policy])
    x = torch.randn(2, 4, device=device)
    with pytest.raises(fault):
        model(x)
    if again:
        model[3].fault = RuntimeError
        with pytest.raises(RuntimeError):
            model(x)
        model[3].fault = fault
    handle.remove()
    assert structure(model) == before
    assert torch.ones(2, dtype=dtype).softmax(0).dtype == dtype  # no rule is in force
    model[3] = nn.Identity()
    assert model(x).dtype == torch.float32


def test_a_model_converts_again(device: torch.device, dtype: torch.dtype) -> None:
    """With another policy and another format, after the way back."""
    model = build(["block"], device)
    first = convert(model, dtype)
    assert isinstance(first, PolicyHandle)
    first.remove()
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    convert(model, other, CastPolicy.none())
    assert {p.dtype for p in model.parameters()} == {other}
    first.remove()
    assert {p.dtype for p in model.parameters()} == {other}


def test_a_refused_conversion_changes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    """A rule that matches nothing, a weight that does not fit, a second conversion."""
    model = build(["block", "own"], device)
    before, weights = structure(model), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="matches no module and no parameter"):
        convert(model, dtype, CastPolicy.default().keep("nowhere"))
    assert structure(model) == before
    if dtype == torch.float16:
        with torch.no_grad():
            model[1][0].weight[0, 0] = 1e6
        with pytest.raises(ValueError, match=r"'1.0.weight' holds 1e\+06, beyond the largest value"):
            convert(model, dtype)
        assert structure(model) == before
        model.load_state_dict(weights)
    assert_same(dict(weights), copy.deepcopy(dict(model.state_dict())))
    handle = convert(model, dtype)
    converted = structure(model)
    assert repr(handle) == f"PolicyHandle('default', {dtype})"
    with pytest.raises(ValueError, match="the model is converted already"):
        convert(model, dtype)
    assert structure(model) == converted
    handle.remove()
    assert repr(handle).endswith(", removed)")
    assert structure(model) == before
