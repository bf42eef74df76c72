"""Collecting gradients for a step that the device judges: one pass over them, no views, no sync.

What ``window`` does for the host, this does for kernels: they are told where
each gradient lies, and measure them there. Only an optimizer of torch needs
copies, in fp32, which are made in the same pass.
"""

from __future__ import annotations

import importlib.util
import itertools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixedopt.gradients import FP32_MAX, global_norm, largest
from mixedopt.kernels import on_device
from mixedopt.masters import MasterWeights
from mixedopt.numbering import AddressTable, Numbering
from mixedopt.window import Window

THERE = 16  # the address of a gradient of no values

# Mapped over many tensors: half the time of a comprehension.
POINTER: Any = Tensor.data_ptr
STRIDE: Any = Tensor.stride
CONTIGUOUS: Any = Tensor.is_contiguous
DTYPE = operator.attrgetter("dtype")


@dataclass(frozen=True, slots=True)
class Collected:
    """Gradients of one step, scaled.

    Attributes:
        evidence: ``(m, s)`` of every piece, fp32, ``[2, pieces]``, at home.
        there: for each slot whether it has a gradient.
        dtypes: of each bucket's gradients.
        wide: for each bucket a flat fp32 buffer of its gradients, if that was
            asked for; what belongs to absent ones is zero.
        kept: what the addresses are of: to be alive until kernels were launched.
    """

    evidence: Tensor
    there: Sequence[bool]
    dtypes: list[torch.dtype]
    wide: list[Tensor]
    kept: Sequence[Tensor | None]


