"""To step or to skip: worked out on the device, read by the host once."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mixedopt.gradients import may_overflow
from mixedopt.loss_scale import LossScaleConfig, LossScaleState, update

_FOUND_INF, _EXHAUSTED, _AMBIGUOUS, _UNFIT, _SCALED = 1, 2, 4, 8, 16


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a decision rests on; all tensors 0-d on the loss scale's device.

    Attributes:
        norm: global norm of the gradients in their present unit.
        scale: S if that unit is scaled, else 1.
        norm_before_edits: norm when ``unscale_`` showed them to the user.
        largest_half: largest |fp16 weight| at the last look, if there was one.
    """

    norm: Tensor
    scale: Tensor
    norm_before_edits: Tensor | None
    largest_half: Tensor | None


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of the evidence.

    Attributes:
        following: the state of the loss scale after this step.
        found_inf: True iff a gradient holds an inf or NaN: skip.
        exhausted: True iff this is one skip too many with S at its floor.
        ambiguous: True iff a g/S may leave fp32: unscale and decide again.
        unfit: True iff some weight has left the half range.
        scaled: True iff S != 1.
    """

    following: LossScaleState
    found_inf: bool
    exhausted: bool
    ambiguous: bool
    unfit: bool
    scaled: bool


def decide(config: LossScaleConfig, state: LossScaleState, evidence: Evidence) -> Decision:
    """Return the decision. Syncs: one host read, the only one of a step."""
    found_inf = ~evidence.norm.isfinite()
    if evidence.norm_before_edits is not None:
        found_inf = found_inf | ~evidence.norm_before_edits.isfinite()
    following = update(config, state, found_inf)
    bits = (
        _FOUND_INF * found_inf
        + _EXHAUSTED * (following.floor_skips >= config.max_consecutive_skips)
        + _AMBIGUOUS * (~found_inf & may_overflow(evidence.norm, evidence.scale))
        + _SCALED * (state.scale != 1.0)
    )
    if evidence.largest_half is not None:
        bits = bits + _UNFIT * evidence.largest_half.isinf()
    read = int(bits.item())
    return Decision(
        following,
        found_inf=bool(read & _FOUND_INF),
        exhausted=bool(read & _EXHAUSTED),
        ambiguous=bool(read & _AMBIGUOUS),
        unfit=bool(read & _UNFIT),
        scaled=bool(read & _SCALED),
    )
