"""The tiers that the device judges: the same decisions as on the host, told later, and nothing changed by a skip."""

from __future__ import annotations

import functools
import logging
import math
import re
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same, force_grads, loss_of, masters_of, overflow, snapshot, through_file, train, wrapped
from strategies import dynamic_scales
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from mixedopt import DynamicLossScale, LossScaleError, MixedPrecisionOptimizer, SharedLossScale, StaticLossScale
from mixedopt.decision import Evidence, decide
from mixedopt.gradients import unscale_factor
from mixedopt.judgement import Rules, Standing, judge, rules_of
from mixedopt.loss_scale import init_state

CPU = torch.device("cpu")
# Torch's fused SGD divides by the scale in double on a GPU and goes on from there; a rule rounds in other places. One
# unit in the last place of a weight near 1, in each of the steps.
ROUNDINGS = 16 * 2.0**-22
MAKES = {
    "AdamW": lambda params, fused=True: torch.optim.AdamW(params, lr=1e-2, fused=fused),
    "momentum": lambda params, fused=True: torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.1, fused=fused),
}


@pytest.fixture(params=["fused", "compiled"])
def tier(request: pytest.FixtureRequest, device: torch.device) -> str:
    """The tiers that judge where the gradients are."""
    if request.param == "compiled" and device.type == "cpu" and shutil.which("c++") is None:
        pytest.skip("kernels of a CPU need a C++ compiler")
    return request.param


def tell(optimizer: MixedPrecisionOptimizer) -> None:
    """Wait for the device, so that the next step hears of all steps before it."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# -- the judgement -------------------------------------------------------------------------------------------------


def fp64(*values: float) -> list[Tensor]:
    return [torch.tensor(float(value), dtype=torch.float64) for value in values]


@given(
    dynamic_scales() | st.builds(StaticLossScale, st.sampled_from([1.0, 3.0, 2.0**16])),
    st.lists(st.sampled_from([0.0, 1e-30, 1.0, 1e4, 3e38, math.inf, math.nan]), min_size=1, max_size=30),
    st.none() | st.sampled_from([1e-3, 1.0]),
)
def test_the_device_decides_as_the_host_does(config: Any, sizes: list[float], limit: float | None) -> None:
    """Scale, trackers, skip, and factor, over any sequence of gradients of one value."""
    state = init_state(config, CPU)
    standing = Standing(*fp64(float(state.scale), *(int(t) for t in state.tensors()[1:]), 0, 0, 0, 0, -1))
    rules = Rules(*fp64(*rules_of(config, limit)))
    applied = 0
    for size in sizes:
        inverse = unscale_factor(state.scale)
        norm = torch.tensor(size, dtype=torch.float64)
        decision = decide(config, state, inverse, Evidence(norm, torch.tensor(False), None, None))
        if decision.ambiguous:  # the host then unscales, and looks again
            one = torch.ones(())
            evidence = Evidence((norm * inverse).float().double(), torch.tensor(False), None, None)
            decision = decide(config, state, one, evidence)
        judgement = judge(standing, rules, norm, norm, torch.tensor(7.0, dtype=torch.float64))
        standing = judgement.standing
        state.assign_(decision.following)
        applied += not decision.skip
        assert bool(judgement.skip) == decision.skip
        assert [float(value) for value in state.tensors()] == [float(value) for value in standing[:4]]
        assert float(standing.applied) == applied
        assert float(standing.culprit) == (7.0 if float(standing.skipped) else -1.0)
        if not decision.skip and limit is None:
            assert torch.equal(judgement.factor, inverse)


# -- the tiers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
def test_a_run_goes_as_in_the_eager_tier(
    name: str, gradients: str, tier: str, device: torch.device, dtype: torch.dtype
) -> None:
    """The scale, the counters and what was skipped, over overflows, growth, missing gradients and accumulation."""
    found: list[Any] = []
    for each in ("eager", tier):
        scale = DynamicLossScale(2.0**7, growth_interval=3, hysteresis=2)
        # Torch's fused AdamW has 1 - beta2 in fp32 on a GPU, and so is 112 units off; a rule is compared with foreach.
        make = functools.partial(MAKES[name], fused=tier == "fused")
        model, optimizer = wrapped(device, dtype, make, tier=each, loss_scale=scale, gradients=gradients)
        told = []
        for step in range(16):
            for micro in range(1 + step % 2):
                # A fused SGD of torch refuses a parameter whose first gradient comes late.
                loss = loss_of(model, step + micro, use_branch=step % 5 != 3 if name == "momentum" else step % 5 == 3)
                optimizer.backward(loss * float("inf") if step in (0, 6, 7, 12) else loss)
            optimizer.step()
            report = optimizer.last_step
            told.append((report.applied, report.skipped, report.loss_scale, optimizer.loss_scale))
        found.append((told, optimizer.applied_steps, optimizer.skipped_steps, optimizer._tier.to_dict()))
        found[-1] += (masters_of(optimizer),)
        assert optimizer.tier == each
    assert found[0][:4] == found[1][:4]
    if tier == "fused" and (name == "AdamW" or device.type == "cpu"):
        assert_same(found[0][4], found[1][4])
    for key, value in found[0][4].items():
        assert torch.allclose(value, found[1][4][key], rtol=ROUNDINGS, atol=ROUNDINGS), key


@pytest.mark.parametrize("name", MAKES)
def test_a_skip_changes_nothing(name: str, tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """Masters, weights and state, bit for bit; a skipped first step leaves fresh state."""
    model, optimizer = wrapped(device, dtype, MAKES[name], tier=tier, max_grad_norm=0.1)
    for _ in range(3):
        before = snapshot(model, optimizer)
        overflow(optimizer)
        after = snapshot(model, optimizer)
        for part in ("masters", "weights", "inner"):
            assert_same(before[part], after[part], part)
        for step in range(2):
            optimizer.backward(loss_of(model, step, use_branch=True))
            optimizer.step()


def test_running_statistics_come_back(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """A skip takes back what the forward wrote to norm layers; an applied step leaves it."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)).to(device)
    optimizer = MixedPrecisionOptimizer(MAKES["AdamW"](model.parameters()), model, dtype=dtype, tier=tier)
    for step in range(6):
        before = [buffer.clone() for buffer in model.buffers()]
        loss = model(torch.full((5, 4), step + 1.0, device=device) * torch.arange(5, device=device)[:, None])
        bad = step in (0, 3, 4)
        optimizer.backward(loss.square().mean() * (float("inf") if bad else 1e-3))
        optimizer.step()
        same = [torch.equal(now, then) for now, then in zip(model.buffers(), before, strict=True)]
        assert same == [bad] * 3


