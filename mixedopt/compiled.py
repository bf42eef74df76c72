"""The compiled tier: unscale, clip, update and publish in one pass over memory.

The order of a step is that of ``mixedopt.eager``, and so is the decision. What
differs is the step itself: a rule (``mixedopt.rules``), compiled, over the flat
buffers, in place of the inner optimizer's own loop over tensors. The state lies
flat, too; ``inner.state`` holds views of it under torch's names, so checkpoints
and a step of the inner optimizer itself do not know the difference. Whenever a
step is not covered (sparse gradients, hooks on the inner optimizer, a tensor as
learning rate), it is the inner optimizer's.

This is the tier of a CPU. On a GPU ``kernel_tier`` takes its place, but for
what the host must decide: shared scales, and micro-steps that may be dropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from mixedopt.bucket import Bucket
from mixedopt.decision import Decision
from mixedopt.eager import EagerTier
from mixedopt.flat import ALIGNMENT
from mixedopt.flat_state import FlatState, adopt_, hand_over_
from mixedopt.gradients import ROW_OF_HALF, clip_factor, half_norm, row_squares
from mixedopt.groups import has_hooks
from mixedopt.rules import Rule, fault_of, rule_for
from mixedopt.walks import walks_for

RECOMPILE_LIMIT = 256
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Run:
    """Slots that lie side by side and step alike: one group, one count of steps, all with a gradient.

    Attributes:
        start, stop: in values of the flat buffers.
        group: number of the group.
        slots: numbers of the first slot and the one after the last.
    """

    start: int
    stop: int
    group: int
    slots: tuple[int, int]


class CountedState(FlatState):
    """Flat state whose counts of steps the host knows.

    Attributes:
        counts: steps that each slot has made.

    Args:
        bucket: whose parameters.
        rule: which state.
    """

    def __init__(self, bucket: Bucket, rule: Rule) -> None:
        names, size = ("step", "begun", *rule.scalars), len(bucket.params)
        steps, begun, *scalars = (torch.zeros(size, dtype=torch.float32, device="cpu") for _ in names)
        super().__init__(bucket, rule, steps, begun, scalars)
        self.counts = [0] * len(bucket.params)

    def show_(self, inner: torch.optim.Optimizer) -> None:
        """As in ``FlatState``; counts are noted on the host, too."""
        super().show_(inner)
        self.counts = [int(count) for count in self.steps.tolist()]

    def alike(self) -> list[tuple[float, ...]]:
        """Return for each slot what those of a run must have in common: count and scalars."""
        return list(zip(self.counts, *(values.tolist() for values in self.scalars), strict=True))

    def numbers(self, inner: torch.optim.Optimizer, runs: Sequence[Run]) -> tuple[tuple[Tensor, ...], list[Any]]:
        """Return the rule's numbers, fp64, one entry for each run, and each run's new scalars."""
        slots = [run.slots[0] for run in runs]
        steps = torch.tensor([self.next_step(run) for run in runs], dtype=torch.float64, device="cpu")
        rows = [self._rule.hyper(inner.param_groups[run.group]) for run in runs]
        hyper = torch.tensor(rows, dtype=torch.float64, device="cpu").unbind(1)
        numbers, scalars = self._rule.numbers(steps, hyper, tuple(values[slots] for values in self.scalars))
        columns = [new.tolist() for new in scalars]
        return numbers, list(zip(*columns, strict=True)) if columns else [()] * len(runs)

    def next_step(self, run: Run) -> int:
        """Return the number of the step that a run is about to make; 1 is the first."""
        return self.counts[run.slots[0]] + 1

    def count_(self, run: Run, scalars: Sequence[float]) -> None:
        """Count a step that a run has made."""
        first, last = run.slots
        number = self.next_step(run)
        self.counts[first:last] = [number] * (last - first)
        self.steps[first:last] = number
        for values, value in zip(self.scalars, scalars, strict=True):
            values[first:last] = value


class CompiledTier(EagerTier):
    """Steps by a compiled rule; see the module.

    Args:
        rule: what ``check_rule`` returned.
        args, kwargs: as for the eager tier.
    """

    name = "compiled"

    def __init__(self, rule: Rule, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rule = rule
        self._states: list[CountedState] = []
        self._walks = walks_for(bucket.device for bucket in self.masters.buckets)
        self._adopted: tuple[Any, tuple[Any, ...]] | None = None
        self._runs: dict[tuple[Any, ...], list[list[Run]]] = {}
        self._compiled = compiled(rule.step_)
        self._squares = compiled(row_squares)

    def _norm(self, *, exact: bool) -> tuple[Tensor, Tensor]:
        return self.window.norm(exact=exact, norm_of_half=self._norm_of_half)

    def _norm_of_half(self, flat: Tensor) -> Tensor:
        return half_norm(flat, self._squares)

    def _apply_(self, decision: Decision) -> None:
        if not self._covers():
            hand_over_(self.inner, self._rule)
            super()._apply_(decision)
            self.disown_()  # the inner optimizer may have made state of its own
            return
        self._adopt_()
        factor = decision.inverse
        if self.max_grad_norm is not None:
            factor = clip_factor(decision.norm, decision.inverse, self.max_grad_norm)
        scale = float(factor)
        moved = self.window.moved(by_rows=False)
        with self.masters.opened():
            try:
                for state, flat, runs in zip(self._states, self.window.flats(), self._runs_of(moved), strict=True):
                    self._step_bucket_(state, flat, runs, scale)
            except BaseException:
                self.drop_gradients_()
                raise
            for bucket, marks in zip(self.masters.buckets, moved, strict=True):
                bucket.note_published_(marks)
        self._adopted = self.inner.state, self._form()
        self.count_applied_()

    def _step_bucket_(self, state: CountedState, flat: Tensor, runs: Sequence[Run], scale: float) -> None:
        if not runs:
            return
        bucket = state.bucket
        groups = self.inner.param_groups
        signs = [-1.0 if groups[run.group].get("maximize", False) else 1.0 for run in runs]
        for run in runs:
            if state.next_step(run) == 1:
                state.begin_(self.inner, run.slots)
        scales = scale * torch.tensor(signs, dtype=torch.float64, device="cpu")
        columns, scalars = state.numbers(self.inner, runs)
        numbers = torch.stack([scales, *columns], 1).float().to(flat.device, non_blocking=True)
        for run, row, new in zip(runs, numbers, scalars, strict=True):
            part = slice(run.start, run.stop)
            model = bucket.flat_model[part] if bucket.is_half else None
            if run.start < run.stop:  # not of empty parameters alone
                self._compiled(flat[part], row, bucket.flat_master[part], model, *[s[part] for s in state.flats])
            if state.next_step(run) == 1:
                state.enter_(self.inner, run.slots)
            state.count_(run, new)

    def _covers(self) -> bool:
        """True iff the rule gives this step, and nobody would miss the inner optimizer's own."""
        covered = all(self._rule.serves(group) for group in self.inner.param_groups)
        return covered and not self.window.sparse and not has_hooks(self.inner)

    def disown_(self) -> None:
        """See the eager tier: what is there now is taken over by the next step."""
        self._adopted = None

    def _adopt_(self) -> None:
        """Make sure that the inner state is ours; after a load, and when parameters were added."""
        buckets = self.masters.buckets
        state, form = self._adopted or (None, ())
        if state is self.inner.state and form == self._form():
            return
        self._states += [CountedState(bucket, self._rule) for bucket in buckets[len(self._states) :]]
        adopt_(self._states, self.inner)
        self._runs.clear()

    def _form(self) -> tuple[Any, ...]:
        """Return by what, beside its identity, state is noticed that others made, or counts that others wrote."""
        counted = (each for state in self._states for each in (state.steps, *state.scalars))
        inner = self.inner
        sizes = len(inner.state), len(self.masters.buckets), len(inner.param_groups)
        return *sizes, *(each._version for each in counted), self._walks.held(inner.state)

    def _runs_of(self, moved: Sequence[Sequence[Any] | None]) -> list[list[Run]]:
        """Return the runs of every bucket, for gradients that are there as ``moved`` says."""
        key = tuple(None if marks is None else tuple(marks) for marks in moved)
        if key not in self._runs:
            self._runs.clear()  # counts of steps have moved since another pattern was seen
            group_of = {p: i for i, group in enumerate(self.inner.param_groups) for p in group["params"]}
            pairs = zip(self._states, moved, strict=True)
            self._runs[key] = [runs_of(state.bucket, state.alike(), marks, group_of) for state, marks in pairs]
        return self._runs[key]


