"""The wrapper is a real torch optimizer: schedulers, groups, hooks, closures, freezing, growing."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    assert_same,
    differs,
    force_grads,
    loss_of,
    masters_of,
    overflow,
    seeded,
    snapshot,
    train,
    two_group_model,
    two_groups,
    vector,
    wrapped,
)
from models import adamw as make_adamw
from models import momentum as make_momentum
from torch import nn
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from mixedopt import MixedPrecisionOptimizer, StaticLossScale


def half_optimizer(
    device: torch.device, dtype: torch.dtype, make: Callable[[Any], torch.optim.Optimizer] = make_momentum
) -> MixedPrecisionOptimizer:
    """Return a wrapper around two groups of one half vector each."""
    groups = [{"params": [vector(device, dtype)]}, {"params": [vector(device, dtype, 3)], "lr": 3e-3}]
    return MixedPrecisionOptimizer(make(groups), loss_scale=SMALL_SCALE)


def hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]


def test_the_wrapper_is_a_torch_optimizer(device: torch.device, dtype: torch.dtype) -> None:
    """``isinstance`` holds, and the attributes that other code reads are the inner optimizer's."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.defaults == optimizer.inner.defaults
    assert hyperparameters(optimizer) == hyperparameters(optimizer.inner)
    masters = dict(optimizer.named_masters())
    for name, param in model.named_parameters():
        if param in optimizer.state:
            assert optimizer.state[param] is optimizer.inner.state[masters[name]]
    assert model.hidden.weight in optimizer.state
    assert model.frozen.weight not in optimizer.state


def test_repr_shows_the_groups(device: torch.device, dtype: torch.dtype) -> None:
    """``repr`` is torch's: the class, then every group with its values."""
    optimizer = half_optimizer(device, dtype)
    text = repr(optimizer)
    assert text.startswith("MixedPrecisionOptimizer (\nParameter Group 0\n")
    assert "lr: 0.003" in text
    assert "params" not in text
    assert repr(optimizer.param_groups[1]) == repr(dict(optimizer.param_groups[1]))


# -- schedulers ---------------------------------------------------------------

MAKERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], 0.5),
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, [lambda k: 1 / (k + 1), lambda k: 0.9**k]),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda k: 0.9),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 4, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-3, 1e-1, step_size_up=2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 0.2], total_steps=6),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], milestones=[2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1), lr_scheduler.ExponentialLR(o, 0.9)], optimizer=o
    ),
    "SWALR": lambda o: swa_utils.SWALR(o, swa_lr=0.05, anneal_epochs=2),
}


def drive(optimizer: torch.optim.Optimizer, scheduler: Any, params: list[nn.Parameter]) -> list[Any]:
    """Step both five times; return the hyperparameters that each step used."""
    used = []
    for _ in range(5):
        for param in params:
            param.grad = torch.ones_like(param)
        used.append([{k: v for k, v in g.items() if k in ("lr", "momentum", "betas")} for g in optimizer.param_groups])
        optimizer.step()
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return used


def test_every_scheduler_of_torch_is_tested() -> None:
    """A scheduler that a new torch brings must be added to the table."""
    bases = {lr_scheduler.LRScheduler, getattr(lr_scheduler, "_LRScheduler", None)}
    classes = {
        name
        for name, value in vars(lr_scheduler).items()
        if isinstance(value, type) and issubclass(value, lr_scheduler.LRScheduler) and value not in bases
    }
    assert classes <= set(MAKERS)