def test_clipping_is_part_of_it(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """The norm that is told is the eager tier's; clipped steps move weights as far."""
    found = []
    for each in ("eager", tier):
        model, optimizer = wrapped(device, dtype, MAKES["momentum"], tier=each, max_grad_norm=0.05)
        norms = []
        for step in range(4):
            optimizer.backward(loss_of(model, step, use_branch=True))
            optimizer.step()
            norms.append(optimizer.last_step.grad_norm)
        found.append((norms, masters_of(optimizer)))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-3)
    for key, value in found[0][1].items():
        assert torch.allclose(value, found[1][1][key], rtol=1e-3, atol=1e-5), key


def test_one_skip_too_many_is_told(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """The error names the first bad parameter, some steps late; weights are as before, and training goes on."""
    scale = StaticLossScale(8.0, max_consecutive_skips=3)
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier, loss_scale=scale)
    for step in range(2):
        optimizer.backward(loss_of(model, step, use_branch=True))
        optimizer.step()
    before = masters_of(optimizer)

    def spoil(times: int) -> None:
        for _ in range(times):
            tell(optimizer)
            force_grads(optimizer, 1.0)
            model.head.bias.grad[0] = float("nan")
            optimizer.step()

    told = 3 if device.type == "cpu" else "[34]"
    with pytest.raises(LossScaleError, match=rf"{told} skips in a row\)\. First bad parameter: 'head.bias'"):
        spoil(4)
    assert_same(before, masters_of(optimizer))
    tell(optimizer)
    optimizer.backward(loss_of(model, 3, use_branch=True))
    optimizer.step()
    assert optimizer.last_step.applied


