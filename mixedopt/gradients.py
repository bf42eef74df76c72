"""Gradients: gather, measure, unscale, clip. Tensor functions, no policy.

One number serves twice: a global norm that finite gradients cannot overflow is
finite exactly when every gradient is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from mixedopt.flat import Layout

# Values per fp32 partial sum. Longer rows lose accuracy (on a CPU 3e-6 at 4096
# equal values, 3e-7 at 512); shorter ones cost time. A GPU sums as a tree.
ROW = 512
ROW_ON_GPU = 4096
# Values per row of a compiled sum over half values, whose lanes add up 64 terms at most.
ROW_OF_HALF = 1024
# From this norm on, squares that vanish in fp32, or are flushed to zero, do not count: at most 2**-126 each.
PLAIN = 2.0**-32
# Under this norm squares may have underflowed in fp32.
TINY = 2.0**-50
# Values widened at once by the exact norm.
CHUNK = 2**22
# Buffers up to this size are measured in fp64 at once: fewer operations.
SMALL = 2**14
FP32_MAX = torch.finfo(torch.float32).max


class GradientBuffer:
    """One flat buffer for the gradients of a layout.

    Invariants between calls: padding and the slots of absent gradients are
    zero; ``views`` are the shaped views of ``flat``, in slot order.

    The buffer exists from the first gather on. On a GPU ``release`` gives it
    back to the allocator, so that it costs 4 bytes a value within a step only;
    on a CPU, where new pages are dear, it is kept.

    Args:
        layout: of the parameters.
        device: where they are.
        dtype: fp32, or half for gradients that wait there in between.
    """

    def __init__(self, layout: Layout, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self._layout = layout
        self._device = device
        self.dtype = dtype
        self._flat: Tensor | None = None
        self._views: list[Tensor] = []
        self._padding = layout.padding().to(device) if device.type == "cuda" else None

    @property
    def made(self) -> bool:
        """True iff the buffer exists."""
        return self._flat is not None

    @property
    def flat(self) -> Tensor:
        """The buffer: 1-d, ``layout.size`` values; made when first read."""
        if self._flat is None:
            self._flat = torch.zeros(self._layout.size, dtype=self.dtype, device=self._device)
            self._views = self._layout.views(self._flat)
        return self._flat

    @property
    def views(self) -> list[Tensor]:
        """Shaped views of ``flat``, in slot order; made with it."""
        _ = self.flat
        return self._views

    def gather_(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Copy gradients into the buffer, widening them.

        Args:
            grads: one per slot, any floating dtype, or ``None``.

        Returns:
            For each slot its view, or ``None`` where there was no gradient. Units are those of ``grads``.

        Syncs: none.
        """
        if self._flat is None and self._padding is not None:
            self._make_to_write(self._padding)
        views = self.views
        present = [grad for grad in grads if grad is not None]
        if len(present) == len(views):
            torch._foreach_copy_(views, present)
            return list(views)
        shown = [None if grad is None else view for view, grad in zip(views, grads, strict=True)]
        torch._foreach_zero_([view for view, grad in zip(views, grads, strict=True) if grad is None])
        if present:
            torch._foreach_copy_([view for view in shown if view is not None], present)
        return shown

    def _make_to_write(self, padding: Tensor) -> None:
        """Make the buffer without a pass over it: every slot is about to be written, so zero what lies between."""
        self._flat = torch.empty(self._layout.size, dtype=self.dtype, device=self._device)
        self._flat.index_fill_(0, padding, 0.0)
        self._views = self._layout.views(self._flat)

    def release(self, *, keep: bool) -> None:
        """Give the memory back; ``keep`` it on a CPU, where new pages are dear."""
        if self._flat is not None and not (keep and self._flat.device.type == "cpu"):
            self._flat = None
            self._views = []


def widen_sparse(grad: Tensor) -> Tensor:
    """Return a sparse gradient in fp32, repeated rows added up there.

    A half sum of repeated rows would saturate.

    Args:
        grad: COO, any floating dtype, coalesced or not. Not modified.

    Syncs: on a GPU one, to count the rows.
    """
    values = grad._values().float()
    if values is grad._values():
        values = values.clone()
    return torch.sparse_coo_tensor(grad._indices(), values, grad.shape, check_invariants=False).coalesce()


