"""Cross entropy of half logits by our kernels: fp32 inside, no fp32 copy, and torch's answers to bad input."""

from __future__ import annotations

import functools
import logging
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mixedopt import kernels, losses, norms
from mixedopt.layers import MixedLayerNorm
from mixedopt.native import native

pytestmark = pytest.mark.gpu

# Sums in another order, and an exponential with an error of two units.
FP32 = 2e-6
# One rounding to half, and the odd one that falls to the other side.
ONE_ROUNDING = {torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
SHAPES = [(1, 2), (5, 7), (300, 1000), (7, 4096), (9, 50257)]


class NothingKnown(losses._Fast):
    """C++ knows no loss, and learns none."""

    def learn_(self, *args: object) -> None:
        """Learn nothing."""


def drawn(rows: int, classes: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return logits, some of them large, and classes."""
    x = torch.randn(rows, classes, device="cuda") * 4
    x[0] += 2000
    return x.to(dtype), torch.randint(classes, (rows,), device="cuda")


@pytest.mark.parametrize("ignored", [-100, 1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_loss_and_gradient_are_those_of_fp32(
    shape: tuple[int, int], reduction: str, ignored: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every size and reduction, with rows that do not count, under any slope.

    The same bits each time, whether Python or C++ launches.
    """
    x, y = drawn(*shape, dtype)
    y[1:2] = ignored
    half, wide = x.clone().requires_grad_(), x.float().requires_grad_()
    expected = F.cross_entropy(wide, y, reduction=reduction, ignore_index=ignored)
    with monkeypatch.context() as patch:
        patch.setattr(losses, "_fast", NothingKnown)
        found = losses.cross_entropy(half, y, reduction=reduction, ignore_index=ignored)
    assert found is not None
    assert found.grad_fn.name() == "_CrossEntropyBackward"
    torch.testing.assert_close(found, expected, rtol=FP32, atol=FP32)
    slope = torch.rand_like(expected) + 0.5
    for loss in (found, expected):
        loss.backward(slope)
    assert half.grad.dtype == dtype
    slopes = (slope, slope, slope.repeat_interleave(2)[::2] if slope.dim() else slope)  # the last is no dense memory
    for each in slopes:  # from the second on C++ launches the kernels
        again = x.clone().requires_grad_()
        same = losses.cross_entropy(again, y, reduction=reduction, ignore_index=ignored)
        assert torch.equal(found, same)
        same.backward(each)
        assert torch.equal(half.grad, again.grad)
    assert ("CrossEntropy>" in same.grad_fn.name()) == (native() is not None)
    with torch.no_grad():
        assert torch.equal(found, losses.cross_entropy(x, y, reduction=reduction, ignore_index=ignored))
    torch.testing.assert_close(half.grad.float(), wide.grad, rtol=ONE_ROUNDING[dtype], atol=1e-7)


def test_what_is_not_contiguous_goes_torchs_way(dtype: torch.dtype) -> None:
    """Padded vocabularies, every second row, columns that are apart."""
    x, y = drawn(8, 64, dtype)
    for view in (x[:, :60], x[::2], x[:, 3:40]):
        half, wide = view.detach().requires_grad_(), view.float().requires_grad_()
        target = y[: len(view)] % view.shape[1]
        found, expected = losses.cross_entropy(half, target), F.cross_entropy(wide, target)
        torch.testing.assert_close(found, expected, rtol=FP32, atol=FP32)
        assert found.grad_fn.name() == "NllLossBackward0"
        found.backward()
        expected.backward()
        torch.testing.assert_close(half.grad.float(), wide.grad, rtol=ONE_ROUNDING[dtype], atol=1e-7)
    columns = x.t().contiguous().t().detach().requires_grad_()
    assert losses.cross_entropy(columns, y).grad_fn.name() == "NllLossBackward0"


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_told_as_torch_tells_it(bad: float, dtype: torch.dtype) -> None:
    """Inf and NaN make a NaN of their row, -inf a class that cannot be; no row at all is NaN in the mean."""
    x, y = drawn(4, 9, dtype)
    x[1, (y[1] + 1) % 9] = bad
    found = losses.cross_entropy(x, y, reduction="none")
    torch.testing.assert_close(found, F.cross_entropy(x.float(), y, reduction="none"), equal_nan=True)
    nobody = torch.full_like(y, -100)
    assert losses.cross_entropy(x, nobody).isnan()
    assert losses.cross_entropy(x, nobody, reduction="sum") == 0


def test_the_gradient_has_a_gradient(dtype: torch.dtype) -> None:
    """``create_graph``, as for a gradient penalty."""
    x, y = drawn(4, 9, dtype)
    for _ in range(2):  # from then on by C++, but for this
        losses.cross_entropy(x.clone().requires_grad_(), y).backward()
    found = []
    for z in (x.clone().requires_grad_(), x.float().requires_grad_()):
        loss = losses.cross_entropy(z, y) if z.dtype == dtype else F.cross_entropy(z, y)
        (slope,) = torch.autograd.grad(loss, z, create_graph=True)
        found.append(torch.autograd.grad(slope.float().square().sum(), z)[0].float())
    torch.testing.assert_close(*found, rtol=0.05, atol=1e-3)


def test_no_fp32_copy_is_made(dtype: torch.dtype) -> None:
    """Forward leaves a few numbers a row; backward adds the gradient. Torch's fp32 loss takes four times that."""
    x, y = drawn(512, 50304, dtype)
    x.requires_grad_()
    for _ in range(2):  # compiles first
        x.grad = None
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        loss = losses.cross_entropy(x, y)
        assert torch.cuda.max_memory_allocated() - before < 0.01 * x.nbytes
        loss.backward()
        assert torch.cuda.max_memory_allocated() - before < 1.01 * x.nbytes


def test_a_class_that_there_is_not_stops_the_process() -> None:
    """By an assertion on the device, as in torch: a wrong label is no row to train on."""
    code = """
import torch
from mixedopt import losses
x = torch.zeros(2, 3, device="cuda", dtype=torch.half)
losses.cross_entropy(x, torch.tensor([0, 3], device="cuda"))
torch.cuda.synchronize()
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode
    assert "a target is no class" in ran.stderr + ran.stdout


def test_without_kernels_the_layers_are_torchs(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No C compiler, say: norms and losses are operations of torch, fp32 inside, and it is said once."""

    def fails(device: int) -> None:
        raise RuntimeError("no C compiler")

    monkeypatch.setattr("mixedopt.launching.try_one", fails)
    monkeypatch.setattr(norms, "_fast", functools.cache(norms._Fast))
    monkeypatch.setattr(losses, "_fast", functools.cache(losses._Fast))
    kernels.served.cache_clear()
    norms._kernels.cache_clear()
    try:
        norm = nn.LayerNorm(8).cuda()
        norm.__class__ = MixedLayerNorm
        x, y = drawn(4, 8, dtype)
        with caplog.at_level(logging.INFO, logger="mixedopt"):
            out = norm(x.requires_grad_())
            loss = losses.cross_entropy(out, y)
            loss.backward()
        assert x.grad.dtype == out.dtype == dtype
        assert torch.equal(loss, F.cross_entropy(out.float(), y))
        assert caplog.text.count("no C compiler") == 1
    finally:
        kernels.served.cache_clear()
        norms._kernels.cache_clear()
