"""Hypothesis strategies: scale configurations, overflow sequences, layouts, gradient scripts.

Example:
    >>> from hypothesis import given
    >>> from mixedopt.testing import strategies
    >>> @given(strategies.dynamic_scales())
    ... def test_the_floor_lies_under_the_start(config):
    ...     assert config.min_scale <= config.init_scale
    >>> test_the_floor_lies_under_the_start()
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from mixedopt.loss_scale import DynamicLossScale, StaticLossScale

try:
    from hypothesis import strategies as st
except ImportError as error:
    raise ImportError("mixedopt.testing.strategies needs hypothesis: pip install hypothesis.") from error

KINDS = ("contiguous", "transposed", "channels_last", "strided", "expanded", "scalar", "empty", "one")
# Their strides are not those of a dense tensor; torch.empty_like gives them others.
NON_DENSE = ("strided", "expanded")
ENTRIES = ("random", "random", "random", "zero", "none", "inf", "-inf", "nan")

powers_of_two = st.integers(-14, 32).map(lambda exponent: 2.0**exponent)
fp32_positive = st.floats(2.0**-126, 2.0**127, width=32)


@st.composite
def dynamic_scales(draw: st.DrawFn, *, power_of_two: bool = False) -> DynamicLossScale:
    """Any valid ``DynamicLossScale``; with ``power_of_two`` factors 2 and 0.5."""
    if power_of_two:
        low, start, high = sorted(draw(st.lists(powers_of_two, min_size=3, max_size=3)))
        growth, backoff = 2.0, 0.5
    else:
        low, start, high = sorted(draw(st.lists(fp32_positive, min_size=3, max_size=3)))
        high = draw(st.sampled_from([high, math.inf]))
        growth = draw(st.floats(1.0, 1e6, exclude_min=True))
        backoff = draw(st.floats(0.0, 1.0, exclude_min=True, exclude_max=True))
    return DynamicLossScale(
        init_scale=start,
        growth_factor=growth,
        backoff_factor=backoff,
        growth_interval=draw(st.integers(1, 7)),
        hysteresis=draw(st.integers(1, 4)),
        min_scale=low,
        max_scale=high,
        max_consecutive_skips=draw(st.integers(1, 20)),
    )


def static_scales(*, power_of_two: bool = False) -> st.SearchStrategy[StaticLossScale]:
    """Any valid ``StaticLossScale``."""
    return st.builds(StaticLossScale, powers_of_two if power_of_two else fp32_positive, st.integers(1, 20))


def found_infs(max_size: int = 40) -> st.SearchStrategy[list[bool]]:
    """Overflows (True) and clean steps (False), in runs as well as mixed."""
    runs = st.lists(st.tuples(st.booleans(), st.integers(1, 8)), max_size=max_size // 4)
    mixed = st.lists(st.booleans(), max_size=max_size)
    return mixed | runs.map(lambda pairs: [value for value, count in pairs for _ in range(count)])


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """How to make one tensor: the kind of its layout and its sizes."""

    kind: str
    sizes: tuple[int, int, int, int] = (2, 3, 4, 5)

    def make(self, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return random normal values, the same layout on every device."""
        a, b, c, d = self.sizes
        if self.kind == "scalar":
            return torch.randn((), device=device).to(dtype)
        if self.kind == "empty":
            return torch.randn(a, 0, b, device=device).to(dtype)
        if self.kind == "one":
            return torch.randn(1, device=device).to(dtype)
        if self.kind == "transposed":
            return torch.randn(a, b, device=device).to(dtype).t()
        if self.kind == "channels_last":
            return torch.randn(a, b, c, d, device=device).to(dtype).to(memory_format=torch.channels_last)
        if self.kind == "strided":
            return torch.randn(a, 2 * b, device=device).to(dtype)[:, ::2]
        if self.kind == "expanded":
            return torch.randn(a, 1, device=device).to(dtype).expand(a, b)
        return torch.randn(a, b, c, device=device).to(dtype)


sizes = st.tuples(*[st.integers(2, 5)] * 4)
tensor_specs = st.builds(TensorSpec, st.sampled_from(KINDS), sizes)
# Every kind at least once: an example without the hard ones shows little.
layouts = st.tuples(sizes, st.permutations(KINDS), st.lists(tensor_specs, max_size=4)).map(
    lambda drawn: [TensorSpec(kind, drawn[0]) for kind in drawn[1]] + drawn[2]
)


def named_tensors(specs: list[TensorSpec], device: torch.device, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """Return one (name, tensor) pair per spec."""
    return [(f"{spec.kind}{index}", spec.make(device, dtype)) for index, spec in enumerate(specs)]


@dataclass(frozen=True, slots=True)
class GradientSpec:
    """How to make one gradient: its kind, and a seed for the values."""

    kind: str
    seed: int = 0

    def make(self, param: Tensor, scale: float = 1.0) -> Tensor | None:
        """Return a gradient times ``scale`` in the dtype of ``param``, with its strides.

        ``"none"`` gives ``None``; ``"inf"``, ``"-inf"`` and ``"nan"`` stand in
        one element of otherwise random values.
        """
        if self.kind == "none":
            return None
        grad = torch.empty_like(param.detach())
        if self.kind == "zero":
            return grad.zero_()
        generator = torch.Generator().manual_seed(self.seed)
        grad.copy_(torch.randn(param.shape, generator=generator) * scale)
        if self.kind != "random" and grad.numel():
            where = torch.unravel_index(torch.tensor(self.seed % grad.numel()), grad.shape)
            grad[where] = float(self.kind)
        return grad


def gradient_scripts(parameters: int, *, max_steps: int = 10) -> st.SearchStrategy[list[list[GradientSpec]]]:
    """Steps of gradients for that many parameters: random, zero, missing, inf and NaN."""
    entry = st.builds(GradientSpec, st.sampled_from(ENTRIES), st.integers(0, 2**16))
    clean = st.builds(GradientSpec, st.just("random"), st.integers(0, 2**16))
    step = st.lists(entry, min_size=parameters, max_size=parameters)
    clean_step = st.lists(clean, min_size=parameters, max_size=parameters)
    return st.lists(clean_step | step, min_size=1, max_size=max_steps)