def global_norm(flats: Sequence[Tensor], *, within_fp32: Sequence[bool], exact: bool = False) -> tuple[Tensor, Tensor]:
    """Return the L2 norm over all buffers, and whether not to trust it.

    A trusted norm has a relative error below 1e-6 and is finite iff every
    element of every buffer is. An exact norm is always to be trusted.

    Args:
        flats: fp32 or half, 1-d, on any devices; at least one.
        within_fp32: for each buffer True iff the squares are known to stay
            inside fp32, as those of fp16 gradients do.
        exact: accumulate in ``wide_dtype``, in several passes.

    Returns:
        The norm, 0-d, in ``wide_dtype`` and in the unit of the inputs, and a
        bool, 0-d, True iff unsure; both on the first buffer's device.

    Syncs: none.
    """
    home = flats[0].device
    never = torch.zeros((), dtype=torch.bool, device=home)
    if exact:
        return _l2(torch.stack([exact_norm(flat).to(home, non_blocking=True) for flat in flats])), never
    pairs = [quick_norm(flat, within_fp32=within) for flat, within in zip(flats, within_fp32, strict=True)]
    norms = [norm.to(home, non_blocking=True) for norm, _ in pairs]
    norm = norms[0] if len(norms) == 1 else _l2(torch.stack(norms))
    if all(within_fp32):
        return norm, never
    unsure = torch.stack([unsure.to(home, non_blocking=True) for _, unsure in pairs]).any()
    return norm, unsure | (norm < TINY)


def largest(flats: Sequence[Tensor]) -> Tensor:
    """Return the largest |value|, inf or NaN iff there is one; exact, one pass.

    Args:
        flats: 1-d, on any devices; at least one that is not empty.

    Returns:
        0-d, fp32, on the first buffer's device.

    Syncs: none.
    """
    extremes = [end for flat in flats if flat.numel() for end in torch.aminmax(flat)]
    if not extremes:
        return torch.zeros((), dtype=torch.float32, device=flats[0].device)
    return torch.stack([end.float().abs().to(flats[0].device, non_blocking=True) for end in extremes]).amax()


def quick_norm(flat: Tensor, *, within_fp32: bool) -> tuple[Tensor, Tensor]:
    """Return the L2 norm in one fp32 pass, and whether not to trust it.

    Squares may overflow when values are bf16 or fp32; then one suspicious row
    is looked at again, and if it holds no inf or NaN, the norm is infinite
    though the values may be finite.

    Args:
        flat: fp32 or half, 1-d.
        within_fp32: as for ``global_norm``.

    Returns:
        The norm, 0-d, in ``wide_dtype``; and a bool, True iff unsure.

    Syncs: none.
    """
    wide = wide_dtype(flat.device)
    if flat.numel() <= SMALL:
        return _l2(flat.to(wide)), torch.zeros((), dtype=torch.bool, device=flat.device)
    rows, tail = _rows(flat)
    norms = torch.cat([_l2(rows, dim=1), _l2(tail).view(1)]).to(wide)
    norm = _l2(norms)
    if within_fp32:
        return norm, torch.zeros_like(norm, dtype=torch.bool)
    suspect = _l2(_suspect_row(rows, tail, norms).to(wide))
    return norm, ~is_finite(norm) & is_finite(suspect)


def row_squares(rows: Tensor) -> Tensor:
    """Return the sum of squares of each row, added up in fp32.

    Under torch.compile it is one pass over memory, which torch's own norm of
    half values is not.

    Args:
        rows: half, 2-d. Not modified.

    Returns:
        fp32, 1-d.

    Syncs: none.
    """
    return rows.float().square().sum(dim=1)