@pytest.mark.parametrize("where", ["wrapper", "inner before wrapping", "inner after wrapping"])
@pytest.mark.parametrize("make", [make_momentum, make_adamw], ids=["momentum", "betas"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_schedulers_drive_the_wrapper_as_a_bare_optimizer(
    name: str, make: Callable[[Any], torch.optim.Optimizer], where: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Wherever a scheduler is built, the values it sets are those that are used, with no warning (case 13)."""
    bare_params = [nn.Parameter(torch.ones(2, device=device)), nn.Parameter(torch.ones(3, device=device))]
    bare = make([{"params": bare_params[:1]}, {"params": bare_params[1:], "lr": 3e-3}])
    expected = drive(bare, MAKERS[name](bare), bare_params)

    params = [vector(device, dtype), vector(device, dtype, 3)]
    inner = make([{"params": params[:1]}, {"params": params[1:], "lr": 3e-3}])
    scheduler = MAKERS[name](inner) if where == "inner before wrapping" else None
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0)
    if scheduler is None:
        scheduler = MAKERS[name](optimizer if where == "wrapper" else inner)
    used = drive(optimizer, scheduler, params)

    assert used == expected
    assert any(step != used[0] for step in used)
    assert hyperparameters(optimizer) == hyperparameters(inner)
    assert optimizer.applied_steps == 5
    for (_, master), param in zip(optimizer.named_masters(), bare_params, strict=True):
        assert_same(param.detach(), master.detach())


def test_one_cycle_cycles_momentum_and_betas(device: torch.device, dtype: torch.dtype) -> None:
    """The second cycled value reaches the inner optimizer too."""
    for make, key in ((make_momentum, "momentum"), (make_adamw, "betas")):
        optimizer = half_optimizer(device, dtype, make)
        lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=6)
        value = optimizer.inner.param_groups[0][key]
        assert (value[0] if key == "betas" else value) == 0.95
        assert optimizer.param_groups[0][key] == value


def test_a_tensor_learning_rate_stays_the_same_object(device: torch.device, dtype: torch.dtype) -> None:
    """A tensor lr is written in place, on both sides."""
    lr = torch.tensor(0.5, device=device)
    inner = torch.optim.AdamW([vector(device, dtype)], lr=lr, foreach=False, capturable=device.type == "cuda")
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0)
    scheduler = lr_scheduler.StepLR(optimizer, 1, 0.5)
    force_grads(optimizer, 1.0)
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] is inner.param_groups[0]["lr"] is lr
    assert float(lr) == 0.25


def test_an_edit_of_a_group_is_the_inner_optimizers(device: torch.device, dtype: torch.dtype) -> None:
    """The lr that is set is the lr that is used, after a load too."""
    params = [vector(device, dtype)]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.0), loss_scale=1.0)
    group = optimizer.param_groups[0]
    for lr in (0.5, 0.25):
        group["lr"] = lr
        before = float(masters_of(optimizer)["group0.param0"][0])
        force_grads(optimizer, 1.0)
        optimizer.step()
        assert before - float(masters_of(optimizer)["group0.param0"][0]) == lr
        assert optimizer.inner.param_groups[0]["lr"] == lr
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch replaces its dicts here
    optimizer.inner.param_groups[0]["lr"] = 0.125
    assert group["lr"] == 0.125


def test_a_group_view_is_like_a_dict(device: torch.device, dtype: torch.dtype) -> None:
    """Everything that code does with a group works, and writes go through."""
    optimizer = half_optimizer(device, dtype)
    view, inner = optimizer.param_groups[1], optimizer.inner.param_groups[1]
    assert view["params"] == optimizer.param_groups[1]["params"]
    assert view["params"][0].dtype == dtype
    assert inner["params"][0].dtype == torch.float32
    assert list(view) == list(inner)
    assert len(view) == len(inner)
    assert "lr" in view
    assert "other" not in view
    assert view.get("other", 7) == 7
    assert view.get("lr") == 3e-3
    assert view.setdefault("lr", 9.0) == 3e-3
    assert view.setdefault("initial_lr", 9.0) == 9.0 == inner["initial_lr"]
    assert dict(view.items())["initial_lr"] == 9.0
    assert set(view.keys()) == set(inner)
    view.update(lr=0.5, extra=1)
    assert (inner["lr"], inner["extra"]) == (0.5, 1)
    view |= {"extra": 2}
    assert optimizer.param_groups[1]["extra"] == inner["extra"] == 2
    assert view.pop("extra") == 2
    assert "extra" not in inner
    assert view.pop("extra", None) is None
    del view["initial_lr"]
    assert "initial_lr" not in inner
    merged, reverse, copied = view | {"lr": 1.0}, {"lr": 1.0} | view, view.copy()
    assert (merged["lr"], reverse["lr"], copied["lr"], view["lr"]) == (1.0, 0.5, 0.5, 0.5)
    assert type(merged) is type(reverse) is type(copied) is dict
    copied["lr"] = 3.0
    assert inner["lr"] == 0.5
    with pytest.raises(KeyError):
        view["other"]


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "ungated"])
@pytest.mark.parametrize("on_inner", [True, False])
def test_a_skipped_first_step_gives_no_false_warning(
    gated: bool, on_inner: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Case 10: with or without asking ``last_step.skipped``; gated, lr after k real steps is schedule(k)."""
    model, optimizer = wrapped(device, dtype)
    scheduler = lr_scheduler.LambdaLR(optimizer.inner if on_inner else optimizer, lambda k: 0.5**k)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            if step == 0:
                overflow(optimizer)
            else:
                train(model, optimizer, [step])
            if not (gated and optimizer.last_step.skipped):
                scheduler.step()
    assert (optimizer.skipped_steps, optimizer.applied_steps) == (1, 2)
    assert optimizer.param_groups[0]["lr"] == 1e-2 * 0.5 ** (2 if gated else 3)


def test_a_gated_scheduler_of_the_inner_optimizer_gives_no_warning(device: torch.device, dtype: torch.dtype) -> None:
    """Built on the inner optimizer, a scheduler sees the applied steps."""
    inner = make_momentum([vector(device, dtype)])
    scheduler = lr_scheduler.StepLR(inner, 1, 0.5)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=SMALL_SCALE)
    overflow(optimizer)
    for _ in range(2):
        force_grads(optimizer, 0.5)
        optimizer.step()
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25e-2


# -- hooks --------------------------------------------------------------------


def test_step_hooks_of_the_wrapper_run_at_every_step(device: torch.device, dtype: torch.dtype) -> None:
    """Pre- and post-hooks see the wrapper, once a step, skipped or not, until they are removed."""
    optimizer = half_optimizer(device, dtype)
    calls: list[tuple[str, bool, int]] = []
    handles = [
        optimizer.register_step_pre_hook(lambda o, a, k: calls.append(("pre", o is optimizer, o.applied_steps))),
        optimizer.register_step_post_hook(lambda o, a, k: calls.append(("post", o is optimizer, o.applied_steps))),
    ]
    force_grads(optimizer, 1.0)
    optimizer.step()
    overflow(optimizer)
    assert calls == [("pre", True, 0), ("post", True, 1), ("pre", True, 1), ("post", True, 1)]
    for handle in handles:
        handle.remove()
    overflow(optimizer)
    assert len(calls) == 4


def test_whoever_looks_at_the_steps_of_all_optimizers_sees_these(device: torch.device, dtype: torch.dtype) -> None:
    """Hooks on the steps of every optimizer run once a step while they are registered; a profiler sees its range."""
    optimizer, seen = half_optimizer(device, dtype), []
    handles = [
        register_optimizer_step_pre_hook(lambda o, a, k: seen.append("pre") if o is optimizer else None),
        register_optimizer_step_post_hook(lambda o, a, k: seen.append("post") if o is optimizer else None),
    ]
    optimizer.step()
    for handle in handles:
        handle.remove()
        optimizer.step()
    assert seen == ["pre", "post", "post"]
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        optimizer.step()
    names = [event.name for event in profiler.events()]
    assert names.count("Optimizer.step#MixedPrecisionOptimizer.step") == 1


def test_step_hooks_of_the_inner_optimizer_run_for_applied_steps_only(device: torch.device, dtype: torch.dtype) -> None:
    """A hook on the inner optimizer, from before wrapping too, never sees a skipped step."""
    inner = make_momentum([vector(device, dtype)])
    calls: list[str] = []
    inner.register_step_pre_hook(lambda o, a, k: calls.append("pre"))
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=SMALL_SCALE)
    inner.register_step_post_hook(lambda o, a, k: calls.append("post"))
    overflow(optimizer)
    optimizer.step()  # no gradients
    assert calls == []
    force_grads(optimizer, 1.0)
    optimizer.step()
    assert calls == ["pre", "post"]


def test_state_dict_hooks_of_the_wrapper_run(device: torch.device, dtype: torch.dtype) -> None:
    """All four kinds, and what they return is used."""
    optimizer = half_optimizer(device, dtype)
    calls: list[str] = []

    def note(name: str, result: Callable[[Any], Any] = lambda d: None) -> Callable[..., Any]:
        def hook(opt: Any, *rest: Any) -> Any:
            assert opt is optimizer
            calls.append(name)
            return result(*rest) if rest else None

        return hook

    optimizer.register_state_dict_pre_hook(note("before save"))
    optimizer.register_state_dict_post_hook(note("after save", lambda d: {**d, "mine": 1}))
    optimizer.register_load_state_dict_pre_hook(
        note("before load", lambda d: {**d, "param_groups": [{**g, "lr": 0.5} for g in d["param_groups"]]})
    )
    optimizer.register_load_state_dict_post_hook(note("after load"))
    saved = copy.deepcopy(optimizer.state_dict())
    assert saved["mine"] == 1
    optimizer.load_state_dict(saved)
    assert calls == ["before save", "after save", "before load", "after load"]
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["lr"] for group in saved["param_groups"]] == [1e-2, 3e-3]


