"""What an update rule is: the step of an optimizer, written once as pure functions of tensors."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

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

    code = step_.__code__.replace(co_name=f"{update.__name__}_step_")
    return types.FunctionType(code, step_.__globals__, code.co_name, None, step_.__closure__)


def plain(group: Group, *keys: str) -> bool:
    """True iff the group asks for nothing that only torch's own step has, and ``keys`` are Python numbers."""
    special = group["differentiable"] or group.get("capturable", False)
    return not special and all(isinstance(group[key], (int, float)) for key in keys)


def correction(beta: Tensor, step: Tensor) -> Tensor:
    """Return 1 - beta**step, without cancellation; exactly 1 for beta = 0, by way of -inf."""
    return -(step * beta.log()).expm1()
