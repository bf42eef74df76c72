"""Collecting gradients for a step that the device judges: one pass, no views, no sync.

What ``window`` does for the host, this does for a kernel: gradients go from
where they are to flat buffers, and on the way it is measured what the judgement
needs. The slots of all buckets are numbered through; an address for each tells
the kernels where its gradient is, and whether there is one.
"""

from __future__ import annotations

import array
import importlib.util
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mixedopt.masters import Bucket, MasterWeights
from mixedopt.pieces import Pieces, plan_pieces
from mixedopt.window import Window

PIECE = 8192  # values that one program of a kernel gathers and measures
THERE = 16  # the address of a gradient that lies in the flat buffer already, or is empty
SPARE = 4  # pinned tables that are kept ready for steps that a graph captures
ROUND = 4  # numbers of slots start anew at multiples of it, so that every part of a table is aligned to 16 bytes


@dataclass(frozen=True, slots=True)
class Collected:
    """Gradients of one step, in flat buffers, scaled.

    Attributes:
        flats: one for each bucket; what belongs to absent gradients is of no
            meaning.
        evidence: ``(m, s)`` of every piece, fp32, ``[2, pieces]``, at home.
        there: for each slot whether it has a gradient.
    """

    flats: list[Tensor]
    evidence: Tensor
    there: tuple[bool, ...]


def has_triton() -> bool:
    """True iff Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


class Numbering:
    """The slots of all buckets, numbered through, and the pieces of their buffers.

    Attributes:
        firsts: number of each bucket's first slot, a multiple of ``ROUND``.
        slots: how many numbers there are; some stand for no slot.
        pieces: of each bucket, on its device.
        slots_of: number of the slot of every piece, of all buckets, at home.
    """

    def __init__(self, buckets: Sequence[Bucket], home: torch.device) -> None:
        self.buckets = tuple(buckets)
        self.home = home
        widths = [-(-len(bucket.params) // ROUND) * ROUND for bucket in buckets]
        self.firsts = [0, *itertools.accumulate(widths)][: len(widths)]
        self.slots = sum(widths)
        self._plans = [plan_pieces(bucket.layout, PIECE) for bucket in buckets]
        pairs = zip(self._plans, self.firsts, strict=True)
        numbered = [torch.where(plan.slot < 0, -1, plan.slot + first) for plan, first in pairs]
        self.slots_of = (torch.cat(numbered) if numbered else torch.zeros(0)).int().to(home)
        self.pieces: list[Pieces] = [p.to(bucket.device) for p, bucket in zip(self._plans, buckets, strict=True)]

    def spread(self, each: Sequence[Any]) -> Iterator[tuple[int, Sequence[Any]]]:
        """Yield each bucket's first number, and its part of what is there for each slot."""
        position = 0
        for bucket, first in zip(self.buckets, self.firsts, strict=True):
            yield first, each[position : position + len(bucket.params)]
            position += len(bucket.params)

    def first_pieces(self, index: int, slots: Sequence[int]) -> Tensor:
        """Return of each slot of a bucket, none of them empty, the number of its first piece."""
        plan = self._plans[index]
        starts = {int(slot): piece for piece, slot in reversed(list(enumerate(plan.slot.tolist())))}
        return torch.tensor([starts[slot] for slot in slots], device=self.buckets[index].device)

    def name(self, number: int) -> str | None:
        """Return the name of the parameter in a slot, ``None`` if there is none."""
        for bucket, first in zip(self.buckets, self.firsts, strict=True):
            if first <= number < first + len(bucket.params):
                return bucket.names[number - first]
        return None


