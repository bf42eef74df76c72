"""To step or to skip, decided on the device: what ``decision`` does on the host.

A pure function of 0-d tensors, so that it can run anywhere: as it stands, or
written into a kernel. Nothing is read by the host; what moves is one vector,
whose numbers fp64 holds exactly.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mixedopt.gradients import FP32_MAX, clip_factor, unscale_factor
from mixedopt.loss_scale import Knobs, LossScaleConfig, LossScaleState, knobs_of, update


class Standing(NamedTuple):
    """What moves during training; fp64, 0-d, all on one device.

    Attributes:
        scale: S; it and the next three are the state of the loss scale.
        applied, skipped: steps so far.
        in_a_row: skips since the last applied step.
        exhausted: steps that were one skip too many with S at its floor.
        culprit: number of the first slot with an inf or NaN, of the last skip.
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor
    floor_skips: Tensor
    applied: Tensor
    skipped: Tensor
    in_a_row: Tensor
    exhausted: Tensor
    culprit: Tensor


# What a step leaves behind, fp64: skip (1 or 0), norm, S, factor, and as one fp32 the S of the next step. It has memory
# of its own, of which backward is begun. The last number fills up to 16 bytes.
REPORT = 6
NEXT_SCALE = 4  # its place


class Rules(NamedTuple):
    """What does not move; fp64, 0-d: the knobs of the loss scale, and two limits."""

    growth_factor: Tensor
    backoff_factor: Tensor
    growth_interval: Tensor
    hysteresis: Tensor
    min_scale: Tensor
    max_scale: Tensor
    least_left: Tensor
    max_consecutive_skips: Tensor
    max_grad_norm: Tensor


class Judgement(NamedTuple):
    """What becomes of a step; 0-d.

    Attributes:
        standing: after the step.
        skip: bool.
        factor: fp32, what scaled gradients are multiplied by.
        norm: fp64, of the unscaled gradients, before clipping.
    """

    standing: Standing
    skip: Tensor
    factor: Tensor
    norm: Tensor


def rules_of(config: LossScaleConfig, max_grad_norm: float | None) -> list[float]:
    """Return the numbers of ``Rules``, in order."""
    limit = math.inf if max_grad_norm is None else max_grad_norm
    return [*map(float, knobs_of(config)), float(config.max_consecutive_skips), float(limit)]


def judge(standing: Standing, rules: Rules, largest: Tensor, norm: Tensor, culprit: Tensor) -> Judgement:
    """Decide, and let S and the counters follow. Pure.

    Args:
        standing: before the step.
        rules: of the loss scale and of clipping.
        largest: fp64, the largest |scaled gradient|, inf or NaN iff one is not
            finite.
        norm: fp64, global norm of the scaled gradients.
        culprit: fp64, number of the first slot with an inf or NaN, if any.

    Syncs: none.
    """
    state = LossScaleState(
        standing.scale.float(),
        standing.growth_tracker.to(torch.int32),
        standing.hysteresis_left.to(torch.int32),
        standing.floor_skips.to(torch.int32),
    )
    knobs = Knobs(
        rules.growth_factor,
        rules.backoff_factor,
        rules.growth_interval.to(torch.int32),
        rules.hysteresis.to(torch.int32),
        rules.min_scale.float(),
        rules.max_scale.float(),
        rules.least_left.to(torch.int32),
    )
    inverse = unscale_factor(state.scale)
    # The largest g/S as fp32 rounds it: with S < 1 it may leave the range though g does not.
    skip = ~((largest * inverse).float().abs() <= FP32_MAX)
    following = update(knobs, state, skip)
    zero = torch.zeros_like(norm)
    moved = Standing(
        scale=following.scale.double(),
        growth_tracker=following.growth_tracker.double(),
        hysteresis_left=following.hysteresis_left.double(),
        floor_skips=following.floor_skips.double(),
        applied=standing.applied + torch.where(skip, 0.0, 1.0),
        skipped=standing.skipped + torch.where(skip, 1.0, 0.0),
        in_a_row=torch.where(skip, standing.in_a_row + 1.0, zero),
        exhausted=standing.exhausted + torch.where(following.floor_skips >= rules.max_consecutive_skips, 1.0, 0.0),
        culprit=torch.where(skip, culprit, standing.culprit),
    )
    return Judgement(moved, skip, clip_factor(norm, inverse, rules.max_grad_norm), norm * inverse)
