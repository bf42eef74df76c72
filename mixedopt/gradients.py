"""Gradients: gather, measure, unscale, clip. Tensor functions, no policy.

One number serves twice: the global norm, accumulated so widely that finite
gradients cannot overflow it, is finite exactly when every gradient is.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mixedopt.flat import Layout

# Values per fp32 partial sum. Longer rows lose accuracy (1e-6 at 4096 equal
# values, 3e-7 at 512); shorter ones cost time.
ROW = 512
# Under this norm the squares of a row may have underflowed in fp32.
TINY = 2.0**-50
FP32_MAX = torch.finfo(torch.float32).max


class GradientBuffer:
    """One flat fp32 buffer for the gradients of a layout.

    Invariants between calls: padding and the slots of absent gradients are
    zero; ``views`` are the shaped views of ``flat``, in slot order.

    The buffer exists from the first gather on. On a GPU ``release`` gives it
    back to the allocator, so that it costs 4 bytes a value within a step only;
    on a CPU, where new pages are dear, it is kept.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self._layout = layout
        self._device = device
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []

    @property
    def flat(self) -> Tensor:
        """The buffer: fp32, 1-d, ``layout.size`` values; made when first read."""
        if self._flat is None:
            self._flat = torch.zeros(self._layout.size, dtype=torch.float32, device=self._device)
            self._views = self._layout.views(self._flat)
        return self._flat

    @property
    def views(self) -> list[Tensor]:
        """Shaped views of ``flat``, in slot order."""
        return self._views if self._flat is not None else self._layout.views(self.flat)

    def gather_(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Copy gradients into the buffer, widening them to fp32.

        Args:
            grads: one per slot, any floating dtype, or ``None``.

        Returns:
            For each slot its fp32 view, or ``None`` where there was no
            gradient. Units are those of ``grads``.

        Syncs: none.
        """
        _ = self.flat
        views = self._views
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(views):
            torch._foreach_copy_(views, present)
            return list(views)
        shown = [None if grad is None else view for view, grad in zip(views, grads, strict=True)]
        torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
        if present:
            torch._foreach_copy_([view for view in shown if view is not None], present)
        return shown

    def release(self) -> None:
        """Give the memory back where that is cheap."""
        if self._flat is not None and self._flat.is_cuda:
            self._flat = None
            self._views = []


def global_norm(flats: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the L2 norm over all buffers, relative error below 1e-6.

    It is finite iff every element is finite: no sum of squares of finite fp32
    values overflows, and none of representable size underflows.

    Args:
        flats: fp32, 1-d, on any devices; at least one.
        device: where the result is wanted.

    Returns:
        0-d, in ``wide_dtype(device)``; unit of the inputs.

    Syncs: none.
    """
    norms = [_flat_norm(flat).to(device, non_blocking=True) for flat in flats]
    return norms[0] if len(norms) == 1 else _l2(torch.stack(norms))


def unscale_factor(scale: Tensor) -> Tensor:
    """Return 1/S, rounded once to fp32 (as GradScaler does). Syncs: none.

    Args:
        scale: S, fp32, 0-d.
    """
    return scale.to(wide_dtype(scale.device)).reciprocal().float()


def clip_factor(norm: Tensor, scale: Tensor, max_grad_norm: float) -> Tensor:
    """Return the factor that unscales gradients and clips them at once.

    It is ``1/S * min(1, max_grad_norm / (norm/S + 1e-6))``, torch's formula
    for ``clip_grad_norm_`` applied to unscaled gradients.

    Args:
        norm: global norm of the *scaled* gradients, 0-d.
        scale: S, fp32, 0-d; 1 if the gradients are unscaled already.
        max_grad_norm: limit for the unscaled norm.

    Syncs: none.
    """
    inverse = unscale_factor(scale).to(norm.dtype)
    coefficient = (max_grad_norm / (norm * inverse + 1e-6)).clamp(max=1.0)
    return (inverse * coefficient).float()


def may_overflow(norm: Tensor, scale: Tensor) -> Tensor:
    """Return True (bool, 0-d) iff some g/S *may* lie beyond fp32's range.

    With S >= 1 that is impossible; under 1 it is ruled out by a small norm.

    Args:
        norm: global norm of the scaled gradients, finite or not.
        scale: S, fp32, 0-d.
    """
    return ~(norm * unscale_factor(scale) <= FP32_MAX)


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def _l2(values: Tensor, dim: int | None = None, dtype: torch.dtype | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim, dtype=dtype)
    return norm


def _flat_norm(flat: Tensor) -> Tensor:
    if flat.is_cuda:  # memory-bound even with 64-bit sums
        return _l2(flat, dtype=torch.float64)
    # On a CPU 64-bit sums cost 20 times more than short fp32 ones.
    wide = wide_dtype(flat.device)
    whole = flat.numel() // ROW * ROW
    norms = _row_norms(flat[:whole].view(-1, ROW), wide)
    tail = _l2(flat[whole:].to(wide))
    return _l2(torch.cat([norms, tail.view(1)]))


def _row_norms(rows: Tensor, wide: torch.dtype) -> Tensor:
    """Return fp32 row norms, redone in ``wide`` where squares left fp32."""
    norms = _l2(rows, dim=1).to(wide)
    # Lost squares matter only where the whole is that small.
    tiny = (norms < TINY) & (norms.sum() < 2.0**20 * TINY)
    redo = tiny | ~norms.isfinite()
    norms[redo] = _l2(rows[redo].to(wide), dim=1)
    return norms
