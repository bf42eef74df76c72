"""Functions and rules as the writer of kernels writes them, run with torch in the place of Triton."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from mixedopt.dialects import TRITON
from mixedopt.kernel_writer import decompositions, lines_of
from mixedopt.rules import RULES, Rule

LANGUAGE = types.SimpleNamespace(
    **{name.removeprefix("tl."): dtype for dtype, name in TRITON.types.items()},
    where=torch.where,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    abs=torch.abs,
    div_rn=torch.div,
    fma=lambda a, b, c: torch.addcmul(c, a, b),
    sqrt_rn=torch.sqrt,
)
LIBRARY = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in ("exp", "log", "expm1", "log1p", "tanh", "sqrt", "pow", "copysign")},
    rint=torch.round,
)


Both = tuple[Callable[..., list[Tensor]], Callable[..., Any]]


def both(function: Callable[..., Any], *examples: Any) -> Both:
    """Return the written lines of ``function``, and its trace, as functions of arguments like ``examples``.

    Both take time to make.
    """
    names = [f"a{index}" for index, leaf in enumerate(torch.utils._pytree.tree_leaves(examples))]
    lines, results = lines_of(function, examples, names, "x")
    code = compile("\n".join(map(bits_as_views, lines)), "lines", "exec")

    def written(*args: Any) -> list[Tensor]:
        leaves = torch.utils._pytree.tree_leaves(args)
        scope: dict[str, Any] = {"tl": LANGUAGE, "libdevice": LIBRARY, **dict(zip(names, leaves, strict=True))}
        exec(code, scope)
        return [scope[result] for result in results]

    apart = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, examples)
    return written, make_fx(function, decomposition_table=decompositions())(*apart)


def bits_as_views(line: str) -> str:
    """Write a cast of bits as torch does."""
    while ", bitcast=True)" in line:
        end = line.index(", bitcast=True)")
        start = line.rindex(".to(", 0, end)
        line = f"{line[:start]}.view({line[start + 4 : end]}){line[end + 15 :]}"
    return line


def same(found: Sequence[Tensor], expected: Any) -> bool:
    flat = torch.utils._pytree.tree_leaves(expected)
    pairs = list(zip(found, flat, strict=True))
    return all(
        one.dtype == other.dtype and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other.expand_as(one)))
        for one, other in pairs
    )


EVERY_RULE = sorted({(kind.__name__, number) for kind, rules in RULES.items() for number in range(len(rules))})


def rule_of(name: str, number: int) -> tuple[Rule, dict[str, Any]]:
    """Return a rule, and a group of parameters that it serves."""
    kind = next(kind for kind in RULES if kind.__name__ == name)
    rule = RULES[kind][number]
    params = [torch.nn.Parameter(torch.ones(1))]
    for options in ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"momentum": 0.9, "centered": True}):
        try:
            group = kind(params, lr=0.1, **options).param_groups[0]
        except TypeError:
            continue
        if rule.serves(group):
            return rule, group
    raise AssertionError(f"no options for rule {number} of {name}")


@functools.cache
def of_rule(name: str, number: int) -> tuple[Rule, int, Both, Both]:
    """Return a rule, how many hyperparameters it has, and both forms of its numbers and of its update."""
    rule, group = rule_of(name, number)
    hypers = len(rule.hyper(group))
    line = torch.ones(4, dtype=torch.float64)
    numbers = line, tuple(line.clone() for _ in range(hypers)), tuple(torch.ones(4) for _ in rule.scalars)
    count = len(rule.numbers(*numbers)[0])
    update = (torch.ones(8), torch.ones(8), tuple(torch.ones(()) for _ in range(count)))
    return rule, hypers, both(rule.numbers, *numbers), both(rule.update, *update, *(torch.ones(8) for _ in rule.state))
