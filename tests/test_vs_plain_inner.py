"""Contract 1: the masters are what the bare inner optimizer makes of the same gradients."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizers import BY_NAME, IDS, INNERS, LBFGS, SHAPES, SPARSE_ADAM, Inner
from torch import Tensor, nn
from twins import (
    FEW,
    Bag,
    all_same_bits,
    differences,
    force_,
    grid_step,
    keeping,
    masters_of,
    plans,
    random_step,
    same_bits,
    setups,
    snapshot,
)

from mixedopt import CastPolicy, MixedPrecisionOptimizer

every_inner = pytest.mark.parametrize("inner", INNERS, ids=IDS)

HIGHEST = 13  # a normal value times 2**13 stays within fp16


def bare_step_(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list[Tensor | None]) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad
    optimizer.step()
    optimizer.zero_grad()


def moves(plan: list[int | None], params: list[nn.Parameter]) -> bool:
    """True iff gradients of this size visibly move fp32 weights near one."""
    return any(e is not None and e >= -8 and p.numel() > 3 for e, p in zip(plan, params, strict=True))


@every_inner
@FEW
@given(st.data())
def test_masters_equal_bare_inner_on_same_half_gradients(
    inner: Inner, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """For any shapes, groups and absent gradients: masters = inner(float(half(S*g)) / S), bit for bit."""
    setup = data.draw(setups(inner))
    power = data.draw(st.sampled_from([0, 4, 10, 16]))
    script = data.draw(st.lists(plans(inner, setup.count, -24, min(3, HIGHEST - power)), min_size=1, max_size=4))
    optimizer, params = setup.build(inner, dtype, device, loss_scale=2.0**power)
    bare, expected = setup.build_bare(inner, dtype, device)
    before = [param.detach().clone() for param in expected]
    scale = optimizer.loss_scale
    assert all_same_bits(masters_of(optimizer), expected)
    for n, plan in enumerate(script):
        grads = random_step(params, 97 * n, plan)
        force_(optimizer, params, grads)
        rounded = [None if param.grad is None else param.grad.float() / scale for param in params]
        optimizer.step()
        if any(grad is not None for grad in rounded):
            bare_step_(bare, expected, rounded)
        assert all_same_bits(masters_of(optimizer), expected)
        shown = [master.detach().to(p.dtype, copy=True) for p, master in zip(params, expected, strict=True)]
        assert all_same_bits(params, shown)
    if any(moves(plan, params) for plan in script):
        assert not all_same_bits(before, expected)
    for master, param in zip(masters_of(optimizer), expected, strict=True):
        ours, theirs = optimizer.inner.state.get(master, {}), bare.state.get(param, {})
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[key], theirs[key]) for key in ours)


@every_inner
@FEW
@given(st.data())
def test_masters_are_the_same_for_every_power_of_two_scale(
    inner: Inner, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """Where S*g is representable, S leaves no trace in the masters."""
    setup = data.draw(setups(inner))
    script = data.draw(st.lists(plans(inner, setup.count), min_size=1, max_size=3))
    ends = []
    for scale in (1.0, 2.0**4, 2.0**10):
        optimizer, params = setup.build(inner, dtype, device, loss_scale=scale)
        before = snapshot(optimizer)
        for n, plan in enumerate(script):
            force_(optimizer, params, grid_step(params, 97 * n, plan))
            optimizer.step()
        ends.append(snapshot(optimizer))
        moved = any(moves(plan, params) for plan in script)
        assert not moved or any(name.startswith("master") for name in differences(before, ends[-1]))
    assert differences(ends[0], ends[1]) == []
    assert differences(ends[0], ends[2]) == []


@every_inner
@FEW
@given(st.data())
def test_wrapping_in_mid_life_continues_bit_for_bit(
    inner: Inner, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """State from fp32 steps goes over to the masters: the next steps equal those of the bare optimizer."""
    setup = data.draw(setups(inner, with_model=True))
    early = data.draw(st.lists(plans(inner, setup.count, -4, 0), min_size=1, max_size=2))
    late = data.draw(st.lists(plans(inner, setup.count, -4, 0), min_size=1, max_size=2))
    bare, expected = setup.build_bare(inner, dtype, device)
    young, params = setup.build_bare(inner, dtype, device)
    for n, plan in enumerate(early):
        bare_step_(bare, expected, grid_step(params, n, plan))
        bare_step_(young, params, grid_step(params, n, plan))
    optimizer = MixedPrecisionOptimizer(young, Bag(params), dtype=dtype, policy=keeping(setup.kept), loss_scale=2.0**8)
    assert all_same_bits(masters_of(optimizer), expected)
    for n, plan in enumerate(late):
        grads = grid_step(params, 97 + n, plan)
        force_(optimizer, params, grads)
        optimizer.step()
        if any(grad is not None for grad in grads):
            bare_step_(bare, expected, grads)
        assert all_same_bits(masters_of(optimizer), expected)
    for master, param in zip(masters_of(optimizer), expected, strict=True):
        ours, theirs = optimizer.inner.state.get(master, {}), bare.state.get(param, {})
        assert ours.keys() == theirs.keys()
        assert all(same_bits(ours[key], theirs[key]) for key in ours)


class Net(nn.Module):
    """Convolution, both norms, a tied pair of linears, a branch that odd steps leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.batch_norm = nn.BatchNorm2d(4)
        self.norm = nn.LayerNorm(4)
        self.linear = nn.Linear(4, 4)
        self.tied = nn.Linear(4, 4, bias=False)
        self.tied.weight = self.linear.weight
        self.branch = nn.Linear(4, 4)

    def forward(self, x: Tensor, with_branch: bool) -> Tensor:
        x = self.batch_norm(self.conv(x)).relu().mean((2, 3))
        x = self.tied(self.linear(self.norm(x)).relu())
        return self.branch(x) if with_branch else x


