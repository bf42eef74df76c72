"""Collecting gradients for a step that the device judges: one pass over them, no views, no sync.

What ``window`` does for the host, this does for kernels: they are told where
each gradient lies, and measure them there. Only an optimizer of torch needs
copies, in fp32, which are made in the same pass.
"""

from __future__ import annotations

import array
import importlib.util
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixedopt.gradients import FP32_MAX, global_norm, largest
from mixedopt.kernels import on_device
from mixedopt.masters import MasterWeights
from mixedopt.numbering import AddressTable, Numbering
from mixedopt.walks import NOWHERE
from mixedopt.window import Window


@dataclass(frozen=True, slots=True)
class Collected:
    """Gradients of one step, scaled.

    Attributes:
        evidence: ``(m, s)`` of every piece, fp32, ``[2, pieces]``, at home; where there is none, zeros. Written by the
            next step.
        there: for each slot whether it has a gradient.
        dtypes: of each bucket's gradients.
        wide: for each bucket a flat fp32 buffer of its gradients, if that was
            asked for; what belongs to absent ones is zero.
        kept: what the addresses are of: to be alive until kernels were launched.
    """

    evidence: Tensor
    there: Sequence[bool]
    dtypes: tuple[torch.dtype, ...]
    wide: list[Tensor]
    kept: object


@dataclass(frozen=True, slots=True)
class Waiting:
    """Gradients where they lie: one address for each slot, and the gradients, unless all lie in ``.grad`` as they are.

    ``addresses`` are packed as in ``walks``; 0 stands for no gradient.
    """

    addresses: bytes
    there: Sequence[bool]
    dtypes: tuple[torch.dtype, ...]
    grads: Sequence[Tensor | None] | None


