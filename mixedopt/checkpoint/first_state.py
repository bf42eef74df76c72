"""What state an optimizer makes in its first step, seen on a stand-in of it."""

from __future__ import annotations

import copy
from collections import OrderedDict, defaultdict
from collections.abc import Container, Mapping, Sequence
from typing import Any

import torch
from torch import nn

# What a stand-in does without: hooks of users, and the ``step`` that schedulers put on the instance.
WITHOUT = ("step", "state")


def first_state(
    inner: torch.optim.Optimizer, groups: Sequence[Mapping[str, Any]] = (), *, whole: Container[int] = ()
) -> list[dict[str, Any]] | None:
    """Return the state of every parameter after a first step with zero gradients, in group order.

    ``inner``, its parameters and torch's random state stay as they are.

    Args:
        inner: any optimizer.
        groups: hyperparameters of the step, in place of those of ``inner``.
        whole: positions of parameters whose state comes in full size. The
            others are at most two long in every dimension: keys and types are
            those of the full state.

    Returns:
        ``None`` if a stand-in cannot make a step: it needs a closure, say.
    """
    params = [param for group in inner.param_groups for param in group["params"]]
    memo: dict[int, Any] = {id(p): _stand_in(p, small=i not in whole) for i, p in enumerate(params)}
    stand_ins = [memo[id(param)] for param in params]
    devices = sorted({param.device.index or 0 for param in params if param.device.type == "cuda"})
    try:
        twin = object.__new__(type(inner))
        for key, value in vars(inner).items():
            if key not in WITHOUT:
                vars(twin)[key] = OrderedDict() if key.endswith("_hooks") else copy.deepcopy(value, memo)
        twin.state = defaultdict(dict)
        for group, given in zip(twin.param_groups, groups, strict=False):
            group.update({key: copy.deepcopy(value) for key, value in given.items() if key in inner.defaults})
        with torch.random.fork_rng(devices=devices):
            twin.step()
    except Exception:  # whatever another author's code makes of being copied
        return None
    return [dict(twin.state.get(stand_in, {})) for stand_in in stand_ins]


def _stand_in(param: nn.Parameter, *, small: bool) -> nn.Parameter:
    shape = [min(size, 2) for size in param.shape] if small else param.shape
    new = nn.Parameter(torch.zeros(shape, dtype=param.dtype, device=param.device), requires_grad=param.requires_grad)
    if param.requires_grad:
        new.grad = torch.zeros_like(new)
    return new
