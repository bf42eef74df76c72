"""What the writer of kernels writes means the function: with torch in the place of Triton it gives the same bits."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._decomp import core_aten_decompositions
from torch.fx.experimental.proxy_tensor import make_fx

from mixedopt.judgement import Rules, Standing, judge, rules_of
from mixedopt.kernel_writer import TYPES, lines_of
from mixedopt.loss_scale import DynamicLossScale, StaticLossScale, init_state
from mixedopt.rules import RULES, Rule
from mixedopt.split import join, remainder_of

LANGUAGE = types.SimpleNamespace(
    **{name.removeprefix("tl."): dtype for dtype, name in TYPES.items()},
    where=torch.where,
    full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype),
    abs=torch.abs,
    div_rn=torch.div,
    sqrt_rn=torch.sqrt,
)
LIBRARY = types.SimpleNamespace(
    **{name: getattr(torch, name) for name in ("exp", "log", "expm1", "log1p", "tanh", "sqrt", "pow", "copysign")},
    rint=torch.round,
)


Both = tuple[Callable[..., list[Tensor]], Callable[..., Any]]


def both(function: Callable[..., Any], *examples: Any) -> Both:
    """Return the written lines of ``function``, and its trace, as functions of arguments like ``examples``.

    In the trace torch's lerp and its kind, which round once, are what they consist of. Both take time to make.
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
    return written, make_fx(function, decomposition_table=dict(core_aten_decompositions()))(*apart)


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


def rule_of(name: str, number: int) -> tuple[Rule, int]:
    """Return a rule and how many hyperparameters it has."""
    kind = next(kind for kind in RULES if kind.__name__ == name)
    rule = RULES[kind][number]
    params = [torch.nn.Parameter(torch.ones(1))]
    for options in ({}, {"momentum": 0.9}, {"amsgrad": True}, {"centered": True}, {"momentum": 0.9, "centered": True}):
        try:
            group = kind(params, lr=0.1, **options).param_groups[0]
        except TypeError:
            continue
        if rule.serves(group):
            return rule, len(rule.hyper(group))
    raise AssertionError(f"no options for rule {number} of {name}")


@functools.cache
def of_rule(name: str, number: int) -> tuple[Rule, int, Both, Both]:
    """Return a rule, how many hyperparameters it has, and both forms of its numbers and of its update."""
    rule, hypers = rule_of(name, number)
    line = torch.ones(4, dtype=torch.float64)
    numbers = line, tuple(line.clone() for _ in range(hypers)), tuple(torch.ones(4) for _ in rule.scalars)
    count = len(rule.numbers(*numbers)[0])
    update = (torch.ones(8), torch.ones(8), tuple(torch.ones(()) for _ in range(count)))
    return rule, hypers, both(rule.numbers, *numbers), both(rule.update, *update, *(torch.ones(8) for _ in rule.state))


@pytest.mark.parametrize(("name", "number"), EVERY_RULE)
@given(data=st.data())
def test_the_lines_of_a_rule_are_the_rule(name: str, number: int, data: st.DataObject) -> None:
    """Numbers and update of every rule, bit for bit, over drawn values."""
    rule, hypers, (numbers, its_numbers), (update, its_update) = of_rule(name, number)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    steps = torch.randint(1, 1000, (4,), generator=generator).double()
    hyper = tuple(torch.rand(4, generator=generator, dtype=torch.float64) * 0.98 + 0.01 for _ in range(hypers))
    scalars = tuple(torch.rand(4, generator=generator) + 0.1 for _ in rule.scalars)
    assert same(numbers(steps, hyper, scalars), its_numbers(steps, hyper, scalars))
    singles = tuple(column[0].float() for column in rule.numbers(steps, hyper, scalars)[0])
    param, grad, *state = (torch.randn(8, generator=generator) for _ in range(2 + len(rule.state)))
    state = [value.abs() for value in state]
    assert same(update(param, grad, singles, *state), its_update(param, grad, singles, *state))


@functools.cache
def of_judgement() -> Both:
    """Return both forms of the judgement."""
    kinds = Standing, Rules
    standing, rules = (kind(*(torch.ones((), dtype=torch.float64) for _ in kind._fields)) for kind in kinds)
    return both(judge, standing, rules, *(torch.ones((), dtype=torch.float64) for _ in range(3)))


@given(
    st.sampled_from(
        [DynamicLossScale(2.0**8, growth_interval=2), StaticLossScale(3.0), DynamicLossScale(1.5, 1.7, 0.3)]
    ),
    st.sampled_from([0.0, 1.0, 3e38, float("inf"), float("nan")]),
    st.sampled_from([None, 0.5]),
    st.lists(st.integers(0, 5), min_size=5, max_size=5),
)
def test_the_lines_of_the_judgement_are_the_judgement(config: Any, size: float, limit: Any, counts: list[int]) -> None:
    """For every kind of scale and gradient."""
    state = [float(tensor) for tensor in init_state(config, torch.device("cpu")).tensors()]
    standing = Standing(*(torch.tensor(value, dtype=torch.float64) for value in (*state, *counts)))
    rules = Rules(*(torch.tensor(value, dtype=torch.float64) for value in rules_of(config, limit)))
    args = standing, rules, *(torch.tensor(value, dtype=torch.float64) for value in (size, size, 3.0))
    written, _ = of_judgement()
    assert same(written(*args), judge(*args))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_the_lines_of_the_split_are_the_split(dtype: torch.dtype) -> None:
    """All half values, with remainders that have all their bits."""
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    half = half[half.isfinite()]
    drawn = torch.rand(half.numel(), generator=torch.Generator().manual_seed(0)) - 0.5
    master = half.float() * (1 + drawn * 2.0**-9)
    master = master[master.to(dtype).isfinite()]
    half = master.to(dtype)
    rest = remainder_of(master, half)
    for function, args in ((remainder_of, (master, half)), (join, (half, rest))):
        assert torch.equal(both(function, *args)[0](*args)[0], function(*args))


@pytest.mark.parametrize("function", [lambda x: x.sum(), lambda x: torch.special.i0(x), lambda x: x + torch.arange(4)])
def test_what_is_not_element_wise_is_refused(function: Callable[[Tensor], Tensor]) -> None:
    """A sum, a function that nobody wrote down, a tensor of several numbers."""
    with pytest.raises(NotImplementedError, match=r"not known|several"):
        lines_of(function, (torch.zeros(4),), ["x"], "u")


def test_what_is_written_in_place_stays_inside() -> None:
    """In-place operations on intermediates become values; the argument is not touched."""

    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.add_(1).clamp_(max=3)
        return y + x

    x = torch.randn(16, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    assert torch.equal(both(function, x)[0](x)[0], function(x))
    assert torch.equal(x, before)
