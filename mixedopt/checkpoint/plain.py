"""Back to plain fp32: what torch's own optimizers and other tools read."""

from __future__ import annotations

import os
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mixedopt.checkpoint.replacing import replacing
from mixedopt.copies import copied
from mixedopt.errors import CheckpointError


class Trained(Protocol):
    """What is needed of an optimizer."""

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""

    def master_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the fp32 model's state dict."""


def export_state(optimizer: Trained) -> dict[str, Any]:
    """Return the state dict of the plain fp32 optimizer that goes on from here.

    It loads into an optimizer like ``optimizer.inner`` over the fp32 model that
    ``optimizer.master_state_dict()`` fills, with the same groups; no name of
    this library is in it. Tensors are copies, fp32.

    Args:
        optimizer: a ``MixedPrecisionOptimizer``.

    Example:
        >>> from mixedopt import MixedPrecisionOptimizer
        >>> model = nn.Linear(2, 2)
        >>> optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters()), model)
        >>> plain = nn.Linear(2, 2)
        >>> plain.load_state_dict(optimizer.master_state_dict())
        <All keys matched successfully>
        >>> torch.optim.AdamW(plain.parameters()).load_state_dict(export_state(optimizer))
    """
    state: dict[str, Any] = copied(optimizer.inner.state_dict())
    return state


def save_fp32_safetensors(path: str | os.PathLike[str], model: nn.Module, optimizer: Trained) -> None:
    """Write the fp32 model to a safetensors file; the old file stays until the new one is complete.

    Weights come from the masters; frozen half weights are widened, buffers and
    integers stay as they are. Tied names all appear, each with its values, so
    the file loads into the unconverted model with ``strict=True``.

    Args:
        path: of the file.
        model: the converted model.
        optimizer: the ``MixedPrecisionOptimizer`` that trains it.

    Raises:
        ValueError: ``model`` is not what ``optimizer`` trains. Nothing is written.
        CheckpointError: it holds something that is no tensor. Nothing is written.
        ImportError: safetensors is not installed.
    """
    try:
        from safetensors.torch import save_file
    except ImportError as error:
        raise ImportError("save_fp32_safetensors() needs safetensors: pip install safetensors.") from error
    weights = optimizer.master_state_dict(model)
    if others := [name for name, value in weights.items() if not isinstance(value, Tensor)]:
        raise CheckpointError(f"save_fp32_safetensors(): {others[0]!r} is no tensor. Nothing was written.")
    seen: set[int] = set()
    for name, value in weights.items():
        tied = value.data_ptr() in seen and value.numel() > 0
        seen.add(value.data_ptr())
        weights[name] = value.clone() if tied else value.contiguous()
    with replacing(path) as temporary:
        save_file(weights, temporary, metadata={"format": "pt"})