@every_inner
@pytest.mark.parametrize("converted", [True, False], ids=["model", "no_model"])
def test_wrapper_with_fp32_policy_and_scale_one_is_the_inner_optimizer(
    inner: Inner, converted: bool, device: torch.device
) -> None:
    """A real model trained side by side, forward and backward included: the same bits in every tensor."""
    net = Net().to(device)
    twin = copy.deepcopy(net)
    bare = inner([[p for p in twin.parameters() if inner.accepts(p)]])
    wrapped = inner([[p for p in net.parameters() if inner.accepts(p)]])
    model = {"model": net, "policy": CastPolicy.fp32()} if converted else {}
    optimizer = MixedPrecisionOptimizer(wrapped, loss_scale=1.0, **model)
    before = copy.deepcopy(net.state_dict())
    for n in range(4):
        x = torch.randn(3, 2, 5, 5).to(device)
        bare.zero_grad()
        twin(x, n % 2 == 0).square().mean().backward()
        bare.step()
        optimizer.zero_grad()
        optimizer.backward(net(x, n % 2 == 0).square().mean())
        optimizer.step()
        assert optimizer.last_step.applied
        assert differences(dict(net.state_dict()), dict(twin.state_dict())) == []
    assert net.linear.weight is not twin.linear.weight
    assert not same_bits(before["linear.weight"], net.linear.weight)
    assert not same_bits(before["batch_norm.running_mean"], net.batch_norm.running_mean)


# -- what the bare optimizer refuses -------------------------------------------


def outcome(inner: Inner, value: Tensor) -> tuple[str, type[Exception] | None]:
    """Return when a bare optimizer over one parameter raises, and what."""
    param = nn.Parameter(value)
    try:
        optimizer = inner([[param]])
    except Exception as error:
        return "construction", type(error)
    try:
        for _ in range(2):
            bare_step_(optimizer, [param], [torch.ones_like(param)])
    except Exception as error:
        return "step", type(error)
    return "", None


