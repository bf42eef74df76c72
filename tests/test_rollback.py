"""Contract 2: after a step that met an inf or NaN, everything is bit-identical to before it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from optimizers import BY_NAME, IDS, INNERS, Inner
from torch import Tensor, nn
from twins import (
    FEW,
    Bag,
    Setup,
    differences,
    force_,
    grid_step,
    masters_of,
    plans,
    poison_,
    same_bits,
    setups,
    snapshot,
)

from mixedopt import DynamicLossScale, LossScaleError, MixedPrecisionOptimizer

every_inner = pytest.mark.parametrize("inner", INNERS, ids=IDS)
BAD = st.sampled_from([math.inf, -math.inf, math.nan])


@st.composite
def bad_runs(draw: st.DrawFn, inner: Inner) -> tuple[Setup, list[list[int | None]], list[int | None]]:
    """Draw a setup, some good steps, and a step in which at least one element has a gradient."""
    setup = draw(setups(inner).filter(lambda s: any("empty" not in kind for group in s.kinds for kind in group)))
    before = draw(st.lists(plans(inner, setup.count), max_size=2))
    numels = [value.numel() for group in setup.values() for value in group]
    has_values = plans(inner, setup.count).filter(
        lambda plan: any(e is not None and n for e, n in zip(plan, numels, strict=True))
    )
    return setup, before, draw(has_values)


def good_step(
    optimizer: MixedPrecisionOptimizer, params: list[nn.Parameter], seed: int, plan: list[int | None]
) -> None:
    force_(optimizer, params, grid_step(params, seed, plan))
    optimizer.step()


@every_inner
@FEW
@given(st.data(), st.floats(0, 1), BAD)
def test_skipped_step_leaves_everything_bit_identical(
    inner: Inner, dtype: torch.dtype, device: torch.device, data: st.DataObject, where: float, bad: float
) -> None:
    """One inf or NaN at any position of any group, at the first step or later, moves no weight and no state."""
    setup, script, plan = data.draw(bad_runs(inner))
    optimizer, params = setup.build(inner, dtype, device)
    for n, earlier in enumerate(script):
        good_step(optimizer, params, 97 * n, earlier)
    before, scale, applied = snapshot(optimizer), optimizer.loss_scale, optimizer.applied_steps
    force_(optimizer, params, grid_step(params, 7, plan))
    poison_(params, where, bad)
    optimizer.step()
    assert optimizer.last_step.skipped
    assert not optimizer.last_step.applied
    assert differences(before, snapshot(optimizer)) == []
    assert optimizer.skipped_steps == 1
    assert optimizer.applied_steps == applied
    half = torch.float16 in {param.dtype for param in params}
    assert optimizer.loss_scale == (scale / 2 if half else scale)
    assert all(param.grad is None for param in params + masters_of(optimizer))


@every_inner
@FEW
@given(st.data(), st.floats(0, 1), BAD)
def test_run_with_a_skip_continues_as_one_that_never_saw_the_bad_batch(
    inner: Inner, dtype: torch.dtype, device: torch.device, data: st.DataObject, where: float, bad: float
) -> None:
    """The next step gives the same weights, masters, state and groups; a skipped first step leaves fresh state."""
    setup, script, plan = data.draw(bad_runs(inner))
    optimizer, params = setup.build(inner, dtype, device)
    spared, theirs = setup.build(inner, dtype, device)
    for n, earlier in enumerate(script):
        good_step(optimizer, params, 97 * n, earlier)
        good_step(spared, theirs, 97 * n, earlier)
    force_(optimizer, params, grid_step(params, 7, plan))
    poison_(params, where, bad)
    optimizer.step()
    before = snapshot(optimizer)
    assert differences(before, snapshot(spared)) == []
    good_step(optimizer, params, 1000, plan)
    good_step(spared, theirs, 1000, plan)
    assert differences(snapshot(optimizer), snapshot(spared)) == []
    assert differences(before, snapshot(optimizer)) != []
    assert params[0] is not theirs[0]


# -- through a real model ------------------------------------------------------


class Net(nn.Module):
    """Norm layers of every kind of statistics, some of them deep inside."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.shallow = nn.BatchNorm1d(6)
        inner = nn.Sequential(nn.BatchNorm1d(6, momentum=None), nn.ReLU(), nn.Linear(6, 6), nn.BatchNorm1d(6))
        self.block = nn.Sequential(nn.Linear(6, 6), nn.Sequential(inner), nn.LayerNorm(6))
        self.plain = nn.BatchNorm1d(6, track_running_stats=False)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.plain(self.block(self.shallow(self.first(x)).relu())))


