"""What a step reports, clips, reads from the device and logs; and what users may do with gradients."""

from __future__ import annotations

import copy
import logging
import math
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
    snapshot,
    train,
    two_group_model,
    vector,
    wrapped,
)
from models import momentum as make_momentum
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, StaticLossScale, StepReport

# torch's clip adds 1e-6 to the norm: a clipped step of norm 1 is short by 1e-7 of 10.
CLIP_ERROR = 1e-6
# The global norm is summed in fp32 rows: its relative error is below 1e-6.
NORM_ERROR = 1e-6


def sgd(params: list[nn.Parameter], lr: float = 1.0, loss_scale: Any = 1.0, **options: Any) -> MixedPrecisionOptimizer:
    """Return a wrapped SGD, whose step shows the gradient it was given."""
    return MixedPrecisionOptimizer(torch.optim.SGD(params, lr=lr), loss_scale=loss_scale, **options)


def moves(optimizer: MixedPrecisionOptimizer, act: Callable[[], Any]) -> list[Tensor]:
    """Return by how much each master falls while ``act`` runs."""
    before = masters_of(optimizer)
    act()
    return [before[name] - value for name, value in masters_of(optimizer).items()]


# -- the report ---------------------------------------------------------------


def test_before_any_step_the_report_says_so(device: torch.device, dtype: torch.dtype) -> None:
    """Nothing was applied, nothing skipped, and there is nothing to read."""
    _, optimizer = wrapped(device, dtype)
    assert optimizer.last_step == StepReport(False, False, "no step yet")
    assert (optimizer.last_step.grad_norm, optimizer.last_step.loss_scale) == (None, None)
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 0)
    assert repr(optimizer.last_step) == (
        "StepReport(applied=False, skipped=False, reason='no step yet', grad_norm=None, loss_scale=None)"
    )


def test_an_applied_step_is_reported(device: torch.device, dtype: torch.dtype) -> None:
    """The norm is that of the unscaled gradients, the scale is the one used, though S has grown since."""
    scale = DynamicLossScale(init_scale=64.0, growth_interval=1)
    optimizer = sgd([vector(device, dtype, 2), vector(device, dtype, 2)], loss_scale=scale)
    force_grads(optimizer, 5.0)
    optimizer.step()
    report = optimizer.last_step
    assert (report.applied, report.skipped, report.reason) == (True, False, None)
    assert abs(report.grad_norm / 10.0 - 1) < NORM_ERROR
    assert report.loss_scale == 64.0
    assert optimizer.loss_scale == 128.0
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (1, 0)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_skipped_step_is_reported(value: float, device: torch.device, dtype: torch.dtype) -> None:
    """The reason is given, the norm shows what was met, the scale is the one used."""
    optimizer = sgd([vector(device, dtype)], loss_scale=SMALL_SCALE)
    force_grads(optimizer, value)
    optimizer.step()
    report = optimizer.last_step
    assert (report.applied, report.skipped, report.reason) == (False, True, "inf or NaN in the gradients")
    assert not math.isfinite(report.grad_norm)
    assert report.loss_scale == 2.0**7
    assert optimizer.loss_scale == 2.0**6
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (0, 1)


