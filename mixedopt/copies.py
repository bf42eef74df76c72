"""Copies of an optimizer's state, whatever it is made of."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def copied(value: Any) -> Any:
    """Return a deep copy. Tensors are cloned, shared ones once.

    Also of tensor subclasses that cannot be cloned as a whole (quantised
    state): their parts are.
    """
    return mapped(value, lambda tensor: tensor.detach().clone())


def mapped(value: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested ``value`` with every tensor in it changed.

    Looks into dicts, lists, tuples and tensor subclasses made of tensors; what
    is none of these is deep-copied.
    """
    return _mapped(value, change, {})


def _mapped(value: Any, change: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Any:
    if id(value) in memo:
        return memo[id(value)]
    new: Any
    if isinstance(value, Tensor):
        new = _of_parts(value, change, memo) if hasattr(value, "__tensor_flatten__") else change(value)
    elif isinstance(value, Mapping) and type(value).__module__ in ("builtins", "collections"):
        new = copy.copy(value)
        new.clear()
        new.update({key: _mapped(item, change, memo) for key, item in value.items()})
    elif type(value) in (list, tuple):
        new = type(value)(_mapped(item, change, memo) for item in value)
    else:
        return copy.deepcopy(value)
    memo[id(value)] = new
    return new


def _of_parts(tensor: Tensor, change: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> Tensor:
    names, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
    parts = {name: _mapped(getattr(tensor, name), change, memo) for name in names}
    rebuilt: Tensor = type(tensor).__tensor_unflatten__(parts, context, tensor.size(), tensor.stride())  # type: ignore[attr-defined]
    return rebuilt


def widened(value: Any, dtype: torch.dtype) -> Any:
    """Return a copy of nested ``value`` with every tensor of ``dtype`` in fp32."""
    return mapped(value, lambda tensor: tensor.float() if tensor.dtype == dtype else tensor)
