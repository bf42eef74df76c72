"""The compiled tier: the same step as the eager one, in one pass, whatever happens around it."""

from __future__ import annotations

import contextlib
import copy
import shutil
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import (
    SMALL_SCALE,
    assert_same,
    force_grads,
    fp32_twin,
    loss_of,
    masters_of,
    overflow,
    snapshot,
    through_file,
    train,
    two_group_model,
    two_groups,
    wrapped,
)
from strategies import bags
from torch import Tensor, nn
from torch._inductor.utils import run_and_get_code

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, SharedLossScale, host_kernels, register_rule, tiers
from mixedopt.compiled import RECOMPILE_LIMIT, compiled, runs_of
from mixedopt.copies import mapped
from mixedopt.decision import decide
from mixedopt.flat import ALIGNMENT
from mixedopt.gradients import ROW_OF_HALF, GradientBuffer, row_squares
from mixedopt.masters import MasterWeights
from mixedopt.rules import RULES, rule_for

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")

CPU = torch.device("cpu")
ULP = 2.0**-23
# Of each value. One for 1 - beta2 in torch's fused CPU kernel, and for the square in addcmul, which a GPU multiplies by
# it afterwards; one for g + decay * w under that square. In all else kernels and torch round in the same places.
EXACT_ULPS = 2
# NAdam subtracts two quotients, each of which torch on a GPU multiplies by its rate afterwards: one more.
TWO_QUOTIENTS = 1
# What lies behind a root, which torch on a CPU rounds up to a unit off; Adadelta's quotient has two, and is squared.
BEHIND_A_ROOT = {"RMSprop, momentum", "RMSprop, both", "Adadelta"}
# Of the largest value of a tensor. torch.compile rounds a product that torch adds in one operation (lerp, addcmul): one
# for g + decay * w, whose square counts twice, one for that with 1 - beta, one for the sum. A clip factor is made of a
# norm that was summed in another order: one.
MOMENT_ULPS = 4
# Torch's fused CUDA kernel forms 1 - beta2 in fp32: 108 units beside 1 - 0.999, which the rule rounds once.
FUSED_ON_GPU_ULPS = 112
# The update is a quotient of moments that differ by that much; in units of the larger of the weight and the largest
# update of its tensor, since an update may itself be a difference (a momentum, and a gradient against it).
PARAM_ULPS = 4

Make = Callable[[Any], torch.optim.Optimizer]


