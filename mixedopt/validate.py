"""The optimizer's arguments, checked before anything is written."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.bucket import HALF_DTYPES
from mixedopt.distributed import several_ranks
from mixedopt.errors import StepOrderError, shown
from mixedopt.flat import plan_layout
from mixedopt.groups import is_wrapped
from mixedopt.naming import canonical, wrappers
from mixedopt.policy import CastPolicy, PolicyHandle, check_dtype, check_model_and_policy
from mixedopt.scaler import LossScaler

dtype = check_dtype

logger = logging.getLogger("mixedopt")

WHO = "MixedPrecisionOptimizer"
# A constant power of two from here on, at a loss, is a loss scale.
GRAD_SCALER = 2.0**8
TRAINABLE = (*HALF_DTYPES, torch.float32)


def optimizer(value: object) -> None:
    """Raise ``TypeError`` unless ``value`` can be wrapped."""
    if not isinstance(value, torch.optim.Optimizer):
        raise TypeError(f"{WHO}(optimizer={shown(value)}): must be a torch.optim.Optimizer instance. Build one first.")
    if "_optimizer_step_pre_hooks" not in vars(value):
        raise TypeError(
            f"{WHO}(optimizer={type(value).__name__}(...)): has no step hooks, since its class does not call "
            "torch.optim.Optimizer.__init__. Call it there."
        )
    if type(value).__module__.startswith("mixedopt.") or is_wrapped(value):
        raise TypeError(f"{WHO}(optimizer={type(value).__name__}(...)): is wrapped already. Wrap a bare one, once.")


def policy(value: object, model: object) -> None:
    """Raise unless ``value`` is a policy and has a model to work on."""
    if model is None and value is not None:
        raise ValueError(f"{WHO}(policy=...): needs a model to convert. Pass model=, or leave policy out.")
    if model is not None:
        check_model_and_policy(WHO, model, value)


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


def drop_rule(value: object, gradients: str) -> None:
    """Raise unless ``value`` is ``None``, or a function and gradients are added up in fp32."""
    if value is None:
        return
    if not callable(value):
        raise TypeError(
            f"{WHO}(drop_bad_micro_steps={shown(value)}): must be a function of (kept, total) that returns a factor. "
            "lambda kept, total: total / kept keeps a mean."
        )
    if gradients != "fp32":
        raise ValueError(f"{WHO}(drop_bad_micro_steps=...): needs the sum in fp32. Pass gradients='fp32'.")


def ranks(gradients: str) -> None:
    """Raise ``ValueError`` if gradients would be taken before other ranks have seen them."""
    if gradients != "autograd" and several_ranks():
        raise ValueError(
            f"{WHO}(gradients={gradients!r}): would take each gradient before DistributedDataParallel has averaged "
            "it. Leave it out: between ranks gradients wait in .grad."
        )


def closure_options(inner: torch.optim.Optimizer, limit: float | None, *, shared: bool) -> None:
    """Raise ``ValueError`` for what an optimizer that evaluates the model itself cannot have."""
    name = type(inner).__name__
    if limit is not None:
        raise ValueError(
            f"{WHO}(max_grad_norm={limit!r}): {name} searches along its gradients, which clipping would bend. "
            "Leave it out."
        )
    if shared:
        raise ValueError(
            f"{WHO}(loss_scale=SharedLossScale(...)): {name} evaluates the model within its step. Give it a loss "
            "scale of its own."
        )


def joining(
    handle: PolicyHandle,
    policy: CastPolicy | None,
    dtype: torch.dtype,
    scaler: LossScaler,
    names: Mapping[nn.Parameter, str],
) -> None:
    """Raise ``ValueError`` unless another optimizer may join a model as it was converted."""
    not_taken(names, {param for owner in handle.owners for param in owner.names})
    if dtype != handle.plan.dtype:
        raise ValueError(f"{WHO}(dtype={dtype!r}): the model was converted to {handle.plan.dtype}. Pass the same.")
    if policy is not None and policy != handle.plan.policy:
        raise ValueError(f"{WHO}(policy=...): the model was converted by another policy. Leave policy out.")
    if not all(scaler.agrees_with(owner.scaler) for owner in handle.owners):
        raise ValueError(
            f"{WHO}(loss_scale=...): another optimizer trains this model, and one backward serves both. Pass one "
            "SharedLossScale to both, or the same static scale."
        )


def not_taken(names: Mapping[nn.Parameter, str], taken: Collection[nn.Parameter]) -> None:
    """Raise ``ValueError`` if another optimizer of the model has one of these parameters."""
    if twice := next((name for param, name in names.items() if param in taken), None):
        raise ValueError(f"{WHO}: parameter {twice!r} is in another optimizer of this model. Leave it in one.")


def loss(value: object) -> None:
    """Raise unless ``value`` is a floating tensor of one element."""
    if not isinstance(value, Tensor):
        raise TypeError(f"backward(loss={value!r}): must be a tensor. Pass the loss before .item().")
    if not value.is_floating_point():
        raise ValueError(f"backward(loss of {value.dtype}): must be floating. Compute the loss from model outputs.")
    if value.numel() != 1:
        raise ValueError(f"backward(loss of shape {tuple(value.shape)}): must be a scalar. Call .mean() or .sum().")


def not_scaled(value: Tensor, scaler: LossScaler, *, look: bool) -> None:
    """Raise ``StepOrderError`` if ``value`` is a loss that was scaled already.

    Args:
        value: a loss; a product with a constant 0-d tensor tells by which.
        scaler: whose S it may have been multiplied by.
        look: read the constant, too: a large power of two is GradScaler's.

    Syncs: none; with ``look`` one, if the loss is such a product.
    """
    node = value.grad_fn
    if node is None or node.name() != "MulBackward0":
        return
    try:
        constant = node._saved_other  # type: ignore[attr-defined]
    except RuntimeError:  # backward has freed it
        return
    # A Python number is a double or an integer here.
    if constant is None or constant.dim() or constant.requires_grad or constant.dtype != torch.float32:
        return
    if scaler.is_scale(constant):
        raise StepOrderError("the loss was scaled twice: it comes from scale(). Call .backward() on it.")
    if look and (size := float(constant)) >= GRAD_SCALER and math.frexp(size)[0] == 0.5:
        raise StepOrderError(
            f"the loss was multiplied by {size:g}, as torch.amp.GradScaler does: it would be scaled twice. Remove the "
            "GradScaler: backward(loss) and step() of this optimizer do its work."
        )


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


def named(root: nn.Module) -> dict[nn.Parameter, str]:
    """Return the canonical name of every parameter."""
    added = wrappers(root)
    return {param: canonical(name, added) for name, param in root.named_parameters()}


def new_parameters(
    params: Sequence[Any],
    known: Mapping[nn.Parameter, str],
    root: nn.Module | None,
    group: int,
    given: Sequence[str] | None = None,
) -> dict[nn.Parameter, str]:
    """Return name by parameter for one group; raises as ``parameters``."""
    of_model = {} if root is None else named(root)
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
