"""``check_optimizer``: which laws hold when an optimizer is wrapped.

Each law compares two runs, bit for bit. Where the bare optimizer does not have
the property itself, the law is not applicable, and the reason says so.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from mixedopt.errors import shown
from mixedopt.groups import nested
from mixedopt.testing.runs import Bare, Factory, Problem, Run, Wrapped, difference, needs_closure, state_of

PASSED, FAILED, NOT_APPLICABLE = "passed", "failed", "not applicable"
DTYPES = (torch.float16, torch.bfloat16)
STEPS = 5
# From all kinds of parameter to those that a matrix optimizer takes. Smaller ones are not quantised.
SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((64, 64), (16,), (), (4, 3, 2, 2), (8, 16)),
    ((64, 64), (16,), (8, 16)),
    ((64, 64), (8, 16)),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one law.

    Attributes:
        law: its name.
        status: ``"passed"``, ``"failed"`` or ``"not applicable"``.
        reason: why it failed or does not apply, else empty.
    """

    law: str
    status: str
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Conformance:
    """What holds for one optimizer; ``print`` it for a table.

    Attributes:
        optimizer: name of its class.
        outcomes: one for each law.
    """

    optimizer: str
    outcomes: tuple[Outcome, ...]

    @property
    def holds(self) -> bool:
        """True iff no law failed."""
        return all(outcome.status != FAILED for outcome in self.outcomes)

    def __getitem__(self, law: str) -> Outcome:
        return {outcome.law: outcome for outcome in self.outcomes}[law]

    def __str__(self) -> str:
        width = max(len(outcome.law) for outcome in self.outcomes)
        lines = [f"{o.law:<{width}}  {o.status}{f': {o.reason}' if o.reason else ''}" for o in self.outcomes]
        return "\n".join([self.optimizer, *lines])


class NotApplicable(Exception):  # noqa: N818 (no error: an answer)
    """The bare optimizer lacks the property."""


def check_optimizer(factory: Factory) -> Conformance:
    """Say which laws hold when ``factory``'s optimizer is wrapped.

    Runs in fp16 and bf16, on the CPU, in seconds. The laws:

    - *equality*: masters and state equal those of the bare optimizer in fp32,
      fed the same half-rounded gradients;
    - *refusal*: what the bare optimizer refuses, the wrapped one refuses with
      the same error, and nothing has changed;
    - *rollback*: a step with an inf or NaN leaves weights, masters, state and
      hyperparameters as they were, also when it is the first;
    - *resume*: a run cut by ``torch.save`` continues as if it had not been;
    - *none gradients*: a parameter without a gradient stays as it is;
    - *scheduler*: a learning rate scheduler drives it as it drives the bare one.

    Args:
        factory: takes a list of fp32 ``nn.Parameter`` and returns a fresh
            optimizer over all of them, the same at every call.

    Returns:
        For each law *passed*, *failed* or *not applicable*, with the reason.

    Raises:
        TypeError: ``factory`` returned no ``torch.optim.Optimizer``.
        ValueError: the bare optimizer steps over none of the tried parameters.

    Example:
        >>> report = check_optimizer(lambda params: torch.optim.AdamW(params, lr=1e-2))
        >>> report.holds, report["resume"].status
        (True, 'passed')
    """
    problem = _solvable(factory)
    name = type(Bare(factory, problem).optimizer).__name__
    laws: dict[str, Callable[[Factory, Problem], str | None]] = {
        "equality": _equality,
        "refusal": _refusal,
        "rollback": _rollback,
        "resume": _resume,
        "none gradients": _none_gradients,
        "scheduler": _scheduler,
    }
    return Conformance(name, tuple(_outcome(law, check, factory, problem) for law, check in laws.items()))


def _outcome(law: str, check: Callable[[Factory, Problem], str | None], factory: Factory, problem: Problem) -> Outcome:
    for dtype in DTYPES:
        try:
            fault = check(factory, dataclasses.replace(problem, dtype=dtype))
        except NotApplicable as reason:
            return Outcome(law, NOT_APPLICABLE, str(reason))
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            return Outcome(law, FAILED, f"{str(dtype).removeprefix('torch.')}: {fault}")
    return Outcome(law, PASSED)


def _solvable(factory: Factory) -> Problem:
    """Return a problem that the bare optimizer can step on: as many kinds of parameter as possible."""
    errors = []
    for sparse in (False, True):
        for shapes in SHAPES[-1:] if sparse else SHAPES:
            problem = Problem(shapes, DTYPES[0], sparse)
            try:
                made = factory([nn.Parameter(weight) for weight in problem.weights()])
                if isinstance(made, torch.optim.Optimizer):
                    _check_holds_all(made, len(shapes))
                    problem = dataclasses.replace(problem, closure=needs_closure(factory, problem))
                    Bare(factory, problem).step(0)
            except Exception as error:
                errors.append(_said(error))
                continue
            if not isinstance(made, torch.optim.Optimizer):
                raise TypeError(f"check_optimizer: the factory returned {shown(made)}, no torch optimizer.")
            return problem
    raise ValueError(f"check_optimizer: the bare optimizer steps over none of the tried parameters. It says {errors}.")


def _check_holds_all(optimizer: torch.optim.Optimizer, count: int) -> None:
    held = sum(len(group["params"]) for group in optimizer.param_groups)
    if held != count:
        raise ValueError(f"the factory's optimizer holds {held} of {count} parameters; it must hold all")


