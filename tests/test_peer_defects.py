"""Defects read in other libraries, as laws that hold here: each docstring begins with the defect's number."""

from __future__ import annotations

import contextlib
import inspect
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    adamw,
    assert_same,
    differs,
    force_grads,
    loss_of,
    masters_of,
    momentum,
    overflow,
    seeded,
    through_file,
    train,
    two_group_model,
    two_groups,
)
from optimizers import SHAPES
from pairs import INF, NAN, Bench, Doubles, Pair, assert_fell, kept, lbfgs, linear, plain, rates, stated
from test_optimizer import HostReads
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mixedopt import DynamicLossScale, LossScaleError, MixedPrecisionOptimizer, SharedLossScale, StepOrderError


def fused(groups: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, fused=True)


@pytest.mark.parametrize("unscale", [False, True])
@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
def test_growth_step_uses_the_scale_of_its_backward(gradients: str, unscale: bool, at: Bench) -> None:
    """Defect 1: whoever holds the gradients and whoever divides them, a step that grows S moves by the true one."""
    config = DynamicLossScale(init_scale=4.0, growth_interval=2)
    model, optimizer = at.wrapped(plain, loss_scale=config, gradients=gradients)
    for _ in range(4):
        before = masters_of(optimizer)
        optimizer.backward(linear(model, 1.0))
        if unscale:
            optimizer.unscale_()
        optimizer.step()
        assert_fell(before, optimizer, by=1.0)
    assert optimizer.loss_scale == 16.0


def test_flat_buffer_hands_nobody_the_gradient_of_another(at: Bench) -> None:
    """Defect 2: with a slot frozen or unfrozen in the middle, each parameter still moves by its own gradient."""
    model, optimizer = at.wrapped(plain)
    model.requires_grad_(True)
    named = {name: (index, param) for index, (name, param) in enumerate(model.named_parameters())}
    for layer, trained in ((model.frozen, False), (model.hidden, False), (model.frozen, True), (model.hidden, True)):
        layer.requires_grad_(trained)
        force_grads(optimizer, 1.0)
        for index, param in named.values():
            param.grad = None if param.grad is None else param.grad * index
        before = {name: param.detach().float() for name, (_, param) in named.items()} | masters_of(optimizer)
        optimizer.step()
        for name, master in masters_of(optimizer).items():
            index, param = named[name]
            assert torch.equal(before[name] - index * param.requires_grad, master), name


def test_parameters_added_later_have_masters_and_move(at: Bench) -> None:
    """Defect 3: a group that comes after the first step is cast up, stepped, published and saved."""
    model, optimizer = at.wrapped(lambda groups: plain(groups[:1]))
    train(model, optimizer, [0])
    optimizer.add_param_group({"params": two_groups(model)[1]["params"]})
    before = masters_of(optimizer)
    force_grads(optimizer, 1.0)
    optimizer.step()
    assert_fell(before, optimizer, by=1.0)
    shown = {name: param.detach() for name, param in model.named_parameters() if name in before}
    assert_same(shown, {name: master.to(shown[name].dtype) for name, master in masters_of(optimizer).items()})
    assert len(before) == sum("master" in entry for entry in optimizer.state_dict()["state"].values()) == 8


def test_masters_and_moments_survive_a_file(at: Bench) -> None:
    """Defect 4: fp32 stays fp32, bit for bit, and the next step is the one that would have come."""
    pair, (model, resumed) = at.pair(), at.wrapped()
    pair.play(2.0**-6, 2.0**-7)
    model.load_state_dict(through_file(pair.model.state_dict()))
    resumed.load_state_dict(through_file(pair.optimizer.state_dict()))
    assert_same(masters_of(pair.optimizer), masters_of(resumed))
    assert any(differs(m.to(at.dtype).float(), m) for m in masters_of(resumed).values())
    assert {value.dtype for entry in resumed.state.values() for value in entry.values()} == {torch.float32}
    Pair(model, resumed, pair.twin, pair.bare).play(1.0)


def test_skip_of_a_fused_optimizer_is_visible(at: Bench) -> None:
    """Defect 5: a schedule that asks ``last_step`` counts the real steps of a fused optimizer."""
    model, optimizer = at.wrapped(fused)
    scheduler = LambdaLR(optimizer, lambda k: 0.5**k)
    for step in range(4):
        overflow(optimizer) if step in (0, 2) else train(model, optimizer, [step])
        if optimizer.last_step.applied:
            scheduler.step()
    assert (2, 2) == (optimizer.applied_steps, optimizer.skipped_steps)
    assert 1e-2 / 4 == rates(optimizer)[0]
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {2}


