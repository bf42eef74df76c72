"""What happened in a step, told without making anybody wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of the last ``step()``. Holding one never syncs.

    Attributes:
        applied: True iff the inner optimizer stepped.
        skipped: True iff the step met an inf or NaN and changed nothing.
        reason: why nothing was applied, else ``None``.
        dropped_micro_steps: how many bad micro-steps were left out of the
            gradients, with ``drop_bad_micro_steps``.
    """

    applied: bool = False
    skipped: bool = False
    reason: str | None = "no step yet"
    dropped_micro_steps: int = 0
    _grad_norm: Tensor | None = None
    _loss_scale: Tensor | None = None

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the unscaled gradients, before clipping.

        inf or NaN after a skipped step, ``None`` when there were no gradients.
        Syncs: none in the eager tier.
        """
        return None if self._grad_norm is None else float(self._grad_norm)

    @property
    def loss_scale(self) -> float | None:
        """The S that the step's gradients were divided by. Syncs: none in the eager tier."""
        return None if self._loss_scale is None else float(self._loss_scale)

    def __repr__(self) -> str:
        dropped = f"dropped_micro_steps={self.dropped_micro_steps}, " if self.dropped_micro_steps else ""
        return (
            f"StepReport(applied={self.applied}, skipped={self.skipped}, reason={self.reason!r}, {dropped}"
            f"grad_norm={self.grad_norm}, loss_scale={self.loss_scale})"
        )
