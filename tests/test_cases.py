"""Bug reports from other projects, as laws: each docstring begins with the number of its case."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    Factory,
    adamw,
    assert_same,
    differs,
    force_grads,
    fp32_twin,
    loss_of,
    masters_of,
    momentum,
    overflow,
    snapshot,
    through_file,
    train,
    two_group_model,
    two_groups,
    vector,
)
from pairs import (
    INF,
    NAN,
    Bench,
    Doubles,
    Pair,
    assert_fell,
    kept,
    lbfgs,
    linear,
    norm_of,
    plain,
    rates,
    seen_by,
    stated,
)
from test_optimizer import HostReads
from test_schedulers_hooks import MAKERS
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau, StepLR

from mixedopt import (
    CastPolicy,
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    SharedLossScale,
    StaticLossScale,
    StepOrderError,
)
from mixedopt.gradients import clip_factor, exact_norm, unscale_factor, wide_dtype
from mixedopt.loss_scale import init_state, update

# A norm is summed in fp32 rows, and torch's clip adds 1e-6 to it: relative.
NORM_ERROR = 1e-6
# Numbers of recipes are worked out in real arithmetic, over up to a hundred fp32 steps near one.
CLOSED_FORM = 1e-4


# -- SC: the arithmetic of the loss scale -----------------------------------------


@pytest.mark.parametrize("script", ["ooo", "oXoo"])
def test_scale_moves_only_after_the_gradients_were_divided(script: str, at: Bench) -> None:
    """Case 1: a step divides by the S of its own backward, on each growth and after a backoff."""
    model, optimizer = at.wrapped(plain, loss_scale=DynamicLossScale(init_scale=4.0, growth_interval=1))
    size, scale = sum(master.numel() for _, master in optimizer.named_masters()), 4.0
    for letter in script:
        before, good = masters_of(optimizer), letter == "o"
        optimizer.backward(linear(model, 1.0 if good else INF))
        optimizer.step()
        assert_fell(before, optimizer, by=float(good))
        assert (scale, good) == (optimizer.last_step.loss_scale, optimizer.last_step.applied)
        assert optimizer.last_step.grad_norm == (pytest.approx(math.sqrt(size), NORM_ERROR) if good else INF)
        scale *= 2 if good else 0.5
        assert scale == optimizer.loss_scale


def test_every_group_is_divided_and_every_group_can_veto(at: Bench) -> None:
    """Case 7: with S=1024 and true gradients of one both groups move by one; an inf in the second stops the first."""
    _, optimizer = at.wrapped(plain, loss_scale=1024.0)
    for act, by in ((lambda: force_grads(optimizer, 1.0), 1.0), (lambda: overflow(optimizer), 0.0)):
        before = masters_of(optimizer)
        act()
        optimizer.step()
        assert_fell(before, optimizer, by=by)
    assert (1, 1) == (optimizer.applied_steps, optimizer.skipped_steps)


def test_nan_for_ever_ends_in_an_error_at_the_floor(at: Bench) -> None:
    """Case 16: S never leaves its floor, which may be under one; weights stay; the error comes after ten skips there.

    A loss that needs S = 2**-3 recovers; bf16, which has the range of fp32, applies it at once.
    """
    model, optimizer = at.wrapped(loss_scale=DynamicLossScale(init_scale=2.0, min_scale=2.0**-3))
    train(model, optimizer, [0])
    before = kept(model, optimizer)
    for step in range(20):
        optimizer.backward(loss_of(model, 0) * NAN)
        if step < 4 + 9:
            optimizer.step()
        else:
            with pytest.raises(LossScaleError, match=rf"min_scale=0.12 \({step - 3} skips in a row\)\. First bad"):
                optimizer.step()
        assert optimizer.loss_scale == max(2.0**-step, 2.0**-3)
    assert_same(before, kept(model, optimizer))
    train(model, optimizer, [1])
    assert optimizer.applied_steps == 2

    model, optimizer = at.wrapped(plain, loss_scale=DynamicLossScale())
    start = masters_of(optimizer)
    while optimizer.applied_steps == 0:
        optimizer.backward(linear(model, 3 * 2.0**17))
        optimizer.step()
    assert optimizer.last_step.loss_scale == (2.0**-3 if at.dtype == torch.float16 else 2.0**16)
    assert_fell(start, optimizer, by=3 * 2.0**17)


@pytest.mark.parametrize("ceiling", [INF, 2.0**123])
def test_scale_of_tiny_losses_stays_finite(ceiling: float, at: Bench) -> None:
    """Case 17: growth stops under the ceiling, or at the last finite power of two, and steps are still applied."""
    config = DynamicLossScale(init_scale=2.0**120, growth_interval=1, max_scale=ceiling)
    model, optimizer = at.wrapped(plain, loss_scale=config)
    seen = seen_by(optimizer.inner)
    for step in range(20):
        optimizer.backward(linear(model, 1e-38))
        optimizer.step()
        assert (True, min(2.0 ** min(121 + step, 127), ceiling)) == (optimizer.last_step.applied, optimizer.loss_scale)
    # Rounded to half, and to a subnormal of fp32, which has 22 bits there.
    close = ((grad.double() / 1e-38 - 1).abs() < torch.finfo(at.dtype).eps for grads in seen for grad in grads)
    assert all(bool(each.all()) for each in close)


@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
def test_scale_is_frozen_inside_a_window(gradients: str, at: Bench) -> None:
    """Case 18: two micro-steps of one sum to two; nothing moves S between them; an inf in the first of four skips all.

    A shared scale may move while gradients wait: fp32 sums follow it, others are refused.
    """
    shared = SharedLossScale(DynamicLossScale(init_scale=1024.0, growth_interval=1))
    model, optimizer = at.wrapped(plain, loss_scale=shared, gradients=gradients)
    other_model, other = at.wrapped(plain, loss_scale=shared)
    start, saved = masters_of(optimizer), copy.deepcopy(optimizer.state_dict())
    for _ in range(2):
        optimizer.backward(linear(model, 1.0))
        assert optimizer.loss_scale == 1024.0
    with pytest.raises(StepOrderError, match="inside a window"):
        optimizer.load_state_dict(saved)
    with pytest.raises(AttributeError):
        optimizer.loss_scale = 512.0
    shared.step(optimizer)
    assert_fell(start, optimizer, by=2.0)

    start = masters_of(optimizer)
    for micro_step in range(4):
        optimizer.backward(linear(model, INF if micro_step == 0 else 1.0))
        assert optimizer.loss_scale == 2048.0
    shared.step(optimizer)
    assert (True, 1024.0) == (optimizer.last_step.skipped, optimizer.loss_scale)
    assert_fell(start, optimizer, by=0.0)

    optimizer.backward(linear(model, 1.0))
    other.backward(linear(other_model, INF))
    shared.step(other)
    optimizer.backward(linear(model, 1.0))
    if gradients == "fp32":
        shared.step(optimizer)
    else:
        with pytest.raises(StepOrderError, match="their unit is unknown"):
            shared.step(optimizer)
    assert_fell(start, optimizer, by=2.0 if gradients == "fp32" else 0.0)


def test_grad_scaler_is_refused_before_it_divides(at: Bench) -> None:
    """Case 32: the wrapper in ``GradScaler.step``, and GradScaler's loss in the wrapper, raise by name; nothing moves.

    fp16 gradients stop ``GradScaler.unscale_`` itself; bf16 ones pass there, and its ``step`` raises all the same.
    """
    scaler = torch.amp.GradScaler(at.device.type, init_scale=2.0**8)
    model, optimizer = at.wrapped()
    for scale in (scaler.scale, optimizer.scale):
        for call in (optimizer.backward, optimizer.scale, lambda loss: optimizer.backward([loss])):
            with pytest.raises(StepOrderError, match=r"torch\.amp\.GradScaler does|comes from scale\(\)"):
                call(scale(loss_of(model, 0)))
    scaler.scale(loss_of(model, 0)).backward()
    before = kept(model, optimizer)
    with pytest.raises(TypeError, match=r"was given to torch\.amp\.GradScaler\.step\(\).* Remove the GradScaler"):
        scaler.step(optimizer)
    assert_same(before, kept(model, optimizer))
    if at.dtype == torch.bfloat16 and at.device.type == "cpu":  # torch 2.11 has no bf16 kernel for it on a GPU
        scaler.unscale_(optimizer)
    with pytest.raises(TypeError, match=r"GradScaler\.step"):
        scaler.step(optimizer)
    train(model, optimizer, [0])
    assert optimizer.applied_steps == 1


def test_loss_is_scaled_and_gradient_divided_in_fp32(at: Bench) -> None:
    """Case 40: a half loss of 2 at S=65536 is 131072, not inf; 1e-3 / 65536 is 1.5e-8, not 0."""
    _, optimizer = at.wrapped(plain, loss_scale=65536.0)
    scaled = optimizer.scale(torch.tensor(2.0, dtype=at.dtype, device=at.device))
    assert (torch.float32, 131072.0) == (scaled.dtype, float(scaled))
    force_grads(optimizer, 1e-3 / 65536)
    optimizer.unscale_()
    half = [m.grad for name, m in optimizer.named_masters() if "norm" not in name]
    assert all(bool((grad == at.rounded(1e-3) / 65536).all()) for grad in half)
    optimizer.step()
    pair = at.pair()
    pair.optimizer.backward(loss_of(pair.model, 0).to(at.dtype))
    pair.step()
    assert pair.optimizer.last_step.applied


@pytest.mark.parametrize("skip", ["own", "all"])
def test_shared_scale_moves_once_an_iteration(skip: str, at: Bench) -> None:
    """Case 46: one of two optimizers overflows, then one has no gradients, then neither has: S moves 0 or 1 times."""
    shared = SharedLossScale(DynamicLossScale(init_scale=2.0**7, growth_interval=1), skip=skip)
    model = two_group_model(at.device)
    options: dict[str, Any] = {"dtype": at.dtype, "loss_scale": shared}
    first, second = (MixedPrecisionOptimizer(plain([g]), model, **options) for g in two_groups(model))
    start = masters_of(first), masters_of(second)
    force_grads(first, 0.5)
    force_grads(second, 0.5)
    second.param_groups[0]["params"][-1].grad[-1] = INF
    with pytest.raises(StepOrderError, match=r"Call shared\.step\(optimizer"):
        first.step()
    shared.step(first, second)
    assert (2.0**7, skip == "own") == (first.last_step.loss_scale, first.last_step.applied)
    assert (2.0**7, True) == (second.last_step.loss_scale, second.last_step.skipped)
    assert_fell(start[0], first, by=0.5 if skip == "own" else 0.0)
    assert_fell(start[1], second, by=0.0)
    assert first.loss_scale == second.loss_scale == 2.0**6

    force_grads(second, 0.5)
    shared.step(first, second)
    assert (first.last_step.reason, second.last_step.applied) == ("no gradients", True)
    assert_fell(start[1], second, by=0.5)
    shared.step(first, second)
    assert (first.last_step.reason, second.last_step.reason, shared.loss_scale) == (*["no gradients"] * 2, 2.0**7)


HYSTERESIS = {"XX": [16, 8], "XoX": [16, 16, 16], "XXoX": [16, 8, 8, 8]}


@pytest.mark.parametrize("pattern", HYSTERESIS)
def test_good_step_refills_the_hysteresis(pattern: str, at: Bench) -> None:
    """Case 56: from S=16 with hysteresis 2, only the second overflow in a row backs off."""
    pair, scales = at.pair(loss_scale=DynamicLossScale(init_scale=16.0, hysteresis=2)), []
    for letter in pattern:
        pair.play(INF if letter == "X" else 1.0)
        scales.append(pair.optimizer.loss_scale)
    assert HYSTERESIS[pattern] == scales
    assert pattern.count("o") == pair.optimizer.applied_steps


def test_message_of_a_skip_tells_the_hysteresis_left(at: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Case 56: an overflow that is tolerated is logged as such, not as "16, reducing to 16"."""
    _, optimizer = at.wrapped(loss_scale=DynamicLossScale(init_scale=16.0, hysteresis=2))
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        overflow(optimizer)
    assert "hysteresis" in caplog.text


