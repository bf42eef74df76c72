"""The eager tier: one step in the order that the mathematics demands.

gather -> finite check -> skip, or (unscale and clip -> inner step -> publish)
-> and only then the update of the loss scale. It serves any optimizer, on any
device, and reads the host once.
"""

from __future__ import annotations

import contextlib
import logging

import torch
from torch import Tensor

from mixedopt.decision import Decision, Evidence, decide
from mixedopt.flat import Kind
from mixedopt.gradients import clip_factor, unscale_factor
from mixedopt.groups import StepGuard
from mixedopt.loss_scale import LossScaleConfig, LossScaleState, StaticLossScale, exhausted_error, init_state
from mixedopt.masters import MasterWeights
from mixedopt.report import StepReport
from mixedopt.rollback import FirstStep, NormStatistics
from mixedopt.window import Window

HOST = torch.device("cpu")  # explicit: the default device and dtype are the user's

logger = logging.getLogger("mixedopt")

# Applied steps between two looks for a weight beyond the half range. A skip
# looks too, since such a weight makes the forward overflow.
RANGE_CHECK_INTERVAL = 64


class EagerTier:
    """What moves during training, and the step that moves it.

    Invariants between calls: S, counters and ``last_step`` change only at the
    end of ``step_``; ``window`` holds the gradients of at most one step.

    Args:
        inner: steps over the masters.
        masters: may grow.
        config: how the loss scale moves.
        max_grad_norm: limit of the unscaled global norm, ``None`` for none.
        statistics: running statistics to take back on a skip.
    """

    name = "eager"

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        masters: MasterWeights,
        config: LossScaleConfig,
        max_grad_norm: float | None,
        statistics: NormStatistics | None,
    ) -> None:
        self.inner = inner
        self.masters = masters
        self.config = config
        self.statistics = statistics
        self.max_grad_norm = max_grad_norm
        self.scale: LossScaleState = init_state(config, HOST)
        self.window = Window(masters)
        self.guard = StepGuard(inner)
        self._proven: frozenset[Kind] = frozenset()  # kinds over which the inner optimizer has stepped
        self.applied_steps = 0
        self.skipped_steps = 0
        self.last_step = StepReport()
        self._one = torch.ones((), dtype=torch.float32, device=HOST)
        self._before_edits: Tensor | None = None
        self._largest_half: Tensor | None = None
        self.scaled_a_loss = False  # since the last step: zero_grad() may come between scale and backward
        self._warned_unscaled = False

    def unscale_(self) -> None:
        """Move the gradients to the masters, divided by S. Syncs: none."""
        if self._collect():
            self._before_edits = self.window.largest()
            self.window.multiply_(unscale_factor(self.scale.scale))
            self.window.expose_()
            self.window.unscaled = True

    def step_(self) -> None:
        """Apply the window's gradients or skip. Syncs: one host read."""
        if not self._collect():
            self.finish_(StepReport(reason="no gradients"))
            return
        inverse = self._one if self.window.unscaled else unscale_factor(self.scale.scale)
        decision = self._decide(inverse)
        if decision.ambiguous:
            self.window.multiply_(inverse)
            inverse = self._one
            decision = self._decide(inverse, exact=True)
        self._check(decision)
        report = self._report(decision, inverse)
        if decision.found_inf:
            self._skip_(decision.following)
        else:
            self._apply_(decision.norm, inverse)
        self.scale.assign_(decision.following)
        culprit = self.window.first_bad() if decision.exhausted else None
        self.finish_(report)
        if decision.exhausted:
            raise exhausted_error(self.config, self.scale, culprit)

    def finish_(self, report: StepReport) -> None:
        """End the step: drop the gradients, watch the statistics anew."""
        self.last_step = report
        # A scheduler made on the inner optimizer warns unless its step() seems to have run.
        self.inner._opt_called = True  # type: ignore[attr-defined]
        self.drop_gradients_(keep_memory=not report.skipped)
        self.scaled_a_loss = False
        if self.statistics is not None:
            self.statistics.close()

    def drop_gradients_(self, *, keep_memory: bool = True) -> None:
        """Forget what the window has gathered; see ``Window.close``."""
        self._before_edits = None
        self.window.close(keep_memory=keep_memory)

    def _collect(self) -> bool:
        self.masters.adopt_edits_()
        return self.window.collect_()

    def _decide(self, inverse: Tensor, *, exact: bool = False) -> Decision:
        evidence = Evidence(*self.window.norm(exact=exact), self._before_edits, self._largest_half)
        return decide(self.config, self.scale, inverse, evidence)

    def _apply_(self, norm: Tensor, inverse: Tensor) -> None:
        if self.max_grad_norm is not None:
            self.window.multiply_(clip_factor(norm, inverse, self.max_grad_norm))
        elif inverse is not self._one and not self._never_scales():
            self.window.multiply_(inverse)
        self.window.expose_()
        try:
            self._step_inner_()
        except BaseException:
            self.drop_gradients_()
            self.masters.publish_()
            raise
        self.masters.publish_(self.window.moved())
        self.applied_steps += 1
        if self.applied_steps % RANGE_CHECK_INTERVAL == 0:
            self._largest_half = self.masters.largest_half()

    def _step_inner_(self) -> None:
        kinds = self.window.kinds(beyond=self._proven)
        first = FirstStep(self.inner, self.masters.buckets) if kinds else contextlib.nullcontext()
        with first, self.guard:
            self.inner.step()
        self._proven |= kinds

    def _skip_(self, following: LossScaleState) -> None:
        if self.statistics is not None:
            self.statistics.restore_()
        self.skipped_steps += 1
        self._largest_half = self.masters.largest_half()
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "step skipped: inf or NaN in the gradients; loss_scale %g -> %g (%d skipped, %d applied so far)",
                float(self.scale.scale),
                float(following.scale),
                self.skipped_steps,
                self.applied_steps,
            )

    def _check(self, decision: Decision) -> None:
        if decision.unfit:
            self._largest_half = None
            try:
                self.masters.check_range()
            except ValueError:
                self.drop_gradients_()
                raise
        if decision.scaled and not (self.scaled_a_loss or self._warned_unscaled):
            self._warned_unscaled = True
            logger.warning(
                "step() met gradients of a loss that was not scaled, yet divides them by loss_scale. "
                "Call optimizer.backward(loss) instead of loss.backward()."
            )

    def _report(self, decision: Decision, inverse: Tensor) -> StepReport:
        skipped = decision.found_inf
        reason = "inf or NaN in the gradients" if skipped else None
        grad_norm = decision.norm * inverse
        return StepReport(not skipped, skipped, reason, grad_norm, self.scale.scale.clone())

    def _never_scales(self) -> bool:
        return isinstance(self.config, StaticLossScale) and self.config.scale == 1.0
