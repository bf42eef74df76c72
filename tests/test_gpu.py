"""What only a GPU can show: syncs, memory, packed recurrent weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mixedopt import MixedPrecisionOptimizer, SharedLossScale

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


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_a_step_waits_for_the_gpu_once(dtype: torch.dtype, max_grad_norm: float | None) -> None:
    """From the second step on one sync, applied or skipped; scale, backward and zero_grad none."""
    model = Weights()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, max_grad_norm=max_grad_norm)
    fill_(optimizer, model)
    optimizer.step()
    for value in (1e-3, float("inf"), 1e-3):
        assert syncs_of(lambda value=value: fill_(optimizer, model, value)) == 0
        assert syncs_of(optimizer.step) == 1
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
