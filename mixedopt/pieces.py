"""Pieces of a flat buffer, and what a pass over it measures: plans and tensor functions, no kernel.

A pass over a buffer leaves one pair ``(m, s)`` for each piece: the
largest absolute value, and the sum of squares in units of its square. So
``m**2 * s`` is the sum of squares, whatever the magnitudes: in fp64 nothing
overflows or underflows, while the pass itself needs no more than fp32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mixedopt.flat import ALIGNMENT, Layout

ROUND = 4  # numbers of 4 bytes that are 16 bytes


@dataclass(frozen=True, slots=True)
class Pieces:
    """A flat buffer, cut: piece ``i`` is ``flat[start[i] : start[i] + extent[i]]``.

    Invariants: pieces are sorted by ``start`` and tile the buffer; none is
    longer than ``piece`` or holds values of two slots. The first ``count``
    places are values ``within[i]``, ... of its slot in memory order, the rest
    is padding. What belongs to no slot has slot -1 and count 0.

    Attributes:
        slot: number in the layout, or -1; int32.
        start: in values of the buffer; int64.
        within: in values of the slot's memory, a multiple of ``piece``; int64.
        count: values; int32.
        extent: values and padding; int32.
        piece: the most values of a piece.
        aligned: True iff every start and extent is a multiple of ``ALIGNMENT``.
    """

    slot: Tensor
    start: Tensor
    within: Tensor
    count: Tensor
    extent: Tensor
    piece: int
    aligned: bool

    @property
    def number(self) -> int:
        """How many pieces there are."""
        return self.slot.numel()

    def to(self, device: torch.device) -> Pieces:
        """Return the same plan with its tensors on ``device``. Syncs: none, from the host."""
        names = ("slot", "start", "within", "count", "extent")
        return dataclasses.replace(self, **{name: getattr(self, name).to(device, non_blocking=True) for name in names})

    def new_evidence(self) -> Tensor:
        """Return room for the evidence: fp32, ``[2, number]``, not filled, on the device; each row begins aligned."""
        room = torch.empty((2, padded(self.number)), dtype=torch.float32, device=self.slot.device)
        return room[:, : self.number]


def padded(number: int) -> int:
    """Return how many numbers of 4 bytes are reserved, so that the next ones are aligned to 16 bytes."""
    return -(-number // ROUND) * ROUND


def nothing() -> None:
    """Stand for a launch of no pieces."""


def plan_pieces(layout: Layout, piece: int) -> Pieces:
    """Cut the buffer of ``layout`` into pieces.

    Args:
        layout: whose buffer.
        piece: the most values of a piece, a positive multiple of ``ALIGNMENT``.

    Returns:
        The plan, on the host.

    Raises:
        ValueError: if ``piece`` is not such a multiple.
    """
    if piece <= 0 or piece % ALIGNMENT:
        raise ValueError(f"plan_pieces(piece={piece}): must be a positive multiple of {ALIGNMENT}. 8192 is usual.")
    slot, start, count, extent = torch.tensor(_regions(layout, piece), dtype=torch.int64, device="cpu").T
    cuts = -(-extent // piece)
    region = torch.repeat_interleave(cuts)
    first = cuts.cumsum(0) - cuts
    within = (torch.arange(region.numel(), device="cpu") - first[region]) * piece
    extents = (extent[region] - within).clamp(max=piece)
    return Pieces(
        slot[region].int(),
        start[region] + within,
        within,
        (count[region] - within).clamp(0, piece).int(),
        extents.int(),
        piece,
        not bool((extents % ALIGNMENT).any()),  # and so are their sums, the starts
    )


def _regions(layout: Layout, piece: int) -> Sequence[tuple[int, int, int, int]]:
    """Return what tiles the buffer: slot, start, values, and values with padding.

    A slot that starts at an odd place of a pack may have padding that fits in no piece of its own: it is a gap.
    """
    held = [(index, slot) for index, slot in enumerate(layout.slots) if slot.numel]
    held.sort(key=lambda pair: pair[1].offset)
    starts = [*(slot.offset for _, slot in held), layout.size]
    regions = [(-1, 0, 0, starts[0])]
    for (index, slot), edge in zip(held, starts[1:], strict=True):
        end = slot.offset + slot.numel
        padded = min(-(-end // ALIGNMENT) * ALIGNMENT, edge, slot.offset - (-slot.numel // piece) * piece)
        regions += [(index, slot.offset, slot.numel, padded - slot.offset), (-1, padded, 0, edge - padded)]
    return regions


def combine(evidence: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest absolute value and the L2 norm of what was measured.

    Args:
        evidence: ``(m, s)`` of each piece, fp32, ``[2, number]``.

    Returns:
        Both fp64, 0-d, in the unit of m. They are inf or NaN iff a value is,
        and then the norm is the largest value.

    Syncs: none.
    """
    if not evidence.shape[1]:
        zero = torch.zeros((), dtype=torch.float64, device=evidence.device)
        return zero, zero.clone()
    wide = evidence.double()
    largest = wide[0].amax()
    norm = (wide[0].square() * wide[1]).sum().sqrt()
    return largest, torch.where(largest <= torch.finfo(torch.float32).max, norm, largest)
