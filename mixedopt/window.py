"""The window: the gradients of one step, from the first backward to its end."""

from __future__ import annotations

import torch
from torch import Tensor

from mixedopt.errors import StepOrderError
from mixedopt.flat import Kind
from mixedopt.gradients import GradientBuffer, global_norm, largest
from mixedopt.masters import Bucket, MasterWeights

# A missing gradient has no layout.
DENSE = {torch.strided, None}


class Window:
    """Where the gradients are, and in which unit.

    They lie in the model's ``.grad``, scaled, until ``collect_`` moves them to
    the flat fp32 buffers; ``multiply_`` works there; ``expose_`` shows them to
    the inner optimizer as its parameters' ``.grad``.

    Invariants between calls of the optimizer: ``unscaled`` is True iff the
    gradients were moved, divided by S and exposed, and wait for ``step``.

    Args:
        masters: whose gradients these are; may grow later.
    """

    def __init__(self, masters: MasterWeights) -> None:
        self._masters = masters
        self._buffers: list[GradientBuffer] = []
        self._views: list[list[Tensor | None]] = []
        self.unscaled = False

    def collect_(self) -> bool:
        """Move the gradients into the flat buffers. Syncs: none.

        After ``unscale_`` they are there, and the caller's edits of the
        masters' gradients are taken over.

        Returns:
            True iff there is any gradient.

        Raises:
            ValueError: a gradient is not dense; nothing has been moved.
            StepOrderError: a backward followed ``unscale_``.
        """
        buckets = self._masters.buckets
        self._buffers += [GradientBuffer(b.layout, b.device) for b in buckets[len(self._buffers) :]]
        grads = [[param.grad for param in bucket.params] for bucket in buckets]
        fresh = any(grad is not None for mine in grads for grad in mine)
        if self.unscaled:
            if fresh:
                raise StepOrderError("backward() after unscale_(): the new gradients have another unit. Call step().")
            self._views += [[None] * len(bucket.params) for bucket in buckets[len(self._views) :]]
            self._views = [self._take_edits_(*three) for three in zip(buckets, self._buffers, self._views, strict=True)]
        elif fresh:
            self._views = self._gather_(grads)
            self._drop_model_grads()
        return any(view is not None for mine in self._views for view in mine)

    def norm(self, *, exact: bool = False) -> tuple[Tensor, Tensor]:
        """Return the global norm in the gradients' unit, and True iff unsure.

        Both 0-d, on the first bucket's device. Syncs: none.
        """
        # Squares of scaled fp16 gradients stay inside fp32; the user's edits need not.
        within = [bucket.dtype == torch.float16 and not self.unscaled for bucket in self._masters.buckets]
        return global_norm([buffer.flat for buffer in self._buffers], within_fp32=within, exact=exact)

    def largest(self) -> Tensor:
        """Return the largest |gradient|, inf or NaN iff there is one; 0-d. Syncs: none."""
        return largest([buffer.flat for buffer in self._buffers])

    def multiply_(self, factor: Tensor) -> None:
        """Multiply every gradient by ``factor``: fp32, 0-d, on the host. Syncs: none."""
        for buffer in self._buffers:
            buffer.flat.mul_(factor)

    def expose_(self) -> None:
        """Show the gradients as the masters' ``.grad``."""
        for bucket, views in zip(self._masters.buckets, self._views, strict=True):
            for master, view in zip(bucket.masters, views, strict=True):
                master.grad = view

    def moved(self) -> list[list[bool] | None]:
        """Return for each bucket which slots have a gradient, ``None`` for all."""
        flags = [[view is not None for view in views] for views in self._views]
        return [None if all(mine) else mine for mine in flags]

    def kinds(self, *, beyond: frozenset[Kind]) -> frozenset[Kind]:
        """Return the kinds of parameters that have a gradient, without ``beyond``."""
        if all(bucket.layout.kinds <= beyond for bucket in self._masters.buckets):
            return frozenset()
        pairs = zip(self._masters.buckets, self._views, strict=True)
        slots = ((s, v) for bucket, views in pairs for s, v in zip(bucket.layout.slots, views, strict=True))
        return frozenset(slot.kind for slot, view in slots if view is not None) - beyond

    def first_bad(self) -> str | None:
        """Return the first parameter with an inf or NaN. Syncs: one each."""
        for bucket, views in zip(self._masters.buckets, self._views, strict=True):
            for name, view in zip(bucket.names, views, strict=True):
                if view is not None and not bool(view.isfinite().all()):
                    return name
        return None

    def close(self, *, keep_memory: bool = True) -> None:
        """Drop the gathered gradients and the masters' ``.grad``.

        Args:
            keep_memory: ``False`` after gradients that were not finite, so that
                nothing of them stays, not even in the padding.
        """
        if self._views:
            for bucket in self._masters.buckets:
                for master in bucket.masters:
                    master.grad = None
            self._views = []
        for buffer in self._buffers:
            buffer.release(keep=keep_memory)
        self.unscaled = False

    def _drop_model_grads(self) -> None:
        for bucket in self._masters.buckets:
            for param in bucket.params:
                param.grad = None

    def _gather_(self, grads: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        try:
            return [buffer.gather_(mine) for buffer, mine in zip(self._buffers, grads, strict=True)]
        except RuntimeError:  # torch copies no sparse tensor into a dense one
            self._check_dense(grads)
            raise

    def _check_dense(self, grads: list[list[Tensor | None]]) -> None:
        for bucket, mine in zip(self._masters.buckets, grads, strict=True):
            if not _layouts(mine) <= DENSE:
                bad = next(n for n, g in zip(bucket.names, mine, strict=True) if not _layouts([g]) <= DENSE)
                raise ValueError(
                    f"the gradient of parameter {bad!r} is sparse: only dense gradients are supported. "
                    "Build the embedding with sparse=False. Nothing has been changed."
                )

    def _take_edits_(self, bucket: Bucket, buffer: GradientBuffer, views: list[Tensor | None]) -> list[Tensor | None]:
        edited: list[Tensor | None] = []
        for master, slot, view in zip(bucket.masters, bucket.layout.slots, views, strict=True):
            if master.grad is view:
                edited.append(view)
                continue
            target = view if view is not None else slot.view(buffer.flat)
            target.zero_() if master.grad is None else target.copy_(master.grad)
            edited.append(None if master.grad is None else target)
        return edited


def _layouts(grads: list[Tensor | None]) -> set[torch.layout | None]:
    return {None if grad is None else grad.layout for grad in grads}
