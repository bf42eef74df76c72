"""What the writer of kernels writes means the function: with torch in the place of Triton it gives the same bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from written import EVERY_RULE, Both, both, of_rule, same

from mixedopt.judgement import Rules, Standing, judge, rules_of
from mixedopt.kernel_writer import lines_of
from mixedopt.loss_scale import DynamicLossScale, StaticLossScale, init_state
from mixedopt.split import join, remainder_of


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
