"""The loss scale: its rules, its moves, its state, and the error at its floor."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import dynamic_scales, found_infs, non_default_dynamic_scales, non_default_static_scales
from torch import Tensor, nn

from mixedopt import (
    CheckpointError,
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    StaticLossScale,
)
from mixedopt.loss_scale import (
    LossScaleConfig,
    LossScaleState,
    init_state,
    resolve_config,
    state_from_dict,
    state_to_dict,
    update,
)

INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")


def drive(config: LossScaleConfig, pattern: str, device: torch.device) -> list[LossScaleState]:
    """Return the state after each step of a pattern: X overflow, o clean."""
    state, states = init_state(config, device), []
    for letter in pattern:
        state = update(config, state, torch.tensor(letter == "X", device=device))
        states.append(state)
    return states


def scales(config: LossScaleConfig, pattern: str, device: torch.device) -> list[float]:
    return [float(state.scale) for state in drive(config, pattern, device)]


def as_numbers(state: LossScaleState) -> list[float]:
    return [tensor.item() for tensor in state.tensors()]


# -- what is refused ---------------------------------------------------------

SCALE_RULE = r"must be positive and finite in fp32\. Powers of two such as 2\.0\*\*16 are exact\."
COUNT_RULE = "must be at least 1. The usual value is "
REFUSED: list[tuple[type, dict[str, Any], type[Exception], str]] = [
    *[
        (cls, {field: value}, ValueError, rf"^{cls.__name__}\({field}={value!r}\): {SCALE_RULE}$".replace("+", r"\+"))
        for cls, field in [
            (StaticLossScale, "scale"),
            (DynamicLossScale, "init_scale"),
            (DynamicLossScale, "min_scale"),
        ]
        for value in [0.0, -1.0, INF, -INF, NAN, 1e39, 1e-50, 0]
    ],
    *[
        (
            DynamicLossScale,
            {"max_scale": value},
            ValueError,
            rf"^DynamicLossScale\(max_scale={value!r}\): {SCALE_RULE}$",
        )
        for value in [NAN, -INF, 0.0, -1.0]
    ],
    *[
        (cls, {field: value}, TypeError, rf"^{cls.__name__}\({field}=.*\): must be a number\. Pass a float\.$")
        for cls, field in [
            (StaticLossScale, "scale"),
            *[(DynamicLossScale, f"{name}_scale") for name in ("init", "min", "max")],
            *[(DynamicLossScale, f"{name}_factor") for name in ("growth", "backoff")],
        ]
        for value in [True, "8", None, torch.tensor(8.0), 8 + 0j]
    ],
    *[
        (
            DynamicLossScale,
            {"growth_factor": value},
            ValueError,
            rf"^DynamicLossScale\(growth_factor={value!r}\): must be finite and greater than 1\. "
            r"The usual value is 2\.0\.$",
        )
        for value in [1.0, 0.5, 0.0, -2.0, INF, NAN, 1]
    ],
    *[
        (
            DynamicLossScale,
            {"backoff_factor": value},
            ValueError,
            rf"^DynamicLossScale\(backoff_factor={value!r}\): must lie strictly between 0 and 1\. "
            r"The usual value is 0\.5\.$",
        )
        for value in [1.5, 1.0, 0.0, -0.5, INF, NAN, 1]
    ],
    *[
        (cls, {field: value}, ValueError, rf"^{cls.__name__}\({field}={value}\): {COUNT_RULE}{usual}\.$")
        for cls, field, usual in [
            (StaticLossScale, "max_consecutive_skips", 10),
            (DynamicLossScale, "max_consecutive_skips", 10),
            (DynamicLossScale, "growth_interval", 2000),
            (DynamicLossScale, "hysteresis", 1),
        ]
        for value in [0, -3]
    ],
    *[
        (cls, {field: value}, TypeError, rf"^{cls.__name__}\({field}=.*\): must be an int\. The usual value is \d+\.$")
        for cls, field in [
            (StaticLossScale, "max_consecutive_skips"),
            (DynamicLossScale, "max_consecutive_skips"),
            (DynamicLossScale, "growth_interval"),
            (DynamicLossScale, "hysteresis"),
        ]
        for value in [True, 2.0, "2", None, NAN, INF]
    ],
    *[
        (
            DynamicLossScale,
            bounds,
            ValueError,
            rf"^DynamicLossScale\(init_scale={bounds.get('init_scale', 65536.0)!r}\): must lie between min_scale=.* "
            r"and max_scale=.*\. Widen the bounds or move init_scale inside them\.$",
        )
        for bounds in [
            {"init_scale": 2.0**-15},
            {"init_scale": 2.0**33, "max_scale": 2.0**32},
            {"min_scale": 2.0**17},
            {"max_scale": 2.0**15},
        ]
    ],
]


@pytest.mark.parametrize(("cls", "fields", "error", "message"), REFUSED)
def test_a_value_that_breaks_its_rule_is_refused_with_the_rule_and_the_remedy(
    cls: type, fields: dict[str, Any], error: type[Exception], message: str
) -> None:
    """The message holds the class, the field, the value, the rule and the remedy."""
    with pytest.raises(error, match=message):
        cls(**fields)


@pytest.mark.parametrize("cls", [StaticLossScale, DynamicLossScale])
def test_every_field_of_a_configuration_is_checked(cls: type) -> None:
    """No field exists that the table of refusals leaves out."""
    refused = {field for refused_cls, fields, _, _ in REFUSED if refused_cls is cls for field in fields}

    assert {field.name for field in dataclasses.fields(cls)} == refused


def test_documented_message_of_a_bad_backoff_factor_is_exact() -> None:
    """The example of the house style holds to the letter."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the whole message is compared below)
        DynamicLossScale(backoff_factor=1.5)

    assert "DynamicLossScale(backoff_factor=1.5): must lie strictly between 0 and 1. The usual value is 0.5." == str(
        caught.value
    )