# -- zero_grad, closures, copies ----------------------------------------------


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_drops_the_window(set_to_none: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Both forms; an unscaled window is dropped too, and the next batch is normal (case 23)."""
    model, optimizer = wrapped(device, dtype)
    twin, reference = wrapped(device, dtype)
    for unscaled in (False, True):
        optimizer.backward(loss_of(model, 3))
        if unscaled:
            optimizer.unscale_()
        optimizer.zero_grad(set_to_none)
        grads = [p.grad for p in model.parameters()]
        if set_to_none or unscaled:
            assert all(grad is None for grad in grads)
        else:
            assert {float(grad.abs().sum()) for grad in grads if grad is not None} == {0.0}
        assert all(master.grad is None for _, master in optimizer.named_masters())
        optimizer.zero_grad()
    for net, opt in ((model, optimizer), (twin, reference)):
        opt.backward(loss_of(net, 4))
        opt.step()
    assert optimizer.last_step.applied
    assert_same(masters_of(reference), masters_of(optimizer))
    assert_same(reference.state_dict(), optimizer.state_dict())


def test_zeroed_gradients_are_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """As in torch: zeros step (momentum drifts on), ``None`` does not."""
    optimizer = half_optimizer(device, dtype)
    force_grads(optimizer, 1.0)
    optimizer.step()
    force_grads(optimizer, 1.0)
    optimizer.zero_grad(set_to_none=False)
    before = masters_of(optimizer)
    optimizer.step()
    assert optimizer.applied_steps == 2
    assert differs(before, masters_of(optimizer))
    before = masters_of(optimizer)
    optimizer.step()
    assert_same(before, masters_of(optimizer))


@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_a_closure_is_evaluated_once_with_gradients(keyword: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Its loss is returned as it is, also when the caller has switched gradients off."""
    model, optimizer = wrapped(device, dtype)
    losses: list[torch.Tensor] = []

    def closure() -> torch.Tensor:
        assert torch.is_grad_enabled()
        optimizer.zero_grad()
        losses.append(loss_of(model, 0))
        optimizer.backward(losses[-1])
        return losses[-1]

    before = masters_of(optimizer)
    with torch.no_grad():
        result = optimizer.step(closure=closure) if keyword else optimizer.step(closure)
        assert not torch.is_grad_enabled()
    assert len(losses) == 1
    assert result is losses[0]
    assert optimizer.last_step.applied
    assert differs(before, masters_of(optimizer))
    assert optimizer.step() is None


def test_an_overflow_inside_a_closure_skips(device: torch.device, dtype: torch.dtype) -> None:
    """The loss is still returned; nothing but the scale has moved."""
    model, optimizer = wrapped(device, dtype)
    before = masters_of(optimizer), dict(model.state_dict())
    before = copy.deepcopy(before)

    def closure() -> torch.Tensor:
        loss = loss_of(model, 0) * float("inf")
        optimizer.backward(loss)
        return loss

    assert float(optimizer.step(closure).detach()) == float("inf")
    assert optimizer.last_step.skipped
    assert_same(before, (masters_of(optimizer), dict(model.state_dict())))
    assert optimizer.loss_scale == 2.0**6


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_copying_the_optimizer_is_refused(how: Callable[[Any], Any], device: torch.device, dtype: torch.dtype) -> None:
    """A clear ``TypeError`` with the remedy, and the optimizer works on (case 31)."""
    model, optimizer = wrapped(device, dtype)
    scheduler = lr_scheduler.StepLR(optimizer, 1)
    train(model, optimizer, [0, 1])
    before = snapshot(model, optimizer)
    with pytest.raises(TypeError, match=r"cannot be copied or pickled: .* Build a new one and load this one's state"):
        how(optimizer)
    assert_same(before, snapshot(model, optimizer))
    scheduler.step()
    train(model, optimizer, [2])
    assert optimizer.applied_steps == 3


# -- growing, freezing, mid-life ----------------------------------------------


def test_a_group_added_later_trains_and_makes_the_round_trip(device: torch.device, dtype: torch.dtype) -> None:
    """Case 25: a master is made, old moments stay, the new group has its own lr, and a save loads."""

    def layers() -> tuple[nn.Module, nn.Module]:
        return (seeded(lambda: nn.Linear(4, 4), device).to(dtype), seeded(lambda: nn.Linear(4, 2), device).to(dtype))

    def step(optimizer: MixedPrecisionOptimizer, *nets: nn.Module) -> None:
        x = torch.ones(3, 4, device=device, dtype=dtype)
        for net in nets:
            x = net(x)
        optimizer.backward(x.float().square().mean())
        optimizer.step()
        assert optimizer.last_step.applied

    first, second = layers()
    optimizer = MixedPrecisionOptimizer(make_adamw(first.parameters()), loss_scale=SMALL_SCALE)
    step(optimizer, first)
    step(optimizer, first)
    old = copy.deepcopy(optimizer.state_dict())
    pointers = [master.data_ptr() for _, master in optimizer.named_masters()]
    optimizer.add_param_group({"params": second.parameters(), "lr": 0.5})
    new = optimizer.state_dict()
    assert_same(old["state"], {index: new["state"][index] for index in old["state"]})
    assert [master.data_ptr() for _, master in optimizer.named_masters()][: len(pointers)] == pointers
    assert [group["lr"] for group in optimizer.inner.param_groups] == [1e-2, 0.5]
    assert list(masters_of(optimizer)) == ["group0.param0", "group0.param1", "group1.param0", "group1.param1"]
    before = masters_of(optimizer)
    step(optimizer, first, second)
    after = masters_of(optimizer)
    assert all(differs(before[name], after[name]) for name in after)
    assert float((before["group1.param1"] - after["group1.param1"]).abs().max()) > 0.25
    assert optimizer.inner.state[dict(optimizer.named_masters())["group1.param0"]]["step"] == 1

    third, fourth = layers()
    inner = make_adamw([{"params": third.parameters()}, {"params": fourth.parameters(), "lr": 0.5}])
    resumed = MixedPrecisionOptimizer(inner, loss_scale=SMALL_SCALE)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(optimizer, first, second)
    step(resumed, third, fourth)
    assert_same(optimizer.state_dict(), resumed.state_dict())
    assert torch.equal(second.weight, fourth.weight)
    overflow(resumed)  # the new group takes part in a skip too
    assert_same(masters_of(optimizer), masters_of(resumed))


def test_a_group_added_within_a_window_joins_it(device: torch.device, dtype: torch.dtype) -> None:
    """Gradients that wait for ``step`` stay where they are."""
    params = [vector(device, dtype), vector(device, dtype)]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params[:1], lr=0.25), loss_scale=1.0)
    force_grads(optimizer, 1.0)
    optimizer.add_param_group({"params": params[1:]})
    optimizer.step()
    assert [float(m[0]) for m in masters_of(optimizer).values()] == [0.75, 1.0]


