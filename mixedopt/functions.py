"""Torch functions that the code of a module calls: which run in fp32, which take mixed operands.

A rule on modules reaches modules only. ``FunctionCasts`` is a
``TorchFunctionMode`` that is in force while a module's *own* code runs, and off
while the modules it calls do. ``torch.autocast`` would do it at C++ speed, but
its lists are fixed, differ between CPU and GPU, and return every norm layer in
fp32; ``examples/benchmark_policy.py`` measures both.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from mixedopt.casting import cast, held, lowered, quantised

# fmt: off
LOSS_FUNCTIONS: tuple[str, ...] = tuple(name for name in (
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cosine_embedding_loss", "cross_entropy",
    "ctc_loss", "gaussian_nll_loss", "hinge_embedding_loss", "huber_loss", "kl_div", "l1_loss",
    "linear_cross_entropy",
    "margin_ranking_loss", "mse_loss", "multi_margin_loss", "multilabel_margin_loss",
    "multilabel_soft_margin_loss", "nll_loss", "poisson_nll_loss", "smooth_l1_loss", "soft_margin_loss",
    "triplet_margin_loss", "triplet_margin_with_distance_loss",
) if hasattr(F, name))
# Torch wants one dtype here; an fp32 operand beside a half one becomes half.
PRODUCTS = frozenset([
    "__matmul__", "__rmatmul__", "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm",
    "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "dot", "einsum", "inner", "linear", "matmul", "mm", "mv", "scaled_dot_product_attention", "tensordot",
])
# Torch wants the source in the dtype of the target, the first argument.
WRITES = frozenset([
    "__setitem__", "index_add", "index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "masked_scatter",
    "masked_scatter_", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_",
])
# What puts a constant or a mask into a tensor.
ADDITIONS = frozenset(["add", "sub", "__add__", "__radd__", "__sub__", "__rsub__", "rsub", "masked_fill", "where"])
CONSTANTS = ADDITIONS | frozenset([
    "mul", "__mul__", "__rmul__", "clamp", "clamp_min", "clamp_max", "maximum", "minimum",
])
# fmt: on
FILLS = frozenset(["fill_", "masked_fill_", "mul_", "__imul__", "__setitem__", "index_fill", "index_fill_"])
# Out of place, what is added makes half scores fp32; in place, it is done in fp32 and written back.
IN_PLACE = {"add_": torch.add, "sub_": torch.sub, "__iadd__": torch.add, "__isub__": torch.sub}
SOFTMAX = frozenset(["log_softmax", "softmax", "softmin"])


def function_name(function: str | Callable[..., Any]) -> str:
    """Return the name of a torch function.

    Raises:
        ValueError: if there is no such function in ``torch``, in
            ``torch.nn.functional`` or on tensors.
    """
    name = function if isinstance(function, str) else getattr(function, "__name__", "")
    if not any(callable(getattr(place, name, None)) for place in (torch, F, Tensor)):
        raise ValueError(
            f"CastPolicy functions: {function!r} is no function of torch, torch.nn.functional or Tensor. "
            "Names look like 'softmax', 'cross_entropy' or 'cumsum'."
        )
    if name.endswith("_"):
        raise ValueError(
            f"CastPolicy functions: {name!r} writes into its argument, which stays half. Use {name[:-1]!r}."
        )
    return name


class FunctionCasts(TorchFunctionMode):
    """Casts the operands of torch functions called while it is in force.

    * A function of ``names`` gets fp32 tensors; its result stays fp32.
    * A matrix product of half and fp32 operands is done in half.
    * A constant that half cannot hold, such as a mask of -1e9, makes the
      operation fp32; where it is filled in, it becomes the lowest half.
    * With ``masks``, whatever is added to or filled into half tensors makes
      them fp32: a softmax in fp32 comes next.

    Args:
        names: functions that run in fp32.
        dtype: the half format.
        masks: see above.
    """

    def __init__(self, names: frozenset[str], dtype: torch.dtype, *, masks: bool = False) -> None:
        super().__init__()
        self.names = names
        self.dtype = dtype
        self.masks = masks
        self.acted = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with other operands where a rule says so."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in self.names:
            if "out" not in kwargs:
                return self._in_fp32(name, func, args, kwargs)
        elif name in PRODUCTS:
            if self._mixed(args, kwargs):
                return func(*self._acting(lowered(args, self.dtype)), **lowered(kwargs, self.dtype))
        elif name in IN_PLACE:
            if args[0].dtype == self.dtype and (self.masks or self._beyond(args, kwargs)):
                target, more = args[0], cast(args[1:], torch.float32)
                wide = IN_PLACE[name](self._acting(target.float()), *more, **cast(kwargs, torch.float32))
                return target.copy_(held(wide, self.dtype))
        elif name in WRITES and isinstance(args[0], Tensor) and self._other_than(args[0].dtype, args[1:], kwargs):
            rest = self._acting(lowered(args[1:], args[0].dtype))
            return func(args[0], *rest, **lowered(kwargs, args[0].dtype))
        elif name in CONSTANTS:
            adding = self.masks and name in ADDITIONS
            if (adding and self._has_half(args, kwargs)) or self._beyond(args, kwargs):
                return func(*self._acting(cast(args, torch.float32)), **cast(kwargs, torch.float32))
        elif name in FILLS and self._beyond(args, kwargs):
            args = self._acting(tuple([self._held(a) for a in args]))
            kwargs = {key: self._held(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _in_fp32(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_half(args, kwargs):
            return func(*args, **kwargs)
        self._acting(args)
        if name == "cross_entropy" and (loss := _cross_entropy(*args, **kwargs)) is not None:
            return loss
        return func(*cast(args, torch.float32), **cast(kwargs, torch.float32))

    def _held(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return lowered(value, self.dtype) if value.dim() == 0 else value
        return max(value, torch.finfo(self.dtype).min) if isinstance(value, (int, float)) else value

    def _acting(self, args: Any) -> Any:
        if not torch.compiler.is_compiling():
            self.acted = True
        return args

    def _dtypes(self, values: Collection[Any]) -> list[torch.dtype]:
        found = []
        for value in values:
            if isinstance(value, Tensor):
                found.append(value.dtype)
            elif isinstance(value, (list, tuple)):
                found += [item.dtype for item in value if isinstance(item, Tensor)]
        return found

    def _has_half(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.dtype in self._dtypes(args) or self.dtype in self._dtypes(list(kwargs.values()))

    def _mixed(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = self._dtypes(args) + self._dtypes(list(kwargs.values()))
        if self.dtype not in found or torch.float32 not in found:
            return False
        return not any([isinstance(v, Tensor) and quantised(v) for v in (*args, *kwargs.values())])  # noqa: C419

    def _other_than(self, dtype: torch.dtype, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = self._dtypes(args) + self._dtypes(list(kwargs.values()))
        return dtype in (self.dtype, torch.float32) and any([d.is_floating_point and d != dtype for d in found])  # noqa: C419

    def _beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True iff a finite constant would become infinite in half, beside a half tensor."""
        largest = torch.finfo(self.dtype).max
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor):
                if value.dim() or value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
                    continue
                if torch._C._functorch.is_batchedtensor(value):  # has many values
                    continue
                value = value.item()  # on the host already
            if isinstance(value, (int, float)) and largest < abs(value) < math.inf:
                return self._has_half(args, kwargs)
        return False


