"""Which rule of a policy decides for which module and parameter of a model."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mixedopt.casting import CASTABLE
from mixedopt.policy.rule import Rule
from mixedopt.policy.rules import CastPolicy

# What is decided without a rule; they match nothing by themselves.
QUANTISED = Rule("quantised", required=False)
FP32_BUFFERS = Rule("fp32 buffers", "fp32", "fp32", "half", required=False)
EVERYTHING = Rule("everything else", required=False)


class Ranks:
    """Which rule decides for which module: the first that matches it or anything around it.

    Args:
        policy: the rules.
        model: whose modules are ranked.
    """

    def __init__(self, policy: CastPolicy, model: nn.Module) -> None:
        self.rules = (QUANTISED, FP32_BUFFERS, *policy.rules, EVERYTHING)
        self._model = model
        self._last = len(self.rules) - 1
        self.parents: dict[nn.Module, list[nn.Module]] = {module: [] for module in model.modules()}
        for module in self.parents:
            for child in module.children():
                self.parents[child].append(module)
        self.callers = {module: self._callers(module) for module in self.parents}
        self._own: dict[nn.Module, int] = {}
        self._own_params: dict[nn.Parameter, int] = {}
        self._match(policy)
        self.first: dict[nn.Module, int] = {}

    def _callers(self, module: nn.Module) -> list[nn.Module]:
        """Return the modules whose code may call ``module``: nobody calls a ``ModuleList``, so those around it."""
        found: dict[nn.Module, None] = {}
        waiting = list(self.parents[module])
        while waiting:
            parent = waiting.pop()
            if has_forward(parent) or not self.parents[parent]:
                found[parent] = None
            else:
                waiting += self.parents[parent]
        return list(found)

    def rule(self, module: nn.Module) -> Rule:
        """Return the rule that decides for ``module``."""
        return self.rules[self.first[module]]

    def settle(self) -> None:
        """Find the deciding rules; what parameters and buffers demand comes after what the policy says."""
        self._inherit()
        for module in self.parents:
            alone = is_atomic(module) or not any([*child.parameters()] for child in module.children())
            if alone and is_quantised(module):
                self._own[module] = 0
            elif not self._keeps(self.first[module]) and _computes_with_fp32_buffers(module):
                self._own[module] = 1
        self._inherit()
        while self._pull():
            self._inherit()

    def names_params(self, module: nn.Module) -> bool:
        """True iff a rule on a parameter decides for one that the module's own code computes with."""
        return any(self._own_params.get(p, self._last) < self.first[module] for p in used_by(module))

    def of_params(self) -> dict[nn.Parameter, int]:
        """Return the rank that decides for every floating parameter; those left alone are missing."""
        found: dict[nn.Parameter, int] = {}
        for module in self.parents:
            for param in module.parameters(recurse=False):
                if param.is_floating_point():
                    own = self._own_params.get(param, self._last)
                    found[param] = min(found.get(param, self._last), own, self.first[module])
        return {param: rank for param, rank in found.items() if self.rules[rank] is not QUANTISED}

    def _match(self, policy: CastPolicy) -> None:
        modules = list(self._model.named_modules(remove_duplicate=False))
        params = list(self._model.named_parameters(remove_duplicate=False))
        for rank, rule in enumerate(self.rules):
            if rank in (0, 1, self._last):  # the plan's own
                continue
            hits = [module for name, module in modules if rule.matches(name, module)]
            own = [param for name, param in params if rule.matches_param(name, param)]
            for module in hits:
                self._own.setdefault(module, rank)
            for param in own:
                self._own_params.setdefault(param, rank)
            if rule.required and not hits and not own:
                names = sorted({name for name, _ in [*modules, *params] if name})
                raise ValueError(f"CastPolicy: {rule} matches no module and no parameter. Names look like {names[:3]}.")

    def _inherit(self) -> None:
        """A rule holds inside what it matches."""
        self.first = {module: self._own.get(module, self._last) for module in self.parents}
        waiting = list(self.parents)
        while waiting:
            module = waiting.pop()
            for child in module.children():
                if self.first[module] < self.first[child]:
                    self.first[child] = self.first[module]
                    waiting.append(child)

    def _pull(self) -> bool:
        """Put half modules under the rule that keeps one of their parameters in fp32. True iff any was.

        A tie can do it, or a rule that names a parameter: the module has an
        fp32 parameter then, so it computes in fp32.
        """
        ranks = self.of_params()
        pulled = False
        for module in self.parents:
            if not is_atomic(module) or self.rule(module).compute == "fp32":
                continue
            fp32 = [ranks[p] for p in used_by(module) if p in ranks and self._keeps(ranks[p])]
            if fp32 and min(fp32) < self.first[module]:
                self._own[module] = min(fp32)
                pulled = True
        return pulled

    def _keeps(self, rank: int) -> bool:
        return self.rules[rank].param == self.rules[rank].compute == "fp32"


def has_forward(module: nn.Module) -> bool:
    """True iff the module can be called; a ``ModuleList`` or ``ModuleDict`` cannot."""
    return getattr(module.forward, "__name__", "") != "_forward_unimplemented"


def _computes_with_fp32_buffers(module: nn.Module) -> bool:
    """True iff torch refuses half weights here: running statistics, power iterations."""
    statistics = isinstance(module, _NormBase) and module.track_running_stats
    # The weight of a parametrized module is computed from others, in fp32.
    return statistics or _is_parametrized(module)


def used_by(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that the module's own code computes with."""
    return list(module.parameters(recurse=isinstance(module, nn.MultiheadAttention)))  # whose child is never called


def is_quantised(module: nn.Module) -> bool:
    """True iff the module's own weights are no plain floating tensors."""
    return any(
        (not p.is_floating_point() and not p.is_complex())
        or p.dtype not in CASTABLE | {torch.complex64, torch.complex128}
        or (is_traceable_wrapper_subclass(p) and not hasattr(p, "placements"))
        for p in module.parameters(recurse=False)
    )


def _is_parametrized(module: nn.Module) -> bool:
    old_style = (WeightNorm, SpectralNorm)
    return parametrize.is_parametrized(module) or any(
        isinstance(hook, old_style) for hook in module._forward_pre_hooks.values()
    )


def is_atomic(module: nn.Module) -> bool:
    """True iff the module computes with its own parameters as one operation.

    That is a leaf, or one of torch's own modules (``nn.MultiheadAttention``
    has a child, but uses its weight functionally). Containers of parameters
    compute nothing.
    """
    if isinstance(module, (nn.ParameterList, nn.ParameterDict)):
        return False
    return not any(module.children()) or type(module).__module__.startswith("torch.nn.modules")