def test_extreme_but_valid_values_are_accepted() -> None:
    """The bounds are closed, the ceiling may be inf, S may be the smallest fp32 number."""
    smallest = DynamicLossScale(init_scale=2.0**-149, min_scale=2.0**-149, max_scale=2.0**-149)
    open_above = DynamicLossScale(init_scale=2**16, max_scale=INF)

    assert 2.0**-149 == float(init_state(smallest, CPU).scale)
    assert 65536.0 == float(init_state(open_above, CPU).scale)


@pytest.mark.parametrize("config", [StaticLossScale(), DynamicLossScale()])
def test_configuration_is_frozen_and_hashable(config: LossScaleConfig) -> None:
    """A configuration is a value: it cannot change, and equal ones are one key."""
    for field in dataclasses.fields(config):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(config, field.name, 3)

    again = dataclasses.replace(config)
    assert again is not config
    assert 1 == len({config, again})


def test_defaults_are_those_of_the_documentation() -> None:
    """GradScaler's four numbers, and our floor, ceiling, hysteresis and patience."""
    expected = {
        "init_scale": 2.0**16,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "hysteresis": 1,
        "min_scale": 2.0**-14,
        "max_scale": 2.0**32,
        "max_consecutive_skips": 10,
    }
    assert expected == dataclasses.asdict(DynamicLossScale())
    assert {"scale": 1.0, "max_consecutive_skips": 10} == dataclasses.asdict(StaticLossScale())


def test_loss_scale_argument_resolves_to_a_configuration() -> None:
    """None is dynamic for fp16 and a constant 1 for bf16; a number is static."""
    given_config = StaticLossScale(4.0)

    assert DynamicLossScale() == resolve_config(None, needs_scaling=True)
    assert StaticLossScale(1.0) == resolve_config(None, needs_scaling=False)
    assert StaticLossScale(8.0) == resolve_config(8, needs_scaling=True)
    assert given_config is resolve_config(given_config, needs_scaling=True)


@pytest.mark.parametrize("value", [True, "dynamic", [1.0]])
def test_loss_scale_argument_of_another_type_is_refused(value: object) -> None:
    """A bool or a word is not a scale."""
    with pytest.raises(TypeError, match=r"loss_scale=.*\): must be None, a number, a StaticLossScale or a Dynamic"):
        resolve_config(value, needs_scaling=True)