def test_a_step_without_gradients_is_neither(device: torch.device, dtype: torch.dtype) -> None:
    """Nothing moves, no counter, no scale, no tracker; the report says why."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    before = copy.deepcopy(optimizer.state_dict())
    for _ in range(3):
        optimizer.step()
    report = optimizer.last_step
    assert (report.applied, report.skipped, report.reason) == (False, False, "no gradients")
    assert (report.grad_norm, report.loss_scale) == (None, None)
    assert_same(before, optimizer.state_dict())


def test_a_held_report_does_not_change(device: torch.device, dtype: torch.dtype) -> None:
    """A report that was kept tells of its own step, whatever came later."""
    optimizer = sgd([vector(device, dtype)], loss_scale=SMALL_SCALE)
    force_grads(optimizer, 0.5)
    optimizer.step()
    held, norm = optimizer.last_step, optimizer.last_step.grad_norm
    overflow(optimizer)
    assert held is not optimizer.last_step
    assert (held.applied, held.grad_norm, held.loss_scale) == (True, norm, 2.0**7)


def test_a_step_consumes_the_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """Applied or skipped, every ``.grad`` is ``None`` afterwards: a bad one poisons no later step (case 9)."""
    model, optimizer = wrapped(device, dtype)
    overflow(optimizer)
    assert all(p.grad is None for p in model.parameters())
    for step in range(3):  # no zero_grad in this loop
        optimizer.backward(loss_of(model, step))
        optimizer.step()
        assert all(p.grad is None for p in model.parameters())
        assert all(m.grad is None for _, m in optimizer.named_masters())
    assert (optimizer.applied_steps, optimizer.skipped_steps, optimizer.loss_scale) == (3, 1, 2.0**6)


def test_the_tier_is_named(device: torch.device, dtype: torch.dtype) -> None:
    """``tier="auto"`` is the eager one; the property says which runs and cannot be set."""
    for tier in ("auto", "eager"):
        _, optimizer = wrapped(device, dtype, tier=tier)
        assert optimizer.tier == "eager"
    with pytest.raises(AttributeError):
        optimizer.tier = "fused"  # type: ignore[misc]


# -- scale, backward, clip ----------------------------------------------------


def test_the_scaled_loss_is_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """Case 40: 2 * 65536 does not fit fp16, neither 0-d nor as one element; the loss itself is left alone."""
    optimizer = sgd([vector(device, dtype)], loss_scale=2.0**16)
    for shape in ((), (1,), (1, 1)):
        loss = torch.full(shape, 2.0, dtype=dtype, device=device)
        scaled = optimizer.scale(loss)
        assert scaled.dtype == torch.float32
        assert scaled.shape == loss.shape
        assert scaled.item() == 131072.0
        assert loss.item() == 2.0
    wide = optimizer.scale(torch.tensor(0.1, dtype=torch.float64, device=device))
    assert wide.dtype == torch.float64
    assert wide.item() == 0.1 * 65536


@pytest.mark.parametrize("shape", [(), (1,)], ids=["0-d", "1-d"])
def test_a_half_loss_trains(shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
    """A loss in half, of either form, gives the gradient times S and no overflow."""
    param = vector(device, dtype, 1)
    optimizer = sgd([param], lr=0.25, loss_scale=2.0**15)
    optimizer.backward((param * 1.5).reshape(shape))
    [move] = moves(optimizer, optimizer.step)
    assert move.item() == 0.375


def test_a_list_of_losses_shares_one_backward(device: torch.device, dtype: torch.dtype) -> None:
    """``scale`` keeps the container; ``backward`` of a list adds up, with its options passed on."""
    params = [vector(device, dtype, 1), vector(device, dtype, 1)]
    optimizer = sgd(params, lr=0.25, loss_scale=8.0)
    losses = [params[0].sum() * 1.5, (params[0] * params[1]).sum() * 2]
    scaled = optimizer.scale(losses)
    assert type(scaled) is list
    assert [value.item() for value in scaled] == [12.0, 16.0]
    assert type(optimizer.scale(tuple(losses))) is tuple
    optimizer.backward(losses, retain_graph=True)
    optimizer.backward(losses)
    assert [move.item() for move in moves(optimizer, optimizer.step)] == [0.25 * 7, 0.25 * 4]


def test_scale_reads_like_grad_scaler(device: torch.device, dtype: torch.dtype) -> None:
    """``optimizer.scale(loss).backward()`` is ``optimizer.backward(loss)``."""
    states = []
    for method in (True, False):
        model, optimizer = wrapped(device, dtype)
        loss = loss_of(model, 0)
        optimizer.backward(loss) if method else optimizer.scale(loss).backward()
        optimizer.step()
        states.append(copy.deepcopy(optimizer.state_dict()))
    assert_same(*states)
    assert optimizer.applied_steps == 1


def test_clipping_moves_by_the_limit(device: torch.device) -> None:
    """Case 24: true norm 10 at S=65536, limit 1: the report says 10, the move has norm 1."""
    params = [nn.Parameter(torch.zeros(2, device=device)), vector(device, torch.bfloat16, 2, 0.0)]
    optimizer = sgd(params, loss_scale=2.0**16, max_grad_norm=1.0)
    force_grads(optimizer, 5.0)
    move = torch.cat(moves(optimizer, optimizer.step))
    assert abs(optimizer.last_step.grad_norm / 10.0 - 1) < NORM_ERROR
    assert abs(float(move.norm()) - 1.0) < CLIP_ERROR
    assert torch.equal(move, move[0].expand(4))


def test_a_norm_under_the_limit_is_not_clipped(device: torch.device, dtype: torch.dtype) -> None:
    """Below the limit the step is, bit for bit, the unclipped one."""
    states = []
    for limit in (None, 1e4):
        model, optimizer = wrapped(device, dtype, make_momentum, max_grad_norm=limit)
        train(model, optimizer, [0, 1])
        states.append(copy.deepcopy(optimizer.state_dict()))
    assert_same(*states)
    assert optimizer.applied_steps == 2


@pytest.mark.parametrize(("size", "count"), [(300.0, 1), (3e4, 16)])
def test_the_norm_does_not_overflow_where_a_half_norm_would(size: float, count: int, device: torch.device) -> None:
    """Case 11: finite half gradients, whose norm in half is inf, are clipped, not erased."""
    optimizer = sgd([vector(device, torch.float16, 1, 0.0) for _ in range(count)], max_grad_norm=1.0)
    force_grads(optimizer, size)
    move = torch.cat(moves(optimizer, optimizer.step))
    expected = size * math.sqrt(count)
    assert abs(optimizer.last_step.grad_norm / expected - 1) < NORM_ERROR
    assert abs(float(move.norm()) - 1.0) < CLIP_ERROR


# -- reading and editing gradients --------------------------------------------


def grads_of(optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor | None]:
    return {name: None if m.grad is None else m.grad.clone() for name, m in optimizer.named_masters()}


def test_unscale_shows_fp32_gradients_divided_by_the_scale(device: torch.device, dtype: torch.dtype) -> None:
    """Afterwards ``master.grad`` is what an unscaled run's would be, and the model's are gone."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    expected = {name: param.grad.float() / 2.0**7 for name, param in model.named_parameters() if param.grad is not None}
    optimizer.unscale_()
    shown = {name: grad for name, grad in grads_of(optimizer).items() if grad is not None}
    assert_same(expected, shown)
    assert {grad.dtype for grad in shown.values()} == {torch.float32}
    assert all(param.grad is None for param in model.parameters())
    assert grads_of(optimizer)["branch.weight"] is None  # the unused branch
    optimizer.step()
    assert optimizer.last_step.applied


