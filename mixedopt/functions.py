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
from mixedopt.losses import cross_entropy

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
    "addbmm", "addmm", "addmv", "addr", "baddbmm", "bilinear", "bmm", "cdist",
    "chain_matmul", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "cross", "dot", "einsum", "grid_sample", "gru_cell", "inner", "lerp", "linear", "lstm_cell", "matmul", "mm",
    "multi_dot", "mv", "prelu", "rnn_relu_cell", "rnn_tanh_cell", "scaled_dot_product_attention", "tensordot", "vdot",
    "vecdot",
])
# Torch wants the source in the dtype of the target, the first argument.
WRITES = frozenset([
    "__setitem__", "addbmm_", "addmm_", "addmv_", "addr_", "baddbmm_", "index_add", "index_add_", "index_copy",
    "index_copy_", "index_put", "index_put_", "index_reduce", "index_reduce_", "lerp_", "masked_scatter",
    "masked_scatter_", "put", "put_", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
    "scatter_reduce_",
])
# What puts a constant or a mask into a tensor; two half values may add up to -inf.
ADDITIONS = frozenset(["add", "sub"])
CONSTANTS = ADDITIONS | frozenset([
    "addcmul", "clamp", "clamp_max", "clamp_min", "masked_fill", "maximum", "minimum", "mul", "where",
])
# Other names under which torch calls a function: of its namespaces, of operators, and aliases.
SPELLINGS = {
    **{f"linalg_{name}": name for name in dir(torch.linalg) if name.islower()},
    **{f"special_{name}": name for name in dir(torch.special) if name.islower()},
    **{f"__{name}__": name for name in ("abs", "add", "matmul", "mul", "neg", "pow", "sub")},
    **{f"__r{name}__": name for name in ("add", "div", "matmul", "mul", "pow", "sub")},
    "absolute": "abs", "arccos": "acos", "arccosh": "acosh", "arcsin": "asin", "arcsinh": "asinh", "arctan": "atan",
    "arctan2": "atan2", "arctanh": "atanh", "clip": "clamp", "clip_": "clamp_", "divide": "div", "expit": "sigmoid",
    "gammaln": "lgamma", "multiply": "mul", "multiply_": "mul_", "negative": "neg", "psi": "digamma", "rsub": "sub",
    "special_expit": "sigmoid", "special_gammaln": "lgamma", "special_psi": "digamma", "subtract": "sub",
    "subtract_": "sub_", "true_divide": "div",
}
FILLS = frozenset([
    "__imul__", "__setitem__", "clamp_", "clamp_max_", "clamp_min_", "constant_pad_nd", "fill_", "fill_diagonal_",
    "hardtanh", "index_fill", "index_fill_", "masked_fill_", "mul_", "pad", "pad_sequence", "scatter", "scatter_",
    "threshold",
])
# Torch takes half input, or all half; beside fp32 statistics the weights must be fp32, too.
STATISTICS = frozenset(["batch_norm", "instance_norm"])
# fmt: on
# What makes a tensor of a constant: like a half one, or with its dtype named.
MAKERS = frozenset(["full", "full_like", "new_full", "new_tensor", "scalar_tensor", "tensor"])
# Out of place, what is added makes half scores fp32; in place, it is done in fp32 and written back.
IN_PLACE = {"add_": torch.add, "sub_": torch.sub, "__iadd__": torch.add, "__isub__": torch.sub}
# What makes a half tensor of a wider one.
NARROWS = frozenset(["bfloat16", "half", "to", "type", "type_as"])
SOFTMAX = frozenset(["log_softmax", "softmax", "softmin"])
# Of all others a mode leaves the operands alone: most calls, and every look at an attribute of a tensor.
RULED = PRODUCTS | STATISTICS | WRITES | CONSTANTS | FILLS | MAKERS | NARROWS | frozenset(IN_PLACE)


def function_name(function: str | Callable[..., Any]) -> str:
    """Return the one name of a torch function, however it is spelt.

    Raises:
        ValueError: if there is no such function in ``torch``, in
            ``torch.nn.functional``, ``torch.linalg``, ``torch.special`` or on
            tensors, or if it writes into its argument.
    """
    given = function if isinstance(function, str) else getattr(function, "__name__", "")
    name = spelt(given)
    if not any(callable(getattr(place, name, None)) for place in (torch, F, Tensor, torch.linalg, torch.special)):
        raise ValueError(
            f"CastPolicy functions: {function!r} is no function of torch, torch.nn.functional, torch.linalg, "
            "torch.special or Tensor. Names look like 'softmax', 'cross_entropy' or 'cumsum'."
        )
    if (other := not_in_place(name)) != name:
        raise ValueError(f"CastPolicy functions: {given!r} writes into its argument, which stays half. Use {other!r}.")
    return name


def spelt(name: str) -> str:
    """Return the one name of what torch calls by several: ``pow`` for ``__rpow__``, ``norm`` for ``linalg_norm``."""
    return SPELLINGS.get(name, name)


def not_in_place(name: str) -> str:
    """Return the name of the function that does not write into its argument: ``exp`` for ``exp_``."""
    if name.startswith("__"):
        operator = name[3:-2]
        return operator if name.startswith("__i") and hasattr(Tensor, f"__{operator}__") else name
    return name.removesuffix("_")


