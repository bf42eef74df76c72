"""The cast policy: which module and which parameter keeps which dtype.

``CastPolicy.plan`` decides, purely; ``PolicyHandle`` holds what was done to a
model, and undoes it; ``convert`` does both for a model without an optimizer.
"""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils.hooks import RemovableHandle

from mixedopt.casting import CastInputs, CastOutputs, RefuseAssign, RootOutputs, WeakHook
from mixedopt.distributed import check_rebuildable, ddp_of, rebuild_
from mixedopt.errors import shown
from mixedopt.masters import HALF_DTYPES, MasterWeights, beyond_range, unfit_error

NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
SOFTMAX: tuple[type[nn.Module], ...] = (nn.Softmax, nn.Softmax2d, nn.Softmin)
# What comes out of these is a loss or goes into one: it stays fp32.
LOSSES: tuple[type[nn.Module], ...] = (_Loss, nn.LogSoftmax, nn.AdaptiveLogSoftmaxWithLoss)


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """Which parts of a model stay in fp32; everything else becomes half.

    A module that stays in fp32 is an *island*: its floating inputs are cast to
    fp32, it computes there with fp32 parameters, and its floating outputs are
    cast back to half (those of loss modules and ``LogSoftmax`` stay fp32).
    Buffers keep their dtype everywhere. A rule works on modules; a softmax
    that is *called* (``F.softmax``, ``nn.MultiheadAttention``) is out of its
    reach.

    Args:
        fp32_types: module types whose instances are islands, subclasses too.
        fp32_names: globs over dotted module and parameter names.

    Example:
        >>> CastPolicy.default().keep("head", "*.router").fp32_names
        ('head', '*.router')
    """

    fp32_types: tuple[type[nn.Module], ...] = (*NORMS, *SOFTMAX, *LOSSES)
    fp32_names: tuple[str, ...] = ()

    @classmethod
    def default(cls) -> CastPolicy:
        """Norm, softmax and loss modules in fp32, the rest half."""
        return cls()

    @classmethod
    def none(cls) -> CastPolicy:
        """All half, as ``model.half()``, as far as fp32 buffers allow.

        Norm layers with running statistics and parametrized modules compute
        with fp32 buffers, so they stay fp32.
        """
        return cls(fp32_types=(_NormBase,))

    @classmethod
    def fp32(cls) -> CastPolicy:
        """All fp32: the wrapper then does what the inner optimizer does."""
        return cls(fp32_types=(nn.Module,))

    def keep(self, *globs: str) -> CastPolicy:
        """Return a policy that also keeps these names in fp32.

        Args:
            globs: dotted names of modules or parameters, with ``*``, ``?`` and
                ``[...]``. A module's whole subtree stays fp32. A glob that
                matches nothing raises when the policy meets a model.
        """
        for glob in globs:
            if not isinstance(glob, str) or not glob:
                raise TypeError(f"CastPolicy.keep({glob!r}): must be names, such as 'head' or '*.router'.")
        return replace(self, fp32_names=(*self.fp32_names, *globs))

    def plan(self, model: nn.Module, dtype: torch.dtype) -> CastPlan:
        """Decide for every module and parameter of ``model``. Pure.

        Args:
            model: fp32 or half; unwrapped from DDP and ``torch.compile``.
            dtype: the half format, fp16 or bf16.

        Raises:
            ValueError: unknown dtype, half buffers in an fp32 module, a glob that matches nothing, a model that
                is converted already, or a parameter that cannot be converted.
        """
        check_dtype(dtype)
        _check_model(model)
        kept = self._kept_parameters(model)
        islands = self._islands(model, kept)
        _check_buffers(model, islands)
        dtypes = {
            name: torch.float32 if param in kept else dtype
            for name, param in model.named_parameters()
            if param.is_floating_point()
        }
        return CastPlan(self, model, dtype, dtypes, tuple(islands), tuple(_half_layers(model, islands, kept)))

    def _kept_parameters(self, model: nn.Module) -> set[nn.Parameter]:
        """Return the parameters that a name keeps in fp32."""
        kept = set()
        modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
        params = dict(model.named_parameters(remove_duplicate=False))
        for glob in self.fp32_names:
            hits = [param for name, param in params.items() if fnmatch.fnmatchcase(name, glob)]
            if not hits and not fnmatch.filter(modules, glob):
                raise ValueError(
                    f"CastPolicy.keep({glob!r}): matches no module and no parameter. "
                    f"Names look like {sorted(modules | set(params))[:3]}."
                )
            kept.update(hits)
        return kept

    def _islands(self, model: nn.Module, kept: set[nn.Parameter]) -> list[nn.Module]:
        """Return the outermost islands; adds their parameters to ``kept``.

        A tie can pull a module in: what shares a parameter with an island has
        an fp32 parameter, so it computes in fp32 too.
        """
        chosen = {m for name, m in model.named_modules(remove_duplicate=False) if self._chooses(name, m)}
        while True:
            inside = {inner for module in chosen for inner in module.modules()}
            kept.update(param for module in inside for param in module.parameters(recurse=False))
            pulled = {
                m
                for m in model.modules()
                if m not in inside and _is_atomic(m) and any(p in kept for p in m.parameters(recurse=False))
            }
            if not pulled:
                break
            chosen |= pulled
        below = {inner for module in chosen for inner in module.modules() if inner is not module}
        return [module for module in model.modules() if module in chosen and module not in below]

    def _chooses(self, name: str, module: nn.Module) -> bool:
        by_name = bool(name) and any(fnmatch.fnmatchcase(name, glob) for glob in self.fp32_names)
        # The weight of a parametrized module is computed from others, in fp32.
        return by_name or isinstance(module, self.fp32_types) or _is_parametrized(module)