def test_unscale_changes_nothing_in_the_step(device: torch.device, dtype: torch.dtype) -> None:
    """With and without a look at the gradients, clipped too, the step is the same, bit for bit."""
    for limit in (None, 0.5):
        states = []
        for unscale in (True, False):
            model, optimizer = wrapped(device, dtype, max_grad_norm=limit)
            optimizer.backward(loss_of(model, 0))
            if unscale:
                optimizer.unscale_()
            optimizer.step()
            states.append((copy.deepcopy(optimizer.state_dict()), optimizer.last_step.grad_norm))
        assert optimizer.last_step.grad_norm > 0.5
        assert_same(*states)


@pytest.mark.parametrize("how", ["in place", "replaced", "replaced by a view", "to None", "from None"])
def test_edits_of_the_gradients_count(how: str, device: torch.device, dtype: torch.dtype) -> None:
    """What stands in ``master.grad`` at ``step()`` is what is applied, and reported."""
    params = [vector(device, dtype), vector(device, dtype)]
    optimizer = sgd(params, loss_scale=2.0**4)
    force_grads(optimizer, 1.0)
    if how == "from None":
        params[0].grad = None
    optimizer.unscale_()
    first, second = (master for _, master in optimizer.named_masters())
    if how == "in place":
        first.grad.mul_(3)
    elif how == "to None":
        first.grad = None
    elif how == "replaced by a view":
        first.grad = torch.tensor([3.0], device=device).expand(2)
    else:
        first.grad = torch.full((2,), 3.0, device=device)
    moved = moves(optimizer, optimizer.step)
    expected = 0.0 if how == "to None" else 3.0
    assert [move.tolist() for move in moved] == [[expected] * 2, [1.0] * 2]
    assert abs(optimizer.last_step.grad_norm - math.sqrt(2 * expected**2 + 2)) < NORM_ERROR * 10
    assert first.grad is second.grad is None


