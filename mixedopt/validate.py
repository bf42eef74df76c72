"""The optimizer's arguments, checked before anything is written."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.errors import shown
from mixedopt.flat import plan_layout
from mixedopt.groups import is_wrapped
from mixedopt.masters import HALF_DTYPES
from mixedopt.policy import check_dtype, check_model_and_policy

dtype = check_dtype

logger = logging.getLogger("mixedopt")

WHO = "MixedPrecisionOptimizer"
TRAINABLE = (*HALF_DTYPES, torch.float32)


def optimizer(value: object) -> None:
    """Raise ``TypeError`` unless ``value`` can be wrapped."""
    if not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{WHO}(optimizer={shown(value)}): must be a torch.optim.Optimizer instance. Build one first.")
    if type(value).__module__.startswith("mixedopt.") or is_wrapped(value):
        raise TypeError(f"{WHO}(optimizer={type(value).__name__}(...)): is wrapped already. Wrap a bare one, once.")
    closure = inspect.signature(value.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{WHO}(optimizer={type(value).__name__}(...)): its step() re-evaluates a closure, which is not "
            "supported. Use an optimizer whose step() needs no closure."
        )


def policy(value: object, model: object) -> None:
    """Raise unless ``value`` is a policy and has a model to work on."""
    if model is None and value is not None:
        raise ValueError(f"{WHO}(policy=...): needs a model to convert. Pass model=, or leave policy out.")
    if model is not None:
        check_model_and_policy(WHO, model, value)
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"{WHO}(model=DistributedDataParallel(...)): its buckets are made for fp32 gradients, which become half. "
            "Wrap the optimizer around the bare model first, then the model in DistributedDataParallel."
        )


def max_grad_norm(value: object) -> None:
    """Raise unless ``value`` is ``None`` or a positive finite number."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{WHO}(max_grad_norm={value!r}): must be a number or None. The usual value is 1.0.")
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{WHO}(max_grad_norm={value!r}): must be positive and finite. The usual value is 1.0.")


def choice(name: str, value: object, allowed: Sequence[str]) -> None:
    """Raise ``ValueError`` unless ``value`` is one of ``allowed``."""
    if value not in allowed:
        options = " or ".join(repr(option) for option in allowed)
        raise ValueError(f"{WHO}({name}={value!r}): must be {options} in this version. Leave it out for the default.")


def loss(value: object) -> None:
    """Raise unless ``value`` is a floating tensor of one element."""
    if not isinstance(value, Tensor):
        raise TypeError(f"backward(loss={value!r}): must be a tensor. Pass the loss before .item().")
    if not value.is_floating_point():
        raise ValueError(f"backward(loss of {value.dtype}): must be floating. Compute the loss from model outputs.")
    if value.numel() != 1:
        raise ValueError(f"backward(loss of shape {tuple(value.shape)}): must be a scalar. Call .mean() or .sum().")


def parameters(inner: torch.optim.Optimizer, root: nn.Module | None) -> dict[nn.Parameter, str]:
    """Return every parameter of ``inner``, in group order, with its name.

    Names are the model's; without a model the group's ``param_names``, else
    positions.

    Raises:
        ValueError: a parameter is not the model's, is in two groups, or cannot
            be trained here.
    """
    names: dict[nn.Parameter, str] = {}
    for index, group in enumerate(inner.param_groups):
        names.update(new_parameters(group["params"], names, root, index, group.get("param_names")))
    plan_layout([(name, param.detach()) for param, name in names.items() if param.requires_grad])  # may refuse
    return names


def new_parameters(
    params: Sequence[Any],
    known: Mapping[nn.Parameter, str],
    root: nn.Module | None,
    group: int,
    given: Sequence[str] | None = None,
) -> dict[nn.Parameter, str]:
    """Return name by parameter for one group; raises as ``parameters``."""
    of_model = {} if root is None else {param: name for name, param in root.named_parameters()}
    fresh: dict[nn.Parameter, str] = {}
    for position, param in enumerate(params):
        name = given[position] if given else f"group{group}.param{position}"
        if root is not None:
            if param not in of_model:
                raise ValueError(
                    f"{WHO}: parameter {name!r} is in the inner optimizer but not in the model. "
                    "Build the optimizer from model.parameters()."
                )
            name = of_model[param]
        if param in known or param in fresh:
            raise ValueError(f"{WHO}: parameter {name!r} is in two groups. Leave it in one.")
        if param.is_complex():
            raise ValueError(f"{WHO}: parameter {name!r} is complex: it has no half format. Train it separately.")
        if param.requires_grad and param.dtype not in TRAINABLE:
            raise ValueError(f"{WHO}: parameter {name!r} is {param.dtype}: must be fp16, bf16 or fp32. Convert it.")
        fresh[param] = name
    return fresh


def warn_if_all_fp32(dtypes: Iterable[torch.dtype]) -> None:
    """Log at WARNING if nothing is half: most likely ``model=`` was forgotten."""
    if not any(dtype in HALF_DTYPES for dtype in dtypes):
        logger.warning(
            "no parameter is half and no model was given: training stays in fp32. "
            "Pass model= to convert it, or convert it before."
        )


def group_params(group: Mapping[str, Any]) -> tuple[list[Any], list[str] | None]:
    """Return the group's parameters as a list, and their names if it has any."""
    params = group["params"]
    members = [params] if isinstance(params, Tensor) else list(params)
    if members and all(isinstance(member, tuple) for member in members):
        return [param for _, param in members], [name for name, _ in members]
    return members, None