def test_one_error_tells_of_all_steps_under_way(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """The host hears of one skip too many when the device has made a second: the next step, a good one, goes on."""
    _, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier)
    train(optimizer._roster.root, optimizer, range(2))
    tell(optimizer)
    heard = optimizer._tier
    heard.scaler.write_("exhausted", 2)
    at = Standing._fields.index("exhausted")
    heard.scaler.told[at] = 1
    with pytest.raises(LossScaleError):
        heard._hear_()
    heard.scaler.told[at] = 2
    heard._hear_()


def test_skips_are_logged(
    tier: str, device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """At INFO, once each, with the scale that follows; some steps late."""
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier)
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        for step in range(2):
            optimizer.backward(loss_of(model, step, use_branch=True))
            optimizer.step()
        overflow(optimizer)
        tell(optimizer)
        optimizer.backward(loss_of(model, 2, use_branch=True))
        optimizer.step()
    lines = [record.getMessage() for record in caplog.records if "skipped:" in record.getMessage()]
    assert len(lines) == 1
    # What stands at the hearing: the step after the skip may have run by then.
    told = r"step skipped: inf or NaN in the gradients; loss_scale -> 64 \([01] in a row, 1 skipped"
    assert re.search(told, lines[0])


def test_an_exact_resume(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """Cut after a skip: scale, counters, masters and state go on bit for bit."""
    make, scale = MAKES["AdamW"], DynamicLossScale(2.0**7, growth_interval=2, hysteresis=2)
    model, optimizer = wrapped(device, dtype, make, tier=tier, loss_scale=scale, max_grad_norm=0.5)
    train(model, optimizer, range(3))
    overflow(optimizer)
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh, resumed = wrapped(device, dtype, make, tier=tier, loss_scale=scale, max_grad_norm=0.5)
    train(fresh, resumed, [9])
    fresh.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for each in ((model, optimizer), (fresh, resumed)):
        train(*each, [3, 4])
        overflow(each[1])
        train(*each, [5])
    assert_same(optimizer.state_dict(), resumed.state_dict())


def test_weights_beyond_the_half_range_are_an_error(tier: str, device: torch.device) -> None:
    """As in the eager tier, at most ``RANGE_CHECK_INTERVAL`` steps and what the host is ahead later."""
    param = nn.Parameter(torch.full((3,), 6e4, dtype=torch.float16, device=device))
    inner = torch.optim.SGD([param], lr=1.0, fused=True)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0, tier=tier)

    def push(times: int) -> None:
        for _ in range(times):
            optimizer.scale(torch.zeros((), device=device))
            param.grad = torch.full_like(param, -1e3)
            optimizer.step()
            tell(optimizer)

    with pytest.raises(ValueError, match=r"beyond the largest value of torch\.float16"):
        push(300)


def test_what_needs_the_host_goes_by_the_eager_tier(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """``unscale_`` and edits, a hook on the inner optimizer, a closure: in between, with one scale and one count."""
    found = []
    for each in ("eager", tier):
        model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=each)
        called = []
        for step in range(8):
            if step == 5:
                optimizer.step(lambda m=model, o=optimizer: o.backward(loss_of(m, 5, use_branch=True)))
                continue
            optimizer.backward(loss_of(model, step, use_branch=True) * (float("inf") if step == 4 else 1.0))
            if step == 3:
                optimizer.unscale_()
                for _, master in optimizer.named_masters():
                    if master.grad is not None:
                        master.grad.mul_(0.5)
            if step == 6:
                handle = optimizer.inner.register_step_post_hook(lambda *args, called=called: called.append(1))
            optimizer.step()
            if step == 6:
                handle.remove()
        found.append((optimizer.applied_steps, optimizer.skipped_steps, optimizer.loss_scale, len(called)))
    assert found[0] == found[1] == (7, 1, 64.0, 1)