def test_gradients_under_the_half_range_survive(at: Bench) -> None:
    """Case 58: a true gradient of 1e-8 survives within 1 %; in fp16 without a scale it would be 0."""
    for scale in (None, 1.0):
        model, optimizer = at.wrapped(plain, loss_scale=scale)
        seen = seen_by(optimizer.inner)
        optimizer.backward(linear(model, 1e-8))
        optimizer.step()
        lost = scale == 1.0 and at.dtype == torch.float16
        for (name, _), grad in zip(optimizer.named_masters(), seen[0], strict=True):
            true = torch.full_like(grad, 0.0 if lost and "norm" not in name else 1e-8)
            assert torch.allclose(grad, true, rtol=0.01, atol=0.0)


# -- SK: skips --------------------------------------------------------------------


def test_run_with_a_bad_batch_equals_one_that_never_saw_it(at: Bench) -> None:
    """Case 5: one inf in the last element of the last group leaves weights, moments, counts and groups as they were."""
    pair = at.pair()
    pair.play(1.0, 0.5)
    before = kept(pair.model, pair.optimizer)
    overflow(pair.optimizer)
    assert_same(before, kept(pair.model, pair.optimizer))
    pair.check()
    pair.play(0.25)
    counters = (pair.optimizer.applied_steps, pair.optimizer.skipped_steps, pair.optimizer.loss_scale)
    assert (3, 1, 2.0**6) == counters
    assert differs(before, kept(pair.model, pair.optimizer))


