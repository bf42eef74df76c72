"""Rules with a mean of gradients and one of their squares: Adam, AdamW, AMSGrad, NAdam, RAdam, Adamax.

References: Adam and Adamax, Kingma & Ba 2015; NAdam, Dozat 2016; AdamW,
Loshchilov & Hutter 2019; AMSGrad, Reddi et al. 2018; RAdam, Liu et al. 2020.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from mixedopt.rules.rule import Group, Rule, correction, plain

Columns = tuple[Tensor, ...]

# The base by which NAdam's momentum warms up, Dozat 2016.
NADAM_BASE = 0.96
# RAdam takes the variance for known from this length of the average on, as torch does.
RADAM_LENGTH = 5.0


def _serves(group: Group, *also: str) -> bool:
    """As ``plain``, for what divides by a root plus eps: in the padding by eps alone."""
    beta1, beta2 = group["betas"]
    betas = isinstance(beta1, (int, float)) and isinstance(beta2, (int, float))
    return plain(group, "lr", "weight_decay", "eps", *also) and betas and group["eps"] > 0


def _hyper(group: Group) -> tuple[float, ...]:
    beta1, beta2 = group["betas"]
    decoupled = float(group.get("decoupled_weight_decay", False))
    return group["lr"], beta1, beta2, group["eps"], group["weight_decay"], decoupled


def _decays(lr: Tensor, decay: Tensor, decoupled: Tensor) -> Columns:
    """Return what the parameter is multiplied by, and how much of it is added to the gradient."""
    apart = decoupled != 0
    return torch.where(apart, 1.0 - lr * decay, 1.0), torch.where(apart, 0.0, decay)


def _moments(
    grad: Tensor, mean: Tensor, square: Tensor, weight: Tensor, beta2: Tensor, weight2: Tensor
) -> tuple[Tensor, Tensor]:
    # lerp starts from the nearer end: with a small beta, the mean is the gradient, without the old mean's rounding.
    return mean.lerp(grad, weight), torch.addcmul(square * beta2, weight2 * grad, grad)


# -- Adam, AdamW ------------------------------------------------------------------------


def _adam_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, beta1, beta2, eps, decay, decoupled = hyper
    rate, root = lr / correction(beta1, step), correction(beta2, step).sqrt()
    return (*_decays(lr, decay, decoupled), 1.0 - beta1, beta2, 1.0 - beta2, rate, root, eps), ()


def _adam(param: Tensor, grad: Tensor, n: Columns, mean: Tensor, square: Tensor) -> Columns:
    keep, decay, weight, beta2, weight2, rate, root, eps = n
    mean, square = _moments(torch.addcmul(grad, param, decay), mean, square, weight, beta2, weight2)
    return param * keep - rate * mean / (square.sqrt() / root + eps), mean, square


def _amsgrad(param: Tensor, grad: Tensor, n: Columns, mean: Tensor, square: Tensor, most: Tensor) -> Columns:
    keep, decay, weight, beta2, weight2, rate, root, eps = n
    mean, square = _moments(torch.addcmul(grad, param, decay), mean, square, weight, beta2, weight2)
    most = torch.maximum(most, square)
    return param * keep - rate * mean / (most.sqrt() / root + eps), mean, square, most


MOMENTS = ("exp_avg", "exp_avg_sq")
ADAM = Rule(MOMENTS, (), True, lambda g: _serves(g) and not g["amsgrad"], _hyper, _adam_numbers, _adam)
AMSGRAD = Rule(
    (*MOMENTS, "max_exp_avg_sq"), (), True, lambda g: _serves(g) and g["amsgrad"], _hyper, _adam_numbers, _amsgrad
)


# -- NAdam ------------------------------------------------------------------------------


def _nadam_hyper(group: Group) -> tuple[float, ...]:
    return *_hyper(group), group["momentum_decay"]


def _nadam_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, beta1, beta2, eps, decay, decoupled, momentum_decay = hyper
    mu, mu_next = (beta1 * (1.0 - 0.5 * (s * momentum_decay * math.log(NADAM_BASE)).exp()) for s in (step, step + 1.0))
    product = scalars[0] * mu.float()  # torch, too, rounds it at each step
    so_far = product.double()
    of_grad, of_mean = lr * (1.0 - mu) / (1.0 - so_far), lr * mu_next / (1.0 - so_far * mu_next)
    keep, decay = _decays(lr, decay, decoupled)
    known = correction(beta2, step)
    return (keep, decay, 1.0 - beta1, beta2, 1.0 - beta2, of_grad, of_mean, known, eps), (product,)


def _nadam(param: Tensor, grad: Tensor, n: Columns, mean: Tensor, square: Tensor) -> Columns:
    keep, decay, weight, beta2, weight2, of_grad, of_mean, known, eps = n
    grad = torch.addcmul(grad, param, decay)
    mean, square = _moments(grad, mean, square, weight, beta2, weight2)
    root = (square / known).sqrt() + eps
    return param * keep - of_grad * grad / root - of_mean * mean / root, mean, square


NADAM = Rule(
    MOMENTS,
    ("mu_product",),
    True,
    lambda g: _serves(g, "momentum_decay"),
    _nadam_hyper,
    _nadam_numbers,
    _nadam,
    lambda g: {"mu_product": 1.0},
)


# -- RAdam, Adamax ------------------------------------------------------------------------


def _radam_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, beta1, beta2, eps, decay, decoupled = hyper
    correction2 = correction(beta2, step)
    most = 2.0 / (1.0 - beta2) - 1.0
    length = most - 2.0 * step * (step * beta2.log()).exp() / correction2
    # Below that length the root may be of a negative number; it is not taken then.
    shape = (length - 4.0) * (length - 2.0) * most / ((most - 4.0) * (most - 2.0) * length)
    known = length > RADAM_LENGTH
    rectified = torch.where(known, shape.clamp(min=0.0).sqrt() * correction2.sqrt(), 0.0)
    raw = torch.where(known, torch.zeros_like(step), 1.0)
    rate = lr / correction(beta1, step)
    return (*_decays(lr, decay, decoupled), 1.0 - beta1, beta2, 1.0 - beta2, rate, rectified, raw, eps), ()


def _radam(param: Tensor, grad: Tensor, n: Columns, mean: Tensor, square: Tensor) -> Columns:
    keep, decay, weight, beta2, weight2, rate, rectified, raw, eps = n
    mean, square = _moments(torch.addcmul(grad, param, decay), mean, square, weight, beta2, weight2)
    return param * keep - rate * mean * (rectified / (square.sqrt() + eps) + raw), mean, square


def _adamax_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, beta1, beta2, eps, decay, _ = hyper
    return (decay, 1.0 - beta1, beta2, eps, lr / correction(beta1, step)), ()


def _adamax(param: Tensor, grad: Tensor, n: Columns, mean: Tensor, most: Tensor) -> Columns:
    decay, weight, beta2, eps, rate = n
    grad = torch.addcmul(grad, param, decay)
    mean = mean.lerp(grad, weight)
    most = torch.maximum(most * beta2, grad.abs() + eps)
    return param - rate * mean / most, mean, most


RADAM = Rule(MOMENTS, (), True, _serves, _hyper, _radam_numbers, _radam)
ADAMAX = Rule(("exp_avg", "exp_inf"), (), True, _serves, _hyper, _adamax_numbers, _adamax)
