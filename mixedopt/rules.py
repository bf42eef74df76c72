"""Update rules: the step of an optimizer, written once as a pure function of tensors.

A rule runs as it stands, as the reference, or compiled, over flat buffers. Its
numbers are worked out in double precision on the host and rounded once, so that
1 - beta is not a difference of two fp32 numbers.

References: Adam and Adamax, Kingma & Ba 2015; AdamW, Loshchilov & Hutter 2019;
AMSGrad, Reddi et al. 2018; RAdam, Liu et al. 2020; Adagrad, Duchi et al. 2011;
Adadelta, Zeiler 2012; RMSprop and SGD with momentum as in torch.optim.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Rule:
    """How one kind of optimizer steps.

    Attributes:
        state: names of the fp32 state, of the parameter's shape, under which
            torch keeps it; all zero before the first step.
        counts: True iff torch keeps a ``step``, too.
        serves: whether a group's hyperparameters are covered.
        numbers: a group's hyperparameters and the number of this step (1 is
            the first) -> what ``update`` needs of them.
        update: (parameter, gradient, numbers as 0-d fp32 tensors, state) ->
            the new parameter and state. Pure; the gradient is unscaled.
        step_: (gradient, numbers, parameter, weight, *state), with the factor
            on the gradient before the numbers: writes the new over the old.
    """

    state: tuple[str, ...]
    counts: bool
    serves: Callable[[Group], bool]
    numbers: Callable[[Group, int], tuple[float, ...]]
    update: Callable[..., tuple[Tensor, ...]]
    step_: Callable[..., None] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "step_", _in_place(self.update))


def _in_place(update: Callable[..., tuple[Tensor, ...]]) -> Callable[..., None]:
    """Return the function that is compiled; its code is its own, since Dynamo counts recompilations by code."""

    def step_(grad: Tensor, numbers: Tensor, master: Tensor, model: Tensor | None, *state: Tensor) -> None:
        scale, *rest = numbers.unbind()
        param, *new = update(master, grad.float() * scale, tuple(rest), *state)
        for old, value in zip(state, new, strict=True):
            old.copy_(value)
        if model is not None:
            model.copy_(param)
        master.copy_(param)

    code = step_.__code__.replace(co_name=f"{update.__name__}_step_")
    return types.FunctionType(code, step_.__globals__, code.co_name, None, step_.__closure__)


def _plain(group: Group, *also: str) -> bool:
    """True iff the group asks for nothing that only torch's own step has."""
    numbers = [group[key] for key in ("lr", "weight_decay", *also)]
    special = group["differentiable"] or group.get("capturable", False)
    return not special and all(isinstance(n, (int, float)) for n in numbers)


# -- Adam, AdamW ------------------------------------------------------------------------


def _with_betas(group: Group) -> bool:
    """As ``_plain``, for what divides by a root plus eps: in the padding by eps alone."""
    betas = all(isinstance(beta, (int, float)) for beta in group["betas"])
    return _plain(group, "eps") and betas and group["eps"] > 0


