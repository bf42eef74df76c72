"""What the kernels of a step are written for, in whatever language: a rule, and the tables that go with it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from mixedopt.dialects import Dialect
from mixedopt.judgement import Rules, Standing, judge
from mixedopt.kernel_writer import lines_of
from mixedopt.pieces import Pieces
from mixedopt.rules import Rule

# Whatever the user's defaults are.
ZEROS = functools.partial(torch.zeros, dtype=torch.float32, device="cpu")
# Columns of the table of numbers before those of the rule: whether to step, and the factor on the gradient.
OWN = 2

Lines = tuple[list[str], list[str]]


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What kernels are written for; ``form_of`` makes one of each kind, which each step looks up by its identity.

    Attributes:
        rule: how to step.
        hypers: how many hyperparameters it has.
        initial: names of what is not zero before the first step.
    """

    rule: Rule
    hypers: int
    initial: tuple[str, ...]

    @property
    def numbers(self) -> int:
        """How many numbers the rule makes of its hyperparameters."""
        line = torch.ones(1, dtype=torch.float64, device="cpu")
        return len(self.rule.numbers(line, (line,) * self.hypers, (line.float(),) * len(self.rule.scalars))[0])

    @property
    def width(self) -> int:
        """Columns of the table of numbers, filled up so that every row is aligned to 16 bytes."""
        return -(-(OWN + self.numbers + 1 + len(self.initial)) // 4) * 4


def form_of(rule: Rule, inner: torch.optim.Optimizer) -> Form:
    """Return what kernels for this optimizer are written for."""
    group = inner.param_groups[0]
    return _form(rule, len(rule.hyper(group)), tuple(rule.initial(group)))


_form = functools.cache(Form)


def row_of(form: Form, group: Mapping[str, Any]) -> list[float]:
    """Return a group's row of the table of hyperparameters."""
    sign, initial = -1.0 if group.get("maximize") else 1.0, form.rule.initial(group)
    return [sign, *form.rule.hyper(group), *(initial[name] for name in form.initial)]


def where_of(pieces: Pieces) -> tuple[Tensor, ...]:
    """Return the first arguments of the kernel that updates: which values a program steps."""
    return pieces.slot, pieces.start, pieces.within, pieces.count


class UpdateLauncher(Protocol):
    """A kernel that steps a bucket."""

    def again(self, pieces: int, tensors: Sequence[Tensor], /) -> Callable[[], None]:
        """Return what launches it, again and again: of ``where_of`` pieces, numbers, addresses, weights, state."""


class StepKernels(Protocol):
    """A room of kernels, ``step_kernels`` or ``host_kernels``: what they return is called at every step."""

    def measuring(
        self, addresses: Tensor, pieces: Pieces, source: torch.dtype, evidence: Tensor, aligned: bool
    ) -> Callable[[], None]:
        """Return what measures the gradients of a bucket."""

    def planning(self, form: Form, tensors: Sequence[Tensor | None], slots: int) -> Callable[[Tensor], None]:
        """Return what decides, and works out the numbers of every slot; it is given the report."""

    def update_launcher(
        self, form: Form, device: torch.device, grads: torch.dtype, model: torch.dtype, split: bool, aligned: bool, /
    ) -> UpdateLauncher:
        """Return the launcher of what steps a bucket of such gradients and weights."""


# -- the lines that all languages share ------------------------------------------------------------------------------


def lines_of_judgement(dialect: Dialect) -> Lines:
    """Return the lines that decide, of ``now_*``, ``rule_*``, largest, norm and culprit; and what they make."""
    scalar = ZEROS((), dtype=torch.float64)
    standing = [f"now_{name}" for name in Standing._fields]
    rules = [f"rule_{name}" for name in Rules._fields]
    examples = Standing(*[scalar] * len(standing)), Rules(*[scalar] * len(rules)), scalar, scalar, scalar
    return lines_of(judge, examples, [*standing, *rules, "largest", "norm", "culprit"], "j", dialect)


def lines_of_numbers(form: Form, dialect: Dialect) -> Lines:
    """Return the lines that make a slot's numbers, of ``step``, ``hyper_*`` and ``old_*``; and what they make."""
    rule, line, single = form.rule, ZEROS(4, dtype=torch.float64), ZEROS(4)
    names = ["step", *(f"hyper_{i}" for i in range(form.hypers)), *(f"old_{name}" for name in rule.scalars)]
    examples = line, (line,) * form.hypers, (single,) * len(rule.scalars)
    return lines_of(rule.numbers, examples, names, "n", dialect)


def lines_of_update(form: Form, dialect: Dialect) -> Lines:
    """Return the lines that step a value, of ``param``, ``grad``, ``n*`` and ``old_*``; and what they make."""
    rule, count = form.rule, form.numbers
    wide: Sequence[Tensor] = [ZEROS(4) for _ in range(2 + len(rule.state))]
    examples = wide[0], wide[1], tuple(ZEROS(()) for _ in range(count)), *wide[2:]
    names = ["param", "grad", *(f"n{i}" for i in range(count)), *(f"old_{name}" for name in rule.state)]
    return lines_of(rule.update, examples, names, "u", dialect)