@pytest.fixture(params=["kernels", "torch.compile"], autouse=True)
def compiler(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compile a step on a CPU: kernels of ours, and what serves where they do not."""
    if request.param == "torch.compile":
        if device.type == "cuda":
            pytest.skip("on a GPU kernels serve")
        monkeypatch.setattr(tiers, "_rule_on_host", lambda request: None)
    return request.param


def sgd(**options: Any) -> Make:
    return lambda params: torch.optim.SGD(params, lr=1e-2, **options)


def trained_only(groups: Any) -> Any:
    """Leave out what is frozen: Adagrad makes its state at once, for everything it is given."""
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]


MAKES: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-2),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.99), eps=1e-6),
    "Adam without beta1": lambda params: torch.optim.Adam(params, lr=1e-2, betas=(0.0, 0.99)),
    "AdamW, fused": lambda params: torch.optim.AdamW(params, lr=1e-2, fused=True),
    "AMSGrad": lambda params: torch.optim.AdamW(params, lr=1e-2, amsgrad=True),
    "AdamW, maximize": lambda params: torch.optim.AdamW(params, lr=1e-3, maximize=True),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=1e-2, weight_decay=0.1),
    "NAdam, decoupled": lambda params: torch.optim.NAdam(
        params, lr=1e-2, weight_decay=0.1, momentum_decay=0.1, decoupled_weight_decay=True
    ),
    "RAdam": lambda params: torch.optim.RAdam(params, lr=1e-2, betas=(0.9, 0.9)),
    "Adamax": lambda params: torch.optim.Adamax(params, lr=1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(trained_only(params), lr=1e-2, lr_decay=0.1),
    "Adagrad, initial": lambda params: torch.optim.Adagrad(
        trained_only(params), lr=1e-2, initial_accumulator_value=0.1
    ),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),
    "RMSprop, momentum": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9),
    "RMSprop, centered": lambda params: torch.optim.RMSprop(params, lr=1e-3, centered=True),
    "RMSprop, both": lambda params: torch.optim.RMSprop(params, lr=1e-3, momentum=0.9, centered=True),
    "Adadelta": lambda params: torch.optim.Adadelta(params, lr=1e-1),
    "SGD": sgd(),
    "momentum": sgd(momentum=0.9),
    "dampening": sgd(momentum=0.9, dampening=0.5),
    "nesterov": sgd(momentum=0.9, nesterov=True),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=1e-2, lambd=0.1, t0=2, weight_decay=0.1),
    "Rprop": lambda params: torch.optim.Rprop(params, lr=1e-3, step_sizes=(1e-5, 1e-2)),
}
NAMES = list(MAKES)


def pair(name: str, device: torch.device, dtype: torch.dtype, **options: Any) -> list[tuple[nn.Module, Any]]:
    """Return the same run eagerly and compiled."""
    return [wrapped(device, dtype, MAKES[name], tier=tier, **options) for tier in ("eager", "compiled")]


def ulps(found: Tensor, expected: Tensor, size: Tensor | None = None) -> float:
    """Return the largest difference in units of the last place of ``size``, the expected value by default."""
    size = expected.abs() if size is None else torch.maximum(expected.abs(), size.abs())
    return float(((found.double() - expected.double()).abs() / (size.double() * ULP).clamp(min=1e-38)).max())


@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_is_that_of_the_eager_tier(
    name: str, clip: float | None, compiler: str, device: torch.device, dtype: torch.dtype
) -> None:
    """From equal states, fed equal gradients: moments and weights within a few units in the last place."""
    eager, compiled = (o for _, o in pair(name, device, dtype, max_grad_norm=clip))
    for step in range(4):
        compiled.load_state_dict(copy.deepcopy(eager.state_dict()))
        before = masters_of(eager)
        for optimizer in (eager, compiled):
            generator = torch.Generator().manual_seed(step)
            force_grads(optimizer, 1.0)
            for param in (p for group in optimizer.param_groups for p in group["params"] if p.grad is not None):
                param.grad.copy_(torch.randn(param.shape, generator=generator) * 2.0**step)
            optimizer.step()
        after, found = masters_of(eager), masters_of(compiled)
        rough = device.type == "cuda" and "fused" in name
        exact = compiler == "kernels" and clip is None and not rough and name not in BEHIND_A_ROOT
        for key, value in after.items():
            limit = FUSED_ON_GPU_ULPS if rough else EXACT_ULPS + TWO_QUOTIENTS * ("NAdam" in name)
            limit = limit if exact or rough else PARAM_ULPS
            update = (value - before[key]).abs()
            assert ulps(found[key], value, update if exact else update.max()) <= limit, (step, key)
        for param, other in zip(eager.state.values(), compiled.state.values(), strict=True):
            assert list(param) == list(other)
            for key, value in param.items():
                if key == "step":
                    assert float(value) == float(other[key])
                else:
                    limit = FUSED_ON_GPU_ULPS if rough else EXACT_ULPS if exact else MOMENT_ULPS
                    assert ulps(other[key], value, None if exact else value.abs().max()) <= limit, (step, key)
    assert compiled.tier == "compiled"


@pytest.mark.parametrize("name", NAMES)
def test_a_run_stays_near_the_eager_one(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Losses agree to three digits over thirty steps with overflows, a moving rate, and a branch used now and then."""
    losses: list[list[float]] = []
    for model, optimizer in pair(name, device, dtype, loss_scale=DynamicLossScale(2.0**7, growth_interval=4)):
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1.0 + step / 20))
        seen = []
        for step in range(30):
            loss = loss_of(model, step, use_branch=step % 5 == 3)
            optimizer.backward(loss * float("inf") if step in (0, 11) else loss)
            optimizer.step()
            scheduler.step()
            seen.append(float(loss.detach()))
        assert (optimizer.applied_steps, optimizer.skipped_steps) == (28, 2)
        losses.append(seen)
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert (losses[0][-1] < losses[0][0]) == ("maximize" not in name)