def _adam_numbers(group: Group, step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    lr, decay = group["lr"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    return (
        1.0 - lr * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / _correction(beta1, step),
        1.0 / math.sqrt(_correction(beta2, step)),
        group["eps"],
    )


def _correction(beta: float, step: int) -> float:
    """Return 1 - beta**step, without cancellation."""
    return -math.expm1(step * math.log(beta)) if beta else 1.0


def _moments(
    grad: Tensor, mean: Tensor, square: Tensor, weight: Tensor, beta2: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor]:
    return mean + weight * (grad - mean), square * beta2 + weight2 * grad * grad


def _adam(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    keep, decay, weight, beta2, weight2, rate, inverse_root, eps = n
    mean, square = _moments(grad + decay * param, mean, square, weight, beta2, weight2)
    step = rate * (mean / (square.sqrt() * inverse_root + eps))
    return param * keep - step, mean, square


def _amsgrad(
    param: Tensor, grad: Tensor, n: tuple[Tensor, ...], mean: Tensor, square: Tensor, most: Tensor
) -> tuple[Tensor, ...]:
    keep, decay, weight, beta2, weight2, rate, inverse_root, eps = n
    mean, square = _moments(grad + decay * param, mean, square, weight, beta2, weight2)
    most = torch.maximum(most, square)
    step = rate * (mean / (most.sqrt() * inverse_root + eps))
    return param * keep - step, mean, square, most


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = Rule(MOMENTS, True, lambda g: _with_betas(g) and not g["amsgrad"], _adam_numbers, _adam)
AMSGRAD = Rule((*MOMENTS, "max_exp_avg_sq"), True, lambda g: _with_betas(g) and g["amsgrad"], _adam_numbers, _amsgrad)


# -- RAdam, Adamax ------------------------------------------------------------------------


def _radam_numbers(group: Group, step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    lr, decay, decoupled = group["lr"], group["weight_decay"], group["decoupled_weight_decay"]
    correction2 = _correction(beta2, step)
    most = 2.0 / (1.0 - beta2) - 1.0
    length = most - 2.0 * step * beta2**step / correction2
    rectified = 0.0
    if length > 5.0:
        shape = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
        rectified = math.sqrt(shape) * math.sqrt(correction2)
    return (
        1.0 - lr * decay if decoupled else 1.0,
        0.0 if decoupled else decay,
        1.0 - beta1,
        beta2,
        1.0 - beta2,
        lr / _correction(beta1, step),
        rectified,
        0.0 if rectified else 1.0,
        group["eps"],
    )


def _radam(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], mean: Tensor, square: Tensor) -> tuple[Tensor, ...]:
    keep, decay, weight, beta2, weight2, rate, rectified, plain, eps = n
    mean, square = _moments(grad + decay * param, mean, square, weight, beta2, weight2)
    return param * keep - rate * mean * (rectified / (square.sqrt() + eps) + plain), mean, square


def _adamax_numbers(group: Group, step: int) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    rate = group["lr"] / _correction(beta1, step)
    return group["weight_decay"], 1.0 - beta1, beta2, group["eps"], rate


def _adamax(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], mean: Tensor, most: Tensor) -> tuple[Tensor, ...]:
    decay, weight, beta2, eps, rate = n
    grad = grad + decay * param
    mean = mean + weight * (grad - mean)
    most = torch.maximum(most * beta2, grad.abs() + eps)
    return param - rate * (mean / most), mean, most


RADAM = Rule(MOMENTS, True, _with_betas, _radam_numbers, _radam)
ADAMAX = Rule(("exp_avg", "exp_inf"), True, _with_betas, _adamax_numbers, _adamax)


# -- Adagrad, RMSprop, Adadelta -------------------------------------------------------------


def _adagrad_numbers(group: Group, step: int) -> tuple[float, ...]:
    return group["weight_decay"], group["lr"] / (1.0 + (step - 1) * group["lr_decay"]), group["eps"]


def _adagrad(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], total: Tensor) -> tuple[Tensor, ...]:
    decay, rate, eps = n
    grad = grad + decay * param
    total = total + grad * grad
    return param - rate * (grad / (total.sqrt() + eps)), total


def _rmsprop_numbers(group: Group, step: int) -> tuple[float, ...]:
    alpha = group["alpha"]
    return group["weight_decay"], alpha, 1.0 - alpha, group["eps"], group["momentum"], group["lr"]


def _rmsprop(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], square: Tensor) -> tuple[Tensor, ...]:
    decay, alpha, weight, eps, _, rate = n
    grad = grad + decay * param
    square = square * alpha + weight * grad * grad
    return param - rate * (grad / (square.sqrt() + eps)), square


def _rmsprop_momentum(
    param: Tensor, grad: Tensor, n: tuple[Tensor, ...], square: Tensor, buffer: Tensor
) -> tuple[Tensor, ...]:
    decay, alpha, weight, eps, momentum, rate = n
    grad = grad + decay * param
    square = square * alpha + weight * grad * grad
    buffer = buffer * momentum + grad / (square.sqrt() + eps)
    return param - rate * buffer, square, buffer


