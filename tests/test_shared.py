"""One loss scale for several optimizers: on one model, on a GAN, with losses in any number."""

from __future__ import annotations

import gc
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same, differs, loss_of, seeded, snapshot, through_file, two_group_model, vector
from torch import Tensor, nn

from mixedopt import (
    CastPolicy,
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    SharedLossScale,
    StaticLossScale,
    StepOrderError,
)

Pair = tuple[MixedPrecisionOptimizer, MixedPrecisionOptimizer]
# Low enough that no gradient of the shared model overflows.
START = 2.0**5
DYNAMIC = DynamicLossScale(init_scale=START)
GROWING = DynamicLossScale(init_scale=START, growth_interval=1)
# Two backward passes through two half layers: a few roundings of 2**-11 and 2**-8.
PENALTY_ERROR = {torch.float16: 2.0**-7, torch.bfloat16: 2.0**-4}
both_skips = pytest.mark.parametrize("skip", ["all", "own"])


def muon_and_adamw(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Return Muon over the trained matrices and AdamW over the rest."""
    trained = [param for param in model.parameters() if param.requires_grad]
    matrices, rest = [p for p in trained if p.ndim == 2], [p for p in trained if p.ndim != 2]
    return [torch.optim.Muon(matrices, lr=1e-2), torch.optim.AdamW(rest, lr=1e-2)]


def two_on_one(
    device: torch.device, dtype: torch.dtype, config: Any = DYNAMIC, skip: str = "all", **options: Any
) -> tuple[nn.Module, SharedLossScale, Pair]:
    """Return the two-group model with two wrappers, and their scale."""
    model, shared = two_group_model(device), SharedLossScale(config, skip)
    inners = muon_and_adamw(model)
    first, second = (MixedPrecisionOptimizer(i, model, dtype=dtype, loss_scale=shared, **options) for i in inners)
    return model, shared, (first, second)


def two_vectors(device: torch.device, dtype: torch.dtype, config: Any, skip: str = "all", **options: Any) -> Any:
    """Return two parameters, their SGD wrappers with a learning rate of 1, and the scale."""
    shared, params = SharedLossScale(config, skip), [vector(device, dtype, value=0.0) for _ in range(2)]
    sgd = [torch.optim.SGD([param], lr=1.0) for param in params]
    return params, [MixedPrecisionOptimizer(each, loss_scale=shared, **options) for each in sgd], shared


def train(model: nn.Module, shared: SharedLossScale, both: Pair, steps: range) -> None:
    for step in steps:
        both[0].backward(loss_of(model, step, use_branch=step % 2 == 0))
        shared.step(*both)


def feed_(twin: nn.Module, model: nn.Module, scale: float) -> None:
    """Give the fp32 twin the model's half gradients, divided by S."""
    for param, copy in zip(model.parameters(), twin.parameters(), strict=True):
        copy.grad = None if param.grad is None else param.grad.float() / scale


def masters_of(*optimizers: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    return {name: m.detach().clone() for optimizer in optimizers for name, m in optimizer.named_masters()}


def state_of(model: nn.Module | None, *optimizers: MixedPrecisionOptimizer) -> list[Any]:
    """Return copies of all that a skip must leave: weights, masters, inner state, groups."""
    taken = [snapshot(model, optimizer) for optimizer in optimizers]
    return [{k: v for k, v in each.items() if k not in ("scale", "counters", "grads")} for each in taken]


def poison_(optimizer: MixedPrecisionOptimizer, value: float = math.inf) -> str:
    """Overwrite one element of the optimizer's last gradient; return the parameter's name."""
    names = [name for name, _ in optimizer.named_masters()]
    params = [param for group in optimizer.param_groups for param in group["params"]]
    name, param = [(n, p) for n, p in zip(names, params, strict=True) if p.grad is not None][-1]
    param.grad.view(-1)[-1] = value
    return name


# -- two optimizers on one model -----------------------------------------------


def test_masters_of_both_equal_those_of_bare_optimizers_bit_for_bit(device: torch.device, dtype: torch.dtype) -> None:
    """Muon for matrices and AdamW for the rest do what they do bare in fp32, while S grows."""
    model, shared, both = two_on_one(device, dtype, DynamicLossScale(init_scale=START, growth_interval=2))
    twin = two_group_model(device)
    bare = muon_and_adamw(twin)
    start = masters_of(*both)
    for step in range(5):
        both[step % 2].backward(loss_of(model, step, use_branch=step % 2 == 0))
        feed_(twin, model, shared.loss_scale)
        shared.step(*both)
        for inner in bare:
            inner.step()
        expected = {name: param.detach() for name, param in twin.named_parameters() if param.requires_grad}
        assert_same(expected, masters_of(*both))
        halves = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
        assert_same({name: value.to(halves[name].dtype) for name, value in expected.items()}, halves)
    assert START * 4 == shared.loss_scale == both[0].loss_scale == both[1].loss_scale
    assert all(differs(start[name], value) for name, value in masters_of(*both).items())


def test_masters_of_the_second_wrapper_start_from_the_exact_fp32_weights(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Not from the halves that the first wrapper has made of them; the handle is one."""
    model, _, (first, second) = two_on_one(device, dtype)
    original = dict(two_group_model(device).named_parameters())
    for optimizer in (first, second):
        for name, master in optimizer.named_masters():
            assert torch.equal(original[name], master)
    assert any(not torch.equal(m, m.to(dtype).float()) for _, m in second.named_masters())
    assert first.policy_handle is second.policy_handle
    assert {dtype, torch.float32} == {param.dtype for param in model.parameters()}


def test_first_step_frees_the_fp32_weights_that_nobody_asked_for(device: torch.device, dtype: torch.dtype) -> None:
    """They wait for a second wrapper until then, and no longer."""
    model, shared = two_group_model(device), SharedLossScale(DYNAMIC)
    first = MixedPrecisionOptimizer(muon_and_adamw(model)[0], model, dtype=dtype, loss_scale=shared)
    first.backward(loss_of(model, 0))
    shared.step(first)
    assert all(first.policy_handle.original(param) is None for param in model.parameters())


def test_remove_returns_the_model_and_both_inner_optimizers(device: torch.device, dtype: torch.dtype) -> None:
    """The model is fp32 with the masters' values, and bare training goes on from there."""
    model, shared, both = two_on_one(device, dtype)
    train(model, shared, both, range(2))
    expected = masters_of(*both)
    both[1].policy_handle.remove()
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert_same(expected, {name: param.detach() for name, param in trained.items()})
    held = {param for optimizer in both for group in optimizer.inner.param_groups for param in group["params"]}
    assert held == set(trained.values())
    assert {torch.float32} == {param.dtype for param in model.parameters()}
    loss_of(model, 2, use_branch=True).backward()
    for optimizer in both:
        optimizer.inner.step()
        with pytest.raises(StepOrderError, match="removed"):
            optimizer.backward(loss_of(model, 2))
    assert all(differs(expected[name], param.detach()) for name, param in trained.items())
    with pytest.raises(StepOrderError, match="removed"):
        shared.step(*both)


def test_both_resume_exactly_from_their_state_dicts(device: torch.device, dtype: torch.dtype) -> None:
    """Cut after three steps, with S and its tracker in mid-interval: the rest is the uncut run, bit for bit."""
    config = DynamicLossScale(init_scale=START, growth_interval=4)
    model, shared, both = two_on_one(device, dtype, config)
    train(model, shared, both, range(3))
    saved = [through_file(optimizer.state_dict()) for optimizer in both]
    other, resumed, theirs = two_on_one(device, dtype, config)
    for optimizer, state in zip(theirs, saved, strict=True):
        optimizer.load_state_dict(state)
    assert_same(state_of(None, *both), state_of(None, *theirs))
    train(model, shared, both, range(3, 6))
    train(other, resumed, theirs, range(3, 6))
    assert_same(masters_of(*both), masters_of(*theirs))
    assert_same(dict(model.state_dict()), dict(other.state_dict()))
    assert START * 2 == shared.loss_scale == resumed.loss_scale


@pytest.mark.parametrize(
    ("owned", "others"),
    [
        (DYNAMIC, [DYNAMIC, START, SharedLossScale(DYNAMIC)]),
        (SharedLossScale(DYNAMIC), [DYNAMIC, START, SharedLossScale(DYNAMIC)]),
        (4.0, [2.0, DYNAMIC, SharedLossScale(DYNAMIC), StaticLossScale(4.0, max_consecutive_skips=3)]),
    ],
    ids=["dynamic", "shared", "static"],
)
def test_second_wrapper_of_a_model_must_scale_alike(
    owned: Any, others: list[Any], device: torch.device, dtype: torch.dtype
) -> None:
    """One backward serves both: not another scale, nor one that will move apart; a refusal changes nothing."""
    model = two_group_model(device)
    matrices, rest = muon_and_adamw(model)
    first = MixedPrecisionOptimizer(matrices, model, dtype=dtype, loss_scale=owned)
    before = snapshot(model, first), snapshot(None, rest)
    for other in others:
        with pytest.raises(ValueError, match="one backward serves both"):
            MixedPrecisionOptimizer(rest, model, dtype=dtype, loss_scale=other)
    assert_same(before, (snapshot(model, first), snapshot(None, rest)))


def test_second_wrapper_of_a_model_takes_it_as_it_was_converted(device: torch.device, dtype: torch.dtype) -> None:
    """Another dtype and another policy are refused before anything changes; an equal one is not."""
    model, policy = two_group_model(device), CastPolicy.default().keep("head")
    matrices, rest = muon_and_adamw(model)
    first = MixedPrecisionOptimizer(matrices, model, dtype=dtype, loss_scale=4.0, policy=policy)
    before = snapshot(model, first), snapshot(None, rest)
    other = torch.bfloat16 if dtype == torch.float16 else torch.float16
    with pytest.raises(ValueError, match="the model was converted to"):
        MixedPrecisionOptimizer(rest, model, dtype=other, loss_scale=4.0)
    with pytest.raises(ValueError, match="converted by another policy"):
        MixedPrecisionOptimizer(rest, model, dtype=dtype, loss_scale=4.0, policy=CastPolicy.default())
    assert_same(before, (snapshot(model, first), snapshot(None, rest)))
    again = CastPolicy.default().keep("head")
    MixedPrecisionOptimizer(rest, model, dtype=dtype, loss_scale=4.0, policy=again)


def test_equal_static_scales_need_no_shared_one(device: torch.device, dtype: torch.dtype) -> None:
    """Each optimizer steps on its own, with what one backward left for it."""
    model, twin = two_group_model(device), two_group_model(device)
    both = [MixedPrecisionOptimizer(i, model, dtype=dtype, loss_scale=START) for i in muon_and_adamw(model)]
    both[0].backward(loss_of(model, 0))
    feed_(twin, model, START)
    for optimizer, bare in zip(both, muon_and_adamw(twin), strict=True):
        optimizer.step()
        bare.step()
    trained = {name: param.detach() for name, param in twin.named_parameters() if param.requires_grad}
    assert_same(trained, masters_of(*both))


def test_equal_static_scales_raise_no_false_alarm(
    device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """The loss was scaled, if by the other optimizer: nobody is told that it was not."""
    model = two_group_model(device)
    both = [MixedPrecisionOptimizer(i, model, dtype=dtype, loss_scale=START) for i in muon_and_adamw(model)]
    both[0].backward(loss_of(model, 0))
    for optimizer in both:
        optimizer.step()
    assert [] == [record.message for record in caplog.records if record.levelno >= logging.WARNING]


def test_export_of_one_holds_the_masters_of_both(device: torch.device, dtype: torch.dtype) -> None:
    """The fp32 model's weights come from the masters, whoever has them."""
    model, shared, both = two_on_one(device, dtype)
    train(model, shared, both, range(1))
    for exported in (both[0].master_state_dict(), both[0].master_model().state_dict()):
        assert_same(masters_of(*both), {name: exported[name] for name in masters_of(*both)})


def test_parameter_of_two_optimizers_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    """It can have one master: the second wrapper is refused before anything changes."""
    model = two_group_model(device)
    first = MixedPrecisionOptimizer(muon_and_adamw(model)[0], model, dtype=dtype, loss_scale=4.0)
    before = snapshot(model, first)
    again = torch.optim.SGD([model.hidden.weight], lr=0.1)
    with pytest.raises(ValueError, match=r"hidden\.weight"):
        MixedPrecisionOptimizer(again, model, dtype=dtype, loss_scale=4.0)
    assert_same(before, snapshot(model, first))


# -- the scale, and who skips --------------------------------------------------


@both_skips
def test_scale_grows_once_per_iteration(device: torch.device, dtype: torch.dtype, skip: str) -> None:
    """Two optimizers and three clean iterations: S doubles after the third, not after the second."""
    params, both, shared = two_vectors(device, dtype, DynamicLossScale(init_scale=2.0, growth_interval=3), skip)
    scales = []
    for _ in range(7):
        both[0].backward(params[0].sum() + params[1].sum())
        shared.step(*both)
        scales.append(shared.loss_scale)
    assert [2.0, 2.0, 4.0, 4.0, 4.0, 8.0, 8.0] == scales
    assert [7, 7] == [optimizer.applied_steps for optimizer in both]
    assert all(torch.equal(torch.full_like(param, -7.0), param) for param in params)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("culprit", [0, 1])
def test_overflow_in_one_skips_all_and_leaves_everything_bit_identical(
    device: torch.device, dtype: torch.dtype, culprit: int, bad: float
) -> None:
    """``skip="all"``: masters, weights and state of both stay; S backs off once; the report says whose fault it is."""
    model, shared, both = two_on_one(device, dtype)
    train(model, shared, both, range(2))
    before = state_of(model, *both)
    both[0].backward(loss_of(model, 2))
    poison_(both[culprit], bad)
    shared.step(*both)
    assert_same(before, state_of(model, *both))
    assert START / 2 == shared.loss_scale
    assert [(2, 1), (2, 1)] == [(optimizer.applied_steps, optimizer.skipped_steps) for optimizer in both]
    assert "inf or NaN in the gradients" == both[culprit].last_step.reason
    assert "of another optimizer" in both[1 - culprit].last_step.reason
    assert all(param.grad is None for param in model.parameters())
    train(model, shared, both, range(3, 4))
    assert differs(before, state_of(model, *both))


@pytest.mark.parametrize("culprit", [0, 1])
def test_overflow_in_one_lets_the_other_step_with_the_scale_of_the_backward(
    device: torch.device, dtype: torch.dtype, culprit: int
) -> None:
    """``skip="own"``: the bad one stays bit-identical, the other does what it does bare, S backs off once."""
    model, shared, both = two_on_one(device, dtype, skip="own")
    twin, good = two_group_model(device), both[1 - culprit]
    before = state_of(None, both[culprit])
    both[0].backward(loss_of(model, 0))
    feed_(twin, model, shared.loss_scale)
    poison_(both[culprit])
    shared.step(*both)
    assert_same(before, state_of(None, both[culprit]))
    assert (True, False) == (both[culprit].last_step.skipped, both[culprit].last_step.applied)
    muon_and_adamw(twin)[1 - culprit].step()
    expected = {name: dict(twin.named_parameters())[name].detach() for name, _ in good.named_masters()}
    assert_same(expected, masters_of(good))
    assert good.last_step.applied
    assert START == good.last_step.loss_scale
    assert START / 2 == shared.loss_scale


@both_skips
@pytest.mark.parametrize("bad", [False, True])
def test_optimizer_without_gradients_neither_steps_nor_skips(
    device: torch.device, dtype: torch.dtype, skip: str, bad: bool
) -> None:
    """The iteration is the other one's, good or bad: S follows that one alone."""
    params, both, shared = two_vectors(device, dtype, GROWING, skip)
    before = state_of(None, both[0])
    both[0].backward((params[1] * (math.inf if bad else 1.0)).sum())
    shared.step(*both)
    assert_same(before, state_of(None, both[0]))
    assert (0, 0, "no gradients") == (both[0].applied_steps, both[0].skipped_steps, both[0].last_step.reason)
    assert (int(not bad), int(bad)) == (both[1].applied_steps, both[1].skipped_steps)
    assert (START / 2 if bad else START * 2) == shared.loss_scale


def test_iteration_without_any_gradient_does_not_count(device: torch.device, dtype: torch.dtype) -> None:
    """S and its tracker stay: the second clean step with gradients makes it grow."""
    params, both, shared = two_vectors(device, dtype, DynamicLossScale(init_scale=2.0, growth_interval=2))
    scales = []
    for has_gradients in (True, False, False, True):
        if has_gradients:
            both[1].backward(params[0].sum() + params[1].sum())
        shared.step(*both)
        scales.append(shared.loss_scale)
    assert [2.0, 2.0, 2.0, 4.0] == scales
    assert [2, 2] == [optimizer.applied_steps for optimizer in both]


@both_skips
def test_too_many_skips_raise_and_name_the_culprit(device: torch.device, dtype: torch.dtype, skip: str) -> None:
    """The third skip at the floor is one too many; all of the bad one is bit-identical."""
    config = StaticLossScale(START, max_consecutive_skips=3)
    model, shared, both = two_on_one(device, dtype, config, skip)
    before = state_of(None, both[1])
    for skips in range(1, 4):
        both[0].backward(loss_of(model, 0))
        name = poison_(both[1])
        if skips < 3:
            shared.step(*both)
        else:
            with pytest.raises(LossScaleError, match=rf"3 skips in a row.*'{name}'"):
                shared.step(*both)
    assert_same(before, state_of(None, both[1]))
    assert [3 if skip == "all" else 0, 3] == [optimizer.skipped_steps for optimizer in both]
    train(model, shared, both, range(1))
    assert both[1].last_step.applied


def test_dropped_micro_steps_are_no_skips(device: torch.device, dtype: torch.dtype) -> None:
    """As with an own scale, windows that were applied never add up to an error."""
    drop = {"gradients": "fp32", "drop_bad_micro_steps": lambda kept, total: total / kept}
    params, both, shared = two_vectors(device, dtype, StaticLossScale(1.0, max_consecutive_skips=2), **drop)
    for _ in range(3):
        for factor in (math.inf, 1.0):
            both[0].backward((params[0] * factor).sum() + params[1].sum())
        shared.step(*both)
        assert both[0].last_step.applied


def test_nothing_is_applied_after_an_error_in_one_member(device: torch.device, dtype: torch.dtype) -> None:
    """A parameter of the second was moved: the first has not stepped, S has not moved, the gradients are gone."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    both[0].backward(params[0].sum() + params[1].sum())
    before, kept = state_of(None, *both), params[1].data
    params[1].data = kept.clone()
    with pytest.raises(ValueError, match="was moved out"):
        shared.step(*both)
    assert_same(before, state_of(None, *both))
    assert START == shared.loss_scale
    assert [0, 0] == [optimizer.applied_steps for optimizer in both]
    assert all(master.grad is None for optimizer in both for _, master in optimizer.named_masters())
    params[1].data, params[1].grad = kept, None
    shared.step(*both)
    assert ["no gradients"] * 2 == [optimizer.last_step.reason for optimizer in both]
    both[0].backward(params[0].sum() + params[1].sum())
    shared.step(*both)
    assert all(torch.equal(torch.full_like(param, -1.0), param) for param in params)


def test_error_in_one_member_leaves_no_trace_of_unscaled_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """An inf that ``unscale_`` saw went with its gradients: the next good iteration is applied."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    both[0].backward((params[0] * math.inf).sum() + params[1].sum())
    both[0].unscale_()
    kept, params[1].data = params[1].data, params[1].data.clone()
    with pytest.raises(ValueError, match="was moved out"):
        shared.step(*both)
    params[1].data, params[1].grad = kept, None
    both[0].backward(params[0].sum())
    shared.step(both[0])
    assert both[0].last_step.applied


def test_nothing_is_applied_if_an_inner_optimizer_refuses_its_gradients(
    device: torch.device, dtype: torch.dtype
) -> None:
    """AdamW takes no sparse gradient: the optimizer that stepped before it is taken back."""
    dense, table = vector(device, dtype), nn.Parameter(torch.ones(4, 2, device=device, dtype=dtype))
    shared = SharedLossScale(GROWING)
    inners = torch.optim.SGD([dense], lr=1.0), torch.optim.AdamW([table])
    both = [MixedPrecisionOptimizer(inner, loss_scale=shared) for inner in inners]
    before = state_of(None, *both)
    rows = nn.functional.embedding(torch.tensor([1, 2], device=device), table, sparse=True)
    both[0].backward(dense.sum() + rows.sum())
    with pytest.raises(RuntimeError, match="sparse"):
        shared.step(*both)
    assert_same(before, state_of(None, *both))


# -- misuse --------------------------------------------------------------------


def test_member_steps_only_inside_the_shared_step(device: torch.device, dtype: torch.dtype) -> None:
    """Its own ``step()`` raises and changes nothing; the gradients wait for the right call."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    both[0].backward(params[0].sum() + params[1].sum())
    before = state_of(None, *both)
    for optimizer in both:
        with pytest.raises(StepOrderError, match=r"Call shared\.step"):
            optimizer.step()
        with pytest.raises(StepOrderError, match=r"Call shared\.step"):
            optimizer.step(lambda: params[0].sum())
    assert_same(before, state_of(None, *both))
    shared.step(*both)
    with pytest.raises(StepOrderError, match=r"Call shared\.step"):
        both[0].step()
    assert all(torch.equal(torch.full_like(param, -1.0), param) for param in params)


def test_shared_step_takes_each_of_its_members_once(device: torch.device, dtype: torch.dtype) -> None:
    """Nobody, the same twice, a stranger and what is no optimizer are refused before anything is gathered."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    _, (foreign, _), _ = two_vectors(device, dtype, GROWING)
    both[0].backward(params[0].sum() + params[1].sum())
    for wrong in ([], [both[0], both[0]], [both[0], both[1], both[0]]):
        with pytest.raises(ValueError, match="each optimizer of the iteration once"):
            shared.step(*wrong)
    for wrong in ([both[0], foreign], [both[0].inner], [both], [None]):
        with pytest.raises(ValueError, match="was not built with this scale"):
            shared.step(*wrong)
    assert all(param.grad is not None for param in params)
    shared.step(*both)
    assert START * 2 == shared.loss_scale
    assert all(torch.equal(torch.full_like(param, -1.0), param) for param in params)


@pytest.mark.parametrize(
    ("config", "skip", "error", "message"),
    [
        (None, "all", TypeError, "must be a number or a loss scale"),
        (True, "all", TypeError, "must be None, a number"),
        ("128", "all", TypeError, "must be None, a number"),
        (SharedLossScale(1.0), "all", TypeError, "must be None, a number"),
        (0.0, "all", ValueError, "positive and finite"),
        (math.inf, "all", ValueError, "positive and finite"),
        (1.0, "both", ValueError, "must be 'all' or 'own'"),
        (1.0, None, ValueError, "must be 'all' or 'own'"),
    ],
)
def test_shared_scale_checks_its_arguments(config: Any, skip: Any, error: type[Exception], message: str) -> None:
    """The value, the rule, the remedy."""
    with pytest.raises(error, match=message):
        SharedLossScale(config, skip)


# -- optimizers that take turns ------------------------------------------------


def test_gan_in_the_standard_loop_trains_each_network_on_its_own_loss(device: torch.device, dtype: torch.dtype) -> None:
    """What the generator's loss left in the discriminator is dropped by ``zero_grad``, though S moves every step."""
    generator = seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), device)
    critic = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), device)
    twins = [seeded(lambda: nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4)), device)]
    twins += [seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)), device)]
    shared = SharedLossScale(GROWING)
    nets = [generator, critic]
    ours = [
        MixedPrecisionOptimizer(torch.optim.AdamW(net.parameters()), net, dtype=dtype, loss_scale=shared)
        for net in nets
    ]
    bare = [torch.optim.AdamW(twin.parameters()) for twin in twins]

    def turn(who: int, loss: Tensor) -> None:
        ours[who].zero_grad()
        mine = list(nets[who].parameters())
        grads = torch.autograd.grad(ours[who].scale(loss), mine, retain_graph=True)
        ours[who].backward(loss)
        for param, grad in zip(twins[who].parameters(), grads, strict=True):
            param.grad = grad.float() / shared.loss_scale
        shared.step(ours[who])
        bare[who].step()

    for step in range(3):
        noise = torch.linspace(-1, 1, 6, device=device).view(2, 3) * (step + 1)
        turn(1, critic(generator(noise).detach()).mean() - critic(noise.new_ones(2, 4)).mean())
        turn(0, -critic(generator(noise)).mean())
        assert critic[0].weight.grad is not None
        for twin, optimizer in zip(twins, ours, strict=True):
            assert_same({name: p.detach() for name, p in twin.named_parameters()}, masters_of(optimizer))
    assert START * 2.0**6 == shared.loss_scale