@pytest.mark.parametrize("count", [2**31, 10**12, 2**63 - 1])
@pytest.mark.parametrize("field", ["growth_interval", "hysteresis", "max_consecutive_skips"])
def test_a_huge_count_means_never_or_is_refused(field: str, count: int, device: torch.device) -> None:
    """A count beyond int32 either works as that count or raises ``ValueError``."""
    try:
        config = DynamicLossScale(**{field: count})
    except ValueError:
        return
    optimizer = weighted_optimizer(device, torch.float16, loss_scale=config)[1]
    force_step(optimizer, [1.0])

    assert optimizer.last_step.applied
    assert 2.0**16 == optimizer.loss_scale


def test_a_ceiling_beyond_fp32_works_or_is_refused(device: torch.device) -> None:
    """``max_scale=1e39`` either acts as no ceiling or raises ``ValueError``."""
    try:
        config = DynamicLossScale(max_scale=1e39, growth_interval=1)
    except ValueError:
        return

    assert [2.0**17] == scales(config, "o", device)


@pytest.mark.parametrize("field", ["growth_factor", "max_scale"])
def test_an_int_too_large_for_a_double_is_refused(field: str) -> None:
    """Not even Python turns it into a float: the rule and the value are named."""
    with pytest.raises(ValueError, match=rf"DynamicLossScale\({field}=1000"):
        DynamicLossScale(**{field: 10**400})


# -- how S moves -------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("XX", [16, 8]),
        ("XoX", [16, 16, 16]),
        ("XXoX", [16, 8, 8, 8]),
        ("XXXX", [16, 8, 4, 2]),
        ("XXoXX", [16, 8, 8, 8, 4]),
        ("oXoXoX", [16, 16, 16, 16, 16, 16]),
    ],
)
def test_hysteresis_tolerates_overflows_and_only_a_clean_step_refills_it(
    pattern: str, expected: list[float], device: torch.device
) -> None:
    """From S=16 with hysteresis 2: the second overflow in a row and each further one back off."""
    config = DynamicLossScale(init_scale=16.0, hysteresis=2)

    assert expected == scales(config, pattern, device)


@pytest.mark.parametrize("hysteresis", [1, 2, 3, 5])
def test_first_backoff_comes_at_overflow_number_hysteresis(hysteresis: int, device: torch.device) -> None:
    """With hysteresis h the h-th overflow in a row is the first that lowers S."""
    config = DynamicLossScale(init_scale=16.0, hysteresis=hysteresis)

    assert [16.0] * (hysteresis - 1) + [8.0, 4.0] == scales(config, "X" * (hysteresis + 1), device)


def test_scale_stops_at_floor_and_at_ceiling(device: torch.device) -> None:
    """Neither the floor nor the ceiling is crossed, off the powers of two either."""
    config = DynamicLossScale(init_scale=8.0, growth_interval=1, min_scale=3.0, max_scale=20.0)

    assert [4.0, 3.0, 3.0] == scales(config, "XXX", device)
    assert [16.0, 20.0, 20.0, 10.0] == scales(config, "oooX", device)


@pytest.mark.parametrize("interval", [1, 2, 3, 7])
def test_growth_needs_exactly_growth_interval_clean_steps(interval: int, device: torch.device) -> None:
    """One step earlier S has not grown; an overflow starts the count again."""
    config = DynamicLossScale(init_scale=16.0, growth_interval=interval)

    assert [16.0] * (interval - 1) + [32.0] == scales(config, "o" * interval, device)
    assert 8.0 == scales(config, "o" * (interval - 1) + "X" + "o" * (interval - 1), device)[-1]
    assert 16.0 == scales(config, "o" * (interval - 1) + "X" + "o" * interval, device)[-1]


def test_tracker_restarts_after_growth_and_after_overflow(device: torch.device) -> None:
    """``growth_tracker`` counts clean steps since S last changed."""
    config = DynamicLossScale(growth_interval=3, hysteresis=9)

    assert [1, 2, 0, 1, 0, 1] == [int(s.growth_tracker) for s in drive(config, "ooooXo", device)]


