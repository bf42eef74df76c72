"""What an update rule is: the step of an optimizer, written once as pure functions of tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]


def _zeros(group: Group) -> Mapping[str, float]:
    """All state is zero before the first step."""
    return {}


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of optimizer steps; ``register_rule`` puts it to use.

    The compiled tier steps by it in place of the optimizer's own ``step``. All
    functions are pure. Those of tensors read nothing on the host and choose by
    ``torch.where``, so that they run on any device and under
    ``torch.compile(fullgraph=True, dynamic=True)``, too.

    Values are stepped in *lines*: values of one group, with one count of steps
    and the same scalars. Between parameters lies padding, zeros that are stepped
    along: from zeros, ``update`` must give a parameter of 0 and finite state.

    Attributes:
        state: names, in the optimizer's order, of its fp32 state of the
            parameter's shape.
        scalars: names of its fp32 0-d state, one value for each parameter,
            beside the count of steps; mostly ``()``.
        counts: True iff the optimizer keeps the count of steps, a 0-d ``step``.
        serves: True iff a group's hyperparameters are covered; if not, the
            step is the optimizer's own.
        hyper: a group -> its hyperparameters, Python floats. Called at each
            step: reads a few keys, and leaves the maths to ``numbers``.
        numbers: (step, hyper, scalars) -> (numbers, new scalars), all 1-d with
            one entry for each line. ``step`` is fp64, the number of the step
            about to be made, 1 the first; ``hyper`` a tuple of fp64 columns of
            what ``hyper`` returned; ``scalars`` fp32. The numbers are fp64 and
            rounded once, to fp32; the new scalars are fp32.
        update: a function, (parameter, gradient, numbers, *state) -> (new parameter, *new
            state), for one line: fp32, of one shape; the numbers are a tuple of
            0-d fp32 tensors. The gradient is unscaled, and clipped; for
            ``maximize`` its sign is turned already.
        initial: a group -> what of state and scalars is not zero before a
            parameter's first step, by name. Asked at that step.
        step_: (gradient, numbers, parameter, weight, *state), with the factor
            on the gradient before the numbers: writes the new over the old.
            Made from ``update``.

    Raises:
        ValueError: names are not a tuple of distinct strings, or ``step`` is one.
        TypeError: what must be a function is none.
    """

    state: tuple[str, ...]
    scalars: tuple[str, ...]
    counts: bool
    serves: Callable[[Group], bool]
    hyper: Callable[[Group], tuple[float, ...]]
    numbers: Callable[..., tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]
    update: Callable[..., tuple[Tensor, ...]]
    initial: Callable[[Group], Mapping[str, float]] = _zeros
    step_: Callable[..., None] = field(init=False)

    def __post_init__(self) -> None:
        for what, names in (("state", self.state), ("scalars", self.scalars)):
            if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
                raise ValueError(f"Rule({what}={names!r}): must be a tuple of names. Write ('exp_avg',) for one name.")
        names = (*self.state, *self.scalars)
        if len({*names, "step"}) <= len(names):
            raise ValueError(f"Rule: the names {names} must differ, and none be 'step'. For 'step' set counts=True.")
        for what in ("serves", "hyper", "numbers", "update", "initial"):
            if not callable(function := getattr(self, what)):
                raise TypeError(f"Rule({what}={function!r}): must be a function. See docs/update-rules.md.")
        object.__setattr__(self, "step_", _in_place(self.update))


def _in_place(update: Callable[..., tuple[Tensor, ...]]) -> Callable[..., None]:
    """Return the function that is compiled; its code is its own, since Dynamo counts recompilations by code."""

    def step_(grad: Tensor, numbers: Tensor, master: Tensor, model: Tensor | None, *state: Tensor) -> None:
        scale, *rest = numbers.unbind()
        param, *new = update(master, grad.float() * scale, tuple(rest), *state)
        for old, value in zip(state, new, strict=True):
            old.copy_(value)
        if model is not None:
            model.copy_(param)
        master.copy_(param)

    code = step_.__code__.replace(co_name=f"{getattr(update, '__name__', 'update')}_step_")
    return types.FunctionType(code, step_.__globals__, code.co_name, None, step_.__closure__)


