"""The same small run twice: by a bare optimizer in fp32, and by a wrapped one in half."""

from __future__ import annotations

import contextlib
import dataclasses
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mixedopt.closures import requires_closure
from mixedopt.copies import copied
from mixedopt.groups import nested
from mixedopt.optimizer import MixedPrecisionOptimizer
from mixedopt.policy import CastPolicy

Factory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

SCALE = 2.0**7  # every gradient times S is a normal number in fp16


@dataclass(frozen=True, slots=True)
class Problem:
    """What the two runs have in common.

    Attributes:
        shapes: of the parameters.
        dtype: the half format.
        sparse: True iff gradients are sparse.
        closure: True iff ``step`` gets a closure.
        seed: of weights and gradients.
    """

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype
    sparse: bool = False
    closure: bool = False
    seed: int = 0

    def weights(self) -> list[Tensor]:
        """Return fp32 weights; every call the same."""
        generator = torch.Generator().manual_seed(self.seed)
        return [torch.randn(shape, generator=generator) for shape in self.shapes]

    def gradients(self, step: int, weights: Sequence[Tensor]) -> list[Tensor | None]:
        """Return half gradients, times ``SCALE``.

        Without a closure they depend on the step alone. With one they are those
        of ``loss`` at the half weights given.
        """
        if self.closure:
            return [(weight.float() * ((1 + i) * SCALE)).to(self.dtype) for i, weight in enumerate(weights)]
        generator = torch.Generator().manual_seed(1000 * self.seed + step + 1)
        drawn = [torch.randn(shape, generator=generator) for shape in self.shapes]
        return [self._laid_out(grad.mul_(SCALE).to(self.dtype)) for grad in drawn]

    def loss(self, weights: Sequence[Tensor]) -> Tensor:
        """Return a quadratic, steeper in each parameter than in the one before."""
        squares = [(1 + i) / 2 * weight.float().square().sum() for i, weight in enumerate(weights)]
        return torch.stack(squares).sum()

    @contextlib.contextmanager
    def randomness(self, step: int) -> Iterator[None]:
        """Context in which torch draws the same numbers at every call."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1000 * self.seed + step)
            yield

    def _laid_out(self, grad: Tensor) -> Tensor:
        if not self.sparse:
            return grad
        rows = torch.tensor([0, grad.shape[0] - 1])
        return torch.sparse_coo_tensor(
            rows.unsqueeze(0), grad[rows], grad.shape, is_coalesced=True, check_invariants=False
        )


class Run(Protocol):
    """A run that can be cut and continued."""

    def step(self, step: int) -> None:
        """Step on the gradients of ``step``."""

    def masters(self) -> list[Tensor]:
        """Return copies of the fp32 weights."""

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict that went through a file."""

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``."""


class Bare:
    """The optimizer as its author wrote it, over fp32 parameters."""

    def __init__(self, factory: Factory, problem: Problem) -> None:
        self.problem = problem
        self.params = [nn.Parameter(weight) for weight in problem.weights()]
        with problem.randomness(0):
            self.optimizer = factory(self.params)

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The optimizer itself."""
        return self.optimizer

    def step(self, step: int, *, absent: Sequence[int] = ()) -> None:
        """Step on the gradients of ``step``; the parameters ``absent`` have none."""

        def evaluate() -> Tensor:
            seen = [param.detach().to(self.problem.dtype) for param in self.params]
            grads = self.problem.gradients(step, seen)
            for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
                param.grad = None if grad is None or index in absent else _unscaled(grad)
            return self.problem.loss(seen)

        evaluate()  # also before a closure, for those that want gradients then
        closure = [evaluate] if self.problem.closure else []
        with self.problem.randomness(step):
            self.optimizer.step(*closure)  # type: ignore[arg-type]  # torch's own closures return tensors
        for param in self.params:
            param.grad = None

    def masters(self) -> list[Tensor]:
        """Return copies of the fp32 weights."""
        return [param.detach().clone() for param in self.params]

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict that went through a file, and the weights."""
        return {"weights": self.masters(), "optimizer": through_file(self.optimizer.state_dict())}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        with torch.no_grad():
            for param, weight in zip(self.params, saved["weights"], strict=True):
                param.copy_(weight)
        self.optimizer.load_state_dict(saved["optimizer"])


class Wrapped:
    """The same optimizer inside ``MixedPrecisionOptimizer``, over a half model."""

    def __init__(self, factory: Factory, problem: Problem) -> None:
        self.problem = problem
        self.model = nn.ParameterList([nn.Parameter(weight) for weight in problem.weights()])
        self.params = list(self.model.parameters())
        with problem.randomness(0):
            inner = factory(self.params)
        self.optimizer = MixedPrecisionOptimizer(
            inner, self.model, dtype=problem.dtype, policy=CastPolicy.none(), loss_scale=SCALE
        )

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        return self.optimizer.inner

    def step(self, step: int, *, absent: Sequence[int] = (), bad: float | None = None) -> None:
        """Step as ``Bare.step``; ``bad`` replaces the last value of the last gradient."""

        def evaluate() -> Tensor:
            self.optimizer.zero_grad()
            self.optimizer.scale(torch.zeros(()))
            seen = [param.detach() for param in self.params]
            grads = self.problem.gradients(step, seen)
            for index, (param, grad) in enumerate(zip(self.params, grads, strict=True)):
                param.grad = None if index in absent else grad
            last = [param.grad for param in self.params if param.grad is not None][-1]
            if bad is not None:
                (last._values() if last.is_sparse else last).view(-1)[-1] = bad
            return self.problem.loss(seen)

        evaluate()
        closure = [evaluate] if self.problem.closure else []
        with self.problem.randomness(step):
            self.optimizer.step(*closure)

    def masters(self) -> list[Tensor]:
        """Return copies of the masters, in the order of the parameters."""
        by_name = dict(self.optimizer.named_masters())
        return [by_name[str(index)].detach().clone() for index in range(len(self.params))]

    def state_dict(self) -> dict[str, Any]:
        """Return a state dict that went through a file, and the weights."""
        return {"model": through_file(self.model.state_dict()), "optimizer": through_file(self.optimizer.state_dict())}

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def snapshot(self) -> dict[str, Any]:
        """Return copies of everything that a skipped step must leave as it is."""
        return {
            "weights": [param.detach().clone() for param in self.params],
            "masters": self.masters(),
            "state": [state_of(each) for each in nested(self.inner)],
            "groups": [[_hyper(group) for group in each.param_groups] for each in nested(self.inner)],
        }


def state_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return a copy of an optimizer's state, in the order of its parameters."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [copied(optimizer.state[param]) if param in optimizer.state else {} for param in params]


def difference(ours: Any, theirs: Any, path: str = "") -> str | None:
    """Return where two nested values differ, ``None`` if they are the same, tensors bit for bit."""
    if isinstance(ours, Tensor) and isinstance(theirs, Tensor):
        return None if _same_bits(ours, theirs) else f"{path} differs{_by(ours, theirs)}"
    if isinstance(ours, Tensor) or isinstance(theirs, Tensor):
        return f"{path} is a {type(ours).__name__}, not a {type(theirs).__name__}"
    if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
        if set(ours) != set(theirs):
            return f"{path} has the keys {sorted(map(str, ours))}, not {sorted(map(str, theirs))}"
        pairs = ((str(key), ours[key], theirs[key]) for key in ours)
    elif isinstance(ours, (list, tuple)) and isinstance(theirs, (list, tuple)):
        if len(ours) != len(theirs):
            return f"{path} has {len(ours)} entries, not {len(theirs)}"
        pairs = ((str(index), *pair) for index, pair in enumerate(zip(ours, theirs, strict=True)))
    else:
        return None if ours == theirs or ours is theirs else f"{path} is {ours!r}, not {theirs!r}"
    found = (difference(mine, other, f"{path}.{key}" if path else key) for key, mine, other in pairs)
    return next((text for text in found if text is not None), None)


def needs_closure(factory: Factory, problem: Problem) -> bool:
    """True iff the bare optimizer does not step without a closure, but does with one."""
    if requires_closure(factory([nn.Parameter(weight) for weight in problem.weights()])):
        return True
    try:
        Bare(factory, problem).step(0)
    except Exception:
        try:
            Bare(factory, dataclasses.replace(problem, closure=True)).step(0)
        except Exception:
            return False
        return True
    return False


def through_file(value: Any) -> Any:
    """Return ``value`` after ``torch.save`` and ``torch.load``."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def _unscaled(grad: Tensor) -> Tensor:
    if grad.is_sparse:
        return torch.sparse_coo_tensor(
            grad._indices(), grad._values().float() / SCALE, grad.shape, is_coalesced=True, check_invariants=False
        )
    return grad.float() / SCALE


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: copied(value) for key, value in group.items() if key != "params"}


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if type(ours) is not type(theirs) or ours.dtype != theirs.dtype or ours.shape != theirs.shape:
        return False
    if hasattr(ours, "__tensor_flatten__"):
        names, _ = ours.__tensor_flatten__()
        return all(_same_bits(getattr(ours, name), getattr(theirs, name)) for name in names)
    return torch.equal(torch.nan_to_num(ours), torch.nan_to_num(theirs)) and torch.equal(ours != ours, theirs != theirs)


def _by(ours: Tensor, theirs: Tensor) -> str:
    if ours.shape != theirs.shape or not (ours.is_floating_point() and theirs.is_floating_point()):
        return ""
    return f" by up to {float((ours.double() - theirs.double()).abs().max()):.2g}"
