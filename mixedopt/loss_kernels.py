"""Cross entropy of half logits in Triton: read once forward, once backward, and no fp32 copy.

A program takes one row. All arithmetic is fp32; no atomics, so the same input
gives the same bits. Imported for CUDA tensors only; ``losses`` checks that
shapes and dtypes fit.
"""

# ruff: noqa: N803 (constants of a kernel are upper-case, as Triton's own are)

from __future__ import annotations

import functools
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from mixedopt.launching import Launcher, jit, power_of_two, warps_for

TAKES = "****", "****i", "******"  # what C++ gives the three kernels; see Launcher
COLUMNS = 4096  # that a program works on at once
SUMMED = 1024  # rows that are added up at once


@jit
def row_loss_kernel(
    x: tl.tensor,
    target: tl.tensor,
    losses: tl.tensor,
    stats: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IGNORE: tl.constexpr,
) -> None:
    """Write the loss of one row, its largest logit, and the logarithm of the sum of exp(logit - largest)."""
    row = tl.program_id(0)
    own = x + row.to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    most = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, SIZE, BLOCK):
        place = first + column
        value = tl.load(own + place, mask=place < SIZE, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(most, value)
        level = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(most - level) + tl.exp(value - level)
        most = higher
    peak = tl.max(most, 0)
    level = tl.where(peak == float("-inf"), 0.0, peak)
    rest = tl.log(tl.sum(total * tl.exp(most - level), 0))
    label = tl.load(target + row)
    picked = tl.load(own + label, mask=(label >= 0) & (label < SIZE), other=0.0).to(tl.float32)
    tl.store(losses + row, tl.where(label == IGNORE, 0.0, (peak - picked) + rest))
    tl.store(stats + 2 * row, peak)
    tl.store(stats + 2 * row + 1, rest)


@triton.jit(do_not_specialize=["rows"], debug=True)  # type: ignore[untyped-decorator,unused-ignore]
def reduce_kernel(
    target: tl.tensor,
    losses: tl.tensor,
    result: tl.tensor,
    counted: tl.tensor,
    rows: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IGNORE: tl.constexpr,
    MEAN: tl.constexpr,
) -> None:
    """Add up the losses, count the rows, and stop at a class that there is not, as torch's kernel does."""
    offset = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    number = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, BLOCK):
        place = first + offset
        inside = place < rows
        label = tl.load(target + place, mask=inside, other=IGNORE)
        there = label != IGNORE
        tl.device_assert((label >= 0) & (label < SIZE), "cross_entropy: a target is no class", mask=inside & there)
        total += tl.load(losses + place, mask=inside, other=0.0)
        number += tl.where(inside & there, 1.0, 0.0)
    many = tl.sum(number, 0)
    tl.store(counted, many)
    tl.store(result, tl.div_rn(tl.sum(total, 0), many) if MEAN else tl.sum(total, 0))


@jit
def row_slope_kernel(
    slope: tl.tensor,
    x: tl.tensor,
    target: tl.tensor,
    stats: tl.tensor,
    counted: tl.tensor,
    dx: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    IGNORE: tl.constexpr,
    NONE: tl.constexpr,
    MEAN: tl.constexpr,
) -> None:
    """Write the gradient of one row of logits: (softmax - one-hot) times that of the row's loss."""
    row = tl.program_id(0)
    own = x + row.to(tl.int64) * SIZE
    out = dx + row.to(tl.int64) * SIZE
    column = tl.arange(0, BLOCK)
    label = tl.load(target + row)
    factor = tl.load(slope + row) if NONE else tl.load(slope)
    if MEAN:
        factor = tl.div_rn(factor, tl.load(counted))
    if label == IGNORE:
        for first in range(0, SIZE, BLOCK):
            place = first + column
            tl.store(out + place, tl.zeros([BLOCK], dx.dtype.element_ty), mask=place < SIZE)
    else:
        peak = tl.load(stats + 2 * row)
        rest = tl.load(stats + 2 * row + 1)
        for first in range(0, SIZE, BLOCK):
            place = first + column
            value = tl.load(own + place, mask=place < SIZE, other=0.0).to(tl.float32)
            share = tl.exp((value - peak) - rest)
            share = tl.where(place == label, share - 1.0, share)
            tl.store(out + place, (share * factor).to(dx.dtype.element_ty), mask=place < SIZE)


@functools.cache
def launchers(
    device: int, dtype: torch.dtype, size: int, ignored: int, reduction: str
) -> tuple[Launcher, Launcher, Launcher]:
    """Return the launchers of the three kernels; one for each ``dtype``, as they keep what they compiled."""
    del dtype
    block = min(power_of_two(size), COLUMNS)
    none, mean = reduction == "none", reduction == "mean"
    rows = size, block, ignored
    return (
        Launcher(row_loss_kernel, device, rows, warps_for(block, 16)),
        Launcher(reduce_kernel, device, (size, SUMMED, ignored, mean), 4),
        Launcher(row_slope_kernel, device, (*rows, none, mean), warps_for(block, 16)),
    )


def direct(device: int, dtype: torch.dtype, size: int, ignored: int, reduction: str) -> tuple[Any, ...] | None:
    """Return the three kernels as C++ launches them; ``None`` if it cannot, or before each was launched once."""
    three = launchers(device, dtype, size, ignored, reduction)
    return tuple([each.direct_kernel for each in three]) if tuple(each.takes for each in three) == TAKES else None


def loss_forward(x: Tensor, target: Tensor, ignored: int, reduction: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss, and what backward needs: the stats of every row, and how many rows count.

    Args:
        x: half logits, ``[N, C]``, contiguous.
        target: int64, ``[N]``, contiguous.
        ignored: rows of this class do not count.
        reduction: ``"none"``, ``"mean"`` or ``"sum"``.

    Returns:
        fp32, ``[N]`` or 0-d; fp32, ``[N, 2]``; fp32, 0-d. No sync.
    """
    rows, size = x.shape
    loss, reduce, _ = launchers(x.get_device(), x.dtype, size, ignored, reduction)
    empty = functools.partial(torch.empty, dtype=torch.float32, device=x.device)
    losses, stats, result, counted = empty(rows), empty((rows, 2)), empty(()), empty(())
    loss(rows, (x, target, losses, stats))
    reduce(1, (target, losses, result, counted), rows)
    return losses if reduction == "none" else result, stats, counted


def loss_backward(
    slope: Tensor, x: Tensor, target: Tensor, stats: Tensor, counted: Tensor, ignored: int, reduction: str
) -> Tensor:
    """Return the gradient of the logits, in their dtype, contiguous.

    Args:
        slope: fp32, of the shape of the loss.
        x: as for ``loss_forward``.
        target: as for ``loss_forward``.
        stats: what that returned.
        counted: what that returned.
        ignored: as for ``loss_forward``.
        reduction: as for ``loss_forward``.

    Syncs: none.
    """
    rows, size = x.shape
    launch = launchers(x.get_device(), x.dtype, size, ignored, reduction)[2]
    dx = torch.empty((rows, size), dtype=x.dtype, device=x.device)
    launch(rows, (slope.contiguous(), x, target, stats, counted, dx))
    return dx