class Collector:
    """Collects the gradients of one optimizer; see the module.

    Args:
        masters: whose gradients; may grow.
        window: where they wait until then.
        home: the device on which steps are judged.
        wide: the flat buffers are to be fp32, for an optimizer of torch.
        kernels: gather by our kernels; else by torch's operations, in more passes.
    """

    def __init__(
        self, masters: MasterWeights, window: Window, home: torch.device, *, wide: bool, kernels: bool
    ) -> None:
        self._masters = masters
        self._window = window
        self._home = home
        self._wide = wide
        self._kernels = kernels
        self.numbering = Numbering([], home)
        self._strides: list[list[tuple[int, ...]]] = []
        self._known: list[int] = []
        self._there: tuple[bool, ...] = ()
        self._tables: list[Tensor] = []
        self._aligned = True
        self._spare: list[Tensor] = []
        self._kept: list[Tensor] = []
        self.addresses = torch.zeros(0, dtype=torch.int64, device=home)

    def collect_(self) -> Collected | None:
        """Move the gradients of the window into flat buffers and measure them.

        Returns:
            ``None`` if there are none, or this is not the way: they are sparse,
            unscaled or droppable.

        Raises:
            StepOrderError: as ``Window.collect_``.

        Syncs: none.
        """
        grads = self._window.plain()
        if grads is None:
            return None
        self._follow_()
        held = self._window.plain_stores()
        if held is None:
            try:
                grads = self._like_their_slots(grads)
            except RuntimeError:  # sparse ones have no strides
                return None
            addresses = [_address(grad) for mine in grads for grad in mine]
        else:
            addresses = [THERE if there else 0 for _, mine in held for there in mine]
        if not any(addresses):
            return None
        self._upload_(addresses)
        if held is None:
            both = [self._gather(index, mine) for index, mine in enumerate(grads)]
            self._window.drop_model_grads_()
        else:
            wide = [flat.float() if self._wide else flat for flat, _ in held]
            both = [(flat, self._measure(index, flat)) for index, flat in enumerate(wide)]
        evidence = [measured.to(self._home, non_blocking=True) for _, measured in both]
        joined = evidence[0] if len(evidence) == 1 else torch.cat(evidence, 1)
        return Collected([flat for flat, _ in both], joined, self._there)

    def _follow_(self) -> None:
        """Take in buckets that are new."""
        if len(self.numbering.buckets) != len(self._masters.buckets):
            self.numbering = Numbering(self._masters.buckets, self._home)
            self._strides = [[slot.stride for slot in bucket.layout.slots] for bucket in self._masters.buckets]
            self._known, self._spare = [], []

    def _like_their_slots(self, grads: list[list[Tensor | None]]) -> list[list[Tensor | None]]:
        """Return the gradients laid out in memory as their slots are; nearly all of them are."""
        return [
            [
                grad if grad is None or grad.stride() == stride else _laid_out(grad, stride)
                for grad, stride in zip(mine, strides, strict=True)
            ]
            for mine, strides in zip(grads, self._strides, strict=True)
        ]

    def _upload_(self, addresses: list[int]) -> None:
        """Bring the addresses to the devices, unless they are there."""
        if addresses == self._known:
            return
        numbered = array.array("q", bytes(8 * self.numbering.slots))
        for first, part in self.numbering.spread(addresses):
            numbered[first : first + len(part)] = array.array("q", part)
        fresh = torch.frombuffer(numbered, dtype=torch.int64)
        if self._home.type == "cuda":
            fresh = self._pin(fresh)
        # A new tensor each time: a graph that was captured keeps the one that it has.
        self.addresses = fresh.to(self._home, non_blocking=True, copy=True)
        self._tables = [self._own(self.addresses, index) for index in range(len(self._masters.buckets))]
        self._aligned = not any(address & 15 for address in addresses)
        self._there = tuple(address != 0 for address in addresses)
        self._known = addresses

    def _pin(self, fresh: Tensor) -> Tensor:
        """Return ``fresh`` in pinned memory; what a captured graph copies from stays for ever."""
        if torch.cuda.is_current_stream_capturing():  # no memory can be pinned now
            self._kept.append(self._spare.pop().copy_(fresh))
            return self._kept[-1]
        while len(self._spare) < SPARE:
            self._spare.append(torch.empty_like(fresh, pin_memory=True))
        return fresh.pin_memory()

    def _own(self, table: Tensor, index: int) -> Tensor:
        """Return a bucket's part of something that is numbered by slot, on the bucket's device."""
        bucket, first = self._masters.buckets[index], self.numbering.firsts[index]
        return table[first : first + len(bucket.params)].to(bucket.device, non_blocking=True)

    def _gather(self, index: int, grads: list[Tensor | None]) -> tuple[Tensor, Tensor]:
        bucket = self._masters.buckets[index]
        dtype = torch.float32 if self._wide else bucket.dtype
        flat = torch.empty(bucket.layout.size, dtype=dtype, device=bucket.device)
        if self._kernels:
            from mixedopt.gather_kernels import gather_

            evidence = self.numbering.pieces[index].new_evidence()
            gather_(self._tables[index], self.numbering.pieces[index], bucket.dtype, flat, evidence, self._aligned)
            return flat, evidence
        flat.zero_()
        there = [(slot.view(flat), g) for slot, g in zip(bucket.layout.slots, grads, strict=True) if g is not None]
        if there:
            torch._foreach_copy_([view for view, _ in there], [grad for _, grad in there])
        return flat, self._measured(index, flat)

    def _measure(self, index: int, flat: Tensor) -> Tensor:
        if self._kernels:
            from mixedopt.gather_kernels import measure_

            evidence = self.numbering.pieces[index].new_evidence()
            measure_(self._tables[index], self.numbering.pieces[index], flat, evidence)
            return evidence
        return self._measured(index, flat)

    def _measured(self, index: int, flat: Tensor) -> Tensor:
        """Return the evidence of a buffer by torch's operations: that of a slot stands at its first piece."""
        bucket, pieces = self._masters.buckets[index], self.numbering.pieces[index]
        evidence = torch.zeros((2, pieces.number), dtype=torch.float32, device=flat.device)
        _, there = list(self.numbering.spread(self._there))[index]
        slots = [number for number, slot in enumerate(bucket.layout.slots) if there[number] and slot.numel]
        if slots:
            views = [bucket.layout.slots[number].view(flat) for number in slots]
            norms = torch.stack(torch._foreach_norm(views, 2, dtype=torch.float64))
            peaks = torch.stack(torch._foreach_norm(views, torch.inf, dtype=torch.float64))
            peaks = torch.where(norms <= torch.finfo(torch.float64).max, peaks, torch.inf)
            squares = torch.where(peaks > 0, (norms / peaks).square(), 0.0)
            evidence[:, self.numbering.first_pieces(index, slots)] = torch.stack([peaks, squares]).float()
        return evidence


def _address(grad: Tensor | None) -> int:
    return 0 if grad is None else (grad.data_ptr() or THERE)


def _laid_out(grad: Tensor, stride: Sequence[int]) -> Tensor:
    return torch.empty_strided(grad.shape, stride, dtype=grad.dtype, device=grad.device).copy_(grad)
