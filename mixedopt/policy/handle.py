"""Converting a model, and the way back.

``PolicyHandle`` holds what was done to a model, and undoes it; ``convert`` is
for a model without an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mixedopt.casting import CastInputs, CastOutputs, RefuseAssign, RootOutputs, WeakHook
from mixedopt.distributed import check_rebuildable, ddp_of, rebuild_
from mixedopt.errors import shown
from mixedopt.masters import HALF_DTYPES, MasterWeights
from mixedopt.policy.plan import CastPlan, check_fits, plan_casts
from mixedopt.policy.rules import LOSSES, CastPolicy


class Owner(Protocol):
    """An optimizer that holds masters of a converted model."""

    @property
    def scaler(self) -> Any:
        """Its loss scale."""

    @property
    def masters(self) -> MasterWeights:
        """Its masters."""

    @property
    def names(self) -> Mapping[nn.Parameter, str]:
        """Its parameters, and their names."""

    def return_to_fp32_(self) -> None:
        """Write the masters into the model and give the inner optimizer back."""


class PolicyHandle:
    """What was done to a model: its hooks, and the way back.

    Args:
        plan: the decisions; its hooks are registered here.
        ddp: the wrapper around the model, whose buckets follow its dtypes.
    """

    def __init__(self, plan: CastPlan, ddp: DistributedDataParallel | None = None) -> None:
        self.plan = plan
        self._ddp = ddp
        self._handles: list[RemovableHandle] = []
        self._owners: list[weakref.ref[Owner]] = []
        self._originals: dict[nn.Parameter, Tensor] = {}
        for module in plan.islands:
            self._hook_island(module)
        for module in plan.half_layers:
            self._before(module, plan.dtype)
        self._hook_root()

    @property
    def active(self) -> bool:
        """True iff the conversion is in force."""
        return bool(self._handles)

    @property
    def owners(self) -> list[Owner]:
        """The optimizers that hold masters of this model."""
        return [owner for owner in (ref() for ref in self._owners) if owner is not None]

    def attach(self, owner: Owner) -> None:
        """Let ``remove`` take the weights back from ``owner`` first. It is not kept alive."""
        self._owners.append(weakref.ref(owner))

    def cast_(self, *, keep_originals: bool = False) -> None:
        """Give every parameter its planned dtype, each in its own storage.

        Args:
            keep_originals: hold the fp32 values of trained parameters until
                ``forget_originals``: another optimizer may make masters of them.
        """
        params = dict(self.plan.model.named_parameters())
        for name, dtype in self.plan.dtypes.items():
            param = params[name]
            if param.dtype != dtype:
                if keep_originals and param.requires_grad and param.dtype == torch.float32:
                    self._originals[param] = param.data
                param.grad = None
                param.data = param.data.to(dtype)
        if self._ddp is not None:
            rebuild_(self._ddp)

    def original(self, param: nn.Parameter) -> Tensor | None:
        """Return the fp32 values that ``param`` had before it became half, if they are still held."""
        return self._originals.pop(param, None)

    def forget_originals(self) -> None:
        """Free what no other optimizer has asked for."""
        self._originals.clear()

    def remove(self) -> None:
        """Undo the conversion: no hooks, fp32 parameters.

        Weights come back from the masters when an optimizer is attached, else
        they are the half values widened. Calling it again does nothing. A
        ``DistributedDataParallel`` made since the conversion must be made anew.

        Raises:
            ValueError: a parameter was moved; nothing has been undone.
        """
        if not self.active:
            return
        for owner in self.owners:
            owner.masters.adopt_edits_()  # may refuse, before anything is changed
        for handle in self._handles:
            handle.remove()
        for owner in self.owners:
            owner.return_to_fp32_()
        self._widen_halves()
        if self._ddp is not None:
            rebuild_(self._ddp)
        self._handles = []

    def _widen_halves(self) -> None:
        for param in self.plan.model.parameters():
            if param.dtype in HALF_DTYPES:
                param.grad = None
                param.data = param.data.float()

    def _hook_island(self, module: nn.Module) -> None:
        self._before(module, torch.float32)
        if module is not self.plan.model and not isinstance(module, LOSSES):
            self._handles.append(module.register_forward_hook(CastOutputs(self.plan.dtype)))

    def _hook_root(self) -> None:
        root = self.plan.model
        if root not in self.plan.islands:
            self._before(root, self.plan.dtype)
        self._handles.append(root.register_forward_hook(RootOutputs(torch.float32, self)))
        for module in root.modules():  # a submodule may be loaded on its own
            self._handles.append(module.register_load_state_dict_pre_hook(RefuseAssign()))  # type: ignore[no-untyped-call]

    def _before(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._handles.append(module.register_forward_pre_hook(CastInputs(dtype), with_kwargs=True))


def convert(model: nn.Module, dtype: torch.dtype = torch.float16, policy: CastPolicy | None = None) -> PolicyHandle:
    """Convert a model in place: parameters by policy, casts between them.

    ``MixedPrecisionOptimizer(optimizer, model)`` does this itself, keeping fp32
    masters; use ``convert`` for inference or with your own training code.

    Args:
        model: any module; its floating buffers keep their dtype.
        dtype: fp16 or bf16.
        policy: ``CastPolicy.default()`` if ``None``.

    Returns:
        A handle whose ``remove()`` undoes it.

    Raises:
        ValueError: as ``plan_casts``, or if a weight exceeds the half
            range; nothing is changed.
    """
    check_model_and_policy("convert", model, policy)
    plan = plan_casts(policy or CastPolicy.default(), unwrap(model), dtype)
    check_fits(plan)
    handle = PolicyHandle(plan, ddp_of(model))
    handle.cast_()
    return handle


def handle_of(model: nn.Module) -> PolicyHandle | None:
    """Return the handle of a conversion in which optimizers hold masters, if ``model`` has one."""
    handles = (hook.handle for hook in model._forward_hooks.values() if isinstance(hook, RootOutputs))
    return next((h for h in handles if isinstance(h, PolicyHandle) and h.active and h.owners), None)


def remove_casts_(model: nn.Module) -> None:
    """Take our hooks off a copy of a converted model."""
    ours = (CastInputs, CastOutputs, RefuseAssign, WeakHook)
    for module in model.modules():
        for hooks in (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._load_state_dict_pre_hooks,
            module._load_state_dict_post_hooks,
        ):
            for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), ours)]:
                del hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def check_model_and_policy(who: str, model: object, policy: object) -> None:
    """Raise ``TypeError`` unless these are a module and a policy or ``None``."""
    if policy is not None and not isinstance(policy, CastPolicy):
        raise TypeError(f"{who}(policy={policy!r}): must be a CastPolicy. Start from CastPolicy.default().")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}(model={shown(model)}): must be an nn.Module. Pass the model the optimizer trains.")
    if (ddp := ddp_of(model)) is not None:
        check_rebuildable(ddp)
