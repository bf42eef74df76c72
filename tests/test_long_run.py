"""Long lives: 2,000 steps through all that can happen to an optimizer, equal to the paper's walk after each."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from models import through_file
from optimizers import BY_NAME, Inner
from reference import Reference
from torch import Tensor, nn
from twins import Bag, all_same_bits, differences, keeping, masters_of, same_bits

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, StepOrderError

# It grows into the overflows that fp16 has by itself.
SCALE = DynamicLossScale(
    init_scale=2.0**8, growth_interval=7, hysteresis=2, min_scale=1.0, max_scale=2.0**16, max_consecutive_skips=10**6
)
INNERS = [BY_NAME["sgd_decay"], BY_NAME["adamw_foreach"]]  # SGD has momentum
MODES = ("autograd", "half", "fp32")
NOTICED_BY = ("refresh", "step", "publish", "export")
BAD = (math.inf, -math.inf, math.nan)
SHAPES = [(4, 3), (5,), (), (3,), (2, 3)]  # in two groups
KEPT, FROZEN = 3, 4  # which stays fp32; which is frozen when the run begins
MOST = 9  # parameters, with those of groups added later
ADDED: Mapping[str, Any] = {"lr": 0.03}
STEPS = 2000


class TwoSums(Reference):
    """The reference that can add micro-steps up in fp32 too, and whose weights can be edited."""

    wide = False

    @property
    def waiting(self) -> set[int]:
        return {i for i, grad in enumerate(self.grads) if grad is not None}

    def accumulate(self, scaled: Sequence[Tensor | None]) -> None:
        super().accumulate([grad.float() if self.wide and grad is not None else grad for grad in scaled])

    def zero_grad(self, set_to_none: bool) -> None:
        self.grads = [None if set_to_none or grad is None else torch.zeros_like(grad) for grad in self.grads]

    def set_weight(self, index: int, element: int, value: float) -> None:
        """Write one element; its master follows, unless it rounds to that value already."""
        weight, master = self.weights[index].view(-1), self.masters[index].detach().view(-1)
        weight[element] = value
        if master[element].to(weight.dtype) != weight[element]:
            master[element] = weight[element]

    def set_master(self, index: int, element: int, value: float) -> None:
        self.masters[index].detach().view(-1)[element] = value
        self.weights[index].copy_(self.masters[index].detach())


class Twins:
    """The wrapper and the reference, living one life; ``happened`` counts what they went through."""

    def __init__(self, inner: Inner, dtype: torch.dtype, gradients: str, with_model: bool, seed: int) -> None:
        self.inner, self.dtype, self.gradients, self.with_model = inner, dtype, gradients, with_model
        torch.manual_seed(seed)
        values = [torch.randn(shape) for shape in SHAPES]
        self.kept, self.added = {KEPT}, []
        self.params = [nn.Parameter(value.to(self.start_dtype(i))) for i, value in enumerate(values)]
        self.params[FROZEN].requires_grad_(False)
        values = [param.detach().clone() for param in self.params]
        values[FROZEN] = values[FROZEN].to(dtype)  # without a master it starts from the half weight when it thaws
        typed = [(value, self.dtype_of(i)) for i, value in enumerate(values)]
        self.reference = TwoSums(inner, [typed[:3], typed[3:]], SCALE)
        self.reference.wide = gradients == "fp32"
        self.optimizer = self.wrapped(late=False)
        self.mastered = self.with_masters()
        self.unscaled = False
        self.frozen_bits: dict[int, tuple[Tensor, Tensor]] = {}
        self.happened: Counter[str] = Counter()

    def start_dtype(self, i: int) -> torch.dtype:
        return torch.float32 if self.with_model else self.dtype_of(i)

    def dtype_of(self, i: int) -> torch.dtype:
        return torch.float32 if i in self.kept else self.dtype

    def wrapped(self, *, late: bool) -> MixedPrecisionOptimizer:
        """Wrap ``self.params``; the groups that were added are there before, or are added ``late`` again."""
        start = len(SHAPES)
        self.model = Bag(self.params[:start] if late else self.params)
        options: dict[str, Any] = {"loss_scale": SCALE, "gradients": self.gradients}
        if self.with_model:
            kept = {i for i in self.kept if i < start or not late}
            options |= {"model": self.model, "dtype": self.dtype, "policy": keeping(kept)}
        inner = self.inner([self.params[:3], self.params[3:start]])
        if not late:
            for i in self.added:
                inner.add_param_group({"params": [self.params[i]], **ADDED})
            return MixedPrecisionOptimizer(inner, **options)
        optimizer = MixedPrecisionOptimizer(inner, **options)
        for i in self.added:
            self.model.all[f"p{i}"] = self.params[i]
            optimizer.add_param_group({"params": [self.params[i]], **ADDED})
        return optimizer

    def with_masters(self) -> set[int]:
        ids = {id(master) for _, master in self.optimizer.named_masters()}
        return {i for i, master in enumerate(masters_of(self.optimizer)) if id(master) in ids}

    @property
    def frozen(self) -> set[int]:
        return {i for i, param in enumerate(self.params) if not param.requires_grad}

    # -- a window -------------------------------------------------------------------

    def micro_step(self, seed: int, absent: Collection[int] = (), bad: float | None = None) -> None:
        """Run one backward on both sides: the gradient of sum(w * (c + w')), w' held constant, is half(S * (c + w))."""
        used = sorted(set(range(len(self.params))) - self.frozen - set(absent))
        noise = torch.randn(sum(self.params[i].numel() for i in used), generator=torch.Generator().manual_seed(seed))
        if bad is not None and used:
            noise[seed % len(noise)] = bad
        losses, grads, at = [], {}, 0
        for dtype in (self.dtype, torch.float32):
            mine = [i for i in used if self.dtype_of(i) == dtype]
            if mine:
                wide = torch.cat([self.params[i].view(-1) for i in mine]).float()
                weights = torch.cat([self.reference.weights[i].view(-1) for i in mine]).float()
                constant = noise[at : at + len(wide)]
                losses.append((wide * (constant + wide.detach())).sum())
                scaled = ((constant + weights) * self.reference.scale).to(dtype)
                grads |= dict(zip(mine, scaled.split([self.params[i].numel() for i in mine]), strict=True))
                at += len(wide)
        if used:
            self.optimizer.backward(sum(losses))
        self.happened["accumulated"] += bool(self.reference.waiting & set(used))
        self.happened["unused layers"] += 0 < len(used) < len(self.params) - len(self.frozen)
        self.reference.accumulate(
            [grads[i].view(param.shape) if i in grads else None for i, param in enumerate(self.params)]
        )

    def unscale(self) -> None:
        self.optimizer.unscale_()
        self.unscaled = bool(self.reference.waiting)
        self.happened["unscaled by hand"] += self.unscaled

    def step(self) -> None:
        reference, trained = self.reference, self.reference.waiting
        applied, skipped, scale = reference.applied, reference.skipped, reference.scale
        self.optimizer.step()
        reference.step()
        self.unscaled = False
        report = self.optimizer.last_step
        assert report.applied == (reference.applied > applied)
        assert report.skipped == (reference.skipped > skipped)
        assert report.loss_scale == (scale if trained else None)
        assert trained <= self.with_masters()
        self.happened["applied"] += report.applied
        self.happened[f"applied, {self.gradients}"] += report.applied
        self.happened["skipped"] += report.skipped
        self.happened["nothing to apply"] += not trained
        self.happened["growth"] += reference.scale > scale
        self.happened["backoff"] += reference.scale < scale
        self.happened["tolerated skip"] += report.skipped and reference.scale == scale

    def zero_grad(self, set_to_none: bool) -> None:
        # Gradients that were unscaled are dropped either way.
        writes_zeros = not set_to_none and not self.unscaled
        self.happened["zeroed gradients" if writes_zeros else "dropped gradients"] += bool(self.reference.waiting)
        self.optimizer.zero_grad(set_to_none=set_to_none)
        self.reference.zero_grad(set_to_none=not writes_zeros)
        self.unscaled = False

    # -- between windows, or inside ---------------------------------------------------

    def set_hyper(self, group: int, key: str, value: float) -> None:
        index = group % len(self.optimizer.param_groups)
        self.optimizer.param_groups[index][key] = value
        self.reference.inner.param_groups[index][key] = value
        self.happened[key] += 1

    def freeze_or_thaw(self, which: int) -> None:
        """Flip one parameter; a gradient that it has already stays."""
        index = which % len(self.params)
        param = self.params[index]
        self.happened["freeze" if param.requires_grad else "thaw"] += 1
        param.requires_grad_(not param.requires_grad)
        self.frozen_bits.pop(index, None)

    def add_group(self, half: bool, frozen: bool, seed: int) -> None:
        index = len(self.params)
        torch.manual_seed(seed)
        fresh = nn.Parameter(torch.randn(3, 2).to(self.dtype if half else torch.float32), requires_grad=not frozen)
        if not half:
            self.kept.add(index)
        self.params.append(fresh)
        self.added.append(index)
        self.model.all[f"p{index}"] = fresh
        self.optimizer.add_param_group({"params": [fresh], **ADDED})
        self.reference.add_group([fresh], **ADDED)
        self.mastered |= set() if frozen else {index}
        self.happened["half group" if half else "fp32 group"] += 1

    def edit_weight(self, which: int, element: int, value: float, noticed_by: str) -> None:
        """Write one element of the model; its master follows, its neighbours keep their low bits."""
        index = which % len(self.params)
        param = self.params[index]
        element %= param.numel()
        if noticed_by == "refresh":
            param.data.view(-1)[element] = value
            self.optimizer.refresh_masters()
        else:
            with torch.no_grad():
                param.view(-1)[element] = value
        self.reference.set_weight(index, element, value)
        self.frozen_bits.pop(index, None)
        if noticed_by == "step":  # with a gradient of this weight, or without
            if not self.unscaled:
                self.micro_step(which, absent=[index] if element % 2 else [])
            self.step()
        elif noticed_by == "publish":
            self.optimizer.publish()
        elif noticed_by == "export":
            self.optimizer.master_state_dict()
        self.happened["edited weight"] += 1

    def edit_master(self, which: int, element: int, value: float) -> None:
        index = sorted(self.mastered)[which % len(self.mastered)]
        master = masters_of(self.optimizer)[index]
        element %= master.numel()
        with torch.no_grad():
            master.view(-1)[element] = value
        self.optimizer.publish()
        self.reference.set_master(index, element, value)
        self.frozen_bits.pop(index, None)
        self.happened["edited master"] += 1

    def save_load(self, gradients: str, late: bool) -> None:
        """Go on with new objects: fresh weights, a fresh wrapper, everything from a file in memory."""
        saved = through_file(self.optimizer.state_dict())
        old, frozen, self.params = self.params, self.frozen, []
        for i, param in enumerate(old):
            dtype = param.dtype if late and i in self.added else self.start_dtype(i)
            fresh = nn.Parameter(torch.zeros_like(param, dtype=dtype), requires_grad=i in self.mastered - frozen)
            if i not in self.mastered:  # so its weight comes from the model's checkpoint
                fresh.data.copy_(param.detach())
            self.params.append(fresh)
        self.gradients, self.reference.wide = gradients, gradients == "fp32"
        self.optimizer = self.wrapped(late=late)
        for i, param in enumerate(self.params):
            param.requires_grad_(i not in frozen)
        # An fp32 weight added since needs another policy, which a strict load refuses.
        strict = saved["mixedopt"]["policy"] == self.optimizer.state_dict()["mixedopt"]["policy"]
        missing, unexpected = self.optimizer.load_state_dict(saved, strict=strict)
        assert (missing, unexpected) == ([], [])
        for state_dict in (saved, self.optimizer.state_dict()):
            counters = state_dict["mixedopt"]["loss_scale"]["state"]
            assert counters["growth_tracker"] == self.reference.tracker
            assert counters["hysteresis_left"] == self.reference.hysteresis_left
        self.happened["reload"] += 1

    # -- the laws ----------------------------------------------------------------------

    def check(self) -> None:
        """Fail unless both sides hold the same bits, and what is frozen those that it had."""
        mastered = self.with_masters()
        assert mastered >= self.mastered
        self.happened["late master"] += len(mastered - self.mastered)
        self.mastered = mastered
        ours, theirs = self.held()
        if not equal(ours, theirs):
            assert differences(ours, theirs) == []
        for i in self.frozen - self.reference.waiting:
            now = self.params[i].detach(), masters_of(self.optimizer)[i].detach()
            before = self.frozen_bits.setdefault(i, (now[0].clone(), now[1].clone()))
            assert all(map(same_bits, now, before))

    def held(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return all that each side holds, under the same names."""
        optimizer, reference = self.optimizer, self.reference
        masters = masters_of(optimizer)
        ours = side(optimizer.inner, self.params, masters)
        theirs = side(reference.inner, reference.weights, reference.masters)
        ours |= {f"shown {i}": masters[i].detach().to(param.dtype) for i, param in enumerate(self.params)}
        theirs |= {f"shown {i}": weight for i, weight in enumerate(reference.weights)}
        for i in set(range(len(masters))) - self.mastered:  # the inner optimizer holds the weight itself
            theirs[f"master {i}"] = reference.weights[i]
        ours |= {"S": optimizer.loss_scale, "applied": optimizer.applied_steps, "skipped": optimizer.skipped_steps}
        theirs |= {"S": reference.scale, "applied": reference.applied, "skipped": reference.skipped}
        return ours, theirs


def side(inner: torch.optim.Optimizer, weights: Sequence[Tensor], masters: Sequence[Tensor]) -> dict[str, Any]:
    held: dict[str, Any] = {}
    for i, (weight, master) in enumerate(zip(weights, masters, strict=True)):
        held |= {f"weight {i}": weight.detach(), f"master {i}": master.detach()}
        held |= {f"state {i} {key}": value for key, value in inner.state.get(master, {}).items()}
    return held


def equal(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """True iff ``differences`` finds none; it looks at all tensors at once, as it is asked at every step."""
    if ours.keys() != theirs.keys():
        return False
    tensors = [key for key, value in theirs.items() if isinstance(value, Tensor)]
    if any(ours[key] != value for key, value in theirs.items() if not isinstance(value, Tensor)):
        return False
    if any((ours[key].dtype, ours[key].shape) != (theirs[key].dtype, theirs[key].shape) for key in tensors):
        return False
    for dtype in {theirs[key].dtype for key in tensors}:
        keys = [key for key in tensors if theirs[key].dtype == dtype]
        flat = [torch.cat([held[key].view(-1) for key in keys]).view(torch.uint8) for held in (ours, theirs)]
        if not torch.equal(*flat):
            return False
    return True


# -- any run -------------------------------------------------------------------------------

seeds = st.integers(0, 2**20)
whiches = st.integers(0, MOST - 1)
elements = st.integers(0, 11)
absents = st.frozensets(whiches)
values = st.floats(2.0**-7, 2.0, width=32).flatmap(lambda size: st.sampled_from([size, -size]))


class Life(RuleBasedStateMachine):
    """``Twins``, through events that hypothesis chooses; equal after each."""

    def __init__(self, inner: Inner, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner, self.dtype = inner, dtype

    @initialize(gradients=st.sampled_from(MODES), with_model=st.booleans(), seed=seeds)
    def start(self, gradients: str, with_model: bool, seed: int) -> None:
        self.twins = Twins(self.inner, self.dtype, gradients, with_model, seed)

    @precondition(lambda self: not self.twins.unscaled)
    @rule(seed=seeds, count=st.integers(1, 3))
    def good_steps(self, seed: int, count: int) -> None:
        for n in range(count):
            self.twins.micro_step(seed + n)
            self.twins.step()

    @precondition(lambda self: not self.twins.unscaled)
    @rule(seed=seeds, bad=st.sampled_from(BAD))
    def overflow_step(self, seed: int, bad: float) -> None:
        self.twins.micro_step(seed, bad=bad)
        self.twins.step()

    @precondition(lambda self: not self.twins.unscaled)
    @rule(seed=seeds, absent=absents, bad=st.sampled_from([None, None, None, *BAD]))
    def accumulate(self, seed: int, absent: frozenset[int], bad: float | None) -> None:
        self.twins.micro_step(seed, absent, bad)

    @precondition(lambda self: not self.twins.unscaled)
    @rule(seed=seeds, count=st.integers(2, 4))
    def accumulated_step(self, seed: int, count: int) -> None:
        for n in range(count):
            self.twins.micro_step(seed + n)
        self.twins.step()

    @precondition(lambda self: not self.twins.unscaled)
    @rule(seed=seeds, absent=absents)
    def unused_layers(self, seed: int, absent: frozenset[int]) -> None:
        self.twins.micro_step(seed, absent)
        self.twins.step()

    @rule()
    def step(self) -> None:
        self.twins.step()

    @precondition(lambda self: not self.twins.unscaled)
    @rule()
    def unscale(self) -> None:
        self.twins.unscale()

    @rule(seed=seeds, set_to_none=st.booleans())
    def zero_grad_in_mid_window(self, seed: int, set_to_none: bool) -> None:
        if not self.twins.unscaled:
            self.twins.micro_step(seed)
        self.twins.zero_grad(set_to_none)

    @rule(group=whiches, key=st.sampled_from(["lr", "weight_decay"]), value=st.sampled_from([0.0, 2.0**-10, 0.05]))
    def set_hyper(self, group: int, key: str, value: float) -> None:
        self.twins.set_hyper(group, key, value)

    @rule(which=whiches)
    def freeze_or_thaw(self, which: int) -> None:
        self.twins.freeze_or_thaw(which)

    @precondition(lambda self: len(self.twins.params) < MOST)
    @rule(half=st.booleans(), frozen=st.booleans(), seed=seeds)
    def add_group(self, half: bool, frozen: bool, seed: int) -> None:
        self.twins.add_group(half, frozen, seed)

    @rule(which=whiches, element=elements, value=values, noticed_by=st.sampled_from(NOTICED_BY))
    def edit_weight(self, which: int, element: int, value: float, noticed_by: str) -> None:
        self.twins.edit_weight(which, element, value, noticed_by)

    @rule(which=whiches, element=elements, value=values)
    def edit_master(self, which: int, element: int, value: float) -> None:
        self.twins.edit_master(which, element, value)

    @rule(gradients=st.sampled_from(MODES), late=st.booleans())
    def save_load(self, gradients: str, late: bool) -> None:
        if self.twins.reference.waiting:
            with pytest.raises(StepOrderError, match="inside a window"):
                self.twins.optimizer.state_dict()
        else:
            self.twins.save_load(gradients, late)

    @invariant()
    def both_hold_the_same(self) -> None:
        self.twins.check()


@pytest.mark.parametrize("inner", INNERS, ids=lambda inner: inner.name)
def test_any_life_equals_the_walk_of_the_paper(inner: Inner, dtype: torch.dtype) -> None:
    """Whatever happens between steps and inside windows, wherever gradients wait, all bits are the reference's."""
    run_state_machine_as_test(
        lambda: Life(inner, dtype),
        settings=settings(max_examples=max(settings.default.max_examples // 3, 10), stateful_step_count=30),
    )


# -- one long run ----------------------------------------------------------------------------


class Fate:
    """What happens next to a pair of twins, by a seeded die."""

    def __init__(self, twins: Twins, seed: int) -> None:
        self.twins, self.dice = twins, random.Random(seed)
        self.events: dict[Callable[[], None], int] = {
            self.set_hyper: 4,
            self.freeze_or_thaw: 6,
            self.add_group: 1,
            self.edit_weight: 4,
            self.edit_master: 2,
            self.save_load: 3,
            self.spoil_window: 3,
            self.twins.step: 1,  # without gradients
        }
        self.inside = [self.set_hyper, self.freeze_or_thaw, self.add_group, self.edit_weight, self.edit_master]

    def live(self) -> None:
        """Bring one step, before it perhaps an event, perhaps another inside its window."""
        if self.dice.random() < 0.25:
            (event,) = self.dice.choices(list(self.events), list(self.events.values()))
            event()
            self.twins.check()
        self.window()
        if self.dice.random() < 0.1:
            self.twins.unscale()
        if self.dice.random() < 0.05:
            self.dice.choice(self.inside)()
        self.twins.step()
        self.twins.check()

    def window(self) -> None:
        count = self.dice.choice([1, 1, 1, 2, 3])
        overflows_in = self.dice.randrange(count) if self.dice.random() < 0.12 else None
        for n in range(count):
            absent = [i for i in range(MOST) if self.dice.random() < 0.3] if self.dice.random() < 0.2 else []
            self.twins.micro_step(self.number(), absent, self.dice.choice(BAD) if n == overflows_in else None)

    def number(self) -> int:
        return self.dice.randrange(2**31)

    def spoil_window(self) -> None:
        self.window()
        self.twins.zero_grad(set_to_none=self.dice.random() < 0.3)

    def set_hyper(self) -> None:
        key, values = self.dice.choice([("lr", (0.0, 0.003, 0.05)), ("weight_decay", (0.0, 0.01, 0.1))])
        self.twins.set_hyper(self.number(), key, self.dice.choice(values))

    def freeze_or_thaw(self) -> None:
        """Keep two frozen, more or less."""
        frozen = sorted(self.twins.frozen)
        thaws = len(frozen) > self.dice.randrange(4)
        self.twins.freeze_or_thaw(self.dice.choice(frozen) if thaws else self.number())

    def add_group(self) -> None:
        if len(self.twins.params) < MOST:
            self.twins.add_group(len(self.twins.params) % 2 == 0, self.dice.random() < 0.5, self.number())

    def edit_weight(self) -> None:
        self.twins.edit_weight(self.number(), self.number(), self.dice.gauss(0, 1), self.dice.choice(NOTICED_BY))

    def edit_master(self) -> None:
        self.twins.edit_master(self.number(), self.number(), self.dice.gauss(0, 1))

    def save_load(self) -> None:
        """Change to another place for the gradients, too."""
        self.twins.zero_grad(set_to_none=True)
        self.twins.save_load(self.dice.choice(MODES), late=self.dice.random() < 0.5)


# What must have happened in a run, and how often at least.
OFTEN = {
    "applied": 1000,
    **{f"applied, {mode}": 200 for mode in MODES},
    "accumulated": 500,
    "unused layers": 300,
    "skipped": 100,
    "tolerated skip": 100,
    "backoff": 10,
    "growth": 20,
    "unscaled by hand": 100,
    "nothing to apply": 10,
    "dropped gradients": 10,
    "zeroed gradients": 3,
    "lr": 20,
    "weight_decay": 20,
    "freeze": 30,
    "thaw": 30,
    "late master": 2,
    "half group": 2,
    "fp32 group": 2,
    "edited weight": 50,
    "edited master": 30,
    "reload": 30,
}
LONG = [(INNERS[0], torch.float16), (INNERS[1], torch.bfloat16)]
if settings.default.max_examples > 50:  # beyond the profile dev: where there is time
    LONG += [(INNERS[1], torch.float16), (INNERS[0], torch.bfloat16)]


@pytest.mark.parametrize(("inner", "dtype"), LONG, ids=lambda value: getattr(value, "name", str(value)[6:]))
def test_two_thousand_steps_equal_the_walk_of_the_paper(inner: Inner, dtype: torch.dtype) -> None:
    """One run through every kind of event, in all modes in turn: after each step all bits are the reference's."""
    with_model = dtype == torch.float16
    twins = Twins(inner, dtype, "autograd", with_model, seed=0)
    start = [master.detach().clone() for master in masters_of(twins.optimizer)]
    fate = Fate(twins, seed=1)
    while twins.reference.applied + twins.reference.skipped < STEPS:
        fate.live()
    assert {event: twins.happened[event] for event, often in OFTEN.items() if twins.happened[event] < often} == {}
    assert all_same_bits(twins.params, twins.reference.weights)
    moved = zip(start, masters_of(twins.optimizer)[: len(start)], strict=True)
    assert not any(same_bits(before.float(), now.detach()) for before, now in moved)


# -- found by the runs above -------------------------------------------------------------


def two_vectors(gradients: str, **options: Any) -> tuple[nn.Parameter, nn.Parameter, MixedPrecisionOptimizer]:
    """Return a parameter, a frozen one, and their optimizer."""
    params = [nn.Parameter(torch.zeros(2, dtype=torch.float16)) for _ in range(2)]
    params[1].requires_grad_(False)
    sgd = torch.optim.SGD(params, lr=1.0, momentum=0.5)
    return *params, MixedPrecisionOptimizer(sgd, loss_scale=1.0, gradients=gradients, **options)


def master_values(optimizer: MixedPrecisionOptimizer) -> list[float]:
    return [float(master.detach()[0]) for _, master in optimizer.named_masters()]


@pytest.mark.parametrize("gradients", MODES)
def test_master_of_a_frozen_parameter_loads_wherever_gradients_wait(gradients: str) -> None:
    """What is frozen before wrapping takes its master from the file, and trains on when it thaws."""
    one, other, optimizer = two_vectors(gradients)
    other.requires_grad_(True)
    optimizer.backward((one + other).float().sum())
    optimizer.step()
    one, other, fresh = two_vectors(gradients)
    fresh.load_state_dict(through_file(optimizer.state_dict()))
    other.requires_grad_(True)
    fresh.backward((one + other).float().sum())
    fresh.step()
    assert master_values(fresh) == [-2.5, -2.5]


@pytest.mark.parametrize("gradients", MODES)
def test_freezing_again_inside_the_first_window_applies_the_gradient(gradients: str) -> None:
    """A gradient that was there before the parameter froze is applied, as in torch."""
    one, other, optimizer = two_vectors(gradients)
    other.requires_grad_(True)
    optimizer.backward((one + other).float().sum())
    other.requires_grad_(False)
    optimizer.step()
    assert master_values(optimizer) == [-1.0, -1.0]


def test_fp32_sums_hold_in_the_first_window_after_thawing() -> None:
    """The first gradients of a thawed parameter are added up in fp32 like all others: here beyond fp16."""
    _, other, optimizer = two_vectors("fp32")
    other.requires_grad_(True)
    for _ in range(3):
        optimizer.backward((other.float() * 30000.0).sum())
    assert other.grad is None
    optimizer.step()
    assert master_values(optimizer) == [0.0, -90000.0]


def test_bad_gradient_of_a_thawed_parameter_drops_its_own_micro_step() -> None:
    """With ``drop_bad_micro_steps`` its first inf costs the micro-step that it is in, and no other."""
    one, other, optimizer = two_vectors("fp32", drop_bad_micro_steps=lambda kept, total: 1.0)
    other.requires_grad_(True)
    for factor, others in ((1.0, math.inf), (10.0, 10.0)):
        optimizer.backward((one.float() * factor + other.float() * others).sum())
    optimizer.step()
    assert optimizer.last_step.dropped_micro_steps == 1
    assert master_values(optimizer) == [-10.0, -10.0]