@dataclass(frozen=True, slots=True)
class Waiting:
    """Gradients where they lie: one address for each slot, and what keeps them alive."""

    addresses: list[int]
    there: Sequence[bool]
    dtypes: list[torch.dtype]
    kept: Sequence[Tensor | None]


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

    def collect_(self) -> Collected | None:
        """Measure the gradients of the window, and take them out of it.

        Returns:
            ``None`` if there are none, or this is not the way: they are sparse,
            unscaled or droppable.

        Raises:
            StepOrderError: as ``Window.collect_``.

        Syncs: none.
        """
        if len(self.numbering.buckets) != len(self._masters.buckets):
            self._number_()
        waiting = self._waiting()
        if waiting is None or not any(waiting.addresses):
            return None
        self.table.upload_(waiting.addresses)
        wide = self._gather(waiting) if self._wide or not self._kernels else []
        evidence = [self._measure(index, waiting, wide) for index in range(len(self.numbering.buckets))]
        joined = evidence[0]
        if len(evidence) > 1:
            joined = torch.cat([measured.to(self._home, non_blocking=True) for measured in evidence], 1)
        self._window.drop_model_grads_()
        return Collected(joined, waiting.there, waiting.dtypes, wide, waiting.kept)

    def _number_(self) -> None:
        """Take in the buckets that there are."""
        buckets = self._masters.buckets
        self.numbering = Numbering(buckets, self._home)
        self.table = AddressTable(self.numbering)
        self._slots = [slot for bucket in buckets for slot in bucket.layout.slots]
        self._dtypes = [bucket.dtype for bucket in buckets]
        self._strides = [slot.stride for slot in self._slots]
        self._contiguous = all(torch.empty(s.shape, device="meta").stride() == s.stride for s in self._slots)
        self._dtype_of = [bucket.dtype for bucket in buckets for _ in bucket.params]
        self._empty = [number for number, slot in enumerate(self._slots) if not slot.numel]
        self._all = (True,) * len(self._slots)
        self._places: dict[int, tuple[list[int], Tensor]] = {}
        self._evidence = [pieces.new_evidence() for pieces in self.numbering.pieces]

    def _waiting(self) -> Waiting | None:
        """Return where the gradients lie, ``None`` if this is not the way."""
        grads = self._window.plain()
        if grads is None:
            return None
        dtypes, dtype_of = self._dtypes, self._dtype_of
        if (held := self._window.plain_stores()) is not None:
            if any(grad is not None for mine in self._window.plain() or () for grad in mine):
                return None  # sparse ones, which no store has taken
            dtypes, grads = [dtype for dtype, _ in held], [mine for _, mine in held]
            dtype_of = [dtype for dtype, mine in held for _ in mine]
        flat = list(itertools.chain.from_iterable(grads))
        try:  # the common case, in few calls: all are there, laid out as their slots are
            addresses: list[int] = list(map(POINTER, flat))
            # Their shapes are the parameters'; if those of both are contiguous, so are their places in memory.
            alike = all(map(CONTIGUOUS, flat)) if self._contiguous else list(map(STRIDE, flat)) == self._strides
            if alike and list(map(DTYPE, flat)) == dtype_of:
                return self._with_empty(Waiting(addresses, self._all, dtypes, flat))
        except (TypeError, RuntimeError):  # some are absent, or sparse
            if any(grad is not None and grad.layout != torch.strided for grad in flat):
                return None
        flat = [
            grad if grad is None or (grad.stride(), grad.dtype) == form else _laid_out(grad, *form)
            for grad, form in zip(flat, zip(self._strides, dtype_of, strict=True), strict=True)
        ]
        there = tuple(grad is not None for grad in flat)
        addresses = [0 if grad is None else grad.data_ptr() for grad in flat]
        return self._with_empty(Waiting(addresses, there, dtypes, flat))

    def _with_empty(self, waiting: Waiting) -> Waiting:
        for number in self._empty:
            waiting.addresses[number] = THERE if waiting.there[number] else 0
        return waiting

    def _gather(self, waiting: Waiting) -> list[Tensor]:
        """Return flat fp32 buffers; filled unless the kernel that measures is to do that."""
        buckets = self.numbering.buckets
        flats = [torch.empty(b.layout.size, dtype=torch.float32, device=b.device) for b in buckets]
        if self._kernels:
            return flats
        for index, (flat, bucket) in enumerate(zip(flats, buckets, strict=True)):
            flat.zero_()
            there = self._part(index, waiting.there)
            grads = self._part(index, waiting.kept)
            views = [view for view, is_there in zip(bucket.layout.views(flat), there, strict=True) if is_there]
            if views:
                torch._foreach_copy_(views, [grad for grad, is_there in zip(grads, there, strict=True) if is_there])
        return flats

    def _measure(self, index: int, waiting: Waiting, wide: Sequence[Tensor]) -> Tensor:
        """Return the evidence of a bucket's gradients; with kernels, fill its flat buffer on the way."""
        evidence, pieces = self._evidence[index], self.numbering.pieces[index]
        if not self._kernels:
            return self._measured(index, waiting, wide[index])
        where = (self.table.parts[index], pieces, waiting.dtypes[index])
        with on_device(evidence.device):
            if wide:
                self._kernels.gather_(*where, wide[index], evidence, self.table.aligned)
            else:
                self._kernels.measure_(*where, evidence, self.table.aligned)
        return evidence

    def _measured(self, index: int, waiting: Waiting, flat: Tensor) -> Tensor:
        """Return the evidence by torch's operations: that of a slot stands at its first piece."""
        evidence = self._evidence[index].zero_()
        if flat.device.type == "cpu" and flat.numel():  # where looking costs nothing, look at slots only if one is bad
            norm, unsure = global_norm([flat], within_fp32=[False])
            peak = largest([flat]).double()
            if bool(~unsure & (norm <= FP32_MAX) & (peak > 0)):
                evidence[:, 0] = torch.stack([peak, (norm / peak).square()]).float()
                return evidence
        slots = self.numbering.buckets[index].layout.slots
        there = self._part(index, waiting.there)
        numbers = [number for number, slot in enumerate(slots) if there[number] and slot.numel]
        if numbers:
            views = [slots[number].view(flat) for number in numbers]
            known, places = self._places.get(index, ([], evidence))
            if known != numbers:  # an upload is a sync, so only when it must be
                first = self.numbering.first_pieces(index)
                places = torch.tensor([first[number] for number in numbers], device=flat.device)
                self._places[index] = numbers, places
            norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64))
            peaks = torch.stack(torch._foreach_norm(views, torch.inf, dtype=torch.float64))
            peaks = torch.where(norms <= torch.finfo(torch.float64).max, peaks, torch.inf)
            squares = torch.where(peaks > 0, (norms / peaks).square(), 0.0)
            evidence[:, places] = torch.stack([peaks, squares]).float()
        return evidence

    def _part(self, index: int, each: Sequence) -> Sequence:  # type: ignore[type-arg]
        """Return a bucket's part of what is there for each slot."""
        return list(self.numbering.spread(each))[index][1]


def _laid_out(grad: Tensor, stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(grad.shape, stride, dtype=dtype, device=grad.device).copy_(grad)
