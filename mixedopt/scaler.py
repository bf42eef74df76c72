"""One loss scale in use, and sharing it between optimizers."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mixedopt.decision import Decision
from mixedopt.errors import shown
from mixedopt.loss_scale import (
    LossScaleConfig,
    LossScaleState,
    StaticLossScale,
    exhausted_error,
    init_state,
    resolve_config,
    update,
)
from mixedopt.window import Window

HOST = torch.device("cpu")  # explicit: the default device and dtype are the user's


@dataclasses.dataclass(slots=True)
class Tally:
    """How many losses were scaled."""

    count: int = 0


class LossScaler:
    """A configuration and the state that it moves, on the host.

    Attributes:
        config: how S moves.
        tally: counts the losses; common to the optimizers of a model.
    """

    def __init__(self, config: LossScaleConfig) -> None:
        self.config = config
        self._state: LossScaleState = init_state(config, HOST)
        self.tally = Tally()
        self._last: weakref.ref[Tensor] | None = None

    @property
    def state(self) -> LossScaleState:
        """S and its counters, on the host. Syncs: none here; one where they live on a device."""
        return self._state

    @property
    def losses(self) -> int:
        """How many losses were multiplied by S so far, here or by an optimizer of the same model."""
        return self.tally.count

    def scale(self, loss: Tensor) -> Tensor:
        """Return ``loss`` times S; fp32, or double if it is. Syncs: none."""
        self.tally.count += 1
        wide = loss if loss.dtype == torch.float64 else loss.float()
        scaled = wide * self._factor(wide)
        self._last = weakref.ref(scaled)
        return scaled

    def seeded(self, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``loss`` in fp32, or double if it is, and S like it: the gradient that backward begins with.

        Backward of ``scale(loss)`` begins with the same, two operations later. Syncs: none.
        """
        self.tally.count += 1
        wide = loss if loss.dtype == torch.float64 else loss.float()
        return wide, self._like(wide)

    def _like(self, loss: Tensor) -> Tensor:
        """Return S in the form of ``loss``, in memory of its own: a gradient may be what backward was begun with."""
        return torch.ones_like(loss) * self._factor(loss)

    def _factor(self, loss: Tensor) -> Tensor:
        """Return S where ``loss`` can be multiplied by it."""
        return self._state.scale

    def is_scale(self, constant: Tensor) -> bool:
        """True iff this tensor is S itself. Syncs: none."""
        return constant.data_ptr() == self._state.scale.data_ptr()

    def made(self, loss: object) -> bool:
        """True iff ``loss`` is what ``scale`` returned last."""
        return isinstance(loss, Tensor) and self._last is not None and self._last() is loss

    def move_(self, decision: Decision, culprit: str | None) -> None:
        """Take over the state after a step.

        Args:
            decision: of the step.
            culprit: the first bad parameter, for the error.

        Raises:
            LossScaleError: one skip too many with S at its floor.
        """
        self._take_(decision.following)
        if decision.exhausted:
            raise exhausted_error(self.config, self.state, culprit)

    def agrees_with(self, other: object) -> bool:
        """True iff a loss scaled by one is scaled by the other, now and later."""
        if other is self or not isinstance(other, LossScaler):
            return other is self
        return isinstance(other.config, StaticLossScale) and other.config == self.config

    def load_(self, config: LossScaleConfig, state: LossScaleState) -> None:
        """Take over what a checkpoint holds."""
        self.config = config
        self._take_(state)

    def _take_(self, state: LossScaleState) -> None:
        self._state.assign_(state)


class Tier(Protocol):
    """The part of a tier that a shared step needs."""

    decision: Decision | None
    measured: bool
    window: Window

    def drop_gradients_(self, *, keep_memory: bool = True) -> None:
        """Forget what the window has gathered."""

    def unproven(self) -> frozenset[Any]:
        """Return what the inner optimizer might refuse."""

    def undone_if_it_raises(self, device: torch.device | None = None) -> contextlib.AbstractContextManager[None]:
        """Context after which, if it raises, all is as before."""


class Member(Protocol):
    """The parts of an optimizer."""

    @property
    def tier(self) -> Tier:
        """What steps."""

    def measure_(self) -> None:
        """Judge the gradients ahead of ``step``."""


