"""The window: the gradients of one step, from the first backward to its end."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from mixedopt.bucket import HALF_DTYPES, Bucket, Moved
from mixedopt.errors import StepOrderError
from mixedopt.flat import Kind
from mixedopt.gradients import GradientBuffer, global_norm, largest, widen_sparse
from mixedopt.holding import HeldGradients, join
from mixedopt.masters import MasterWeights
from mixedopt.walks import IN_PYTHON, Walks, walks_for

_GRAD: Any = operator.attrgetter("grad")  # mapped: faster than a comprehension, every step
# A flat half buffer -> its L2 norm, fp64, 0-d.
NormOfHalf = Callable[[Tensor], Tensor]
# (micro-steps in the sum, micro-steps of the window) -> factor on the sum.
DropRule = Callable[[int, int], float]
STALE = (
    "step() of gradients that were scaled before the shared loss scale moved: their unit is unknown. "
    "Call zero_grad() first, or accumulate with gradients='fp32'."
)


class Window:
    """Where the gradients are, and in which unit.

    They lie, scaled, in the model's ``.grad`` or in a store, until ``collect_``
    moves them to the flat fp32 buffers (sparse ones to fp32 tensors of their
    own); ``multiply_`` works there; ``expose_`` shows them to the inner
    optimizer as its parameters' ``.grad``.

    Invariants between calls of the optimizer: ``unscaled`` is True iff the
    gradients were moved, divided by S and exposed, and wait for ``step``.

    Attributes:
        factor: what the sum is to be multiplied by, because micro-steps were
            dropped; 1 otherwise.
        kept: micro-steps in the sum, ``None`` unless they are droppable.
        dropped: micro-steps left out of it.
        number: how many windows were closed before this one.
        stale: True iff S has moved since a backward, so that the gradients'
            unit is unknown.

    Args:
        masters: whose gradients these are; may grow later.
        gradients: who holds them during backward, as in the optimizer.
        drop_rule: drop bad micro-steps alone.
        narrow: gradients that autograd holds are gathered as they are, half,
            and widened only if they are to be multiplied or exposed.
    """

    def __init__(
        self,
        masters: MasterWeights,
        gradients: str = "autograd",
        drop_rule: DropRule | None = None,
        *,
        narrow: bool = False,
    ) -> None:
        self._masters = masters
        self._buffers: list[GradientBuffer] = []
        self._half_buffers: list[GradientBuffer | None] = []
        self._may_be_narrow = narrow
        self._narrow = False
        self._views: list[list[Tensor | None]] = []
        self._sparse_values: list[Tensor] = []
        self._drop_rule = drop_rule
        self._held: HeldGradients | None = None
        if gradients != "autograd":
            self._held = HeldGradients(half=gradients == "half", droppable=drop_rule is not None)
        self._params: list[Tensor] = []
        self._walks: Walks = IN_PYTHON
        self.unscaled = False
        self.stale = False
        self.number = 0
        self.factor = 1.0
        self.kept: int | None = None
        self.dropped = 0
        self.follow_()

    def follow_(self) -> None:
        """Take in buckets that are new."""
        fresh = self._masters.buckets[len(self._buffers) :]
        if fresh:
            self._params = [param for bucket in self._masters.buckets for param in bucket.params]
            self._walks = walks_for(bucket.device for bucket in self._masters.buckets)
        for bucket in fresh:
            buffer = GradientBuffer(bucket.layout, bucket.device)
            self._buffers.append(buffer)
            narrow = self._may_be_narrow and bucket.is_half
            self._half_buffers.append(GradientBuffer(bucket.layout, bucket.device, bucket.dtype) if narrow else None)
            if self._held is not None:
                self._held.follow_(bucket, buffer)

    @property
    def holds(self) -> bool:
        """True iff gradients have left the model's ``.grad`` and wait for ``step``."""
        return self.unscaled or (self._held is not None and self._held.holds)

    @property
    def sparse(self) -> bool:
        """True iff a gathered gradient is sparse."""
        return bool(self._sparse_values)

    @property
    def takes(self) -> bool:
        """True iff gradients leave the model's ``.grad`` as soon as autograd has finished them."""
        return self._held is not None

    @property
    def gathered(self) -> bool:
        """True iff gradients lie in the flat buffers since the last ``close``."""
        return bool(self._views)

    def check_not_unscaled(self, call: str) -> None:
        """Raise ``StepOrderError`` if ``unscale_`` was called in this window."""
        if self.unscaled:
            raise StepOrderError(f"{call} after unscale_(): the window's gradients are unscaled. Call step() first.")

    def end_micro_step_(self) -> None:
        """Note that the next backward belongs to another micro-step. Syncs: none."""
        if self.stale and not (self.holds or self._in_model()):  # dropped by model.zero_grad()
            self.stale = False
        if self._held is not None:
            self._held.end_micro_step_()

    def collect_(self) -> bool:
        """Move the gradients into the flat buffers.

        After ``unscale_`` they are there, and the caller's edits of the
        masters' gradients are taken over.

        Returns:
            True iff there is any gradient.

        Raises:
            ValueError: the rule for dropped micro-steps returned no factor.
            StepOrderError: a backward followed ``unscale_``, or S has moved
                since the backward.

        Syncs: none; one with droppable micro-steps, one per sparse gradient.
        """
        buckets = self._masters.buckets
        grads: list[list[Tensor | None]] = [list(map(_GRAD, bucket.params)) for bucket in buckets]
        fresh = any(grad is not None for mine in grads for grad in mine)
        if self.unscaled:
            if fresh or (self._held is not None and self._held.holds):
                raise StepOrderError("backward() after unscale_(): the new gradients have another unit. Call step().")
            self._views += [[None] * len(bucket.params) for bucket in buckets[len(self._views) :]]
            self._views = [self._take_edits_(*three) for three in zip(buckets, self._buffers, self._views, strict=True)]
            self._note_sparse()
        elif fresh or self.holds:
            if self.stale:
                raise StepOrderError(STALE)
            self._views = self._gather_(grads) if self._held is None else self._gather_held_(self._held)
            self.drop_model_grads_()
        return any(view is not None for mine in self._views for view in mine)

    def plain(self) -> list[list[Tensor | None]] | None:
        """Return what is in the model's ``.grad``, by bucket; ``None`` unless that, or its plain sum, is to be applied.

        Raises:
            StepOrderError: S has moved since the backward.
        """
        if self.unscaled or self._drop_rule is not None:
            return None
        if self.stale and (self.holds or self._in_model()):
            raise StepOrderError(STALE)
        return [list(map(_GRAD, bucket.params)) for bucket in self._masters.buckets]

    def addresses(self) -> bytes | None:
        """Return where the gradients of all slots lie, if all lie in the model's ``.grad`` as their weights do.

        Packed as in ``walks``. ``None`` also if not that, or its plain sum, is to be applied: see ``plain``.
        """
        if self.unscaled or self.stale or self._drop_rule is not None or self._held is not None:
            return None
        return self._walks.gradients(self._params)

    def plain_stores(self) -> list[tuple[torch.dtype, list[Tensor | None]]] | None:
        """Return each bucket's sums, and their dtype; ``None`` if autograd holds the gradients, or sums are sparse.

        What was written to ``.grad`` by hand joins the sums.
        """
        if self._held is None:
            return None
        self._held.take_(self._masters.buckets)
        return self._held.sums()

    def waiting(self) -> list[bool]:
        """Return for each slot of all buckets whether it has a gradient that is not gathered yet."""
        if self._held is not None:
            return self._held.present()
        return [param.grad is not None for bucket in self._masters.buckets for param in bucket.params]

    def there(self) -> list[bool]:
        """Return for each slot of all buckets whether it has a gathered gradient."""
        return [view is not None for views in self._views for view in views]

    def drop_model_grads_(self) -> object:
        """Set the model's ``.grad`` to ``None``; return what keeps them alive."""
        return self._walks.take(self._params)

    def norm(self, *, exact: bool = False, norm_of_half: NormOfHalf | None = None) -> tuple[Tensor, Tensor]:
        """Return the global norm in the gradients' unit, and True iff unsure.

        Both 0-d, on the first bucket's device. Syncs: none.

        Args:
            exact: as in ``global_norm``.
            norm_of_half: measures half buffers on a CPU, to be trusted.
        """
        # Squares of scaled fp16 gradients stay inside fp32; sums of them and the user's edits need not.
        single = self._held is None and not self.unscaled
        within = [bucket.dtype == torch.float16 and single for bucket in self._masters.buckets]
        within += [False] * len(self._sparse_values)
        flats = self._flats()
        for index, flat in enumerate(flats):
            if norm_of_half is not None and flat.dtype in HALF_DTYPES and flat.device.type == "cpu":
                flats[index], within[index] = norm_of_half(flat).view(1), True
        return global_norm(flats, within_fp32=within, exact=exact)

    def flats(self) -> list[Tensor]:
        """Return the flat buffer of each bucket, fp32 or half, in the gradients' unit."""
        pairs = zip(self._half_buffers, self._buffers, strict=True)
        return [half.flat if self._narrow and half is not None else buffer.flat for half, buffer in pairs]

    def largest(self) -> Tensor:
        """Return the largest |gradient|, inf or NaN iff there is one; 0-d. Syncs: none."""
        return largest(self._flats())

    def multiply_(self, factor: Tensor | float) -> None:
        """Multiply every gradient by ``factor``: fp32, 0-d, on the host. Syncs: none."""
        self._widen_()
        for flat in self._flats():
            flat.mul_(factor)

    def expose_(self) -> None:
        """Show the gradients as the masters' ``.grad``."""
        self._widen_()
        for bucket, views in zip(self._masters.buckets, self._views, strict=True):
            for master, view in zip(bucket.masters, views, strict=True):
                master.grad = view

    def spoil_(self) -> None:
        """Write NaN over every gradient; padding stays zero. Syncs: none."""
        for view in (view for views in self._views for view in views if view is not None):
            (view._values() if view.is_sparse else view).fill_(torch.nan)

    def moved(self, *, by_rows: bool) -> list[list[Moved] | None]:
        """Return for each bucket which slots have a gradient, ``None`` for all.

        Args:
            by_rows: a sparse gradient stands for its rows, not for all.
        """
        if by_rows:
            return [[_moved(view) for view in views] for views in self._views]
        flags: list[list[Moved]] = [[view is not None for view in views] for views in self._views]
        return [None if all(mine) else mine for mine in flags]

    def kinds(self, *, beyond: frozenset[Kind]) -> frozenset[Kind]:
        """Return the kinds of parameters that have a gradient, without ``beyond``."""
        if not self._sparse_values and all(bucket.layout.kinds <= beyond for bucket in self._masters.buckets):
            return frozenset()
        pairs = zip(self._masters.buckets, self._views, strict=True)
        slots = ((s, v) for bucket, views in pairs for s, v in zip(bucket.layout.slots, views, strict=True))
        return frozenset((*slot.kind[:2], view.is_sparse) for slot, view in slots if view is not None) - beyond

    def first_bad(self) -> str | None:
        """Return the first parameter with an inf or NaN. Syncs: one each."""
        # Bad micro-steps are not in the sum; if nothing else was there, the last one was bad.
        shown: Sequence[Sequence[Tensor | None]] = self._views
        if self.kept == 0 and self._held is not None:
            shown = self._held.last_micro_step()
        for bucket, views in zip(self._masters.buckets, shown, strict=True):
            for name, view in zip(bucket.names, views, strict=True):
                if view is not None and not bool((view._values() if view.is_sparse else view).isfinite().all()):
                    return name
        return None

    def rescale_(self, factor: Tensor) -> None:
        """Follow S, which moved by ``factor`` while gradients wait; or note that they are stale."""
        if self.unscaled:
            return
        if self._in_model() or (self.holds and (self._held is None or not self._held.rescale_(factor))):
            self.stale = True

    def zero_(self) -> None:
        """Make the gradients that wait in a store zero."""
        if self._held is not None and self.holds and not self.unscaled:
            self._held.zero_()
            self.stale = False
        else:
            self.close()

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
            self._sparse_values = []
        if self._held is not None:
            self._held.clear_(keep_memory=keep_memory)
        for buffer in itertools.chain(self._buffers, self._half_buffers):
            if buffer is not None and buffer.made:
                buffer.release(keep=keep_memory)
        self._narrow = False
        self.number += 1
        self.unscaled = self.stale = False
        self.factor, self.kept, self.dropped = 1.0, None, 0

    def remove(self) -> None:
        """Leave the gradients to autograd again."""
        if self._held is not None:
            self._held.remove()

    def _in_model(self) -> bool:
        return any(param.grad is not None for bucket in self._masters.buckets for param in bucket.params)

    def _flats(self) -> list[Tensor]:
        return self.flats() + self._sparse_values

    def _widen_(self) -> None:
        """Move what was gathered in half to the fp32 buffers."""
        if self._narrow:
            for index, (half, buffer) in enumerate(zip(self._half_buffers, self._buffers, strict=True)):
                if half is not None:
                    self._views[index] = buffer.gather_(self._views[index])
                    half.release(keep=True)
            self._narrow = False

    def _gather_(self, grads: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        targets = [half or buffer for half, buffer in zip(self._half_buffers, self._buffers, strict=True)]
        try:
            views = [target.gather_(mine) for target, mine in zip(targets, grads, strict=True)]
            self._narrow = self._may_be_narrow
            return views
        except RuntimeError:  # torch copies no sparse tensor into a dense one
            if not any(_is_sparse(grad) for mine in grads for grad in mine):
                raise
        dense = [[None if _is_sparse(grad) else grad for grad in mine] for mine in grads]
        views = [buffer.gather_(mine) for buffer, mine in zip(self._buffers, dense, strict=True)]
        return self._with_sparse(views, grads)

    def _gather_held_(self, held: HeldGradients) -> list[list[Tensor | None]]:
        self._check_droppable()
        held.take_(self._masters.buckets)
        grads = [[param.grad for param in bucket.params] for bucket in self._masters.buckets]
        held.end_micro_step_()
        self._settle(held)
        return self._with_sparse(held.gather_(self._buffers), grads)

    def _check_droppable(self) -> None:
        """Raise ``ValueError`` for sparse gradients that cannot be dropped with their micro-step."""
        if self._drop_rule is not None:
            pairs = (
                (n, p) for bucket in self._masters.buckets for n, p in zip(bucket.names, bucket.params, strict=True)
            )
            if bad := next((name for name, param in pairs if _is_sparse(param.grad)), None):
                raise ValueError(
                    f"drop_bad_micro_steps: the gradient of parameter {bad!r} is sparse and cannot be dropped with its "
                    "micro-step. Build the embedding with sparse=False, or leave drop_bad_micro_steps out."
                )

    def _settle(self, held: HeldGradients) -> None:
        if self._drop_rule is None:
            return
        self.kept, total = held.settle_()
        if not total:
            self.kept = None
            return
        self.dropped = total - self.kept
        if self.kept and self.dropped:
            factor: object = self._drop_rule(self.kept, total)
            if not (isinstance(factor, (int, float)) and 0 < factor < torch.inf):
                raise ValueError(
                    f"drop_bad_micro_steps({self.kept}, {total}) returned {factor!r}: must be a positive finite "
                    "factor. total / kept keeps a mean."
                )
            self.factor = float(factor)

    def _with_sparse(
        self, views: list[list[Tensor | None]], grads: list[list[Tensor | None]]
    ) -> list[list[Tensor | None]]:
        """Return the views with the sparse gradients among ``grads`` in their places, widened."""
        for mine, theirs in zip(views, grads, strict=True):
            for index, grad in enumerate(theirs):
                if grad is not None and grad.is_sparse:
                    mine[index] = join(mine[index], widen_sparse(grad))
        self._sparse_values = _sparse_values(view for mine in views for view in mine)
        return views

    def _note_sparse(self) -> None:
        self._sparse_values = _sparse_values(view for mine in self._views for view in mine)

    def _take_edits_(self, bucket: Bucket, buffer: GradientBuffer, views: list[Tensor | None]) -> list[Tensor | None]:
        edited: list[Tensor | None] = []
        for master, slot, view in zip(bucket.masters, bucket.layout.slots, views, strict=True):
            if master.grad is view:
                edited.append(view)
                continue
            if master.grad is not None and master.grad.is_sparse:
                edited.append(widen_sparse(master.grad))
                continue
            target = view if view is not None and not view.is_sparse else slot.view(buffer.flat)
            target.zero_() if master.grad is None else target.copy_(master.grad)
            edited.append(None if master.grad is None else target)
        return edited


def _is_sparse(grad: Tensor | None) -> bool:
    return grad is not None and grad.is_sparse


def _sparse_values(views: Iterable[Tensor | None]) -> list[Tensor]:
    """Return the values of the sparse gradients, flat; writing them writes the gradients."""
    return [view._values().view(-1) for view in views if view is not None and view.is_sparse]


def _moved(view: Tensor | None) -> Moved:
    return view._indices()[0] if view is not None and view.is_sparse else view is not None
