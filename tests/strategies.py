"""Strategies that only the suite needs; the public ones are in ``mixedopt.testing.strategies``."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

from mixedopt import DynamicLossScale, StaticLossScale
from mixedopt.testing.strategies import (
    KINDS,
    NON_DENSE,
    TensorSpec,
    dynamic_scales,
    found_infs,
    layouts,
    named_tensors,
    powers_of_two,
)

__all__ = ["KINDS", "NON_DENSE", "Bag", "TensorSpec", "bags", "dynamic_scales", "found_infs", "layouts"]
__all__ += ["named_tensors", "non_default_dynamic_scales", "non_default_static_scales", "powers_of_two"]


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