def half_norm(flat: Tensor, squares: Callable[[Tensor], Tensor] = row_squares) -> Tensor:
    """Return the L2 norm of half values on a CPU, whatever their magnitudes.

    Relative error below 1e-6; finite iff every value is. Squares of fp16 values
    stay inside fp32. Those of bf16 values that do not are measured again, which
    costs several passes: the host knows at once whether that is needed.

    Args:
        flat: half, 1-d, on a CPU, in the scaled unit. Not modified.
        squares: ``row_squares``, compiled or not.

    Returns:
        0-d, fp64.

    Syncs: none, on a CPU.
    """
    if flat.numel() <= SMALL:
        return _l2(flat.double())
    whole = flat.numel() // ROW_OF_HALF * ROW_OF_HALF
    total = squares(flat[:whole].view(-1, ROW_OF_HALF)).double().sum() + flat[whole:].double().square().sum()
    norm = total.sqrt()
    within = flat.dtype == torch.float16 or PLAIN <= float(norm) <= FP32_MAX
    return norm if within else exact_norm(flat)


def exact_norm(flat: Tensor) -> Tensor:
    """Return the L2 norm, relative error below 1e-6, whatever the magnitudes.

    Finite iff every element is: no sum of squares of fp32 values leaves fp64.
    Costs several passes; 0-d, in ``wide_dtype``.

    Args:
        flat: fp32 or half, 1-d.

    Syncs: none.
    """
    wide = wide_dtype(flat.device)
    chunks = torch.split(flat, CHUNK)
    return _l2(torch.stack([_l2(chunk.to(wide)) for chunk in chunks]))


def unscale_factor(scale: Tensor) -> Tensor:
    """Return 1/S, rounded once to fp32 (as GradScaler does). Syncs: none.

    Args:
        scale: S, fp32, 0-d.
    """
    return scale.to(wide_dtype(scale.device)).reciprocal().float()


def clip_factor(norm: Tensor, inverse: Tensor, max_grad_norm: float | Tensor) -> Tensor:
    """Return the factor that unscales gradients and clips them at once.

    It is ``1/S * min(1, max_grad_norm / (norm/S + 1e-6))``, torch's formula
    for ``clip_grad_norm_`` applied to unscaled gradients.

    Args:
        norm: global norm of the *scaled* gradients, 0-d.
        inverse: 1/S, fp32, 0-d; 1 if the gradients are unscaled already.
        max_grad_norm: limit for the unscaled norm.

    Syncs: none.
    """
    coefficient = (max_grad_norm / (norm * inverse + 1e-6)).clamp(max=1.0)
    return (inverse * coefficient).float()


def may_overflow(norm: Tensor, inverse: Tensor) -> Tensor:
    """Return True (bool, 0-d) iff some g/S *may* lie beyond fp32's range.

    With S >= 1 that is impossible; under 1 it is ruled out by a small norm.

    Args:
        norm: global norm of the scaled gradients, finite or not.
        inverse: 1/S, fp32, 0-d.
    """
    return ~(norm * inverse <= FP32_MAX)


def is_finite(norm: Tensor) -> Tensor:
    """Return which norms (>= 0, or NaN) are finite; one operation, not four."""
    return norm <= torch.finfo(norm.dtype).max


def wide_dtype(device: torch.device) -> torch.dtype:
    """Return float64 where the device has it, else float32."""
    return torch.float32 if device.type == "mps" else torch.float64


def _l2(values: Tensor, dim: int | None = None) -> Tensor:
    wide = torch.float32 if values.dtype.itemsize < 4 else None  # squares of half values leave their range
    norm: Tensor = torch.linalg.vector_norm(values, dim=dim, dtype=wide)
    return norm


def _rows(flat: Tensor) -> tuple[Tensor, Tensor]:
    """Return the buffer as rows, and what is left over."""
    length = ROW_ON_GPU if flat.is_cuda else ROW
    whole = flat.numel() // length * length
    return flat[:whole].view(-1, length), flat[whole:]


def _suspect_row(rows: Tensor, tail: Tensor, norms: Tensor) -> Tensor:
    """Return a row whose fp32 norm is not finite, if there is one."""
    suspicious = (~is_finite(norms)).to(torch.uint8)
    if not rows.numel():
        return tail
    row = rows.index_select(0, suspicious[:-1].argmax().view(1)).flatten()
    return torch.cat([row, tail])
