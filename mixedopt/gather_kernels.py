"""Gather, measure and restore many tensors in one launch, in Triton.

A program takes one piece of a flat buffer (``pieces``): it copies the piece
there from wherever its gradient lies, and measures it while it is in registers.
No atomics, so the same input gives the same bits; no host sync. Where tensors
lie is data: one int64 address for each, on the device. Imported for CUDA
tensors only; that shapes, dtypes and devices fit is up to the caller.
"""

# ruff: noqa: N803 (constants of a kernel are upper-case, as Triton's own are)

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from mixedopt.launching import Launcher, jit, power_of_two
from mixedopt.pieces import Pieces, nothing

WARPS = 4  # share a piece, all of which a program holds in registers
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
# Programs for each tensor that is restored, and the units that they copy at once.
SHARES = 4
UNITS = 1024


@jit
def piece_kernel(
    addresses: tl.tensor,
    slots: tl.tensor,
    starts: tl.tensor,
    withins: tl.tensor,
    counts: tl.tensor,
    extents: tl.tensor,
    flat: tl.tensor,
    peaks: tl.tensor,
    squares: tl.tensor,
    BLOCK: tl.constexpr,
    GATHER: tl.constexpr,
    ALIGNED: tl.constexpr,
    SOURCE: tl.constexpr,
) -> None:
    """Measure one piece of at most ``BLOCK`` values; if ``GATHER``, copy it into the buffer on the way.

    ``SOURCE`` says of which dtype the gradients are, by its place in ``DTYPES``.

    A mask that may end anywhere forbids wide loads, so whole pieces go without one.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    start = tl.load(starts + program)
    count = tl.load(counts + program)
    if ALIGNED:
        start = tl.multiple_of(start, 64)
    slot = tl.load(slots + program)
    address = tl.load(addresses + slot, mask=slot >= 0, other=0)
    count = tl.where(address != 0, count, 0)
    if SOURCE == 0:
        source = address.to(tl.pointer_type(tl.float16)) + tl.load(withins + program)
    elif SOURCE == 1:
        source = address.to(tl.pointer_type(tl.bfloat16)) + tl.load(withins + program)
    else:
        source = address.to(tl.pointer_type(tl.float32)) + tl.load(withins + program)
    if ALIGNED:
        source = tl.multiple_of(source, 16)
    if count == BLOCK:  # noqa: SIM108 (a branch, not a select: only one of the two loads happens)
        value = tl.load(source + lane)
    else:
        value = tl.load(source + lane, mask=lane < count, other=0.0)
    if GATHER:
        extent = tl.load(extents + program)
        if ALIGNED:
            extent = tl.multiple_of(extent, 64)
        tl.store(flat + start + lane, value.to(flat.dtype.element_ty), mask=lane < extent)
    measure_piece(value, peaks + program, squares + program)


@jit
def measure_piece(value: tl.tensor, peak: tl.tensor, squares: tl.tensor) -> None:
    """Write the largest absolute value, and the sum of squares in units of its square."""
    wide = value.to(tl.float32)
    # As integers inf and NaN are larger than all else, while a maximum of floats may pass over a NaN.
    largest = tl.max(wide.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 0).to(tl.float32, bitcast=True)
    if value.dtype == tl.float16:
        # No square of an fp16 value leaves fp32, so the sum need not wait for the largest value.
        near = 1.0
        total = tl.sum(wide * wide, 0)
    else:
        # Any unit near m serves: it is taken out again. The reciprocal of one between these is a normal number.
        near = 1.0 / tl.minimum(tl.maximum(largest, 2.0**-126), 2.0**126)
        scaled = wide * near
        total = tl.sum(scaled * scaled, 0)
    unit = largest * near
    tl.store(peak, largest)
    tl.store(squares, tl.where(largest > 0, total / unit / unit, 0.0))


@jit
def restore_kernel(
    skip: tl.tensor,
    live: tl.tensor,
    saved: tl.tensor,
    sizes: tl.tensor,
    SHARES: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """Copy one of ``SHARES`` shares of a tensor, in units of four bytes if they fit, iff ``skip`` is not zero."""
    if tl.load(skip) != 0:
        tensor = tl.program_id(0) // SHARES
        share = tl.program_id(0) % SHARES
        target = tl.load(live + tensor)
        source = tl.load(saved + tensor)
        size = tl.load(sizes + tensor)
        if (target | source | size) % 4 == 0:
            word = tl.pointer_type(tl.int32)
            copy_share(target.to(word), source.to(word), size // 4, share, SHARES, UNITS)
        else:
            byte = tl.pointer_type(tl.int8)
            copy_share(target.to(byte), source.to(byte), size, share, SHARES, UNITS)


@jit
def copy_share(
    target: tl.tensor,
    source: tl.tensor,
    size: tl.tensor,
    share: tl.tensor,
    SHARES: tl.constexpr,
    UNITS: tl.constexpr,
) -> None:
    """Copy every ``SHARES``-th block of ``UNITS`` units."""
    for first in range(share.to(tl.int64) * UNITS, size, SHARES * UNITS):
        unit = first + tl.arange(0, UNITS)
        inside = unit < size
        tl.store(target + unit, tl.load(source + unit, mask=inside), mask=inside)


@functools.cache
def piece_launcher(
    device: int, dtype: torch.dtype, source: torch.dtype, piece: int, gather: bool, aligned: bool, warps: int = WARPS
) -> Launcher:
    """Return a launcher; one for each device and ``dtype``, as it keeps what it compiled."""
    del dtype
    return Launcher(piece_kernel, device, (power_of_two(piece), gather, aligned, DTYPES.index(source)), warps)


@functools.cache
def restore_launcher(device: int, dtype: torch.dtype) -> Launcher:
    """Return a launcher; one for each device and ``dtype`` of ``skip``."""
    del dtype
    return Launcher(restore_kernel, device, (SHARES, UNITS), 4)


def gather_(
    addresses: Tensor, pieces: Pieces, source: torch.dtype, flat: Tensor, evidence: Tensor, aligned: bool
) -> None:
    """Copy gradients into a flat buffer of their dtype or of fp32, exactly, and measure them, in one pass.

    Padding, and slots without a gradient, become zero.

    Args:
        addresses: int64, one for each slot of the layout: where the first value
            of a gradient lies, which has its slot's strides; 0 for no gradient.
            Whoever calls keeps the gradients alive until the kernel has run, as
            the allocator does for its stream.
        pieces: the plan, on the device. A ``piece`` that is a power of two is
            fast.
        source: dtype of the gradients: that of ``flat``, or half.
        flat: fp16, bf16 or fp32, 1-d. Overwritten.
        evidence: as ``pieces.new_evidence`` makes it. Overwritten by ``(m, s)``
            of each piece, for ``combine``: m, in the unit of the gradients, is
            the largest absolute value, inf or NaN iff a value is;
            ``m**2 * s`` is the sum of squares. If m is not finite, s is of no
            meaning.
        aligned: True iff every address is a multiple of 16: faster. Must not be
            True otherwise.

    Syncs: none.
    """
    if pieces.number:
        aligned = aligned and pieces.aligned
        launch = piece_launcher(flat.get_device(), flat.dtype, source, pieces.piece, True, aligned)
        launch(pieces.number, (addresses, *_tensors(pieces), flat, *evidence.unbind()))


def measure_(addresses: Tensor, pieces: Pieces, source: torch.dtype, evidence: Tensor, aligned: bool) -> None:
    """Measure gradients where they lie, reading them once; absent ones do not count.

    Args:
        addresses: as for ``gather_``.
        pieces: as for ``gather_``.
        source: dtype of the gradients.
        evidence: as for ``gather_``. Overwritten.
        aligned: as for ``gather_``.

    Syncs: none.
    """
    measuring(addresses, pieces, source, evidence, aligned)()


def measuring(
    addresses: Tensor, pieces: Pieces, source: torch.dtype, evidence: Tensor, aligned: bool
) -> Callable[[], None]:
    """Return ``measure_`` of these, to be called again and again."""
    if not pieces.number:
        return nothing
    aligned = aligned and pieces.aligned
    launch = piece_launcher(evidence.get_device(), evidence.dtype, source, pieces.piece, False, aligned)
    peaks, squares = evidence.unbind()
    return launch.again(pieces.number, (addresses, *_tensors(pieces), peaks, peaks, squares))


def restore_(skip: Tensor, live_addresses: Tensor, saved_addresses: Tensor, sizes: Tensor) -> None:
    """Copy saved tensors over live ones iff ``skip``; else touch none.

    Args:
        skip: 0-d, bool or an integer dtype: True iff not zero. It should begin
            at a multiple of 16 bytes, as a tensor of its own does; elsewhere a
            launch costs more host time.
        live_addresses: int64, 1-d: where each tensor to write begins. Of any
            dtypes and alignment.
        saved_addresses: int64: where its copy begins.
        sizes: int64: in bytes.

    Syncs: none.
    """
    if sizes.numel():
        launch = restore_launcher(skip.get_device(), skip.dtype)
        launch(sizes.numel() * SHARES, (skip, live_addresses, saved_addresses, sizes))


def _tensors(pieces: Pieces) -> tuple[Tensor, ...]:
    return pieces.slot, pieces.start, pieces.within, pieces.count, pieces.extent