@torch.no_grad()
def fault_of(rule: Rule, group: Group) -> str | None:
    """Return what is wrong with a rule, ``None`` if nothing is to be seen in a step from zeros.

    Whether it is the optimizer's formula, nobody can see here; but a wrong shape would be broadcast over the weights.

    Args:
        rule: steps two lines of three values, all zero, as padding is.
        group: hyperparameters that it serves.

    Raises:
        Exception: whatever the rule's functions raise.

    Syncs: none; all is on the host.
    """
    hyper = rule.hyper(group)
    if not isinstance(hyper, tuple) or not all(isinstance(value, Real) for value in hyper):
        return f"hyper(group) returned {hyper!r}: must be a tuple of numbers"
    lines = torch.ones(2, dtype=torch.float64, device="cpu")
    found = rule.numbers(lines, tuple(lines * value for value in hyper), tuple(lines.float() for _ in rule.scalars))
    if not isinstance(found, tuple) or [type(part) for part in found] != [tuple, tuple]:
        return f"numbers() returned {type(found).__name__}: must be two tuples, (numbers, new scalars)"
    numbers, scalars = found
    if len(scalars) != len(rule.scalars):
        return (
            f"numbers() returned {len(scalars)} new scalars: must be {len(rule.scalars)}, as scalars={rule.scalars!r}"
        )
    if odd := [tuple(each.shape) for each in (*numbers, *scalars) if each.shape != lines.shape]:
        return f"numbers() returned a shape {odd[0]} for 2 lines: must be (2,), one entry for each line"
    return _fault_of_update(rule, tuple(number.float()[0] for number in numbers))


def _fault_of_update(rule: Rule, numbers: tuple[Tensor, ...]) -> str | None:
    given = [torch.zeros(3, dtype=torch.float32, device="cpu") for _ in range(2 + len(rule.state))]
    found = rule.update(given[0], given[1], numbers, *given[2:])
    if not isinstance(found, (tuple, list)) or len(found) != len(given) - 1:
        what = f"{len(found)} values" if isinstance(found, (tuple, list)) else type(found).__name__
        return f"update() returned {what}: must be a tuple of {len(given) - 1}, the parameter and state={rule.state!r}"
    if any(each._version for each in given):
        return "update() wrote into a tensor that it was given: must return new ones"
    if odd := [tuple(each.shape) for each in found if each.shape != given[0].shape]:
        return f"update() returned a shape {odd[0]} for parameters of (3,): must be theirs"
    if bool(found[0].any()) or not all(bool(each.isfinite().all()) for each in found):
        return "update() left zeros, as the padding between parameters is: the parameter must stay 0, the state finite"
    return _mixes(rule, numbers)


def _mixes(rule: Rule, numbers: tuple[Tensor, ...]) -> str | None:
    """Return what is wrong if a value's step depends on its neighbours: parameters of all shapes lie side by side."""
    near = torch.tensor([0.5, 2.0, 0.25], dtype=torch.float32, device="cpu")
    small = [near * (1 + index) for index in range(2 + len(rule.state))]
    large = [64 * each for each in small]
    both = rule.update(*_places([torch.cat(pair) for pair in zip(small, large, strict=True)], numbers))
    alone = zip(*(rule.update(*_places(given, numbers)) for given in (small, large)), strict=True)
    for together, apart in zip(both, alone, strict=True):
        if not torch.allclose(together, torch.cat(apart), rtol=1e-3, atol=1e-6, equal_nan=True):
            return "update() is not element-wise: a value's step depends on others, as in a norm or a mean"
    return None


def _places(given: Sequence[Tensor], numbers: tuple[Tensor, ...]) -> tuple[Any, ...]:
    return given[0], given[1], numbers, *given[2:]


def plain(group: Group, *keys: str) -> bool:
    """True iff the group asks for nothing that only torch's own step has, and ``keys`` are Python numbers."""
    special = group["differentiable"] or group.get("capturable", False)
    return not special and all([isinstance(group[key], (int, float)) for key in keys])  # noqa: C419 (each step; faster)


def correction(beta: Tensor, step: Tensor) -> Tensor:
    """Return 1 - beta**step, without cancellation; exactly 1 for beta = 0, by way of -inf."""
    return -(step * beta.log()).expm1()
