"""``MixedPrecisionOptimizer``: it owns the order of a step, nothing else.

scale -> backward -> gather -> finite check -> skip, or (unscale and clip ->
inner step -> publish) -> and only then the update of the loss scale.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mixedopt import checkpoint, validate
from mixedopt.errors import LossScaleError, StepOrderError
from mixedopt.gradients import clip_factor, may_overflow, unscale_factor
from mixedopt.groups import GroupView, init_protocol, rekey_
from mixedopt.loss_scale import (
    DynamicLossScale,
    LossScaleConfig,
    LossScaleState,
    StaticLossScale,
    init_state,
    resolve_config,
    state_from_dict,
    state_to_dict,
    update,
)
from mixedopt.masters import MasterWeights
from mixedopt.policy import CastPolicy, PolicyHandle, cast_parameters_, check_fits, unwrap
from mixedopt.report import StepReport
from mixedopt.rollback import FirstStep, NormStatistics
from mixedopt.window import Window

logger = logging.getLogger("mixedopt")

# Bits of the verdict, the one number that step() reads from the device.
FOUND_INF, EXHAUSTED, AMBIGUOUS, UNFIT, SCALED = 1, 2, 4, 8, 16

# Applied steps between two looks for a weight beyond the half range. A skip
# looks too, since such a weight makes the forward overflow.
RANGE_CHECK_INTERVAL = 64


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Train a half-precision model with any torch optimizer.

    The model's parameters become fp16 (or bf16); the inner optimizer owns fp32
    masters of the same shapes; gradients are unscaled once, in fp32; a step
    that meets an inf or NaN changes nothing but the loss scale.

    Invariants between calls:

    - every model parameter equals its master rounded to the parameter's dtype;
    - S moves only inside ``step()``, after everything else;
    - ``param_groups`` and the inner optimizer's groups hold the same values.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``model``,
            fresh or in mid-life. From now on it holds the masters; step this
            wrapper, not it. Gradients left over from before are dropped.
        model: converted in place by ``policy``. ``None`` leaves everything as
            it is (the ``model.half()`` workflow): the optimizer's parameters
            may be half and fp32 in any mix.
        dtype: what ``policy`` makes of the model, ``torch.float16`` or
            ``torch.bfloat16``. Unused without ``model``.
        loss_scale: ``None`` is dynamic if any parameter is fp16 and a constant
            1 otherwise, with the finite check kept; a number is static; or a
            ``StaticLossScale`` or ``DynamicLossScale``.
        policy: ``CastPolicy.default()`` if ``None``.
        max_grad_norm: clip the unscaled gradients to this global L2 norm.
        master: the kind of master kept between steps; so far ``"fp32"``.
        gradients: who holds them during backward; so far ``"autograd"``.
        tier: how ``step()`` runs; so far ``"auto"`` is ``"eager"``.
        restore_buffers: a skip also takes back the running statistics of norm
            layers inside ``model``.

    Raises:
        ValueError, TypeError: if an argument breaks its rule; nothing has been
            changed then.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> optimizer = MixedPrecisionOptimizer(inner, model, dtype=torch.bfloat16)
        >>> optimizer.zero_grad()
        >>> optimizer.backward(model(torch.ones(3, 4)).square().mean())
        >>> optimizer.step()
        >>> optimizer.last_step.applied
        True

    References: Micikevicius et al., 2018, arXiv:1710.03740.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: nn.Module | None = None,
        *,
        dtype: torch.dtype = torch.float16,
        loss_scale: float | LossScaleConfig | None = None,
        policy: CastPolicy | None = None,
        max_grad_norm: float | None = None,
        master: str = "fp32",
        gradients: str = "autograd",
        tier: str = "auto",
        restore_buffers: bool = True,
    ) -> None:
        validate.optimizer(optimizer)
        validate.dtype(dtype)
        validate.max_grad_norm(max_grad_norm)
        validate.choice("master", master, ("fp32",))
        validate.choice("gradients", gradients, ("autograd",))
        validate.choice("tier", tier, ("auto", "eager"))
        validate.policy(policy, model)
        root = None if model is None else unwrap(model)
        plan = None if root is None else (policy or CastPolicy.default()).plan(root, dtype)
        names = validate.parameters(optimizer, root)
        dtypes = {param: param.dtype if plan is None else plan.dtypes[name] for param, name in names.items()}
        config = resolve_config(loss_scale, needs_scaling=torch.float16 in dtypes.values())
        if plan is not None:
            check_fits(plan)

        init_protocol(self, optimizer)
        self._inner = optimizer
        self._root = root
        self._config: LossScaleConfig = config
        self._max_grad_norm = max_grad_norm
        self._names = names
        self._groups = [GroupView(optimizer, i, list(g["params"])) for i, g in enumerate(optimizer.param_groups)]
        self._masters = MasterWeights()
        self._proven = False  # True iff the inner optimizer has stepped over these masters
        self._window = Window(self._masters)
        self._adopt([param for param in names if param.requires_grad], dtypes)
        self._handle: PolicyHandle | None = None
        self._statistics: NormStatistics | None = None
        if plan is not None:
            cast_parameters_(plan, plan.dtypes)
            self._handle = PolicyHandle(plan)
            self._handle.attach(self._return_to_fp32)
            self._statistics = NormStatistics(plan.model) if restore_buffers else None
        home = next(iter(names)).device
        self._scale = init_state(config, home)
        self._one = torch.ones((), device=home)
        self._norm_before_edits: Tensor | None = None
        self._largest: Tensor | None = None
        self._applied_steps = 0
        self._skipped_steps = 0
        self._last_step = StepReport()
        self._warned_unscaled = False

    # -- the loop ---------------------------------------------------------

    def scale(self, losses: Any) -> Any:
        """Return the loss times S, in fp32 (a double stays double).

        Args:
            losses: a floating loss of one element, or a list or tuple of them.
                Not modified: the unscaled loss is yours to log.

        Raises:
            ValueError, TypeError: the loss has several elements or is not a
                floating tensor.
            StepOrderError: after ``unscale_``, when the window is closed to
                further gradients.

        Syncs: none.
        """
        if isinstance(losses, (list, tuple)):
            return type(losses)(self.scale(loss) for loss in losses)
        validate.loss(losses)
        self._check_not_unscaled("backward()")
        self._window.scaled_a_loss = True
        wide = losses if losses.dtype == torch.float64 else losses.float()
        return wide * self._scale.scale.to(losses.device, non_blocking=True)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Scale the loss and run backward, accumulating until ``step()``.

        Args:
            loss: as for ``scale``; the losses of a list share one backward.
            kwargs: as for ``torch.autograd.backward``, ``retain_graph`` say.

        Raises:
            ValueError, TypeError, StepOrderError: as ``scale``.

        Syncs: none.
        """
        torch.autograd.backward(self.scale(loss), **kwargs)

    def unscale_(self) -> None:
        """Move the gradients to the masters, divided by S.

        Afterwards ``master.grad`` (see ``named_masters``) is fp32 and unscaled
        and may be read and edited until ``step()``, which counts the edits; the
        model's ``.grad`` are ``None``. ``max_grad_norm`` does not need it.

        Raises:
            StepOrderError: if it was called in this window already.

        Syncs: none.
        """
        self._check_in_force()
        self._check_not_unscaled("unscale_()")
        with torch.no_grad():
            if self._collect():
                self._norm_before_edits = self._window.norm(self._scale.scale.device)
                self._window.multiply_(unscale_factor(self._scale.scale))
                self._window.expose_()
                self._window.unscaled = True

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients to the masters and publish them, or skip.

        Consumes the gradients: afterwards every ``.grad`` is ``None``. What
        happened stands in ``last_step``. Without any gradient nothing moves.

        Args:
            closure: evaluated once, before anything else, with gradients
                enabled; it calls ``backward`` of this optimizer.

        Returns:
            What the closure returned, else ``None``.

        Raises:
            LossScaleError: after too many skips in a row with S at its floor;
                weights and state are as before.
            ValueError: a gradient is sparse, a weight no longer fits its half
                format, or a parameter was moved; nothing has been changed.
            StepOrderError: a backward followed ``unscale_``.

        Syncs: one host read.
        """
        self._check_in_force()
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._step()
        return loss

    def _step(self) -> None:
        if not self._collect():
            self._finish(StepReport(reason="no gradients"))
            return
        scale = self._one if self._window.unscaled else self._scale.scale
        norm, following, verdict = self._judge(scale)
        if verdict & AMBIGUOUS:
            self._window.multiply_(unscale_factor(scale))
            scale = self._one
            norm, following, verdict = self._judge(scale)
        self._check_verdict(verdict)
        report = self._report(verdict, norm * unscale_factor(scale))
        if report.skipped:
            self._skip(following)
        else:
            self._apply(norm, scale)
        self._scale.assign_(following)
        culprit = self._window.first_bad() if verdict & EXHAUSTED else None
        self._finish(report)
        if verdict & EXHAUSTED:
            raise self._loss_scale_error(culprit)

    def _judge(self, scale: Tensor) -> tuple[Tensor, LossScaleState, int]:
        """Decide on the device, then read the decision: the one host read.

        Returns:
            The norm of the gradients in their present unit, the state of the
            loss scale after this step, and the verdict.
        """
        norm = self._window.norm(self._scale.scale.device)
        found_inf = ~norm.isfinite()
        if self._norm_before_edits is not None:
            found_inf = found_inf | ~self._norm_before_edits.isfinite()
        following = update(self._config, self._scale, found_inf)
        verdict = (
            FOUND_INF * found_inf
            + EXHAUSTED * (following.floor_skips >= self._config.max_consecutive_skips)
            + AMBIGUOUS * (~found_inf & may_overflow(norm, scale))
            + SCALED * (self._scale.scale != 1.0)
        )
        if self._largest is not None:
            verdict = verdict + UNFIT * self._largest.isinf()
        return norm, following, int(verdict.item())

    def _apply(self, norm: Tensor, scale: Tensor) -> None:
        if self._max_grad_norm is not None:
            self._window.multiply_(clip_factor(norm, scale, self._max_grad_norm))
        elif scale is not self._one and not self._is_scale_one():
            self._window.multiply_(unscale_factor(scale))
        active = self._window.expose_()
        try:
            self._step_inner()
        finally:
            for bucket, mine in zip(self._masters.buckets, active, strict=True):
                bucket.publish_(mine)
        self._applied_steps += 1
        if self._applied_steps % RANGE_CHECK_INTERVAL == 0:
            self._largest = self._masters.largest_half(self._scale.scale.device)

    def _step_inner(self) -> None:
        if self._proven:
            self._inner.step()
            return
        with FirstStep(self._inner, self._masters.buckets):
            self._inner.step()
        self._proven = True

    def _skip(self, following: LossScaleState) -> None:
        if self._statistics is not None:
            self._statistics.restore_()
        self._skipped_steps += 1
        self._largest = self._masters.largest_half(self._scale.scale.device)
        if logger.isEnabledFor(logging.INFO):
            logger.info(
                "step skipped: inf or NaN in the gradients; loss_scale %g -> %g (%d skipped, %d applied so far)",
                float(self._scale.scale),
                float(following.scale),
                self._skipped_steps,
                self._applied_steps,
            )

    def _collect(self) -> bool:
        for bucket in self._masters.buckets:
            bucket.adopt_edits_()
        self._adopt_unfrozen()
        return self._window.collect_()

    def _check_verdict(self, verdict: int) -> None:
        if verdict & UNFIT:
            self._window.close()
            self._masters.check_range()
        if verdict & SCALED and not (self._window.scaled_a_loss or self._warned_unscaled):
            self._warned_unscaled = True
            logger.warning(
                "step() met gradients of a loss that was not scaled, yet divides them by loss_scale. "
                "Call optimizer.backward(loss) instead of loss.backward()."
            )

    def _report(self, verdict: int, grad_norm: Tensor) -> StepReport:
        skipped = bool(verdict & FOUND_INF)
        reason = "inf or NaN in the gradients" if skipped else None
        return StepReport(not skipped, skipped, reason, grad_norm, self._scale.scale.clone())

    def _finish(self, report: StepReport) -> None:
        """Close the window: drop the gradients, start watching anew."""
        self._last_step = report
        self._norm_before_edits = None
        self._window.close()
        if self._statistics is not None:
            self._statistics.close()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window, the model's and the masters'.

        Args:
            set_to_none: ``False`` writes zeros into the model's gradients.
        """
        for param in self._names:
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad.detach_().zero_()
        self._norm_before_edits = None
        self._window.close()

    # -- what is so -------------------------------------------------------

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer; its parameters are the masters."""
        return self._inner

    @property
    def tier(self) -> str:
        """How ``step()`` runs."""
        return "eager"

    @property
    def policy_handle(self) -> PolicyHandle | None:
        """What was done to the model; ``remove()`` ends this wrapper.

        The model is then fp32 with the masters' values, and ``inner`` holds its
        parameters again and continues where this optimizer was.
        """
        return self._handle

    @property
    def loss_scale(self) -> float:
        """S, for the next loss. Syncs: one read."""
        return float(self._scale.scale)

    @property
    def last_step(self) -> StepReport:
        """What the last ``step()`` did."""
        return self._last_step

    @property
    def applied_steps(self) -> int:
        """Steps that reached the inner optimizer."""
        return self._applied_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that met an inf or NaN and changed nothing."""
        return self._skipped_steps

    @property
    def param_groups(self) -> list[GroupView]:  # type: ignore[override]
        """Live views of the inner optimizer's groups."""
        return self._groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """Model parameter -> the inner optimizer's state of its master."""
        held = {param: self._masters.of.get(param, param) for param in self._names}
        return {param: self._inner.state[key] for param, key in held.items() if key in self._inner.state}

    # -- masters ----------------------------------------------------------

    def named_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (canonical name, fp32 master); edit one, then ``publish()``."""
        return self._masters.named()

    def master_state_dict(self) -> dict[str, Any]:
        """Return the fp32 model's state dict: weights from the masters.

        Frozen half parameters are widened, buffers are as they are, tied names
        all appear. Loads into the unconverted model with ``strict=True``.
        Without ``model`` it holds the masters by position. Tensors are copies.
        """
        if self._root is None:
            return {name: master.detach().clone() for name, master in self.named_masters()}
        copies: dict[int, Tensor] = {}
        exported: dict[str, Any] = {}
        for name, value in self._root.state_dict(keep_vars=True).items():
            if isinstance(value, nn.Parameter):
                value = copies.setdefault(id(value), self._masters.widened(value))
            exported[name] = value.detach().clone() if isinstance(value, Tensor) and id(value) not in copies else value
        return exported

    def refresh_masters(self) -> None:
        """Take weights edited in the model into the masters.

        Only values whose half rounding differs from the weight are rewritten;
        moments and counters stay. In-place edits are noticed by ``step()``
        itself; edits through ``param.data`` need this call. Syncs: none.
        """
        with torch.no_grad():
            for bucket in self._masters.buckets:
                bucket.refresh_()

    def publish(self) -> None:
        """Write the masters into the model, after editing them.

        Raises:
            ValueError: a master does not fit the half format; nothing is
                written.

        Syncs: one read per parameter.
        """
        with torch.no_grad():
            self._masters.check_range()
            for bucket in self._masters.buckets:
                bucket.publish_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, with masters, in a group of their own.

        Args:
            param_group: as for torch; parameters keep their present dtype.

        Raises:
            ValueError, TypeError: as torch, or a parameter that cannot be
                trained here; nothing is changed.
        """
        self._check_in_force()
        group = {**param_group, "params": validate.group_params(param_group)}
        fresh = validate.new_parameters(group["params"], self._names, self._root, len(self._groups))
        self._inner.add_param_group(dict(group))
        self._names.update(fresh)
        self._groups.append(GroupView(self._inner, len(self._groups), group["params"]))
        self._adopt([p for p in fresh if p.requires_grad], {p: p.dtype for p in fresh})

    def _adopt(self, params: list[nn.Parameter], dtypes: Mapping[nn.Parameter, torch.dtype]) -> None:
        """Make masters for ``params`` and hand them to the inner optimizer."""
        named = [(self._names[param], param) for param in params]
        with torch.no_grad():
            self._masters.extend(named, [dtypes[param] for param in params])
        rekey_(self._inner, {param: self._masters.of[param] for param in params})
        self._proven = False

    def _adopt_unfrozen(self) -> None:
        if len(self._masters.of) < len(self._names):
            thawed = [p for p in self._names if p.grad is not None and p not in self._masters.of]
            if thawed:
                grads = [param.grad for param in thawed]
                self._adopt(thawed, {param: param.dtype for param in thawed})
                for param, grad in zip(thawed, grads, strict=True):
                    param.grad = grad

    def _return_to_fp32(self) -> None:
        """Leave the model fp32 and the inner optimizer in charge of it."""
        self._window.close()
        with torch.no_grad():
            self._masters.widen_()
        rekey_(self._inner, {master: param for param, master in self._masters.of.items()})
        if self._statistics is not None:
            self._statistics.remove()

    # -- checkpoints ------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue bit for bit.

        Torch-shaped (see ``mixedopt.checkpoint``); as in torch, its tensors are
        those in use, so save or deepcopy it before the next step.

        Raises:
            StepOrderError: inside an accumulation window, whose gradients the
                dict would lose.

        Syncs: one read per field of the loss scale.
        """
        self._check_no_gradients("state_dict()")
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        packed = checkpoint.pack(
            self._inner.state_dict(),
            [self._masters.of.get(param) for param in self._names],
            list(self._names.values()),
            {
                "loss_scale": state_to_dict(self._config, self._scale),
                "applied_steps": self._applied_steps,
                "skipped_steps": self._skipped_steps,
            },
        )
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> checkpoint.IncompatibleKeys:
        """Continue from ``state_dict``; its tensors are copied.

        Everything is checked before the first write: a load that fails changes
        nothing. A plain torch optimizer's dict leaves masters and scale alone.

        Args:
            state_dict: what ``state_dict()`` returned, or a torch optimizer's.
            strict: ``False`` loads what matches by name.

        Returns:
            The missing and the unexpected parameter names.

        Raises:
            CheckpointError: it does not fit; the message says where.
            StepOrderError: inside an accumulation window.

        Syncs: one read per parameter.
        """
        self._check_in_force()
        self._check_no_gradients("load_state_dict()")
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, dict(state_dict)) or state_dict
        masters = [self._masters.of.get(param) for param in self._names]
        sizes = [len(group["params"]) for group in self._groups]
        saved = checkpoint.unpack(state_dict, masters, list(self._names.values()), sizes, strict=strict)
        home = self._scale.scale.device
        if saved.extras is not None:
            config, scale = state_from_dict(saved.extras["loss_scale"], self._config, home)
        checkpoint.load_inner_(self._inner, saved.inner)
        if saved.extras is not None:
            self._config = config
            self._scale.assign_(scale)
            self._applied_steps = saved.extras["applied_steps"]
            self._skipped_steps = saved.extras["skipped_steps"]
        with torch.no_grad():
            for index, value in saved.masters.items():
                masters[index].copy_(value)  # type: ignore[union-attr]
            for bucket in self._masters.buckets:
                bucket.publish_()
        self._finish(StepReport())
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        return saved.keys

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "MixedPrecisionOptimizer cannot be copied or pickled: its masters share storage with the model. "
            "Build a new one and load this one's state_dict()."
        )

    # -- small checks -----------------------------------------------------

    def _is_scale_one(self) -> bool:
        return isinstance(self._config, StaticLossScale) and self._config.scale == 1.0

    def _check_in_force(self) -> None:
        if self._handle is not None and not self._handle.active:
            raise StepOrderError("the conversion was removed: the model is fp32 again. Continue with optimizer.inner.")

    def _check_not_unscaled(self, call: str) -> None:
        if self._window.unscaled:
            raise StepOrderError(f"{call} after unscale_(): the window's gradients are unscaled. Call step() first.")

    def _check_no_gradients(self, call: str) -> None:
        if self._window.unscaled or any(param.grad is not None for param in self._names):
            raise StepOrderError(
                f"{call} inside an accumulation window: its gradients would be lost. "
                "Call it after step(), or zero_grad() first."
            )

    def _loss_scale_error(self, culprit: str | None) -> LossScaleError:
        dynamic = isinstance(self._config, DynamicLossScale)
        where = f"at min_scale={self.loss_scale:.2g}" if dynamic else f"static at {self.loss_scale:g}"
        return LossScaleError(
            f"found_inf with loss_scale {where} ({int(self._scale.floor_skips)} skips in a row). "
            f"First bad parameter: {culprit!r}. Lower the learning rate, set max_grad_norm, or keep that module "
            "in fp32. Weights and state are as before."
        )