def test_growth_to_a_value_that_is_not_finite_never_happens(device: torch.device) -> None:
    """At the top of fp32 S stays as it is and the tracker starts again."""
    config = DynamicLossScale(init_scale=2.0**127, growth_interval=2, max_scale=INF)
    states = drive(config, "oooooX", device)

    assert [2.0**127] * 5 + [2.0**126] == [float(state.scale) for state in states]
    assert [1, 0, 1, 0, 1, 0] == [int(state.growth_tracker) for state in states]


def test_scale_of_tiny_losses_stays_finite_and_steps_are_applied(device: torch.device) -> None:
    """S=2^120 growing at every step: 20 steps of a gradient near 1e-38 are applied, none skipped."""
    config = DynamicLossScale(init_scale=2.0**120, growth_interval=1, max_scale=INF)
    (weight,), optimizer = weighted_optimizer(device, torch.bfloat16, loss_scale=config)
    for _ in range(20):
        optimizer.backward((weight.float() * 1e-38).sum())
        optimizer.step()

    assert 2.0**127 == optimizer.loss_scale
    assert (20, 0) == (optimizer.applied_steps, optimizer.skipped_steps)


@given(config=dynamic_scales(), pattern=found_infs())
def test_scale_stays_within_its_bounds(config: DynamicLossScale, pattern: list[bool]) -> None:
    """min_scale <= S <= max_scale, finite, after any sequence."""
    for state in drive(config, "".join("X" if bad else "o" for bad in pattern), CPU):
        assert config.min_scale <= float(state.scale) <= config.max_scale
        assert math.isfinite(float(state.scale))


@given(config=dynamic_scales(power_of_two=True), pattern=found_infs())
def test_scale_stays_a_power_of_two_with_factors_two_and_one_half(
    config: DynamicLossScale, pattern: list[bool]
) -> None:
    """With powers of two for bounds, S's mantissa never changes."""
    for state in drive(config, "".join("X" if bad else "o" for bad in pattern), CPU):
        assert 0.5 == math.frexp(float(state.scale))[0]
        assert config.min_scale <= float(state.scale) <= config.max_scale


@given(config=dynamic_scales(), pattern=found_infs())
def test_overflow_never_raises_the_scale_and_a_clean_step_never_lowers_it(
    config: DynamicLossScale, pattern: list[bool]
) -> None:
    """``update(True)`` is not above S, ``update(False)`` not below, in any reachable state."""
    state = init_state(config, CPU)
    for bad in pattern:
        after = {value: update(config, state, torch.tensor(value)) for value in (True, False)}
        assert float(after[True].scale) <= float(state.scale) <= float(after[False].scale)
        state = after[bad]


@given(config=dynamic_scales() | non_default_static_scales(), pattern=found_infs(16), found_inf=st.booleans())
def test_update_is_pure(config: LossScaleConfig, pattern: list[bool], found_inf: bool) -> None:
    """It writes no input, shares no storage with it, keeps dtypes, and repeats itself."""
    state = drive(config, "o" + "".join("X" if bad else "o" for bad in pattern), CPU)[-1]
    before, flag = copy.deepcopy(state), torch.tensor(found_inf)
    first = update(config, state, flag)
    second = update(config, state, flag)

    assert as_numbers(before) == as_numbers(state)
    assert found_inf == bool(flag)
    assert as_numbers(first) == as_numbers(second)
    pointers = {tensor.data_ptr() for tensor in state.tensors()}
    assert not pointers & {tensor.data_ptr() for tensor in first.tensors()}
    assert [torch.float32, torch.int32, torch.int32, torch.int32] == [tensor.dtype for tensor in first.tensors()]
    assert all(() == tuple(tensor.shape) for tensor in first.tensors())


