"""Which tier serves an optimizer, and making it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch

from mixedopt.collecting import has_triton
from mixedopt.compiled import CompiledTier, check_rule
from mixedopt.device_scaler import DeviceScaler
from mixedopt.eager import EagerTier
from mixedopt.fused import FusedTier, is_fused
from mixedopt.kernel_tier import KernelTier
from mixedopt.loss_scale import LossScaleConfig
from mixedopt.rules import Rule, rule_for
from mixedopt.scaler import LossScaler, SharedLossScale

logger = logging.getLogger("mixedopt")


@dataclass(frozen=True, slots=True)
class Choice:
    """A tier that serves.

    Attributes:
        make: the tier's class, with what it needs beside the parts that all have.
        narrow: gradients that autograd holds are gathered as they are.
        home: the device that judges its steps, ``None`` for the host.
        kernels: kernels of ours can be made there.
    """

    make: Callable[..., EagerTier]
    narrow: bool = False
    home: torch.device | None = None
    kernels: bool = False

    def scaler(self, loss_scale: LossScaleConfig | SharedLossScale, max_grad_norm: float | None) -> LossScaler:
        """Return the loss scale, where it is to live."""
        if isinstance(loss_scale, SharedLossScale):
            return loss_scale.scaler
        return LossScaler(loss_scale) if self.home is None else DeviceScaler(loss_scale, self.home, max_grad_norm)


EAGER = Choice(EagerTier)


def choose(tier: str, inner: torch.optim.Optimizer, dtypes: Collection[torch.dtype], *, on_host: bool) -> Choice:
    """Return the tier to use: a named one insists, ``"auto"`` takes the fastest that serves.

    Args:
        tier: the argument of the optimizer.
        inner: before its parameters are replaced.
        dtypes: what they become.
        on_host: True iff the host must decide: the loss scale is shared, or bad
            micro-steps are dropped.

    Raises:
        ValueError: a named tier does not serve.
    """
    devices = {param.device for group in inner.param_groups for param in group["params"]}
    if tier == "eager":
        return EAGER
    if tier == "fused":
        return _fused(inner, devices, on_host=on_host)
    if tier == "compiled":
        return _compiled(inner, dtypes, devices, on_host=on_host)
    if on_host or any(device.type != "cuda" for device in devices):
        return EAGER
    return _fastest(inner, dtypes, devices)


def _fastest(
    inner: torch.optim.Optimizer, dtypes: Collection[torch.dtype], devices: Collection[torch.device]
) -> Choice:
    """Choose on a GPU, and say why."""
    name, reasons = type(inner).__name__, []
    for tier, make in (("compiled", functools.partial(_compiled, dtypes=dtypes)), ("fused", _fused)):
        try:
            choice = make(inner, devices=devices, on_host=False)
        except ValueError as error:
            reasons.append(str(error))
        else:
            logger.info("tier %r for %s%s", tier, name, f", since {reasons[0]}" if reasons else ": it has a rule")
            return choice
    logger.info("tier 'eager' for %s, since %s", name, " And ".join(reasons))
    return EAGER


def _fused(inner: torch.optim.Optimizer, devices: Collection[torch.device], *, on_host: bool) -> Choice:
    who = "MixedPrecisionOptimizer(tier='fused')"
    if not is_fused(inner):
        raise ValueError(
            f"{who}: {type(inner).__name__} does not skip by itself. Build Adam, AdamW, SGD or Adagrad of torch.optim "
            "with fused=True, or use tier='eager'."
        )
    if on_host:
        raise ValueError(f"{who}: a SharedLossScale and drop_bad_micro_steps decide on the host. Use tier='eager'.")
    home = _home(inner)
    kernels = home.type == "cuda" and has_triton() and all(device.type == "cuda" for device in devices)
    return Choice(functools.partial(FusedTier, kernels=kernels), home=home, kernels=kernels)


def _compiled(
    inner: torch.optim.Optimizer,
    dtypes: Collection[torch.dtype],
    devices: Collection[torch.device],
    *,
    on_host: bool,
) -> Choice:
    on_gpu = all(device.type == "cuda" for device in devices)
    if on_host or not on_gpu:
        return Choice(functools.partial(CompiledTier, check_rule(inner, dtypes)), narrow=True)
    rule = check_kernels(inner, dtypes, devices)
    return Choice(functools.partial(KernelTier, rule), home=_home(inner), kernels=True)


def check_kernels(
    inner: torch.optim.Optimizer, dtypes: Collection[torch.dtype], devices: Collection[torch.device]
) -> Rule:
    """Return the rule for ``inner``, after making its kernels, which takes seconds the first time.

    Raises:
        ValueError: there is no rule, or kernels cannot be made here.
    """
    rule = rule_for(inner)
    who = "MixedPrecisionOptimizer(tier='compiled')"
    if rule is None:
        raise ValueError(
            f"{who}: no rule covers this {type(inner).__name__}. There are rules for the element-wise optimizers of "
            "torch.optim, without capturable, differentiable, eps=0 and tensors as hyperparameters, and for what "
            "register_rule was told. Use tier='eager'."
        )
    if not has_triton():
        raise ValueError(f"{who}: Triton is not installed. Install it (pip install triton), or use tier='eager'.")
    try:
        from mixedopt.step_kernels import form_of, try_kernels

        for device in devices:
            try_kernels(form_of(rule, inner), device, {*dtypes, torch.float32})
    except Exception as error:
        raise ValueError(
            f"{who}: its kernels cannot be made here ({type(error).__name__}: {str(error).splitlines()[0]}). "
            "Install a C compiler, which Triton needs, or use tier='eager'."
        ) from error
    return rule


def _home(inner: torch.optim.Optimizer) -> torch.device:
    """Return the device of the first parameter."""
    first: Any = next(param for group in inner.param_groups for param in group["params"])
    device: torch.device = first.device
    return device
