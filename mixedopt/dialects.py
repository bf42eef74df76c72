"""How the operations of a rule are spelt: in a kernel of Triton, and in C++.

Both do what torch does: NaN stays in a maximum, division and roots are rounded
once, ``lerp`` and ``addcmul`` end in a fused multiply-add, and nothing else is
contracted to one operation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

# Operation -> how it is written where nothing else is said. Its arguments are given the type of its result before.
COMMON = {
    "add": "{0} + {1}",
    "sub": "{0} - {1}",
    "rsub": "{1} - {0}",
    "mul": "{0} * {1}",
    "neg": "-{0}",
    "clone": "{0}",
    "copy": "{1}",
    "alias": "{0}",
    "detach": "{0}",
    "_to_copy": "{0}",
    "lift_fresh_copy": "{0}",
    "__lshift": "{0} << {1}",
    "__rshift": "{0} >> {1}",
    "bitwise_left_shift": "{0} << {1}",
    "bitwise_right_shift": "{0} >> {1}",
    "bitwise_and": "{0} & {1}",
    "bitwise_or": "{0} | {1}",
    "bitwise_xor": "{0} ^ {1}",
}


@dataclass(frozen=True, slots=True)
class Dialect:
    """A language that kernels are written in.

    Attributes:
        types: what a dtype is called there; those left out cannot be computed with.
        arithmetic: operation -> pattern of its arguments, which have the type of the result.
        assign: pattern of (name, type, text).
        number: pattern of (text, type), for a constant.
        cast: the same, for a value.
        bitcast: the same, for the bits of a value.
        where: pattern of (condition, then, else).
        fma: pattern of (a, b, c), for a * b + c with one rounding.
        sqrt: dtype -> pattern of a value.
        divide: dtype -> pattern of two.
        infinity, nan: the constants.
    """

    types: Mapping[torch.dtype, str]
    arithmetic: Mapping[str, str]
    assign: str
    number: str
    cast: str
    bitcast: str
    where: str
    fma: str
    sqrt: Mapping[torch.dtype, str]
    divide: Mapping[torch.dtype, str]
    infinity: str
    nan: str

    def literal(self, value: Any) -> str:
        """Return a number as it is written."""
        if isinstance(value, bool):
            return str(int(value))
        if isinstance(value, float) and not math.isfinite(value):
            return self.nan if math.isnan(value) else self.infinity if value > 0 else f"-{self.infinity}"
        return repr(value)

    def type_of(self, dtype: torch.dtype) -> str:
        """Return what a dtype is called.

        Raises:
            NotImplementedError: the language has none such.
        """
        if dtype not in self.types:
            raise NotImplementedError(f"a kernel cannot compute with {dtype} here")
        return self.types[dtype]


TRITON = Dialect(
    types=MappingProxyType(
        {
            torch.float64: "tl.float64",
            torch.float32: "tl.float32",
            torch.float16: "tl.float16",
            torch.bfloat16: "tl.bfloat16",
            torch.int64: "tl.int64",
            torch.int32: "tl.int32",
            torch.int16: "tl.int16",
            torch.bool: "tl.int1",
        }
    ),
    arithmetic=MappingProxyType(
        COMMON
        | {
            "abs": "tl.abs({0})",
            "exp": "libdevice.exp({0})",
            "log": "libdevice.log({0})",
            "expm1": "libdevice.expm1({0})",
            "log1p": "libdevice.log1p({0})",
            "tanh": "libdevice.tanh({0})",
            "pow": "libdevice.pow({0}, {1})",
            # Triton's own maximum knows no NaN in fp64.
            "maximum": "tl.where(({0} >= {1}) | ({0} != {0}), {0}, {1})",
            "minimum": "tl.where(({0} <= {1}) | ({0} != {0}), {0}, {1})",
            "round": "libdevice.rint({0})",
            "copysign": "libdevice.copysign({0}, {1})",
            "sign": "tl.where({0} > 0, 1, 0) - tl.where({0} < 0, 1, 0)",
        }
    ),
    assign="{0} = {2}",
    number="tl.full((), {0}, {1})",
    cast="({0}).to({1})",
    bitcast="{0}.to({1}, bitcast=True)",
    where="tl.where({0}, {1}, {2})",
    fma="tl.fma({0}, {1}, {2})",
    # Triton rounds these carelessly in fp32 unless it is told.
    sqrt=MappingProxyType({torch.float32: "tl.sqrt_rn({0})", torch.float64: "libdevice.sqrt({0})"}),
    divide=MappingProxyType({torch.float32: "tl.div_rn({0}, {1})", torch.float64: "{0} / {1}"}),
    infinity='float("inf")',
    nan='float("nan")',
)

# For values one by one; a compiler makes vectors of them, and is told to contract nothing.
CXX = Dialect(
    types=MappingProxyType(
        {
            torch.float64: "double",
            torch.float32: "float",
            torch.int64: "int64_t",
            torch.int32: "int32_t",
            torch.int16: "int16_t",
            torch.bool: "bool",
        }
    ),
    arithmetic=MappingProxyType(
        COMMON
        | {name: f"std::{name}({{0}})" for name in ("abs", "exp", "log", "expm1", "log1p", "tanh")}
        | {
            "pow": "std::pow({0}, {1})",
            "maximum": "((({0}) >= ({1})) | (({0}) != ({0})) ? ({0}) : ({1}))",
            "minimum": "((({0}) <= ({1})) | (({0}) != ({0})) ? ({0}) : ({1}))",
            "round": "std::nearbyint({0})",
            "copysign": "std::copysign({0}, {1})",
            "sign": "(({0}) > 0) - (({0}) < 0)",
        }
    ),
    assign="const {1} {0} = {2};",
    number="({1})({0})",
    cast="({1})({0})",
    bitcast="bits_as<{1}>({0})",
    where="(({0}) ? ({1}) : ({2}))",
    fma="fused({0}, {1}, {2})",
    sqrt=MappingProxyType({torch.float32: "std::sqrt({0})", torch.float64: "std::sqrt({0})"}),
    divide=MappingProxyType({torch.float32: "({0}) / ({1})", torch.float64: "({0}) / ({1})"}),
    infinity="INFINITY",
    nan="NAN",
)