def runs_of(
    bucket: Bucket, counts: Sequence[Any], marks: Sequence[Any] | None, group_of: Mapping[nn.Parameter, int]
) -> list[Run]:
    """Return the slots with a gradient, cut where group or count changes; padding after a slot belongs to its run."""
    offsets = sorted(slot.offset for slot in bucket.layout.slots if slot.numel)
    ends = dict(itertools.pairwise([*offsets, bucket.layout.size]))
    runs: list[Run] = []
    for index, (slot, master) in enumerate(zip(bucket.layout.slots, bucket.masters, strict=True)):
        if marks is not None and not marks[index]:
            continue
        start, stop = slot.offset, ends[slot.offset] if slot.numel else slot.offset
        group, last = group_of[master], runs[-1] if runs else None
        alike = last and (last.group, counts[last.slots[0]]) == (group, counts[index])
        if last and alike and last.slots[1] == index and (last.stop == start or not slot.numel):
            runs[-1] = Run(last.start, max(last.stop, stop), group, (last.slots[0], index + 1))
        else:
            runs.append(Run(start, stop, group, (index, index + 1)))
    return runs


def covering_rule(inner: torch.optim.Optimizer) -> Rule:
    """Return the rule for ``inner``; ``ValueError`` if there is none, or it is seen to be wrong."""
    rule = rule_for(inner)
    if rule is None:
        raise ValueError(
            f"MixedPrecisionOptimizer(tier='compiled'): no rule covers this {type(inner).__name__}. There are rules "
            "for Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, RMSprop, Adadelta, SGD, ASGD and Rprop, without "
            "capturable, differentiable, eps=0 and tensors as hyperparameters, and for what register_rule was told. "
            "Use tier='eager'."
        )
    if (fault := next(filter(None, (fault_of(rule, group) for group in inner.param_groups)), None)) is not None:
        raise ValueError(f"the Rule of {type(inner).__name__}: {fault}. Mend it, or use tier='eager'.")
    return rule