def test_ranks_with_averaged_gradients_decide_alike(at: Bench) -> None:
    """Defect 6: an inf on one of two ranks skips both, on the fused path too, and they keep one S and equal masters.

    The ranks are two wrappers here, their average is made by hand; real ones are in ``test_distributed.py``. Mixed
    DTensor placements are not supported yet.
    """
    ranks = [at.wrapped(fused) for _ in range(2)]
    for step in range(4):
        for rank, (model, optimizer) in enumerate(ranks):
            optimizer.backward(loss_of(model, step + rank) * (INF if (step, rank) == (1, 1) else 1.0))
        for params in zip(*(model.parameters() for model, _ in ranks), strict=True):
            if params[0].grad is not None:
                mean = (params[0].grad + params[1].grad) / 2
                for param in params:
                    param.grad = mean.clone()
        for _, optimizer in ranks:
            optimizer.step()
            assert optimizer.last_step.skipped == (step == 1)
        assert_same(*(kept(*rank) | {"identity": 0} for rank in ranks))
        assert ranks[0][1].loss_scale == ranks[1][1].loss_scale


def test_unscale_twice_is_impossible(at: Bench) -> None:
    """Defect 7: the second call raises before it divides, and backward between it and ``step`` raises too."""
    model, optimizer = at.wrapped(plain)
    before = masters_of(optimizer)
    force_grads(optimizer, 1.0)
    optimizer.unscale_()
    for call in (optimizer.unscale_, lambda: optimizer.backward(linear(model, 1.0))):
        with pytest.raises(StepOrderError, match=r"after unscale_\(\)"):
            call()
    optimizer.step()
    assert_fell(before, optimizer, by=1.0)


def test_construction_takes_no_step(at: Bench) -> None:
    """Defect 8: no decay, no state, no count before the first real step; masters are the fp32 weights."""
    model, steps = two_group_model(at.device), []
    weights = {name: param.detach().clone() for name, param in model.named_parameters()}
    inner = torch.optim.AdamW(two_groups(model))
    inner.register_step_pre_hook(lambda *args: steps.append(args))
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=at.dtype)
    assert_same({name: weights[name] for name in masters_of(optimizer)}, masters_of(optimizer))
    assert ([], {}, 0) == (steps, dict(inner.state), optimizer.applied_steps)


def test_zero_gradients_are_a_step_and_no_gradients_are_none(at: Bench) -> None:
    """Defect 9: all zeros count, as in torch; all ``None`` change nothing; neither raises, clipped or not."""
    for limit in (None, 1.0):
        pair = at.pair(max_grad_norm=limit)
        pair.play(0.0, even=True)
        assert (True, 0.0) == (pair.optimizer.last_step.applied, pair.optimizer.last_step.grad_norm)
        before = kept(pair.model, pair.optimizer)
        pair.optimizer.step()
        assert ("no gradients", 1) == (pair.optimizer.last_step.reason, pair.optimizer.applied_steps)
        assert_same(before, kept(pair.model, pair.optimizer))


def test_no_option_promises_stochastic_rounding(at: Bench) -> None:
    """Defect 10: there is none, so there is no bias to test; a published weight is its master, rounded to nearest."""
    options = inspect.signature(MixedPrecisionOptimizer).parameters
    assert not [name for name in options if "stochastic" in name or "round" in name]
    with pytest.raises(ValueError, match="must be 'fp32'"):
        at.wrapped(master="stochastic")
    pair = at.pair()
    pair.play(1.0, 0.5)  # compares each weight with its rounded master


KNOBS = DynamicLossScale(
    init_scale=64.0,
    growth_factor=4.0,
    backoff_factor=0.25,
    growth_interval=2,
    hysteresis=2,
    min_scale=2.0,
    max_scale=128.0,
    max_consecutive_skips=2,
)


@pytest.mark.parametrize("path", ["step", "shared", "closure"])
def test_every_knob_of_the_scale_works_in_every_path(path: str, at: Bench) -> None:
    """Defect 11: interval, factors, ceiling, hysteresis, floor and patience act in each kind of step and are saved."""
    saved, scales = None, []
    for step, letter in enumerate("ooXXXXXXoo"):
        config = DynamicLossScale() if saved else KNOBS  # a load brings the configuration, too
        shared = SharedLossScale(config)
        scale = shared if path == "shared" else config
        model, optimizer = at.wrapped(lbfgs if path == "closure" else plain, loss_scale=scale)
        if saved:
            optimizer.load_state_dict(saved)

        def closure(
            optimizer: Any = optimizer, model: Any = model, slope: float = INF if letter == "X" else 1.0
        ) -> Any:
            optimizer.zero_grad()
            loss = linear(model, slope * 2.0**-10)
            optimizer.backward(loss)
            return loss.detach()

        patience = pytest.raises(LossScaleError, match="2 skips in a row") if step == 7 else contextlib.nullcontext()
        with patience:
            optimizer.step(closure) if path != "shared" else (closure(), shared.step(optimizer))
        scales.append(optimizer.loss_scale)
        saved = through_file(optimizer.state_dict())
    assert [64, 128, 128, 32, 8, 2, 2, 2, 2, 8] == scales


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_nan_never_reaches_the_moments(bad: float, at: Bench) -> None:
    """Defect 12: without any scaling the gradients are checked all the same, in bf16 as in fp16."""
    pair = at.pair(loss_scale=1.0)
    pair.play(1.0, bad, 0.5)
    assert (2, 1) == (pair.optimizer.applied_steps, pair.optimizer.skipped_steps)
    state = [value for entry in pair.optimizer.state.values() for value in entry.values()]
    assert all(bool(value.isfinite().all()) for value in state)


