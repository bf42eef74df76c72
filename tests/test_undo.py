"""The way back: what ``remove()`` leaves is what was there before."""

from __future__ import annotations

import copy
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from models import assert_same, differs, seeded
from torch import Tensor, nn

from mixedopt import CastPolicy, MixedPrecisionOptimizer, PolicyHandle, convert

HOOKS = [
    "_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks",
    "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
]  # fmt: skip
POLICIES = {
    "default": CastPolicy.default(),
    "none": CastPolicy.none(),
    "fp32": CastPolicy.fp32(),
    "functions": CastPolicy.default().keep_functions("softmax", "cumsum"),
    "widths": CastPolicy.default().rule(nn.Linear, param="fp32", compute="half", output="fp32"),
}


class Scaled(nn.Module):
    """A parameter of its own, and a function call."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.ones(width)), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return (self.inner(x) * self.scale).softmax(-1)


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
        taken[f"{name}!"] = (id(param), param.dtype, param.stride(), param.requires_grad, param.shape)
    return taken


def use(model: nn.Module, device: torch.device) -> None:
    model(torch.randn(6, 4, device=device)).float().square().sum().backward()
    model.zero_grad()


@given(
    st.lists(st.sampled_from(list(PARTS)), max_size=4), st.sampled_from(list(POLICIES)), st.booleans(), st.booleans(),
    st.sampled_from([torch.float16, torch.bfloat16]),
)  # fmt: skip
def test_the_way_there_and_back_changes_no_structure(
    parts: list[str], policy: str, training: bool, used: bool, dtype: torch.dtype
) -> None:
    """Any model, policy and mode: classes, attributes, hooks, identity, dtypes, strides; and it computes as ever."""
    device = torch.device("cpu")
    model = build(parts, device).train(training)
    before = structure(model)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    handle = convert(model, dtype, POLICIES[policy])
    assert structure(model) != before
    if used:
        use(model, device)
    else:
        assert_same(buffers, {name: buffer.clone() for name, buffer in model.named_buffers()})
    values = {name: p.detach().float() for name, p in model.named_parameters()}
    handle.remove()
    handle.remove()
    assert structure(model) == before
    assert_same(values, {name: p.detach().clone() for name, p in model.named_parameters()})
    plain = build(parts, device).train(training)
    plain.load_state_dict(model.state_dict())
    x = torch.randn(6, 4)
    assert torch.equal(plain(x), model(x))


@pytest.mark.parametrize("policy", ["default", "functions", "widths"])
def test_masters_come_back_and_training_goes_on(policy: str, device: torch.device, dtype: torch.dtype) -> None:
    """The weights are the masters, bit for bit, and the inner optimizer goes on as an fp32 one would."""
    model = build(["block", "own", "batch norm", "frozen"], device)
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


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_the_way_back_after_an_exception(fault: type[BaseException], device: torch.device, dtype: torch.dtype) -> None:
    """A forward that broke off leaves nothing that ``remove`` would not take away."""

    class Breaks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise fault

    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Scaled(4), Breaks()), device)
    before = structure(model)
    handle = convert(model, dtype, POLICIES["functions"])
    with pytest.raises(fault):
        model(torch.randn(2, 4, device=device))
    handle.remove()
    assert structure(model) == before
    assert torch.ones(2, dtype=dtype).softmax(0).dtype == dtype  # no rule is in force


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
