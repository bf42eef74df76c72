"""Inner optimizers that evaluate the model themselves: LBFGS, SAM and their kind.

Each evaluation sees published weights and leaves unscaled gradients; the first
that is not finite ends the step, and everything is as before it. A line search
is told instead that the point is bad, and looks for a better one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mixedopt.bucket import HALF_DTYPES, Moved
from mixedopt.decision import Decision
from mixedopt.eager import EagerTier
from mixedopt.errors import StepOrderError
from mixedopt.groups import is_torchs
from mixedopt.loss_scale import DynamicLossScale
from mixedopt.masters import MasterWeights
from mixedopt.report import StepReport

Closure = Callable[[], Any]


def evaluates_once(inner: torch.optim.Optimizer) -> bool:
    """True iff ``step(closure)`` of ``inner`` begins with its only evaluation.

    So it is with torch's own optimizers but LBFGS; of others nobody knows.
    """
    return is_torchs(inner) and not requires_closure(inner)


def requires_closure(inner: torch.optim.Optimizer) -> bool:
    """True iff ``step`` of ``inner`` has no default for its closure."""
    closure = inspect.signature(inner.step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class RejectedError(Exception):
    """An evaluation was not finite; unwinds the inner optimizer's step."""

    def __init__(self, decision: Decision) -> None:
        super().__init__("an evaluation was not finite")
        self.decision = decision


class Evaluations:
    """What an inner optimizer calls in the place of the user's closure.

    Args:
        tier: whose masters, window and loss scale serve the evaluations.
        closure: the user's: drops the gradients, computes the loss, calls
            ``backward`` of the wrapper, returns the loss.
    """

    def __init__(self, tier: EagerTier, closure: Closure) -> None:
        self._tier = tier
        self._closure = closure
        self.count = 0
        self.first_loss: Any = None
        self.decision: Decision | None = None  # of the last one that was not rejected
        self._shown = _marks(tier.masters)

    def __call__(self) -> Any:
        """Evaluate the model at the masters as they are now.

        Returns:
            The loss, unscaled, fp32 if it is a half tensor.

        Raises:
            RejectedError: the gradients are not finite.
            StepOrderError: gradients of the evaluation before are still there,
                or the loss that came back is scaled.

        Syncs: one host read, one more in a line search.
        """
        tier = self._tier
        self._show_masters()
        if not any(master.grad is not None for bucket in tier.masters.buckets for master in bucket.masters):
            tier.drop_gradients_()  # the inner optimizer has cleared them
        leftover, window = tier.window.gathered, tier.window.number
        statistics = None if tier.statistics is None else tier.statistics.taken()
        with torch.enable_grad():
            loss = self._closure()
        if leftover and tier.window.number == window:
            raise StepOrderError(
                "the closure added to the gradients of an earlier evaluation. Begin it with optimizer.zero_grad()."
            )
        if tier.scaler.made(loss):
            raise StepOrderError("the closure returned the scaled loss. Return the loss itself, before scale().")
        if isinstance(loss, Tensor):
            loss = loss.detach().float() if loss.dtype in HALF_DTYPES else loss.detach()
        self.count += 1
        if self.count == 1:
            self.first_loss = loss
        decision = tier.measure_()
        if decision is None:
            return loss
        searching = self.count > 1 and _searches(tier.inner)
        if searching and not self._lowers_scale(loss, decision) and (decision.skip or not math.isfinite(loss)):
            if tier.statistics is not None and statistics is not None:
                tier.statistics.put_back_(statistics)
            return self._reject(loss)
        if decision.skip:
            raise RejectedError(decision)
        self.decision = decision
        tier.prepare_(decision)
        return loss

    def _show_masters(self) -> None:
        """Publish the masters; version counters move as in torch, where they moved."""
        masters = self._tier.masters
        marks = _marks(masters)
        moved: list[list[Moved] | None] = [
            [now != before for now, before in zip(*both, strict=True)] for both in zip(marks, self._shown, strict=True)
        ]
        masters.reclaim_()
        masters.publish_(moved)
        self._shown = _marks(masters)

    def _lowers_scale(self, loss: Any, decision: Decision) -> bool:
        """True iff a lower S may mend this evaluation: its loss is finite, its gradients are not."""
        config, state = self._tier.scaler.config, self._tier.scaler.state
        lower = isinstance(config, DynamicLossScale) and bool(state.scale > config.min_scale)
        return decision.skip and lower and loss is not None and math.isfinite(loss)

    def _reject(self, loss: Any) -> Any:
        """Tell a line search that this point is no good.

        Strong Wolfe brackets an infinite loss and bisects where gradients are NaN.
        """
        self._tier.window.spoil_()
        self._tier.window.expose_()
        return torch.full_like(loss, torch.inf) if isinstance(loss, Tensor) else math.inf


def _marks(masters: MasterWeights) -> list[list[tuple[int, int]]]:
    """Return by what an edit of a master shows: version counter and place."""
    return [[(master._version, master.data_ptr()) for master in bucket.masters] for bucket in masters.buckets]


def step_with_(tier: EagerTier, closure: Closure) -> Any:
    """Let the inner optimizer step with ``closure``, or skip.

    Gradients that are there already are the first evaluation's (SAM's); they
    are judged, unscaled and shown as those of ``step`` are.

    Args:
        tier: masters, window and loss scale; changed as by ``step_``.
        closure: see ``Evaluations``.

    Returns:
        What the inner optimizer's ``step`` returned; after a skip the loss of
        the first evaluation.

    Raises:
        LossScaleError: one skip too many.
        Anything that the closure or the inner optimizer raises; everything is
        as before the step then.

    Syncs: one host read for each evaluation.
    """
    with tier.masters.opened():  # from before the first evaluation until the last publish
        return _step_with_(tier, closure)


def _step_with_(tier: EagerTier, closure: Closure) -> Any:
    before = tier.measure_()
    evaluations = Evaluations(tier, closure)
    decision: Decision | None
    culprit: str | None = None
    try:
        if before is not None and before.skip:
            raise RejectedError(before)
        if before is not None:
            tier.prepare_(before)
        with tier.undone_if_it_raises(), tier.at_work():
            result = tier.inner.step(evaluations)
    except RejectedError as rejected:
        decision, result = rejected.decision, evaluations.first_loss
        culprit = tier.window.first_bad() if decision.exhausted else None
        report = tier.report(decision)
        tier.skip_(decision)
    except BaseException:
        tier.drop_gradients_()
        if tier.statistics is not None:
            tier.statistics.restore_()
        raise
    else:
        decision = evaluations.decision or before
        if decision is None:
            tier.masters.publish_()
            tier.finish_(StepReport(_reason="no gradients"))
            return result
        report = tier.report(decision)
        tier.publish_()
    tier.finish_(report)
    tier.scaler.move_(decision, culprit)
    return result


def _searches(inner: torch.optim.Optimizer) -> bool:
    return isinstance(inner, torch.optim.LBFGS) and inner.param_groups[0]["line_search_fn"] == "strong_wolfe"