def _adadelta_numbers(group: Group, step: int) -> tuple[float, ...]:
    return group["weight_decay"], group["rho"], 1.0 - group["rho"], group["eps"], group["lr"]


def _adadelta(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], square: Tensor, moved: Tensor) -> tuple[Tensor, ...]:
    decay, rho, weight, eps, rate = n
    grad = grad + decay * param
    square = square * rho + weight * grad * grad
    delta = (moved + eps).sqrt() / (square + eps).sqrt() * grad
    return param - rate * delta, square, moved * rho + weight * delta * delta


ADAGRAD = Rule(
    ("sum",),
    True,
    lambda g: _plain(g, "eps", "lr_decay") and g["eps"] > 0 and g["initial_accumulator_value"] == 0,
    _adagrad_numbers,
    _adagrad,
)
RMSPROP = Rule(
    ("square_avg",),
    True,
    lambda g: _plain(g, "eps", "alpha") and g["eps"] > 0 and g["momentum"] == 0 and not g["centered"],
    _rmsprop_numbers,
    _rmsprop,
)
RMSPROP_MOMENTUM = Rule(
    ("square_avg", "momentum_buffer"),
    True,
    lambda g: _plain(g, "eps", "alpha") and g["eps"] > 0 and g["momentum"] > 0 and not g["centered"],
    _rmsprop_numbers,
    _rmsprop_momentum,
)
ADADELTA = Rule(
    ("square_avg", "acc_delta"),
    True,
    lambda g: _plain(g, "eps", "rho") and g["eps"] > 0,
    _adadelta_numbers,
    _adadelta,
)


# -- SGD ----------------------------------------------------------------------------------


def _sgd_numbers(group: Group, step: int) -> tuple[float, ...]:
    momentum = group["momentum"]
    first = step == 1  # torch then takes the gradient itself as the buffer
    return (
        group["weight_decay"],
        0.0 if first else momentum,
        1.0 if first else 1.0 - group["dampening"],
        momentum if group["nesterov"] else 1.0,
        1.0 if group["nesterov"] else 0.0,
        group["lr"],
    )


def _sgd_momentum(param: Tensor, grad: Tensor, n: tuple[Tensor, ...], buffer: Tensor) -> tuple[Tensor, ...]:
    decay, momentum, weight, of_buffer, of_grad, rate = n
    grad = grad + decay * param
    buffer = buffer * momentum + weight * grad
    return param - rate * (of_buffer * buffer + of_grad * grad), buffer


def _sgd(param: Tensor, grad: Tensor, n: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (param - n[-1] * (grad + n[0] * param),)


MOMENTUM = Rule(
    ("momentum_buffer",),
    False,
    lambda group: _plain(group, "momentum", "dampening") and group["momentum"] != 0,
    _sgd_numbers,
    _sgd_momentum,
)
SGD = Rule((), False, lambda group: _plain(group, "momentum") and group["momentum"] == 0, _sgd_numbers, _sgd)

RULES: Mapping[type[torch.optim.Optimizer], tuple[Rule, ...]] = {
    torch.optim.Adam: (ADAM, AMSGRAD),
    torch.optim.AdamW: (ADAM, AMSGRAD),
    torch.optim.RAdam: (RADAM,),
    torch.optim.Adamax: (ADAMAX,),
    torch.optim.Adagrad: (ADAGRAD,),
    torch.optim.RMSprop: (RMSPROP, RMSPROP_MOMENTUM),
    torch.optim.Adadelta: (ADADELTA,),
    torch.optim.SGD: (MOMENTUM, SGD),
}


def rule_for(inner: torch.optim.Optimizer) -> Rule | None:
    """Return the rule that covers all groups of an optimizer of exactly this type, ``None`` without one."""
    for rule in RULES.get(type(inner), ()):
        if all(rule.serves(group) for group in inner.param_groups):
            return rule
    return None
