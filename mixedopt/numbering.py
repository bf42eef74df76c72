"""The slots of all buckets of an optimizer, numbered through: what tables on the device are about."""

from __future__ import annotations

import array
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mixedopt.bucket import Bucket
from mixedopt.pieces import Pieces, padded, plan_pieces

PIECE = 4096  # values that one program of a kernel works on
SPARE = 4  # pinned tables that are kept ready for steps that a graph captures


class Numbering:
    """The slots of all buckets, numbered through, and the pieces of their buffers.

    Attributes:
        firsts: number of each bucket's first slot: its part of a table is aligned to 16 bytes.
        slots: how many numbers there are; some stand for no slot.
        pieces: of each bucket, on its device.
        first_pieces: number of each bucket's first piece among all, aligned likewise.
        slots_of: number of the slot of every piece, of all buckets, at home; -1 where there is none.
    """

    def __init__(self, buckets: Sequence[Bucket], home: torch.device) -> None:
        self.buckets = tuple(buckets)
        self.home = home
        widths = [padded(len(bucket.params)) for bucket in buckets]
        self.firsts = [0, *itertools.accumulate(widths)][: len(widths)]
        self.slots = sum(widths)
        self._plans = [plan_pieces(bucket.layout, PIECE) for bucket in buckets]
        places = [0, *itertools.accumulate(padded(plan.number) for plan in self._plans)]
        self.first_pieces = places[: len(widths)]
        slots_of = torch.full((places[-1],), -1, dtype=torch.int32, device="cpu")
        for plan, place, first in zip(self._plans, self.first_pieces, self.firsts, strict=True):
            slots_of[place : place + plan.number] = torch.where(plan.slot < 0, -1, plan.slot + first)
        self.slots_of = slots_of.to(home)
        self.pieces: list[Pieces] = [p.to(bucket.device) for p, bucket in zip(self._plans, buckets, strict=True)]

    def spread(self, each: Sequence[Any]) -> Iterator[tuple[int, Any]]:
        """Yield each bucket's first number, and its part of what is there for each slot."""
        position = 0
        for bucket, first in zip(self.buckets, self.firsts, strict=True):
            yield first, each[position : position + len(bucket.params)]
            position += len(bucket.params)

    def first_pieces_of_slots(self, index: int) -> dict[int, int]:
        """Return for each slot of a bucket that is not empty the number of its first piece."""
        slots = self._plans[index].slot.tolist()
        return {int(slot): piece for piece, slot in reversed(list(enumerate(slots))) if slot >= 0}

    def name(self, number: int) -> str | None:
        """Return the name of the parameter in a slot, ``None`` if there is none."""
        for bucket, first in zip(self.buckets, self.firsts, strict=True):
            if first <= number < first + len(bucket.params):
                return bucket.names[number - first]
        return None


class AddressTable:
    """Where the gradient of every slot lies, on the device; uploaded when that changes.

    Attributes:
        at_home: int64, one for each number; 0 for no gradient.
        parts: of each bucket, on its device.
        aligned: True iff every address is a multiple of 16.
        lasting: True iff ``parts`` are those of the next steps, too; not while a graph is captured.
    """

    def __init__(self, numbering: Numbering) -> None:
        self._numbering = numbering
        self._known = b""
        self._spare: list[Tensor] = []
        self._kept: list[Tensor] = []
        self._own = torch.zeros(numbering.slots, dtype=torch.int64, device=numbering.home)
        self._own_parts = self._parts_of(self._own)
        self._elsewhere = [i for i, part in enumerate(self._own_parts) if part.device != numbering.home]
        self.at_home, self.parts = self._own, self._own_parts
        self.aligned = self.lasting = True

    def upload_(self, addresses: bytes, *, capturing: bool = False) -> None:
        """Bring the addresses of all slots, int64, to the devices, unless they are there. Syncs: none."""
        if addresses == self._known and not capturing:
            return
        numbering = self._numbering
        numbered = array.array("q", bytes(8 * numbering.slots))
        for first, part in numbering.spread(array.array("q", addresses)):
            numbered[first : first + len(part)] = part
        fresh = torch.frombuffer(numbered, dtype=torch.int64)
        self.aligned = not bool(torch.bitwise_and(fresh, 15).any())
        if numbering.home.type == "cuda":
            fresh = self._pinned(fresh, capturing=capturing)
        if capturing:  # a graph keeps tables of its own, which it fills at each replay
            self.at_home = fresh.to(numbering.home, non_blocking=True, copy=True)
            self.parts = self._parts_of(self.at_home)
            self._known, self.lasting = b"", False
            return
        self.at_home, self.parts, self.lasting = self._own.copy_(fresh, non_blocking=True), self._own_parts, True
        for index in self._elsewhere:
            first, held = numbering.firsts[index], self.parts[index]
            held.copy_(self._own[first : first + len(held)], non_blocking=True)
        self._known = addresses

    def _parts_of(self, table: Tensor) -> list[Tensor]:
        """Return each bucket's part, on its device."""
        pairs = zip(self._numbering.buckets, self._numbering.firsts, strict=True)
        parts = [(bucket.device, table[first : first + len(bucket.params)]) for bucket, first in pairs]
        return [part.to(device, non_blocking=True) for device, part in parts]

    def _pinned(self, fresh: Tensor, *, capturing: bool) -> Tensor:
        """Return ``fresh`` in pinned memory; what a captured graph copies from stays for ever."""
        if capturing:  # no memory can be pinned now
            if not self._spare:
                raise RuntimeError(f"one graph holds at most {SPARE} steps of an optimizer. Capture fewer iterations.")
            self._kept.append(self._spare.pop().copy_(fresh))
            return self._kept[-1]
        while len(self._spare) < SPARE:
            self._spare.append(torch.empty_like(fresh, pin_memory=True))
        return fresh.pin_memory()
