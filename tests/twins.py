"""Wrapped optimizers and their twins: built alike, fed alike, compared by their bits.

No forward is needed: gradients are written into ``.grad`` by hand, scaled and
rounded as a backward would have left them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from optimizers import SHAPES, Inner
from torch import Tensor, nn

from mixedopt import CastPolicy, MixedPrecisionOptimizer

# Each test runs once per inner optimizer and half format, so fewer examples each.
FEW = settings(max_examples=max(settings.default.max_examples // 10, 5))
MANTISSA = 255  # integers up to it are exact in bf16, and so in fp16
GRID = 2.0**-10  # S * n * GRID is exact in both for 1 <= S <= 2**16


class Bag(nn.Module):
    """Parameters without a forward; the first has two names, as a tied one."""

    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        # Containers compute nothing: a kept parameter in one does not make the others fp32.
        self.all = nn.ParameterDict({f"p{i}": param for i, param in enumerate(params)})
        self.again = nn.ParameterDict({"tied": params[0]})


def keeping(positions: Iterable[int]) -> CastPolicy:
    """Return the policy that keeps these parameters of a ``Bag`` in fp32."""
    return CastPolicy.none().keep(*(f"all.p{i}" for i in sorted(positions)))


@dataclass(frozen=True)
class Setup:
    """What is drawn: parameters, their grouping, and the workflow.

    Attributes:
        kinds: names in ``SHAPES``, per group.
        kept: parameters that stay fp32, by position.
        with_model: True iff the model is fp32 and converted by the wrapper.
    """

    kinds: tuple[tuple[str, ...], ...]
    seed: int
    kept: frozenset[int]
    with_model: bool

    @property
    def count(self) -> int:
        return sum(map(len, self.kinds))

    def values(self) -> list[list[Tensor]]:
        """Return fresh fp32 values, per group."""
        generator = torch.Generator().manual_seed(self.seed)
        return [[SHAPES[kind](generator) for kind in group] for group in self.kinds]

    def build(
        self, inner: Inner, dtype: torch.dtype, device: torch.device, **options: Any
    ) -> tuple[MixedPrecisionOptimizer, list[nn.Parameter]]:
        """Return a wrapped optimizer and the model's parameters."""
        groups = self.fp32_groups(device)
        params = [param for group in groups for param in group]
        if self.with_model:
            options |= {"model": Bag(params), "dtype": dtype, "policy": keeping(self.kept)}
            optimizer = MixedPrecisionOptimizer(inner(groups), **options)
            assert all((param.dtype == dtype) == (i not in self.kept) for i, param in enumerate(params))
            return optimizer, params
        for i, param in enumerate(params):
            param.data = param.data.to(torch.float32 if i in self.kept else dtype)
        return MixedPrecisionOptimizer(inner(groups), **options), params

    def build_bare(
        self, inner: Inner, dtype: torch.dtype, device: torch.device
    ) -> tuple[torch.optim.Optimizer, list[nn.Parameter]]:
        """Return the bare optimizer over dense fp32 parameters with the same start."""
        groups = [[nn.Parameter(param.detach().clone()) for param in group] for group in self.fp32_groups(device)]
        params = [param for group in groups for param in group]
        for i, param in enumerate(params):
            if not (self.with_model or i in self.kept):
                param.data = param.data.to(dtype).float()
        return inner(groups), params

    def fp32_groups(self, device: torch.device) -> list[list[nn.Parameter]]:
        return [[nn.Parameter(value.to(device)) for value in group] for group in self.values()]


@st.composite
def setups(draw: st.DrawFn, inner: Inner, *, with_model: bool | None = None) -> Setup:
    """Draw one to three groups of the kinds that ``inner`` takes."""
    group = st.lists(st.sampled_from(inner.kinds), min_size=1, max_size=3).map(tuple)
    kinds = tuple(draw(st.lists(group, min_size=1, max_size=3)))
    count = sum(map(len, kinds))
    kept = draw(st.frozensets(st.integers(0, count - 1), max_size=2))
    model = draw(st.booleans()) if with_model is None else with_model
    return Setup(kinds, draw(st.integers(0, 2**16)), kept, model)


def plans(inner: Inner, count: int, lowest: int = 0, highest: int = 0) -> st.SearchStrategy[list[int | None]]:
    """Draw one step: for every parameter a binary exponent, or ``None`` for no gradient."""
    exponents = st.integers(lowest, highest)
    return st.lists(exponents if inner.refuses_late else st.none() | exponents, min_size=count, max_size=count)