def _equality(factory: Factory, problem: Problem) -> str | None:
    bare, again, wrapped = Bare(factory, problem), Bare(factory, problem), Wrapped(factory, problem)
    for step in range(STEPS):
        for run in (bare, again, wrapped):
            run.step(step)
        if difference(bare.masters(), again.masters()) is not None:
            raise NotApplicable("two bare runs differ")
        fault = _apart(wrapped, bare)
        if fault is not None:
            return f"step {step}: {fault}"
    if difference(bare.masters(), problem.weights()) is None:
        raise NotApplicable("the bare optimizer moves nothing")
    return None


def _refusal(factory: Factory, problem: Problem) -> str | None:
    if problem.shapes == SHAPES[0] and not problem.sparse:
        raise NotApplicable("it refuses no parameter that was tried")
    refused = dataclasses.replace(problem, shapes=SHAPES[0], sparse=False)
    theirs = _error_of(lambda: Bare(factory, refused).step(0))
    try:
        wrapped = Wrapped(factory, refused)
    except Exception as error:
        return None if _said(error) == theirs else f"it says {_said(error)!r}, the bare one {theirs!r}"
    before = wrapped.snapshot()
    ours = _error_of(lambda: wrapped.step(0))
    if ours != theirs:
        return f"it says {ours!r}, the bare one {theirs!r}"
    return difference(wrapped.snapshot(), before)


def _rollback(factory: Factory, problem: Problem) -> str | None:
    for clean in (0, 2):  # the first step, a later one
        for bad in (math.inf, math.nan):
            wrapped, spared = Wrapped(factory, problem), Bare(factory, problem)
            for step in range(clean):
                wrapped.step(step)
                spared.step(step)
            before = wrapped.snapshot()
            wrapped.step(clean, bad=bad)
            if not wrapped.optimizer.last_step.skipped:
                return f"a gradient with {bad} was not skipped"
            fault = difference(wrapped.snapshot(), before)
            for step in range(clean + 1, clean + 3):
                wrapped.step(step)
                spared.step(step)
            fault = fault or _apart(wrapped, spared)
            if fault is not None:
                return f"{bad} in step {clean}: {fault}"
    return None


def _resume(factory: Factory, problem: Problem) -> str | None:
    fault = _cut(lambda: Bare(factory, problem))
    if fault is not None:
        raise NotApplicable(f"the bare optimizer does not resume exactly ({fault})")
    return _cut(lambda: Wrapped(factory, problem))


def _cut(build: Callable[[], Run]) -> str | None:
    """Return where a run that was cut and continued is not where an uncut one is."""
    whole, cut, resumed = build(), build(), build()
    for step in range(2):
        whole.step(step)
        cut.step(step)
    try:
        resumed.load(cut.state_dict())
        for step in range(2, STEPS):
            whole.step(step)
            resumed.step(step)
    except Exception as error:
        return _said(error)
    return difference(resumed.masters(), whole.masters())


def _none_gradients(factory: Factory, problem: Problem) -> str | None:
    absent, steps = (0,), range(3)
    bare, wrapped = Bare(factory, problem), Wrapped(factory, problem)
    try:
        for step in steps:
            bare.step(step, absent=absent if step else ())
            if step == 0:
                before = bare.masters()[0]
    except Exception as error:
        raise NotApplicable(f"the bare optimizer refuses a missing gradient ({_said(error)})") from error
    for step in steps:
        wrapped.step(step, absent=absent if step else ())
    if difference(bare.masters()[0], before) is not None:
        raise NotApplicable("the bare optimizer moves a parameter without a gradient")
    return _apart(wrapped, bare)


def _scheduler(factory: Factory, problem: Problem) -> str | None:
    bare, wrapped, late = Bare(factory, problem), Wrapped(factory, problem), Wrapped(factory, problem)
    if any("lr" not in group for group in bare.optimizer.param_groups):
        raise NotApplicable("it has no learning rate")
    runs: list[Run] = [bare, wrapped, late]
    targets = [bare.optimizer, wrapped.optimizer, late.inner]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler.step.*")
        schedulers = [torch.optim.lr_scheduler.ExponentialLR(target, 0.5) for target in targets]
        for step in range(STEPS):
            for run, scheduler in zip(runs, schedulers, strict=True):
                run.step(step)
                scheduler.step()
    rates = [[float(group["lr"]) for group in target.param_groups] for target in targets]
    if not rates[0] == rates[1] == rates[2]:
        return f"learning rates are {rates[1]} and {rates[2]}, those of the bare optimizer {rates[0]}"
    return _apart(wrapped, bare) or _apart(late, bare)


def _apart(wrapped: Wrapped, bare: Bare) -> str | None:
    """Return where a wrapped run is not where the bare one is."""
    for name, master, weight in zip(_numbers("master"), wrapped.masters(), bare.masters(), strict=False):
        if (fault := difference(master, weight, name)) is not None:
            return fault
    shown_weights = [master.to(wrapped.problem.dtype) for master in wrapped.masters()]
    if difference([param.detach() for param in wrapped.params], shown_weights) is not None:
        return "the model does not show the masters"
    pairs = zip(nested(wrapped.inner), nested(bare.optimizer), strict=True)
    faults = (difference(state_of(ours), state_of(theirs), "state") for ours, theirs in pairs)
    return next((fault for fault in faults if fault is not None), None)


def _numbers(name: str) -> list[str]:
    return [f"{name} {index}" for index in range(len(SHAPES[0]))]


def _error_of(run: Callable[[], None]) -> str | None:
    try:
        run()
    except Exception as error:
        return _said(error)
    return None


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
