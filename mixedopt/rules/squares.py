"""Rules that divide by a root of squared gradients: Adagrad, RMSprop, Adadelta.

References: Adagrad, Duchi et al. 2011; Adadelta, Zeiler 2012; RMSprop as in
torch.optim, centered as in Graves 2013.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from mixedopt.rules.rule import Group, Rule, plain

Columns = tuple[Tensor, ...]


def _serves(group: Group, *also: str) -> bool:
    """As ``plain``, for what divides by a root plus eps: in the padding by eps alone."""
    return plain(group, "lr", "weight_decay", "eps", *also) and group["eps"] > 0


# -- Adagrad ----------------------------------------------------------------------------


def _adagrad_hyper(group: Group) -> tuple[float, ...]:
    return group["lr"], group["weight_decay"], group["lr_decay"], group["eps"]


def _adagrad_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, decay, lr_decay, eps = hyper
    return (decay, lr / (1.0 + (step - 1.0) * lr_decay), eps), ()


def _adagrad(param: Tensor, grad: Tensor, n: Columns, total: Tensor) -> Columns:
    decay, rate, eps = n
    grad = torch.addcmul(grad, param, decay)
    total = torch.addcmul(total, grad, grad)
    return param - rate * grad / (total.sqrt() + eps), total


ADAGRAD = Rule(
    ("sum",),
    (),
    True,
    lambda g: _serves(g, "lr_decay", "initial_accumulator_value"),
    _adagrad_hyper,
    _adagrad_numbers,
    _adagrad,
    # Torch makes it when the optimizer is built, and later for parameters added since.
    lambda g: {"sum": g["initial_accumulator_value"]},
)


# -- RMSprop ----------------------------------------------------------------------------


def _rmsprop_hyper(group: Group) -> tuple[float, ...]:
    return group["lr"], group["weight_decay"], group["alpha"], group["eps"], group["momentum"]


def _rmsprop_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, decay, alpha, eps, momentum = hyper
    return (decay, alpha, 1.0 - alpha, eps, momentum, lr), ()


def _rmsprop(param: Tensor, grad: Tensor, n: Columns, square: Tensor) -> Columns:
    decay, alpha, weight, eps, _, rate = n
    grad = torch.addcmul(grad, param, decay)
    square = torch.addcmul(square * alpha, weight * grad, grad)
    return param - rate * grad / (square.sqrt() + eps), square


def _rmsprop_momentum(param: Tensor, grad: Tensor, n: Columns, square: Tensor, buffer: Tensor) -> Columns:
    decay, alpha, weight, eps, momentum, rate = n
    grad = torch.addcmul(grad, param, decay)
    square = torch.addcmul(square * alpha, weight * grad, grad)
    buffer = buffer * momentum + grad / (square.sqrt() + eps)
    return torch.addcmul(param, buffer, -rate), square, buffer


def _centered(grad: Tensor, square: Tensor, mean: Tensor, alpha: Tensor, weight: Tensor) -> Columns:
    """Return the new moments and the root of the variance, which is NaN where it comes out negative, as in torch."""
    square, mean = torch.addcmul(square * alpha, weight * grad, grad), mean.lerp(grad, weight)
    return square, mean, torch.addcmul(square, -mean, mean).sqrt()


def _rmsprop_centered(param: Tensor, grad: Tensor, n: Columns, square: Tensor, mean: Tensor) -> Columns:
    decay, alpha, weight, eps, _, rate = n
    grad = torch.addcmul(grad, param, decay)
    square, mean, root = _centered(grad, square, mean, alpha, weight)
    return param - rate * grad / (root + eps), square, mean


def _rmsprop_centered_momentum(
    param: Tensor, grad: Tensor, n: Columns, square: Tensor, buffer: Tensor, mean: Tensor
) -> Columns:
    decay, alpha, weight, eps, momentum, rate = n
    grad = torch.addcmul(grad, param, decay)
    square, mean, root = _centered(grad, square, mean, alpha, weight)
    buffer = buffer * momentum + grad / (root + eps)
    return torch.addcmul(param, buffer, -rate), square, buffer, mean


def _rmsprop_rule(update: Callable[..., Columns], *more: str) -> Rule:
    """Return the rule for the groups that keep this state beside the mean square."""

    def serves(group: Group) -> bool:
        wanted = ("momentum_buffer",) * (group["momentum"] > 0) + ("grad_avg",) * bool(group["centered"])
        return _serves(group, "alpha", "momentum") and more == wanted

    return Rule(("square_avg", *more), (), True, serves, _rmsprop_hyper, _rmsprop_numbers, update)


RMSPROP = _rmsprop_rule(_rmsprop)
RMSPROP_MOMENTUM = _rmsprop_rule(_rmsprop_momentum, "momentum_buffer")
RMSPROP_CENTERED = _rmsprop_rule(_rmsprop_centered, "grad_avg")
RMSPROP_CENTERED_MOMENTUM = _rmsprop_rule(_rmsprop_centered_momentum, "momentum_buffer", "grad_avg")


# -- Adadelta ---------------------------------------------------------------------------


def _adadelta_hyper(group: Group) -> tuple[float, ...]:
    return group["lr"], group["weight_decay"], group["rho"], group["eps"]


def _adadelta_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, decay, rho, eps = hyper
    return (decay, rho, 1.0 - rho, eps, lr), ()


def _adadelta(param: Tensor, grad: Tensor, n: Columns, square: Tensor, moved: Tensor) -> Columns:
    decay, rho, weight, eps, rate = n
    grad = torch.addcmul(grad, param, decay)
    square = torch.addcmul(square * rho, weight * grad, grad)
    delta = (moved + eps).sqrt() / (square + eps).sqrt() * grad
    return torch.addcmul(param, delta, -rate), square, torch.addcmul(moved * rho, weight * delta, delta)


ADADELTA = Rule(
    ("square_avg", "acc_delta"), (), True, lambda g: _serves(g, "rho"), _adadelta_hyper, _adadelta_numbers, _adadelta
)