def test_stale_gradients_are_refused_once_the_scale_has_moved(device: torch.device, dtype: torch.dtype) -> None:
    """Two backward passes under two scales share ``.grad``: an error, nothing applied; ``zero_grad`` mends it."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    both[0].backward(params[0].sum() + params[1].sum())
    shared.step(both[1])
    both[0].backward(params[0].sum())
    before = state_of(None, *both)
    with pytest.raises(StepOrderError, match="before the shared loss scale moved"):
        shared.step(*both)
    assert_same(before, state_of(None, *both))
    both[0].zero_grad()
    both[0].backward(params[0].sum())
    shared.step(both[0])
    assert all(torch.equal(torch.full_like(param, -1.0), param) for param in params)


def test_waiting_gradients_stay_good_while_the_scale_stays(device: torch.device, dtype: torch.dtype) -> None:
    """Those left out of a shared step keep theirs, and more may join them."""
    params, both, shared = two_vectors(device, dtype, DYNAMIC)
    both[0].backward(params[0].sum() + params[1].sum())
    shared.step(both[1])
    both[0].backward(params[0].sum())
    shared.step(both[0])
    assert [-2.0, -1.0] == [float(param.detach()[0]) for param in params]


def test_gradients_held_in_fp32_follow_the_scale_exactly(device: torch.device, dtype: torch.dtype) -> None:
    """They are multiplied as S is, up and down: 1 + 2 + 4 under three scales is 7."""
    params, both, shared = two_vectors(device, dtype, GROWING, gradients="fp32")
    for step, bad in enumerate((False, True, False)):
        both[0].backward((params[0] * 2.0**step).sum() + (params[1] * (math.inf if bad else 1.0)).sum())
        shared.step(both[1])
    assert START * 2 == shared.loss_scale
    shared.step(both[0])
    assert [-7.0, -2.0] == [float(param.detach()[0]) for param in params]


@pytest.mark.parametrize(
    "gradients",
    [
        "autograd",
        "half",
        "fp32",
    ],
)
def test_unscaled_gradients_do_not_follow_the_scale(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """Both unscale, both look, then each steps in its turn: S was divided out before it moved."""
    params, both, shared = two_vectors(device, dtype, GROWING, gradients=gradients)
    both[0].backward(params[0].sum() + params[1].sum())
    for optimizer in both:
        optimizer.unscale_()
    for optimizer in both:
        shared.step(optimizer)
    assert [-1.0, -1.0] == [float(param.detach()[0]) for param in params]


def test_gradients_dropped_by_the_model_are_no_longer_stale(device: torch.device, dtype: torch.dtype) -> None:
    """The DCGAN tutorial calls ``netD.zero_grad()``: what S moved past is gone then as well."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    both[0].backward(params[0].sum() + params[1].sum())
    shared.step(both[1])
    params[0].grad = None
    both[0].backward(params[0].sum())
    shared.step(both[0])
    assert [-1.0, -1.0] == [float(param.detach()[0]) for param in params]


