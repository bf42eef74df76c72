"""The compiled tier: kernels of ours make the step, and the host waits for no device.

The kernels (``step_kernels`` on a GPU, ``host_kernels`` on a CPU) are written from the optimizer's rule. State lies
in flat buffers, counts of steps and hyperparameters in small tables on the
device; ``inner.state`` holds views under torch's names. What no rule covers is
the inner optimizer's own step, by way of the eager tier.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixedopt.collecting import Collected
from mixedopt.decision import Decision
from mixedopt.device_tier import DeviceTier
from mixedopt.flat_state import FlatState, adopt_, hand_over_
from mixedopt.forms import StepKernels, form_of, row_of, where_of
from mixedopt.groups import has_hooks
from mixedopt.kernels import on_device
from mixedopt.numbering import Numbering
from mixedopt.rules import Rule
from mixedopt.walks import walks_for


class Launches(NamedTuple):
    """The kernels of a step after those that measure.

    Attributes:
        plan: is given the report.
        updates: of each bucket.
    """

    plan: Callable[[Tensor], None]
    updates: list[Callable[[], None]]


class Tables:
    """What the kernels read and write of every slot, at home; see ``step_kernels``.

    Attributes:
        steps: fp32, how many steps each slot has made.
        begun: fp32, 1 for each slot that has made one.
        scalars: fp32, the rule's.
        group_of: int32.
        form: what they are written for.
        hyper: fp64, a row for each group.
        numbers: fp32, a row for each slot.
        states: of each bucket.
        parts: each bucket's of ``numbers``.
        rooms: the same on the bucket's device: the part itself, or a copy.
        launches: of the kinds of steps that were made, ready to be made again.
    """

    def __init__(self, rule: Rule, inner: torch.optim.Optimizer, numbering: Numbering) -> None:
        self.numbering = numbering
        home, slots = numbering.home, numbering.slots
        groups = inner.param_groups
        self.form = form_of(rule, inner)
        # Kernels know the dtypes: the default one may be another.
        self.steps = torch.zeros(slots, dtype=torch.float32, device=home)
        self.begun, *self.scalars = (torch.zeros_like(self.steps) for _ in ("begun", *rule.scalars))
        self.hyper = torch.zeros((len(groups), len(row_of(self.form, groups[0]))), dtype=torch.float64, device=home)
        self.numbers = torch.zeros((slots, self.form.width), dtype=torch.float32, device=home)
        number_of = {param: number for number, group in enumerate(groups) for param in group["params"]}
        group_of = [0] * slots
        self.states: list[FlatState] = []
        self.parts: list[Tensor] = []
        self.rooms: list[Tensor] = []
        for bucket, first in zip(numbering.buckets, numbering.firsts, strict=True):
            own = slice(first, first + len(bucket.params))
            group_of[own] = [number_of[master] for master in bucket.masters]
            steps, begun, *scalars = (each[own] for each in (self.steps, self.begun, *self.scalars))
            self.states.append(FlatState(bucket, rule, steps, begun, scalars))
            self.parts.append(self.numbers[own])
            self.rooms.append(self.parts[-1].to(bucket.device))
        self.launches: dict[tuple[Any, ...], Launches] = {}
        self.group_of = torch.tensor(group_of, dtype=torch.int32, device="cpu").to(home)


class KernelTier(DeviceTier):
    """Steps by a rule, in kernels; see the module.

    Args:
        rule: of the inner optimizer.
        kernels: their room.
        args, options: as for ``DeviceTier``.
    """

    name = "compiled"

    def __init__(self, rule: Rule, kernels: StepKernels, *args: Any, **options: Any) -> None:
        super().__init__(*args, kernels=kernels, wide=False, **options)
        self._rule, self._kernels = rule, kernels
        self._walks = walks_for([self.home])
        self._tables: Tables | None = None
        self._adopted: tuple[Any, ...] | None = None
        self._there: Sequence[bool] = ()
        self._stepping: Sequence[bool] = ()  # what had a gradient in the last step that Python has seen
        self._marks: list[list[bool] | None] = []
        self._pushed: list[list[float]] = []
        self._untouched = False  # entries were made, for slots that may not have stepped

    # -- the step ----------------------------------------------------------------------

    def _serves(self) -> bool:
        served = not self.measured and all(map(self._rule.serves, self.inner.param_groups))
        return served and not has_hooks(self.inner)

    def _advance_(self, collected: Collected, report: Tensor) -> None:
        self.masters.end_loans_()
        tables = self._own_()
        self._stepping = collected.there
        self._note_(collected.there)
        if self.collector.table.lasting:  # a graph is told before each replay
            self.push_()
        launches = self._launches(tables, collected)
        with on_device(self.home):
            launches.plan(report)
        for index, update in enumerate(launches.updates):
            bucket, part, room = tables.states[index].bucket, tables.parts[index], tables.rooms[index]
            with on_device(bucket.device):
                if room is not part:
                    room.copy_(part, non_blocking=True)
                update()
            bucket.note_published_(self._marks[index])

    def _launches(self, tables: Tables, collected: Collected) -> Launches:
        """Return the kernels of a step: made, if they must be, before anything is written."""
        table, numbering = self.collector.table, self.collector.numbering
        kind = table.aligned, *collected.dtypes
        if table.lasting and kind in tables.launches:
            return tables.launches[kind]
        judging = (*collected.evidence, numbering.slots_of, *self.scaler.tensors(), None)
        of_slots = (table.at_home, tables.steps, tables.begun, tables.hyper, tables.group_of, tables.numbers)
        updates = [self._updating(tables, index, dtype) for index, dtype in enumerate(collected.dtypes)]
        plan = self._kernels.planning(tables.form, (*judging, *of_slots, *tables.scalars), numbering.slots)
        launches = Launches(plan, updates)
        if table.lasting:
            tables.launches[kind] = launches
        return launches

    def _updating(self, tables: Tables, index: int, grads: torch.dtype) -> Callable[[], None]:
        """Return what steps a bucket."""
        state, pieces, table = tables.states[index], self.collector.numbering.pieces[index], self.collector.table
        bucket = state.bucket
        split, aligned = bucket.flat_remainder is not None, table.aligned and pieces.aligned
        launch = self._kernels.update_launcher(tables.form, bucket.device, grads, bucket.dtype, split, aligned)
        if bucket.flat_remainder is not None:
            own: tuple[Tensor, ...] = (bucket.flat_model, bucket.flat_remainder)
        else:
            own = (bucket.flat_master, bucket.flat_model) if bucket.is_half else (bucket.flat_master,)
        where = *where_of(pieces), tables.rooms[index], table.parts[index]
        return launch.again(pieces.number, (*where, *own, *state.flats))

    def before_replay_(self) -> object:
        """As in ``DeviceTier``; state that was loaded is taken over, hyperparameters are brought along."""
        super().before_replay_()
        tables = self._own_()
        self._note_(self._stepping)  # entries that were forgotten since, because nothing had stepped
        self.push_()
        return tables if self._serves() else object()

    def push_(self) -> None:
        """Bring the hyperparameters to the device, if they have changed. Syncs: none."""
        tables = self._tables
        if tables is None:
            return
        rows = [row_of(tables.form, group) for group in self.inner.param_groups]
        if rows != self._pushed:
            fresh = torch.tensor(rows, dtype=torch.float64, pin_memory=self.home.type == "cuda", device="cpu")
            tables.hyper.copy_(fresh, non_blocking=True)
            self._pushed = rows

    def _note_(self, there: Sequence[bool]) -> None:
        """Make entries in the inner state for what has its first gradient."""
        if there is self._there or self._tables is None:
            return
        parts = [list(part) for _, part in self.collector.numbering.spread(there)]
        for state, part in zip(self._tables.states, parts, strict=True):
            for slot in (number for number, is_there in enumerate(part) if is_there):
                if not self.inner.state.get(state.bucket.masters[slot]):
                    state.enter_(self.inner, (slot, slot + 1))
                    self._untouched = True
        self._marks = [None if all(part) else part for part in parts]
        self._there = there
        self._note_adopted_()

    # -- whose the state is ------------------------------------------------------------

    def _own_(self) -> Tables:
        """Return the tables, after making sure that the inner state is ours."""
        inner, numbering, tables = self.inner, self.collector.numbering, self._tables
        if tables is None or not self._is_ours():
            self.settle_()
            if tables is None or tables.numbering is not numbering or len(tables.hyper) != len(inner.param_groups):
                tables = self._tables = Tables(self._rule, inner, numbering)
            adopt_(tables.states, inner)
            self._there, self._pushed = (), []
            self._note_adopted_()
        return tables

    def _is_ours(self) -> bool:
        """True iff nobody has put other state in the place of ours."""
        adopted = self._adopted
        return adopted is not None and adopted[0] is self.inner.state and adopted[1:] == self._form()

    def _note_adopted_(self) -> None:
        self._adopted = (self.inner.state, *self._form())

    def _form(self) -> tuple[int | bytes, ...]:
        """Return by what, beside its identity, state is noticed that others made; edits in place need no notice."""
        state = self.inner.state
        return len(state), len(self.masters.buckets), len(self.inner.param_groups), self._walks.held(state)

    def settle_(self) -> None:
        """Forget the entries that a skipped first step has made. Syncs: one read, once after entries were made."""
        if self._tables is not None and self._untouched:
            ours, self._untouched = self._is_ours(), False
            for state in self._tables.states:
                state.forget_untouched_(self.inner)
            self._there = ()
            if ours:
                self._note_adopted_()

    def _apply_(self, decision: Decision) -> None:
        self.settle_()  # the inner optimizer makes its own first state
        hand_over_(self.inner, self._rule)
        super()._apply_(decision)
        self.disown_()  # the inner optimizer may have made state of its own

    def remove(self) -> None:
        """See the eager tier."""
        super().remove()
        if self._tables is not None:
            self._tables.launches.clear()  # they keep the half weights

    def disown_(self) -> None:
        """See the eager tier: what is there now is taken over by the next step."""
        self._adopted = None