def random_step(params: Sequence[Tensor], seed: int, plan: Sequence[int | None]) -> list[Tensor | None]:
    """Return normal gradients times two to the exponents of the plan, in fp32."""
    generator = torch.Generator().manual_seed(seed)
    normal = [laid_out_as(param, torch.randn(param.shape, generator=generator)) for param in params]
    return [None if e is None else values * 2.0**e for values, e in zip(normal, plan, strict=True)]


def grid_like(param: Tensor, seed: int) -> Tensor:
    """Return gradients that stay exact in half under every scale from 1 to 2**16."""
    generator = torch.Generator().manual_seed(seed)
    return laid_out_as(param, torch.randint(-MANTISSA, MANTISSA + 1, param.shape, generator=generator) * GRID)


def laid_out_as(param: Tensor, values: Tensor) -> Tensor:
    """Return ``values`` in fp32 with strides and device of ``param``, as autograd would make its gradient.

    Torch's fused kernels on a CPU read both linearly: other strides give them other values.
    """
    return torch.empty_like(param, dtype=torch.float32).copy_(values).detach()


def grid_step(params: Sequence[Tensor], seed: int, plan: Sequence[int | None]) -> list[Tensor | None]:
    """Return true gradients for one step, ``None`` where the plan says so."""
    return [
        None if exponent is None else grid_like(param, seed + i)
        for i, (param, exponent) in enumerate(zip(params, plan, strict=True))
    ]


def force_(optimizer: MixedPrecisionOptimizer, params: Sequence[nn.Parameter], grads: Sequence[Tensor | None]) -> None:
    """Write S times the true gradients, rounded as the parameter is, into ``.grad``."""
    scale = optimizer.loss_scale
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else (grad * scale).to(param.dtype)


def poison_(params: Sequence[nn.Parameter], where: float, value: float) -> None:
    """Overwrite one gradient element, at a fraction of all elements that there are."""
    present = [param.grad for param in params if param.grad is not None and param.grad.numel()]
    index = min(int(where * sum(grad.numel() for grad in present)), sum(grad.numel() for grad in present) - 1)
    for grad in present:
        if index < grad.numel():
            grad[tuple(torch.unravel_index(torch.tensor(index), grad.shape))] = value
            return
        index -= grad.numel()


def masters_of(optimizer: MixedPrecisionOptimizer) -> list[nn.Parameter]:
    """Return the masters in group order."""
    return [master for group in optimizer.inner.param_groups for master in group["params"]]


def snapshot(optimizer: MixedPrecisionOptimizer, model: nn.Module | None = None) -> dict[str, Any]:
    """Return copies of all that a skipped step must leave as it was, by path."""
    found: dict[str, Any] = {"applied_steps": optimizer.applied_steps}
    for g, (outer, inner) in enumerate(zip(optimizer.param_groups, optimizer.inner.param_groups, strict=True)):
        found |= {f"group {g} {key}": value for key, value in inner.items() if key != "params"}
        found |= {f"weight {g}.{i}": param.detach() for i, param in enumerate(outer["params"])}
        for i, master in enumerate(inner["params"]):
            found[f"master {g}.{i}"] = master.detach()
            if master in optimizer.inner.state:
                entry = optimizer.inner.state[master]
                found |= {f"state {g}.{i} {key}": value for key, value in entry.items()}
    if model is not None:
        found |= {f"model {name}": value.detach() for name, value in model.state_dict().items()}
    return {key: value.clone() if isinstance(value, Tensor) else value for key, value in found.items()}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[str]:
    """Return the paths at which two snapshots differ, by a single bit or more."""
    assert ours is not theirs
    unequal = [key for key in ours.keys() & theirs.keys() if not same_bits(ours[key], theirs[key])]
    return sorted(unequal + list(ours.keys() ^ theirs.keys()))


def same_bits(ours: Any, theirs: Any) -> bool:
    """True iff both are equal, tensors by type, shape and every bit; NaN equals NaN, -0 not 0."""
    if not (isinstance(ours, Tensor) and isinstance(theirs, Tensor)):
        return bool(ours == theirs) or (isinstance(ours, float) and math.isnan(ours) and math.isnan(theirs))
    if ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    return torch.equal(_bits(ours), _bits(theirs))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def all_same_bits(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    """True iff the lists hold the same bits in different memory."""
    assert all(
        a is not b and (not a.numel() or a.data_ptr() != b.data_ptr()) for a, b in zip(ours, theirs, strict=True)
    )
    return all(same_bits(a.detach(), b.detach()) for a, b in zip(ours, theirs, strict=True))