def test_all_gradients_edited_away_is_a_step_without_gradients(device: torch.device, dtype: torch.dtype) -> None:
    """Setting every gradient to ``None`` gives up the step."""
    optimizer = sgd([vector(device, dtype)], loss_scale=SMALL_SCALE)
    force_grads(optimizer, 1.0)
    optimizer.unscale_()
    for _, master in optimizer.named_masters():
        master.grad = None
    [move] = moves(optimizer, optimizer.step)
    assert not move.any()
    assert optimizer.last_step.reason == "no gradients"
    force_grads(optimizer, 1.0)
    optimizer.step()
    assert optimizer.last_step.applied


def test_an_edit_that_makes_a_nan_is_skipped(device: torch.device, dtype: torch.dtype) -> None:
    """The finite check looks at the edited gradients."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    optimizer.unscale_()
    before = masters_of(optimizer), copy.deepcopy(optimizer.inner.state_dict())
    dict(optimizer.named_masters())["head.bias"].grad[3] = math.nan
    optimizer.step()
    assert optimizer.last_step.skipped
    assert optimizer.loss_scale == 2.0**6
    assert_same(before, (masters_of(optimizer), copy.deepcopy(optimizer.inner.state_dict())))


def test_an_edit_that_launders_an_inf_is_skipped(device: torch.device, dtype: torch.dtype) -> None:
    """``nan_to_num`` after an overflow does not make the other gradients true: skip, and S backs off."""
    optimizer = sgd([vector(device, dtype)], loss_scale=SMALL_SCALE)
    force_grads(optimizer, math.inf)
    optimizer.unscale_()
    for _, master in optimizer.named_masters():
        master.grad.nan_to_num_(0.0, 0.0, 0.0)
    [move] = moves(optimizer, optimizer.step)
    assert not move.any()
    assert optimizer.last_step.skipped
    assert optimizer.loss_scale == 2.0**6
    force_grads(optimizer, 1.0)  # and the next window is a new one
    optimizer.step()
    assert optimizer.last_step.applied


def test_torch_clipping_works_on_the_masters(device: torch.device, dtype: torch.dtype) -> None:
    """The usual recipe, unscale and ``clip_grad_norm_``, returns the true norm and moves by the limit."""
    optimizer = sgd([vector(device, dtype, 4, 0.0)], loss_scale=2.0**6)
    force_grads(optimizer, 5.0)
    optimizer.unscale_()
    norm = torch.nn.utils.clip_grad_norm_([master for _, master in optimizer.named_masters()], 1.0)
    [move] = moves(optimizer, optimizer.step)
    assert abs(float(norm) / 10.0 - 1) < NORM_ERROR
    assert abs(float(move.norm()) - 1.0) < CLIP_ERROR


# -- host reads ---------------------------------------------------------------


class HostReads(TorchDispatchMode):
    """Counts the moments at which the host waits for a value of the device.

    On a GPU those are copies to the host too, and reads of host tensors are
    free; on a CPU every read counts.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "is_nonzero", "equal"):
            self.count += args[0].device.type == self.device.type
        elif name in ("_to_copy", "copy_") and self.device.type != "cpu":
            source = args[1] if name == "copy_" else args[0]
            self.count += source.device.type == self.device.type and result.device.type == "cpu"
        elif name in ("nonzero", "masked_select", "unique_dim") and self.device.type != "cpu":
            self.count += 1
        return result


def test_the_counter_of_host_reads_counts(device: torch.device) -> None:
    """``item``, ``bool`` and ``float`` of a device tensor are one read each, arithmetic is none."""
    value = torch.ones((), device=device)
    with HostReads(device) as reads:
        _ = value + 1
        assert reads.count == 0
        value.item()
        bool(value)
        float(value)
    assert reads.count == 3


@pytest.mark.parametrize("count", [10, 5000])
@pytest.mark.parametrize("kind", ["applied", "skipped", "clipped", "unscaled", "unscaled and clipped"])
def test_a_step_reads_the_host_once(kind: str, count: int, device: torch.device, dtype: torch.dtype) -> None:
    """One read a step, whatever happens in it and however many tensors there are (case 68)."""
    params = [vector(device, dtype, 3) for _ in range(count)]
    optimizer = sgd(params, loss_scale=SMALL_SCALE, max_grad_norm=1.0 if "clip" in kind else None)
    force_grads(optimizer, 0.5)
    optimizer.step()  # the first one also copies the masters to the host, in case the inner optimizer raises
    force_grads(optimizer, math.inf if kind == "skipped" else 0.5)
    with HostReads(device) as reads:
        if "unscaled" in kind:
            optimizer.unscale_()
            assert reads.count == 0
        optimizer.step()
    assert reads.count == 1
    assert optimizer.last_step.skipped == (kind == "skipped")
    assert optimizer.last_step.applied == (kind != "skipped")