def test_load_into_one_member_does_not_reinterpret_the_gradients_of_another(
    device: torch.device, dtype: torch.dtype
) -> None:
    """S comes back with the checkpoint; gradients that wait elsewhere are refused, or follow."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    saved = through_file(both[0].state_dict())
    both[0].backward(params[0].sum())
    shared.step(both[0])
    both[1].backward(params[1].sum())
    try:
        both[0].load_state_dict(saved)
        shared.step(both[1])
    except StepOrderError:
        return
    assert -1.0 == float(params[1].detach()[0])


def test_forgotten_member_does_not_live_on(device: torch.device, dtype: torch.dtype) -> None:
    """The scale keeps no optimizer alive, nor its memory."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    both[0].backward(params[0].sum() + params[1].sum())
    gone = weakref.ref(both.pop(0))
    gc.collect()
    assert gone() is None
    shared.step(*both)
    assert START * 2 == shared.loss_scale


# -- schedulers and hooks ------------------------------------------------------


def test_schedulers_and_hooks_of_members_see_each_step_once(device: torch.device, dtype: torch.dtype) -> None:
    """No warning, though the first iteration is a skip; every hook runs once per member and iteration."""
    params, both, shared = two_vectors(device, dtype, GROWING)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5) for optimizer in both]
    schedulers.append(torch.optim.lr_scheduler.LambdaLR(both[0].inner, lambda _: 1.0))
    seen: list[tuple[str, int]] = []
    for index, optimizer in enumerate(both):
        optimizer.register_step_pre_hook(lambda *_, index=index: seen.append(("before", index)))
        optimizer.register_step_post_hook(lambda *_, index=index: seen.append(("after", index)))
        optimizer.inner.register_step_post_hook(lambda *_, index=index: seen.append(("inner", index)))
    for step in range(4):
        both[0].backward((params[0] * (math.inf if step == 0 else 1.0)).sum() + params[1].sum())
        shared.step(*both)
        for scheduler in schedulers[:2]:
            scheduler.step()
    each = [(kind, index) for index in range(2) for kind in ("before", "after")]
    assert sorted(each * 4) == sorted(entry for entry in seen if entry[0] != "inner")
    assert 3 == seen.count(("inner", 0)) == seen.count(("inner", 1))
    assert [0.25, 0.25] == [optimizer.param_groups[0]["lr"] for optimizer in both]
    assert all(torch.equal(torch.full_like(param, -1.0 - 0.5 * 2), param) for param in params)


