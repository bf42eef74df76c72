"""Gradients that do not wait in ``.grad``, and windows that lose bad micro-steps."""

from __future__ import annotations

import copy
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same, differs, loss_of, snapshot, train, two_group_model, vector, wrapped
from optimizers import BY_NAME
from torch import Tensor, nn
from twins import Setup, all_same_bits, differences, grid_step, masters_of, plans, random_step, same_bits, setups
from twins import snapshot as bits_of

from mixedopt import (
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    SharedLossScale,
    StaticLossScale,
    StepOrderError,
)

HELD = ["half", "fp32"]
START = 2.0**6
DYNAMIC = DynamicLossScale(init_scale=START)
# One rounding of a double to fp32, and those of the clip formula before it.
CLIP_ERROR = 2.0**-22
every_held = pytest.mark.parametrize("gradients", HELD)
every_holder = pytest.mark.parametrize("gradients", ["autograd", *HELD])
some_inner = st.sampled_from([BY_NAME[name] for name in ("sgd_momentum", "adamw_foreach", "adagrad")])


def mean(kept: int, total: int) -> float:
    """Return the factor that keeps a mean a mean."""
    return total / kept


DROP: dict[str, Any] = {"gradients": "fp32", "drop_bad_micro_steps": mean}


def sgd(params: Sequence[nn.Parameter], **options: Any) -> MixedPrecisionOptimizer:
    """Return SGD with a learning rate of 1: what moves is the gradient."""
    return MixedPrecisionOptimizer(torch.optim.SGD(params, lr=1.0), **{"loss_scale": START, **options})


def zeros(device: torch.device, dtype: torch.dtype, count: int = 2) -> list[nn.Parameter]:
    return [vector(device, dtype, value=0.0) for _ in range(count)]


def loss_with(params: Sequence[nn.Parameter], grads: Sequence[Tensor | float | None]) -> Tensor | None:
    """Return a loss with these gradients, ``None`` if there are none; autograd rounds S times them to each dtype."""
    terms = [(p.float() * g).sum() for p, g in zip(params, grads, strict=True) if g is not None]
    return torch.stack(terms).sum() if terms else None


def backward(optimizer: MixedPrecisionOptimizer, params: Sequence[nn.Parameter], *grads: Tensor | float | None) -> None:
    loss = loss_with(params, grads)
    if loss is not None:
        optimizer.backward(loss)


def moved(params: Sequence[nn.Parameter]) -> list[float]:
    """Return how far each parameter has moved down from zero."""
    assert all(bool((param == param.view(-1)[0]).all()) for param in params)
    return [-param.detach().view(-1)[0].item() + 0.0 for param in params]


# -- one micro-step ------------------------------------------------------------