@pytest.mark.parametrize("name", NAMES)
def test_a_skip_changes_nothing(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Masters, weights and state, bit for bit; a skipped first step leaves fresh state."""
    model, optimizer = wrapped(device, dtype, MAKES[name], tier="compiled")
    for _ in range(2):
        before = snapshot(model, optimizer)
        overflow(optimizer)
        after = snapshot(model, optimizer)
        for part in ("masters", "weights", "inner"):
            # Adagrad's counts are there from the start; a GPU takes them along.
            assert_same(mapped(before[part], Tensor.cpu), mapped(after[part], Tensor.cpu), part)
        train(model, optimizer, range(2))


@pytest.mark.parametrize("name", NAMES)
def test_checkpoints_do_not_know_the_tier(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """Resumed in the same tier it is exact; from the other it starts with the same bits."""
    model, optimizer = wrapped(device, dtype, MAKES[name], tier="compiled")
    train(model, optimizer, range(3))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    for tier in ("compiled", "eager"):
        fresh, resumed = wrapped(device, dtype, MAKES[name], tier=tier)
        train(fresh, resumed, [9])  # in mid-life, so that there is something to write over
        fresh.load_state_dict(saved["model"])
        resumed.load_state_dict(saved["optimizer"])
        # A fused optimizer of torch counts on the device.
        assert_same(mapped(saved["optimizer"], Tensor.cpu), mapped(through_file(resumed.state_dict()), Tensor.cpu))
        if tier == "compiled":
            train(fresh, resumed, [3, 4])
            train(model, optimizer, [3, 4])
            assert_same(optimizer.state_dict(), resumed.state_dict())
        else:
            train(fresh, resumed, [3])
            assert resumed.applied_steps == 4


def test_the_state_is_the_inner_optimizer_s_own(device: torch.device, dtype: torch.dtype) -> None:
    """Views under torch's names; what has no gradient has none, nor a count."""
    model, optimizer = wrapped(device, dtype, tier="compiled")
    train(model, optimizer, range(2))
    assert model.branch.weight not in optimizer.state
    entry = optimizer.state[model.hidden.weight]
    assert list(entry) == ["step", "exp_avg", "exp_avg_sq"]
    assert (float(entry["step"]), entry["exp_avg"].shape) == (2.0, model.hidden.weight.shape)
    for param in model.parameters():
        param.grad = None
    optimizer.backward(loss_of(model, 3, use_branch=True))
    optimizer.step()
    assert float(optimizer.state[model.branch.weight]["step"]) == 1.0
    assert float(entry["step"]) == 3.0


@pytest.mark.parametrize("name", ["AdamW", "AdamW, fused"])
@pytest.mark.parametrize("event", ["hook", "amsgrad", "tensor lr", "maximize"])
def test_what_no_rule_covers_is_the_inner_optimizer_s_step(
    event: str, name: str, device: torch.device, dtype: torch.dtype
) -> None:
    """A hook is called, an option is obeyed; afterwards the rule goes on from there."""
    eager, compiled = pair(name, device, dtype)
    called: list[int] = []
    for model, optimizer in (eager, compiled):
        train(model, optimizer, range(2))
        if event == "hook":
            handle = optimizer.inner.register_step_post_hook(lambda *args: called.append(1))
        for group in optimizer.param_groups:
            if event == "amsgrad":
                group["amsgrad"] = True
                for entry in optimizer.inner.state.values():
                    entry["max_exp_avg_sq"] = torch.zeros_like(entry["exp_avg_sq"])
            elif event == "tensor lr":
                group["lr"] = torch.tensor(1e-2)
                group["foreach"] = None if group["fused"] else False
            elif event == "maximize":
                group["maximize"] = True
        train(model, optimizer, [2])
        if event == "hook":
            handle.remove()
        for group in optimizer.param_groups:
            group["amsgrad"] = group["maximize"] = False
            group["lr"] = 1e-2
        train(model, optimizer, [3])
    masters = [masters_of(optimizer) for _, optimizer in (eager, compiled)]
    assert len(called) == (2 if event == "hook" else 0)
    for key, value in masters[0].items():
        assert torch.allclose(value, masters[1][key], rtol=1e-4, atol=1e-6), key


def test_new_values_of_hyperparameters_compile_nothing(device: torch.device, dtype: torch.dtype) -> None:
    """Rates, betas, decay, clipping and overflows: no recompilation after the second step."""
    model, optimizer = wrapped(device, dtype, tier="compiled", max_grad_norm=0.1)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=30)
    train(model, optimizer, range(2))
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(2, 12):
            train(model, optimizer, [step])
            scheduler.step()
            optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        overflow(optimizer)
        optimizer.backward(loss_of(model, 3, use_branch=True))
        optimizer.step()
    assert optimizer.applied_steps == 13


EDITS: dict[str, Callable[[dict[Any, Any], Any], Any]] = {
    "count in place": lambda state, param: state[param]["step"].zero_(),
    "scalar in place": lambda state, param: state[param]["mu_product"].fill_(1.0),
    "another tensor": lambda state, param: state[param].update(exp_avg=torch.full_like(state[param]["exp_avg"], 0.01)),
    "changed places": lambda state, param: state[param].update(
        exp_avg=state[param]["exp_avg_sq"], exp_avg_sq=state[param]["exp_avg"].abs()
    ),
    "changed places in ours": lambda state, param: state[param].update(
        exp_avg=state[param]["exp_avg_sq"], exp_avg_sq=state[param]["exp_avg"].abs_()
    ),
    "another entry": lambda state, param: state.update({param: {}}),
    "no entry": lambda state, param: state.pop(param),
}


@pytest.mark.parametrize("edit", EDITS)
def test_state_may_be_edited_between_steps(edit: str, device: torch.device, dtype: torch.dtype) -> None:
    """By anybody, of one parameter: the next steps go on from there, as in the eager tier."""
    found = []
    for tier in ("eager", "compiled"):
        model, optimizer = wrapped(device, dtype, MAKES["NAdam"], tier=tier)
        train(model, optimizer, range(3))
        master = dict(optimizer.named_masters())["hidden.weight"]
        EDITS[edit](optimizer.inner.state, master)
        train(model, optimizer, range(3, 5))
        found.append((masters_of(optimizer)["hidden.weight"], optimizer.inner.state[master]))
    (weight, state), (other, values) = found
    assert torch.allclose(weight, other, rtol=1e-4, atol=1e-6)
    assert float(state["step"]) == float(values["step"])
    for name in ("exp_avg", "mu_product"):
        assert torch.allclose(state[name], values[name].to(state[name].device), rtol=1e-4, atol=1e-6), name


