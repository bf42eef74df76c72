"""LayerNorm, RMSNorm and GroupNorm of half activations with fp32 weights.

What is computed is ``norm(x.float()).to(x.dtype)``: normalised in fp32, with the
weights as they are, rounded once; forward and backward. But no fp32 activation
is saved, and where Triton serves a CUDA device none is written: one kernel reads
half and writes half. Elsewhere the casts are there and gone within the call.

The modules are in ``layers``.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import forward_ad

from mixedopt.kernels import HALF, served
from mixedopt.native import loaded

# What a kernel can be given a pointer to. A subclass (DTensor, FakeTensor) may stand for other values than it holds.
PLAIN = frozenset({Tensor, nn.Parameter, type(None)})
MAX_SIZE = 16384  # values of a row, or channels of a group, that one program keeps in registers
EPS = torch.finfo(torch.float32).eps  # what ``None`` means to an RMSNorm in fp32

Gradients = tuple[Tensor | None, ...]


class Rows(NamedTuple):
    """LayerNorm, or if not ``centred`` RMSNorm, over the last dimensions: a norm without its weights."""

    shape: tuple[int, ...]
    eps: float | None
    centred: bool

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return torch's result; all tensors have one dtype."""
        if self.centred:
            return F.layer_norm(x, self.shape, weight, bias, self.eps)  # type: ignore[arg-type]
        return F.rms_norm(x, self.shape, weight, self.eps)

    def plan(self, kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Return what runs the kernels, ``None`` if they do not take these."""
        shape, size = self.shape, weight.numel()
        if weight.shape != shape or x.shape[-len(shape) :] != shape or not 0 < size <= MAX_SIZE:
            return None
        return kernels[0].row_plan(x.get_device(), x.dtype, size, self.eps, self.centred, bias is not None)


class Groups(NamedTuple):
    """GroupNorm, without its weights."""

    groups: int
    eps: float

    def plain(self, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """Return torch's result; all tensors have one dtype."""
        return F.group_norm(x, self.groups, weight, bias, self.eps)

    def plan(self, kernels: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
        """Return what runs the kernels, ``None`` if they do not take these.

        Torch raises where there is one value for all statistics.
        """
        if x.dim() < 2 or x.numel() == self.groups or weight.shape != (x.shape[1],):
            return None
        if x.shape[1] % self.groups != 0 or x.shape[1] > MAX_SIZE * self.groups:
            return None
        return kernels[1].GroupPlan(self.groups, self.eps)


Norm = Rows | Groups


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the LayerNorm of ``x`` over its last dimensions, fp32 inside.

    Args:
        x: ``[..., *shape]``; half for what this room is for. All of another dtype: what torch does.
        shape: the dimensions to normalise.
        weight: ``shape``, fp32.
        bias: ``shape``, fp32.
        eps: added to the variance.

    Returns:
        Of shape and dtype of ``x``. Its gradient is half, those of weight and bias are summed and kept in fp32.
    """
    if not torch.compiler.is_compiling() and (y := _fast().call(x, shape, weight, bias, eps, True)) is not None:
        return y
    return _norm(Rows(tuple(shape), eps, True), x, weight, bias)


def rms_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    """Return the RMSNorm of ``x`` over its last dimensions, fp32 inside.

    Args:
        x: ``[..., *shape]``, half.
        shape: the dimensions to normalise.
        weight: ``shape``, fp32.
        eps: added to the mean square; ``None`` is the epsilon of fp32.

    Returns:
        As ``layer_norm``.
    """
    if not torch.compiler.is_compiling() and (y := _fast().call(x, shape, weight, None, eps, False)) is not None:
        return y
    if eps is None and x.dtype in HALF and (weight is None or weight.dtype is torch.float32):
        eps = EPS
    return _norm(Rows(tuple(shape), eps, False), x, weight, None)


def group_norm(
    x: Tensor, groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    """Return the GroupNorm of ``x``, fp32 inside.

    Args:
        x: ``[N, C, ...]``, half.
        groups: divides C.
        weight: ``[C]``, fp32.
        bias: ``[C]``, fp32.
        eps: added to the variance.

    Returns:
        As ``layer_norm``. Contiguous on a GPU, as torch's.
    """
    return _norm(Groups(groups, eps), x, weight, bias)


def _norm(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Choose who computes."""
    compiling = torch.compiler.is_compiling()
    if (
        not compiling
        and torch._C._is_torch_function_mode_enabled()
        and {type(x), type(weight), type(bias)} <= PLAIN
        and x.is_cuda
    ):
        with torch._C.DisableTorchFunction():  # else a mode is called for each look at a tensor
            return _norm(norm, x, weight, bias)
    single = torch.float32
    if (
        x.dtype not in HALF
        or weight is None
        or weight.dtype is not single
        or (bias is not None and bias.dtype is not single)
    ):
        return _cast_up(norm, x, weight, bias)
    # Inductor fuses the casts. A transform, or a derivative on the way forward, has no rule for a Function.
    if compiling or forward_ad._current_level >= 0 or torch._C._are_functorch_transforms_active():
        return norm.plain(x.float(), weight, bias).to(x.dtype)
    plan = _plan(norm, x, weight, bias) if x.is_cuda else None
    if plan is None:
        return _Transient.apply(x, weight, bias, norm)  # type: ignore[no-any-return, no-untyped-call]
    if x.get_device() != torch._C._cuda_getDevice():
        with torch.cuda.device(x.device):
            return _norm(norm, x, weight, bias)
    if type(norm) is Rows:
        _fast().learn_(norm, plan, x, weight, bias)
    if torch.is_grad_enabled() and (
        x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    ):
        return _APPLY(x, weight, bias, norm, plan)
    return plan.forward(x, weight, bias)[0]  # type: ignore[no-any-return]


def _cast_up(norm: Norm, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute in the widest of the dtypes; if there is but one, this is torch's own norm."""
    params = [param for param in (weight, bias) if param is not None]
    wide = functools.reduce(torch.promote_types, (param.dtype for param in params), x.dtype)
    if all([tensor.dtype == wide for tensor in (x, *params)]):  # noqa: C419 (torch.compile traces no generator)
        return norm.plain(x, weight, bias)
    up = [None if param is None else param.to(wide) for param in (weight, bias)]
    return norm.plain(x.to(wide), up[0], up[1]).to(x.dtype)


@functools.cache
def _kernels(device: int) -> Any:
    """Return the rooms of kernels for a CUDA device, ``None`` where they cannot be made."""
    if not served(device):
        return None
    from mixedopt import norm_group_kernels, norm_kernels

    return norm_kernels, norm_group_kernels


def _plan(norm: Norm, x: Tensor, weight: Tensor, bias: Tensor | None) -> Any:
    """Return what runs the kernels, ``None`` if they do not take these.

    A mode that watches what torch calls would not see them.
    """
    device = x.get_device()
    if type(x) not in PLAIN or type(weight) not in PLAIN or type(bias) not in PLAIN or weight.get_device() != device:
        return None
    if bias is not None and (bias.get_device() != device or bias.shape != weight.shape):
        return None
    if x.is_nested or x.numel() == 0 or torch._C._len_torch_dispatch_stack():
        return None
    kernels = _kernels(device)
    return None if kernels is None else norm.plan(kernels, x, weight, bias)


class _Fast:
    """The norms of rows that C++ knows: kernels that Python has launched once."""

    def __init__(self) -> None:
        self.call: Callable[..., Tensor | None] = _never
        self._lock = threading.Lock()
        self._rows: Any = None
        self._known: dict[tuple[Rows, Any], Any] = {}

    def learn_(self, norm: Rows, plan: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        """Hand over the kernel of ``forward``, if it was launched by now."""
        key, library = (norm, plan), loaded()
        if key in self._known or library is None or (how := plan.direct_forward()) is None:
            return
        about = x.get_device(), x.dtype == torch.bfloat16, norm.shape, norm.eps, norm.centred, bias is not None
        with self._lock:
            if self._rows is None:
                self._rows = library.rows()
                self.call = functools.partial(library.row_norm, self._rows)
            if key not in self._known:
                backward = functools.partial(_row_backward, norm, plan)
                self._known[key] = library.add_rows(self._rows, *about, *how, backward)

    def learn_backward_(self, norm: Rows, plan: Any, needs: tuple[bool, ...], bits: int) -> None:
        """Hand over the kernels of a backward, if they were launched by now."""
        known, library, how = self._known.get((norm, plan)), loaded(), plan.direct_backward(needs)
        if known is not None and library is not None and how is not None:
            library.add_rows_backward(known, bits, *how)


_fast = functools.cache(_Fast)


def _never(*args: Any) -> None:
    """Serve nothing."""


def _row_backward(norm: Rows, plan: Any, dy: Tensor, x: Tensor, weight: Tensor, bits: int) -> Gradients:
    """Return the gradients that C++ has no kernels for; the first of the bits asks for that of x."""
    needs = tuple([bool(bits >> place & 1) for place in range(3)])
    if torch.is_grad_enabled():
        return _differentiate(norm, dy, x, weight, needs)
    found = plan.backward(dy, x, weight, None, needs)
    _fast().learn_backward_(norm, plan, needs, bits)
    return found  # type: ignore[no-any-return]


class _Fused(torch.autograd.Function):
    """The kernels: saves x as it came, and no fp32 of its size. Autograd runs backward on the device of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm, plan: Any) -> Tensor:
        y, stats = plan.forward(x, weight, bias)
        ctx.save_for_backward(x, weight, stats)
        ctx.how = norm, plan
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        norm, plan = ctx.how
        if torch.is_grad_enabled():
            x, weight = ctx.saved_tensors[:2]
            return *_differentiate(norm, dy, x, weight, ctx.needs_input_grad[:3]), None, None
        return *plan.backward(dy, *ctx.saved_tensors, ctx.needs_input_grad[:3]), None, None


class _Transient(torch.autograd.Function):
    """Torch's fp32 norm between two casts, done again in backward: saves x as it came, and nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Norm) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.norm = norm
        return norm.plain(x.float(), weight, bias).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_differentiate(ctx.norm, dy, x, weight, ctx.needs_input_grad[:3]), None


# ``Function.apply`` without the look for functorch's wrappers, which ``_norm`` has had: a tenth of the host's time.
_APPLY: Callable[..., Tensor] = super(torch.autograd.Function, _Fused).apply


def _differentiate(norm: Norm, dy: Tensor, x: Tensor, weight: Tensor, needs: tuple[bool, ...]) -> Gradients:
    """Return the gradients of x, weight and bias, themselves differentiable under ``create_graph``."""
    graph = torch.is_grad_enabled()
    if not graph:
        x, weight = x.detach().requires_grad_(needs[0]), weight.detach().requires_grad_(needs[1])
    # No gradient depends on the value of the bias.
    bias = torch.zeros_like(weight, requires_grad=True) if needs[2] else None
    with torch.enable_grad():
        y = norm.plain(x.float(), weight, bias)
        wanted = [tensor for tensor, need in zip((x, weight, bias), needs, strict=True) if need and tensor is not None]
        found = iter(torch.autograd.grad(y, wanted, dy.float(), create_graph=graph))
    return tuple(next(found) if need else None for need in needs)
