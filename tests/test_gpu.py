"""What only a GPU can show: syncs, memory, packed recurrent weights."""

from __future__ import annotations

import importlib.util
import logging
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, SharedLossScale
from mixedopt.split import join, remainder_of

if importlib.util.find_spec("triton") is not None:
    from mixedopt import step_kernels

pytestmark = pytest.mark.gpu

# Values in the model of the memory tests: small enough for any GPU, large enough that the allocator's
# rounding (512 bytes a tensor, 2 MiB a segment) stays under the slack.
VALUES = 2**25
SLACK = 0.25  # bytes a value


class Weights(nn.Module):
    """Thirty-two matrices and no computation."""

    def __init__(self) -> None:
        super().__init__()
        rows = [nn.Parameter(torch.randn(2**10, 2**10, device="cuda") / 32) for _ in range(VALUES // 2**20)]
        self.weights = nn.ParameterList(rows)


def fill_(optimizer: MixedPrecisionOptimizer, model: nn.Module, value: float = 1e-3) -> None:
    optimizer.scale(torch.ones((), device="cuda"))
    for param in model.parameters():
        param.grad = torch.full_like(param, value)


def syncs_of(call: Callable[[], object]) -> int:
    """Return how often ``call`` made the host wait for the device."""
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing CUDA operation" in str(warning.message) for warning in seen)


def per_value(size: int) -> float:
    return size / VALUES


@pytest.mark.parametrize(("tier", "syncs"), [("eager", 1), ("fused", 0), ("compiled", 0)])
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_how_often_a_step_waits_for_the_gpu(
    dtype: torch.dtype, max_grad_norm: float | None, tier: str, syncs: int
) -> None:
    """From the second step on one sync in the eager tier, applied or skipped; scale, backward and zero_grad none."""
    model = Weights()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, max_grad_norm=max_grad_norm, tier=tier)
    fill_(optimizer, model)
    optimizer.step()
    for value in (1e-3, float("inf"), 1e-3):
        assert syncs_of(lambda value=value: fill_(optimizer, model, value)) == 0
        assert syncs_of(optimizer.step) == syncs
        assert syncs_of(optimizer.zero_grad) == 0
    assert (optimizer.applied_steps, optimizer.skipped_steps) == (3, 1)


def test_wrapping_peaks_at_eight_bytes_a_value(dtype: torch.dtype) -> None:
    """Flat fp32 first, originals freed one by one, then the half buffer: 6 bytes are left."""
    model = Weights()
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated() - 4 * VALUES
    torch.cuda.reset_peak_memory_stats()
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype)
    peak, after = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
    one_tensor = 4 * 2**20
    assert per_value(peak - one_tensor) < 8 + SLACK
    assert per_value(after) < 6 + SLACK
    assert optimizer.tier == "eager"


def test_gradients_cost_four_bytes_within_the_step_only(dtype: torch.dtype) -> None:
    """AdamW: 14 bytes a value between steps, at most 20 at the peak of a step."""
    model = Weights()
    start = torch.cuda.memory_allocated() - 4 * VALUES
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, max_grad_norm=1.0)
    for _ in range(2):
        fill_(optimizer, model)
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    assert per_value(torch.cuda.memory_allocated() - start) < 14 + SLACK
    assert per_value(torch.cuda.max_memory_allocated() - start) < 20 + SLACK


def test_packed_recurrent_weights_stay_packed(dtype: torch.dtype) -> None:
    """An LSTM is taken by cuDNN as one chunk, without a warning, wherever it stands in the model."""
    model = nn.Sequential(nn.Linear(16, 16), nn.LSTM(16, 32, num_layers=2)).cuda()
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), model, dtype=dtype)
    x = torch.randn(5, 3, 16, device="cuda")
    for _ in range(2):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            output, _ = model(x)
        optimizer.backward(output.square().mean())
        optimizer.step()
    assert optimizer.applied_steps + optimizer.skipped_steps == 2


class Squares(Weights):
    """Every weight counts, so that backward makes each gradient in turn."""

    def forward(self) -> torch.Tensor:
        return torch.stack([weight.float().square().sum() for weight in self.weights]).sum()


