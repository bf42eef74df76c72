"""Converting a model, and the way back.

``PolicyHandle`` holds what was done to a model, and undoes it; ``convert`` is
for a model without an optimizer.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mixedopt import scopes
from mixedopt.bucket import HALF_DTYPES
from mixedopt.casting import (
    CastInputs,
    CastOutputs,
    CastParameters,
    RefuseAssign,
    RootOutputs,
    ShowParameters,
    WeakHook,
    drop_hooks_,
    hookable,
)
from mixedopt.distributed import check_rebuildable, ddp_of, rebuild_
from mixedopt.errors import shown
from mixedopt.flat import plan_layout
from mixedopt.layers import PLAIN
from mixedopt.masters import MasterWeights
from mixedopt.policy.plan import CastPlan, ModuleCasts, check_fits, plan_casts
from mixedopt.policy.ranks import QUANTISED
from mixedopt.policy.rules import CastPolicy
from mixedopt.tracing import take_off_

OURS = (CastInputs, CastOutputs, CastParameters, ShowParameters, RefuseAssign, WeakHook, *scopes.HOOKS)


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
        self._dtypes: dict[nn.Parameter, torch.dtype] = {}
        self._scopes = _scopes(plan)
        for casts in plan.casts:
            self._hook(casts)
        self._hook(plan.root, lower=True)  # before the scopes: our own casts are not code of the model
        if self._scopes is not None:
            scopes.install(plan.model, self._scopes)
        self._hook_root()

    def __repr__(self) -> str:
        """Say which policy, which format, and whether it is in force."""
        state = "" if self.active else ", removed"
        return f"PolicyHandle({self.plan.text!r}, {self.plan.dtype}{state})"

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
        """Give every parameter its planned dtype.

        Args:
            keep_originals: hold the fp32 values of trained parameters until
                ``forget_originals``: another optimizer may make masters of them.
        """
        params = dict(self.plan.model.named_parameters())
        planned = {params[name]: dtype for name, dtype in self.plan.dtypes.items()}
        self._dtypes = {param: param.dtype for param in planned}
        if keep_originals:
            halved = [p for p, dtype in planned.items() if p.requires_grad and p.dtype == torch.float32 != dtype]
            self._originals.update({param: param.data for param in halved})
        _cast_(planned, self.plan.decisions)
        if self._ddp is not None:
            rebuild_(self._ddp)

    def original(self, param: nn.Parameter) -> Tensor | None:
        """Return the fp32 values that ``param`` had before it became half, if they are still held."""
        return self._originals.pop(param, None)

    def forget_originals(self) -> None:
        """Free what no other optimizer has asked for."""
        self._originals.clear()

    def remove(self) -> None:
        """Undo the conversion: no hooks, torch's own layers, parameters of the dtypes they had.

        Weights come back from the masters, in fp32, when an optimizer is
        attached, else they are the half values widened. Calling it again does nothing. A
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
        if self._scopes is not None:
            self._scopes.clear()
        for casts in (self.plan.root, *self.plan.casts):
            if casts.params is not None:  # torch calls no hook after a KeyboardInterrupt
                ShowParameters()(casts.module, (), None)
        # Those that were taken out of the model since, too.
        for module in {**dict.fromkeys(self.plan.decisions), **dict.fromkeys(self.plan.model.modules())}:
            drop_hooks_(module, scopes.HOOKS)
            give_class_back_(module)
        mastered = {param for owner in self.owners for param in owner.masters.of}
        for owner in self.owners:
            owner.return_to_fp32_()
        self._restore(mastered)
        if self._ddp is not None:
            rebuild_(self._ddp)
        self._handles = []

    def _restore(self, mastered: set[nn.Parameter]) -> None:
        """Give parameters without a master the dtype they had, those added since fp32."""
        wanted = {}
        for param in {**self._dtypes, **dict.fromkeys(self.plan.model.parameters())}:
            before = self._dtypes.get(param, torch.float32 if param.dtype in HALF_DTYPES else param.dtype)
            if mastered and before in HALF_DTYPES:  # what was trained comes back in fp32, and meets it
                before = torch.float32
            if param not in mastered:
                wanted[param] = before
        _cast_(wanted, self.plan.decisions)

    def _hook(self, casts: ModuleCasts, *, lower: bool = False) -> None:
        module = casts.module
        if casts.mixed is not None:
            module.__class__ = casts.mixed
        if casts.inputs is not None:
            # Masks come to attention and to modules of the user, not to linear layers.
            lower |= any(module.children()) or not type(module).__module__.startswith("torch.nn.modules")
            hook = CastInputs(casts.inputs, casts.leave, casts.positions, casts.rest, lower=lower)
            self._handles.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        if casts.params is not None:
            self._handles.append(module.register_forward_pre_hook(CastParameters(casts.params, casts.inside)))
            self._handles.append(module.register_forward_hook(ShowParameters(), always_call=True))
        if casts.outputs is not None:
            outputs = CastOutputs(casts.outputs)
            self._handles.append(module.register_forward_hook(outputs))

    def _hook_root(self) -> None:
        root = self.plan.model
        self._handles.append(root.register_forward_hook(RootOutputs(self.plan.output, self)))
        for module in hookable(root):  # a submodule may be loaded on its own
            self._handles.append(module.register_load_state_dict_pre_hook(RefuseAssign()))  # type: ignore[no-untyped-call]