def test_every_layout_steps_and_keeps_its_strides(at: Bench) -> None:
    """Defect 13: channels_last, transposed, strided, 0-d and empty parameters step as bare; nothing is sharded here."""
    made = {kind: make(torch.Generator().manual_seed(1)).to(at.device) for kind, make in SHAPES.items()}
    params = {kind: nn.Parameter(value.clone().to(at.dtype)) for kind, value in made.items()}
    strides = {kind: param.stride() for kind, param in params.items()}
    optimizer = MixedPrecisionOptimizer(momentum(list(params.values())), loss_scale=SMALL_SCALE)
    masters = dict(zip(params, (master for _, master in optimizer.named_masters()), strict=True))
    start = {kind: master.detach().clone() for kind, master in masters.items()}
    force_grads(optimizer, 1.0)
    optimizer.step()
    expected = {kind: value - 1e-2 for kind, value in start.items()}
    assert_same(expected, {kind: master.detach() for kind, master in masters.items()})
    assert strides == {kind: param.stride() for kind, param in params.items()}
    assert params["channels_last"].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(masters[kind].to(at.dtype), param) for kind, param in params.items())


def test_integer_buffers_keep_their_dtype_on_export(at: Bench) -> None:
    """Defect 14: ``num_batches_tracked`` and ids stay integers in the model and in both of its fp32 exports."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), at.device)
    model.register_buffer("ids", torch.arange(5000, device=at.device))
    optimizer = MixedPrecisionOptimizer(adamw(model.parameters()), model, dtype=at.dtype, loss_scale=SMALL_SCALE)
    optimizer.backward(model(torch.ones(3, 4, device=at.device)).sum())
    optimizer.step()
    for exported in (model.state_dict(), optimizer.master_state_dict(), optimizer.master_model().state_dict()):
        assert exported["ids"].dtype == exported["1.num_batches_tracked"].dtype == torch.int64
        assert (4999, 1) == (int(exported["ids"][-1]), int(exported["1.num_batches_tracked"]))


def test_float_learning_rate_can_be_assigned(at: Bench) -> None:
    """Defect 15: a scheduler's float is what the inner optimizer uses, also in the place of a tensor."""

    def tensor_lr(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        groups = [{"params": group["params"], "lr": torch.tensor(0.25, device=at.device)} for group in groups]
        return torch.optim.SGD(groups, foreach=False)

    for make in (plain, tensor_lr):
        _, optimizer = at.wrapped(make)
        for group in optimizer.param_groups:
            group["lr"] = 0.5
        before = masters_of(optimizer)
        force_grads(optimizer, 1.0)
        optimizer.step()
        assert_fell(before, optimizer, by=0.5)


def test_positional_closure_cannot_bypass_the_scale(at: Bench) -> None:
    """Defect 16: gradients made inside ``step(closure)`` are divided once and judged, as all others."""
    model, optimizer = at.wrapped(plain)
    for slope, by in ((1.0, 1.0), (INF, 0.0), (NAN, 0.0)):
        before = masters_of(optimizer)
        optimizer.step(lambda slope=slope: optimizer.backward(linear(model, slope)))
        assert_fell(before, optimizer, by=by)
    assert (1, 2) == (optimizer.applied_steps, optimizer.skipped_steps)


@pytest.mark.parametrize("make", [adamw, fused])
def test_skipped_first_step_leaves_every_counter_at_zero(make: Any, at: Bench) -> None:
    """Defect 17: with several groups none has counted, and the first real step is step one for all."""
    pair = at.pair(make)
    overflow(pair.optimizer)
    assert {} == pair.optimizer.inner.state_dict()["state"]
    pair.play(1.0)
    assert {1} == {int(entry["step"]) for entry in pair.optimizer.state.values()}


class Norms(Doubles):
    """Counts the reductions over gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ == "linalg_vector_norm"
        return func(*args, **(kwargs or {}))


def test_gradients_are_judged_once_not_once_a_group(at: Bench) -> None:
    """Defect 18: forty tensors in eight groups need as many reductions as in one, and one host read."""
    counts = []
    for size in (1, 8):
        params = [nn.Parameter(torch.ones(3, dtype=at.dtype, device=at.device)) for _ in range(40)]
        optimizer = MixedPrecisionOptimizer(plain([{"params": params[i::size]} for i in range(size)]), loss_scale=2.0)
        for _ in range(2):  # the first step also copies the masters to the host
            force_grads(optimizer, 1.0)
            with HostReads(at.device) as reads, Norms() as norms:
                optimizer.step()
        counts.append((norms.count, reads.count))
    assert counts[0] == counts[1] == (1, 1)


def test_every_defect_has_a_test() -> None:
    """All eighteen of the list are laws here."""
    assert set(range(1, 19)) == stated(__file__, "Defect")