@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
def test_gradients_that_are_held_wait_for_no_host(gradients: str, dtype: torch.dtype) -> None:
    """Whoever holds them: backward makes no sync, a step one."""
    model = Squares()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, gradients=gradients, loss_scale=2.0**-4)
    for _ in range(2):
        optimizer.backward(model())
        optimizer.step()
    assert 0 == syncs_of(lambda: optimizer.backward(model()))
    assert 1 == syncs_of(optimizer.step)
    assert 3 == optimizer.applied_steps


@pytest.mark.parametrize(("gradients", "expected"), [("autograd", 2.0), ("half", 2.0), ("fp32", 4.0)])
def test_a_half_gradient_is_freed_as_soon_as_it_was_moved(gradients: str, expected: float, dtype: torch.dtype) -> None:
    """After two micro-steps the gradients take 2 bytes a value in half, 4 in fp32, and no more on the way."""
    model = Squares()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, gradients=gradients, loss_scale=1.0)
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        optimizer.backward(model())
    assert abs(per_value(torch.cuda.memory_allocated() - before) - expected) < SLACK


def test_droppable_micro_steps_cost_one_read_a_step(dtype: torch.dtype) -> None:
    """No sync in backward; the step reads which micro-steps were good, and decides."""
    model = Squares()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    options = {"gradients": "fp32", "drop_bad_micro_steps": lambda kept, total: total / kept, "loss_scale": 2.0**-4}
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, **options)
    optimizer.backward(model())
    optimizer.step()
    bad = torch.tensor(float("inf"), device="cuda")
    good = torch.ones((), device="cuda")
    assert 0 == syncs_of(lambda: [optimizer.backward(model() * factor) for factor in (good, bad, good)])
    assert 2 == syncs_of(optimizer.step)
    assert (True, 1) == (optimizer.last_step.applied, optimizer.last_step.dropped_micro_steps)


def test_a_shared_step_waits_once_for_each_optimizer(dtype: torch.dtype) -> None:
    """Two optimizers on one model: two syncs."""
    model = Squares()
    halves = list(model.parameters())[:16], list(model.parameters())[16:]
    shared = SharedLossScale(2.0**-4)
    members = [
        MixedPrecisionOptimizer(torch.optim.AdamW(half, fused=True), model, dtype=dtype, loss_scale=shared)
        for half in halves
    ]
    for _ in range(2):
        members[0].backward(model())
        shared.step(*members)
    members[1].backward(model())
    assert 2 == syncs_of(lambda: shared.step(*members))
    assert [3, 3] == [member.applied_steps for member in members]


# -- the sync-free tiers ---------------------------------------------------------------------------------------------

FREE = ("fused", "compiled")
ADAMW = {"lr": 1e-3, "fused": True}


def small(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.LayerNorm(64), nn.Linear(64, 4)]
    return nn.Sequential(*layers).cuda()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x.cuda(), (x[:, :4].sum(1) > 0).long().cuda()


@pytest.mark.parametrize("tier", FREE)
def test_nothing_waits_in_a_run(tier: str, dtype: torch.dtype) -> None:
    """Backward, step, zero_grad and scheduler, with clipping, overflows, accumulation and a moving rate: no sync."""
    model = small()
    inner = torch.optim.AdamW(model.parameters(), **ADAMW)
    scale = DynamicLossScale(2.0**8, growth_interval=3)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, tier=tier, max_grad_norm=0.5, loss_scale=scale)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
    batches = [batch(step) for step in range(20)]
    bad = torch.tensor(float("inf"), device="cuda")

    def iteration(step: int) -> None:
        for _ in range(1 + step % 2):
            loss = nn.functional.cross_entropy(model(batches[step][0]), batches[step][1])
            optimizer.backward(loss * bad if step in (5, 9) else loss)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()

    for step in range(2):
        iteration(step)
    assert 0 == sum(syncs_of(lambda step=step: iteration(step)) for step in range(2, 20))
    assert (optimizer.applied_steps, optimizer.skipped_steps, optimizer.tier) == (18, 2, tier)