@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
def test_skip_drops_the_bad_gradients(gradients: str, at: Bench) -> None:
    """Case 9: one bad batch and nine clean ones, never a ``zero_grad``: S halves once, nine steps are applied."""
    model, optimizer = at.wrapped(gradients=gradients)
    for step in range(10):
        optimizer.backward(loss_of(model, step) * (INF if step == 0 else 1.0))
        optimizer.step()
        assert all(param.grad is None for param in model.parameters())
    assert (9, 1, 2.0**6) == (optimizer.applied_steps, optimizer.skipped_steps, optimizer.loss_scale)


def test_constant_scale_skips_tells_and_raises_at_the_tenth(at: Bench, caplog: pytest.LogCaptureFixture) -> None:
    """Case 39: bf16 without scaling and fp16 with a static one: nine skips counted and logged, the tenth raises."""
    model, optimizer = at.wrapped(loss_scale=128.0 if at.dtype == torch.float16 else None)
    train(model, optimizer, [0])
    before, scale = kept(model, optimizer), optimizer.loss_scale
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        for count in range(1, 10):
            overflow(optimizer)
            assert (count, count) == (optimizer.skipped_steps, len(caplog.records))
            assert f"({count} in a row" in caplog.records[-1].getMessage()
        with pytest.raises(LossScaleError, match=rf"static at {scale:g} \(10 skips in a row\)"):
            overflow(optimizer)
    assert_same(before, kept(model, optimizer))
    train(model, optimizer, [1])
    assert (2, scale) == (optimizer.applied_steps, optimizer.loss_scale)


# -- MA: masters ------------------------------------------------------------------


