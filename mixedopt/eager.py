"""The eager tier: one step in the order that the mathematics demands.

gather -> finite check -> skip, or (unscale and clip -> inner step -> publish)
-> and only then the update of the loss scale. It serves any optimizer, on any
device, and reads the host once.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixedopt.bucket import Moved
from mixedopt.decision import Decision, Evidence, decide
from mixedopt.distributed import several_ranks
from mixedopt.flat import Kind
from mixedopt.gradients import clip_factor, unscale_factor
from mixedopt.groups import StepGuard, is_torchs
from mixedopt.loss_scale import (
    DynamicLossScale,
    LossScaleConfig,
    LossScaleState,
    StaticLossScale,
    state_from_dict,
    state_to_dict,
)
from mixedopt.masters import MasterWeights
from mixedopt.report import StepReport
from mixedopt.rollback import NormStatistics, Snapshot
from mixedopt.scaler import HOST, LossScaler
from mixedopt.window import Window

logger = logging.getLogger("mixedopt")

# Applied steps between two looks for a weight beyond the half range. A skip
# looks too, since such a weight makes the forward overflow.
RANGE_CHECK_INTERVAL = 64
# Skips in a row after which the log speaks louder. A scale that starts at 2**16
# needs fewer to come down.
WARN_AFTER = 8


class Moving(NamedTuple):
    """What a checkpoint says of a tier."""

    config: LossScaleConfig
    state: LossScaleState
    applied_steps: int
    skipped_steps: int


class EagerTier:
    """What moves during training, and the step that moves it.

    Invariants between calls: S, counters and ``last_step`` change only at the
    end of ``step_``; ``window`` holds the gradients of at most one step.

    Attributes:
        measured: True iff the gradients of the window were judged ahead of
            ``step_``, for a shared step.
        decision: the judgement then, ``None`` without gradients.
        untried: True iff no step was tried yet since this was built or loaded.

    Args:
        inner: steps over the masters.
        masters: may grow.
        scaler: the loss scale.
        window: of the masters' gradients.
        max_grad_norm: limit of the unscaled global norm, ``None`` for none.
        statistics: running statistics to take back on a skip.
        shared: True iff another moves the loss scale.
    """

    name = "eager"

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        masters: MasterWeights,
        scaler: LossScaler,
        window: Window,
        *,
        max_grad_norm: float | None,
        statistics: NormStatistics | None,
        shared: bool,
    ) -> None:
        self.inner = inner
        self.masters = masters
        self.scaler = scaler
        self.window = window
        self.statistics = statistics
        self.max_grad_norm = max_grad_norm
        self.shared = shared
        self.guard = StepGuard(inner)
        self._proven: frozenset[Kind] = frozenset()  # kinds over which the inner optimizer has stepped
        self.applied_steps = 0
        self.skipped_steps = 0
        self.skips_in_a_row = 0
        self.last_step = StepReport()
        self.measured = False
        self.decision: Decision | None = None
        self._one = torch.ones((), dtype=torch.float32, device=HOST)
        self._before_edits: Tensor | None = None
        self._largest_half: Tensor | None = None
        self.untried = True
        self._losses_before = 0  # zero_grad() may come between scale and backward
        self._warned_unscaled = False

    def unscale_(self) -> None:
        """Move the gradients to the masters, divided by S. Syncs: none, as ``Window.collect_``."""
        if self._collect():
            self._before_edits = self.window.largest()
            self.window.multiply_(self._inverse())
            self.window.expose_()
            self.window.unscaled = True

    def measure_(self) -> Decision | None:
        """Gather the gradients and judge them; ``None`` without any.

        Raises:
            ValueError, StepOrderError: as ``step`` of the optimizer; weights
                and state are as before.

        Syncs: one host read.
        """
        if not self._collect():
            return None
        decision = self._decide(self._inverse())
        if decision.ambiguous:
            self.window.multiply_(decision.inverse)
            decision = self._decide(self._one, exact=True)
        self._check(decision)
        return decision

    def step_(self) -> None:
        """Apply the window's gradients or skip. Syncs: one host read."""
        if self.name == "eager" and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "step() of the eager tier decides on the host, which no graph can capture. Use another tier."
            )
        decision = self.decision if self.measured else self.measure_()
        if decision is None:
            self.finish_(StepReport(_reason="no gradients"))
            return
        report = self.report(decision)
        if decision.skip:
            self.skip_(decision)
        else:
            self._apply_(decision)
        culprit = self.window.first_bad() if decision.exhausted and not self.shared else None
        self.finish_(report)
        if not self.shared:
            self.scaler.move_(decision, culprit)

    def finish_(self, report: StepReport) -> None:
        """End the step: drop the gradients, watch the statistics anew."""
        self.last_step = report
        self.untried = False
        # A scheduler made on the inner optimizer warns unless its step() seems to have run.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        self.drop_gradients_(keep_memory=report.known and not report.skipped)
        self._losses_before = self.scaler.losses
        if self.statistics is not None:
            self.statistics.close()

    def drop_gradients_(self, *, keep_memory: bool = True) -> None:
        """Forget what the window has gathered; see ``Window.close``."""
        self._before_edits = None
        self.window.close(keep_memory=keep_memory)

    def zero_gradients_(self) -> None:
        """Make what the window holds zero; see ``Window.zero_``."""
        self._before_edits = None
        self.window.zero_()

    def prepare_(self, decision: Decision) -> None:
        """Unscale and clip the gradients and show them to the inner optimizer. Syncs: none."""
        inverse = decision.inverse
        if self.max_grad_norm is not None:
            self.window.multiply_(clip_factor(decision.norm, inverse, self.max_grad_norm))
        elif inverse is not self._one and not (self._never_scales() and self.window.factor == 1.0):
            self.window.multiply_(inverse)
        self.window.expose_()

    def publish_(self, moved: Sequence[Sequence[Moved] | None] | None = None) -> None:
        """Show the masters after an applied step, and count it."""
        self.masters.publish_(moved)
        self.count_applied_()

    def count_applied_(self) -> None:
        """Count a step that was applied and published."""
        self.applied_steps += 1
        self.skips_in_a_row = 0
        if self.applied_steps % RANGE_CHECK_INTERVAL == 0:
            self._largest_half = self.masters.largest_half()

    def skip_(self, decision: Decision) -> None:
        """Take back what the forward wrote, count, and log."""
        if self.statistics is not None:
            self.statistics.restore_()
        self.skipped_steps += 1
        self.skips_in_a_row += 1
        self._largest_half = self.masters.largest_half()
        level = logging.WARNING if self.skips_in_a_row == WARN_AFTER else logging.INFO
        if logger.isEnabledFor(level):
            logger.log(
                level,
                "step skipped: %s; loss_scale %g -> %g%s (%d in a row, %d skipped, %d applied so far)",
                _reason(decision),
                float(self.scaler.state.scale),
                float(decision.following.scale),
                self._tolerance(decision),
                self.skips_in_a_row,
                self.skipped_steps,
                self.applied_steps,
            )

    def _tolerance(self, decision: Decision) -> str:
        """Say why S stays, if it does."""
        left = int(decision.following.hysteresis_left)
        dynamic = isinstance(self.scaler.config, DynamicLossScale)
        return f", hysteresis left {left}" if dynamic and left else ""

    def report(self, decision: Decision) -> StepReport:
        """Return what ``last_step`` will say."""
        reason = _reason(decision) if decision.skip else None
        norm = decision.norm * decision.inverse
        return StepReport(
            not decision.skip, decision.skip, reason, self.window.dropped, norm, self.scaler.state.scale.clone()
        )

    def remove(self) -> None:
        """Let go of the model and of the inner optimizer, whose parameters it has again."""
        for watch in (self.statistics, self.guard, self.window):
            if watch is not None:
                watch.remove()

    def disown_(self) -> None:
        """Note that the inner optimizer's state may have been replaced."""

    def settle_(self) -> None:
        """Make the inner optimizer's state what it would be by its own steps."""

    def to_dict(self) -> dict[str, Any]:
        """Return S and the counters as plain numbers, for a checkpoint."""
        return {
            "loss_scale": state_to_dict(self.scaler.config, self.scaler.state),
            "applied_steps": self.applied_steps,
            "skipped_steps": self.skipped_steps,
        }

    def from_dict(self, saved: Mapping[str, Any] | None, *, strict: bool = True) -> Moving:
        """Read what ``to_dict`` wrote; ``None`` stands for what is here. Writes nothing.

        Args:
            saved: the dict.
            strict: a scale of the other kind is an error, else it is left out.

        Raises:
            CheckpointError: it does not fit.
        """
        config, state = self.scaler.config, self.scaler.state
        if saved is None:
            return Moving(config, state, self.applied_steps, self.skipped_steps)
        if strict or saved["loss_scale"].get("kind") == state_to_dict(config, state)["kind"]:
            config, state = state_from_dict(saved["loss_scale"], config, HOST)
        return Moving(config, state, saved["applied_steps"], saved["skipped_steps"])

    def load_(self, moving: Moving) -> None:
        """Take over what ``from_dict`` read."""
        self.scaler.load_(moving.config, moving.state)
        self.applied_steps, self.skipped_steps = moving.applied_steps, moving.skipped_steps
        self.finish_(StepReport())
        self.untried = True

    def _inverse(self) -> Tensor:
        if self.window.unscaled:
            return self._one
        inverse = unscale_factor(self.scaler.state.scale)
        return inverse if self.window.factor == 1.0 else inverse * self.window.factor

    def _collect(self) -> bool:
        self._begin_()
        return self.window.collect_()

    def _begin_(self) -> None:
        """Take over weights that were edited."""
        if self.untried and several_ranks() and not all(bucket.shows_masters() for bucket in self.masters.buckets):
            logger.warning(
                "weights were overwritten between wrapping and the first step, as DistributedDataParallel does on all "
                "ranks but the first: their masters have lost the low bits. Put it around the model before wrapping, "
                "or seed all ranks alike."
            )
        self.masters.adopt_edits_()

    def _decide(self, inverse: Tensor, *, exact: bool = False) -> Decision:
        evidence = Evidence(*self._norm(exact=exact), self._before_edits, self._largest_half)
        window = self.window
        return decide(
            self.scaler.config,
            self.scaler.state,
            inverse,
            evidence,
            dropped=window.dropped > 0,
            nothing_kept=window.kept == 0,
        )

    def _norm(self, *, exact: bool) -> tuple[Tensor, Tensor]:
        """Return the gradients' global norm, and True iff unsure, 0-d."""
        return self.window.norm(exact=exact)

    def _apply_(self, decision: Decision) -> None:
        self.prepare_(decision)
        with self.masters.opened():
            try:
                self._step_inner_()
            except BaseException:
                self.drop_gradients_()
                self.masters.publish_()
                raise
            self.publish_(self.window.moved(by_rows=self.window.sparse and _moves_rows_alone(self.inner)))

    def _step_inner_(self) -> None:
        kinds = self.unproven()
        first = Snapshot(self.inner, self.masters.buckets, HOST) if kinds else contextlib.nullcontext()
        with first, self.at_work():
            self.inner.step()
        self._proven |= kinds

    def unproven(self) -> frozenset[Kind]:
        """Return the kinds of parameters in the window over which the inner optimizer never stepped."""
        return self.window.kinds(beyond=self._proven)

    @contextlib.contextmanager
    def undone_if_it_raises(self, device: torch.device | None = None) -> Iterator[None]:
        """Context after which, if it raises, masters, model, inner optimizer and counters are as before.

        Args:
            device: where the copy of the masters is kept; ``None`` leaves it on theirs.
        """
        before = self.applied_steps, self.skipped_steps, self.skips_in_a_row, self.last_step
        with self.masters.opened():
            try:
                with Snapshot(self.inner, self.masters.buckets, device):
                    yield
            except BaseException:
                self.applied_steps, self.skipped_steps, self.skips_in_a_row, self.last_step = before
                self.disown_()
                self.masters.publish_()
                raise

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Context in which the inner optimizer may step, and after which its masters are in their places."""
        try:
            with self.guard:
                yield
        finally:
            if not is_torchs(self.inner):
                self.masters.reclaim_()

    def _check(self, decision: Decision) -> None:
        if decision.unfit:
            self._largest_half = None
            try:
                self.masters.check_range()
            except ValueError:
                self.drop_gradients_()
                raise
        if decision.scaled:
            self._warn_if_unscaled()

    def _warn_if_unscaled(self) -> None:
        """Warn once of gradients of a loss that nobody scaled."""
        if self.scaler.losses == self._losses_before and not self._warned_unscaled:
            self._warned_unscaled = True
            logger.warning(
                "step() met gradients of a loss that was not scaled, yet divides them by loss_scale. "
                "Call optimizer.backward(loss) instead of loss.backward()."
            )

    def _never_scales(self) -> bool:
        return isinstance(self.scaler.config, StaticLossScale) and self.scaler.config.scale == 1.0


def _moves_rows_alone(inner: torch.optim.Optimizer) -> bool:
    """True iff a sparse gradient is known to move the rows it has and no others."""
    if type(inner) is torch.optim.SGD:
        return all(group["momentum"] == 0 for group in inner.param_groups)
    return type(inner) in (torch.optim.SparseAdam, torch.optim.Adagrad)


def _reason(decision: Decision) -> str:
    if decision.found_inf:
        return "inf or NaN in the gradients"
    return "inf or NaN in the gradients of another optimizer of the SharedLossScale"