def test_kernels_are_compiled_once(dtype: torch.dtype) -> None:
    """Two steps are enough: rates, betas, decay, clipping, overflows, missing gradients compile nothing more."""
    model = small()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, tier="compiled", max_grad_norm=0.5)
    compiled: list[int] = []
    for step in range(12):
        x, y = batch(step)
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.backward(loss * float("inf") if step == 6 else loss)
        if step == 7:
            model[0].bias.grad = None
        optimizer.param_groups[0].update({"lr": 1e-3 / (1 + step), "betas": (0.9, 0.99 + step / 2000)})
        optimizer.step()
        caches = [step_kernels.plan_launcher.cache_info(), step_kernels.update_launcher.cache_info()]
        compiled.append(sum(info.misses for info in caches))
    assert compiled[1:] == [compiled[1]] * 11


@pytest.mark.parametrize(("master", "between", "within"), [("fp32", 14.0, 18.0), ("split", 12.0, 16.0)])
def test_what_a_compiled_step_takes(master: str, between: float, within: float, dtype: torch.dtype) -> None:
    """AdamW, bytes a value: weights, masters and moments; at its peak gradients of 2 more, made by the test."""
    model = Weights()
    start = torch.cuda.memory_allocated() - 4 * VALUES
    inner = torch.optim.AdamW(model.parameters())
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, max_grad_norm=1.0, tier="compiled", master=master)
    for _ in range(2):
        fill_(optimizer, model)
        torch.cuda.reset_peak_memory_stats()
        optimizer.step()
    assert per_value(torch.cuda.memory_allocated() - start) < between + SLACK
    assert per_value(torch.cuda.max_memory_allocated() - start) < within + SLACK


def test_a_kernel_splits_as_torch_does(dtype: torch.dtype) -> None:
    """All half values with all kinds of remainders: SGD in the kernel leaves the pairs of the same step in PyTorch."""
    bits = torch.arange(2**16, dtype=torch.int32, device="cuda").to(torch.int16)
    half = bits.view(dtype)
    half = half[half.isfinite() & (half.abs() < 1e4)].repeat(3)
    param = nn.Parameter(half.clone())
    inner = torch.optim.SGD([param], lr=2.0**-3)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0, tier="compiled", master="split")
    bucket = optimizer._parts.masters.buckets[0]
    drawn = torch.randn(half.numel(), device="cuda") * half.float().abs() * 2.0**-11
    values = half.float() + drawn
    bucket.flat_model[: half.numel()] = values.to(dtype)
    bucket.flat_remainder[: half.numel()] = remainder_of(values, values.to(dtype))
    bucket.note_published_()
    masters = join(bucket.flat_model, bucket.flat_remainder)[: half.numel()]
    grad = torch.randn(half.numel(), device="cuda").to(dtype)
    optimizer.scale(torch.zeros((), device="cuda"))
    param.grad = grad
    optimizer.step()
    expected = masters - 2.0**-3 * grad.float()
    assert torch.equal(param.detach(), expected.to(dtype))
    assert torch.equal(bucket.flat_remainder[: half.numel()], remainder_of(expected, expected.to(dtype)))


# Half precision makes the last digits of a loss differ between tiers as they do between seeds.
SEEDS = 3


def test_a_long_run_ends_where_the_eager_one_does(dtype: torch.dtype) -> None:
    """A thousand steps in each tier: the mean of the last losses lies within the spread of seeds."""
    ends: dict[str, list[float]] = {}
    for tier in ("eager", *FREE):
        for seed in range(SEEDS if tier == "eager" else 1):
            model = small(seed)
            inner = torch.optim.AdamW(model.parameters(), **ADAMW)
            optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, tier=tier, max_grad_norm=1.0)
            losses = []
            for step in range(1000):
                x, y = batch(1000 * seed + step % 250)
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.backward(loss)
                optimizer.step()
                losses.append(loss.detach())
            ends.setdefault(tier, []).append(float(torch.stack(losses[-250:]).mean()))
    low, high = min(ends["eager"]), max(ends["eager"])
    for tier in FREE:
        assert low - (high - low) <= ends[tier][0] <= high + (high - low), ends


