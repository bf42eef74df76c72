"""Hypothesis strategies: loss scales, overflow sequences, tensors of every layout."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from mixedopt import DynamicLossScale, StaticLossScale

KINDS = ("contiguous", "transposed", "channels_last", "strided", "expanded", "scalar", "empty", "one")
# Their strides are not those of a dense tensor; torch.empty_like gives them others.
NON_DENSE = ("strided", "expanded")

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


@st.composite
def non_default_dynamic_scales(draw: st.DrawFn) -> DynamicLossScale:
    """A ``DynamicLossScale`` whose every field differs from its default."""
    return DynamicLossScale(
        init_scale=draw(st.floats(2.0**-10, 2.0**15, width=32)),
        growth_factor=draw(st.floats(1.1, 1.9)),
        backoff_factor=draw(st.floats(0.1, 0.4)),
        growth_interval=draw(st.integers(1, 7)),
        hysteresis=draw(st.integers(2, 5)),
        min_scale=draw(st.floats(2.0**-30, 2.0**-15, width=32)),
        max_scale=draw(st.floats(2.0**16, 2.0**30, width=32)),
        max_consecutive_skips=draw(st.integers(11, 20)),
    )


@st.composite
def non_default_static_scales(draw: st.DrawFn) -> StaticLossScale:
    """A ``StaticLossScale`` whose every field differs from its default."""
    return StaticLossScale(draw(st.floats(1.5, 2.0**20, width=32)), draw(st.integers(11, 20)))


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


class Bag(nn.Module):
    """Parameters of given layouts, the first one under two names (tied)."""

    def __init__(self, specs: list[TensorSpec], device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for name, tensor in named_tensors(specs, device, dtype):
            self.register_parameter(name, nn.Parameter(tensor))
        self.tied = next(self.parameters())

    def forward(self) -> Tensor:
        """Return the sum of all squares, in fp32."""
        return torch.stack([param.float().square().sum() for param in self.parameters()]).sum()


def bags(device: torch.device) -> st.SearchStrategy[Bag]:
    """Models with parameters of every layout."""
    return layouts.map(lambda specs: Bag(specs, device))
