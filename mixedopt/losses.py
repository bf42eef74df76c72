"""Cross entropy of half logits, in fp32; on a GPU without an fp32 copy of them."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from mixedopt.kernels import HALF, on_device, served
from mixedopt.native import loaded

REDUCTIONS = ("none", "mean", "sum")


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **more: Any,
) -> Tensor | None:
    """Return the fp32 loss of half logits, ``None`` for forms that are torch's to cast.

    On a CUDA device kernels of ours read contiguous logits once, and once more in
    backward, which keeps them and two numbers a row. Elsewhere it is torch's
    ``log_softmax`` with an fp32 result, which reads fp16 as it is on CUDA.

    Args:
        input: half, ``[C]``, ``[N, C]`` or ``[N, C, ...]``.
        target: classes; this and the others are the arguments of ``torch.nn.functional.cross_entropy``.
        weight: see there.
        size_average: see there.
        ignore_index: see there.
        reduce: see there.
        reduction: see there.
        label_smoothing: see there.
        **more: what later versions of torch may have.

    Returns:
        fp32; in the kernels within rounding of torch's fp32 loss, elsewhere its bits.
    """
    plain = size_average is None and reduce is None and label_smoothing == 0.0 and not more
    if plain and weight is None and not torch.compiler.is_compiling():
        loss = _fast().call(input, target, ignore_index, reduction)
        if loss is not None:
            return loss
    if not plain or target.is_floating_point():
        return None
    if weight is None and reduction in REDUCTIONS and _fusible(input, target):
        _fast().learn_(input, int(ignore_index), reduction)
        return _CrossEntropy.apply(input, target, int(ignore_index), reduction)  # type: ignore[no-any-return, no-untyped-call]
    return _plain(input, target, ignore_index, reduction, weight)


def _plain(input: Tensor, target: Tensor, ignored: int, reduction: str, weight: Tensor | None = None) -> Tensor:
    logp = F.log_softmax(input, dim=0 if input.dim() == 1 else 1, dtype=torch.float32)
    weight = None if weight is None else weight.float()
    return F.nll_loss(logp, target, weight, ignore_index=ignored, reduction=reduction)


def _fusible(x: Tensor, target: Tensor) -> bool:
    """Return True iff the kernels take these, and nobody watches what torch calls."""
    if torch.compiler.is_compiling() or not x.is_cuda or x.dtype not in HALF or type(x) is not Tensor:
        return False
    if x.dim() != 2 or not x.numel() or not x.is_contiguous():
        return False
    fits = type(target) is Tensor and target.dtype is torch.int64 and target.is_contiguous()
    if not fits or target.shape != x.shape[:1] or target.get_device() != x.get_device():
        return False
    if forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return False
    return not torch._C._len_torch_dispatch_stack() and served(x.get_device())


class _Fast:
    """The losses that C++ knows: kernels that Python has launched once."""

    def __init__(self) -> None:
        self.call: Callable[..., Tensor | None] = _never
        self._lock = threading.Lock()
        self._losses: Any = None
        self._known: set[tuple[Any, ...]] = set()

    def learn_(self, x: Tensor, ignored: int, reduction: str) -> None:
        """Hand over the kernels, if they were launched by now."""
        from mixedopt import loss_kernels

        key, library = (x.get_device(), x.dtype, x.shape[1], ignored, reduction), loaded()
        if key in self._known or library is None or (kernels := loss_kernels.direct(*key)) is None:
            return
        device, dtype, *about = key
        with self._lock:
            if self._losses is None:
                self._losses = library.losses()
                self.call = functools.partial(library.cross_entropy, self._losses)
            if key not in self._known:
                slope = functools.partial(_slope_of, (ignored, reduction))
                library.add_loss(self._losses, device, dtype == torch.bfloat16, *about, *kernels, slope)
                self._known.add(key)


_fast = functools.cache(_Fast)


def _never(*args: Any) -> None:
    """Serve nothing."""


def _slope_of(
    how: tuple[int, str], slope: Tensor, x: Tensor, target: Tensor, stats: Tensor, counted: Tensor, bits: int = 1
) -> tuple[Tensor]:
    """Return the gradient of the logits. C++ passes which gradients are wanted, and there is but one."""
    if torch.is_grad_enabled():  # create_graph: the gradient is itself differentiated
        loss = _plain(x, target, *how)
        return torch.autograd.grad(loss, x, slope, create_graph=True)  # type: ignore[return-value]
    from mixedopt import loss_kernels

    # Autograd has made the device of x the current one.
    return (loss_kernels.loss_backward(slope, x, target, stats, counted, *how),)


class _CrossEntropy(torch.autograd.Function):
    """The kernels: saves the logits as they came."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, ignored: int, reduction: str) -> Tensor:
        from mixedopt import loss_kernels

        with on_device(x.device):
            loss, *kept = loss_kernels.loss_forward(x, target, ignored, reduction)
        ctx.save_for_backward(x, target, *kept)
        ctx.how = ignored, reduction
        return loss

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        return *_slope_of(ctx.how, slope, *ctx.saved_tensors), None, None, None