def _cross_entropy(
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
    """Return the fp32 loss of half logits without an fp32 copy of them, ``None`` if that cannot be done.

    ``log_softmax`` reads half and writes fp32 in one kernel, and its backward
    the reverse; the values are those of casting first.
    """
    plain = size_average is None and reduce is None and label_smoothing == 0.0 and not more
    if not plain or target.is_floating_point():
        return None
    logp = F.log_softmax(input, dim=0 if input.dim() == 1 else 1, dtype=torch.float32)
    return F.nll_loss(
        logp, target, None if weight is None else weight.float(), ignore_index=ignore_index, reduction=reduction
    )


def mentions(module: nn.Module, names: frozenset[str], depth: int = 3) -> bool:
    """True iff the code of the module's class, or functions it names, mentions one of ``names``. Reads no values."""
    seen: set[types.CodeType] = set()

    def search(function: types.FunctionType, left: int) -> bool:
        for code in _codes(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            if names & {*code.co_names, *code.co_freevars}:
                return True
            called = (function.__globals__.get(name) for name in code.co_names)
            if left and any(search(c, left - 1) for c in called if isinstance(c, types.FunctionType) and _not_torch(c)):
                return True
        return False

    methods = (f for kind in type(module).__mro__ for f in vars(kind).values() if _not_torch(kind))
    return any(search(method, depth) for method in methods if isinstance(method, types.FunctionType))


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _not_torch(thing: Any) -> bool:
    return (thing.__module__ or "").split(".")[0] not in ("torch", "builtins")