@given(config=dynamic_scales(), pattern=found_infs())
def test_update_equals_the_documented_algorithm(config: DynamicLossScale, pattern: list[bool]) -> None:
    """The ten lines of the docstring, in Python doubles rounded once, give the same numbers."""
    scale, tracker, left, skips = config.init_scale, 0, config.hysteresis, 0
    state = init_state(config, CPU)
    for bad in pattern:
        state = update(config, state, torch.tensor(bad))
        if bad:
            tracker, left = 0, max(left - 1, 0)
            skips = skips + 1 if scale <= config.min_scale else 0
            if left == 0:
                scale = max(to_fp32(scale * config.backoff_factor), config.min_scale)
        else:
            left, tracker, skips = config.hysteresis, tracker + 1, 0
            if tracker >= config.growth_interval:
                tracker = 0
                if math.isfinite(grown := to_fp32(scale * config.growth_factor)):
                    scale = min(grown, config.max_scale)
        assert [scale, tracker, left, skips] == as_numbers(state)


def to_fp32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float64).float())


def test_static_scale_never_moves_and_counts_skips_in_a_row(device: torch.device) -> None:
    """At a static scale every skip is a skip at the floor."""
    states = drive(StaticLossScale(12.5), "XXoXXX", device)

    assert [12.5] * 6 == [float(state.scale) for state in states]
    assert [1, 2, 0, 1, 2, 3] == [int(state.floor_skips) for state in states]


def test_floor_skips_count_only_skips_in_a_row_that_used_the_floor(device: torch.device) -> None:
    """The skip that lowers S to the floor used a higher S, and a clean step ends the row."""
    config = DynamicLossScale(init_scale=4.0, min_scale=1.0, growth_interval=2)
    #        S used     4  2  1  1  1  1  1  2  1
    expected_counts = [0, 0, 1, 2, 0, 1, 0, 0, 0]
    states = drive(config, "XXXXoXooX", device)

    assert expected_counts == [int(state.floor_skips) for state in states]


def test_floor_that_fp32_does_not_hold_exactly_is_still_the_floor(device: torch.device) -> None:
    """0.1 is not an fp32 number; skips at it count all the same."""
    config = DynamicLossScale(init_scale=0.3, min_scale=0.1)

    assert [0, 0, 1, 2] == [int(state.floor_skips) for state in drive(config, "XXXX", device)]


def test_update_does_not_read_the_host(device: torch.device) -> None:
    """Everything stays on the device: the function runs on tensors without values."""
    meta = torch.device("meta")
    for config in (StaticLossScale(), DynamicLossScale()):
        after = update(config, init_state(config, meta), torch.empty((), dtype=torch.bool, device=meta))
        assert all(tensor.is_meta for tensor in after.tensors())


# -- its state ---------------------------------------------------------------


@given(
    config=non_default_dynamic_scales() | non_default_static_scales(),
    numbers=st.tuples(st.floats(2.0**-12, 2.0**12, width=32), *[st.integers(1, 2**31 - 1)] * 3),
)
def test_state_round_trip_keeps_every_field(config: LossScaleConfig, numbers: tuple[Any, ...]) -> None:
    """Configuration and state come back equal, with no field at its default."""
    values = dict(zip([field.name for field in dataclasses.fields(LossScaleState)], numbers, strict=True))
    fresh = state_to_dict(config, init_state(config, CPU))
    config_before, state = state_from_dict({**fresh, "state": values}, config, CPU)
    saved = state_to_dict(config_before, state)
    config_after, state_after = state_from_dict(copy.deepcopy(saved), type(config)(), CPU)

    assert all(getattr(config, f.name) != f.default for f in dataclasses.fields(config))
    assert config == config_after
    assert list(numbers) == as_numbers(state_after)
    assert state is not state_after
    assert saved == state_to_dict(config_after, state_after)


@given(config=dynamic_scales(), pattern=found_infs(), data=st.data())
def test_save_and_load_in_the_middle_changes_nothing(
    config: DynamicLossScale, pattern: list[bool], data: st.DataObject
) -> None:
    """A sequence cut at any step continues bit for bit."""
    cut = data.draw(st.integers(0, len(pattern)))
    whole, cut_state = init_state(config, CPU), init_state(config, CPU)
    for index, bad in enumerate(pattern):
        if index == cut:
            _, cut_state = state_from_dict(state_to_dict(config, cut_state), DynamicLossScale(), CPU)
        whole, cut_state = (update(config, state, torch.tensor(bad)) for state in (whole, cut_state))
        assert as_numbers(whole) == as_numbers(cut_state)


