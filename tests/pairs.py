"""A wrapped model and its bare fp32 twin, fed the same gradients."""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from models import (
    Factory,
    adamw,
    assert_same,
    force_grads,
    fp32_twin,
    masters_of,
    snapshot,
    wrapped,
)
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mixedopt import (
    MixedPrecisionOptimizer,
)

INF, NAN = math.inf, math.nan


def grid(like: Tensor, value: float) -> Tensor:
    """Return an uneven gradient that both half formats hold exactly if ``value`` is a power of two."""
    return ((torch.arange(like.numel(), device=like.device) * 5 % 13 - 6) / 8 * value).view(like.shape)


@dataclass
class Pair:
    """A wrapped model, and a bare fp32 twin that is fed the same half-rounded gradients."""

    model: nn.Module
    optimizer: MixedPrecisionOptimizer
    twin: nn.Module
    bare: torch.optim.Optimizer

    def __post_init__(self) -> None:
        """Round the twin's weights that have no master yet, as the model's were."""
        named, trained = dict(self.twin.named_parameters()), dict(self.optimizer.named_masters())
        for name, param in self.model.named_parameters():
            if name not in trained:
                named[name].data.copy_(param.detach())

    def mirror(self) -> None:
        """Give the twin the model's gradients, divided by S in fp32."""
        for param, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            other.grad = None if param.grad is None else param.grad.float() / self.optimizer.loss_scale

    def step(self) -> None:
        """Step the wrapper, and the twin if it did, and compare."""
        if any(param.grad is not None for param in self.model.parameters()):
            self.mirror()
        self.optimizer.step()
        if self.optimizer.last_step.applied:
            self.bare.step()
        self.check()

    def play(self, *values: float, even: bool = False) -> None:
        """Step with forced gradients: ``value`` times a grid, or everywhere."""
        for value in values:
            force_grads(self.optimizer, value)
            for param in [] if even else self.model.parameters():
                if param.grad is not None:
                    param.grad = grid(param, value * self.optimizer.loss_scale).to(param.dtype)
            self.step()

    def check(self) -> None:
        """Fail unless masters and state are the twin's, bit for bit, and the model shows them."""
        params, twins, state = dict(self.model.named_parameters()), dict(self.twin.named_parameters()), self.bare.state
        for name, master in self.optimizer.named_masters():
            assert torch.equal(twins[name], master), name
            assert torch.equal(master.to(params[name].dtype), params[name]), name
            assert_same(state.get(twins[name], {}), self.optimizer.state.get(params[name], {}), name)


def plain(groups: Any) -> torch.optim.Optimizer:
    """Return an SGD whose step shows the gradient that it was given."""
    return torch.optim.SGD([{"params": group["params"]} for group in groups], lr=1.0)


@dataclass(frozen=True)
class Bench:
    """A device and a half format, and what is made for them."""

    device: torch.device
    dtype: torch.dtype

    def wrapped(self, make: Factory = adamw, **options: Any) -> tuple[nn.Module, MixedPrecisionOptimizer]:
        """Return the two-group model and its wrapper."""
        return wrapped(self.device, self.dtype, make, **options)

    def pair(self, make: Factory = adamw, **options: Any) -> Pair:
        """Return the two-group model, wrapped, and its twin."""
        return Pair(*self.wrapped(make, **options), *fp32_twin(self.device, make))

    def rounded(self, value: float) -> float:
        """Return ``value`` as the half format holds it."""
        return float(torch.tensor(value, dtype=self.dtype))


def linear(model: nn.Module, slope: float) -> Tensor:
    """Return a loss whose gradient is ``slope`` everywhere."""
    return torch.stack([(param.float() * slope).sum() for param in model.parameters() if param.requires_grad]).sum()


def assert_fell(before: dict[str, Tensor], optimizer: MixedPrecisionOptimizer, by: float) -> None:
    """Fail unless every master is what it was less ``by``, bit for bit."""
    assert_same({name: master - by for name, master in before.items()}, masters_of(optimizer))


def seen_by(inner: torch.optim.Optimizer) -> list[list[Tensor]]:
    """Return a list that grows, at each step of ``inner``, by the gradients that it is given."""
    seen: list[list[Tensor]] = []

    def look(inner: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        seen.append([p.grad.clone() for group in inner.param_groups for p in group["params"] if p.grad is not None])

    inner.register_step_pre_hook(look)
    return seen


def norm_of(tensors: Sequence[Tensor]) -> float:
    return float(torch.cat([tensor.flatten().double() for tensor in tensors]).norm())


def kept(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    """Return what a skip must leave alone: everything but S and the counters."""
    return {key: taken for key, taken in snapshot(model, optimizer).items() if key not in ("scale", "counters")}


def rates(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [group["lr"] for group in optimizer.param_groups]


def lbfgs(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.LBFGS([param for group in groups for param in group["params"]], lr=0.5, max_iter=4)


class Doubles(TorchDispatchMode):
    """Counts the operations that return a float64 tensor."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.count += any(isinstance(leaf, Tensor) and leaf.dtype == torch.float64 for leaf in tree_leaves(result))
        return result


def stated(file: str, word: str) -> set[int]:
    """Return the numbers with which the docstrings of a file's tests begin."""
    body = ast.parse(Path(file).read_text("utf-8")).body
    tests = [node for node in body if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")]
    found = (re.match(rf"{word} (\d+): \S", ast.get_docstring(test) or "") for test in tests)
    return {int(number[1]) for number in found if number}