def muon(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.Muon(groups[0]["params"], lr=1e-2)  # matrices only


@pytest.mark.parametrize("make", [torch.optim.Adafactor, muon])
def test_inner_optimizer_sees_every_parameter_in_its_own_shape(make: Factory, at: Bench) -> None:
    """Case 6: matrices stay matrices, and a vector of 0.01 beside one of 10 in a group moves as it does in fp32."""
    pair = at.pair(make)
    for net in (pair.model, pair.twin):
        net.hidden.bias.data.fill_(10.0)
        net.branch.bias.data.fill_(at.rounded(0.01))
    pair.optimizer.refresh_masters()
    before = masters_of(pair.optimizer)
    pair.play(2.0**-4, 2.0**-3)
    moved = {name for name, master in masters_of(pair.optimizer).items() if not torch.equal(before[name], master)}
    assert "hidden.weight" in moved
    assert make is muon or {"hidden.bias", "branch.bias"} <= moved


def test_layer_unused_in_a_batch_is_not_fed_zeros(at: Bench) -> None:
    """Case 8: a branch with a gradient in the first of four steps moves (by lr, in Adam) and counts once."""
    pair = at.pair(lambda groups: torch.optim.Adam([{**group, "lr": 0.1, "weight_decay": 0.0} for group in groups]))
    weights = [masters_of(pair.optimizer)["branch.weight"]]
    for step in range(4):
        pair.optimizer.zero_grad(set_to_none=True)
        pair.optimizer.backward(loss_of(pair.model, step, use_branch=step == 0))
        pair.step()
        weights.append(masters_of(pair.optimizer)["branch.weight"])
    assert abs(float((weights[1] - weights[0]).abs().max()) - 0.1) < CLOSED_FORM
    assert_same(weights[1:2] * 3, weights[2:])
    steps = [int(pair.optimizer.state[layer.weight]["step"]) for layer in (pair.model.branch, pair.model.hidden)]
    assert [1, 4] == steps


def test_group_added_later_is_trained_and_saved(at: Bench) -> None:
    """Case 25: masters are made, old moments and addresses stay, the group has its own lr, and a save loads."""
    pair = at.pair(lambda groups: adamw(groups[:1]))
    pair.play(1.0, 0.5)
    pointers = {name: master.data_ptr() for name, master in pair.optimizer.named_masters()}
    for model, optimizer in ((pair.model, pair.optimizer), (pair.twin, pair.bare)):
        optimizer.add_param_group({**two_groups(model)[1], "lr": 0.5})
    pair.check()
    before = masters_of(pair.optimizer)
    pair.play(0.5)
    after = masters_of(pair.optimizer)
    assert len(before) == len(pointers) + 5
    assert all(differs(before[name], after[name]) for name in before)
    assert float((before["hidden.bias"] - after["hidden.bias"]).abs().max()) > 0.25
    assert pointers == {n: m.data_ptr() for n, m in pair.optimizer.named_masters() if n in pointers}

    model, resumed = at.wrapped()
    model.load_state_dict(through_file(pair.model.state_dict()))
    resumed.load_state_dict(through_file(pair.optimizer.state_dict()))
    Pair(model, resumed, pair.twin, pair.bare).play(1.0)
    assert [1e-2, 0.5] == rates(resumed)


def test_freezing_in_mid_run_is_as_in_fp32(at: Bench) -> None:
    """Case 26: a frozen layer neither decays nor drifts, an unfrozen one starts to move, and nobody gets another's."""
    pair, names = at.pair(), ("frozen", "hidden", "branch")

    def moved() -> list[bool]:
        before = [pair.model.get_submodule(name).weight.detach().clone() for name in names]
        pair.play(1.0)
        return [differs(old, pair.model.get_submodule(n).weight.detach()) for n, old in zip(names, before, strict=True)]

    assert [False, True, True] == moved()
    pair.model.frozen.requires_grad_(True)
    assert [True, True, True] == moved()
    pair.model.hidden.requires_grad_(False)
    assert [True, False, True] == moved() == moved()
    overflow(pair.optimizer)
    pair.check()


def test_frozen_parameters_cost_no_master(at: Bench) -> None:
    """Case 27: of 1000 values ten are trained and have masters, in a buffer of 64; a frozen group keeps its index."""
    trained, *frozen = (vector(at.device, at.dtype, size, 0.0) for size in (10, 990, 5))
    for param in frozen:
        param.requires_grad_(False)
    optimizer = MixedPrecisionOptimizer(plain([{"params": [frozen[0], trained]}, {"params": frozen[1:]}]))
    assert [(10, 64)] == [(m.numel(), m.untyped_storage().nbytes() // 4) for _, m in optimizer.named_masters()]

    model = two_group_model(at.device)
    keys = list(model.state_dict())
    groups = [{"params": model.hidden.parameters()}, {"params": model.frozen.parameters(), "lr": 0.5}]
    optimizer = MixedPrecisionOptimizer(adamw(groups), model, dtype=at.dtype, loss_scale=SMALL_SCALE)
    train(model, optimizer, [0])
    assert (1, {"hidden.weight", "hidden.bias"}) == (optimizer.applied_steps, set(masters_of(optimizer)))
    assert ([2, 2], [1e-2, 0.5]) == ([len(group["params"]) for group in optimizer.param_groups], rates(optimizer))
    assert keys == list(model.state_dict()) == list(optimizer.master_state_dict())


@pytest.mark.parametrize("sparse", [False, True], ids=["kept_in_fp32", "sparse"])
def test_repeated_ids_of_an_embedding_add_up(sparse: bool, at: Bench) -> None:
    """Case 53: 5000 times one id has a gradient of 5000, with the embedding kept in fp32 or with ``sparse=True``.

    A dense half embedding saturates inside torch's own backward, out of our reach.
    """
    model = two_group_model(at.device)
    model.embedding.sparse = sparse
    policy = CastPolicy.default() if sparse else CastPolicy.default().keep("embedding")
    inner = plain(two_groups(model))
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=at.dtype, policy=policy, loss_scale=4.0)
    before = masters_of(optimizer)["embedding.weight"]
    optimizer.backward(model.embedding(torch.full((5000,), 2, device=at.device)).float().sum())
    optimizer.step()
    before[2] -= 5000
    assert_same(before, masters_of(optimizer)["embedding.weight"])


# -- API: what torch.optim promises -----------------------------------------------


@pytest.mark.parametrize("on_inner", [False, True])
def test_schedule_counts_the_applied_steps(on_inner: bool, at: Bench) -> None:
    """Case 10: a skip is public; gated by it no scheduler warns, and the lr after k real steps is schedule(k)."""
    model, optimizer = at.wrapped()
    scheduler = LambdaLR(optimizer.inner if on_inner else optimizer, lambda k: 0.5**k)
    real = seen_by(optimizer.inner)
    for step in range(5):
        overflow(optimizer) if step in (0, 2) else train(model, optimizer, [step])
        assert optimizer.last_step.skipped is (step in (0, 2))
        if not optimizer.last_step.skipped:
            scheduler.step()
        assert len(real) == optimizer.applied_steps
        assert [1e-2 * 0.5 ** len(real), 3e-3 * 0.5 ** len(real)] == rates(optimizer)
    assert (3, 2) == (optimizer.applied_steps, optimizer.skipped_steps)


@pytest.mark.parametrize("where", ["inner before wrapping", "inner", "wrapper"])
def test_learning_rate_that_is_set_is_the_one_used(where: str, at: Bench) -> None:
    """Case 13: by a scheduler of the inner optimizer or of the wrapper, or by hand: both sides have one value."""
    schedulers: list[LambdaLR] = []

    def scheduled(params: Any) -> torch.optim.Optimizer:
        schedulers.append(LambdaLR(momentum(params), lambda k: 1 / (k + 1)))
        return schedulers[-1].optimizer

    pair = at.pair(scheduled)
    if where != "inner before wrapping":
        target = pair.optimizer if where == "wrapper" else pair.optimizer.inner
        schedulers[0] = LambdaLR(target, lambda k: 1 / (k + 1))
    used = []
    for _ in range(3):
        pair.play(1.0)
        used.append(rates(pair.optimizer)[1])
        for scheduler in schedulers:
            scheduler.step()
        assert rates(pair.optimizer) == rates(pair.optimizer.inner) == rates(pair.bare)
    assert [3e-3, 3e-3 / 2, 3e-3 / 3] == used
    pair.optimizer.param_groups[0]["lr"] = pair.bare.param_groups[0]["lr"] = 0.5
    pair.play(1.0)
    assert rates(pair.optimizer.inner)[0] == 0.5


@pytest.mark.parametrize("make", [momentum, adamw])
def test_state_from_before_wrapping_follows_its_parameter(make: Factory, at: Bench) -> None:
    """Case 14: the moments of three fp32 steps count in the fourth, made after wrapping, as if nothing had happened."""
    (model, inner), (twin, bare) = fp32_twin(at.device, make), fp32_twin(at.device, make)
    for net, optimizer in [(model, inner), (twin, bare)] * 3:
        for param in net.parameters():
            param.grad = torch.ones_like(param) if param.requires_grad else None
        optimizer.step()
    pair = Pair(model, MixedPrecisionOptimizer(inner, model, dtype=at.dtype, loss_scale=8.0), twin, bare)
    assert set(pair.optimizer.state) == {param for param in model.parameters() if param.requires_grad}
    pair.check()
    pair.play(1.0, even=True)
    if make is momentum:
        buffer = pair.optimizer.state[model.norm.weight]["momentum_buffer"]
        assert float((buffer - 3.439).abs().max()) < CLOSED_FORM


def test_gradients_are_divided_exactly_once(at: Bench) -> None:
    """Case 23: ``unscale_`` twice raises and divides once; it may be called in vain; a short last window is legal."""
    pair = at.pair(momentum)
    pair.optimizer.backward(loss_of(pair.model, 0))
    pair.mirror()
    pair.optimizer.unscale_()
    with pytest.raises(StepOrderError, match=r"unscale_\(\) after unscale_\(\)"):
        pair.optimizer.unscale_()
    pair.step()

    pair.optimizer.backward(loss_of(pair.model, 0) * 4)
    pair.optimizer.unscale_()
    pair.optimizer.zero_grad()
    pair.play(1.0)

    for size in (4, 4, 2):
        for step in range(size):
            pair.optimizer.backward(loss_of(pair.model, step) / 4)
        pair.step()
    assert (5, 0) == (pair.optimizer.applied_steps, pair.optimizer.skipped_steps)


@pytest.mark.parametrize("name", MAKERS)
def test_wrapper_serves_whatever_serves_an_optimizer(name: str, at: Bench) -> None:
    """Case 30: every scheduler of torch, and hooks, defaults, state and repr, find a real optimizer."""
    pair = at.pair()
    schedulers = [MAKERS[name](optimizer) for optimizer in (pair.optimizer, pair.bare)]
    calls: list[str] = []
    pair.optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    pair.optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    for _ in range(3):
        pair.play(1.0)
        for scheduler in schedulers:
            scheduler.step(*([1.0] if isinstance(scheduler, ReduceLROnPlateau) else []))
    assert isinstance(pair.optimizer, torch.optim.Optimizer)
    assert ["pre", "post"] * 3 == calls
    assert pair.bare.defaults == pair.optimizer.defaults
    assert set(pair.optimizer.state) == {param for param in pair.model.parameters() if param.requires_grad}
    assert repr(pair.bare).split("\n", 1)[1] == repr(pair.optimizer).split("\n", 1)[1]  # every hyperparameter


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copy_is_refused_and_harms_nothing(how: Callable[[Any], Any], at: Bench) -> None:
    """Case 31: neither recursion nor a copy that has lost its fields: a ``TypeError`` with the remedy."""
    pair = at.pair()
    scheduler = StepLR(pair.optimizer, 1)
    pair.play(1.0, 0.5)
    before = snapshot(pair.model, pair.optimizer)
    for victim in (pair.optimizer, scheduler) if how is copy.deepcopy else (pair.optimizer,):
        with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* load this one's state_dict\(\)"):
            how(victim)
    assert_same(before, snapshot(pair.model, pair.optimizer))
    pair.play(1.0)


@pytest.mark.parametrize("make", [momentum, lbfgs])
@pytest.mark.parametrize("scale", [SMALL_SCALE, StaticLossScale(2.0**7)], ids=["dynamic", "static"])
def test_closure_is_scaled_and_judged(make: Factory, scale: Any, at: Bench) -> None:
    """Case 54: SGD's runs once, with gradients, and its loss comes back; LBFGS evaluates it until the loss is low."""
    model, optimizer = at.wrapped(make, loss_scale=scale)
    losses: list[Tensor] = []

    def closure(factor: float = 1.0) -> Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        loss = loss_of(model, 0) * factor
        optimizer.backward(loss)
        losses.append(loss.detach())
        return loss

    with torch.no_grad():
        assert torch.equal(optimizer.step(closure), losses[0])
    assert (len(losses) == 1) == (make is momentum)
    optimizer.step(closure)
    optimizer.step(closure)
    assert float(losses[-1]) < (0.99 if make is momentum else 0.5) * float(losses[0])
    before = kept(model, optimizer)
    optimizer.step(lambda: closure(INF))
    assert (3, 1) == (optimizer.applied_steps, optimizer.skipped_steps)
    assert_same(before, kept(model, optimizer))


@pytest.mark.slow
def test_compiled_inner_step_never_recompiles(at: Bench) -> None:
    """Case 67: with a tensor lr neither a schedule nor a skip compiles anew after the second step."""

    def tensor_lr(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        groups = [{**group, "lr": torch.tensor(group["lr"], device=at.device)} for group in groups]
        return torch.optim.AdamW(groups, capturable=at.device.type == "cuda")

    model, optimizer = at.wrapped(tensor_lr)
    tensors, graphs = rates(optimizer), []
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    optimizer.inner.step = torch.compile(optimizer.inner.step, backend="eager")
    scheduler = LambdaLR(optimizer, lambda k: 0.5**k)
    for step in range(6):
        overflow(optimizer) if step == 3 else train(model, optimizer, [step])
        if not optimizer.last_step.skipped:
            scheduler.step()
        graphs.append((counters["stats"]["unique_graphs"], counters["frames"]["total"]))
    assert (5, 1) == (optimizer.applied_steps, optimizer.skipped_steps)
    assert graphs[0][0] > 0
    assert graphs[2:] == [graphs[1]] * 4
    assert not counters["recompiles"]
    for now in (rates(optimizer), rates(optimizer.inner)):
        assert all(rate is tensor for rate, tensor in zip(now, tensors, strict=True))
    assert [1e-2 / 32, 3e-3 / 32] == pytest.approx([float(tensor) for tensor in tensors])


def test_addresses_stay_and_a_step_reads_the_host_once(at: Bench) -> None:
    """Case 68: S, masters and weights stay where they are over steps, a skip and a load; so does a CPU's flat gradient.

    A skip gives the flat gradient back, so that no inf stays in its padding; the eager tier is not captured.
    """
    model, optimizer = at.wrapped(momentum)
    grads: set[int] = set()
    first = next(master for _, master in optimizer.named_masters())
    optimizer.inner.register_step_pre_hook(lambda *_: grads.add(first.grad.data_ptr()))

    def addresses() -> list[int]:
        masters = [master for _, master in optimizer.named_masters()]
        return [t.data_ptr() for t in (*optimizer._tier.scaler.state.tensors(), *masters, *model.parameters())]

    train(model, optimizer, [0])  # the first step also copies the masters to the host
    before, saved = addresses(), copy.deepcopy(optimizer.state_dict())
    for step in range(6):
        optimizer.backward(loss_of(model, step) * (INF if step == 5 else 1.0))
        with HostReads(at.device) as reads:
            optimizer.step()
        assert reads.count == 1
    optimizer.load_state_dict(saved)
    assert before == addresses()
    assert len(grads) == 1 or at.device.type != "cpu"


def test_device_without_doubles_gets_none(at: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 71: where ``wide_dtype`` answers as for MPS, no operation of a step makes a double.

    The formulas also run on fake MPS tensors, with factors that fp32 does not hold.
    """
    counts = []
    for kind in (at.device, torch.device("mps")):
        wide = wide_dtype(kind)
        monkeypatch.setattr("mixedopt.gradients.wide_dtype", lambda _, wide=wide: wide)
        model, optimizer = at.wrapped(max_grad_norm=1e-2)
        with Doubles() as doubles:
            train(model, optimizer, [0, 1])
            overflow(optimizer)
        counts.append(doubles.count)
        assert (2, 1) == (optimizer.applied_steps, optimizer.skipped_steps)
    assert (counts[0] > 0, counts[1]) == (True, 0)

    monkeypatch.undo()
    if torch.backends.cuda.is_built():
        return  # such a build has no MPS, not even fake
    config = DynamicLossScale(growth_factor=1.1, backoff_factor=0.9)
    with FakeTensorMode(allow_non_fake_inputs=True), Doubles() as doubles:
        update(config, init_state(config, torch.device("mps")), torch.empty((), dtype=torch.bool, device="mps"))
        norm, inverse = exact_norm(torch.empty(5000, device="mps")), unscale_factor(torch.empty((), device="mps"))
        assert clip_factor(norm, inverse, 1.0).device.type == "mps"
    assert doubles.count == 0


# -- CL: clipping and the norm ----------------------------------------------------


@pytest.mark.parametrize("size", [300.0, 3e4])
def test_norm_is_taken_where_it_does_not_overflow(size: float, at: Bench) -> None:
    """Case 11: half gradients whose half norm is inf are clipped to the limit, not to zero."""
    one = plain([{"params": [vector(at.device, at.dtype, 1, 0.0)]}])
    options: dict[str, Any] = {"loss_scale": 1.0, "max_grad_norm": 1.0}
    for optimizer in (MixedPrecisionOptimizer(one, **options), at.wrapped(momentum, **options)[1]):
        seen = seen_by(optimizer.inner)
        force_grads(optimizer, size)
        grads = [p.grad.float() for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        optimizer.step()
        assert optimizer.last_step.grad_norm == pytest.approx(norm_of(grads), NORM_ERROR)
        assert norm_of(seen[0]) == pytest.approx(1.0, NORM_ERROR)


@pytest.mark.parametrize("way", ["max_grad_norm", "unscale_", "by hand"])
def test_clipping_works_on_unscaled_gradients(way: str, at: Bench) -> None:
    """Case 24: S=65536, norm 8, limit 1: ``max_grad_norm`` and clipped masters report 8 and move by 1.

    Clipping ``model.parameters()`` by hand moves by no more than 1/65536, as the README says; in fp16 torch even
    writes zeros, since its norm of the scaled gradients is inf.
    """
    limit = 1.0 if way == "max_grad_norm" else None
    model, optimizer = at.wrapped(momentum, loss_scale=2.0**16, max_grad_norm=limit)
    seen, masters = seen_by(optimizer.inner), [master for _, master in optimizer.named_masters()]
    force_grads(optimizer, 0.5)
    norm = None
    if way == "unscale_":
        optimizer.unscale_()
        norm = float(torch.nn.utils.clip_grad_norm_(masters, 1.0))
    elif way == "by hand":
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    if way == "by hand":
        clipped = 0.0 if at.dtype == torch.float16 else 1 / 65536
        assert norm_of(seen[0]) == pytest.approx(clipped, 0.01)
        assert "Do not clip `model.parameters()`" in (Path(__file__).parents[1] / "README.md").read_text("utf-8")
        return
    true = 0.5 * math.sqrt(sum(master.numel() for master in masters))
    assert (norm or optimizer.last_step.grad_norm) == pytest.approx(true, NORM_ERROR)
    assert norm_of(seen[0]) == pytest.approx(1.0, NORM_ERROR)


def test_overflow_is_judged_element_by_element(at: Bench) -> None:
    """Case 50: gradients that are finite, but whose half sum (in bf16 even their fp32 norm) is inf, are applied."""
    size = 6e4 if at.dtype == torch.float16 else 3e38
    assert not bool(torch.full((2,), size, dtype=at.dtype).sum(dtype=at.dtype).isfinite())
    pair = at.pair(lambda groups: torch.optim.SGD([{**group, "lr": 2.0**-128} for group in groups]), loss_scale=1.0)
    grads = [torch.full_like(p, size).double() for p in pair.model.parameters() if p.requires_grad]
    pair.play(size, even=True)
    assert pair.optimizer.last_step.applied
    assert pair.optimizer.last_step.grad_norm == pytest.approx(norm_of(grads), NORM_ERROR)


# -- UP: updates that low precision loses -----------------------------------------


def after(at: Bench, grads: Sequence[float], **hyper: float) -> tuple[Pair, Tensor]:
    """Return the two-group model, its norm in half too, after AdamW over constant gradients; and a master."""
    pair = at.pair(lambda groups: torch.optim.AdamW([{**g, **hyper} for g in groups]), policy=CastPolicy.none())
    pair.play(*grads, even=True)
    assert (len(grads), at.dtype) == (pair.optimizer.applied_steps, pair.model.norm.weight.dtype)
    return pair, masters_of(pair.optimizer)["norm.weight"]


def test_updates_under_half_an_ulp_add_up(at: Bench) -> None:
    """Case 33: a norm weight of one falls by lr a step, in 100 steps to 0.94 (0.98), though 1 - lr rounds to 1.0."""
    lr = 6e-4 if at.dtype == torch.bfloat16 else 2e-4
    pair, master = after(at, [0.5] * 100, lr=lr, weight_decay=0.0)
    assert float((master - (1 - 100 * lr)).abs().max()) < CLOSED_FORM
    assert float(pair.model.norm.weight.detach().max()) < 1 - 90 * lr
    assert at.rounded(1 - lr) == 1.0


def test_decay_under_half_an_ulp_adds_up(at: Bench) -> None:
    """Case 34: with zero gradients a weight of one decays to (1 - 1e-4)**100 = 0.99005 in 100 steps."""
    pair, master = after(at, [0.0] * 100, lr=1e-3, weight_decay=0.1)
    assert float((master - 0.99005).abs().max()) < CLOSED_FORM
    assert float(pair.model.norm.weight.detach().max()) < 1.0


def test_zero_gradients_do_not_divide_by_zero(at: Bench) -> None:
    """Case 35: three zero gradients move nothing, then three of 1e-5 move by about lr each, as in fp32."""
    pair, before = after(at, [0.0] * 3, lr=1e-3, weight_decay=0.0)
    assert [1.0] * 8 == before.tolist()
    pair.play(1e-5, 1e-5, 1e-5, even=True)
    fallen = before - masters_of(pair.optimizer)["norm.weight"]
    assert bool(((fallen > 1.5e-3) & (fallen < 3.5e-3)).all())  # under 3 lr: the first moment has seen three zeros


def test_sum_of_micro_steps_loses_nothing_in_fp32(at: Bench) -> None:
    """Case 49: with ``gradients="fp32"`` 512 micro-gradients sum to 512 times half(0.01), exactly."""
    model, optimizer = at.wrapped(plain, loss_scale=1.0, gradients="fp32")
    for _ in range(512):
        optimizer.backward(linear(model, 0.01))
    optimizer.unscale_()
    half = [master.grad for name, master in optimizer.named_masters() if "norm" not in name]
    assert all(bool((grad == 512 * at.rounded(0.01)).all()) for grad in half)


def test_counters_do_not_saturate(at: Bench, request: pytest.FixtureRequest) -> None:
    """Case 60: with a half default dtype the step count passes 256 (bf16) and 2048 (fp16); all else is as ever."""
    model, (twin, bare), default = two_group_model(at.device), fp32_twin(at.device, adamw), torch.get_default_dtype()
    request.addfinalizer(lambda: torch.set_default_dtype(default))
    torch.set_default_dtype(at.dtype)
    wrapper = MixedPrecisionOptimizer(adamw(two_groups(model)), model, dtype=at.dtype, loss_scale=SMALL_SCALE)
    Pair(model, wrapper, twin, bare).play(1.0, INF, 0.5)

    weight = vector(at.device, at.dtype)
    optimizer = MixedPrecisionOptimizer(torch.optim.Adam([weight], lr=1e-4), loss_scale=2.0)
    for step in range(300):
        force_grads(optimizer, 0.5)
        optimizer.step()
        if step == 270:
            optimizer.state[weight]["step"] += 2040 - 271
    assert (2040 + 29, 300) == (int(optimizer.state[weight]["step"]), optimizer.applied_steps)


# -- the list ---------------------------------------------------------------------

GROUPS = {
    "SC": (1, 7, 16, 17, 18, 32, 40, 46, 56, 58),
    "SK": (5, 9, 39),
    "MA": (6, 8, 25, 26, 27, 53),
    "API": (10, 13, 14, 23, 30, 31, 54, 67, 68, 71),
    "CL": (11, 24, 50),
    "UP": (33, 34, 35, 49, 60),
}


def test_every_case_of_these_groups_has_a_test() -> None:
    """A recipe without a test is a fault that can come back."""
    cases = [case for group in GROUPS.values() for case in group]
    assert len(cases) == 37
    assert set(cases) == stated(__file__, "Case")