def test_hooks_of_the_inner_optimizer_see_unscaled_gradients(
    tier: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Those that the eager tier shows, to read and to edit; a skipped step calls no hook."""
    seen: dict[str, list[Tensor]] = {"eager": [], tier: []}
    masters = []
    for each, grads in seen.items():
        model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=each)

        def edit(inner: torch.optim.Optimizer, *args: Any, grads: list[Tensor] = grads) -> None:
            mine = [p.grad for group in inner.param_groups for p in group["params"] if p.grad is not None]
            grads.extend(grad.clone() for grad in mine)
            torch._foreach_clamp_max_(mine, 1e-3)

        optimizer.inner.register_step_pre_hook(edit)
        train(model, optimizer, [0])
        overflow(optimizer)
        masters.append(masters_of(optimizer))
    assert_same(seen["eager"], seen[tier])
    assert_same(*masters)


def test_the_host_is_told_of_a_load_at_once(device: torch.device, dtype: torch.dtype) -> None:
    """Not by the next step, before which it would take the old count of skips for news, and miss as many later."""
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier="fused")
    train(model, optimizer, [0])
    saved = through_file(optimizer.state_dict())
    overflow(optimizer)
    train(model, optimizer, [1])
    optimizer.load_state_dict(saved)
    tell(optimizer)
    told, standing = (
        Standing(*each.tolist()) for each in (optimizer._tier.scaler.told, optimizer._tier.scaler.standing)
    )
    assert told == standing
    assert (told.skipped, told.applied) == (0, 1)


def test_statistics_loaded_before_a_replay_stand(device: torch.device, dtype: torch.dtype) -> None:
    """What a skip inside a graph brings back is what was there before the call."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = MixedPrecisionOptimizer(MAKES["AdamW"](model.parameters()), model, dtype=dtype, tier="fused")
    optimizer.backward(model(torch.ones(3, 4, device=device)).square().mean())
    optimizer.step()
    model[1].running_mean.fill_(5.0)
    optimizer._tier.before_replay_()
    model[1].running_mean.fill_(9.0)  # as the forward inside the graph does
    optimizer._tier.statistics.restore_if_(torch.ones((), device=device))
    assert (model[1].running_mean == 5.0).all()


@pytest.mark.parametrize("steps", [0, 3])
def test_a_fused_step_that_raises_counts_for_nothing(
    steps: int, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    """Out of memory, say, in the first step or later: counters and scale are as before, and training goes on."""
    scale = DynamicLossScale(init_scale=64.0, growth_interval=2)
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier="fused", loss_scale=scale)
    train(model, optimizer, range(steps))
    before = snapshot(model, optimizer)

    def fails(*args: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(optimizer.inner, "step", fails)
        with pytest.raises(MemoryError):
            train(model, optimizer, [9])
    assert_same(before, snapshot(model, optimizer))
    assert optimizer.state_dict()["mixedopt"]["loss_scale"]["state"]["growth_tracker"] == steps % 2
    train(model, optimizer, [steps])
    assert optimizer.applied_steps == steps + 1


def test_parameters_may_all_be_empty(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """As with the bare optimizer, such a step is applied."""
    empty = nn.Parameter(torch.zeros(0, 3, dtype=dtype, device=device))
    optimizer = MixedPrecisionOptimizer(MAKES["AdamW"]([empty]), tier=tier)
    for _ in range(2):
        optimizer.backward(empty.sum().float())
        optimizer.step()
    assert (optimizer.applied_steps, optimizer.skipped_steps, optimizer.last_step.grad_norm) == (2, 0, 0.0)


def test_a_tier_that_does_not_serve_says_so(device: torch.device, dtype: torch.dtype) -> None:
    """A named one insists, with a remedy, and converts nothing."""
    for make, options, words in (
        (lambda p: torch.optim.AdamW(p), {}, "AdamW does not skip by itself.*fused=True, or use tier='eager'"),
        (MAKES["AdamW"], {"loss_scale": SharedLossScale(2.0)}, "decide on the host. Use tier='eager'"),
    ):
        model = nn.Linear(2, 2, device=device)
        with pytest.raises(ValueError, match=words):
            MixedPrecisionOptimizer(make(model.parameters()), model, dtype=dtype, tier="fused", **options)
        assert model.weight.dtype == torch.float32


def test_backward_begins_with_a_scale_of_its_own(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """S as it is then, over growth, overflows, micro-steps and loads; who keeps it or writes into it harms nobody."""
    scale = DynamicLossScale(2.0**7, growth_interval=2)
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier, loss_scale=scale)
    saved, kept = through_file(optimizer.state_dict()), []
    for step in range(12):
        for micro in range(1 + step % 3):
            loss = loss_of(model, step, use_branch=True)
            begun: list[Tensor] = []
            loss.register_hook(begun.append)  # a gradient that was retained would be a copy
            optimizer.backward(loss)
            before, (began,) = optimizer.loss_scale, begun
            assert began == before
            if micro != 1:
                began.mul_(3)
                before *= 3
            kept.append((began, began._version, before))
        if step == 5:
            force_grads(optimizer, math.inf)
        optimizer.step()
        if step == 8:
            assert optimizer.loss_scale != scale.init_scale
            optimizer.load_state_dict(saved)
            assert optimizer.loss_scale == scale.init_scale
    assert all(grad == value and grad._version == version for grad, version, value in kept)
    assert len({value for _, _, value in kept}) > 4


def test_backward_begins_with_the_scale_after_a_step_that_failed(
    tier: str, device: torch.device, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even if S had moved by then."""
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier)
    train(model, optimizer, range(2))
    force_grads(optimizer, math.inf)
    advance = optimizer._tier._advance_

    def fails(*args: Any) -> None:
        advance(*args)
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(optimizer._tier, "_advance_", fails)
        with pytest.raises(MemoryError):
            optimizer.step()
    begun: list[Tensor] = []
    loss = loss_of(model, 3, use_branch=True)
    loss.register_hook(begun.append)
    optimizer.backward(loss)
    assert begun[0] == optimizer.loss_scale


def test_a_step_in_inference_mode_leaves_an_ordinary_scale(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """Hooks of later losses may write into it."""
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier)
    train(model, optimizer, range(1))  # a first step makes state, which would be of the mode
    optimizer._tier._rooms.clear()
    optimizer.backward(loss_of(model, 0))
    with torch.inference_mode():
        optimizer.step()
    for step in range(2):
        loss = loss_of(model, step)
        loss.register_hook(lambda slope: slope.mul_(1.0))
        optimizer.backward(loss)
        optimizer.step()
    assert optimizer.applied_steps == 4


def test_a_conversion_that_was_removed_keeps_no_half_weights(
    tier: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Nor the launches that were made of them."""
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier)
    train(model, optimizer, range(2))
    memory = StorageWeakRef(optimizer._parts.masters.buckets[0].flat_model.untyped_storage())
    optimizer.policy_handle.remove()
    assert memory.expired()


@pytest.mark.parametrize("how", ["added", "loaded"])
def test_parameters_that_join_between_replays_make_another_step(
    how: str, tier: str, device: torch.device, dtype: torch.dtype
) -> None:
    """A graph is asked for its token before each replay; steps go on either way."""

    def build(*, frozen: bool) -> tuple[nn.Sequential, MixedPrecisionOptimizer]:
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).to(device)
        model[1].requires_grad_(not frozen)
        params = (model if how == "loaded" else model[0]).parameters()
        inner = MAKES["AdamW"](list(params), fused=tier == "fused")
        return model, MixedPrecisionOptimizer(inner, model, dtype=dtype, tier=tier, loss_scale=128.0)

    def step(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
        optimizer.backward(model(torch.ones(2, 4, device=device)).float().square().mean())
        optimizer.step()

    both = build(frozen=True)
    model, optimizer = both
    step(*both)
    token = optimizer._tier.before_replay_()
    assert optimizer._tier.before_replay_() is token
    if how == "added":
        model[1].requires_grad_(True)
        optimizer.add_param_group({"params": list(model[1].parameters())})
    else:
        another = build(frozen=False)
        step(*another)
        optimizer.load_state_dict(another[1].state_dict())
        model[1].requires_grad_(True)
    assert optimizer._tier.before_replay_() is not token
    before = model[1].weight.detach().clone()
    step(*both)
    assert optimizer.last_step.applied
    assert not torch.equal(model[1].weight, before)


def test_the_report_can_be_held(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """Each says of its own step, read in any order, later."""
    model, optimizer = wrapped(device, dtype, MAKES["AdamW"], tier=tier)
    reports = []
    for step in range(4):
        optimizer.backward(loss_of(model, step, use_branch=True) * (float("inf") if step == 2 else 1.0))
        optimizer.step()
        reports.append(optimizer.last_step)
    assert [report.skipped for report in reversed(reports)] == [False, True, False, False]
    assert [report.loss_scale for report in reports] == [128.0, 128.0, 128.0, 64.0]
    assert [report.reason for report in reports[2:]] == ["inf or NaN in the gradients", None]
    assert [math.isfinite(report.grad_norm) for report in reports[2:]] == [False, True]
    optimizer.step()
    assert optimizer.last_step.reason == "no gradients"