def build_net(
    inner: Inner, dtype: torch.dtype, device: torch.device, **options: Any
) -> tuple[MixedPrecisionOptimizer, Net]:
    torch.manual_seed(3)
    net = Net().to(device)
    params = [param for param in net.parameters() if inner.accepts(param)]
    return MixedPrecisionOptimizer(inner([params[::2], params[1::2]]), net, dtype=dtype, **options), net


def batch(seed: int, device: torch.device) -> Tensor:
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed)).to(device)


def micro_step(optimizer: MixedPrecisionOptimizer, net: Net, seed: int, bad: str = "") -> None:
    """Run one forward and backward; ``bad`` says from where an inf or NaN comes."""
    x = batch(seed, next(net.parameters()).device)
    if bad == "input":
        x[1, 2] = math.inf
    loss = net(x).square().mean()
    optimizer.backward(loss * math.inf if bad == "loss" else loss)
    if bad == "gradient":
        grad = next(param.grad for group in reversed(optimizer.param_groups) for param in reversed(group["params"]))
        grad.view(-1)[-1] = math.nan


@every_inner
@pytest.mark.parametrize(
    ("source", "good_steps", "micro_steps"),
    [("input", 0, 1), ("loss", 2, 3), ("gradient", 1, 2)],
    ids=["input_first", "loss_last_of_3", "gradient_last_of_2"],
)
def test_skip_through_a_real_model_is_invisible(
    inner: Inner, source: str, good_steps: int, micro_steps: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Wherever the inf comes from, weights, state and running statistics go back; the run continues as if spared."""
    static = {"loss_scale": 2.0**8}  # the same S on both sides: a changed one could round small gradients otherwise
    optimizer, net = build_net(inner, dtype, device, **static)
    spared, twin = build_net(inner, dtype, device, **static)
    for n in range(good_steps):
        micro_step(optimizer, net, n)
        optimizer.step()
        micro_step(spared, twin, n)
        spared.step()
    before = snapshot(optimizer, net)
    for n in range(micro_steps):
        micro_step(optimizer, net, 10 + n, source if n == micro_steps - 1 else "")
    assert not same_bits(before["model shallow.running_mean"], net.shallow.running_mean)
    optimizer.step()
    assert optimizer.last_step.skipped
    assert differences(before, snapshot(optimizer, net)) == []
    assert all(param.grad is None for param in net.parameters() if inner.accepts(param))
    micro_step(optimizer, net, 20)
    optimizer.step()
    micro_step(spared, twin, 20)
    spared.step()
    assert optimizer.last_step.applied
    assert differences(snapshot(optimizer, net), snapshot(spared, twin)) == []
    assert differences(before, snapshot(optimizer, net)) != []


SGD = BY_NAME["sgd_momentum"]


def test_statistics_go_back_to_before_the_first_train_forward_of_the_window(
    dtype: torch.dtype, device: torch.device
) -> None:
    """Eval forwards open no window, further train forwards move no mark: the skip returns to the first."""
    optimizer, net = build_net(SGD, dtype, device)
    micro_step(optimizer, net, 0)
    optimizer.step()
    before = snapshot(optimizer, net)
    assert int(before["model shallow.num_batches_tracked"]) == 1
    net.eval()
    net(batch(1, device))
    net.train()
    micro_step(optimizer, net, 2)
    net.eval()
    net(batch(3, device))
    net.train()
    net(batch(4, device))
    micro_step(optimizer, net, 5, "loss")
    assert int(net.shallow.num_batches_tracked) == 4
    optimizer.step()
    assert optimizer.last_step.skipped
    assert differences(before, snapshot(optimizer, net)) == []


def test_statistics_of_an_applied_step_stay(dtype: torch.dtype, device: torch.device) -> None:
    """A skip takes back its own window only: what an applied step saw before it is kept."""
    optimizer, net = build_net(SGD, dtype, device)
    fresh = net.shallow.running_mean.clone()
    micro_step(optimizer, net, 0)
    seen = net.shallow.running_mean.clone()
    optimizer.step()
    assert same_bits(seen, net.shallow.running_mean)
    assert not same_bits(fresh, seen)
    micro_step(optimizer, net, 1, "loss")
    optimizer.step()
    assert optimizer.last_step.skipped
    assert same_bits(seen, net.shallow.running_mean)


def test_two_skips_in_a_row_each_take_back_their_own_statistics(dtype: torch.dtype, device: torch.device) -> None:
    """A skip closes the window: the forward after it opens the next one."""
    optimizer, net = build_net(SGD, dtype, device)
    before = snapshot(optimizer, net)
    for n in range(2):
        micro_step(optimizer, net, n, "loss")
        optimizer.step()
        assert differences(before, snapshot(optimizer, net)) == []
    assert optimizer.skipped_steps == 2


def test_statistics_stay_without_restore_buffers(dtype: torch.dtype, device: torch.device) -> None:
    """With ``restore_buffers=False`` a skip leaves running statistics alone, and takes back the rest."""
    optimizer, net = build_net(SGD, dtype, device, restore_buffers=False)
    before = snapshot(optimizer, net)
    micro_step(optimizer, net, 0, "loss")
    seen = snapshot(optimizer, net)
    optimizer.step()
    assert optimizer.last_step.skipped
    assert differences(seen, snapshot(optimizer, net)) == []
    changed = differences(before, snapshot(optimizer, net))
    assert changed
    assert all("running" in name or "num_batches" in name for name in changed)


def test_skip_in_evaluation_mode_leaves_statistics(dtype: torch.dtype, device: torch.device) -> None:
    """Frozen statistics (fine-tuning in eval mode) have no window to take back."""
    optimizer, net = build_net(SGD, dtype, device)
    micro_step(optimizer, net, 0)
    optimizer.step()
    net.eval()
    before = snapshot(optimizer, net)
    micro_step(optimizer, net, 1, "loss")
    optimizer.step()
    assert optimizer.last_step.skipped
    assert differences(before, snapshot(optimizer, net)) == []


# -- consequences --------------------------------------------------------------


def test_one_bad_batch_halves_the_scale_once(device: torch.device) -> None:
    """The bad gradient is consumed: nine clean batches without zero_grad see none of it."""
    optimizer, net = build_net(SGD, torch.float16, device)
    for n in range(10):
        micro_step(optimizer, net, n, "loss" if n == 0 else "")
        optimizer.step()
    assert optimizer.loss_scale == 2.0**15
    assert (optimizer.skipped_steps, optimizer.applied_steps) == (1, 9)


@pytest.mark.parametrize("bad", ["", "loss"], ids=["applied", "skipped"])
def test_step_consumes_the_gradients(bad: str, dtype: torch.dtype, device: torch.device) -> None:
    """Afterwards every ``.grad`` is ``None``, the model's and the masters'."""
    optimizer, net = build_net(SGD, dtype, device)
    micro_step(optimizer, net, 0, bad)
    assert all(param.grad is not None for param in net.parameters())
    optimizer.step()
    assert optimizer.last_step.skipped == bool(bad)
    assert all(param.grad is None for param in net.parameters())
    assert all(master.grad is None for master in masters_of(optimizer))


def test_bad_last_element_of_last_group_leaves_the_first_alone(dtype: torch.dtype, device: torch.device) -> None:
    """The single inf in the last bucket skips the whole step, decay and counters of the first group included."""
    half, island = nn.Parameter(torch.ones(4, 3, device=device)), nn.Parameter(torch.ones(5, device=device))
    adamw = Inner("adamw", torch.optim.AdamW, {"weight_decay": 0.1})
    model = nn.Module()
    model.weight, model.norm = half, nn.LayerNorm(5).to(device)
    model.norm.weight = island
    optimizer = MixedPrecisionOptimizer(adamw([[half], [island]]), model, dtype=dtype)
    assert (half.dtype, island.dtype) == (dtype, torch.float32)
    for n in range(2):
        good_step(optimizer, [half, island], n, [0, 0])
    before = snapshot(optimizer)
    force_(optimizer, [half, island], grid_step([half, island], 5, [0, 0]))
    poison_([half, island], 1.0, math.inf)
    assert island.grad is not None
    assert math.isinf(island.grad[-1].item())
    optimizer.step()
    assert optimizer.last_step.skipped
    assert differences(before, snapshot(optimizer)) == []


def test_last_skip_before_the_error_changes_nothing_either(dtype: torch.dtype, device: torch.device) -> None:
    """``LossScaleError`` after ten skips in a row at a static scale: weights, state, statistics as before."""
    optimizer, net = build_net(BY_NAME["adamw_loop"], dtype, device, loss_scale=4.0)
    micro_step(optimizer, net, 0)
    optimizer.step()
    before = snapshot(optimizer, net)
    for n in range(9):
        micro_step(optimizer, net, n, "loss")
        optimizer.step()
    micro_step(optimizer, net, 9, "loss")
    with pytest.raises(LossScaleError, match=r"10 skips in a row.*First bad parameter: 'first.weight'"):
        optimizer.step()
    assert optimizer.skipped_steps == 10
    assert differences(before, snapshot(optimizer, net)) == []
    assert all(param.grad is None for param in net.parameters())


def test_inf_that_appears_in_the_division_skips_too(device: torch.device) -> None:
    """A finite g with an infinite g/S (S under one) never reaches the masters."""
    weight = nn.Parameter(torch.ones(3, device=device))
    optimizer = MixedPrecisionOptimizer(BY_NAME["adamw_loop"]([[weight]]), loss_scale=1e-3)
    before = snapshot(optimizer)
    weight.grad = torch.full((3,), 1e38, device=device)
    optimizer.step()
    assert optimizer.last_step.skipped
    assert differences(before, snapshot(optimizer)) == []


def test_large_finite_gradients_are_not_bad(dtype: torch.dtype, device: torch.device) -> None:
    """The check looks at elements: gradients whose sum of squares leaves half and fp32 are applied."""
    top = torch.finfo(dtype).max
    weight = nn.Parameter(torch.zeros(4096, device=device))
    rprop = Inner("rprop", torch.optim.Rprop, {"lr": 0.01})
    optimizer = MixedPrecisionOptimizer(rprop([[weight]]), Bag([weight]), dtype=dtype, loss_scale=1.0)
    weight.grad = torch.full((4096,), top, dtype=dtype, device=device)
    optimizer.step()
    assert optimizer.last_step.applied
    assert torch.equal(masters_of(optimizer)[0], torch.full_like(weight, -0.01, dtype=torch.float32))


def test_skip_by_dynamic_scale_in_bf16_is_rolled_back(device: torch.device) -> None:
    """A dynamic scale works for bf16 as well: S halves, nothing else moves."""
    optimizer, net = build_net(SGD, torch.bfloat16, device, loss_scale=DynamicLossScale(init_scale=8.0))
    before = snapshot(optimizer, net)
    micro_step(optimizer, net, 0, "input")
    optimizer.step()
    assert optimizer.last_step.skipped
    assert optimizer.loss_scale == 4.0
    assert differences(before, snapshot(optimizer, net)) == []


def compiled_norm_model(device: torch.device) -> tuple[nn.Module, nn.Module]:
    """Return a model with statistics, and the same compiled in one graph."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2)).to(device)
    return model, torch.compile(model, backend="eager", fullgraph=True)


def test_statistics_of_a_compiled_model_go_back_too(dtype: torch.dtype, device: torch.device) -> None:
    """No hook runs inside the graph; a skip takes back what the forwards since the last step did."""
    torch._dynamo.reset()
    model, compiled = compiled_norm_model(device)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype, loss_scale=8.0)
    x = torch.randn(16, 4, device=device)
    seen = []
    for factor in (math.inf, 1.0, math.inf, 1.0):
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        loss = compiled(x).square().mean() * factor
        assert not torch.equal(before["1.running_mean"], model[1].running_mean)
        optimizer.backward(loss)
        optimizer.step()
        seen.append(all(torch.equal(before[name], buffer) for name, buffer in model.named_buffers()))
    assert [True, False, True, False] == seen


def test_statistics_loaded_between_steps_are_what_a_skip_goes_back_to(dtype: torch.dtype, device: torch.device) -> None:
    """The window begins with the forward, so a load before it is not undone."""
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to(device)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype, loss_scale=8.0)
    x = torch.randn(16, 4, device=device)
    optimizer.backward(model(x).square().mean())
    optimizer.step()
    model[1].load_state_dict({**model[1].state_dict(), "running_mean": torch.full((8,), 3.0)})
    optimizer.backward(model(x).square().mean() * math.inf)
    assert not (model[1].running_mean == 3.0).all()
    optimizer.step()
    assert optimizer.last_step.skipped
    assert (model[1].running_mean == 3.0).all()