def test_saved_values_are_plain_numbers() -> None:
    """The saved state holds no tensors: any loader can read it."""
    saved = state_to_dict(DynamicLossScale(), init_state(DynamicLossScale(), CPU))

    assert {int, float} == {type(value) for part in (saved["config"], saved["state"]) for value in part.values()}


@pytest.mark.parametrize(
    ("saved", "current"), [(StaticLossScale(8.0), DynamicLossScale()), (DynamicLossScale(), StaticLossScale(8.0))]
)
def test_state_of_the_other_kind_is_refused_by_name(saved: LossScaleConfig, current: LossScaleConfig) -> None:
    """A static state does not go into a dynamic scale, nor the other way round."""
    written = state_to_dict(saved, init_state(saved, CPU))
    message = (
        rf"holds the state of a {type(saved).__name__}, this optimizer has a {type(current).__name__}\. "
        r"Nothing was loaded\. Build the optimizer with loss_scale="
    )
    with pytest.raises(CheckpointError, match=message):
        state_from_dict(written, current, CPU)


@pytest.mark.parametrize("part", ["kind", "config", "state"])
def test_state_dict_that_lacks_a_part_is_refused(part: str) -> None:
    """A missing part, or a missing field in it, is a ``CheckpointError``."""
    config = DynamicLossScale()
    saved = state_to_dict(config, init_state(config, CPU))
    with pytest.raises(CheckpointError, match=r"holds no valid loss scale .*Nothing was loaded\."):
        state_from_dict({key: value for key, value in saved.items() if key != part}, config, CPU)
    if part == "state":
        for field in saved["state"]:
            short = {key: value for key, value in saved["state"].items() if key != field}
            with pytest.raises(CheckpointError, match="holds no valid loss scale"):
                state_from_dict({**saved, "state": short}, config, CPU)


def test_state_dict_whose_configuration_breaks_a_rule_is_refused_with_the_rule() -> None:
    """Validation holds for loaded configurations too."""
    saved = state_to_dict(DynamicLossScale(), init_state(DynamicLossScale(), CPU))
    saved["config"]["backoff_factor"] = 1.5
    with pytest.raises(CheckpointError, match=r"backoff_factor=1\.5\): must lie strictly between 0 and 1"):
        state_from_dict(saved, DynamicLossScale(), CPU)


@pytest.mark.parametrize(
    "broken",
    [{"scale": NAN}, {"scale": 0.0}, {"scale": -1.0}, {"scale": INF}, {"growth_tracker": -3}, {"hysteresis_left": -1}],
)
def test_state_dict_whose_state_breaks_a_rule_is_refused(broken: dict[str, float]) -> None:
    """As documented: a value that breaks its rule is a ``CheckpointError``."""
    saved = state_to_dict(DynamicLossScale(), init_state(DynamicLossScale(), CPU))
    saved["state"].update(broken)
    with pytest.raises(CheckpointError, match="holds no valid loss scale"):
        state_from_dict(saved, DynamicLossScale(), CPU)


def test_optimizer_restores_configuration_and_tracker_and_refuses_the_other_kind(device: torch.device) -> None:
    """A load brings back S, tracker, hysteresis and skips; a refused one changes nothing."""
    config = DynamicLossScale(init_scale=64.0, growth_interval=10, hysteresis=3, max_consecutive_skips=7)
    old = weighted_optimizer(device, torch.float16, loss_scale=config)[1]
    for value in [1.0, INF, INF, INF, *[1.0] * 7]:
        force_step(old, [value])
    fresh = weighted_optimizer(device, torch.float16, loss_scale=DynamicLossScale())[1]
    fresh.load_state_dict(copy.deepcopy(old.state_dict()))
    static = weighted_optimizer(device, torch.float16, loss_scale=2.0)[1]
    before = everything(static)
    with pytest.raises(CheckpointError, match="holds the state of a DynamicLossScale, this optimizer has a Static"):
        static.load_state_dict(old.state_dict())

    assert old.state_dict()["mixedopt"] == fresh.state_dict()["mixedopt"]
    assert {"scale": 32.0, "growth_tracker": 7, "hysteresis_left": 3, "floor_skips": 0} == (
        fresh.state_dict()["mixedopt"]["loss_scale"]["state"]
    )
    assert_same(before, everything(static))
    for _ in range(2):
        force_step(fresh, [1.0])
    assert 32.0 == fresh.loss_scale
    force_step(fresh, [1.0])
    assert 64.0 == fresh.loss_scale


