"""What a policy means for one model: the dtype of every parameter, the casts between modules."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from mixedopt.casting import CastInputs, CastOutputs
from mixedopt.masters import HALF_DTYPES, beyond_range, unfit_error
from mixedopt.policy.rules import CastPolicy


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


def plan_casts(policy: CastPolicy, model: nn.Module, dtype: torch.dtype) -> CastPlan:
    """Decide for every module and parameter of ``model``. Pure.

    Args:
        policy: the rules.
        model: fp32 or half; unwrapped from DDP and ``torch.compile``.
        dtype: the half format, fp16 or bf16.

    Raises:
        ValueError: unknown dtype, half buffers in an fp32 module, a glob that matches nothing, a model that
            is converted already, or a parameter that cannot be converted.
    """
    check_dtype(dtype)
    _check_model(model)
    kept = _kept_parameters(policy, model)
    islands = _islands(policy, model, kept)
    _check_buffers(model, islands)
    dtypes = {
        name: torch.float32 if param in kept else dtype
        for name, param in model.named_parameters()
        if param.is_floating_point()
    }
    return CastPlan(policy, model, dtype, dtypes, tuple(islands), tuple(_half_layers(model, islands, kept)))


def _kept_parameters(policy: CastPolicy, model: nn.Module) -> set[nn.Parameter]:
    """Return the parameters that a name keeps in fp32."""
    kept = set()
    modules = {name for name, _ in model.named_modules(remove_duplicate=False) if name}
    params = dict(model.named_parameters(remove_duplicate=False))
    for glob in policy.fp32_names:
        hits = [param for name, param in params.items() if fnmatch.fnmatchcase(name, glob)]
        if not hits and not fnmatch.filter(modules, glob):
            raise ValueError(
                f"CastPolicy.keep({glob!r}): matches no module and no parameter. "
                f"Names look like {sorted(modules | set(params))[:3]}."
            )
        kept.update(hits)
    return kept


def _islands(policy: CastPolicy, model: nn.Module, kept: set[nn.Parameter]) -> list[nn.Module]:
    """Return the outermost islands; adds their parameters to ``kept``.

    A tie can pull a module in: what shares a parameter with an island has
    an fp32 parameter, so it computes in fp32 too.
    """
    chosen = {m for name, m in model.named_modules(remove_duplicate=False) if _chooses(policy, name, m)}
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


def _chooses(policy: CastPolicy, name: str, module: nn.Module) -> bool:
    by_name = bool(name) and any(fnmatch.fnmatchcase(name, glob) for glob in policy.fp32_names)
    # The weight of a parametrized module is computed from others, in fp32.
    return by_name or isinstance(module, policy.fp32_types) or _is_parametrized(module)


def check_dtype(dtype: object) -> None:
    """Raise ``ValueError`` unless ``dtype`` is fp16 or bf16."""
    if dtype not in HALF_DTYPES:
        raise ValueError(f"dtype={dtype!r}: must be torch.float16 or torch.bfloat16. For fp32 use CastPolicy.fp32().")


def check_fits(plan: CastPlan) -> None:
    """Raise ``ValueError`` if rounding would turn a weight into inf."""
    for name, param in plan.model.named_parameters():
        if plan.dtypes.get(name) in HALF_DTYPES:
            size = beyond_range(param.detach(), plan.dtypes[name])
            if size is not None:
                raise unfit_error(name, size, plan.dtypes[name])


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
