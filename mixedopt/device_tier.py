"""Steps that the device judges: the host neither waits nor knows what became of them.

The order is that of ``mixedopt.eager``. Gradients are collected and measured in
one pass; the device decides, lets S and the counters follow, and applies the
step or leaves everything as it is. What the host is told comes later, in pinned
memory: log lines and ``LossScaleError`` may be some steps late, which does no
harm, since skips change nothing.

What this way does not serve (sparse or unscaled gradients, a shared scale,
micro-steps that may be dropped) goes by the eager tier's, with its one read.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from mixedopt.collecting import Collected, Collector
from mixedopt.device_scaler import DeviceScaler
from mixedopt.eager import RANGE_CHECK_INTERVAL, WARN_AFTER, EagerTier
from mixedopt.judgement import NEXT_SCALE, REPORT, Standing
from mixedopt.loss_scale import exhausted_error
from mixedopt.report import StepReport
from mixedopt.scaler import HOST

logger = logging.getLogger("mixedopt")

INFINITE = "inf or NaN in the gradients"
REPORTS = 64  # steps whose reports are made at once


class DeviceTier(EagerTier):
    """What moves during training, on the device; subclasses say how a step is applied.

    Args:
        kernels: the room of our kernels that collect; ``None`` leaves it to torch's operations.
        wide: gather into fp32 buffers.
        args, options: as for the eager tier; the scaler is a ``DeviceScaler``.
    """

    scaler: DeviceScaler

    def __init__(self, *args: Any, kernels: Any, wide: bool, **options: Any) -> None:
        super().__init__(*args, **options)
        self.home = self.scaler.device
        self.collector = Collector(self.masters, self.window, self.home, wide=wide, kernels=kernels)
        self._rooms: list[tuple[Tensor, Tensor]] = []
        self._captured = False  # a graph may move S, unnoticed
        self._heard_skips = self._tries = 0
        self._heard_exhausted = 0.0
        self._largest: Tensor | None = None  # |fp16 weight|, NaN until the device has looked
        self._loud = False

    # -- counters: on the device -------------------------------------------------------

    @property
    def applied_steps(self) -> int:
        """Steps that reached the inner optimizer. Syncs: one read."""
        return self.scaler.read("applied")

    @applied_steps.setter
    def applied_steps(self, value: int) -> None:
        self.scaler.write_("applied", value)

    @property
    def skipped_steps(self) -> int:
        """Steps that met an inf or NaN. Syncs: one read."""
        return self.scaler.read("skipped")

    @skipped_steps.setter
    def skipped_steps(self, value: int) -> None:
        self.scaler.write_("skipped", value)
        self._heard_skips = value

    @property
    def skips_in_a_row(self) -> int:
        """Skips since the last applied step. Syncs: one read."""
        return self.scaler.read("in_a_row")

    @skips_in_a_row.setter
    def skips_in_a_row(self, value: int) -> None:
        self.scaler.write_("in_a_row", value)

    # -- the step ----------------------------------------------------------------------

    def step_(self) -> None:
        """Apply the window's gradients or skip. Syncs: none, once the inner optimizer has stepped.

        Raises:
            LossScaleError, ValueError: as the optimizer says; of an earlier
                step, since when no step was applied.
        """
        capturing = self.scaler.capturing()
        collected = None
        if self._serves():
            self._begin_()
            collected = self.collector.collect_(capturing=capturing)
        if collected is None:
            if capturing:
                raise RuntimeError(
                    f"step() of the {self.name} tier while a graph is captured: there is no gradient, or this step "
                    "needs the host (sparse gradients, unscale_(), hooks on the inner optimizer, a first step)."
                )
            super().step_()
            return
        report, seed = self._room_for_report(capturing=capturing)
        self.scaler.seed = None  # also if this fails when S has moved
        try:
            self._advance_(collected, report)
        except BaseException:
            self.drop_gradients_()
            raise
        self._captured |= capturing
        if not self._captured:
            self.scaler.seed = seed
        del collected  # the gradients are free before the next ones are made
        if self.statistics is not None:
            self.statistics.restore_if_(self.scaler.signals[1])
        self._warn_if_unscaled()
        self.finish_(StepReport(_reason=INFINITE, _told=report))
        if not capturing:
            self._hear_()

    def _room_for_report(self, *, capturing: bool) -> tuple[Tensor, Tensor]:
        """Return room for a report, at home, and the S in it; made for many steps, but that a graph's are its own."""
        if not capturing and self._rooms:
            return self._rooms.pop()
        with torch.inference_mode(False):  # this step's mode is not that of the next ones
            block = torch.empty((1 if capturing else REPORTS, REPORT), dtype=torch.float64, device=self.home)
            scales = block.view(torch.float32)[:, 2 * NEXT_SCALE].unbind()
            rooms = [(report, scale.data) for report, scale in zip(block.unbind(), scales, strict=True)]  # own versions
        if not capturing:
            self._rooms = rooms
        return rooms.pop()

    def _serves(self) -> bool:
        """True iff this step may go the sync-free way."""
        raise NotImplementedError

    def _advance_(self, collected: Collected, report: Tensor) -> None:
        """Judge and step; write ``report``, see ``judgement.REPORT``. Syncs: none."""
        raise NotImplementedError

    def _warn_if_unscaled(self) -> None:
        """As in the eager tier, which knows S. Syncs: one read, before the only warning."""
        if (
            self.scaler.losses == self._losses_before
            and not self._warned_unscaled
            and float(self.scaler.state.scale) != 1
        ):
            super()._warn_if_unscaled()

    # -- replays of a step that a graph has captured -----------------------------------

    @torch.no_grad()
    def before_replay_(self) -> object:
        """Make what the captured step reads up to date. Syncs: none.

        Returns:
            A token: with another one than at the capture, the graph is void.
        """
        self._begin_()
        self.collector.follow_()
        self.masters.end_loans_()  # a graph works on the halves
        if self.statistics is not None:
            self.statistics.close()  # what was loaded into them stands
        return self.collector.numbering

    @torch.no_grad()
    def after_replay_(self) -> None:
        """Note that the weights have moved, and hear what the device has told."""
        for bucket in self.masters.buckets:
            bucket.note_published_()
        self._hear_()

    # -- hearing of it -----------------------------------------------------------------

    def _hear_(self) -> None:
        """Log and raise what the device has told by now. Syncs: none; one before an error."""
        told: Any = Standing._make(self.scaler.told.tolist())
        fresh, exhausted = int(told.skipped) - self._heard_skips, told.exhausted > self._heard_exhausted
        self._tries += 1
        if fresh > 0:
            self._heard_skips += fresh
            self._log(fresh, told)
        self._look_at_range_(fresh > 0 or self._tries % RANGE_CHECK_INTERVAL == 0)
        if exhausted:
            config, state = self.scaler.config, self.scaler.state
            self._heard_exhausted = self.scaler.read("exhausted")  # also of steps that were under way
            state.floor_skips.clamp_(min=config.max_consecutive_skips)
            raise exhausted_error(config, state, self.collector.numbering.name(int(told.culprit)))

    def _look_at_range_(self, now: bool) -> None:
        """Raise if a look for weights beyond the half range has found one; look anew if it is time."""
        if self._largest is not None and not math.isnan(largest := float(self._largest)):
            self._largest = None
            if largest == math.inf:
                self.masters.check_range()
        if now and self._largest is None and (largest_half := self.masters.largest_half()) is not None:
            self._largest = torch.full(
                (), math.nan, dtype=torch.float32, device=HOST, pin_memory=self.home.type == "cuda"
            )
            self._largest.copy_(largest_half, non_blocking=True)

    def _log(self, fresh: int, told: Any) -> None:
        loud, self._loud = self._loud, told.in_a_row >= WARN_AFTER
        logger.log(
            logging.WARNING if self._loud and not loud else logging.INFO,
            "%s: %s; loss_scale -> %g (%d in a row, %d skipped, %d applied so far)",
            "step skipped" if fresh == 1 else f"{fresh} steps skipped",
            INFINITE,
            *(told.scale, told.in_a_row, told.skipped, told.applied),
        )
