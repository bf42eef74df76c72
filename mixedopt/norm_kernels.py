"""Fused normalisation of half activations with fp32 weights, in Triton.

One pass forward, and backward one pass plus a sum over what each program left:
no atomics, so the same input gives the same bits. All arithmetic is fp32, every
result is rounded once. Imported for CUDA tensors only; ``norms`` checks that
shapes and dtypes fit, and that nothing is empty. This room holds what normalises rows, LayerNorm and
RMSNorm; ``norm_group_kernels`` holds GroupNorm.
"""

# ruff: noqa: N803 (constants of a kernel are upper-case, as Triton's own are)

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from mixedopt.launching import Launcher, jit, power_of_two, processors, warps_for

FORWARD, BACKWARD, SUM = "****if", "*****if", "***i"  # what C++ gives these kernels; see Launcher
ONE_PASS = 8192  # a longer row, and dx, leave the sums for the weights no registers: two passes are faster
Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]


@jit
def row_forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CENTRED: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Normalise ``TILE`` rows of ``SIZE`` values."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    within = column < SIZE
    inside = (row < rows) & within
    place = row.to(tl.int64) * SIZE + column
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column, mask=within, other=0.0)
    if CENTRED:
        value = tl.where(within, value - tl.sum(value, 1, keep_dims=True) / SIZE, 0.0)
    rstd = tl.rsqrt(tl.sum(value * value, 1, keep_dims=True) / SIZE + eps)
    out = value * rstd * scale
    if BIAS:
        out += tl.load(bias + column, mask=within, other=0.0)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@jit
def row_backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    dx: tl.tensor,
    partial: tl.tensor,
    rows: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    CENTRED: tl.constexpr,
    INPUT: tl.constexpr,
    WEIGHT: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Write dx of every ``programs``-th tile, and the sums of its rows for dweight and dbias.

    The statistics are made again: the row is in registers anyhow, and nothing but ``x`` need be saved.
    """
    program = tl.program_id(0)
    column = tl.arange(0, BLOCK)[None, :]
    within = column < SIZE
    scale = tl.load(weight + column, mask=within, other=0.0)
    dweight = tl.zeros([TILE, BLOCK], tl.float32)
    dbias = tl.zeros([TILE, BLOCK], tl.float32)
    for tile in range(program, tl.cdiv(rows, TILE), tl.num_programs(0)):
        row = tile * TILE + tl.arange(0, TILE)[:, None]
        inside = (row < rows) & within
        place = row.to(tl.int64) * SIZE + column
        hat = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
        if CENTRED:
            hat = tl.where(within, hat - tl.sum(hat, 1, keep_dims=True) / SIZE, 0.0)
        rstd = tl.rsqrt(tl.sum(hat * hat, 1, keep_dims=True) / SIZE + eps)
        hat *= rstd
        if WEIGHT:
            dweight += slope * hat
        if BIAS:
            dbias += slope
        if INPUT:
            slope *= scale
            out = slope - hat * (tl.sum(slope * hat, 1, keep_dims=True) / SIZE)
            if CENTRED:
                out -= tl.sum(slope, 1, keep_dims=True) / SIZE
            tl.store(dx + place, (out * rstd).to(dx.dtype.element_ty), mask=inside)
    own = partial + program * ((WEIGHT + BIAS) * SIZE)
    if WEIGHT:
        tl.store(own + column, tl.sum(dweight, 0, keep_dims=True), mask=within)
    if BIAS:
        tl.store(own + WEIGHT * SIZE + column, tl.sum(dbias, 0, keep_dims=True), mask=within)


@jit
def column_sum_kernel(
    partial: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    programs: tl.tensor,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Sum what the programs left: ``WIDTH`` columns, the first ``SIZE`` of them for dweight."""
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = tl.zeros([DEPTH, BLOCK], tl.float32)
    for first in range(0, programs, DEPTH):
        row = first + tl.arange(0, DEPTH)[:, None]
        total += tl.load(partial + row * WIDTH + column, mask=(row < programs) & (column < WIDTH), other=0.0)
    summed = tl.sum(total, 0, keep_dims=True)
    tl.store(dweight + column, summed, mask=column < SIZE)
    tl.store(dbias + column - SIZE, summed, mask=(column >= SIZE) & (column < WIDTH))