def test_state_that_cannot_be_taken_stays_as_it_is(device: torch.device, dtype: torch.dtype) -> None:
    """An error before anything is written: what else was put there is not lost."""
    model, optimizer = wrapped(device, dtype, tier="compiled")
    train(model, optimizer, range(2))
    (_, first), *_, (_, last) = optimizer.named_masters()
    state = optimizer.inner.state
    given = state[first]["exp_avg"] = torch.full_like(state[first]["exp_avg"], 7.0)
    state[last]["exp_avg"] = "seven"
    optimizer.backward(loss_of(model, 2, use_branch=True))
    with pytest.raises(ValueError, match="seven"):
        optimizer.step()
    assert state[first]["exp_avg"] is given
    assert state[last]["exp_avg"] == "seven"


def test_the_process_may_change_its_state(device: torch.device, dtype: torch.dtype) -> None:
    """What makes Dynamo compile anew between steps is no error, however few it allows; nor is autocast, to the bits."""
    weights = []
    for context in (contextlib.nullcontext(), torch.autocast(device.type, torch.bfloat16)):
        model, optimizer = wrapped(device, dtype, tier="compiled")
        train(model, optimizer, [0])
        optimizer.backward(loss_of(model, 1))
        with torch._dynamo.config.patch(recompile_limit=1), context:
            optimizer.step()
        weights.append(masters_of(optimizer))
    assert_same(*weights)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(
    default: torch.dtype, request: pytest.FixtureRequest, device: torch.device, dtype: torch.dtype
) -> None:
    """Neither to the step nor to state, counts included, which are fp32."""
    runs, before = [], torch.get_default_dtype()
    request.addfinalizer(lambda: torch.set_default_dtype(before))
    for kind in (before, default):
        model = two_group_model(device)
        torch.set_default_dtype(kind)
        inner = MAKES["NAdam"](two_groups(model))
        options: dict[str, Any] = {"loss_scale": SMALL_SCALE, "max_grad_norm": 0.5}
        optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, tier="compiled", **options)
        train(model, optimizer, range(3))
        torch.set_default_dtype(before)
        runs.append({"masters": masters_of(optimizer), "state": copy.deepcopy(inner.state_dict()["state"])})
    assert_same(*runs)


def test_a_graph_recorded_before_the_step_is_stale(device: torch.device, dtype: torch.dtype) -> None:
    """As with plain torch: backward over it raises."""
    model, optimizer = wrapped(device, dtype, tier="compiled")
    train(model, optimizer, [0])
    loss = loss_of(model, 1)
    train(model, optimizer, [2])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_parameters_may_come_later(device: torch.device, dtype: torch.dtype) -> None:
    """A new group, and a layer that is thawed."""
    eager, compiled = pair("AdamW", device, dtype)
    for model, optimizer in (eager, compiled):
        train(model, optimizer, range(2))
        model.frozen.requires_grad_(True)
        train(model, optimizer, [2])
        model.late = nn.Parameter(torch.ones(5, device=device))
        optimizer.add_param_group({"params": [model.late], "lr": 0.5})
        optimizer.backward(loss_of(model, 3) + model.late.square().sum())
        optimizer.step()
        assert float(optimizer.state[model.late]["step"]) == 1.0
    for key, value in masters_of(eager[1]).items():
        assert torch.allclose(value, masters_of(compiled[1])[key], rtol=1e-4, atol=1e-6), key


@given(bags(CPU), st.data())
def test_runs_cover_every_gradient_once(model: nn.Module, data: st.DataObject) -> None:
    """Whatever shapes, groups, missing gradients and counts: no value in two runs, none of another slot, all in one."""
    params = list(model.parameters())
    masters = MasterWeights()
    masters.extend([(f"{i}", p) for i, p in enumerate(params)], [torch.float16] * len(params))
    for bucket in masters.buckets:
        slots = bucket.layout.slots
        marks = data.draw(st.lists(st.booleans(), min_size=len(slots), max_size=len(slots)))
        counts = data.draw(st.lists(st.integers(0, 1), min_size=len(slots), max_size=len(slots)))
        group_of = {master: data.draw(st.integers(0, 1)) for master in bucket.masters}
        runs = runs_of(bucket, counts, marks, group_of)
        seen = torch.zeros(bucket.layout.size, dtype=torch.int64)
        for run in runs:
            seen[run.start : run.stop] += 1
            inside = range(*run.slots)
            assert {(group_of[bucket.masters[i]], counts[i], marks[i]) for i in inside} == {
                (run.group, counts[run.slots[0]], True)
            }
        assert [i for run in runs for i in range(*run.slots)] == [i for i, mark in enumerate(marks) if mark]
        for slot, mark in zip(slots, marks, strict=True):
            assert set(seen[slot.offset : slot.offset + slot.numel].tolist()) <= {int(mark)}


