"""Building the parts of an optimizer: check everything first, then change the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixedopt import validate
from mixedopt.bucket import HALF_DTYPES
from mixedopt.closures import requires_closure
from mixedopt.distributed import ddp_of
from mixedopt.eager import EagerTier
from mixedopt.errors import StepOrderError
from mixedopt.loading import Fp32Loads
from mixedopt.loss_scale import LossScaleConfig, resolve_config
from mixedopt.masters import MasterWeights
from mixedopt.policy import CastPlan, CastPolicy, PolicyHandle, check_fits, handle_of, plan_casts, unwrap
from mixedopt.rollback import NormStatistics
from mixedopt.roster import Roster
from mixedopt.scaler import LossScaler, SharedLossScale
from mixedopt.tiers import Request, choose
from mixedopt.window import DropRule, Window


@dataclass(frozen=True, slots=True)
class Options:
    """The arguments of the optimizer; see there."""

    dtype: torch.dtype
    loss_scale: float | LossScaleConfig | SharedLossScale | None
    policy: CastPolicy | None
    max_grad_norm: float | None
    master: str
    gradients: str
    tier: str
    drop_bad_micro_steps: DropRule | None
    restore_buffers: bool


@dataclass(frozen=True, eq=False)  # no slots: a handle refers to it weakly
class Parts:
    """What an optimizer consists of.

    Attributes:
        handle: what was done to the model, by this optimizer or an earlier one.
        loads: the watch on fp32 checkpoints.
        shared: the loss scale, if others use it too.
        needs_closure: True iff ``step`` cannot do without.
    """

    roster: Roster
    tier: EagerTier
    handle: PolicyHandle | None
    loads: Fp32Loads | None
    shared: SharedLossScale | None
    needs_closure: bool

    @property
    def scaler(self) -> LossScaler:
        """The loss scale."""
        return self.tier.scaler

    @property
    def masters(self) -> MasterWeights:
        """The masters."""
        return self.roster.masters

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """The parameters, and their names."""
        return self.roster.names

    def all_masters(self) -> MasterWeights:
        """Return the masters of all optimizers of the model, up to date."""
        owners = [self] if self.handle is None or not self.handle.active else self.handle.owners
        return MasterWeights.union(owner.masters for owner in owners)

    def owned_elsewhere(self) -> set[nn.Parameter]:
        """Return the parameters that other optimizers of the model have."""
        owners = [] if self.handle is None else self.handle.owners
        return {param for owner in owners if owner is not self for param in owner.names}

    def check_in_force(self) -> None:
        """Raise ``StepOrderError`` if the conversion was undone."""
        if self.handle is not None and not self.handle.active:
            raise StepOrderError("the conversion was removed: the model is fp32 again. Continue with optimizer.inner.")

    def expect_backward_(self, loss: Tensor) -> None:
        """Check a loss, and make ready for its gradients. Raises and syncs as ``scale`` of the optimizer."""
        validate.loss(loss)
        self.check_in_force()
        window = self.tier.window
        window.check_not_unscaled("backward()")
        validate.not_scaled(loss, self.scaler, look=self.tier.untried)
        if window.takes:  # what was unfrozen needs its store before its first gradient
            with torch.no_grad():
                self.adopt_unfrozen_(without_gradient=True)
        window.end_micro_step_()

    def adopt_unfrozen_(self, *, without_gradient: bool = False) -> None:
        """Make masters for what was unfrozen; see ``Roster.adopt_unfrozen_``."""
        self.roster.adopt_unfrozen_(without_gradient=without_gradient)
        self.tier.window.follow_()

    @torch.no_grad()
    def measure_(self) -> None:
        """Judge the gradients ahead of ``step``, for a shared step. Syncs: one host read."""
        self.check_in_force()
        self.adopt_unfrozen_()
        self.tier.decision = self.tier.measure_()
        self.tier.measured = True

    def return_to_fp32_(self) -> None:
        """Leave the model fp32 and the inner optimizer in charge of it."""
        self.tier.window.close()
        self.roster.return_()
        self.tier.remove()
        if self.loads is not None:
            self.loads.remove()


def assemble(inner: torch.optim.Optimizer, model: nn.Module | None, options: Options) -> Parts:
    """Check all arguments, convert the model, hand masters to ``inner``.

    A model that another optimizer has converted is joined as it is.

    Raises:
        ValueError, TypeError: if an argument breaks its rule; nothing has been
            changed then.
    """
    _check(inner, model, options)
    root = None if model is None else unwrap(model)
    joined = None if root is None else handle_of(root)
    plan = None if root is None or joined else plan_casts(options.policy or CastPolicy.default(), root, options.dtype)
    names = validate.parameters(inner, root)
    planned = {} if plan is None else {p: plan.dtypes[n] for n, p in plan.model.named_parameters() if n in plan.dtypes}
    dtypes = {param: planned.get(param, param.dtype) for param in names}
    shared = options.loss_scale if isinstance(options.loss_scale, SharedLossScale) else None
    config = _config(options.loss_scale, dtypes)
    on_host = shared is not None or options.drop_bad_micro_steps is not None
    choice = choose(options.tier, Request(inner, frozenset(dtypes.values()), options.master == "split", on_host))
    scaler = choice.scaler(config, options.max_grad_norm)
    if plan is not None:
        check_fits(plan)
    elif joined is not None:
        validate.joining(joined, options.policy, options.dtype, scaler, names)
        scaler.tally = joined.owners[0].scaler.tally
    else:
        validate.warn_if_all_fp32(dtypes.values())

    _widen_(planned)
    roster = Roster(inner, root, names, dtypes, split=options.master == "split")
    tier = choice.make(
        inner,
        roster.masters,
        scaler,
        Window(roster.masters, options.gradients, options.drop_bad_micro_steps, narrow=choice.narrow),
        max_grad_norm=options.max_grad_norm,
        statistics=NormStatistics(root, kernels=choice.kernels)
        if root is not None and options.restore_buffers
        else None,
        shared=shared is not None,
    )
    loads = None if root is None else Fp32Loads(root, roster.masters)
    parts = Parts(roster, tier, joined or _converted(plan, model), loads, shared, requires_closure(inner))
    if parts.handle is not None:
        parts.handle.attach(parts)
        roster.refine_(parts.handle.original)
    return parts


def _widen_(planned: Mapping[nn.Parameter, torch.dtype]) -> None:
    """Make fp32 what the policy wants in fp32, before a master is made of it; the rest is cast with the model."""
    for param, dtype in planned.items():
        if dtype == torch.float32 and param.dtype in HALF_DTYPES:
            param.grad, param.data = None, param.data.float()


def _check(inner: torch.optim.Optimizer, model: nn.Module | None, options: Options) -> None:
    validate.optimizer(inner)
    validate.dtype(options.dtype)
    validate.max_grad_norm(options.max_grad_norm)
    validate.choice("master", options.master, ("fp32", "split"))
    validate.choice("gradients", options.gradients, ("autograd", "half", "fp32"))
    validate.choice("tier", options.tier, ("auto", "eager", "fused", "compiled"))
    validate.drop_rule(options.drop_bad_micro_steps, options.gradients)
    validate.ranks(options.gradients)
    validate.policy(options.policy, model)
    if requires_closure(inner):
        shared = isinstance(options.loss_scale, SharedLossScale)
        validate.closure_options(inner, options.max_grad_norm, shared=shared)


def _config(
    loss_scale: float | LossScaleConfig | SharedLossScale | None, dtypes: Mapping[nn.Parameter, torch.dtype]
) -> LossScaleConfig | SharedLossScale:
    if isinstance(loss_scale, SharedLossScale):
        return loss_scale
    return resolve_config(loss_scale, needs_scaling=torch.float16 in dtypes.values())


def _converted(plan: CastPlan | None, model: nn.Module | None) -> PolicyHandle | None:
    """Convert what no master has converted yet."""
    if plan is None or model is None:
        return None
    handle = PolicyHandle(plan, ddp_of(model))
    handle.cast_(keep_originals=True)
    return handle