def test_only_step_reads_the_host(device: torch.device, dtype: torch.dtype) -> None:
    """Scaling, backward, ``unscale_``, ``zero_grad`` and an idle step read nothing."""
    params = [vector(device, dtype) for _ in range(4)]
    optimizer = sgd(params, loss_scale=SMALL_SCALE)
    with HostReads(device) as reads:
        loss = torch.stack([param.sum() for param in params]).sum()
        optimizer.backward(loss)
        optimizer.unscale_()
        optimizer.zero_grad()
        optimizer.step()
        _ = (optimizer.last_step, optimizer.applied_steps, optimizer.tier, optimizer.param_groups)
    assert reads.count == 0


# -- the log ------------------------------------------------------------------


def records(caplog: pytest.LogCaptureFixture, level: int) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.name == "mixedopt" and record.levelno == level]


def test_a_skip_is_logged_once(device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """One INFO line a skip, with the scale before and after and the counts; nothing for an applied step."""
    model, optimizer = wrapped(device, dtype)
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        train(model, optimizer, [0])
        assert records(caplog, logging.INFO) == []
        overflow(optimizer)
        train(model, optimizer, [1])
        overflow(optimizer)
    said = "step skipped: inf or NaN in the gradients; loss_scale"
    assert records(caplog, logging.INFO) == [
        f"{said} 128 -> 64 (1 in a row, 1 skipped, 1 applied so far)",
        f"{said} 64 -> 32 (1 in a row, 2 skipped, 2 applied so far)",
    ]
    assert records(caplog, logging.WARNING) == []


def test_a_forgotten_scale_is_logged_once(
    device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """``loss.backward()`` at S != 1 warns at the first such step only."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    assert records(caplog, logging.WARNING) == []
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
    [message] = records(caplog, logging.WARNING)
    assert message.startswith("step() met gradients of a loss that was not scaled")
    assert message.endswith("Call optimizer.backward(loss) instead of loss.backward().")
    assert optimizer.applied_steps == 4


@pytest.mark.parametrize("scale", [1.0, StaticLossScale(1.0), DynamicLossScale(init_scale=1.0)], ids=repr)
def test_at_scale_one_nothing_was_forgotten(
    scale: Any, device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Where S is 1 a plain ``loss.backward()`` is right, and equal to ours bit for bit."""
    states = []
    for plain in (True, False):
        model, optimizer = wrapped(device, dtype, loss_scale=scale)
        loss = loss_of(model, 0)
        loss.backward() if plain else optimizer.backward(loss)
        optimizer.step()
        states.append(copy.deepcopy(optimizer.state_dict()))
    assert records(caplog, logging.WARNING) == []
    assert_same(*states)
    assert optimizer.applied_steps == 1


def test_bf16_needs_no_scale_and_keeps_the_check(device: torch.device) -> None:
    """The default for bf16 is a constant 1, and an inf is still skipped (case 39)."""
    model, optimizer = wrapped(device, torch.bfloat16, loss_scale=None)
    assert optimizer.loss_scale == 1.0
    before = masters_of(optimizer), copy.deepcopy(dict(model.state_dict()))
    overflow(optimizer)
    assert optimizer.last_step.skipped
    assert optimizer.loss_scale == 1.0
    assert_same(before, (masters_of(optimizer), copy.deepcopy(dict(model.state_dict()))))
    _, optimizer = wrapped(device, torch.float16, loss_scale=None)
    assert optimizer.loss_scale == 2.0**16


# -- two of them --------------------------------------------------------------


def test_two_wrappers_never_affect_each_other(device: torch.device, dtype: torch.dtype) -> None:
    """A run beside another run, interleaved and full of skips, is the run alone, bit for bit."""
    alone_model, alone = wrapped(device, dtype)
    train(alone_model, alone, range(4))

    model, optimizer = wrapped(device, dtype)
    other_dtype = torch.float16 if dtype == torch.bfloat16 else torch.bfloat16
    other_model, other = wrapped(device, other_dtype, make_momentum, loss_scale=2.0**3, max_grad_norm=0.1)
    for step in range(4):
        optimizer.backward(loss_of(model, step))
        other.backward(loss_of(other_model, step))
        if step % 2:
            other.unscale_()
            overflowing = next(iter(other.named_masters()))[1]
            overflowing.grad.fill_(math.inf)
        other.step()
        optimizer.step()
    assert (other.applied_steps, other.skipped_steps) == (2, 2)
    assert_same(alone.state_dict(), optimizer.state_dict())
    assert_same(dict(alone_model.state_dict()), dict(model.state_dict()))
    before = snapshot(model, optimizer)
    other.policy_handle.remove()
    other.inner.step()
    assert_same(before, snapshot(model, optimizer))


def test_two_wrappers_may_share_a_model(device: torch.device, dtype: torch.dtype) -> None:
    """The second wraps without ``model=``: each steps its own half of the parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
    first = MixedPrecisionOptimizer(make_momentum(model[0].parameters()), model, dtype=dtype, loss_scale=4.0)
    second = sgd(list(model[1].parameters()), lr=0.5, loss_scale=4.0)
    before = copy.deepcopy(dict(model.state_dict()))
    loss = model(torch.ones(3, 4, device=device)).square().mean()
    first.backward(loss)
    second.scale(loss.detach())
    second.step()
    assert_same(before["0.weight"], model[0].weight.detach())
    assert differs(before["1.weight"], model[1].weight.detach())
    first.step()
    assert first.last_step.applied
    assert second.last_step.applied
    assert all(differs(before[name], value) for name, value in model.state_dict().items())


def test_zero_grad_between_scale_and_backward_is_no_forgotten_scale(
    device: torch.device, caplog: pytest.LogCaptureFixture
) -> None:
    """An ordinary order: scale the loss, drop the old gradients, run backward."""
    model, optimizer = wrapped(device, torch.float16)
    loss = optimizer.scale(loss_of(model, 0))
    optimizer.zero_grad()
    loss.backward()
    with caplog.at_level(logging.WARNING, logger="mixedopt"):
        optimizer.step()
    assert optimizer.last_step.applied
    assert caplog.records == []


def test_masters_come_in_the_order_of_the_groups(device: torch.device, dtype: torch.dtype) -> None:
    """Zipping them with the parameters of the groups pairs each with its own."""
    _, optimizer = wrapped(device, dtype)
    trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    masters = [master for _, master in optimizer.named_masters()]
    assert len(trained) == len(masters)
    assert all(torch.equal(param, master.to(param.dtype)) for param, master in zip(trained, masters, strict=True))
    assert len({param.dtype for param in trained}) == 2


@pytest.mark.parametrize("kind", ["fp32", "half", "with a model"])
def test_a_forgotten_model_is_logged(kind: str, device: torch.device, caplog: pytest.LogCaptureFixture) -> None:
    """An fp32 model that nobody converts trains in fp32: said once, when wrapping."""
    model = two_group_model(device)
    if kind == "half":
        model.half()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="mixedopt"):
        MixedPrecisionOptimizer(inner, model if kind == "with a model" else None)
    expected = ["no parameter is half and no model was given: training stays in fp32."] if kind == "fp32" else []
    assert expected == [record.getMessage()[:68] for record in caplog.records]


@pytest.mark.parametrize("set_to_none", [True, False])
def test_dropping_unscaled_gradients_forgets_that_one_was_bad(
    set_to_none: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """An inf that ``unscale_`` has shown and ``zero_grad`` has dropped does not skip the next window."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0) * torch.inf)
    optimizer.unscale_()
    optimizer.zero_grad(set_to_none=set_to_none)
    train(model, optimizer, [1])
    assert optimizer.last_step.applied


def test_what_has_no_state_has_an_empty_entry(device: torch.device, dtype: torch.dtype) -> None:
    """As in torch: a parameter that has not stepped yet, or is frozen."""
    params = [vector(device, dtype) for _ in range(2)]
    optimizer = sgd(params, loss_scale=1.0)
    force_grads(optimizer, 0.5)
    params[1].grad = None
    optimizer.step()
    assert optimizer.state[params[1]] == {}