def check_rule(inner: torch.optim.Optimizer, dtypes: Iterable[torch.dtype]) -> Rule:
    """Return the rule for ``inner``, after compiling it, which takes seconds the first time.

    Args:
        inner: the optimizer, before its parameters are replaced.
        dtypes: what they may become.

    Raises:
        ValueError: there is no rule, or torch.compile does not work here.
    """
    rule = covering_rule(inner)
    devices = {param.device for group in inner.param_groups for param in group["params"]}
    one = torch.ones(1, dtype=torch.float64, device="cpu")
    wide = torch.float32
    hyper = tuple(one * value for value in rule.hyper(inner.param_groups[0]))
    count = 1 + len(rule.numbers(one, hyper, tuple(one.float() for _ in rule.scalars))[0])
    for device, dtype in itertools.product(devices, {*dtypes, wide}):
        flats = [torch.zeros(2 * ALIGNMENT, dtype=wide, device=device) for _ in range(1 + len(rule.state))]
        master, *state = flats
        model = None if dtype == wide else master.to(dtype)
        try:
            with torch.no_grad():
                for kind in {master.dtype, dtype}:
                    grad, numbers = torch.zeros_like(master, dtype=kind), master.new_zeros(count)
                    compiled(rule.step_)(grad, numbers, master, model, *state)
                if model is not None and device.type == "cpu":
                    compiled(row_squares)(model.new_zeros(2, ROW_OF_HALF))
        except Exception as error:
            raise ValueError(
                f"MixedPrecisionOptimizer(tier='compiled'): torch.compile does not work for {device} here "
                f"({type(error).__name__}). Install a C++ compiler (on a GPU, Triton), or use tier='eager'."
            ) from error
    return rule


def compiled(function: Callable[..., Result]) -> Callable[..., Result]:
    """Return the compiled function; sizes and numbers may change without another compilation.

    Other things may not: half and fp32, devices, autocast and other states of the process. Each compiles it once more,
    for all optimizers that share it, which are more kinds than Dynamo allows by itself before it raises.

    A CPU has its loops shared out among as many threads as there are when it is called. By itself the compiler settles
    that once, by the sizes that it sees first.
    """
    options: dict[str, Any] = {"cpp.dynamic_threads": True}
    fast: Callable[..., Result] = torch.compile(function, dynamic=True, fullgraph=True, options=options)

    def call(*args: Any) -> Result:
        with torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            return fast(*args)

    return call
