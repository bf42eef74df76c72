"""The fp32 model that a half model stands for: as a state dict, and as a module."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.bucket import HALF_DTYPES
from mixedopt.masters import MasterWeights
from mixedopt.naming import canonical, wrappers
from mixedopt.policy import remove_casts_, unwrap


def trained_model(model: nn.Module, names: Mapping[nn.Parameter, str]) -> nn.Module:
    """Return the bare model, after checking that it has the parameters of ``names``."""
    root = unwrap(model)
    own = set(root.parameters())
    for param, name in names.items():
        if param not in own:
            raise ValueError(
                f"master_state_dict(model): the optimizer trains {name!r}, which is not in this model. Pass the model "
                "whose parameters it was given."
            )
    return root


def master_state_dict(masters: MasterWeights, model: nn.Module | None) -> dict[str, Any]:
    """Return the fp32 state dict of ``model``, of the masters if ``None``; all copies."""
    if model is None:
        pairs = ((n, p) for b in masters.buckets for n, p in zip(b.names, b.params, strict=True))
        return {name: masters.value(param).clone() for name, param in pairs}
    copies: dict[int, Tensor] = {}  # tied names share their copy, as in torch
    added = wrappers(model)
    exported = model.state_dict(keep_vars=True)
    for name in list(exported):
        value = exported.pop(name)
        new = copies.setdefault(id(value), _widened(masters, value)) if isinstance(value, Tensor) else value
        exported[canonical(name, added)] = new
    return exported


def master_model(masters: MasterWeights, model: nn.Module) -> nn.Module:
    """Return a module like ``model``, in fp32, without casts, over the masters themselves.

    Parameters share storage with the masters and buffers are the model's own,
    so the module follows the training. Frozen half parameters are widened
    copies. Nothing in it requires a gradient. Split masters are lent.
    """
    masters.lend_()
    memo: dict[int, Any] = {}
    for param in model.parameters():
        source = masters.of.get(param, param).detach()
        shown = source.float() if source.dtype in HALF_DTYPES else source
        memo[id(param)] = nn.Parameter(shown, requires_grad=False)
    memo.update({id(buffer): buffer for buffer in model.buffers()})
    twin = copy.deepcopy(model, memo)
    remove_casts_(twin)
    return twin


def _widened(masters: MasterWeights, tensor: Tensor) -> Tensor:
    """Return a copy: of the master, else of the tensor, half widened if a parameter."""
    if not isinstance(tensor, nn.Parameter):
        return tensor.detach().clone()
    source = masters.value(tensor) if tensor in masters.of else tensor.detach()
    return source.to(torch.float32 if source.dtype in HALF_DTYPES else source.dtype, copy=True)
