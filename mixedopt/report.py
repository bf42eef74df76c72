"""What happened in a step, told without making anybody wait for the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepReport:
    """The outcome of the last ``step()``. Holding one never syncs.

    In the eager tier everything is known on the host. In the sync-free tiers
    the device knows: the first look at any attribute waits for it.

    Attributes:
        dropped_micro_steps: how many bad micro-steps were left out of the
            gradients, with ``drop_bad_micro_steps``.
    """

    _applied: bool = False
    _skipped: bool = False
    _reason: str | None = "no step yet"
    dropped_micro_steps: int = 0
    _grad_norm: Tensor | None = None
    _loss_scale: Tensor | None = None
    _told: Tensor | None = None  # by the device: not 0 iff skipped, norm, S

    @property
    def known(self) -> bool:
        """True iff the host knows what happened. Syncs: none."""
        return self._told is None

    @property
    def applied(self) -> bool:
        """True iff the inner optimizer stepped. Syncs: none in the eager tier."""
        return self._applied if self._told is None else not self.skipped

    @property
    def skipped(self) -> bool:
        """True iff the step met an inf or NaN and changed nothing. Syncs: none in the eager tier."""
        return self._skipped if self._told is None else bool(self._told[0])

    @property
    def reason(self) -> str | None:
        """Why nothing was applied, else ``None``. Syncs: none in the eager tier."""
        return self._reason if self._told is None or self.skipped else None

    @property
    def grad_norm(self) -> float | None:
        """Global L2 norm of the unscaled gradients, before clipping.

        inf or NaN after a skipped step, ``None`` when there were no gradients.
        Syncs: none in the eager tier.
        """
        norm = self._grad_norm if self._told is None else self._told[1]
        return None if norm is None else float(norm)

    @property
    def loss_scale(self) -> float | None:
        """The S that the step's gradients were divided by. Syncs: none in the eager tier."""
        scale = self._loss_scale if self._told is None else self._told[2]
        return None if scale is None else float(scale)

    def __repr__(self) -> str:
        dropped = f"dropped_micro_steps={self.dropped_micro_steps}, " if self.dropped_micro_steps else ""
        return (
            f"StepReport(applied={self.applied}, skipped={self.skipped}, reason={self.reason!r}, {dropped}"
            f"grad_norm={self.grad_norm}, loss_scale={self.loss_scale})"
        )
