"""The loss scale against ``torch.amp.GradScaler``: same numbers, same decisions.

Floor and ceiling are open here, since GradScaler has neither.
"""

from __future__ import annotations

import copy
import math
import random
from typing import Any

import pytest
import torch
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from torch import Tensor, nn

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer
from mixedopt.loss_scale import init_state, state_from_dict, state_to_dict, update

OPEN = {"min_scale": 2.0**-149, "max_scale": math.inf, "max_consecutive_skips": 10**9}
INTERVALS = range(1, 8)
# Growth and backoff: powers of two, and pairs that fp32 does not hold exactly.
FACTORS = [(2.0, 0.5), (1.1, 0.9), (1.7, 0.3), (1.001, 0.999), (3.0, 1 / 3)]
TRANSITIONS = 10_000
# Short enough that 0.3 backing off all the time does not reach 2^-149, where the floor is.
RUN = 40


def config_of(rng: random.Random, interval: int, factors: tuple[float, float], exponents: tuple[int, int]) -> Any:
    """Return an open configuration with a random start, off the powers of two."""
    start = float(torch.tensor(rng.uniform(1, 2) * 2.0 ** rng.randint(*exponents)))
    return DynamicLossScale(start, *factors, growth_interval=interval, **OPEN)


def grad_scaler_of(config: DynamicLossScale, device: torch.device) -> Any:
    """Return a GradScaler with the same numbers, its state made."""
    scaler = torch.amp.GradScaler(
        device.type,
        init_scale=config.init_scale,
        growth_factor=config.growth_factor,
        backoff_factor=config.backoff_factor,
        growth_interval=config.growth_interval,
    )
    scaler.scale(torch.ones((), device=device))
    return scaler


def share_of(flags: list[bool]) -> float:
    return sum(flags) / len(flags)


def test_update_equals_torch_kernel_over_ten_thousand_random_transitions(device: torch.device) -> None:
    """S and tracker equal, bit for bit, those of the kernel under ``GradScaler.update``, saved and loaded midway."""
    rng, flags, moved = random.Random(0), [], set()
    while len(flags) < TRANSITIONS:
        interval = rng.choice(INTERVALS)
        config = config_of(rng, interval, rng.choice(FACTORS), (-20, 40))
        state = init_state(config, device)
        scale = torch.full((), config.init_scale, device=device)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        overflow_share, cut = rng.uniform(0.3, 0.6), rng.randrange(RUN)
        ours, theirs = [], []
        for step in range(RUN):
            if step == cut:
                saved = copy.deepcopy(state_to_dict(config, state))
                config, state = state_from_dict(saved, DynamicLossScale(), device)
            flags.append(rng.random() < overflow_share)
            found_inf = torch.tensor(flags[-1], device=device)
            state = update(config, state, found_inf)
            torch._amp_update_scale_(
                scale, tracker, found_inf.float(), config.growth_factor, config.backoff_factor, config.growth_interval
            )
            ours.append(torch.stack([state.scale, state.growth_tracker.float()]))
            theirs.append(torch.stack([scale, tracker.float()]))
        assert theirs[-1] is not ours[-1]
        assert torch.equal(torch.stack(theirs), torch.stack(ours))
        moved.add(float(state.scale) > config.init_scale)

    assert len(flags) >= TRANSITIONS
    assert share_of(flags) >= 0.3
    assert {True, False} == moved  # some runs ended above their start, some below


@pytest.mark.parametrize("exponents", [(120, 127), (-126, -90)])
def test_update_equals_torch_kernel_at_both_ends_of_fp32(exponents: tuple[int, int], device: torch.device) -> None:
    """Growth to inf is declined and subnormal scales round the same, until GradScaler reaches 0."""
    rng, transitions, ends = random.Random(1), 0, set()
    for run in range(40):
        config = config_of(rng, rng.choice(INTERVALS), FACTORS[run % len(FACTORS)], exponents)
        state = init_state(config, device)
        scale = torch.full((), config.init_scale, device=device)
        tracker = torch.zeros((), dtype=torch.int32, device=device)
        for _ in range(RUN):
            found_inf = torch.tensor(rng.random() < (0.3 if exponents[0] > 0 else 0.7), device=device)
            state = update(config, state, found_inf)
            torch._amp_update_scale_(
                scale, tracker, found_inf.float(), config.growth_factor, config.backoff_factor, config.growth_interval
            )
            if float(scale) == 0.0:
                assert 2.0**-149 == float(state.scale)
                break
            transitions += 1
            ends.add((float(scale) * config.growth_factor > 3.4e38, float(scale) < 2.0**-126))
            assert (float(scale), int(tracker)) == (float(state.scale), int(state.growth_tracker))

    assert transitions >= 500
    assert (exponents[0] > 0, exponents[0] < 0) in ends


