"""Fused GroupNorm of half activations with fp32 weights, in Triton.

A "line" is the pixels of one channel of one sample; ``CHANNELS`` lines are a
group. Forward takes two launches, the moments of each group and the result;
backward three: the sums of each line, those of each group and of each channel,
and dx. As in ``norm_kernels``, the same input gives the same bits.
"""

# ruff: noqa: N803 (constants of a kernel are upper-case, as Triton's own are)

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor

from mixedopt.launching import Launcher, jit, power_of_two, warps_for
from mixedopt.norm_kernels import Gradients

# Lines are ``units * UNIT`` pixels long: a UNIT of 16 tells the compiler that they are aligned, though their length
# is no constant.


@jit
def group_moments_kernel(
    x: tl.tensor,
    stats: tl.tensor,
    units: tl.tensor,
    eps: tl.tensor,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write the mean and rstd of one group of ``CHANNELS`` lines, by Welford's rule in each lane."""
    group = tl.program_id(0)
    size = units * UNIT * CHANNELS
    start = x + group.to(tl.int64) * size
    mean = tl.zeros([BLOCK], tl.float32)
    square = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.float32)
    lane = tl.arange(0, BLOCK)
    for first in range(0, size, BLOCK):
        inside = first + lane < size
        value = tl.load(start + first + lane, mask=inside, other=0.0).to(tl.float32)
        delta = tl.where(inside, value - mean, 0.0)
        count = tl.where(inside, count + 1.0, count)
        mean += delta / (first // BLOCK + 1)
        square += tl.where(inside, delta * (value - mean), 0.0)
    whole = tl.sum(mean * count, 0) / size
    apart = mean - whole
    variance = tl.sum(square + count * apart * apart, 0) / size
    tl.store(stats + group * 2, whole)
    tl.store(stats + group * 2 + 1, tl.rsqrt(variance + eps))


@jit
def group_forward_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    stats: tl.tensor,
    y: tl.tensor,
    rows: tl.tensor,
    units: tl.tensor,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
) -> None:
    """Normalise ``TILE`` lines, ``BLOCK`` pixels of each."""
    pixels = units * UNIT
    blocks = tl.cdiv(pixels, BLOCK)
    line = tl.program_id(0) // blocks * TILE + tl.arange(0, TILE)[:, None]
    pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = line < rows
    inside = real & (pixel < pixels)
    place = line.to(tl.int64) * pixels + pixel
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    group = line // CHANNELS
    mean = tl.load(stats + group * 2, mask=real, other=0.0)
    rstd = tl.load(stats + group * 2 + 1, mask=real, other=0.0)
    channel = line % (CHANNELS * GROUPS)
    out = (value - mean) * (rstd * tl.load(weight + channel))
    if BIAS:
        out += tl.load(bias + channel)
    tl.store(y + place, out.to(y.dtype.element_ty), mask=inside)