def test_an_optimizer_in_mid_life_goes_on(device: torch.device, dtype: torch.dtype) -> None:
    """Its moments are taken over when it is wrapped, and left to it when the conversion is removed."""
    found = []
    for tier in ("eager", "compiled"):
        model, bare = fp32_twin(device, MAKES["AdamW"])
        for step in range(2):
            bare.zero_grad()
            loss_of(model, step).backward()
            bare.step()
        optimizer = MixedPrecisionOptimizer(bare, model, dtype=dtype, loss_scale=SMALL_SCALE, tier=tier)
        train(model, optimizer, [2, 3])
        optimizer.policy_handle.remove()
        bare.zero_grad()
        loss_of(model, 4).backward()
        bare.step()
        assert float(bare.state[model.hidden.weight]["step"]) == 5.0
        found.append({name: param.detach().clone() for name, param in model.named_parameters()})
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-4, atol=1e-6), key


def test_counts_part_and_meet_again(device: torch.device, dtype: torch.dtype) -> None:
    """A branch that steps with the others, stays behind, and steps again, in a run and across a load."""
    eager, compiled = pair("AdamW", device, dtype)
    for model, optimizer in (eager, compiled):
        for step, branch in enumerate((True, False, False, True)):
            optimizer.backward(loss_of(model, step, use_branch=branch))
            optimizer.step()
    saved = through_file(compiled[1].state_dict())
    fresh = wrapped(device, dtype, MAKES["AdamW"], tier="compiled")
    for step in range(2):  # all counts alike, until the load
        fresh[1].backward(loss_of(fresh[0], step, use_branch=True))
        fresh[1].step()
    fresh[1].load_state_dict(saved)
    for model, optimizer in (eager, compiled, fresh):
        optimizer.backward(loss_of(model, 4, use_branch=True))
        optimizer.step()
        counts = {name: int(optimizer.state[getattr(model, name).weight]["step"]) for name in ("hidden", "branch")}
        assert counts == {"hidden": 5, "branch": 3}
    assert_same(masters_of(compiled[1]), masters_of(fresh[1]))
    for key, value in masters_of(eager[1]).items():
        assert torch.allclose(value, masters_of(compiled[1])[key], rtol=1e-4, atol=1e-6), key


def test_gradients_gathered_in_half_give_the_same_bits(compiler: str, device: torch.device, dtype: torch.dtype) -> None:
    """What a GPU does, on every device: over clipping, ``unscale_``, a hooked step, an overflow, sparse gradients."""
    if compiler == "kernels":
        pytest.skip("kernels read gradients where they lie")
    found = []
    for narrow in (False, True):
        model, optimizer = wrapped(device, dtype, tier="compiled", max_grad_norm=0.1)
        table = nn.Embedding(5, 4, sparse=True, device=device).to(dtype)
        nn.init.ones_(table.weight)
        rows = MixedPrecisionOptimizer(sgd()(table.parameters()), loss_scale=4.0, tier="compiled")
        for each in (optimizer, rows):
            window = each._tier.window
            buckets = each._parts.masters.buckets
            halves = [GradientBuffer(b.layout, b.device, b.dtype) if b.is_half else None for b in buckets]
            window._half_buffers = halves if narrow else [None] * len(halves)
        for step in range(6):
            optimizer.backward(loss_of(model, step, use_branch=step == 3))
            if step == 2:
                optimizer.unscale_()
            handle = optimizer.inner.register_step_post_hook(lambda *args: None)
            if step != 4:
                handle.remove()
            optimizer.step()
            handle.remove()
            rows.backward(table(torch.tensor([1, step % 5], device=device)).float().sum())
            rows.step()
        overflow(optimizer)
        train(model, optimizer, [8])
        assert (optimizer.applied_steps, rows.applied_steps) == (7, 6)
        found.append({**masters_of(optimizer), **masters_of(rows)})
    assert_same(*found)