class Twins:
    """Half parameters under our optimizer, and fp32 ones under GradScaler, fed the same half gradients."""

    def __init__(self, config: DynamicLossScale, device: torch.device, dtype: torch.dtype, lr: float = 0.25) -> None:
        self.device, self.dtype, self.lr = device, dtype, lr
        self.build(config, torch.linspace(-2, 2, 5).to(device, dtype))

    def build(self, config: DynamicLossScale, start: Tensor) -> None:
        self.config = config
        self.half = [nn.Parameter(start.clone()), nn.Parameter(start[:2].clone())]
        self.full = [nn.Parameter(param.detach().float()) for param in self.half]
        self.ours = MixedPrecisionOptimizer(self.inner(self.half), loss_scale=config)
        self.theirs = self.inner(self.full)
        self.scaler = grad_scaler_of(config, self.device)
        self.applied = 0

    def inner(self, params: list[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(params, lr=self.lr, momentum=0.5)

    def step(self, grads: list[Tensor]) -> None:
        """Scale the same true gradients by each side's own S, round them to half, and step both."""
        self.ours.scale(torch.ones((), device=self.device))
        for half, full, grad in zip(self.half, self.full, grads, strict=True):
            half.grad = (grad * self.ours.loss_scale).to(self.dtype)
            full.grad = (grad * self.scaler.get_scale()).to(self.dtype).float()
        finite = all(bool(param.grad.isfinite().all()) for param in self.full)
        self.ours.step()
        self.scaler.step(self.theirs)
        self.scaler.update()
        self.applied += finite

    def save_and_load(self) -> None:
        """Bring both sides into new objects through their state dicts."""
        saved = copy.deepcopy((self.ours.state_dict(), self.theirs.state_dict(), self.scaler.state_dict()))
        full, applied = [param.detach().clone() for param in self.full], self.applied
        self.build(self.config, torch.zeros(5, device=self.device, dtype=self.dtype))
        self.ours.load_state_dict(saved[0])
        self.theirs.load_state_dict(saved[1])
        self.scaler.load_state_dict(saved[2])
        with torch.no_grad():
            for param, value in zip(self.full, full, strict=True):
                param.copy_(value)
        self.applied = applied

    def check(self) -> None:
        """S, tracker, skips and weights are equal, bit for bit."""
        state = self.ours.state_dict()["mixedopt"]["loss_scale"]["state"]
        theirs = self.scaler.state_dict()
        assert theirs["scale"] == state["scale"] == self.ours.loss_scale
        assert theirs["_growth_tracker"] == state["growth_tracker"]
        assert self.applied == self.ours.applied_steps
        for full, half, (_, master) in zip(self.full, self.half, self.ours.named_masters(), strict=True):
            assert full is not master
            assert torch.equal(full, master)
            assert torch.equal(full.to(self.dtype), half)


def test_whole_optimizers_equal_grad_scaler_over_random_sequences(device: torch.device, dtype: torch.dtype) -> None:
    """Injected overflows, factors off the powers of two, saves: S, tracker, skips, masters equal after each step."""
    rng, flags, moved = random.Random(2), [], 0
    generator = torch.Generator().manual_seed(0)
    for run in range(20):
        twins = Twins(config_of(rng, INTERVALS[run % 7], FACTORS[run % len(FACTORS)], (-3, 6)), device, dtype)
        start, cut, overflow_share = twins.full[0].detach().clone(), rng.randrange(30), rng.uniform(0.35, 0.6)
        for step in range(30):
            grads = [torch.randn(param.shape, generator=generator).to(device) for param in twins.half]
            injected = rng.random() < overflow_share
            if injected:
                grads[step % 2][-1] = rng.choice([math.inf, -math.inf, math.nan])
            twins.step(grads)
            twins.check()
            flags.append(twins.ours.last_step.skipped)
            assert flags[-1] or not injected
            if step == cut:
                twins.save_and_load()
                twins.check()
        moved += not torch.equal(start, twins.full[0])

    assert 20 * 30 == len(flags)
    assert share_of(flags) >= 0.3
    assert 20 == moved


def test_whole_optimizers_equal_grad_scaler_when_the_half_format_overflows_by_itself(device: torch.device) -> None:
    """fp16 gradients near the top of the range: both sides find the same S in the same steps."""
    config = DynamicLossScale(2.0**16, growth_interval=3, **OPEN)
    twins, seen = Twins(config, device, torch.float16, lr=1e-3), []
    for step in range(60):
        twins.step([torch.full(param.shape, 100.0 if step % 20 < 10 else 0.01, device=device) for param in twins.half])
        twins.check()
        seen.append(twins.ours.last_step.skipped)

    assert {True, False} == set(seen)


class ScaleMachine(RuleBasedStateMachine):
    """Our update, GradScaler, and a model of ten lines, step by step."""

    device = torch.device("cpu")

    @initialize(
        init_scale=st.floats(2.0**-10, 2.0**20, width=32),
        growth=st.sampled_from([2.0, 1.1, 1.7]) | st.floats(1.01, 4.0),
        backoff=st.sampled_from([0.5, 0.9, 0.3]) | st.floats(0.25, 0.99),
        interval=st.integers(1, 7),
    )
    def build(self, init_scale: float, growth: float, backoff: float, interval: int) -> None:
        """Make all three with the same numbers."""
        self.config = DynamicLossScale(init_scale, growth, backoff, growth_interval=interval, **OPEN)
        self.state = init_state(self.config, self.device)
        self.scaler = grad_scaler_of(self.config, self.device)
        self.param = nn.Parameter(torch.ones(1, device=self.device))
        self.inner = torch.optim.SGD([self.param], lr=0.0)
        self.scale, self.tracker = init_scale, 0

    @rule(found_inf=st.booleans())
    def step(self, found_inf: bool) -> None:
        """One iteration, clean or with an overflow."""
        self.param.grad = torch.full_like(self.param, math.inf if found_inf else 1.0)
        self.scaler.step(self.inner)
        self.scaler.update()
        self.state = update(self.config, self.state, torch.tensor(found_inf, device=self.device))
        self.tracker = 0 if found_inf else self.tracker + 1
        factor = self.config.backoff_factor if found_inf else 1.0
        if self.tracker == self.config.growth_interval:
            factor, self.tracker = self.config.growth_factor, 0
        self.scale = float(torch.tensor(self.scale * factor, dtype=torch.float64).float())

    @rule()
    def save_and_load(self) -> None:
        """Both states go through their dicts into new objects."""
        saved = copy.deepcopy((state_to_dict(self.config, self.state), self.scaler.state_dict()))
        self.config, self.state = state_from_dict(saved[0], DynamicLossScale(), self.device)
        self.scaler = grad_scaler_of(DynamicLossScale(), self.device)
        self.scaler.load_state_dict(saved[1])
        self.scaler.scale(torch.ones((), device=self.device))

    @invariant()
    def all_three_agree(self) -> None:
        """Exactly."""
        if hasattr(self, "config"):
            theirs = self.scaler.state_dict()
            expected = (self.scale, self.tracker)
            assert expected == (theirs["scale"], theirs["_growth_tracker"])
            assert expected == (float(self.state.scale), int(self.state.growth_tracker))


def test_scale_follows_grad_scaler_in_any_interleaving_of_steps_and_saves(device: torch.device) -> None:
    """Hypothesis drives update, GradScaler and a small model side by side."""

    class OnDevice(ScaleMachine):
        pass

    OnDevice.device = device
    run_state_machine_as_test(OnDevice)


def test_gradients_that_overflow_fp32_when_unscaled_are_skipped_where_grad_scaler_breaks_the_weights(
    device: torch.device,
) -> None:
    """S=1e-3 and g=1e38: g/S is inf; GradScaler makes the weights -inf, ours skips and backs off."""
    config = DynamicLossScale(1e-3, growth_interval=5, **OPEN)
    twins = Twins(config, device, torch.bfloat16)
    before = [param.detach().clone() for param in twins.half]
    twins.ours.scale(torch.ones((), device=device))
    for half, full in zip(twins.half, twins.full, strict=True):
        half.grad, full.grad = torch.full_like(half, 1e38), torch.full_like(full, 1e38)
    twins.ours.step()
    twins.scaler.step(twins.theirs)

    assert all(bool((param == -math.inf).all()) for param in twins.full)
    assert twins.ours.last_step.skipped
    assert all(old is not new and torch.equal(old, new) for old, new in zip(before, twins.half, strict=True))
    assert float(torch.tensor(1e-3)) * 0.5 == twins.ours.loss_scale


def test_large_gradients_that_stay_finite_when_unscaled_are_applied_like_grad_scaler(device: torch.device) -> None:
    """S=1e-3, true gradients up to 3e38: near the limit both still step, to the same weights."""
    twins = Twins(DynamicLossScale(1e-3, growth_interval=5, **OPEN), device, torch.bfloat16, lr=1e-38)
    start = twins.full[0].detach().clone()
    twins.step([torch.full(param.shape, 3e37, device=device) for param in twins.half])
    twins.check()
    before = float(torch.linalg.vector_norm(twins.full[0].detach() - start))
    twins.step([torch.full(param.shape, 3e38, device=device) for param in twins.half])
    twins.check()

    assert before > 0
    assert 2 == twins.applied


def test_scaled_loss_equals_grad_scalers(device: torch.device) -> None:
    """``scale`` gives the numbers of ``GradScaler.scale``, for fp32 losses."""
    config = DynamicLossScale(1234.5, **OPEN)
    twins = Twins(config, device, torch.float16)
    losses = [torch.tensor(value, device=device) for value in (0.1, 1e30, -3.0)]

    for expected, actual in zip(twins.scaler.scale(losses), twins.ours.scale(losses), strict=True):
        assert expected is not actual
        assert torch.equal(expected, actual)