@pytest.mark.parametrize("inner", [*INNERS, SPARSE_ADAM, LBFGS], ids=lambda inner: inner.name)
@pytest.mark.parametrize("kind", SHAPES)
def test_bare_optimizer_refuses_exactly_what_the_list_says(inner: Inner, kind: str, device: torch.device) -> None:
    """The table in ``optimizers.py`` is what this torch does, no more and no less."""
    expected = (inner.refuses_at, inner.error) if kind in inner.refused else ("", None)
    value = SHAPES[kind](torch.Generator().manual_seed(0)).to(device)
    assert outcome(inner, value) == expected


def build_refusing(
    inner: Inner, kinds: list[str], dtype: torch.dtype, device: torch.device
) -> tuple[MixedPrecisionOptimizer, list[nn.Parameter], list[nn.Parameter]]:
    """Return a wrapper over parameters of which the inner optimizer refuses one, and fp32 copies."""
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(SHAPES[kind](generator).to(device)) for kind in kinds]
    copies = [nn.Parameter(param.detach().clone()) for param in params]
    options = {"model": Bag(params), "dtype": dtype, "policy": keeping({0}), "loss_scale": 8.0}
    return MixedPrecisionOptimizer(inner([params]), **options), params, copies


def message(call: Callable[[], object], error: type[Exception]) -> str:
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("adafactor", ["empty"]),
        ("adafactor", ["matrix", "vector", "empty"]),
        ("adafactor", ["empty_matrix", "matrix"]),
        ("sparse_adam", ["matrix", "vector"]),
    ],
)
def test_refused_first_step_changes_nothing(
    name: str, kinds: list[str], dtype: torch.dtype, device: torch.device
) -> None:
    """Type and message are the bare optimizer's; weights, masters, state and groups are as before."""
    inner = SPARSE_ADAM if name == "sparse_adam" else BY_NAME[name]
    assert inner.error is not None
    optimizer, params, copies = build_refusing(inner, kinds, dtype, device)
    bare = inner([copies])
    before, start = snapshot(optimizer), [copy.detach().clone() for copy in copies]
    grads = grid_step(params, 1, [0] * len(params))
    theirs = message(lambda: bare_step_(bare, copies, grads), inner.error)
    force_(optimizer, params, grads)
    assert message(optimizer.step, inner.error) == theirs
    assert differences(before, snapshot(optimizer)) == []
    if kinds[0] == "matrix" and name == "adafactor":  # the bare optimizer had moved it: there was something to undo
        assert not same_bits(start[0], copies[0].detach())


def test_refused_parameter_of_an_added_group_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """A group added in mid-run gets the same protection as those of the start."""
    params = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in ((3, 4), (5,), (0,))]
    optimizer = MixedPrecisionOptimizer(BY_NAME["adafactor"]([params[:2]]), loss_scale=8.0)
    force_(optimizer, params[:2], grid_step(params[:2], 1, [0, 0]))
    optimizer.step()
    assert optimizer.last_step.applied
    optimizer.add_param_group({"params": params[2:]})
    before = snapshot(optimizer)
    force_(optimizer, params, grid_step(params, 2, [0, 0, 0]))
    message(optimizer.step, ZeroDivisionError)
    assert differences(before, snapshot(optimizer)) == []


def test_refused_gradient_that_comes_late_changes_nothing(dtype: torch.dtype, device: torch.device) -> None:
    """A parameter whose first gradient comes after several steps is refused as cleanly as in the first."""
    optimizer, params, _ = build_refusing(BY_NAME["adafactor"], ["matrix", "vector", "empty"], dtype, device)
    force_(optimizer, params, grid_step(params, 1, [0, 0, None]))
    optimizer.step()
    assert optimizer.last_step.applied
    before = snapshot(optimizer)
    force_(optimizer, params, grid_step(params, 2, [0, 0, 0]))
    message(optimizer.step, ZeroDivisionError)
    assert differences(before, snapshot(optimizer)) == []