@jit
def group_line_sums_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    stats: tl.tensor,
    sums: tl.tensor,
    rows: tl.tensor,
    units: tl.tensor,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write for each of ``TILE`` lines the sums of dy * hat and of dy, hat being the normalised x."""
    pixels = units * UNIT
    line = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    real = line < rows
    start = line.to(tl.int64) * pixels
    mean = tl.load(stats + line // CHANNELS * 2, mask=real, other=0.0)
    product = tl.zeros([TILE, BLOCK], tl.float32)
    plain = tl.zeros([TILE, BLOCK], tl.float32)
    for first in range(0, pixels, BLOCK):
        pixel = first + tl.arange(0, BLOCK)[None, :]
        inside = real & (pixel < pixels)
        slope = tl.load(dy + start + pixel, mask=inside, other=0.0).to(tl.float32)
        product += slope * (tl.load(x + start + pixel, mask=inside, other=0.0).to(tl.float32) - mean)
        plain += slope
    rstd = tl.load(stats + line // CHANNELS * 2 + 1, mask=real, other=0.0)
    tl.store(sums + line * 2, tl.sum(product, 1, keep_dims=True) * rstd, mask=real)
    tl.store(sums + line * 2 + 1, tl.sum(plain, 1, keep_dims=True), mask=real)


@jit
def group_sums_kernel(
    sums: tl.tensor,
    weight: tl.tensor,
    totals: tl.tensor,
    dweight: tl.tensor,
    dbias: tl.tensor,
    rows: tl.tensor,
    samples: tl.tensor,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
    DEPTH: tl.constexpr,
) -> None:
    """Sum the lines of a group, weighted, for dx; past ``rows`` programs, a channel of all samples, for the weights."""
    program = tl.program_id(0)
    if program < rows:
        inner = tl.arange(0, BLOCK)
        within_group = inner < CHANNELS
        scale = tl.load(weight + program % GROUPS * CHANNELS + inner, mask=within_group, other=0.0)
        line = sums + (program * CHANNELS + inner) * 2
        tl.store(totals + program * 2, tl.sum(tl.load(line, mask=within_group, other=0.0) * scale, 0))
        tl.store(totals + program * 2 + 1, tl.sum(tl.load(line + 1, mask=within_group, other=0.0) * scale, 0))
    else:
        channel = (program - rows) * WIDE + tl.arange(0, WIDE)[None, :]
        within = channel < CHANNELS * GROUPS
        product = tl.zeros([DEPTH, WIDE], tl.float32)
        plain = tl.zeros([DEPTH, WIDE], tl.float32)
        for first in range(0, samples, DEPTH):
            sample = first + tl.arange(0, DEPTH)[:, None]
            inside = within & (sample < samples)
            place = sums + (sample * (CHANNELS * GROUPS) + channel) * 2
            product += tl.load(place, mask=inside, other=0.0)
            plain += tl.load(place + 1, mask=inside, other=0.0)
        tl.store(dweight + channel, tl.sum(product, 0, keep_dims=True), mask=within)
        tl.store(dbias + channel, tl.sum(plain, 0, keep_dims=True), mask=within)


@jit
def group_backward_kernel(
    dy: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    stats: tl.tensor,
    totals: tl.tensor,
    dx: tl.tensor,
    rows: tl.tensor,
    units: tl.tensor,
    UNIT: tl.constexpr,
    CHANNELS: tl.constexpr,
    GROUPS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Write dx of ``TILE`` lines, ``BLOCK`` pixels of each."""
    pixels = units * UNIT
    blocks = tl.cdiv(pixels, BLOCK)
    line = tl.program_id(0) // blocks * TILE + tl.arange(0, TILE)[:, None]
    pixel = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)[None, :]
    real = line < rows
    inside = real & (pixel < pixels)
    place = line.to(tl.int64) * pixels + pixel
    value = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    slope = tl.load(dy + place, mask=inside, other=0.0).to(tl.float32)
    group = line // CHANNELS * 2
    mean = tl.load(stats + group, mask=real, other=0.0)
    rstd = tl.load(stats + group + 1, mask=real, other=0.0)
    size = (pixels * CHANNELS).to(tl.float32)
    product = tl.load(totals + group, mask=real, other=0.0) / size
    plain = tl.load(totals + group + 1, mask=real, other=0.0) / size
    scale = tl.load(weight + line % (CHANNELS * GROUPS))
    out = (slope * scale - plain - (value - mean) * (rstd * product)) * rstd
    tl.store(dx + place, out.to(dx.dtype.element_ty), mask=inside)


class Plan(NamedTuple):
    """The launchers of one kind of input."""

    unit: int
    tile: int
    block: int
    moments: Launcher
    forward: Launcher
    line_sums: Launcher
    group_sums: Launcher
    backward: Launcher


