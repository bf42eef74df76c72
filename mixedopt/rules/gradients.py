"""Rules that go along the gradient, or by its sign: SGD, ASGD, Rprop.

References: SGD with momentum as in torch.optim; ASGD, Polyak & Juditsky 1992;
Rprop, Riedmiller & Braun 1993.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixedopt.rules.rule import Group, Rule, plain

Columns = tuple[Tensor, ...]


# -- SGD --------------------------------------------------------------------------------


def _sgd_hyper(group: Group) -> tuple[float, ...]:
    return group["lr"], group["weight_decay"]


def _sgd_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, decay = hyper
    return (decay, lr), ()


def _sgd(param: Tensor, grad: Tensor, n: Columns) -> Columns:
    decay, rate = n
    return (torch.addcmul(param, torch.addcmul(grad, param, decay), -rate),)


def _momentum_hyper(group: Group) -> tuple[float, ...]:
    return group["lr"], group["weight_decay"], group["momentum"], group["dampening"], float(group["nesterov"])


def _momentum_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    lr, decay, momentum, dampening, nesterov = hyper
    first = step == 1  # torch then takes the gradient itself as the buffer
    kept, weight = torch.where(first, 0.0, momentum), torch.where(first, 1.0, 1.0 - dampening)
    return (decay, kept, weight, torch.where(nesterov != 0, momentum, 1.0), nesterov, lr), ()


def _momentum(param: Tensor, grad: Tensor, n: Columns, buffer: Tensor) -> Columns:
    decay, kept, weight, of_buffer, of_grad, rate = n
    grad = torch.addcmul(grad, param, decay)
    buffer = torch.addcmul(buffer * kept, grad, weight)
    return torch.addcmul(param, torch.addcmul(of_grad * grad, buffer, of_buffer), -rate), buffer


MOMENTUM = Rule(
    ("momentum_buffer",),
    (),
    False,
    lambda g: plain(g, "lr", "weight_decay", "momentum", "dampening") and g["momentum"] != 0,
    _momentum_hyper,
    _momentum_numbers,
    _momentum,
)
SGD = Rule(
    (),
    (),
    False,
    lambda g: plain(g, "lr", "weight_decay", "momentum") and g["momentum"] == 0,
    _sgd_hyper,
    _sgd_numbers,
    _sgd,
)


# -- ASGD -------------------------------------------------------------------------------


def _asgd_hyper(group: Group) -> tuple[float, ...]:
    return group["lr"], group["weight_decay"], group["lambd"], group["alpha"], group["t0"]


def _asgd_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    """The step uses eta and mu as the last one left them; so a new rate counts one step late, as in torch."""
    lr, decay, lambd, alpha, t0 = hyper
    eta, mu = (scalar.double() for scalar in scalars)
    next_eta = lr * (-alpha * (lambd * lr * step).log1p()).exp()
    next_mu = 1.0 / (step - t0).clamp(min=1.0)
    return (decay, 1.0 - lambd * eta, eta, mu), (next_eta.float(), next_mu.float())


def _asgd(param: Tensor, grad: Tensor, n: Columns, mean: Tensor) -> Columns:
    decay, keep, rate, mu = n
    param = torch.addcmul(param * keep, torch.addcmul(grad, param, decay), -rate)
    # From zero, and until t0, the mean is the parameter, to the bit.
    return param, torch.where(mu == 1.0, param, mean + mu * (param - mean))


ASGD = Rule(
    ("ax",),
    ("eta", "mu"),
    True,
    lambda g: plain(g, "lr", "weight_decay", "lambd", "alpha", "t0"),
    _asgd_hyper,
    _asgd_numbers,
    _asgd,
    lambda g: {"eta": g["lr"], "mu": 1.0},
)


# -- Rprop ------------------------------------------------------------------------------


def _rprop_serves(group: Group) -> bool:
    return plain(group, "lr") and all(isinstance(n, (int, float)) for n in (*group["etas"], *group["step_sizes"]))


def _rprop_hyper(group: Group) -> tuple[float, ...]:
    return *group["etas"], *group["step_sizes"]


def _rprop_numbers(step: Tensor, hyper: Columns, scalars: Columns) -> tuple[Columns, Columns]:
    return hyper, ()


def _rprop(param: Tensor, grad: Tensor, n: Columns, last: Tensor, size: Tensor) -> Columns:
    shrink, grow, least, most = n
    along = grad * last
    size = size * torch.where(along > 0, grow, torch.where(along < 0, shrink, 1.0))
    size = torch.minimum(torch.maximum(size, least), most)
    grad = torch.where(along < 0, 0.0, grad)  # after a turn it rests for one step
    return param - grad.sign() * size, grad, size


RPROP = Rule(
    ("prev", "step_size"),
    (),
    True,
    _rprop_serves,
    _rprop_hyper,
    _rprop_numbers,
    _rprop,
    lambda g: {"step_size": g["lr"]},
)