def test_optimizer_that_refuses_late_gradients_is_as_strict_wrapped(dtype: torch.dtype, device: torch.device) -> None:
    """Fused SGD with momentum takes no parameter later than the others, bare or wrapped; nothing changes then."""
    inner = BY_NAME["sgd_fused"]
    assert [other.name for other in INNERS if other.refuses_late] == [inner.name]
    optimizer, params, copies = build_refusing(inner, ["matrix", "vector"], dtype, device)
    bare = inner([copies])
    grads = grid_step(params, 1, [0, None])
    bare_step_(bare, copies, grads)
    force_(optimizer, params, grads)
    optimizer.step()
    before = snapshot(optimizer)
    grads = grid_step(params, 2, [0, 0])
    theirs = message(lambda: bare_step_(bare, copies, grads), TypeError)
    force_(optimizer, params, grads)
    assert message(optimizer.step, TypeError) == theirs
    assert differences(before, snapshot(optimizer)) == []


def test_step_after_a_refused_one_uses_no_gradient_of_it(dtype: torch.dtype, device: torch.device) -> None:
    """A step that raised consumed its gradients: the next one, without any, moves nothing."""
    optimizer, params, _ = build_refusing(BY_NAME["adafactor"], ["matrix", "vector", "empty"], dtype, device)
    before = snapshot(optimizer)
    force_(optimizer, params, grid_step(params, 1, [0, 0, 0]))
    message(optimizer.step, ZeroDivisionError)
    optimizer.step()
    assert not optimizer.last_step.applied
    assert differences(before, snapshot(optimizer)) == []


def test_refusal_does_not_spoil_the_next_step(dtype: torch.dtype, device: torch.device) -> None:
    """After a refused step, one without the offending gradient equals the bare optimizer's first."""
    optimizer, params, copies = build_refusing(BY_NAME["adafactor"], ["matrix", "vector", "empty"], dtype, device)
    force_(optimizer, params, grid_step(params, 1, [0, 0, 0]))
    message(optimizer.step, ZeroDivisionError)
    grads = grid_step(params, 2, [0, 0, None])
    force_(optimizer, params, grads)
    optimizer.step()
    bare_step_(BY_NAME["adafactor"]([copies]), copies, grads)
    assert optimizer.last_step.applied
    assert all_same_bits(masters_of(optimizer), copies)


# -- known faults of others, as laws -------------------------------------------


def one_weight(
    inner: Inner, value: float, dtype: torch.dtype, device: torch.device, **options: object
) -> tuple[MixedPrecisionOptimizer, nn.Parameter]:
    weight = nn.Parameter(torch.full((), value, device=device))
    return MixedPrecisionOptimizer(inner([[weight]]), Bag([weight]), dtype=dtype, **options), weight


def constant_steps(optimizer: MixedPrecisionOptimizer, weight: nn.Parameter, grad: float, steps: int) -> None:
    for _ in range(steps):
        force_(optimizer, [weight], [torch.full((), grad, device=weight.device)])
        optimizer.step()
        assert optimizer.last_step.applied


# Closed forms below are worked out in real numbers; a hundred fp32 updates near one may be off by so much.
CLOSED_FORM = 100 * 2.0**-23


def adamw(weight_decay: float, lr: float) -> Inner:
    return Inner("adamw", torch.optim.AdamW, {"lr": lr, "weight_decay": weight_decay})


@pytest.mark.parametrize("scale", [1.0, 2.0**10])
def test_updates_under_half_an_ulp_add_up_in_the_master(scale: float, dtype: torch.dtype, device: torch.device) -> None:
    """A constant gradient moves a weight of one by lr a step, far under a half ulp, and the model follows."""
    optimizer, weight = one_weight(adamw(0.0, 6e-4), 1.0, dtype, device, loss_scale=scale)
    constant_steps(optimizer, weight, 2.0**-6, 100)
    expected = 1 - 100 * 6e-4
    master = masters_of(optimizer)[0]
    # eps = 1e-8 against |g| = 2**-6 shortens each update by a relative 6.4e-7
    assert abs(master.item() - expected) < CLOSED_FORM + 100 * 6e-4 * 6.4e-7
    assert same_bits(weight.detach(), master.detach().to(dtype))
    assert weight.item() < 0.95