def test_a_group_added_after_unscale_is_served_or_refused(device: torch.device, dtype: torch.dtype) -> None:
    """Between ``unscale_`` and ``step`` a new group is idle in this window."""
    params = [vector(device, dtype), vector(device, dtype)]
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params[:1], lr=0.25), loss_scale=1.0)
    force_grads(optimizer, 1.0)
    optimizer.unscale_()
    optimizer.add_param_group({"params": params[1:]})
    optimizer.step()
    assert [float(m[0]) for m in masters_of(optimizer).values()] == [0.75, 1.0]


def test_a_group_of_named_parameters_can_be_added(device: torch.device, dtype: torch.dtype) -> None:
    """Torch's ``add_param_group`` accepts ``named_parameters()``; so does the wrapper."""
    inner = torch.optim.SGD([("a", vector(device, dtype))], lr=0.25)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0)
    optimizer.add_param_group({"params": [("b", vector(device, dtype))]})
    assert list(masters_of(optimizer)) == ["a", "b"]


def test_freezing_and_unfreezing_in_mid_run(device: torch.device, dtype: torch.dtype) -> None:
    """Case 26: a frozen layer is bit-unchanged, an unfrozen one starts to move, a frozen one stops."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)), device)
    model[1].requires_grad_(False)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=SMALL_SCALE)

    def moved() -> list[bool]:
        before = copy.deepcopy(dict(model.state_dict()))
        optimizer.backward(model(torch.ones(3, 4, device=device)).square().mean())
        optimizer.step()
        assert optimizer.last_step.applied
        after = dict(model.state_dict())
        for name, master in optimizer.named_masters():
            assert torch.equal(after[name], master.to(dtype))
        return [differs(before[f"{i}.weight"], after[f"{i}.weight"]) for i in range(3)]

    assert moved() == [True, False, True]
    assert set(masters_of(optimizer)) == {"0.weight", "0.bias", "2.weight", "2.bias"}
    model[1].requires_grad_(True)
    assert moved() == [True, True, True]
    assert "1.weight" in masters_of(optimizer)
    model[0].requires_grad_(False)
    master, state = masters_of(optimizer)["0.weight"], copy.deepcopy(optimizer.state[model[0].weight])
    assert moved() == [False, True, True]
    assert_same(master, masters_of(optimizer)["0.weight"])
    assert_same(state, optimizer.state[model[0].weight])
    assert [int(optimizer.state[layer.weight]["step"]) for layer in model] == [2, 2, 3]


def test_frozen_parameters_get_no_master(device: torch.device, dtype: torch.dtype) -> None:
    """Case 27: of 1000 values 10 are trainable, a group has none: ten master values, groups keep their index."""
    train_me = vector(device, dtype, 10)
    frozen = vector(device, dtype, 990).requires_grad_(False)
    others = [vector(device, dtype, 5).requires_grad_(False) for _ in range(3)]
    inner = make_adamw([{"params": [frozen, train_me]}, {"params": others, "lr": 0.5}])
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=SMALL_SCALE)
    assert sum(master.numel() for _, master in optimizer.named_masters()) == 10
    assert sum(m.untyped_storage().nbytes() // 4 for _, m in optimizer.named_masters()) == 64
    force_grads(optimizer, 0.5)
    optimizer.step()
    assert optimizer.last_step.applied
    assert [len(group["params"]) for group in optimizer.param_groups] == [2, 3]
    assert optimizer.param_groups[1]["lr"] == 0.5
    assert bool((frozen == 1).all())
    assert not bool((train_me == 1).any())


def test_a_model_that_is_all_frozen_steps_without_effect(device: torch.device, dtype: torch.dtype) -> None:
    """No master at all is legal: a step has no gradients."""
    inner = make_momentum([vector(device, dtype).requires_grad_(False)])
    optimizer = MixedPrecisionOptimizer(inner)
    optimizer.step()
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 0)
    assert masters_of(optimizer) == {}


def test_wrapping_in_mid_life_carries_the_state(device: torch.device, dtype: torch.dtype) -> None:
    """Case 14: momentum of three fp32 steps counts in the fourth, as in an fp32 run."""
    results = []
    for wrap in (True, False):
        model = two_group_model(device)
        inner = torch.optim.SGD(two_groups(model), momentum=0.9)
        params = [p for p in model.parameters() if p.requires_grad]

        def force(scale: float, params: list[nn.Parameter] = params) -> None:
            for param in params:
                param.grad = torch.full_like(param, scale)

        for _ in range(3):
            force(1.0)
            inner.step()
        optimizer: Any = inner
        if wrap:
            optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=StaticLossScale(8.0))
            buffers = [optimizer.state[param]["momentum_buffer"] for param in params]
            assert all(bool((buffer > 1).all()) for buffer in buffers)
            assert {buffer.dtype for buffer in buffers} == {torch.float32}
            optimizer.scale(torch.zeros((), device=device))
        force(8.0 if wrap else 1.0)
        optimizer.step()
        weights = optimizer.master_state_dict() if wrap else dict(model.state_dict())
        results.append({name: value for name, value in weights.items() if "frozen" not in name})
    assert_same(*results)
    assert differs(results[0]["head.bias"], two_group_model(device).head.bias.detach())


def test_gradients_left_from_before_wrapping_are_dropped(device: torch.device, dtype: torch.dtype) -> None:
    """They are unscaled and belong to nobody: a step right after wrapping has no gradients."""
    model = two_group_model(device)
    loss_of(model, 0).backward()
    inner = make_adamw(two_groups(model))
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype)
    assert all(param.grad is None for param in model.parameters())
    optimizer.step()
    assert optimizer.last_step.reason == "no gradients"