# -- several losses ------------------------------------------------------------


@pytest.mark.parametrize("container", [list, tuple])
def test_losses_of_a_list_share_one_backward(
    container: Callable[..., Any], device: torch.device, dtype: torch.dtype
) -> None:
    """``scale`` and ``backward`` take several: each is multiplied by S, the gradients add up, the step is one."""
    param = vector(device, dtype, value=0.0)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=1.0), loss_scale=GROWING)
    losses = container([param.sum(), (param * 2).sum()])
    scaled = optimizer.scale(container([losses[0] + 3.0, losses[1] + 5.0]))
    assert type(scaled) is container
    assert [3.0 * START, 5.0 * START] == [loss.item() for loss in scaled]
    optimizer.backward(losses)
    optimizer.step()
    assert torch.equal(torch.full_like(param, -3.0), param)
    scaled = optimizer.scale([param.sum(), (param * 2).sum()])
    scaled[0].backward()
    scaled[1].backward()
    optimizer.step()
    assert torch.equal(torch.full_like(param, -6.0), param)
    assert 2 == optimizer.applied_steps
    with pytest.raises(ValueError, match="scalar"):
        optimizer.backward([param.sum(), param])


def penalty(critic: nn.Module, x: Tensor, optimizer: MixedPrecisionOptimizer | None) -> Tensor:
    """Return the gradient penalty of WGAN-GP, with the inner gradient taken through the loss scale."""
    x = x.clone().requires_grad_()
    score = critic(x).sum()
    (slope,) = torch.autograd.grad(score if optimizer is None else optimizer.scale(score), x, create_graph=True)
    slope = slope if optimizer is None else slope / optimizer.loss_scale
    return (slope.norm(dim=1) - 1).square().mean() + critic(x).mean()


@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
def test_gradient_penalty_is_that_of_fp32(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """Twice differentiated through ``scale``: equal bit for bit in fp32, else to the precision of the half format."""
    x = torch.linspace(-2, 2, 12, device=device).view(3, 4)
    twin = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), device)
    penalty(twin, x, None).backward()
    expected = {name: param.grad for name, param in twin.named_parameters()}
    for policy in (CastPolicy.fp32(), CastPolicy.default()):
        critic = seeded(lambda: nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1)), device)
        inner = torch.optim.SGD(critic.parameters(), lr=1.0)
        options = {"dtype": dtype, "policy": policy, "gradients": gradients}
        optimizer = MixedPrecisionOptimizer(inner, critic, loss_scale=DYNAMIC, **options)
        optimizer.backward(penalty(critic, x, optimizer))
        optimizer.unscale_()
        actual = {name: master.grad for name, master in optimizer.named_masters()}
        assert all(bool(grad.any()) for grad in actual.values())
        if policy == CastPolicy.fp32():
            assert_same(expected, actual)
        for name, grad in expected.items():
            assert float((grad - actual[name]).norm()) <= PENALTY_ERROR[dtype] * float(grad.norm())