def test_weight_decay_under_half_an_ulp_adds_up_in_the_master(dtype: torch.dtype, device: torch.device) -> None:
    """Decay of 1e-4 a step with zero gradients gives (1 - 1e-4)**100, although 1 - 1e-4 rounds to one in bf16."""
    optimizer, weight = one_weight(adamw(0.1, 1e-3), 1.0, dtype, device)
    constant_steps(optimizer, weight, 0.0, 100)
    assert abs(masters_of(optimizer)[0].item() - math.pow(1 - 1e-4, 100)) < CLOSED_FORM
    assert weight.item() < 1.0


def test_zero_gradients_leave_adam_finite(dtype: torch.dtype, device: torch.device) -> None:
    """An eps of 1e-8 survives in fp32: zero gradients move nothing, then a small one moves by about lr a step."""
    optimizer, weight = one_weight(Inner("adam", torch.optim.Adam, {"lr": 1e-3}), 0.0, dtype, device)
    constant_steps(optimizer, weight, 0.0, 3)
    assert masters_of(optimizer)[0].item() == 0.0
    bare = nn.Parameter(torch.zeros((), device=device))
    adam = torch.optim.Adam([bare], lr=1e-3)
    for grad in (0.0, 0.0, 0.0):
        bare_step_(adam, [bare], [torch.full((), grad, device=device)])
    for _ in range(3):
        scale = optimizer.loss_scale
        constant_steps(optimizer, weight, 1e-5, 1)
        bare_step_(adam, [bare], [torch.full((), 1e-5 * scale, device=device).to(dtype).float() / scale])
    assert same_bits(masters_of(optimizer)[0].detach(), bare.detach())
    assert -0.0035 < weight.item() < -0.001


def test_every_group_is_divided_by_the_scale(dtype: torch.dtype, device: torch.device) -> None:
    """With S = 1024 and true gradients of one, SGD(lr=1) moves the weights of both groups by one."""
    groups = [[nn.Parameter(torch.zeros(4, 3, device=device))], [nn.Parameter(torch.zeros(3, device=device))]]
    params = [param for group in groups for param in group]
    sgd = Inner("sgd", torch.optim.SGD, {"lr": 1.0}, second={})
    optimizer = MixedPrecisionOptimizer(sgd(groups), Bag(params), dtype=dtype, loss_scale=1024.0)
    force_(optimizer, params, [torch.ones_like(param, dtype=torch.float32) for param in params])
    optimizer.step()
    assert all(torch.equal(param, torch.full_like(param, -1.0)) for param in params)


def test_layer_without_gradient_stays_put_and_keeps_its_step_count(dtype: torch.dtype, device: torch.device) -> None:
    """An unused branch is not fed zeros: no drift from old momentum, no decay, no count."""
    a, b = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    adam = Inner("adam", torch.optim.Adam, {"lr": 0.1, "weight_decay": 0.1})
    optimizer = MixedPrecisionOptimizer(adam([[a, b]]), Bag([a, b]), dtype=dtype)
    force_(optimizer, [a, b], grid_step([a, b], 0, [0, 0]))
    optimizer.step()
    before = snapshot(optimizer)
    for n in range(3):
        force_(optimizer, [a, b], grid_step([a, b], 10 * n, [0, None]))
        optimizer.step()
    moved = differences(before, snapshot(optimizer))
    assert [name for name in moved if " 0.1" in name] == []
    assert {"master 0.0", "weight 0.0"} <= set(moved)
    state = optimizer.inner.state
    assert [int(state[master]["step"]) for master in masters_of(optimizer)] == [4, 1]
