"""Torch's layers with their casts inside: classes that a module becomes by its ``__class__``.

They differ from torch's in ``forward`` and add nothing to a module, so it can
become torch's own again. Hooks cost a third of the host's time for a small layer;
those of a user see the input as it came.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from mixedopt.casting import CASTABLE
from mixedopt.native import loaded
from mixedopt.norms import group_norm, layer_norm, rms_norm


class MixedLayerNorm(nn.LayerNorm):
    """LayerNorm that keeps fp32 weights beside half activations.

    Attributes:
        output: what the result becomes; ``None`` leaves it in the dtype of the input.
    """

    output: ClassVar[torch.dtype | None] = None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``layer_norm`` of the input."""
        result, output = layer_norm(input, self.normalized_shape, self.weight, self.bias, self.eps), self.output
        return result if output is None or result.dtype == output else result.to(output)


class MixedRMSNorm(nn.RMSNorm):
    """RMSNorm that keeps fp32 weights beside half activations; ``output`` as in ``MixedLayerNorm``."""

    output: ClassVar[torch.dtype | None] = None

    def forward(self, x: Tensor) -> Tensor:
        """Return ``rms_norm`` of the input."""
        result, output = rms_norm(x, self.normalized_shape, self.weight, self.eps), self.output
        return result if output is None or result.dtype == output else result.to(output)


class MixedGroupNorm(nn.GroupNorm):
    """GroupNorm that keeps fp32 weights beside half activations; ``output`` as in ``MixedLayerNorm``."""

    output: ClassVar[torch.dtype | None] = None

    def forward(self, input: Tensor) -> Tensor:
        """Return ``group_norm`` of the input."""
        result, output = group_norm(input, self.num_groups, self.weight, self.bias, self.eps), self.output
        return result if output is None or result.dtype == output else result.to(output)


class Float16LayerNorm(MixedLayerNorm):
    """Returns fp16."""

    output = torch.float16


class BFloat16LayerNorm(MixedLayerNorm):
    """Returns bf16."""

    output = torch.bfloat16


class Float16RMSNorm(MixedRMSNorm):
    """Returns fp16."""

    output = torch.float16


class BFloat16RMSNorm(MixedRMSNorm):
    """Returns bf16."""

    output = torch.bfloat16


class Float16GroupNorm(MixedGroupNorm):
    """Returns fp16."""

    output = torch.float16


class BFloat16GroupNorm(MixedGroupNorm):
    """Returns bf16."""

    output = torch.bfloat16


class MixedLinear(nn.Linear):
    """Linear layer whose input becomes the dtype of its weight."""

    def forward(self, input: Tensor) -> Tensor:
        """Return ``input @ weight.T + bias``."""
        weight, bias = self.weight, self.bias
        if type(input) is Tensor and input.dtype == weight.dtype and input.dim() < 3:  # C++ has nothing for a matrix
            return F.linear(input, weight, bias)
        if not torch.compiler.is_compiling() and (library := loaded()) is not None:
            result: Tensor | None = library.linear(input, weight, bias)
            if result is not None:
                return result
        return F.linear(_like(input, weight), weight, bias)


def _convolve(self: Any, input: Tensor) -> Tensor:
    """Return the convolution."""
    result: Tensor = self._conv_forward(_like(input, self.weight), self.weight, self.bias)
    return result


class MixedConv1d(nn.Conv1d):
    """Convolution whose input becomes the dtype of its weight."""

    forward = _convolve


class MixedConv2d(nn.Conv2d):
    """Convolution whose input becomes the dtype of its weight."""

    forward = _convolve


class MixedConv3d(nn.Conv3d):
    """Convolution whose input becomes the dtype of its weight."""

    forward = _convolve


# Their own weights stay fp32, and half activations pass: class -> half format -> class.
NORMS: Mapping[type[nn.Module], Mapping[torch.dtype, type[nn.Module]]] = MappingProxyType(
    {
        nn.LayerNorm: {torch.float16: Float16LayerNorm, torch.bfloat16: BFloat16LayerNorm},
        nn.RMSNorm: {torch.float16: Float16RMSNorm, torch.bfloat16: BFloat16RMSNorm},
        nn.GroupNorm: {torch.float16: Float16GroupNorm, torch.bfloat16: BFloat16GroupNorm},
    }
)
# What comes takes the dtype of the weights.
PRODUCTS: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {nn.Linear: MixedLinear, nn.Conv1d: MixedConv1d, nn.Conv2d: MixedConv2d, nn.Conv3d: MixedConv3d}
)
# The way back.
PLAIN: Mapping[type[nn.Module], type[nn.Module]] = MappingProxyType(
    {mixed: plain for plain, of in NORMS.items() for mixed in of.values()} | {m: p for p, m in PRODUCTS.items()}
)
# Torch's own kernels take half input with fp32 weights and statistics, as they do under autocast. Result, dx and
# statistics are fp32 inside; on CUDA some of the kernels round partial sums for dweight and dbias to half.
NATIVE: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d,
    nn.BatchNorm2d,
    nn.BatchNorm3d,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


def _like(value: Any, weight: Tensor) -> Any:
    """Return a floating tensor in the dtype of the weight, all else as it is, for torch to refuse."""
    dtype = weight.dtype
    if isinstance(value, Proxy):  # of a symbolic trace, which keeps the cast
        return value.to(dtype)
    if not isinstance(value, Tensor) or value.dtype == dtype or value.dtype not in CASTABLE:
        return value
    return value.to(dtype)
