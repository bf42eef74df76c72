"""Which tier serves an optimizer, and making it."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from mixedopt import host_kernels
from mixedopt.collecting import has_triton
from mixedopt.compiled import CompiledTier, check_rule, covering_rule
from mixedopt.device_scaler import DeviceScaler
from mixedopt.eager import EagerTier
from mixedopt.errors import in_one_line
from mixedopt.forms import StepKernels, form_of
from mixedopt.fused import FusedTier, is_fused
from mixedopt.kernel_tier import KernelTier
from mixedopt.loss_scale import LossScaleConfig
from mixedopt.native import native
from mixedopt.rules import Rule
from mixedopt.scaler import LossScaler, SharedLossScale

logger = logging.getLogger("mixedopt")


@dataclass(frozen=True, slots=True)
class Choice:
    """A tier that serves.

    Attributes:
        make: the tier's class, with what it needs beside the parts that all have.
        narrow: gradients that autograd holds are gathered as they are.
        home: the device that judges its steps, ``None`` for the host.
        kernels: kernels of ours can be made there, of a GPU.
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


@dataclass(frozen=True, slots=True)
class Request:
    """What a tier is to serve.

    Attributes:
        inner: before its parameters are replaced.
        dtypes: what they become.
        split: their masters are split.
        on_host: the host must decide: the loss scale is shared, or bad
            micro-steps are dropped.
    """

    inner: torch.optim.Optimizer
    dtypes: frozenset[torch.dtype]
    split: bool
    on_host: bool

    @property
    def devices(self) -> set[torch.device]:
        """Where the parameters are."""
        return {param.device for group in self.inner.param_groups for param in group["params"]}

    @property
    def on_gpu(self) -> bool:
        """True iff all parameters are on CUDA devices."""
        return all(device.type == "cuda" for device in self.devices)


def choose(tier: str, request: Request) -> Choice:
    """Return the tier to use: a named one insists, ``"auto"`` takes the fastest that serves.

    Raises:
        ValueError: a named tier does not serve.
    """
    if tier == "fused":
        return _fused(request)
    if tier == "compiled":
        return _compiled(request)
    if tier == "eager" or request.on_host or not request.on_gpu:
        return EAGER
    return _fastest(request)


def _fastest(request: Request) -> Choice:
    """Choose on a GPU, and say why."""
    name, reasons = type(request.inner).__name__, []
    for tier, make in (("compiled", _compiled), ("fused", _fused)):
        try:
            choice = make(request)
        except ValueError as error:
            reasons.append(str(error))
        else:
            logger.info("tier %r for %s%s", tier, name, f", since {reasons[0]}" if reasons else ": it has a rule")
            return choice
    logger.info("tier 'eager' for %s, since %s", name, " And ".join(reasons))
    return EAGER


def _fused(request: Request) -> Choice:
    who = "MixedPrecisionOptimizer(tier='fused')"
    if not is_fused(request.inner):
        raise ValueError(
            f"{who}: {type(request.inner).__name__} does not skip by itself. Build Adam, AdamW, SGD or Adagrad of "
            "torch.optim with fused=True, or use tier='eager'."
        )
    if request.on_host:
        raise ValueError(f"{who}: a SharedLossScale and drop_bad_micro_steps decide on the host. Use tier='eager'.")
    room = _room() if request.on_gpu and has_triton() and _kernels_work(request) else None
    make = functools.partial(FusedTier, kernels=room)
    return Choice(make, home=_home(request.inner), kernels=room is not None)


def _compiled(request: Request) -> Choice:
    if request.on_gpu and not request.on_host:
        make = functools.partial(KernelTier, _check_kernels(request), _room())
        return Choice(make, home=_home(request.inner), kernels=True)
    if (rule := _rule_on_host(request)) is not None:
        return Choice(functools.partial(KernelTier, rule, host_kernels), home=_home(request.inner))
    return Choice(functools.partial(CompiledTier, check_rule(request.inner, request.dtypes)), narrow=True)


def _room() -> StepKernels:
    """Return the room of a GPU's kernels, which needs Triton."""
    from mixedopt import step_kernels

    return step_kernels


def _rule_on_host(request: Request) -> Rule | None:
    """Return the rule of the optimizer, after making its kernels for a CPU; ``None``: leave it to torch.compile.

    Raises:
        ValueError: there is no rule.
    """
    if request.on_host or request.split or {device.type for device in request.devices} != {"cpu"}:
        return None
    rule = covering_rule(request.inner)
    try:
        host_kernels.try_kernels(form_of(rule, request.inner), request.dtypes | {torch.float32})
        native()  # for the walks of a step
    except Exception as error:
        logger.info("no kernels on a CPU, torch.compile instead: %s", in_one_line(error))
        return None
    return rule


def _check_kernels(request: Request) -> Rule:
    """Return the rule of the optimizer, after making its kernels, which takes seconds the first time.

    Raises:
        ValueError: there is no rule, or kernels cannot be made here.
    """
    who, inner = "MixedPrecisionOptimizer(tier='compiled')", request.inner
    rule = covering_rule(inner)
    if not has_triton():
        raise ValueError(f"{who}: Triton is not installed. Install it (pip install triton), or use tier='eager'.")
    try:
        from mixedopt.step_kernels import try_kernels

        for device in request.devices:
            try_kernels(form_of(rule, inner), device, request.dtypes | {torch.float32}, split=request.split)
    except Exception as error:
        raise ValueError(
            f"{who}: its kernels cannot be made here ({in_one_line(error)}). "
            "Install a C compiler, which Triton needs, or use tier='eager'."
        ) from error
    return rule


def _kernels_work(request: Request) -> bool:
    """True iff kernels can be made here; torch's operations serve without, in more passes."""
    from mixedopt.step_kernels import try_judging

    try:
        for device in request.devices:
            try_judging(device, request.dtypes)
    except Exception as error:
        logger.info("no kernels on %s, torch's operations instead: %s", device, str(error).splitlines()[0])
        return False
    return True


def _home(inner: torch.optim.Optimizer) -> torch.device:
    """Return the device of the first parameter."""
    first: Any = next(param for group in inner.param_groups for param in group["params"])
    device: torch.device = first.device
    return device