@pytest.mark.auto
def test_auto_takes_the_fastest_that_serves(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """Compiled with a rule, else fused, else eager; said once, with the reason."""
    cases = [
        (lambda p: torch.optim.AdamW(p), "compiled", "it has a rule"),
        (lambda p: torch.optim.AdamW(p, fused=True, eps=0.0), "fused", "no rule covers"),
        (lambda p: torch.optim.Adafactor(p), "eager", "no rule covers this Adafactor.*does not skip by itself"),
    ]
    for make, tier, reason in cases:
        model = small()
        caplog.clear()
        with caplog.at_level(logging.INFO, logger="mixedopt"):
            optimizer = MixedPrecisionOptimizer(make(model.parameters()), model, dtype=dtype)
        lines = [record.getMessage() for record in caplog.records if record.getMessage().startswith("tier")]
        assert (optimizer.tier, len(lines)) == (tier, 1)
        assert re.search(f"^tier '{tier}' for .*{reason}", lines[0])


class TwoDevices(nn.Module):
    """Layers on two GPUs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm = nn.Linear(16, 32).to("cuda:0"), nn.LayerNorm(32).to("cuda:0")
        self.last = nn.Linear(32, 4).to("cuda:1")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).to("cuda:1"))


@pytest.mark.parametrize("tier", FREE)
def test_a_loss_on_the_host_begins_with_the_scale(tier: str, dtype: torch.dtype) -> None:
    """Not with what its memory held before the device, which is behind, has written S there."""
    model = small()
    inner = torch.optim.AdamW(model.parameters(), **ADAMW)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, tier=tier, loss_scale=2.0**7)
    x, y = batch(0)
    loss = nn.functional.cross_entropy(model(x), y).cpu()
    expected = torch.autograd.grad(loss * 2.0**7, list(model.parameters()), retain_graph=True)
    torch.cuda._sleep(10**8)
    optimizer.backward(loss)
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert torch.equal(param.grad, grad)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("tier", ["eager", *FREE])
def test_a_model_on_two_devices(tier: str, dtype: torch.dtype) -> None:
    """One decision for both: an inf on either skips all; otherwise the steps of a run on one device."""
    found = []
    for model in (TwoDevices(), TwoDevices().to("cuda:0")):
        if next(model.last.parameters()).device.index == 0:
            model.forward = lambda x, model=model: model.last(model.norm(model.first(x)))
        inner = torch.optim.AdamW(model.parameters(), **ADAMW)
        scale = DynamicLossScale(2.0**8, growth_interval=3)
        optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, tier=tier, max_grad_norm=0.5, loss_scale=scale)
        for step in range(12):
            x, y = batch(step)
            out = model(x)
            optimizer.backward(nn.functional.cross_entropy(out, y.to(out.device)))
            if step in (0, 4, 7):
                layer = model.last if step == 4 else model.first
                layer.bias.grad[0] = float("nan")
            before = [param.detach().clone() for param in model.parameters()]
            optimizer.step()
            same = all(torch.equal(p, b) for p, b in zip(model.parameters(), before, strict=True))
            assert same == (step in (0, 4, 7)), step
        assert (optimizer.applied_steps, optimizer.skipped_steps) == (9, 3)
        found.append([master.detach().cpu() for _, master in optimizer.named_masters()])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, rtol=1e-3, atol=1e-4)


@pytest.mark.auto
def test_without_kernels_training_goes_on(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No C compiler, say: the fused tier by torch's operations, and still no sync."""

    def fails(*args: object, **options: object) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr(step_kernels, "try_kernels", fails)
    monkeypatch.setattr(step_kernels, "try_judging", fails)
    model = small()
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        inner = torch.optim.AdamW(model.parameters(), **ADAMW)
        optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, max_grad_norm=0.5)
    assert "kernels cannot be made here (RuntimeError: no C compiler)" in caplog.text

    def iteration(step: int) -> None:
        x, y = batches[step]
        optimizer.backward(nn.functional.cross_entropy(model(x), y) * (bad if step == 2 else 1.0))
        optimizer.step()

    bad, batches = torch.tensor(float("inf"), device="cuda"), [batch(step) for step in range(6)]
    for step in range(2):
        iteration(step)
    assert 0 == sum(syncs_of(lambda step=step: iteration(step)) for step in range(2, 6))
    assert (optimizer.tier, optimizer.applied_steps, optimizer.skipped_steps) == ("fused", 5, 1)