def _cast_(wanted: Mapping[nn.Parameter, torch.dtype], modules: Iterable[nn.Module]) -> None:
    """Cast parameters whose dtype is another; those of a recurrent layer stay in one storage.

    cuDNN looks for them there: scattered, they are copied in every forward.
    """
    changing = {param: dtype for param, dtype in wanted.items() if param.dtype != dtype}
    packs = [m for m in modules if isinstance(m, nn.RNNBase) and changing.keys() >= set(m.parameters())]
    named = {m: [(name, p.detach()) for name, p in m.named_parameters()] for m in packs}
    layouts = {m: plan_layout(weights) for m, weights in named.items() if not weights[0][1].is_meta}
    del named  # the old storage is free as soon as nothing shows it
    for param, dtype in changing.items():
        param.grad = None
        param.data = param.data.to(dtype)
    for module, layout in layouts.items():
        if not any(slot.pack for slot in layout.slots):
            continue
        params = list(module.parameters())
        flat = torch.zeros(layout.size, dtype=params[0].dtype, device=params[0].device)
        for param, view in zip(params, layout.model_views(flat), strict=True):
            view.copy_(param.detach())
            param.data = view


def _scopes(plan: CastPlan) -> scopes.FunctionScopes | None:
    """Return where function rules hold, ``None`` if there are none, or no code that they are for."""
    if not (plan.policy.functions or plan.masks):
        return None
    alone = frozenset(module for module, decided in plan.decisions.items() if decided.rule is QUANTISED)
    if not (plan.masks or any(scopes.runs_own_code(module) for module in plan.model.modules() if module not in alone)):
        return None
    return scopes.FunctionScopes(plan.model, frozenset(plan.policy.functions), plan.dtype, plan.masks, alone)


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
    """Take our hooks and classes off a model, or off a copy of a converted one."""
    for module in model.modules():
        drop_hooks_(module, OURS)
        give_class_back_(module)


def give_class_back_(module: nn.Module) -> None:
    """Make a module torch's own again, also one that was parametrized since: that class is made for it alone."""
    take_off_(module)
    kind = type(module)
    if kind in PLAIN:
        module.__class__ = PLAIN[kind]
    elif nn.utils.parametrize.is_parametrized(module) and kind.__bases__[0] in PLAIN:
        kind.__bases__ = (PLAIN[kind.__bases__[0]], *kind.__bases__[1:])


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._modules["_orig_mod"]  # type: ignore[assignment]
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