@every_held
def test_each_gradient_is_gone_before_the_next_is_made(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """When the first layer's is finished, the last layer's memory is free; after backward there is none at all."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=START, gradients=gradients)
    seen: list[list[bool]] = []
    for param in model[0].parameters():
        param.register_hook(lambda _: seen.append([p.grad is None for p in model[2].parameters()]))
        param.register_post_accumulate_grad_hook(lambda p: seen.append([p.grad is None]))
    optimizer.backward(model(torch.ones(4, 3, device=device)).square().mean())
    assert [[True] * len(each) for each in seen] == seen
    assert 4 == len(seen)
    assert all(param.grad is None for param in model.parameters())
    before = [master.detach().clone() for master in masters_of(optimizer)]
    optimizer.step()
    assert all(not torch.equal(was, now) for was, now in zip(before, masters_of(optimizer), strict=True) if now.any())


@st.composite
def runs(draw: st.DrawFn) -> tuple[Any, Setup, list[list[int | None]], float | None, int | None]:
    """Draw an inner optimizer, parameters, the gradients of some steps, a limit, and a step that overflows."""
    inner = draw(some_inner)
    setup = draw(setups(inner))
    script = draw(st.lists(plans(inner, setup.count, -6, 3), min_size=1, max_size=3))
    return inner, setup, script, draw(st.sampled_from([None, 0.5])), draw(st.none() | st.integers(0, len(script) - 1))


@given(run=runs(), where=st.floats(0, 1), bad=st.sampled_from([math.inf, -math.inf, math.nan]))
def test_one_micro_step_gives_the_same_bits_whoever_holds_it(
    dtype: torch.dtype, device: torch.device, run: Any, where: float, bad: float
) -> None:
    """Any layout, tied, empty, kept in fp32, without gradient, clipped, overflowing: weights, state and reports."""
    inner, setup, script, limit, overflow = run
    built = {}
    for holder in ("autograd", *HELD):
        options = {"loss_scale": DYNAMIC, "max_grad_norm": limit, "gradients": holder}
        optimizer, params = built[holder] = setup.build(inner, dtype, device, **options)
        for n, plan in enumerate(script):
            grads = random_step(params, 97 * n, plan)
            if n == overflow:
                spoil_(grads, where, bad)
            backward(optimizer, params, *grads)
            assert holder == "autograd" or all(param.grad is None for param in params)
            optimizer.step()
    reference, _ = built["autograd"]
    for holder in HELD:
        optimizer, _ = built[holder]
        assert [] == differences(bits_of(reference), bits_of(optimizer))
        assert reference.loss_scale == optimizer.loss_scale
        assert reference.skipped_steps == optimizer.skipped_steps
        assert reference.last_step.reason == optimizer.last_step.reason
        assert same_bits(reference.last_step.grad_norm, optimizer.last_step.grad_norm)


def spoil_(grads: Sequence[Tensor | None], where: float, bad: float) -> bool:
    """Overwrite one element of one gradient; return False if there is none."""
    present = [grad for grad in grads if grad is not None and grad.numel()]
    if present:
        chosen = present[min(int(where * len(present)), len(present) - 1)]
        chosen[tuple(size - 1 for size in chosen.shape)] = bad
    return bool(present)


@every_held
def test_model_with_norms_ties_and_unused_layers_trains_the_same(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Through real layers: three steps equal those of ``gradients="autograd"``, bit for bit."""
    ours, optimizer = wrapped(device, dtype, gradients=gradients)
    theirs, reference = wrapped(device, dtype)
    before = snapshot(ours, optimizer)
    for model, each in ((ours, optimizer), (theirs, reference)):
        train(model, each, range(3))
    assert_same(snapshot(None, reference), snapshot(None, optimizer))
    assert_same(dict(theirs.state_dict()), dict(ours.state_dict()))
    assert differs(before, snapshot(ours, optimizer))


# -- several micro-steps -------------------------------------------------------


@pytest.mark.parametrize("gradients", ["fp32", "half", "autograd"])
def test_sum_of_512_micro_steps(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """In fp32 it is 512 times half(0.01), exactly; in half it stops where torch's own stops, bf16 at 4.0."""
    (param,) = params = zeros(device, dtype, 1)
    optimizer = sgd(params, loss_scale=1.0, gradients=gradients)
    alone = torch.zeros((), dtype=dtype)
    for _ in range(512):
        backward(optimizer, params, 0.01)
        alone += torch.tensor(0.01, dtype=dtype)
    optimizer.step()
    exact = 512 * torch.tensor(0.01, dtype=dtype).item()
    expected = exact if gradients == "fp32" else alone.item()
    assert [-expected] * 2 == masters_of(optimizer)[0].tolist()
    assert exact != alone.item()
    assert (4.0 if dtype == torch.bfloat16 else 5.21484375) == alone.item()
    assert torch.equal(masters_of(optimizer)[0].to(dtype), param)


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_micro_steps_in_half_equal_those_of_autograd(
    dtype: torch.dtype, device: torch.device, data: st.DataObject, seed: int
) -> None:
    """Sums of two to four micro-steps, each parameter in some of them: the same roundings, bit for bit."""
    inner = data.draw(some_inner)
    setup = data.draw(setups(inner))
    script = data.draw(st.lists(plans(inner, setup.count, -6, 3), min_size=2, max_size=4))
    built = []
    for holder in ("autograd", "half"):
        optimizer, params = setup.build(inner, dtype, device, loss_scale=DYNAMIC, gradients=holder)
        for n, plan in enumerate(script):
            backward(optimizer, params, *random_step(params, seed + 97 * n, plan))
        optimizer.step()
        built.append(optimizer)
    assert [] == differences(*(bits_of(optimizer) for optimizer in built))


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_micro_steps_in_fp32_equal_a_bare_optimizer_fed_their_sum(
    dtype: torch.dtype, device: torch.device, data: st.DataObject, seed: int
) -> None:
    """Each micro-step is rounded once to half, as it comes; their fp32 sum is rounded by nobody."""
    inner = data.draw(some_inner)
    setup = data.draw(setups(inner))
    script = data.draw(st.lists(plans(inner, setup.count, -3, 3), min_size=1, max_size=4))
    optimizer, params = setup.build(inner, dtype, device, loss_scale=DYNAMIC, gradients="fp32")
    bare, theirs = setup.build_bare(inner, dtype, device)
    for n, plan in enumerate(script):
        grads = random_step(params, seed + 97 * n, plan)
        backward(optimizer, params, *grads)
        add_(theirs, params, grads)
    optimizer.step()
    if any(param.grad is not None for param in theirs):
        bare.step()
    assert all_same_bits(theirs, masters_of(optimizer))


def add_(
    theirs: Sequence[nn.Parameter], ours: Sequence[nn.Parameter], grads: Sequence[Tensor | None], scale: float = START
) -> None:
    """Add one micro-step, scaled, rounded as the wrapper's is and divided by S, to fp32 gradients."""
    for param, own, grad in zip(theirs, ours, grads, strict=True):
        if grad is not None:
            rounded = torch.empty_like(param).copy_((grad * scale).to(own.dtype).float() / scale)
            param.grad = rounded if param.grad is None else param.grad + rounded


@pytest.mark.parametrize("options", [{"gradients": "fp32"}, DROP], ids=["fp32", "droppable"])
def test_micro_steps_under_different_scales_sum_exactly(
    options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Another optimizer of a shared scale makes S grow and back off inside the window; 1 + 2 + 4 + 8 stays 15."""
    params = zeros(device, dtype)
    shared = SharedLossScale(DynamicLossScale(init_scale=START, growth_interval=1))
    waiting, stepping = (sgd([param], loss_scale=shared, **options) for param in params)
    scales = []
    for n, factor in enumerate((1.0, math.inf, 1.0, 1.0)):
        backward(waiting, params, 2.0**n, factor)
        scales.append(shared.loss_scale)
        shared.step(stepping)
    assert [START, START * 2, START, START * 2] == scales
    shared.step(waiting)
    assert [15.0, 3.0] == moved(params)


@pytest.mark.parametrize("gradients", ["autograd", "half"])
def test_half_sums_under_different_scales_are_refused(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """They cannot follow S without rounding: an error, nothing applied, and ``zero_grad`` mends it."""
    params = zeros(device, dtype)
    shared = SharedLossScale(DynamicLossScale(init_scale=START, growth_interval=1))
    waiting, stepping = (sgd([param], loss_scale=shared, gradients=gradients) for param in params)
    backward(waiting, params, 1.0, 1.0)
    shared.step(stepping)
    backward(waiting, params, 1.0, None)
    with pytest.raises(StepOrderError, match="before the shared loss scale moved"):
        shared.step(waiting)
    assert [0.0, 1.0] == moved(params)
    waiting.zero_grad()
    backward(waiting, params, 4.0, None)
    shared.step(waiting)
    assert [4.0, 1.0] == moved(params)


@pytest.mark.parametrize("options", [{"gradients": "half"}, {"gradients": "fp32"}, DROP], ids=[*HELD, "droppable"])
def test_gradient_written_by_hand_joins_the_sum(
    options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """In ``.grad``, scaled, before or after a backward, or alone."""
    params = zeros(device, dtype)
    optimizer = sgd(params, **options)
    backward(optimizer, params, 1.0, None)
    params[0].grad = torch.full_like(params[0], 2.0 * START)
    params[1].grad = torch.full_like(params[1], 8.0 * START)
    optimizer.step()
    assert [3.0, 8.0] == moved(params)
    params[0].grad = torch.full_like(params[0], 2.0 * START)
    backward(optimizer, params, 1.0, None)
    optimizer.step()
    assert [6.0, 8.0] == moved(params)
    assert all(param.grad is None for param in params)


@pytest.mark.parametrize("options", [{"gradients": "half"}, {"gradients": "fp32"}, DROP], ids=[*HELD, "droppable"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_what_is_held(
    options: dict[str, Any], set_to_none: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Finite or not, after one micro-step or two, unscaled or not; then a step moves nothing.

    ``set_to_none=False`` leaves zeros, as for gradients that wait in ``.grad``, unless they are droppable or unscaled.
    """
    params = zeros(device, dtype)
    optimizer = sgd(params, **options)
    for unscaled in (False, True):
        for factor in (1.0, math.inf):
            backward(optimizer, params, factor, 1.0)
        if unscaled:
            optimizer.unscale_()
        optimizer.zero_grad(set_to_none)
        optimizer.step()
        zeros_left = not (set_to_none or unscaled or options is DROP)
        assert (None if zeros_left else "no gradients", START) == (optimizer.last_step.reason, optimizer.loss_scale)
    backward(optimizer, params, 1.0, None)
    optimizer.step()
    assert [1.0, 0.0] == moved(params)


# -- between backward and step -------------------------------------------------


@every_held
def test_unscaled_gradients_may_be_read_and_edited(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """fp32, divided by S, in the masters' ``.grad``: in place, replaced, given and taken away, edits count."""
    params = zeros(device, dtype, 4)
    optimizer = sgd(params, gradients=gradients)
    for _ in range(2):
        backward(optimizer, params, 1.0, 2.0, 3.0, None)
    optimizer.unscale_()
    masters = masters_of(optimizer)
    shown = [None if master.grad is None else master.grad.tolist() for master in masters]
    assert [[2.0] * 2, [4.0] * 2, [6.0] * 2, None] == shown
    assert all(master.grad.dtype == torch.float32 for master in masters[:3])
    masters[0].grad.mul_(8.0)
    masters[1].grad = torch.full_like(masters[1], 5.0)
    masters[2].grad = None
    masters[3].grad = torch.full_like(masters[3], 7.0)
    optimizer.step()
    assert [16.0, 5.0, 0.0, 7.0] == moved(params)
    backward(optimizer, params, 1.0, None, None, None)
    optimizer.unscale_()
    with pytest.raises(StepOrderError, match="after unscale_"):
        optimizer.unscale_()


@every_held
def test_plain_backward_after_unscale_is_refused_and_corrupts_nothing(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Its gradients have another unit: weights, masters, state and S stay, and ``zero_grad`` mends it."""
    model, optimizer = wrapped(device, dtype, gradients=gradients)
    train(model, optimizer, range(2))
    before = snapshot(model, optimizer)
    optimizer.backward(loss_of(model, 2))
    optimizer.unscale_()
    with pytest.raises(StepOrderError, match=r"after unscale_\(\)"):
        optimizer.backward(loss_of(model, 2))
    loss_of(model, 2).backward()
    with pytest.raises(StepOrderError, match=r"after unscale_\(\)"):
        optimizer.step()
    optimizer.zero_grad()
    assert_same(before, snapshot(model, optimizer))
    theirs, reference = wrapped(device, dtype, gradients=gradients)
    train(theirs, reference, range(2))
    for each, other in ((model, optimizer), (theirs, reference)):
        train(each, other, range(2, 4))
    assert_same(snapshot(None, reference), snapshot(None, optimizer))


@pytest.mark.parametrize("options", [{"gradients": "half"}, {"gradients": "fp32"}, DROP], ids=[*HELD, "droppable"])
def test_state_dict_inside_the_window_is_refused(
    options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """It would lose what is held, though every ``.grad`` is ``None``; between steps it works."""
    model, optimizer = wrapped(device, dtype, **options)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.backward(loss_of(model, 0))
    for _ in range(2):
        with pytest.raises(StepOrderError, match=r"state_dict\(\) inside a window"):
            optimizer.state_dict()
        with pytest.raises(StepOrderError, match=r"load_state_dict\(\) inside a window"):
            optimizer.load_state_dict(saved)
        optimizer.backward(loss_of(model, 1))
    optimizer.zero_grad()
    assert_same(saved, copy.deepcopy(optimizer.state_dict()))
    optimizer.load_state_dict(saved)
    train(model, optimizer, range(1))
    assert differs(saved, optimizer.state_dict())


LATE = [{"gradients": "half"}, {"gradients": "fp32"}, DROP]


@pytest.mark.parametrize("options", LATE, ids=[*HELD, "droppable"])
def test_parameters_may_join_inside_a_window(options: dict[str, Any], device: torch.device, dtype: torch.dtype) -> None:
    """``add_param_group`` between micro-steps: the sum so far stays, the new one holds its own from then on."""
    params = zeros(device, dtype)
    optimizer = sgd(params[:1], **options)
    for _ in range(2):
        backward(optimizer, params, 1.0, None)
    optimizer.add_param_group({"params": [params[1]], "lr": 1.0})
    backward(optimizer, params, 1.0, 4.0)
    assert all(param.grad is None for param in params)
    backward(optimizer, params, None, 8.0)
    optimizer.step()
    assert [3.0, 12.0] == moved(params)


@pytest.mark.parametrize("options", LATE, ids=[*HELD, "droppable"])
def test_parameter_may_be_unfrozen_inside_a_window(
    options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Its first gradients wait in ``.grad`` until the step makes its master; then it is held as well."""
    params = zeros(device, dtype)
    params[1].requires_grad_(False)
    optimizer = sgd(params, **options)
    backward(optimizer, params, 1.0, None)
    params[1].requires_grad_(True)
    for _ in range(2):
        backward(optimizer, params, 1.0, 4.0)
    optimizer.step()
    assert [3.0, 8.0] == moved(params)
    backward(optimizer, params, 1.0, 4.0)
    assert all(param.grad is None for param in params)
    optimizer.step()
    assert [4.0, 12.0] == moved(params)


@every_held
def test_without_the_optimizer_gradients_stay_in_the_model(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """The hooks keep no store alive, and take nothing when it is gone."""
    model, optimizer = wrapped(device, dtype, gradients=gradients)
    optimizer.backward(loss_of(model, 0))
    assert all(param.grad is None for param in model.parameters())
    del optimizer
    gc.collect()
    loss_of(model, 0, use_branch=True).backward()
    assert all((param.grad is not None) == param.requires_grad for param in model.parameters())


@every_held
def test_remove_takes_the_hooks_away(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """The fp32 model keeps its gradients again, none of the old ones, and the inner optimizer trains on."""
    model, optimizer = wrapped(device, dtype, gradients=gradients)
    optimizer.backward(loss_of(model, 0))
    optimizer.policy_handle.remove()
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())
    assert all(param.grad is None for param in model.parameters())
    loss_of(model, 1, use_branch=True).backward()
    assert all((param.grad is not None) == param.requires_grad for param in model.parameters())
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer.inner.step()
    assert all(differs(before[name], p.detach()) == p.requires_grad for name, p in model.named_parameters())


def test_holder_must_be_known(device: torch.device, dtype: torch.dtype) -> None:
    """An unknown name is refused before anything changes."""
    params = zeros(device, dtype)
    for wrong in ("full", "float32", None, torch.float32):
        with pytest.raises(ValueError, match=r"gradients=.*must be 'autograd' or 'half' or 'fp32'"):
            sgd(params, gradients=wrong)
    assert not any(param._post_accumulate_grad_hooks for param in params)
    sgd(params)


# -- bad micro-steps, dropped alone --------------------------------------------


def has_values(setup: Setup) -> bool:
    return any("empty" not in kind for group in setup.kinds for kind in group)


@given(
    data=st.data(), where=st.floats(0, 1), bad=st.sampled_from([math.inf, -math.inf, math.nan]), seed=st.integers(0, 99)
)
def test_window_is_the_sum_of_its_good_micro_steps_times_the_factor(
    dtype: torch.dtype, device: torch.device, data: st.DataObject, where: float, bad: float, seed: int
) -> None:
    """Any layout, any micro-steps bad: equal to a bare AdamW that was fed that sum, bit for bit, over two windows."""
    inner = data.draw(some_inner)
    setup = data.draw(setups(inner).filter(has_values))
    windows = data.draw(
        st.lists(st.lists(st.tuples(st.booleans(), plans(inner, setup.count, -3, 3)), max_size=4), max_size=2)
    )
    told: list[tuple[int, int]] = []
    rule = recorder(told)
    optimizer, params = setup.build(inner, dtype, device, loss_scale=DYNAMIC, **{**DROP, "drop_bad_micro_steps": rule})
    bare, theirs = setup.build_bare(inner, dtype, device)
    for window in windows:
        scale, before, kept, total = optimizer.loss_scale, bits_of(optimizer), 0, 0
        told.clear()
        for n, (is_bad, plan) in enumerate(window):
            grads = random_step(params, seed + 97 * n, plan)
            is_bad = is_bad and spoil_(grads, where, bad)
            backward(optimizer, params, *grads)
            if any(grad is not None for grad in grads):
                total, kept = total + 1, kept + (not is_bad)
                if not is_bad:
                    add_(theirs, params, grads, scale)
        optimizer.step()
        assert total - kept == optimizer.last_step.dropped_micro_steps
        assert (scale / 2 if kept < total else scale) == optimizer.loss_scale
        assert (bool(kept), bool(total and not kept)) == (optimizer.last_step.applied, optimizer.last_step.skipped)
        assert ([(kept, total)] if 0 < kept < total else []) == told
        if kept:
            if kept < total:
                multiply_(theirs, torch.tensor(mean(kept, total)).item())
            bare.step()
            bare.zero_grad()
        elif total:
            assert [] == differences(before, bits_of(optimizer))
        assert all_same_bits(theirs, masters_of(optimizer))


@pytest.mark.parametrize("options", [DROP, {}], ids=["droppable", "unscaled"])
def test_window_without_a_single_value_is_good(
    options: dict[str, Any], device: torch.device, dtype: torch.dtype
) -> None:
    """Only an empty parameter: dropped micro-steps and ``unscale_`` look for an inf in nothing, and find none."""
    param = nn.Parameter(torch.ones(0, 3, device=device, dtype=dtype))
    optimizer = sgd([param], **options)
    backward(optimizer, [param], 1.0)
    if not options:
        optimizer.unscale_()
    optimizer.step()
    assert optimizer.last_step.applied


def recorder(told: list[tuple[int, int]]) -> Callable[[int, int], float]:
    """Return the rule of a mean, which notes what it was asked."""

    def rule(kept: int, total: int) -> float:
        told.append((kept, total))
        return mean(kept, total)

    return rule


def multiply_(params: Sequence[nn.Parameter], factor: float) -> None:
    for param in params:
        if param.grad is not None:
            param.grad.mul_(factor)


@given(data=st.data(), seed=st.integers(0, 2**16))
def test_window_without_bad_micro_steps_equals_the_option_off(
    dtype: torch.dtype, device: torch.device, data: st.DataObject, seed: int
) -> None:
    """One to four good micro-steps, clipped or not: the rule is never asked, every bit and report is the same."""
    inner = data.draw(some_inner)
    setup = data.draw(setups(inner).filter(has_values))
    script = data.draw(st.lists(plans(inner, setup.count), min_size=1, max_size=4))
    limit = data.draw(st.sampled_from([None, 0.5]))
    built = []
    for options in ({"gradients": "fp32"}, {**DROP, "drop_bad_micro_steps": pytest.fail}):
        optimizer, params = setup.build(inner, dtype, device, loss_scale=DYNAMIC, max_grad_norm=limit, **options)
        for n, plan in enumerate(script):
            backward(optimizer, params, *grid_step(params, seed + 97 * n, plan))
        optimizer.step()
        built.append(optimizer)
    assert [] == differences(*(bits_of(optimizer) for optimizer in built))
    assert built[0].last_step.grad_norm == built[1].last_step.grad_norm
    assert 0 == built[1].last_step.dropped_micro_steps


def test_parameter_with_gradients_in_the_bad_micro_step_alone_has_none(
    device: torch.device, dtype: torch.dtype
) -> None:
    """AdamW does not touch it: no decay, no moment, no count; the others are renormalised."""
    params = zeros(device, dtype, 3)
    inner = torch.optim.AdamW(params, lr=0.1, weight_decay=0.5)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=DYNAMIC, **DROP)
    backward(optimizer, params, 1.0, 1.0, None)
    optimizer.step()
    masters = masters_of(optimizer)
    before = [copy.deepcopy((master.detach(), inner.state.get(master))) for master in masters]
    backward(optimizer, params, 1.0, None, None)
    backward(optimizer, params, math.inf, 1.0, 1.0)
    optimizer.step()
    assert (True, 1) == (optimizer.last_step.applied, optimizer.last_step.dropped_micro_steps)
    assert "dropped_micro_steps=1" in repr(optimizer.last_step)
    after = [(master.detach(), inner.state.get(master)) for master in masters]
    assert_same(before[1:], after[1:])
    assert differs(before[0], after[0])
    assert [2.0, 1.0] == [inner.state[master]["step"].item() for master in masters[:2]]
    assert masters[2] not in inner.state


def test_bad_micro_step_of_four_is_left_out_and_the_rest_renormalised(device: torch.device, dtype: torch.dtype) -> None:
    """At any place: 1 + 2 + 4 + 8 without one of them, times 4/3 rounded to fp32; S backs off once."""
    for position in range(4):
        params = zeros(device, dtype, 1)
        optimizer = sgd(params, loss_scale=DYNAMIC, **DROP)
        for n in range(4):
            backward(optimizer, params, math.nan if n == position else 2.0**n)
        optimizer.step()
        expected = torch.tensor(15.0 - 2.0**position) * torch.tensor(4 / 3)
        assert [-expected.item()] * 2 == masters_of(optimizer)[0].tolist()
        assert (1, 0, START / 2) == (optimizer.applied_steps, optimizer.skipped_steps, optimizer.loss_scale)
        assert 1 == optimizer.last_step.dropped_micro_steps


@pytest.mark.parametrize("unscaled", [False, True])
def test_window_of_bad_micro_steps_alone_skips(unscaled: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Everything is bit-identical, S backs off once, the rule is not asked; the next window is as any other."""
    model, optimizer = wrapped(device, dtype, **{**DROP, "drop_bad_micro_steps": pytest.fail})
    train(model, optimizer, range(2))
    before, scale = snapshot(model, optimizer), optimizer.loss_scale
    for step in range(3):
        optimizer.backward(loss_of(model, step) * math.inf)
    if unscaled:
        optimizer.unscale_()
    optimizer.step()
    after = snapshot(model, optimizer)
    assert (scale, scale / 2) == (before.pop("scale"), after.pop("scale"))
    assert ((2, 0), (2, 1)) == (before.pop("counters"), after.pop("counters"))
    assert_same(before, after)
    assert (True, 3) == (optimizer.last_step.skipped, optimizer.last_step.dropped_micro_steps)
    train(model, optimizer, range(2, 3))
    assert (True, 0) == (optimizer.last_step.applied, optimizer.last_step.dropped_micro_steps)


def test_unscaled_gradients_are_renormalised_before_they_are_shown(device: torch.device, dtype: torch.dtype) -> None:
    """``unscale_`` and the clip see the sum of the good ones times the factor; S backs off at the step."""
    params = zeros(device, dtype, 1)
    optimizer = sgd(params, loss_scale=DYNAMIC, max_grad_norm=6.0, **DROP)
    for factor in (3.0, math.inf):
        backward(optimizer, params, factor)
    optimizer.unscale_()
    assert [6.0, 6.0] == masters_of(optimizer)[0].grad.tolist()
    assert START == optimizer.loss_scale
    optimizer.step()
    assert (START / 2, 1) == (optimizer.loss_scale, optimizer.last_step.dropped_micro_steps)
    norm = 6.0 * math.sqrt(2)
    assert abs(norm - optimizer.last_step.grad_norm) <= CLIP_ERROR * norm
    assert abs(6.0 / math.sqrt(2) + masters_of(optimizer)[0][0].item()) <= CLIP_ERROR * norm


def test_dropped_micro_steps_are_no_skips_at_the_floor(device: torch.device, dtype: torch.dtype) -> None:
    """Windows that are applied never add up to ``LossScaleError``; those that are skipped do."""
    params = zeros(device, dtype, 1)
    optimizer = sgd(params, loss_scale=StaticLossScale(START, max_consecutive_skips=2), **DROP)
    for _ in range(4):
        backward(optimizer, params, math.inf)
        backward(optimizer, params, 1.0)
        optimizer.step()
        assert optimizer.last_step.applied
    assert [8.0] == moved(params)
    backward(optimizer, params, math.inf)
    optimizer.step()
    backward(optimizer, params, math.inf)
    with pytest.raises(LossScaleError, match="2 skips in a row"):
        optimizer.step()
    assert [8.0] == moved(params)


def test_error_after_windows_of_bad_micro_steps_names_the_culprit(device: torch.device, dtype: torch.dtype) -> None:
    """As without the option: the first parameter with an inf or NaN."""
    params = zeros(device, dtype)
    optimizer = sgd(params, loss_scale=StaticLossScale(START, max_consecutive_skips=1), **DROP)
    backward(optimizer, params, 1.0, math.inf)
    with pytest.raises(LossScaleError, match=r"'group0\.param1'"):
        optimizer.step()


NO_FACTOR = [0.0, -1.0, math.inf, math.nan]


@pytest.mark.parametrize("nonsense", [*NO_FACTOR, None])
def test_rule_that_returns_no_factor_is_refused_before_anything_is_written(
    nonsense: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """The message says for what it was asked; weights, state and S stay; ``zero_grad`` drops the window."""
    model, optimizer = wrapped(device, dtype, **{**DROP, "drop_bad_micro_steps": lambda kept, total: nonsense})
    before = snapshot(model, optimizer)
    for call in (optimizer.step, optimizer.unscale_):
        for factor in (1.0, math.inf):
            optimizer.backward(loss_of(model, 0) * factor)
        with pytest.raises(ValueError, match=r"drop_bad_micro_steps\(1, 2\) returned .*positive finite factor"):
            call()
        optimizer.zero_grad()
        assert_same(before, snapshot(model, optimizer))
    train(model, optimizer, range(1))
    assert optimizer.last_step.applied


def test_rule_must_be_a_function_and_needs_the_sum_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """Both are checked before anything changes."""
    model = two_group_model(device)
    inner = torch.optim.AdamW(model.parameters())
    before = snapshot(model, inner)
    for gradients in ("autograd", "half"):
        with pytest.raises(ValueError, match=r"needs the sum in fp32\. Pass gradients='fp32'"):
            MixedPrecisionOptimizer(inner, model, dtype=dtype, gradients=gradients, drop_bad_micro_steps=mean)
    for wrong in (True, 2.0, "mean"):
        with pytest.raises(TypeError, match=r"must be a function of \(kept, total\)"):
            MixedPrecisionOptimizer(inner, model, dtype=dtype, gradients="fp32", drop_bad_micro_steps=wrong)
    assert_same(before, snapshot(model, inner))
    assert not any(param._post_accumulate_grad_hooks for param in model.parameters())


@pytest.mark.parametrize("tier", ["eager", "compiled"])
def test_sparse_gradients_are_stepped_too(tier: str, device: torch.device, dtype: torch.dtype) -> None:
    """They stay in ``.grad``, and no tier forgets them."""
    table = nn.Embedding(5, 4, sparse=True, device=device).to(dtype)
    nn.init.ones_(table.weight)
    inner = torch.optim.SGD(table.parameters(), lr=1.0)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0, gradients="half", tier=tier)
    optimizer.backward(table(torch.tensor([1, 3], device=device)).float().sum())
    optimizer.step()
    assert table.weight[1].tolist() == [0.0] * 4
    assert table.weight[0].tolist() == [1.0] * 4


@every_held
def test_parameters_whose_gradients_share_memory_sum_apart(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Autograd gives views of one tensor to both; what is added to one is not added to the other."""
    one, other = (nn.Parameter(torch.ones(2, 2, device=device, dtype=dtype)) for _ in range(2))
    optimizer = sgd([one, other], gradients=gradients)
    for _ in range(2):
        optimizer.backward((one.view(4) + other.view(4)).float().sum())
    optimizer.step()
    assert one.flatten().tolist() == other.flatten().tolist() == [-1.0] * 4


@every_held
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
def test_no_graph_of_a_gradient_is_kept(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """``create_graph=True`` makes gradients that have a graph of their own: it is not held."""
    masters = []
    for graph in (False, True):
        params = zeros(device, dtype)
        optimizer = sgd(params, gradients=gradients)
        for _ in range(2):  # the first is kept, the second is added
            optimizer.backward(sum((p.float() + 1).square().sum() for p in params), create_graph=graph)
            held = [grad for _, mine in optimizer._tier.window.plain_stores() or () for grad in mine]
            assert len(held) == len(params)
            assert not any(grad.requires_grad for grad in held)
        optimizer.step()
        assert optimizer.last_step.applied
        masters.append(masters_of(optimizer))
    assert_same(masters[0], masters[1])