# -- the floor, through the optimizer -----------------------------------------


def weighted_optimizer(
    device: torch.device, dtype: torch.dtype, *, weights: int = 1, **options: Any
) -> tuple[list[nn.Parameter], MixedPrecisionOptimizer]:
    """Return half parameters of three ones and Adam over them, wrapped."""
    params = [nn.Parameter(torch.ones(3, device=device, dtype=dtype)) for _ in range(weights)]
    return params, MixedPrecisionOptimizer(torch.optim.Adam(params, lr=1e-3), **options)


def force_step(optimizer: MixedPrecisionOptimizer, grads: list[float]) -> None:
    """Step with the scaled gradients ``grads``, one constant per parameter."""
    optimizer.scale(torch.ones(()))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for param, value in zip(params, grads, strict=True):
        param.grad = torch.full_like(param, value)
    optimizer.step()


def everything(optimizer: MixedPrecisionOptimizer) -> list[Tensor]:
    """Return copies of weights, masters and all inner state."""
    weights = [param for group in optimizer.param_groups for param in group["params"]]
    masters = [master for _, master in optimizer.named_masters()]
    state = [value for entry in optimizer.inner.state.values() for value in entry.values()]
    return [torch.as_tensor(value).detach().clone() for value in [*weights, *masters, *state]]


def assert_same(before: list[Tensor], after: list[Tensor]) -> None:
    assert len(before) == len(after)
    assert all(one is not other and torch.equal(one, other) for one, other in zip(before, after, strict=True))


AT_FLOOR = {
    "fp16 static": (torch.float16, 128.0, "static at 128"),
    "bf16 default": (torch.bfloat16, None, "static at 1"),
    "dynamic at min_scale": (
        torch.float16,
        DynamicLossScale(init_scale=2.0**-14, growth_interval=1000),
        r"at min_scale=6\.1e-05",
    ),
}


@pytest.mark.parametrize("case", AT_FLOOR)
def test_tenth_skip_in_a_row_at_the_floor_raises_and_the_ninth_does_not(case: str, device: torch.device) -> None:
    """The error names scale, streak, first bad parameter and remedies; everything is bit-identical."""
    dtype, loss_scale, where = AT_FLOOR[case]
    params, optimizer = weighted_optimizer(device, dtype, weights=3, loss_scale=loss_scale)
    fresh = everything(optimizer)
    force_step(optimizer, [1.0, 1.0, 1.0])
    before, groups = everything(optimizer), copy.deepcopy([dict(g, params=0) for g in optimizer.param_groups])
    assert not torch.equal(fresh[0], before[0]) or not torch.equal(fresh[3], before[3])
    for _ in range(9):
        force_step(optimizer, [1.0, INF, NAN])
    message = (
        rf"^found_inf with loss_scale {where} \(10 skips in a row\)\. First bad parameter: 'group0\.param1'\. "
        r"Lower the learning rate, set max_grad_norm, or keep that module in fp32\."
    )
    with pytest.raises(LossScaleError, match=message):
        force_step(optimizer, [1.0, -INF, NAN])

    assert_same(before, everything(optimizer))
    assert groups == [dict(g, params=0) for g in optimizer.param_groups]
    assert (1, 10) == (optimizer.applied_steps, optimizer.skipped_steps)
    assert optimizer.last_step.skipped
    assert all(param.grad is None for param in params)
    force_step(optimizer, [1.0, 1.0, 1.0])
    assert optimizer.last_step.applied