@functools.cache
def plan_for(device: int, dtype: torch.dtype, channels: int, groups: int, unit: int, block: int, bias: bool) -> Plan:
    """Return the launchers; one set for each device and ``dtype``, as they keep what they compiled."""
    del dtype
    tile = max(2048 // block, 1)
    warps = warps_for(tile * block, 8)
    return Plan(
        unit,
        tile,
        block,
        Launcher(group_moments_kernel, device, (unit, channels, 4096), 16),
        Launcher(group_forward_kernel, device, (unit, channels, groups, tile, block, bias), warps),
        Launcher(group_line_sums_kernel, device, (unit, channels, tile, block), warps),
        Launcher(group_sums_kernel, device, (channels, groups, power_of_two(channels), 32, 16), 4),
        Launcher(group_backward_kernel, device, (unit, channels, groups, tile, block), warps),
    )


def measure(x: Tensor, groups: int, bias: bool) -> tuple[Plan, int, int]:
    """Return the plan for ``x``, its lines, and the pixels of a line."""
    lines, channels = x.shape[0] * x.shape[1], x.shape[1]
    pixels = x.numel() // lines
    unit, block = math.gcd(pixels, 16), min(power_of_two(pixels), 2048)
    return plan_for(x.get_device(), x.dtype, channels // groups, groups, unit, block, bias), lines, pixels


def group_forward(x: Tensor, groups: int, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return ``x`` normalised over its groups of channels, and the statistics for backward.

    Args:
        x: half, ``[N, C, ...]``, not empty.
        groups: divides C.
        weight: fp32, ``[C]``.
        bias: fp32, ``[C]``.
        eps: added to the variance.

    Returns:
        The result, half, contiguous; mean and rstd, fp32 ``[N, groups, 2]``. No sync.
    """
    x, weight = x.contiguous(), weight.contiguous()
    plan, lines, pixels = measure(x, groups, bias is not None)
    y = torch.empty_like(x)
    units = pixels // plan.unit
    stats = weight.new_empty((x.shape[0], groups, 2))
    plan.moments(x.shape[0] * groups, (x, stats), units, eps)
    tensors = (x, weight, weight if bias is None else bias.contiguous(), stats, y)
    plan.forward(-(-lines // plan.tile) * -(-pixels // plan.block), tensors, lines, units)
    return y, stats


def group_backward(
    dy: Tensor, x: Tensor, groups: int, weight: Tensor, stats: Tensor, needs: Sequence[bool]
) -> Gradients:
    """Return the gradients of ``group_forward`` for x, weight and bias, ``None`` where ``needs`` is False.

    Args:
        dy: half, like ``x``.
        x: half, ``[N, C, ...]``.
        groups: as in ``group_forward``.
        weight: fp32, ``[C]``.
        stats: what ``group_forward`` returned.
        needs: which of the three are wanted.

    Returns:
        dx half, dweight and dbias fp32. No sync.
    """
    dy, x, weight = dy.contiguous(), x.contiguous(), weight.contiguous()
    plan, lines, pixels = measure(x, groups, True)
    samples, channels = x.shape[:2]
    units, tiles = pixels // plan.unit, -(-lines // plan.tile)
    start = 2 * lines + 2 * lines % 4  # totals begin at 16 bytes
    sums = weight.new_empty(start + 2 * samples * groups)
    totals = sums[start:]
    plan.line_sums(tiles, (dy, x, stats, sums), lines, units)
    params = needs[1] or needs[2]
    dweight, dbias = (torch.empty_like(weight), torch.empty_like(weight)) if params else (totals, totals)
    first = samples * groups if needs[0] else 0
    programs = first + (-(-channels // 32) if params else 0)
    plan.group_sums(programs, (sums, weight, totals, dweight, dbias), first, samples)
    wanted = dweight if needs[1] else None, dbias if needs[2] else None
    if not needs[0]:
        return None, *wanted
    dx = torch.empty_like(x)
    plan.backward(tiles * -(-pixels // plan.block), (dy, x, weight, stats, totals, dx), lines, units)
    return dx, *wanted


class GroupPlan(NamedTuple):
    """How groups of channels are normalised, on the current device; as ``norm_kernels.RowPlan``."""

    groups: int
    eps: float

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the result, and the statistics."""
        return group_forward(x, self.groups, weight, bias, self.eps)

    def backward(self, dy: Tensor, x: Tensor, weight: Tensor, stats: Tensor, needs: tuple[bool, ...]) -> Gradients:
        """Return the gradients of x, weight and bias."""
        return group_backward(dy, x, self.groups, weight, stats, needs)
