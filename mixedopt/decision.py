"""To step or to skip: measured on the device, decided after one host read.

The loss scale of the eager tier lives on the host, where the decision is made:
its few scalar operations cost microseconds there and a launch each on a GPU.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from mixedopt.gradients import is_finite, may_overflow
from mixedopt.loss_scale import LossScaleConfig, LossScaleState, update

# The answers, in the order of their bits.
_BITS = torch.tensor([1, 2, 4, 8, 16, 32], device="cpu")


@dataclass(frozen=True, slots=True)
class Evidence:
    """What a decision rests on; 0-d tensors on one device.

    Attributes:
        norm: global norm of the gradients in their present unit.
        unsure: bool; True iff ``norm`` is not to be trusted.
        before_edits: largest |gradient| when ``unscale_`` showed them to the
            user, if it did.
        largest_half: largest |fp16 weight| at the last look, if there was one.
    """

    norm: Tensor
    unsure: Tensor
    before_edits: Tensor | None
    largest_half: Tensor | None

    def read(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Bring all to the host at once, 0 for what is not there.

        Syncs: one copy from the device.
        """
        fields = (self.norm, self.unsure, self.before_edits, self.largest_half)
        # What is not there takes no part: a copy to the device would be a sync.
        there = torch.stack([field.to(self.norm) for field in fields if field is not None]).to("cpu")
        values = iter(there.unbind())
        zero = torch.zeros_like(there[0])
        norm, unsure, before_edits, largest_half = (zero if field is None else next(values) for field in fields)
        return norm, unsure != 0, before_edits, largest_half


@dataclass(frozen=True, slots=True)
class Decision:
    """What became of the evidence.

    Attributes:
        norm: the evidence's, on the host, 0-d.
        inverse: what the gradients are still to be multiplied by, fp32, 0-d.
        following: the state of the loss scale after this step.
        skip: True iff the step is not taken.
        found_inf: True iff a gradient held an inf or NaN: S backs off. A bad
            micro-step may have been dropped alone, and a shared scale may skip
            without it.
        exhausted: True iff this is one skip too many with S at its floor.
        ambiguous: True iff the norm cannot tell: unscale, measure exactly and
            decide again.
        unfit: True iff some weight has left the half range.
        scaled: True iff S != 1.
    """

    norm: Tensor
    inverse: Tensor
    following: LossScaleState
    skip: bool
    found_inf: bool
    exhausted: bool
    ambiguous: bool
    unfit: bool
    scaled: bool


def decide(
    config: LossScaleConfig,
    state: LossScaleState,
    inverse: Tensor,
    evidence: Evidence,
    *,
    dropped: bool = False,
    nothing_kept: bool = False,
) -> Decision:
    """Return the decision.

    Args:
        config: of the loss scale.
        state: of the loss scale, on the host. Not modified.
        inverse: 1/S if the gradients are still scaled, else 1; fp32, on the
            host.
        evidence: on the device.
        dropped: True iff bad micro-steps were left out of the gradients.
        nothing_kept: True iff they were all bad.

    Syncs: one host read, the only one of a step.
    """
    norm, unsure, before_edits, largest_half = evidence.read()
    if nothing_kept:
        norm = torch.full_like(norm, torch.nan)
    skip = ~((is_finite(norm) | unsure) & is_finite(before_edits))
    found_inf = torch.ones_like(skip) if dropped else skip
    following = update(config, state, found_inf)
    if dropped:  # a window that lost some micro-steps is no skip
        following = dataclasses.replace(following, floor_skips=following.floor_skips * skip)
    answers = [
        skip,
        found_inf,
        following.floor_skips >= config.max_consecutive_skips,
        ~skip & (unsure | may_overflow(norm, inverse)),
        largest_half == torch.inf,
        state.scale != 1.0,
    ]
    read = int((torch.stack(answers) * _BITS).sum().item())
    return Decision(norm, inverse, following, *(bool(read >> bit & 1) for bit in range(len(answers))))
