"""Gradients that do not wait in ``.grad``: taken as autograd finishes each one."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from mixedopt.bucket import Bucket
from mixedopt.gradients import GradientBuffer, is_finite, largest, widen_sparse


class Store:
    """The gradients of one bucket, added up in a flat buffer.

    Invariants between calls: slots that are not ``present`` hold anything until
    ``zero_absent_``.

    Args:
        bucket: whose gradients are taken.
        buffer: where they are added up, in its dtype.
    """

    def __init__(self, bucket: Bucket, buffer: GradientBuffer) -> None:
        self.buffer = buffer
        self.dtype = buffer.dtype
        self.present = [False] * len(bucket.params)
        self.sparse: dict[int, Tensor] = {}

    @torch.no_grad()
    def add_(self, index: int, grad: Tensor) -> None:
        """Add one gradient in the unit of the others. Syncs: none, one on a GPU if it is sparse."""
        if grad.is_sparse:
            fresh, held = widen_sparse(grad), self.sparse.get(index)
            self.sparse[index] = fresh if held is None else (held + fresh).coalesce()
            return
        view = self.buffer.views[index]
        if self.present[index]:
            view.add_(grad)
        else:
            view.copy_(grad)
            self.present[index] = True

    def grads(self) -> list[Tensor | None]:
        """Return the sum of each slot, ``None`` where there is none."""
        return [view if there else None for view, there in zip(self.buffer.views, self.present, strict=True)]

    def flats(self) -> list[Tensor]:
        """Return what is to be written to change the sums."""
        return [self.buffer.flat, *(grad._values() for grad in self.sparse.values())]

    def gather_(self, buffer: GradientBuffer) -> list[Tensor | None]:
        """Bring the sums into the fp32 buffer, their own or another, and forget them here; returns where they are."""
        self.zero_absent_()
        mine = [view if there else None for view, there in zip(buffer.views, self.present, strict=True)]
        for index, grad in self.sparse.items():
            mine[index] = join(mine[index], grad)
        self.present, self.sparse = [False] * len(self.present), {}
        return mine

    def zero_absent_(self) -> None:
        """Write zeros where there is no gradient. Syncs: none."""
        absent = [view for view, there in zip(self.buffer.views, self.present, strict=True) if not there]
        if absent:
            torch._foreach_zero_(absent)

    def clear_(self, *, keep_memory: bool) -> None:
        """Forget all gradients."""
        self.present = [False] * len(self.present)
        self.sparse = {}
        self.buffer.release(keep=keep_memory)


class Kept:
    """The gradients of one bucket in its own dtype: the first of each is kept as it is, later ones are added to it.

    So memory is that of ``.grad``: it grows as backward goes on and activations are freed. Sparse gradients stay in
    ``.grad``.

    Args:
        bucket: whose gradients are taken.
    """

    def __init__(self, bucket: Bucket) -> None:
        self.dtype = bucket.dtype
        self.sparse: dict[int, Tensor] = {}
        self._grads: list[Tensor | None] = [None] * len(bucket.params)

    @property
    def present(self) -> list[bool]:
        """Return for each slot whether it has a gradient."""
        return [grad is not None for grad in self._grads]

    def add_(self, index: int, grad: Tensor) -> None:
        """Keep a gradient, or add it to the one that is there. Syncs: none."""
        held = self._grads[index]
        if held is None and grad.dtype == self.dtype and not grad.requires_grad:  # called once for each parameter
            self._grads[index] = grad
            return
        with torch.no_grad():  # not in place: autograd may have given another parameter the same memory
            self._grads[index] = (grad.detach() if held is None else held + grad).to(self.dtype)

    def grads(self) -> list[Tensor | None]:
        """Return the sum of each slot, ``None`` where there is none."""
        return list(self._grads)

    def flats(self) -> list[Tensor]:
        """Return what is to be written to change the sums."""
        return [grad for grad in self._grads if grad is not None]

    def gather_(self, buffer: GradientBuffer) -> list[Tensor | None]:
        """Copy the sums into the fp32 buffer, and forget them here; returns where they are."""
        views = buffer.gather_(self._grads)
        self.clear_(keep_memory=True)
        return views

    def clear_(self, *, keep_memory: bool) -> None:
        """Forget all gradients."""
        del keep_memory
        self._grads = [None] * len(self._grads)


class TakeGradient:
    """Post-accumulate hook of a parameter: moves ``.grad`` into a store, and frees it.

    The hook does not keep the store alive: without the optimizer it does
    nothing. A sparse gradient stays where it is unless the store is fp32.
    """

    def __init__(self, store: Store | Kept, index: int, *, sparse: bool) -> None:
        self._store = weakref.ref(store)
        self._index = index
        self._sparse = sparse

    def __call__(self, param: Tensor) -> None:
        """Take the gradient. Syncs: none."""
        store, grad = self._store(), param.grad
        if store is not None and grad is not None and (self._sparse or not grad.is_sparse):
            store.add_(self._index, grad)
            param.grad = None


class HeldGradients:
    """All stores of one optimizer, and the micro-steps they were filled in.

    With ``droppable``, a micro-step first waits in a staging store of the
    model's dtype, since a bad value once added cannot be taken out. It joins
    the sum, by a select on the device, iff all of it is finite.

    Args:
        half: gradients are added up in the model's dtype, else in fp32.
        droppable: bad micro-steps are left out of the sum.
    """

    def __init__(self, *, half: bool, droppable: bool) -> None:
        self._half = half
        self._droppable = droppable
        self._takes_sparse = not (half or droppable)
        self._stores: list[Store | Kept] = []
        self._stages: list[Store] = []
        self._handles: list[RemovableHandle] = []
        self._finite: list[Tensor] = []  # of each micro-step, bool, 0-d
        self._presence: list[list[list[bool]]] = []  # of each micro-step, by bucket

    def follow_(self, bucket: Bucket, buffer: GradientBuffer) -> None:
        """Take the gradients of one more bucket.

        Args:
            bucket: the next one.
            buffer: its fp32 buffer.
        """
        store: Store | Kept = Kept(bucket) if self._half and bucket.is_half else Store(bucket, buffer)
        self._stores.append(store)
        if self._droppable:
            store = stage = Store(bucket, GradientBuffer(bucket.layout, bucket.device, bucket.dtype))
            self._stages.append(stage)
            for there in self._presence:
                there.append([False] * len(bucket.params))
        for index, param in enumerate(bucket.params):
            take = TakeGradient(store, index, sparse=self._takes_sparse)
            self._handles.append(_watch(param, take))

    @property
    def holds(self) -> bool:
        """True iff some gradient was taken."""
        return bool(self._finite) or any(any(store.present) or store.sparse for store in (*self._stores, *self._stages))

    def take_(self, buckets: Sequence[Bucket]) -> None:
        """Take what is in ``.grad`` all the same, written there by hand."""
        for bucket, store in zip(buckets, self._stages or self._stores, strict=True):
            for index, param in enumerate(bucket.params):
                TakeGradient(store, index, sparse=self._takes_sparse)(param)

    def present(self) -> list[bool]:
        """Return for each slot of all buckets whether something was taken."""
        return [there or index in store.sparse for store in self._stores for index, there in enumerate(store.present)]

    def sums(self) -> list[tuple[torch.dtype, list[Tensor | None]]] | None:
        """Return each store's dtype and its sums, ``None`` for absent ones; ``None`` if some gradient is sparse."""
        if any(store.sparse for store in self._stores):
            return None
        return [(store.dtype, store.grads()) for store in self._stores]

    @torch.no_grad()
    def end_micro_step_(self) -> None:
        """Let what was staged join the sum, if all of it is finite. Syncs: none."""
        if not any(any(stage.present) for stage in self._stages):
            return
        sums = [store for store in self._stores if isinstance(store, Store)]  # all of them: they are fp32
        if not self._finite:
            for store in sums:
                store.buffer.flat.zero_()
        for stage in self._stages:
            stage.zero_absent_()
        finite = is_finite(largest([stage.buffer.flat for stage in self._stages]))
        for store, stage in zip(sums, self._stages, strict=True):
            there = finite.to(stage.buffer.flat.device, non_blocking=True)
            store.buffer.flat.add_(torch.where(there, stage.buffer.flat, 0))
        self._finite.append(finite)
        self._presence.append([stage.present for stage in self._stages])
        for stage in self._stages:  # the memory stays for the next one
            stage.present = [False] * len(stage.present)

    def last_micro_step(self) -> list[list[Tensor]]:
        """Return the gradients of the last micro-step by bucket, if they are droppable; absent ones are zero."""
        return [stage.buffer.views for stage in self._stages]

    def settle_(self) -> tuple[int, int]:
        """Return how many micro-steps are in the sum, and of how many.

        A parameter whose gradients were all left out has none. If nothing is
        left, the parameters of the bad micro-steps count as having one.

        Syncs: one read, if micro-steps are droppable; else none.
        """
        if not self._finite:
            return 0, 0
        finite: list[bool] = torch.stack(self._finite).tolist()
        kept = [there for there, good in zip(self._presence, finite, strict=True) if good]
        for index, store in enumerate(store for store in self._stores if isinstance(store, Store)):
            flags = zip(*(there[index] for there in kept or self._presence), strict=True)
            store.present = [any(each) for each in flags]
        return len(kept), len(finite)

    def gather_(self, buffers: Sequence[GradientBuffer]) -> list[list[Tensor | None]]:
        """Bring the sums into the fp32 buffers and forget them here.

        Returns:
            For each bucket what ``GradientBuffer.gather_`` returns.
        """
        self._finite, self._presence = [], []
        return [store.gather_(buffer) for store, buffer in zip(self._stores, buffers, strict=True)]

    def rescale_(self, factor: Tensor) -> bool:
        """Multiply the sums by ``factor``; return False, undone, if half ones forbid it."""
        self.end_micro_step_()
        if any(store.dtype != torch.float32 for store in self._stores):
            return False
        for flat in (flat for store in self._stores for flat in store.flats()):
            flat.mul_(factor)
        return True

    def zero_(self) -> None:
        """Make the gradients that are there zero; droppable ones are forgotten."""
        if self._droppable:
            self.clear_(keep_memory=True)
        for flat in (flat for store in self._stores for flat in store.flats()):
            flat.zero_()

    def clear_(self, *, keep_memory: bool) -> None:
        """Forget all gradients."""
        for store in (*self._stores, *self._stages):
            store.clear_(keep_memory=keep_memory)
        self._finite, self._presence = [], []

    def remove(self) -> None:
        """Leave the gradients to autograd again."""
        for handle in self._handles:
            handle.remove()


def join(dense: Tensor | None, sparse: Tensor) -> Tensor:
    """Return the sum of a gradient that may not be there, in place, and a sparse one."""
    return sparse if dense is None else dense.add_(sparse)


def _watch(param: Tensor, take: TakeGradient) -> RemovableHandle:
    """Register the hook, also on a frozen parameter: torch keeps hooks there, but takes none."""
    frozen = not param.requires_grad
    param.requires_grad_(True)
    handle: RemovableHandle = param.register_post_accumulate_grad_hook(take)  # type: ignore[no-untyped-call]
    param.requires_grad_(not frozen)
    return handle
