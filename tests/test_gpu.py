"""What only a GPU can show: syncs, memory, packed recurrent weights."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

from mixedopt import MixedPrecisionOptimizer

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