def has_triton() -> bool:
    """True iff Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


class Collector:
    """Collects the gradients of one optimizer; see the module.

    Args:
        masters: whose gradients; may grow.
        window: where they wait until then.
        home: the device on which steps are judged.
        wide: copy them to flat fp32 buffers.
        kernels: the room of ours that measure; ``None``: torch's operations do, in more passes.
    """

    def __init__(self, masters: MasterWeights, window: Window, home: torch.device, *, wide: bool, kernels: Any) -> None:
        self._masters = masters
        self._window = window
        self._home = home
        self._wide = wide
        self._kernels = kernels
        self._number_()

    def collect_(self, *, capturing: bool = False) -> Collected | None:
        """Measure the gradients of the window, and take them out of it.

        Args:
            capturing: True iff a graph is being captured.

        Returns:
            ``None`` if there are none, or this is not the way: they are sparse,
            unscaled or droppable.

        Raises:
            StepOrderError: as ``Window.collect_``.

        Syncs: none.
        """
        self.follow_()
        waiting = self._waiting()
        if waiting is None or not any(waiting.there):
            return None
        self.table.upload_(waiting.addresses, capturing=capturing)
        wide = self._gather(waiting) if self._wide or not self._kernels else []
        for index, (part, evidence) in enumerate(zip(self._parts, self._evidence, strict=True)):
            self._measure_(index, waiting, wide)
            if evidence is not part:
                part.copy_(evidence, non_blocking=True)
        kept = waiting.grads, self._window.drop_model_grads_()
        return Collected(self._all_evidence, waiting.there, waiting.dtypes, wide, kept)

    def follow_(self) -> None:
        """Take in buckets that are new."""
        if len(self.numbering.buckets) != len(self._masters.buckets):
            self._number_()

    def _number_(self) -> None:
        """Take in the buckets that there are."""
        buckets = self._masters.buckets
        self.numbering = Numbering(buckets, self._home)
        self.table = AddressTable(self.numbering)
        self._slots = [slot for bucket in buckets for slot in bucket.layout.slots]
        self._dtypes = tuple(bucket.dtype for bucket in buckets)
        self._strides = [slot.stride for slot in self._slots]
        self._dtype_of = [bucket.dtype for bucket in buckets for _ in bucket.params]
        self._all = (True,) * len(self._slots)
        self._places: dict[int, tuple[list[int], Tensor]] = {}
        self._ready: dict[tuple[int, torch.dtype, bool], Callable[[], None]] = {}
        self._all_evidence = torch.zeros((2, len(self.numbering.slots_of)), dtype=torch.float32, device=self._home)
        self._parts = [
            self._all_evidence[:, first : first + pieces.number]
            for first, pieces in zip(self.numbering.first_pieces, self.numbering.pieces, strict=True)
        ]
        # Of a bucket elsewhere it is measured there.
        pairs = zip(self._parts, self.numbering.pieces, strict=True)
        self._evidence = [p if p.device == pieces.slot.device else pieces.new_evidence() for p, pieces in pairs]

    def _waiting(self) -> Waiting | None:
        """Return where the gradients lie, ``None`` if this is not the way."""
        if (usual := self._window.addresses()) is not None:
            return Waiting(usual, self._all, self._dtypes, None)
        grads = self._window.plain()
        if grads is None:
            return None
        dtypes, dtype_of = self._dtypes, self._dtype_of
        if (held := self._window.plain_stores()) is not None:
            if any(grad is not None for mine in self._window.plain() or () for grad in mine):
                return None  # sparse ones, which no store has taken
            dtypes, grads = tuple(dtype for dtype, _ in held), [mine for _, mine in held]
            dtype_of = [dtype for dtype, mine in held for _ in mine]
        flat = list(itertools.chain.from_iterable(grads))
        if any(grad is not None and grad.layout != torch.strided for grad in flat):
            return None
        flat = [
            grad if grad is None or (grad.stride(), grad.dtype) == form else _laid_out(grad, *form)
            for grad, form in zip(flat, zip(self._strides, dtype_of, strict=True), strict=True)
        ]
        addresses = array.array("q", map(_address, flat)).tobytes()
        return Waiting(addresses, tuple(grad is not None for grad in flat), dtypes, flat)

    def _gather(self, waiting: Waiting) -> list[Tensor]:
        """Return flat fp32 buffers; filled unless the kernel that measures is to do that."""
        buckets = self.numbering.buckets
        flats = [torch.empty(b.layout.size, dtype=torch.float32, device=b.device) for b in buckets]
        if self._kernels:
            return flats
        for index, (flat, bucket) in enumerate(zip(flats, buckets, strict=True)):
            flat.zero_()
            there = self._part(index, waiting.there)
            grads = self._part(index, self._grads(waiting))
            views = [view for view, is_there in zip(bucket.layout.views(flat), there, strict=True) if is_there]
            if views:
                torch._foreach_copy_(views, [grad for grad, is_there in zip(grads, there, strict=True) if is_there])
        return flats

    def _measure_(self, index: int, waiting: Waiting, wide: Sequence[Tensor]) -> None:
        """Write the evidence of a bucket's gradients; with kernels, fill its flat buffer on the way."""
        evidence, pieces = self._evidence[index], self.numbering.pieces[index]
        if not self._kernels:
            self._measure_by_torch_(index, waiting, wide[index])
            return
        with on_device(pieces.slot.device):
            if wide:
                where = self.table.parts[index], pieces, waiting.dtypes[index]
                self._kernels.gather_(*where, wide[index], evidence, self.table.aligned)
            else:
                self._measuring(index, waiting.dtypes[index])()

    def _measuring(self, index: int, dtype: torch.dtype) -> Callable[[], None]:
        """Return what measures a bucket's gradients, kept for the next steps."""
        key = index, dtype, self.table.aligned
        measuring = self._ready.get(key) if self.table.lasting else None
        if measuring is None:
            where = self.table.parts[index], self.numbering.pieces[index], dtype
            measuring = self._kernels.measuring(*where, self._evidence[index], self.table.aligned)
            if self.table.lasting:
                self._ready[key] = measuring
        return measuring

    def _measure_by_torch_(self, index: int, waiting: Waiting, flat: Tensor) -> None:
        """Write the evidence by torch's operations: that of a slot stands at its first piece."""
        evidence = self._evidence[index].zero_()
        if flat.device.type == "cpu" and flat.numel():  # where looking costs nothing, look at slots only if one is bad
            norm, unsure = global_norm([flat], within_fp32=[False])
            peak = largest([flat]).double()
            if bool(~unsure & (norm <= FP32_MAX) & (peak > 0)):
                evidence[:, 0] = torch.stack([peak, (norm / peak).square()]).float()
                return
        slots = self.numbering.buckets[index].layout.slots
        there = self._part(index, waiting.there)
        numbers = [number for number, slot in enumerate(slots) if there[number] and slot.numel]
        if numbers:
            views = [slots[number].view(flat) for number in numbers]
            known, places = self._places.get(index, ([], evidence))
            if known != numbers:  # an upload is a sync, so only when it must be
                first = self.numbering.first_pieces_of_slots(index)
                places = torch.tensor([first[number] for number in numbers], device=flat.device)
                self._places[index] = numbers, places
            norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64))
            peaks = torch.stack(torch._foreach_norm(views, torch.inf, dtype=torch.float64))
            peaks = torch.where(norms <= torch.finfo(torch.float64).max, peaks, torch.inf)
            squares = torch.where(peaks > 0, (norms / peaks).square(), 0.0)
            evidence[:, places] = torch.stack([peaks, squares]).float()

    def _grads(self, waiting: Waiting) -> Sequence[Tensor | None]:
        if waiting.grads is not None:
            return waiting.grads
        return list(itertools.chain.from_iterable(self._window.plain() or ()))

    def _part(self, index: int, each: Sequence) -> Sequence:  # type: ignore[type-arg]
        """Return a bucket's part of what is there for each slot."""
        part: Sequence = list(self.numbering.spread(each))[index][1]  # type: ignore[type-arg]
        return part


def _address(grad: Tensor | None) -> int:
    if grad is None:
        return 0
    return grad.data_ptr() if grad.numel() else NOWHERE


def _laid_out(grad: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(grad.shape, stride, dtype=dtype, device=grad.device).copy_(grad)