@pytest.mark.parametrize("size", [2.0**-100, 2.0**-60, 1.0, 2.0**60, 2.0**100])
def test_gradients_of_any_magnitude_are_judged_at_once(
    size: float, compiler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU: no second look, no fp32 copy of bf16 gradients; steps and norm are those of the eager tier."""
    judged: list[str] = []

    def counted(*args: Any, **kwargs: Any) -> Any:
        judged.append(tier)
        return decide(*args, **kwargs)

    monkeypatch.setattr("mixedopt.eager.decide", counted)
    found, norms = [], []
    for tier in ("eager", "compiled"):
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(n, generator=generator).bfloat16()) for n in (30_000, 70)]
        inner = torch.optim.AdamW(params, lr=1e-2)
        optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0, max_grad_norm=0.5, tier=tier)
        for _ in range(2):
            for param in params:
                param.grad = (torch.randn(param.shape, generator=generator) * size).to(param.dtype)
            optimizer.step()
        assert optimizer.applied_steps == 2
        found.append(masters_of(optimizer))
        norms.append(optimizer.last_step.grad_norm)
    assert judged.count("compiled") == (2 if compiler == "torch.compile" else 0)
    assert all(buffer._flat is None for buffer in optimizer._tier.window._buffers)
    assert norms[0] == pytest.approx(norms[1], rel=1e-6)
    for key, value in found[0].items():
        assert ulps(found[1][key], value, value.abs().max()) <= 2 * PARAM_ULPS, key


@pytest.mark.parametrize("size", [2 * ALIGNMENT, 2**15])
def test_loops_are_shared_out_whatever_was_compiled_first(size: int, dtype: torch.dtype) -> None:
    """On a CPU the threads there are at the call take part, also when small tensors, or one thread, came first."""
    rule = RULES[torch.optim.AdamW][0]
    numbers = torch.zeros(9)
    master, *state = (torch.zeros(size) for _ in range(3))
    for function, args in (
        (rule.step_, (master.to(dtype), numbers, master, master.to(dtype), *state)),
        (row_squares, (torch.zeros(size // ALIGNMENT, ROW_OF_HALF, dtype=dtype),)),
    ):
        torch._dynamo.reset()
        with torch.no_grad(), torch._dynamo.config.patch(recompile_limit=RECOMPILE_LIMIT):
            _, code = run_and_get_code(compiled(function), *args)
        assert [line.strip() for line in "".join(code).splitlines() if "omp parallel" in line] == [
            "#pragma omp parallel"
        ]


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "ASGD"])
def test_a_step_that_fails_counts_nothing(
    name: str, compiler: str, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    """Out of memory, say: masters, state and counts are as before, the gradients are gone, and training goes on."""
    model, optimizer = wrapped(device, dtype, MAKES[name], tier="compiled")
    for steps in (range(2), range(2, 4)):
        before = snapshot(model, optimizer)

        def fails(*args: Any) -> None:
            raise MemoryError

        with monkeypatch.context() as patch:
            if compiler == "torch.compile":
                patch.setattr(optimizer._tier, "_compiled", fails)
            else:  # a kernel that must be made first, say
                patch.setattr(optimizer._tier._kernels, "update_launcher", fails)
                if optimizer._tier._tables is not None:
                    optimizer._tier._tables.launches.clear()
            with pytest.raises(MemoryError):
                train(model, optimizer, [9])
        assert_same(before, snapshot(model, optimizer))
        train(model, optimizer, steps)
    assert float(optimizer.state[model.hidden.weight]["step"]) == 4.0


def test_a_shared_scale_and_unscaled_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """``shared.step`` and edits after ``unscale_`` reach the compiled step."""
    found = []
    for tier in ("eager", "compiled"):
        model = two_group_model(device)
        first, second = two_groups(model)
        shared = SharedLossScale(SMALL_SCALE)
        both = [
            MixedPrecisionOptimizer(MAKES["AdamW"]([g]), model, dtype=dtype, loss_scale=shared, tier=tier)
            for g in (first, second)
        ]
        for step in range(3):
            both[0].backward(loss_of(model, step))
            both[0].unscale_()
            for _, master in both[0].named_masters():
                if master.grad is not None:
                    master.grad.mul_(0.5)
            shared.step(*both)
        found.append({**masters_of(both[0]), **masters_of(both[1])})
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("name", ["NAdam", "ASGD", "Rprop"])
def test_state_that_starts_elsewhere_starts_at_the_first_step(
    name: str, device: torch.device, dtype: torch.dtype
) -> None:
    """With the rate of that step, after a skip, for each parameter alone; across a load, too."""
    eager, compiled = pair(name, device, dtype)
    for model, optimizer in (eager, compiled):
        for step in range(5):
            for group in optimizer.param_groups:
                group["lr"] = 0.01 / (1 + step)
            if step == 0:
                overflow(optimizer)
                continue
            optimizer.backward(loss_of(model, step, use_branch=step in (2, 3)))
            optimizer.step()
    fresh = wrapped(device, dtype, MAKES[name], tier="compiled")
    train(*fresh, [7])
    fresh[1].load_state_dict(through_file(compiled[1].state_dict()))
    for model, optimizer in (eager, compiled, fresh):
        optimizer.backward(loss_of(model, 5, use_branch=True))
        optimizer.step()
    assert_same(masters_of(compiled[1]), masters_of(fresh[1]))
    hidden, branch = (compiled[0].hidden.weight, compiled[0].branch.weight)
    found = [
        {key: entry[key] for key in entry if key != "step"} for entry in map(compiled[1].state.get, (hidden, branch))
    ]
    for part, param in zip(found, (eager[0].hidden.weight, eager[0].branch.weight), strict=True):
        for key in {"mu_product", "eta", "mu", "step_size"} & part.keys():
            assert torch.allclose(part[key].cpu(), eager[1].state[param][key].cpu(), rtol=4 * ULP, atol=0.0), key
    assert name != "ASGD" or not torch.equal(found[0]["eta"], found[1]["eta"])


def test_equal_counts_may_have_parted_scalars(device: torch.device, dtype: torch.dtype) -> None:
    """Layers that step in turns, at other rates, and then together: each by the eta that its own last step left."""
    states = []
    for tier in ("eager", "compiled"):
        torch.manual_seed(0)
        model = nn.ModuleList([nn.Linear(4, 4, device=device), nn.Linear(4, 4, device=device)])
        inner = torch.optim.ASGD(model.parameters(), lr=1e-2, t0=0)
        optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=SMALL_SCALE, tier=tier)
        for step, layers in enumerate(([0], [1], [0, 1])):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            x = torch.ones(2, 4, device=device, dtype=dtype)
            optimizer.backward(torch.stack([model[i](x).float().square().mean() for i in layers]).sum())
            optimizer.step()
            if step == 1:
                states.append([float(optimizer.state[layer.weight]["eta"]) for layer in model])
        states.append(masters_of(optimizer))
    (eager_etas, eager, etas, compiled) = states
    assert etas == pytest.approx(eager_etas, rel=4 * ULP)
    assert etas[0] != etas[1]
    for key, value in eager.items():
        assert ulps(compiled[key], value, value.abs().max()) <= PARAM_ULPS, key


def test_a_registered_class_steps_by_its_rule(device: torch.device, dtype: torch.dtype) -> None:
    """A wrapper that has the rule keeps it when the registration is removed."""
    kind = type("Mine", (torch.optim.SGD,), {})
    handle = register_rule(kind, *RULES[torch.optim.SGD])
    makes: list[Make] = [lambda params: kind(params, lr=1e-2, momentum=0.9), MAKES["momentum"]]
    runs = [wrapped(device, dtype, make, tier="compiled") for make in makes]
    for model, optimizer in runs:
        train(model, optimizer, range(2))
        handle.remove()
        train(model, optimizer, range(2, 4))
        assert optimizer.tier == "compiled"
    assert_same(*(masters_of(optimizer) for _, optimizer in runs))
    with pytest.raises(ValueError, match="no rule covers this Mine"):
        wrapped(device, dtype, makes[0], tier="compiled")


# In double, a few roundings apart; RAdam's length is a difference of numbers near 2000, 4 is taken from it, and the
# first one over 5 is left with 4 digits less.
NUMBERS_RELATIVE = 1e-11


@pytest.mark.parametrize("kind", [torch.optim.NAdam, torch.optim.RAdam])
def test_compiled_numbers_mean_the_same(kind: type[torch.optim.Optimizer], device: torch.device) -> None:
    """The two with the most maths: as they stand and compiled, for one line and for many, without a recompilation."""
    rule = RULES[kind][0]
    group = kind([nn.Parameter(torch.ones(1))]).param_groups[0]
    compiled = torch.compile(rule.numbers, fullgraph=True, dynamic=True)
    for lines in (17, 23):
        step = torch.arange(1.0, lines + 1, dtype=torch.float64, device=device)
        hyper = tuple(torch.full_like(step, value) for value in rule.hyper(group))
        scalars = tuple(torch.linspace(0.1, 1.0, lines, device=device) for _ in rule.scalars)
        with torch._dynamo.config.patch(error_on_recompile=lines == 23):
            found = compiled(step, hyper, scalars)
        for ours, theirs in zip(rule.numbers(step, hyper, scalars), found, strict=True):
            for expected, value in zip(ours, theirs, strict=True):
                assert value.dtype == expected.dtype
                assert torch.allclose(value, expected, rtol=NUMBERS_RELATIVE, atol=0.0)


@pytest.mark.parametrize("gradients", ["half", "fp32"])
def test_gradients_may_be_held_elsewhere(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """They come from a store, summed over micro-steps."""
    eager, compiled = pair("momentum", device, dtype, gradients=gradients)
    for model, optimizer in (eager, compiled):
        for step in range(3):
            optimizer.backward(loss_of(model, step))
            optimizer.backward(loss_of(model, step + 7))
            optimizer.step()
    for key, value in masters_of(eager[1]).items():
        assert torch.allclose(value, masters_of(compiled[1])[key], rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.Adafactor(params, lr=1e-2),
        lambda params: torch.optim.NAdam(params, lr=1e-2, differentiable=True),
        lambda params: torch.optim.AdamW(params, lr=1e-2, eps=0.0),
        type("Mine", (torch.optim.SGD,), {}),
    ],
)
def test_a_named_tier_insists(make: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Without a rule it is an error that says what to do, and nothing is converted."""
    model = two_group_model(device)
    inner = make([{**group} for group in two_groups(model)])
    before = snapshot(model, inner)
    with pytest.raises(ValueError, match=r"tier='compiled'\): no rule covers this .* Use tier='eager'"):
        MixedPrecisionOptimizer(inner, model, dtype=dtype, tier="compiled")
    assert_same(before, snapshot(model, inner))


def test_without_a_compiler_it_says_so(
    monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    """Before anything is converted."""

    def broken(function: Any, **options: Any) -> Any:
        def call(*args: Any) -> None:
            raise RuntimeError("no g++")

        return call

    def none(*args: Any) -> None:
        raise RuntimeError("no g++")

    model = two_group_model(device)
    inner = MAKES["AdamW"](two_groups(model))
    before = snapshot(model, inner)
    monkeypatch.setattr("mixedopt.host_kernels.try_kernels", none)
    monkeypatch.setattr(torch, "compile", broken)
    monkeypatch.setattr(tiers, "has_triton", lambda: False)
    words = r"torch\.compile does not work for .* here \(RuntimeError\)|Triton is not installed"
    with pytest.raises(ValueError, match=words):
        MixedPrecisionOptimizer(inner, model, dtype=dtype, tier="compiled")
    assert_same(before, snapshot(model, inner))


def test_rules_serve_exact_types_alone() -> None:
    """A subclass may do anything."""
    for kind in RULES:
        assert rule_for(kind([nn.Parameter(torch.ones(1))], lr=0.1)) is not None
        assert rule_for(type("Mine", (kind,), {})([nn.Parameter(torch.ones(1))], lr=0.1)) is None


class Breaks(torch.optim.SGD):
    """Raises after it has stepped, if it is told to."""

    breaks = False

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        if self.breaks:
            raise RuntimeError("after the step")
        return result


def test_state_that_is_brought_back_counts(device: torch.device, dtype: torch.dtype) -> None:
    """A step with a closure that raised half-way is undone; the rule goes on from before it."""
    found = []
    with contextlib.closing(contextlib.ExitStack()) as undo:
        undo.callback(register_rule(Breaks, *RULES[torch.optim.SGD]).remove)
        for fails in (False, True):
            model, optimizer = wrapped(device, dtype, lambda p: Breaks(p, lr=1e-2, momentum=0.9), tier="compiled")
            train(model, optimizer, range(3))
            if fails:
                Breaks.breaks = True
                undo.callback(setattr, Breaks, "breaks", False)

                def closure(model: nn.Module = model, optimizer: Any = optimizer) -> Tensor:
                    optimizer.zero_grad()
                    loss = loss_of(model, 7)
                    optimizer.backward(loss)
                    return loss

                with pytest.raises(RuntimeError, match="after the step"):
                    optimizer.step(closure)
                Breaks.breaks = False
            train(model, optimizer, [3, 4])
            found.append((masters_of(optimizer), copy.deepcopy(optimizer.inner.state_dict()["state"])))
    assert_same(*found)


@pytest.mark.parametrize("name", ["Rprop", "NAdam", "dampening", "ASGD"])
@pytest.mark.parametrize("way", ["unscaled", "hooked"])
def test_a_skipped_first_step_leaves_nothing_to_the_steps_after_it(
    name: str, way: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Nor to the inner optimizer's own step: its first one makes its own state."""
    found = []
    for tier in ("eager", "compiled"):
        model, optimizer = wrapped(device, dtype, MAKES[name], tier=tier)
        overflow(optimizer)
        inner = optimizer._roster.inner
        hook = inner.register_step_post_hook(lambda *args: None) if way == "hooked" else None
        optimizer.backward(loss_of(model, 0))
        if way == "unscaled":
            optimizer.unscale_()
        optimizer.step()
        if hook is not None:
            hook.remove()
        train(model, optimizer, range(1, 3))
        found.append(masters_of(optimizer))
    for key, value in found[0].items():
        assert torch.allclose(value, found[1][key], rtol=1e-4, atol=1e-6), key


def test_state_that_is_loaded_after_a_skipped_first_step_stays(device: torch.device, dtype: torch.dtype) -> None:
    """Into the inner optimizer itself, too: its counts go on from there."""
    model, optimizer = wrapped(device, dtype, tier="compiled")
    train(model, optimizer, range(3))
    saved = copy.deepcopy(optimizer.inner.state_dict())
    model, optimizer = wrapped(device, dtype, tier="compiled")
    overflow(optimizer)
    optimizer._roster.inner.load_state_dict(saved)
    assert len(optimizer.inner.state) == len(saved["state"])
    train(model, optimizer, [3])
    assert {float(entry["step"]) for entry in optimizer.inner.state.values()} == {4.0}


def test_several_threads_may_build_optimizers(device: torch.device) -> None:
    """A trace changes what the whole process sees of torch, so one waits for the other."""
    if device.type == "cuda":
        pytest.skip("threads share a context there")
    made: list[str] = []

    def build(rate: float) -> None:
        inner = torch.optim.Adamax([nn.Parameter(torch.ones(8).half())], lr=rate)
        made.append(MixedPrecisionOptimizer(inner, tier="compiled").tier)

    for cached in (host_kernels.planner, host_kernels.update_launcher):
        cached.cache_clear()
    threads = [threading.Thread(target=build, args=(rate,)) for rate in (0.1, 0.2, 0.3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert made == ["compiled"] * 3