class SharedLossScale:
    """One loss scale for several optimizers: it moves once per iteration.

    Pass it as ``loss_scale=`` to every optimizer that shares a backward with
    another (two optimizers on one model, a GAN), then call ``step`` of this
    object in the place of theirs. On one model, build them all before the first
    step: their masters then start from the unrounded weights.

    Invariants between calls: all its optimizers scale with the same S.

    Args:
        config: a number, a ``StaticLossScale`` or a ``DynamicLossScale``.
        skip: ``"all"``: an inf or NaN in one optimizer's gradients skips all
            that step with it. ``"own"``: it skips that optimizer alone. S backs
            off either way.

    Raises:
        ValueError, TypeError: if an argument breaks its rule.

    Example:
        >>> from mixedopt import DynamicLossScale, MixedPrecisionOptimizer
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> shared = SharedLossScale(DynamicLossScale(init_scale=2.0**10))
        >>> inner = torch.optim.SGD(model[0].parameters(), lr=0.1), torch.optim.AdamW(model[1].parameters())
        >>> first, second = (MixedPrecisionOptimizer(i, model, loss_scale=shared) for i in inner)
        >>> first.backward(model(torch.ones(3, 4)).square().mean())
        >>> shared.step(first, second)
        >>> first.last_step.applied and second.last_step.applied
        True
    """

    def __init__(self, config: float | LossScaleConfig, skip: str = "all") -> None:
        if config is None:
            raise TypeError("SharedLossScale(config=None): must be a number or a loss scale. Try DynamicLossScale().")
        if skip not in ("all", "own"):
            raise ValueError(f"SharedLossScale(skip={skip!r}): must be 'all' or 'own'. Leave it out for 'all'.")
        self.skip = skip
        self.scaler = LossScaler(resolve_config(config, needs_scaling=True, who="SharedLossScale(config"))
        self._members: weakref.WeakKeyDictionary[Any, Member] = weakref.WeakKeyDictionary()

    @property
    def loss_scale(self) -> float:
        """S, for the next loss. Syncs: none."""
        return float(self.scaler.state.scale)

    def step(self, *optimizers: Any) -> None:
        """Apply the gradients of each optimizer or skip, then move S once.

        Hooks and schedulers see a ``step()`` of each optimizer. One without any
        gradient neither steps nor counts; if none has any, S stays.

        Args:
            optimizers: those that share this iteration, in the order in which
                they step. Those left out keep their gradients.

        Raises:
            StepOrderError, ValueError: as ``step`` of the optimizers; nothing
                has been applied, the gathered gradients are dropped.
            LossScaleError: after too many skips in a row with S at its floor.

        Syncs: one host read for each optimizer.
        """
        members = self._members_of(optimizers)
        tiers = [member.tier for member in members]
        try:
            for member in members:
                member.measure_()
            common = self._settle(tiers)
            culprit = self._culprit(tiers) if common is not None and common.exhausted else None
            with contextlib.ExitStack() as undo:
                if any(tier.decision is not None and tier.unproven() for tier in tiers):
                    for tier in tiers:
                        undo.enter_context(tier.undone_if_it_raises(HOST))
                for optimizer in optimizers:
                    optimizer.step()
        except BaseException:
            for tier in tiers:
                tier.drop_gradients_(keep_memory=False)
            raise
        finally:
            for tier in tiers:
                tier.measured, tier.decision = False, None
        if common is not None:
            self._move_(common, culprit, stepped=tiers)

    def join_(self, optimizer: Any, parts: Member) -> None:
        """Let one more optimizer use this scale."""
        self._members[optimizer] = parts

    def _members_of(self, optimizers: Sequence[Any]) -> list[Member]:
        for optimizer in optimizers:
            if optimizer not in self._members:
                raise ValueError(
                    f"SharedLossScale.step({shown(type(optimizer).__name__)}): was not built with this scale. "
                    "Pass loss_scale=shared to its MixedPrecisionOptimizer."
                )
        if not optimizers or len(set(optimizers)) < len(optimizers):
            raise ValueError("SharedLossScale.step(): needs each optimizer of the iteration once. Name them.")
        return [self._members[optimizer] for optimizer in optimizers]

    def _settle(self, tiers: Sequence[Tier]) -> Decision | None:
        """Make the decisions of all agree; return one of them, ``None`` without gradients."""
        decisions = [tier.decision for tier in tiers if tier.decision is not None]
        if not decisions:
            return None
        found_inf = any(decision.found_inf for decision in decisions)
        following = update(self.scaler.config, self.scaler.state, torch.tensor(found_inf, device=HOST))
        if not any(decision.skip for decision in decisions):  # micro-steps were dropped
            following = dataclasses.replace(following, floor_skips=torch.zeros_like(following.floor_skips))
        exhausted = bool(following.floor_skips >= self.scaler.config.max_consecutive_skips)
        for tier in tiers:
            if tier.decision is not None:
                skip = tier.decision.skip or (self.skip == "all" and any(each.skip for each in decisions))
                tier.decision = dataclasses.replace(tier.decision, skip=skip, following=following, exhausted=exhausted)
        return next(tier.decision for tier in tiers if tier.decision is not None)

    def _culprit(self, tiers: Sequence[Tier]) -> str | None:
        return next(filter(None, (tier.window.first_bad() for tier in tiers)), None)

    def _move_(self, common: Decision, culprit: str | None, *, stepped: Sequence[Tier]) -> None:
        """Move S; gradients that wait in other optimizers follow."""
        self.follow_(common.following, stepped=stepped)
        self.scaler.move_(common, culprit)

    def follow_(self, following: LossScaleState, *, stepped: Sequence[Tier]) -> None:
        """Let gradients that wait in other optimizers follow S before it moves."""
        factor = following.scale / self.scaler.state.scale
        if factor != 1:
            for member in self._members.values():
                if member.tier not in stepped:
                    member.tier.window.rescale_(factor)