def test_clean_step_ends_the_row_of_skips(device: torch.device) -> None:
    """Nine skips, a clean step and nine skips raise nothing; the next one does."""
    optimizer = weighted_optimizer(device, torch.float16, loss_scale=2.0)[1]
    for value in [*[INF] * 9, 1.0, *[INF] * 9]:
        force_step(optimizer, [value])

    assert (1, 18) == (optimizer.applied_steps, optimizer.skipped_steps)
    with pytest.raises(LossScaleError):
        force_step(optimizer, [INF])


@pytest.mark.parametrize("patience", [1, 2, 12])
def test_max_consecutive_skips_is_the_length_of_the_row(patience: int, device: torch.device) -> None:
    """Skips above the floor do not count: from S=4 with floor 1 two come before the row."""
    config = DynamicLossScale(init_scale=4.0, min_scale=1.0, max_consecutive_skips=patience)
    optimizer = weighted_optimizer(device, torch.float16, loss_scale=config)[1]
    for _ in range(2 + patience - 1):
        force_step(optimizer, [NAN])
    with pytest.raises(LossScaleError, match=rf"at min_scale=1 \({patience} skips in a row\)"):
        force_step(optimizer, [NAN])


def test_step_without_gradients_neither_ends_nor_lengthens_the_row(device: torch.device) -> None:
    """It moves nothing: nine skips, an empty step and one skip are ten in a row."""
    (param,), optimizer = weighted_optimizer(device, torch.float16, loss_scale=2.0)
    for _ in range(9):
        force_step(optimizer, [INF])
    optimizer.step()
    with pytest.raises(LossScaleError, match=r"\(10 skips in a row\)"):
        force_step(optimizer, [INF])
    assert param.grad is None


def test_loss_that_is_nan_for_400_steps_never_brings_the_scale_under_its_floor(
    device: torch.device, dtype: torch.dtype
) -> None:
    """S rests at min_scale, the errors come, and the weights are those of the start."""
    config = DynamicLossScale(min_scale=2.0**-5)
    (weight,), optimizer = weighted_optimizer(device, dtype, loss_scale=config)
    before, seen, errors = everything(optimizer), [], 0
    for _ in range(400):
        optimizer.backward(weight.sum() * NAN)
        try:
            optimizer.step()
        except LossScaleError:
            errors += 1
        seen.append(optimizer.loss_scale)

    assert 2.0**-5 == min(seen) == seen[-1]
    # 21 halvings from 2^16 to 2^-5, then nine skips at the floor without an error.
    assert 400 - 21 - 9 == errors
    assert_same(before, everything(optimizer))
    optimizer.backward(weight.sum())
    optimizer.step()
    assert optimizer.last_step.applied


def test_loss_that_needs_a_scale_below_one_recovers(device: torch.device) -> None:
    """A true gradient of 3 * 2^17 fits fp16 only from S=2^-3 down: there it is applied."""
    params = [nn.Parameter(torch.ones(3, device=device, dtype=torch.float16))]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=2.0**-20))
    for _ in range(19):
        optimizer.backward((params[0].float() * 3 * 2.0**17).sum())
        optimizer.step()
        assert optimizer.last_step.skipped
    optimizer.backward((params[0].float() * 3 * 2.0**17).sum())
    optimizer.step()

    assert optimizer.last_step.applied
    assert 2.0**-3 == optimizer.loss_scale
    assert [0.625] * 3 == next(m for _, m in optimizer.named_masters()).tolist()


@given(pattern=found_infs(20))
def test_optimizer_uses_the_scale_of_update(pattern: list[bool]) -> None:
    """S after each step() is that of the pure function, and the report holds the S used."""
    assume(pattern)
    config = DynamicLossScale(init_scale=16.0, growth_interval=2, hysteresis=2, min_scale=1.0)
    optimizer = weighted_optimizer(CPU, torch.float16, loss_scale=config)[1]
    state = init_state(config, CPU)
    for bad in pattern:
        used = float(state.scale)
        state = update(config, state, torch.tensor(bad))
        if int(state.floor_skips) >= config.max_consecutive_skips:
            break
        force_step(optimizer, [INF if bad else 1.0])
        assert (used, bad) == (optimizer.last_step.loss_scale, optimizer.last_step.skipped)
        assert float(state.scale) == optimizer.loss_scale
