"""Flat storage: where each parameter lives in a buffer, and views of it.

A ``Layout`` is pure data: it says at which offset, with which shape and
strides, each parameter lies. The same layout serves the fp32 masters, the half
weights and the gradients, so one buffer can be read or written in one pass
while every reader still sees tensors of the parameter's own shape.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

# Slots start at multiples of 64 values: a half buffer is then aligned to 128
# bytes, under which matrix kernels slow down.
ALIGNMENT = 64

# What an optimizer may accept or refuse: dimensions, whether empty, whether its gradient is sparse.
Kind = tuple[int, bool, bool]


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter's place in a flat buffer; offsets and sizes in values."""

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int
    pack: tuple[int, int] | None = None  # start and span of the pack it belongs to

    @property
    def kind(self) -> Kind:
        """Its kind, with a dense gradient."""
        return len(self.shape), self.numel == 0, False

    def view(self, flat: Tensor) -> Tensor:
        """Return the shaped view of ``flat``. Shares storage."""
        return flat.as_strided(self.shape, self.stride, self.offset)


@dataclass(frozen=True, slots=True)
class Layout:
    """All slots of one buffer.

    Invariants: slots do not overlap; ``size`` is a multiple of ``ALIGNMENT``;
    what lies between slots is padding, zero, and never counts.
    """

    slots: tuple[Slot, ...]
    size: int
    kinds: frozenset[Kind]

    @property
    def numel(self) -> int:
        """Values in slots, padding left out."""
        return sum(slot.numel for slot in self.slots)

    def padding(self) -> Tensor:
        """Return the places that belong to no slot: int64, on the host."""
        free = torch.ones(self.size, dtype=torch.bool, device="cpu")
        for slot in self.slots:
            free[slot.offset : slot.offset + slot.numel] = False
        return free.nonzero().view(-1)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return one shaped view of ``flat`` per slot. Shares storage."""
        return [slot.view(flat) for slot in self.slots]

    def model_views(self, flat: Tensor) -> list[Tensor]:
        """Return the views as a model wants them.

        cuDNN finds packed weights only at the start of a storage, so each pack
        gets a storage object of its own over the same memory.
        """
        starts = {slot.pack: None for slot in self.slots if slot.pack is not None}
        packs = {pack: from_dlpack(flat[pack[0] : pack[0] + pack[1]]) for pack in starts}
        return [
            slot.view(flat) if slot.pack is None else _within_pack(slot, slot.pack).view(packs[slot.pack])
            for slot in self.slots
        ]


def _within_pack(slot: Slot, pack: tuple[int, int]) -> Slot:
    return dataclasses.replace(slot, offset=slot.offset - pack[0])


def plan_layout(named: Sequence[tuple[str, Tensor]]) -> Layout:
    """Give each tensor a slot, in the order given.

    Strides are kept when the tensor is dense (channels_last, transposed), and
    are those of ``torch.empty_like`` otherwise. Tensors that are packed in one
    storage (cuDNN's LSTM weights) keep their relative offsets.

    Args:
        named: (name, tensor) pairs of one device.

    Raises:
        ValueError: if two tensors overlap in memory.

    Syncs: none.
    """
    packs = _packed_storages(named)
    slots: list[Slot] = []
    bases: dict[int, int] = {}
    end = 0
    for name, tensor in named:
        key = _storage_key(tensor)
        if key in packs:
            first, span = packs[key]
            if key not in bases:
                bases[key], end = end, _align(end + span)
            offset = bases[key] + int(tensor.storage_offset()) - first
            pack = (bases[key], span)
        else:
            offset, end = end, _align(end + tensor.numel())
            pack = None
        stride = tuple(int(step) for step in torch.empty_like(tensor, device="meta").stride())
        slots.append(Slot(name, tuple(tensor.shape), stride, int(offset), tensor.numel(), pack))
    return Layout(tuple(slots), end, frozenset(slot.kind for slot in slots))


def _align(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _storage_key(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr() if tensor.numel() else 0


def _packed_storages(named: Sequence[tuple[str, Tensor]]) -> dict[int, tuple[int, int]]:
    """Return storage -> (first offset, span) for storages that hold a pack."""
    members: dict[int, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        if tensor.numel():
            members.setdefault(_storage_key(tensor), []).append((name, tensor))
    shared = {key: group for key, group in members.items() if len(group) > 1}
    packs = {}
    for key, group in shared.items():
        _check_apart(group)
        first = min(int(tensor.storage_offset()) for _, tensor in group)
        span = max(_end(tensor) for _, tensor in group) - first
        dense = all(_end(tensor) - tensor.storage_offset() == tensor.numel() for _, tensor in group)
        # cuDNN's storage has room for biases, whether there are any or not.
        tensor = group[0][1]
        span = max(span, tensor.untyped_storage().nbytes() // tensor.element_size() - first)
        # A pack is mostly values; views scattered over a large storage are not one.
        if dense and 2 * sum(tensor.numel() for _, tensor in group) >= span:
            packs[key] = (first, span)
    return packs


def _end(tensor: Tensor) -> int:
    """Return the offset behind the tensor's last value in its storage."""
    reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + int(reach) + 1


def _check_apart(group: Sequence[tuple[str, Tensor]]) -> None:
    """Raise ``ValueError`` if two tensors of one storage share a value."""
    reaching: list[tuple[str, Tensor]] = []  # those whose extent may cross the next one's
    for name, tensor in sorted(group, key=lambda member: int(member[1].storage_offset())):
        reaching = [(before, other) for before, other in reaching if _end(other) > tensor.storage_offset()]
        for before, other in reaching:
            if not _offsets(other).isdisjoint(_offsets(tensor)):
                raise ValueError(
                    f"parameters {before!r} and {name!r} overlap in memory: each must have its own values. "
                    "Tie weights by assigning the same Parameter object."
                )
        reaching.append((name, tensor))


def _offsets(tensor: Tensor) -> set[int]:
    """Return every offset the tensor uses; asked only where extents cross."""
    offsets = {int(tensor.storage_offset())}
    for size, step in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = {offset + index * step for offset in offsets for index in range(size)}
    return offsets