@functools.cache
def row_forward_launcher(device: int, dtype: torch.dtype, size: int, centred: bool, bias: bool) -> tuple[Launcher, int]:
    """Return a launcher and the rows of a tile. One for each device and ``dtype``, as it keeps what it compiled."""
    del dtype
    block = power_of_two(size)
    tile = max(2048 // block, 1)
    return Launcher(row_forward_kernel, device, (size, block, tile, centred, bias), warps_for(tile * block, 16)), tile


class Backward(NamedTuple):
    """What makes the gradients that are wanted.

    Attributes:
        launch: the kernel.
        tile: rows that a program works on at once.
        most: programs that are worth their sums.
        width: values that each program leaves.
        sum_columns: adds up what they leave, 32 columns a program; ``None`` if they leave nothing.
    """

    launch: Launcher
    tile: int
    most: int
    width: int
    sum_columns: Launcher | None


@functools.cache
def row_backward(device: int, dtype: torch.dtype, size: int, centred: bool, needs: tuple[bool, ...]) -> Backward:
    """Return the launchers. One set for each device and ``dtype``, as they keep what they compiled."""
    del dtype
    block = power_of_two(size)
    tile = max(2048 // block, 1)
    # What a program sums for the weights is memory, and work for one more kernel.
    least = 1 if needs[1] or needs[2] else 2
    most = processors(device) * min(max(8192 // block, least), 4)
    launch = Launcher(row_backward_kernel, device, (size, block, tile, centred, *needs), warps_for(tile * block, 16))
    width = size * (needs[1] + needs[2])
    columns = Launcher(column_sum_kernel, device, (size if needs[1] else 0, width, 32, 64), 8) if width else None
    return Backward(launch, tile, most, width, columns)


class RowPlan:
    """How the rows of one norm on one device are normalised; on the current device, without a sync.

    Args:
        device: of the tensors.
        dtype: half, of x, y and their gradients.
        size: values of a row, those of the weights.
        eps: added to the variance, or to the mean square.
        centred: LayerNorm, else RMSNorm.
        bias: True iff there is one.
    """

    __slots__ = ("_forward", "_kind", "_tile", "eps", "size")

    def __init__(self, device: int, dtype: torch.dtype, size: int, eps: float, centred: bool, bias: bool) -> None:
        self._kind = device, dtype, size, centred
        self.size, self.eps = size, eps
        self._forward, self._tile = row_forward_launcher(*self._kind, bias)

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, None]:
        """Return ``x`` normalised over the dimensions of ``weight``; for backward nothing more is needed.

        Args:
            x: half, ``[..., *weight.shape]``, not empty.
            weight: fp32.
            bias: fp32, like ``weight``.

        Returns:
            Of dtype and shape of ``x``, contiguous.
        """
        x, weight = x.contiguous(), weight.contiguous()
        y = torch.empty_like(x)
        rows = x.numel() // self.size
        tensors = (x, weight, weight if bias is None else bias.contiguous(), y)
        self._forward(-(-rows // self._tile), tensors, rows, self.eps)
        return y, None

    def direct_forward(self) -> tuple[Any, int] | None:
        """Return the kernel that C++ launches for ``forward``, and the rows of a tile; ``None`` if it cannot (yet)."""
        return (self._forward.direct_kernel, self._tile) if self._forward.takes == FORWARD else None

    def direct_backward(self, needs: tuple[bool, ...]) -> tuple[Any, ...] | None:
        """Return the kernels that C++ launches for ``backward``, the rows of a tile, and how many programs at most."""
        launch, tile, most, _, sum_columns = row_backward(*self._kind, needs)
        if self.size > ONE_PASS or launch.takes != BACKWARD or (sum_columns and sum_columns.takes != SUM):
            return None
        return launch.direct_kernel, sum_columns and sum_columns.direct_kernel, tile, most

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, stats: None, needs: tuple[bool, ...]) -> Gradients:
        """Return the gradients of ``forward`` for x, weight and bias, ``None`` where ``needs`` is False.

        Args:
            dy: half, like ``x``.
            x: half.
            weight: fp32.
            stats: unused; the statistics are made again.
            needs: which of the three are wanted.

        Returns:
            dx half, dweight and dbias fp32.
        """
        if self.size > ONE_PASS and needs[0] and (needs[1] or needs[2]):
            dx, _, _ = self.backward(dy, x, weight, stats, (True, False, False))
            return dx, *self.backward(dy, x, weight, stats, (False, *needs[1:]))[1:]
        launch, tile, most, width, sum_columns = row_backward(*self._kind, needs)
        dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
        rows = x.numel() // self.size
        programs = min(-(-rows // tile), most)
        dx = torch.empty_like(x) if needs[0] else None
        if sum_columns is None:
            launch(programs, (dy, x, weight, x if dx is None else dx, weight), rows, self.eps)
            return dx, None, None
        partial = weight.new_empty(programs * width)
        launch(programs, (dy, x, weight, x if dx is None else dx, partial), rows, self.eps)
        dweight = torch.empty_like(weight) if needs[1] else None
        dbias = torch.empty_like(weight) if needs[2] else None
        first, second = dweight if dweight is not None else dbias, dbias if dbias is not None else dweight
        sum_columns(-(-width // 32), (partial, first, second), programs)  # type: ignore[arg-type]
        return dx, dweight, dbias


row_plan = functools.cache(RowPlan)
