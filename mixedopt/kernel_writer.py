"""A pure function of tensors, written as lines of a kernel, in Triton or C++.

The update rules and the loss scale are written once, in plain PyTorch, and run
inside kernels of ours: the function is traced, and every element-wise operation
of the trace becomes one line. So nothing is guarded, nothing is compiled anew,
and a launch costs microseconds.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx import Node
from torch.fx.experimental.proxy_tensor import make_fx

from mixedopt.dialects import TRITON, Dialect

# What compares; its arguments are given the type that they have in common.
COMPARISON = {
    "lt": "{0} < {1}",
    "le": "{0} <= {1}",
    "gt": "{0} > {1}",
    "ge": "{0} >= {1}",
    "eq": "{0} == {1}",
    "ne": "{0} != {1}",
}
LOGIC = {
    "logical_not": "{0} == 0",
    "bitwise_not": "{0} == 0",
    "logical_and": "{0} & {1}",
    "logical_or": "{0} | {1}",
}


# A trace changes what the whole process sees of torch.
TRACING = threading.Lock()


def lines_of(
    function: Callable[..., Any],
    examples: Sequence[Any],
    names: Sequence[str],
    prefix: str,
    dialect: Dialect = TRITON,
) -> tuple[list[str], list[str]]:
    """Return the lines that compute ``function``, and the names of its results.

    Args:
        function: of tensors and nested tuples of them; returns the same.
        examples: arguments, small; they are not looked at but for their dtypes.
        names: how the tensors among the arguments are called in the kernel, flat and in order.
        prefix: of the names that are made.
        dialect: the language.

    Raises:
        NotImplementedError: an operation is not element-wise, or not known here.
    """
    apart = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, tuple(examples))  # one tensor would have one name
    with TRACING, torch.no_grad():
        pure = torch.func.functionalize(function)  # what is written in place inside becomes a new value
        trace = make_fx(pure, decomposition_table=decompositions())(*apart)
    trace.graph.eliminate_dead_code()
    writer = Writer(prefix, dialect)
    given = iter(names)
    for node in trace.graph.nodes:
        if node.op == "placeholder":
            writer.names[node] = next(given) if isinstance(node.meta.get("val"), Tensor) else "None"
        elif node.op == "get_attr":
            writer.constant_(node, getattr(trace, str(node.target)))
        elif node.op == "call_function":
            writer.call_(node)
        else:
            results = torch.utils._pytree.tree_leaves(node.args)
    return writer.lines, [writer.names[result] for result in results]


def decompositions() -> dict[Any, Any]:
    """Return what operations consist of, but for those that round once in torch: ``lerp`` and ``addcmul``."""
    whole = torch.ops.aten.lerp, torch.ops.aten.addcmul
    return {op: made_of for op, made_of in dict(core_aten_decompositions()).items() if op.overloadpacket not in whole}


class Writer:
    """Lines written so far, and the name of each node of the trace."""

    def __init__(self, prefix: str, dialect: Dialect) -> None:
        self.dialect = dialect
        self.lines: list[str] = []
        self.names: dict[Node, str] = {}
        self._prefix = prefix

    def constant_(self, node: Node, value: Tensor) -> None:
        """Write a number that the function has made a tensor of."""
        if value.numel() != 1:
            raise NotImplementedError("a kernel can hold a number, not a tensor of several")
        self._assign_(node, self.dialect.literal(value.item()), value.dtype)

    def call_(self, node: Node) -> None:
        """Write one operation."""
        target: Any = node.target
        name = getattr(target, "overloadpacket", target).__name__.rstrip("_")
        dtype = node.meta["val"].dtype
        args = node.args
        if node.kwargs.get("alpha", 1) != 1:
            raise NotImplementedError(f"{name} with alpha")
        patterns = self.dialect.arithmetic
        if name in patterns and name != "pow":
            count = 2 if "{1}" in patterns[name] else 1
            text = patterns[name].format(*(self._as(arg, dtype) for arg in args[:count]))
        elif name in COMPARISON:
            common = torch.result_type(*(_value(arg) for arg in args))
            text = COMPARISON[name].format(*(self._as(arg, common) for arg in args))
        elif name in LOGIC and dtype == torch.bool:
            text = LOGIC[name].format(*(self._as(arg, torch.bool) for arg in args))
        elif name in ("zeros_like", "ones_like", "full_like", "scalar_tensor", "full"):
            fill = {"zeros_like": 0, "ones_like": 1}.get(name, args[0] if name == "scalar_tensor" else args[-1])
            text = self._number(fill, dtype)
        else:
            text = self._special(name, dtype, args, node.kwargs)
        self._assign_(node, text, dtype)

    def _special(self, name: str, dtype: torch.dtype, args: Sequence[Any], options: Any) -> str:
        first = self._as(args[0], torch.bool if name == "where" else dtype) if args else ""
        if name == "where":
            return self.dialect.where.format(first, self._as(args[1], dtype), self._as(args[2], dtype))
        if name.startswith("clamp"):
            low, high = (*args[1:], None, None)[:2] if name != "clamp_max" else (None, args[1])
            return self._clamp(first, options.get("min", low), options.get("max", high), dtype)
        if name == "view" and isinstance(args[1], torch.dtype):
            return self.dialect.bitcast.format(self.names[args[0]], self.dialect.type_of(dtype))
        if name == "isnan":
            return f"{self.names[args[0]]} != {self.names[args[0]]}"
        if name == "pow":
            return self._power(args[0], args[1], dtype)
        if name == "addcmul":
            return self._addcmul(args, options.get("value", 1), dtype)
        if name == "lerp":
            start, end, weight = (self._as(arg, dtype) for arg in args)
            return self._lerp(start, end, weight, dtype)
        if name == "sqrt":
            return self.dialect.sqrt[dtype].format(first)
        if name in ("div", "true_divide", "reciprocal"):
            one = self._number(1, dtype)
            over, under = (one, first) if name == "reciprocal" else (first, self._as(args[1], dtype))
            return self.dialect.divide[dtype].format(over, under)
        raise NotImplementedError(f"the operation {name} is not known to the writer of kernels")

    def _addcmul(self, args: Sequence[Any], value: Any, dtype: torch.dtype) -> str:
        to, first, second = (self._as(arg, dtype) for arg in args)
        scaled = first if value == 1 else f"({self._number(value, dtype)} * {first})"
        return self.dialect.fma.format(scaled, second, to)

    def _lerp(self, start: str, end: str, weight: str, dtype: torch.dtype) -> str:
        """Begin at the nearer end, as torch does."""
        near = f"{self.dialect.arithmetic['abs'].format(weight)} < {self._number(0.5, dtype)}"
        way, rest = f"({end} - {start})", f"({weight} - {self._number(1, dtype)})"
        pair = self.dialect.fma.format(weight, way, start), self.dialect.fma.format(rest, way, end)
        return self.dialect.where.format(near, *pair)

    def _clamp(self, text: str, low: Any, high: Any, dtype: torch.dtype) -> str:
        patterns = self.dialect.arithmetic
        if low is not None:
            text = patterns["maximum"].format(text, self._as(low, dtype))
        return text if high is None else patterns["minimum"].format(f"({text})", self._as(high, dtype))

    def _power(self, base: Any, exponent: Any, dtype: torch.dtype) -> str:
        text = self._as(base, dtype)
        if exponent == 2:
            return f"{text} * {text}"
        return self.dialect.arithmetic["pow"].format(text, self._as(exponent, dtype))

    def _as(self, arg: Any, dtype: torch.dtype) -> str:
        """Return an argument in a type."""
        if isinstance(arg, Node):
            same = arg.meta["val"].dtype == dtype
            name = self.names[arg]
            return name if same else self.dialect.cast.format(name, self.dialect.type_of(dtype))
        return self._number(arg, dtype)

    def _number(self, value: Any, dtype: torch.dtype) -> str:
        return self.dialect.number.format(self.dialect.literal(value), self.dialect.type_of(dtype))

    def _assign_(self, node: Node, text: str, dtype: torch.dtype) -> None:
        name = f"{self._prefix}{len(self.lines)}"
        self.names[node] = name
        constant = node.op == "get_attr" or not any(isinstance(arg, Node) for arg in node.args)
        kind = self.dialect.type_of(dtype)
        made = (self.dialect.number if constant else self.dialect.cast).format(text, kind)
        self.lines.append(self.dialect.assign.format(name, kind, made))


def _value(arg: Any) -> Any:
    return arg.meta["val"] if isinstance(arg, Node) else arg