@dataclass(frozen=True, slots=True)
class CastPlan:
    """What a policy decided for one model.

    Attributes:
        policy: which policy it was.
        dtypes: for every floating parameter name, what it becomes.
        islands: outermost modules that compute in fp32.
        half_layers: modules whose floating inputs must be half.
    """

    policy: CastPolicy
    model: nn.Module
    dtype: torch.dtype
    dtypes: Mapping[str, torch.dtype]
    islands: tuple[nn.Module, ...]
    half_layers: tuple[nn.Module, ...]


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
        ValueError: as ``CastPolicy.plan``, or if a weight exceeds the half
            range; nothing is changed.
    """
    check_model_and_policy("convert", model, policy)
    plan = (policy or CastPolicy.default()).plan(unwrap(model), dtype)
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


def check_fits(plan: CastPlan) -> None:
    """Raise ``ValueError`` if rounding would turn a weight into inf."""
    for name, param in plan.model.named_parameters():
        if plan.dtypes.get(name) in HALF_DTYPES:
            size = beyond_range(param.detach(), plan.dtypes[name])
            if size is not None:
                raise unfit_error(name, size, plan.dtypes[name])


def unwrap(model: nn.Module) -> nn.Module:
    """Return the module inside DDP, DataParallel and ``torch.compile``."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        else:
            return model


def check_dtype(dtype: object) -> None:
    """Raise ``ValueError`` unless ``dtype`` is fp16 or bf16."""
    if dtype not in HALF_DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be torch.float16 or torch.bfloat16. For fp32 use CastPolicy.fp32().")


def check_model_and_policy(who: str, model: object, policy: object) -> None:
    """Raise ``TypeError`` unless these are a module and a policy or ``None``."""
    if policy is not None and not isinstance(policy, CastPolicy):
        raise TypeError(f"{who}(policy={policy!r}): must be a CastPolicy. Start from CastPolicy.default().")
    if not isinstance(model, nn.Module):
        raise TypeError(f"{who}(model={shown(model)}): must be an nn.Module. Pass the model the optimizer trains.")
    if (ddp := ddp_of(model)) is not None:
        check_rebuildable(ddp)


def _check_model(model: nn.Module) -> None:
    hooks = (h for m in model.modules() for h in (*m._forward_pre_hooks.values(), *m._forward_hooks.values()))
    if any(isinstance(hook, (CastInputs, CastOutputs)) for hook in hooks):
        raise ValueError(
            "the model is converted already: converting it twice would round its weights again. Undo the first "
            "conversion with its handle's remove(), or wrap the optimizer without model=."
        )
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ValueError(f"parameter {name!r} is not initialised yet: run one forward pass before converting.")
        if param.dtype == torch.float64:
            raise ValueError(f"parameter {name!r} is float64: masters are fp32. Call model.float() first.")


def _check_buffers(model: nn.Module, islands: list[nn.Module]) -> None:
    names = {module: name for name, module in model.named_modules()}
    for island in islands:
        for name, buffer in island.named_buffers():
            if buffer.dtype in HALF_DTYPES:
                raise ValueError(
                    f"buffer '{names[island]}.{name}' is {buffer.dtype}, but its module computes in fp32. "
                    "Call model.float() before converting, not model.half()."
                )


def _is_parametrized(module: nn.Module) -> bool:
    old_style = (WeightNorm, SpectralNorm)
    return parametrize.is_parametrized(module) or any(
        isinstance(hook, old_style) for hook in module._forward_pre_hooks.values()
    )


def _is_atomic(module: nn.Module) -> bool:
    """True iff the module computes with its own parameters as one operation.

    That is a leaf, or one of torch's own modules (``nn.MultiheadAttention``
    has a child, but uses its weight functionally). Containers of parameters
    compute nothing.
    """
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return False
    return not any(module.children()) or type(module).__module__.startswith("torch.nn.modules")


def _half_layers(model: nn.Module, islands: list[nn.Module], kept: set[nn.Parameter]) -> Iterator[nn.Module]:
    inside = {inner for island in islands for inner in island.modules()}
    for module in model.modules():
        own = [p for p in module.parameters(recurse=False) if p.is_floating_point() and p not in kept]
        if own and module is not model and module not in inside and _is_atomic(module):
            yield module