class FunctionCasts(TorchFunctionMode):
    """Casts the operands of torch functions called while it is in force.

    * A function of ``names`` gets fp32 tensors; its result stays fp32.
    * A matrix product of half and fp32 operands is done in half.
    * A constant that half cannot hold, such as a mask of -1e9, makes the
      operation fp32; where it is filled in, it becomes the lowest half.
    * With ``masks``, a softmax in fp32 comes next: what is added to half
      tensors turns no finite value into -inf; nor does, with ``narrows``, what
      is rounded to half.

    Args:
        names: functions that run in fp32.
        dtype: the half format.
        masks: see above.
        narrows: see above.
    """

    def __init__(
        self, names: frozenset[str], dtype: torch.dtype, *, masks: bool = False, narrows: bool = False
    ) -> None:
        super().__init__()
        self.names = names
        self.dtype = dtype
        self.masks = masks
        self.narrows = narrows
        self.acted = False
        self._ruled = RULED | names

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call ``func``, with other operands where a rule says so."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        name = SPELLINGS.get(name, name)
        if name not in self._ruled:
            return func(*args, **kwargs)
        if kwargs.get("out") is not None:  # that is written to, whatever its dtype
            return func(*args, **kwargs)
        if name in self.names:
            return self._in_fp32(name, func, args, kwargs)
        if name in PRODUCTS:
            if self._mixed(args, kwargs):
                return func(*self._acting(lowered(args, self.dtype)), **lowered(kwargs, self.dtype))
        elif name in STATISTICS:
            if self._mixed(args, kwargs) and self._has_half(args[1:], kwargs):
                return func(self._acting(args[0]), *cast(args[1:], torch.float32), **cast(kwargs, torch.float32))
        elif name in IN_PLACE:
            if args[0].dtype == self.dtype and (self.masks or self._beyond(args, kwargs)):
                target, more = args[0], cast(args[1:], torch.float32)
                wide = IN_PLACE[name](self._acting(target.float()), *more, **cast(kwargs, torch.float32))
                return target.copy_(held(wide, self.dtype))
        elif name in WRITES and isinstance(args[0], Tensor) and self._other_than(args[0].dtype, args[1:], kwargs):
            rest = self._acting(lowered(args[1:], args[0].dtype))
            return func(args[0], *rest, **lowered(kwargs, args[0].dtype))
        elif name in CONSTANTS:
            if self._beyond(args, kwargs):
                return func(*self._acting(cast(args, torch.float32)), **cast(kwargs, torch.float32))
            if self.masks and name in ADDITIONS and self._all_half(args, kwargs):
                wide = func(*self._acting(cast(args, torch.float32)), **cast(kwargs, torch.float32))
                return held(wide, self.dtype)
        elif name in NARROWS:
            if self.narrows:
                return self._narrowed(args[0], func(*args, **kwargs))
        elif (name in FILLS and self._beyond(args, kwargs)) or (name in MAKERS and self._makes_beyond(args, kwargs)):
            args = self._acting(tuple([self._held(a) for a in args]))
            kwargs = {key: self._held(value) for key, value in kwargs.items()}
        return func(*args, **kwargs)

    def _in_fp32(self, name: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not self._has_half(args, kwargs):
            return func(*args, **kwargs)
        self._acting(args)
        if name == "cross_entropy" and (loss := cross_entropy(*args, **kwargs)) is not None:
            return loss
        return func(*cast(args, torch.float32), **cast(kwargs, torch.float32))

    def _narrowed(self, wide: Any, half: Any) -> Any:
        """Return ``half``, which was made of ``wide``, with the lowest value where a finite one became -inf."""
        if not isinstance(half, Tensor) or half.dtype != self.dtype or half.layout != torch.strided:
            return half
        if wide.dtype not in (torch.float32, torch.float64) or wide.requires_grad or quantised(wide):
            return half
        lost = (self._acting(wide) != -torch.inf).to(half.device) & (half == -torch.inf)
        return torch.where(lost, torch.finfo(self.dtype).min, half)

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

    def _all_half(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        found = self._dtypes(args) + self._dtypes(list(kwargs.values()))
        return self.dtype in found and torch.float32 not in found and torch.float64 not in found

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
        return self._constant_beyond((*args, *kwargs.values())) and self._has_half(args, kwargs)

    def _makes_beyond(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Return True iff a half tensor would be made of such a constant."""
        like = args[0].dtype if args and isinstance(args[0], Tensor) else None
        return (kwargs.get("dtype") or like) == self.dtype and self._constant_beyond((*args, *kwargs.values()))

    def _constant_beyond(self, values: tuple[Any, ...]) -> bool:
        largest = torch.finfo(self.dtype).max
        for value in values:
            if isinstance(value, Tensor):
                if value.dim() or value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
                    continue
                if torch._C._functorch.is_batchedtensor(value):  # has many values
                    continue
                value = value.item()  # on the host already
            if isinstance(value, (int, float)) and largest < abs(value) < math.inf:
                return True
        return False


def mentions(module: nn.Module, names: frozenset[str], depth: int = 3) -> bool:
    """True iff the code of the module's class, or functions it names, mentions one of ``names``, as a string too.

    Reads no values.
    """
    seen: set[types.CodeType] = set()

    def search(function: types.FunctionType, left: int) -> bool:
        for code in _codes(function.__code__):
            if code in seen:
                continue
            seen.add(code)
            strings = (constant for constant in code.co_consts if isinstance(constant, str))
            if not names.isdisjoint((*code.co_names, *code.co_freevars, *strings)):
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
