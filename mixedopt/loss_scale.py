"""The loss scale: configurations, device-resident state, and its update.

A configuration is a frozen value. The moving part is a ``LossScaleState`` of
0-d tensors, and ``update`` is a pure function from one state to the next: the
whole algorithm in one place, with no host read.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixedopt.errors import CheckpointError, LossScaleError

# Counters are int32 on the device.
MAX_COUNT = 2**31 - 1
FP32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True, slots=True)
class StaticLossScale:
    """A loss scale that never moves.

    Args:
        scale: S, finite and positive. A power of two makes scaling exact.
        max_consecutive_skips: so many skipped steps in a row raise
            ``LossScaleError``.

    Raises:
        ValueError, TypeError: if a value breaks its rule.
    """

    scale: float = 1.0
    max_consecutive_skips: int = 10

    def __post_init__(self) -> None:
        _check_scale(self, "scale")
        _check_count(self, "max_consecutive_skips", "The usual value is 10.")


@dataclass(frozen=True, slots=True)
class DynamicLossScale:
    """A loss scale that grows while steps are clean and backs off on overflow.

    The algorithm, in full, for a step that used S::

        if found_inf:
            growth_tracker = 0
            hysteresis_left = max(hysteresis_left - 1, 0)
            if hysteresis_left == 0:
                S = max(S * backoff_factor, min_scale)
        else:
            hysteresis_left = hysteresis
            growth_tracker += 1
            if growth_tracker >= growth_interval:
                growth_tracker = 0
                if S * growth_factor is finite:
                    S = min(S * growth_factor, max_scale)

    With ``hysteresis=1`` and bounds wide open these are the numbers of
    ``torch.amp.GradScaler``, bit for bit.

    Args:
        init_scale: S at the start; ``min_scale <= init_scale <= max_scale``.
        growth_factor: > 1.
        backoff_factor: strictly between 0 and 1.
        growth_interval: clean steps in a row before S grows, >= 1.
        hysteresis: overflows in a row before S backs off, >= 1; refilled only
            by a clean step.
        min_scale: floor of S, > 0; may lie under 1.
        max_scale: ceiling of S; ``inf`` for none.
        max_consecutive_skips: so many skips in a row *at the floor* raise
            ``LossScaleError``.

    Raises:
        ValueError, TypeError: if a value breaks its rule.

    Example:
        >>> DynamicLossScale(init_scale=2.0**10, growth_interval=500).backoff_factor
        0.5

    References: Micikevicius et al., 2018, arXiv:1710.03740, section 3.2.
    """

    init_scale: float = 2.0**16
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    hysteresis: int = 1
    min_scale: float = 2.0**-14
    max_scale: float = 2.0**32
    max_consecutive_skips: int = 10

    def __post_init__(self) -> None:
        _check_scale(self, "init_scale")
        _check_scale(self, "min_scale")
        if self.max_scale != math.inf:
            _check_scale(self, "max_scale")
        _check_number(self, "growth_factor")
        _check_number(self, "backoff_factor")
        if not (self.growth_factor > 1 and _to_fp32(self.growth_factor) < math.inf):
            raise _bad(self, "growth_factor", "must be finite and greater than 1", "The usual value is 2.0.")
        if not 0 < self.backoff_factor < 1:
            raise _bad(self, "backoff_factor", "must lie strictly between 0 and 1", "The usual value is 0.5.")
        _check_count(self, "growth_interval", "The usual value is 2000.")
        _check_count(self, "hysteresis", "The usual value is 1.")
        _check_count(self, "max_consecutive_skips", "The usual value is 10.")
        if not self.min_scale <= self.init_scale <= self.max_scale:
            raise _bad(
                self,
                "init_scale",
                f"must lie between min_scale={self.min_scale:g} and max_scale={self.max_scale:g}",
                "Widen the bounds or move init_scale inside them.",
            )


LossScaleConfig = StaticLossScale | DynamicLossScale


@dataclass(frozen=True, slots=True)
class LossScaleState:
    """What moves, as 0-d tensors on one device.

    Attributes:
        scale: S, fp32, positive.
        growth_tracker: int32, clean steps in a row since S last changed.
        hysteresis_left: int32, overflows still tolerated before S backs off.
        floor_skips: int32, skips in a row that happened with S at its floor
            (at any value of a static scale).
    """

    scale: Tensor
    growth_tracker: Tensor
    hysteresis_left: Tensor
    floor_skips: Tensor

    def tensors(self) -> list[Tensor]:
        """Return the four tensors in the order of the fields."""
        return [self.scale, self.growth_tracker, self.hysteresis_left, self.floor_skips]

    def assign_(self, other: LossScaleState) -> None:
        """Copy ``other``'s values into this state's tensors. Syncs: none."""
        torch._foreach_copy_(self.tensors(), other.tensors())


def resolve_config(
    loss_scale: object, *, needs_scaling: bool, who: str = "MixedPrecisionOptimizer(loss_scale"
) -> LossScaleConfig:
    """Turn the ``loss_scale`` argument of the optimizer into a configuration.

    Args:
        loss_scale: ``None``, a positive number, or a configuration.
        needs_scaling: True iff some parameter is fp16, whose range is too
            small for unscaled gradients.
        who: whose argument it is, for the error.

    Raises:
        TypeError: if ``loss_scale`` is none of these.
    """
    if loss_scale is None:
        return DynamicLossScale() if needs_scaling else StaticLossScale(1.0)
    if isinstance(loss_scale, (StaticLossScale, DynamicLossScale)):
        return loss_scale
    if isinstance(loss_scale, (int, float)) and not isinstance(loss_scale, bool):
        return StaticLossScale(float(loss_scale))
    raise TypeError(
        f"{who}={loss_scale!r}): must be None, a number, a StaticLossScale or a DynamicLossScale. "
        "Leave it out for the default."
    )


def init_state(config: LossScaleConfig, device: torch.device) -> LossScaleState:
    """Return the state before the first step, on ``device``."""
    scale, hysteresis = (
        (config.init_scale, config.hysteresis) if isinstance(config, DynamicLossScale) else (config.scale, 1)
    )
    return make_state(scale=scale, growth_tracker=0, hysteresis_left=hysteresis, floor_skips=0, device=device)


class Knobs(NamedTuple):
    """What ``update`` needs of a configuration: numbers, or 0-d tensors of the state's dtypes, factors in fp64.

    A static scale is one that grows by 1 at each clean step and never backs off.
    """

    growth_factor: float | Tensor
    backoff_factor: float | Tensor
    growth_interval: int | Tensor
    hysteresis: int | Tensor
    min_scale: float | Tensor
    max_scale: float | Tensor
    least_left: int | Tensor


def knobs_of(config: LossScaleConfig) -> Knobs:
    """Return the numbers of a configuration."""
    if isinstance(config, StaticLossScale):
        return Knobs(1.0, 1.0, 1, 1, math.inf, math.inf, 1)
    factors = config.growth_factor, config.backoff_factor
    return Knobs(*factors, config.growth_interval, config.hysteresis, config.min_scale, config.max_scale, 0)


def update(config: LossScaleConfig | Knobs, state: LossScaleState, found_inf: Tensor) -> LossScaleState:
    """Return the state after one step. Pure; see ``DynamicLossScale``.

    Args:
        config: the rule to apply.
        state: the state that the step used. Not modified.
        found_inf: bool, 0-d, on the state's device; True iff the step met an
            inf or a NaN and was skipped.

    Syncs: none.
    """
    knobs = config if isinstance(config, Knobs) else knobs_of(config)
    zero = torch.zeros_like(state.growth_tracker)
    tracker = torch.where(found_inf, zero, state.growth_tracker + 1)
    grows = tracker >= knobs.growth_interval
    left = torch.where(found_inf, (state.hysteresis_left - 1).clamp(min=knobs.least_left), knobs.hysteresis)
    backs_off = found_inf & (left == 0)
    at_floor = state.scale <= knobs.min_scale

    grown = _times(state.scale, knobs.growth_factor)
    grown = torch.where(grown <= FP32_MAX, grown, state.scale).clamp(max=knobs.max_scale)
    backed_off = _times(state.scale, knobs.backoff_factor).clamp(min=knobs.min_scale)
    return LossScaleState(
        scale=torch.where(backs_off, backed_off, torch.where(grows, grown, state.scale)),
        growth_tracker=torch.where(grows, zero, tracker),
        hysteresis_left=left.to(torch.int32),
        floor_skips=torch.where(found_inf & at_floor, state.floor_skips + 1, zero),
    )


def exhausted_error(config: LossScaleConfig, state: LossScaleState, culprit: str | None) -> LossScaleError:
    """Return the error for one skip too many. Syncs: two reads."""
    dynamic = isinstance(config, DynamicLossScale)
    where = f"at min_scale={float(state.scale):.2g}" if dynamic else f"static at {float(state.scale):g}"
    first = "" if culprit is None else f"First bad parameter: {culprit!r}. "
    return LossScaleError(
        f"found_inf with loss_scale {where} ({int(state.floor_skips)} skips in a row). "
        f"{first}Lower the learning rate, set max_grad_norm, or keep that module in fp32."
    )


def state_to_dict(config: LossScaleConfig, state: LossScaleState) -> dict[str, Any]:
    """Return configuration and state as plain numbers. Syncs: one read a field."""
    kind = "dynamic" if isinstance(config, DynamicLossScale) else "static"
    values = {f.name: getattr(state, f.name).item() for f in dataclasses.fields(state)}
    return {"kind": kind, "config": dataclasses.asdict(config), "state": values}


def state_from_dict(
    saved: dict[str, Any], current: LossScaleConfig, device: torch.device
) -> tuple[LossScaleConfig, LossScaleState]:
    """Rebuild what ``state_to_dict`` wrote.

    Raises:
        CheckpointError: if the saved kind is not ``current``'s, or a value is
            missing or breaks its rule.
    """
    classes: dict[str, type[StaticLossScale] | type[DynamicLossScale]] = {
        "static": StaticLossScale,
        "dynamic": DynamicLossScale,
    }
    try:
        cls = classes[saved["kind"]]
        config = cls(**saved["config"])
        state = make_state(**saved["state"], device=device)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"state_dict holds no valid loss scale ({error}). Nothing was loaded.") from error
    if not isinstance(current, cls):
        raise CheckpointError(
            f"state_dict holds the state of a {cls.__name__}, this optimizer has a {type(current).__name__}. "
            f"Nothing was loaded. Build the optimizer with loss_scale={config!r}, or keep the scale here and load the "
            "rest with strict=False."
        )
    return config, state


def make_state(
    scale: float, growth_tracker: int, hysteresis_left: int, floor_skips: int, *, device: torch.device
) -> LossScaleState:
    """Return a state on ``device``; ``ValueError`` if there is no such state."""
    counters = (growth_tracker, hysteresis_left, floor_skips)
    if not (0 < _to_fp32(scale) < math.inf and all(0 <= counter <= MAX_COUNT for counter in counters)):
        raise ValueError(f"scale {scale!r} with counters {counters} is no state of a loss scale")
    return LossScaleState(
        torch.tensor(scale, dtype=torch.float32, device=device),
        *(torch.tensor(value, dtype=torch.int32, device=device) for value in counters),
    )


def _times(scale: Tensor, factor: float | Tensor) -> Tensor:
    """Multiply as torch's kernel does: one rounding of the exact product."""
    exact = not isinstance(factor, Tensor) and _to_fp32(factor) == factor
    if exact or scale.device.type == "mps":  # MPS has no doubles
        return scale * factor
    return (scale.double() * factor).float()


def _to_fp32(value: float) -> float:
    try:
        return float(struct.unpack("f", struct.pack("f", float(value)))[0])
    except OverflowError:
        return math.inf


def _bad(config: object, name: str, rule: str, remedy: str) -> ValueError:
    return ValueError(f"{type(config).__name__}({name}={getattr(config, name)!r}): {rule}. {remedy}")


def _check_number(config: object, name: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{type(config).__name__}({name}={value!r}): must be a number. Pass a float.")


def _check_scale(config: object, name: str) -> None:
    _check_number(config, name)
    if not 0 < _to_fp32(getattr(config, name)) < math.inf:
        raise _bad(config, name, "must be positive and finite in fp32", "Powers of two such as 2.0**16 are exact.")


def _check_count(config: object, name: str, remedy: str) -> None:
    value = getattr(config, name)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(config).__name__}({name}={value!r}): must be an int. {remedy}")
    if value < 1:
        raise _bad(config, name, "must be at least 1", remedy)
    if value > MAX_COUNT:
        raise _bad(config, name, f"must be at most {MAX_COUNT}", remedy)
