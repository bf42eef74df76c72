"""``MixedPrecisionOptimizer``: what users hold; a real torch optimizer.

The order of a step stands in ``mixedopt.eager``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from mixedopt import checkpoint
from mixedopt.assembly import Options, assemble
from mixedopt.closures import evaluates_once, step_with_
from mixedopt.errors import StepOrderError
from mixedopt.export import master_model, master_state_dict, trained_model
from mixedopt.groups import GroupView, init_protocol, watched
from mixedopt.loss_scale import LossScaleConfig
from mixedopt.policy import CastPolicy, PolicyHandle
from mixedopt.report import StepReport
from mixedopt.scaler import SharedLossScale


class MixedPrecisionOptimizer(torch.optim.Optimizer):
    """Train a half-precision model with any torch optimizer.

    The model's parameters become fp16 (or bf16); the inner optimizer owns fp32
    masters of the same shapes; gradients are unscaled once, in fp32; a step
    that meets an inf or NaN changes nothing but the loss scale.

    Invariants between calls:

    - every model parameter equals its master rounded to its dtype;
    - S moves only inside ``step()``, at its end;
    - ``param_groups`` and the inner optimizer's groups hold the same values.

    Args:
        optimizer: any ``torch.optim.Optimizer`` over parameters of ``model``,
            fresh or in mid-life. From now on it holds the masters; step this
            wrapper, not it. Gradients left over from before are dropped.
        model: converted in place by ``policy``; if another optimizer has done
            that, joined as it is. ``None`` leaves everything as it is (the
            ``model.half()`` workflow): parameters may be half and fp32.
        dtype: what ``policy`` makes of the model, ``torch.float16`` or ``torch.bfloat16``. Unused without ``model``.
        loss_scale: ``None`` is dynamic if any parameter is fp16 and a constant
            1 otherwise, with the finite check kept; a number is static; or a
            ``StaticLossScale``, ``DynamicLossScale`` or ``SharedLossScale``.
        policy: ``CastPolicy.default()`` if ``None``.
        max_grad_norm: clip the unscaled gradients to this global L2 norm.
        master: kept between steps, ``"fp32"``, or ``"split"``: the weight and a 16-bit remainder, 2 bytes a value
            less. A step rounds masters to such pairs, which is exact for most; in-place edits of weights keep
            remainders; ``inner.param_groups`` shows NaN between steps. See ``named_masters``.
        gradients: who holds them during backward. ``"autograd"``: ``.grad``, until ``step()``. ``"half"``: this
            optimizer, in the parameter's dtype; ``"fp32"``: a flat buffer, so that sums of micro-steps lose nothing.
        tier: how ``step()`` runs: ``"eager"``; ``"fused"``, for fused optimizers of torch; ``"compiled"``, in one
            pass, for those with a ``Rule``. ``"auto"``: eager on a CPU, the fastest that serves on a GPU.
        drop_bad_micro_steps: leave micro-steps with an inf or NaN out of the sum and apply the rest, multiplied by
            what this function of (kept, total) micro-steps returns. Needs ``gradients="fp32"``. ``None`` skips the
            whole window.
        restore_buffers: a skip also takes back the running statistics of norm layers inside ``model``.

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
        loss_scale: float | LossScaleConfig | SharedLossScale | None = None,
        policy: CastPolicy | None = None,
        max_grad_norm: float | None = None,
        master: str = "fp32",
        gradients: str = "autograd",
        tier: str = "auto",
        drop_bad_micro_steps: Callable[[int, int], float] | None = None,
        restore_buffers: bool = True,
    ) -> None:
        kinds = (master, gradients, tier)
        options = Options(dtype, loss_scale, policy, max_grad_norm, *kinds, drop_bad_micro_steps, restore_buffers)
        self._parts = assemble(optimizer, model, options)
        self._roster, self._tier, self._handle = self._parts.roster, self._parts.tier, self._parts.handle
        init_protocol(self, optimizer)
        if self._parts.shared is not None:
            self._parts.shared.join_(self, self._parts)

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
                further gradients; or the loss was scaled already, by this
                method or by ``torch.amp.GradScaler``.

        Syncs: none; before the first step one, if the loss is a product with a
        constant 0-d tensor.
        """
        if isinstance(losses, (list, tuple)):
            return type(losses)(self.scale(loss) for loss in losses)
        self._parts.expect_backward_(losses)
        return self._tier.scaler.scale(losses)

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Run backward of the loss times S, accumulating until ``step()``.

        Args:
            loss: as for ``scale``; the losses of a list share one backward.
            kwargs: as for ``torch.autograd.backward``, ``retain_graph`` say.

        Raises:
            ValueError, TypeError, StepOrderError: as ``scale``. Syncs: none.
        """
        losses = loss if isinstance(loss, (list, tuple)) else (loss,)
        if kwargs.get("grad_tensors") is not None:
            return torch.autograd.backward(self.scale(losses), **kwargs)
        for each in losses:
            self._parts.expect_backward_(each)
        pairs = [self._tier.scaler.seeded(each) for each in losses]
        kwargs["grad_tensors"] = [seed for _, seed in pairs]
        return torch.autograd.backward([wide for wide, _ in pairs], **kwargs)

    def unscale_(self) -> None:
        """Move the gradients to the masters, divided by S.

        Afterwards ``master.grad`` (see ``named_masters``) is fp32 and unscaled
        and may be read and edited until ``step()``, which counts the edits; the
        model's ``.grad`` are ``None``. ``max_grad_norm`` does not need it.

        Raises:
            StepOrderError: it was called in this window already. Syncs: none.
        """
        self._parts.check_in_force()
        self._tier.window.check_not_unscaled("unscale_()")
        with torch.no_grad():
            self._parts.adopt_unfrozen_()
            self._tier.unscale_()

    @watched
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients to the masters and publish them, or skip.

        Consumes the gradients: afterwards every ``.grad`` is ``None``. What
        happened stands in ``last_step``. Without any gradient nothing moves.

        Args:
            closure: drops the gradients, computes the loss, calls ``backward`` of this optimizer and returns the loss,
                unscaled. It is evaluated with gradients enabled: once, before anything else, or as often as an inner
                optimizer such as LBFGS asks for it, each time at published weights. An inf or NaN in any evaluation
                skips; a line search is told that the point is bad.

        Returns:
            What the closure returned, else ``None``; with an inner optimizer
            that evaluates it, what that one returned.

        Raises:
            LossScaleError: after too many skips in a row with S at its floor;
                weights and state are as before.
            ValueError: a parameter was moved, and nothing has been changed; or a weight has left the half range, at
                most ``RANGE_CHECK_INTERVAL`` applied steps ago.
            StepOrderError: a backward followed ``unscale_``; the loss scale is
                shared; or a closure added to the gradients of its last call.
            TypeError: the inner optimizer needs a closure.

        Syncs: one host read; with a closure that is evaluated several times,
        one for each.
        """
        self._parts.check_in_force()
        self._check_turn(closure)
        if self._handle is not None:
            self._handle.forget_originals()
        if closure is not None and not evaluates_once(self._roster.inner):
            with torch.no_grad():
                self._parts.adopt_unfrozen_(without_gradient=True)
                return step_with_(self._tier, closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            self._parts.adopt_unfrozen_()
            self._tier.step_()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients of the window; ``set_to_none=False`` leaves zeros where there was one.

        Unscaled and droppable gradients are dropped either way.
        """
        if set_to_none:
            self._roster.drop_grads_()
            self._tier.drop_gradients_()
            return
        for grad in (param.grad for param in self._roster.names if param.grad is not None):
            grad.detach_().zero_()
        self._tier.zero_gradients_()

    # -- what is so -------------------------------------------------------

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer; its parameters are the masters. Syncs: none in the eager tier."""
        self._tier.settle_()
        return self._roster.inner

    @property
    def tier(self) -> str:
        """How ``step()`` runs."""
        return self._tier.name

    @property
    def _step_supports_amp_scaling(self) -> NoReturn:
        """Read by ``torch.amp.GradScaler.step`` alone, before it touches a gradient."""
        raise TypeError(
            "MixedPrecisionOptimizer was given to torch.amp.GradScaler.step(): it scales and checks by itself. Remove "
            "the GradScaler and call optimizer.backward(loss) and optimizer.step()."
        )

    @property
    def policy_handle(self) -> PolicyHandle | None:
        """What was done to the model; ``remove()`` ends this wrapper.

        The model is then fp32 with the masters' values, and ``inner`` holds its
        parameters again and continues where this optimizer was.
        """
        return self._handle

    @property
    def loss_scale(self) -> float:
        """S, for the next loss. Syncs: none in the eager tier."""
        return float(self._tier.scaler.state.scale)

    @property
    def last_step(self) -> StepReport:
        """What the last ``step()`` did."""
        return self._tier.last_step

    @property
    def applied_steps(self) -> int:
        """Steps that reached the inner optimizer."""
        return self._tier.applied_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that met an inf or NaN and changed nothing."""
        return self._tier.skipped_steps

    @property
    def param_groups(self) -> list[GroupView]:  # type: ignore[override]
        """Live views of the inner optimizer's groups."""
        return self._roster.groups

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        """Model parameter -> the inner optimizer's state of its master."""
        self._tier.settle_()
        return self._roster.state()

    # -- masters ----------------------------------------------------------

    def named_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Iterate over (canonical name, fp32 master) in group order; edit, then ``publish()``.

        Split masters are joined for that until the next applied step, ``publish()`` or load, then NaN.
        """
        return self._roster.named_masters()

    def master_state_dict(self, model: nn.Module | None = None) -> dict[str, Any]:
        """Return the fp32 model's state dict: weights from the masters.

        Frozen half parameters are widened, tied names all appear, tensors are
        copies; it loads into the unconverted model with ``strict=True``. An
        optimizer that was built without ``model`` needs it here for the names.

        Raises:
            ValueError: ``model`` is not what this optimizer trains.
        """
        root = self._roster.root if model is None else trained_model(model, self._roster.names)
        return master_state_dict(self._parts.all_masters(), root)

    def master_model(self) -> nn.Module:
        """Return the fp32 model over the masters: for evaluation, and for averages.

        Its parameters share storage with the masters and its buffers are the model's, so it follows the training and
        costs no memory; frozen half parameters are copies: ask anew after unfreezing or adding some, and after each
        step if masters are split (see ``named_masters``). It has no casts, and nothing in it requires a gradient.

        Raises:
            ValueError: the optimizer was built without ``model``.

        Example:
            >>> model = torch.nn.Linear(4, 2)
            >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
            >>> masters = MixedPrecisionOptimizer(inner, model).master_model()
            >>> average = torch.optim.swa_utils.AveragedModel(masters)  # an average of the masters
            >>> average.update_parameters(masters)  # after each step
        """
        if self._roster.root is None:
            raise ValueError("master_model(): the optimizer has no model. Pass model= when building it.")
        self._parts.check_in_force()
        return master_model(self._parts.all_masters(), self._roster.root)

    def refresh_masters(self) -> None:
        """Take weights edited in the model into the masters.

        Only values whose half rounding differs from the weight are rewritten (of split masters none: the remainder
        stays); moments and counters stay. In-place edits are noticed by ``step()`` itself; edits through
        ``param.data`` need this call. Syncs: none.
        """
        self._parts.check_in_force()
        self._roster.masters.refresh_()

    def publish(self) -> None:
        """Write the masters into the model, after editing them.

        Raises:
            ValueError: a master does not fit the half format; nothing is
                written. Syncs: one read per parameter.
        """
        self._parts.check_in_force()
        with self._roster.masters.opened():
            self._roster.masters.adopt_edits_()
            self._roster.masters.check_range()
            self._roster.masters.publish_()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of any supported dtype, with masters, as torch does.

        Raises:
            ValueError, TypeError: as torch, or a parameter cannot be trained
                here; nothing is changed.
        """
        self._parts.check_in_force()
        self._roster.add_group_(param_group, self._parts.owned_elsewhere())
        self._tier.window.follow_()

    # -- checkpoints ------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to continue bit for bit.

        Torch-shaped (see ``mixedopt.checkpoint``); as in torch, its tensors are those in use (split masters: copies),
        so save or deepcopy it before the next step.

        Raises:
            StepOrderError: inside a window, whose gradients it would lose.
        """
        self._check_between_steps("state_dict()")
        self._roster.masters.adopt_edits_()
        for before in self._optimizer_state_dict_pre_hooks.values():
            before(self)
        about = {"policy": self._policy(), **self._tier.to_dict()}
        packed = checkpoint.pack(self.inner, self._roster.places(values=True), about)
        for after in self._optimizer_state_dict_post_hooks.values():
            packed = after(self, packed) or packed
        return packed

    def load_state_dict(  # type: ignore[override]
        self, state_dict: Mapping[str, Any], *, strict: bool = True
    ) -> checkpoint.IncompatibleKeys:
        """Continue from ``state_dict``; its tensors are copied.

        Everything is checked before the first write: a load that fails changes
        nothing. A plain torch optimizer's dict leaves masters and scale alone.

        Returns:
            The missing and the unexpected parameter names; with
            ``strict=False`` what matches by name is loaded all the same.

        Raises:
            CheckpointError: it does not fit; the message says where.
            StepOrderError: inside a window. Syncs: one read per parameter.
        """
        self._check_between_steps("load_state_dict()")
        self._roster.masters.adopt_edits_()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, dict(state_dict)) or state_dict
        saved = checkpoint.unpack(state_dict, self.inner, self._roster.places(), strict=strict, policy=self._policy())
        moving = self._tier.from_dict(saved.extras, strict=strict)
        checkpoint.load_inner_(self.inner, saved)
        if self._parts.shared is not None:
            self._parts.shared.follow_(moving.state, stepped=[self._tier])
        self._roster.load_masters_(saved.masters)
        self._tier.window.follow_()
        self._tier.load_(moving)
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)
        if saved.extras is None:
            checkpoint.log_plain(state_dict)
        return saved.keys

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "MixedPrecisionOptimizer cannot be copied or pickled: its masters share storage with the model. "
            "Build a new one and load this one's state_dict()."
        )

    def _policy(self) -> str | None:
        return None if self._parts.handle is None else self._parts.handle.plan.text

    # -- small checks -----------------------------------------------------

    def _check_turn(self, closure: object) -> None:
        """Raise if ``step`` is not to be called now, or not so."""
        if self._parts.shared is not None and not self._tier.measured:
            raise StepOrderError(
                "step() of an optimizer with a SharedLossScale: the scale would move once for each of them. "
                "Call shared.step(optimizer, ...) with all that share this iteration."
            )
        if closure is None and self._parts.needs_closure:
            raise TypeError(
                f"step(): {type(self.inner).__name__} evaluates the model several times. Pass a closure that calls "
                "zero_grad(), computes the loss, calls backward(loss) of this optimizer and returns the loss."
            )

    def _check_between_steps(self, call: str) -> None:
        self._parts.check_in_force()
        if self._tier.window.holds or self._roster.has_gradients():
            raise StepOrderError(
                f"{call} inside a window would lose its gradients. Call it after step(), or zero_grad() first."
            )
