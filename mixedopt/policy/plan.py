"""What a policy means for one model: the widths of every module, the dtype of every parameter, the casts between."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from mixedopt.bucket import HALF_DTYPES, beyond_range, unfit_error
from mixedopt.casting import CastInputs, CastOutputs
from mixedopt.functions import SOFTMAX as SOFTMAX_FUNCTIONS
from mixedopt.functions import mentions
from mixedopt.layers import NATIVE, NORMS, PLAIN
from mixedopt.layers import PRODUCTS as LAYERS
from mixedopt.policy.ranks import EVERYTHING, FP32_BUFFERS, QUANTISED, Ranks, has_forward, is_atomic, used_by
from mixedopt.policy.rule import Rule
from mixedopt.policy.rules import SOFTMAX, CastPolicy

REASONS = {
    QUANTISED: "quantised: left alone",
    FP32_BUFFERS: "computes with fp32 buffers",
    EVERYTHING: "everything else",
}


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided for one module, and why.

    Attributes:
        rule: of the policy, or one of the three above.
        param: what its parameters become unless another rule names them.
        compute: what it computes in.
        output: what it returns.
    """

    rule: Rule
    param: torch.dtype
    compute: torch.dtype
    output: torch.dtype

    @property
    def reason(self) -> str:
        """The rule that decided, as text."""
        return REASONS.get(self.rule) or str(replace(self.rule, required=True))


@dataclass(frozen=True, slots=True)
class ModuleCasts:
    """What is done around the forward of one module.

    Attributes:
        inputs: what floating arguments become; ``None`` leaves them.
        outputs: what floating results become; ``None`` leaves them.
        params: what parameters become for the time of the forward.
        mixed: the class whose forward has the casts inside.
        leave: names of arguments that pass untouched.
        positions: where these stand.
        rest: from where on all are left alone, ``None`` if only those are.
    """

    module: nn.Module
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None
    params: torch.dtype | None = None
    mixed: type[nn.Module] | None = None
    inside: frozenset[str] = frozenset({""})
    leave: frozenset[str] = frozenset()
    positions: frozenset[int] = frozenset()
    rest: int | None = None


@dataclass(frozen=True, slots=True)
class CastPlan:
    """What a policy decided for one model.

    Attributes:
        policy: which policy it was.
        text: the policy as text, objects replaced by their names.
        dtypes: for every floating parameter name, what it becomes.
        decisions: for every module.
        root: the casts around the whole model.
        output: what it returns.
        casts: those around modules inside it.
        masks: modules whose code prepares an fp32 softmax.
    """

    policy: CastPolicy
    text: str
    model: nn.Module
    dtype: torch.dtype
    dtypes: Mapping[str, torch.dtype]
    decisions: Mapping[nn.Module, Decision]
    root: ModuleCasts
    output: torch.dtype
    casts: tuple[ModuleCasts, ...]
    masks: frozenset[nn.Module]


def plan_casts(policy: CastPolicy, model: nn.Module, dtype: torch.dtype) -> CastPlan:
    """Decide for every module and parameter of ``model``. Pure.

    Args:
        policy: the rules.
        model: fp32 or half; unwrapped from DDP and ``torch.compile``.
        dtype: the half format, fp16 or bf16.

    Raises:
        ValueError: unknown dtype, half buffers in an fp32 module, a rule that matches nothing, a model that
            is converted already, or a module or parameter that cannot be converted.
    """
    check_dtype(dtype)
    _check_model(model)
    ranks = Ranks(policy, model)
    ranks.settle()
    decisions = {module: _decision(ranks.rule(module), dtype) for module in model.modules()}
    params = {p: _width(ranks.rules[rank].param, dtype) for p, rank in ranks.of_params().items()}
    _check_buffers(model, decisions)
    dtypes = {name: params[param] for name, param in model.named_parameters() if param in params}
    root, casts = _casts(policy, model, dtype, ranks, decisions, params)
    names = _names_by_id(model)
    text = str(replace(policy, rules=tuple(rule.named(names) for rule in policy.rules)))
    return CastPlan(
        policy,
        text,
        model,
        dtype,
        dtypes,
        decisions,
        root,
        _width(policy.output, dtype),
        casts,
        _masks(policy, model, decisions),
    )


def _casts(
    policy: CastPolicy,
    model: nn.Module,
    dtype: torch.dtype,
    ranks: Ranks,
    decisions: Mapping[nn.Module, Decision],
    params: Mapping[nn.Parameter, torch.dtype],
) -> tuple[ModuleCasts, tuple[ModuleCasts, ...]]:
    """Return the casts around the root, and around the modules that need some."""
    leave, used = frozenset(policy.leave), set[str]()
    # An fp32 layer meets half values where its island has half parts, or is entered by another way than its forward.
    mixed = any(d.compute == dtype for d in decisions.values())
    found = []
    for module, decided in decisions.items():
        casts = ModuleCasts(module, params=_forward_params(module, decided, params, named=ranks.names_params(module)))
        if casts.params is not None:
            every = isinstance(module, nn.MultiheadAttention)
            same = frozenset(n for n, m in module.named_modules() if every or ranks.first[m] == ranks.first[module])
            casts = replace(casts, inside=same)
        if module is model:
            casts = replace(casts, inputs=decided.compute)
        elif decided.rule is not QUANTISED:
            owns = is_atomic(module) and any(params.get(p) for p in module.parameters(recurse=False))
            on_border = any(ranks.first[p] != ranks.first[module] for p in ranks.callers[module]) and has_forward(
                module
            )
            if on_border and decided.rule is not EVERYTHING:
                casts = _border(casts, decided, dtype)
            elif owns and (decided.compute == dtype or mixed):
                casts = replace(casts, inputs=decided.compute)
        names, positions, rest = _left(module, leave)
        used |= names
        if casts.inputs is not None:
            casts = replace(casts, leave=leave, positions=positions, rest=rest)
        found.append(_inside(casts, params) if decided.rule is EVERYTHING and module is not model else casts)
    missing = {n for n in leave - used if not any(mentions(m, frozenset({n})) for m in model.modules())}
    if missing:
        raise ValueError(
            f"CastPolicy.leaving({min(missing)!r}): no module's forward has an argument of that name, and the code of "
            "none names a key or field like that."
        )
    root, *inside = found
    return root, tuple(casts for casts in inside if casts != ModuleCasts(casts.module))


def _border(casts: ModuleCasts, decided: Decision, dtype: torch.dtype) -> ModuleCasts:
    """Return the casts where a rule begins to hold."""
    kind = type(casts.module)
    outputs = decided.output if decided.output != decided.compute or decided.output == torch.float32 else None
    if decided.rule.compute == decided.rule.output == "fp32" and casts.params is None:
        outputs = None
    if decided.compute == torch.float32 and decided.output == dtype and casts.params is None:
        if kind in NORMS and "forward" not in vars(casts.module):  # which would call the forward it replaced
            return replace(casts, mixed=NORMS[kind][dtype])
        if kind in NATIVE and casts.module.weight is not None:  # without weights torch keeps the statistics in half
            return replace(casts, outputs=outputs)
    return replace(casts, inputs=decided.compute, outputs=outputs)


def _inside(casts: ModuleCasts, params: Mapping[nn.Parameter, torch.dtype]) -> ModuleCasts:
    """Return casts without a hook where a layer can have them inside, or has no floating argument at all."""
    module, kind, inputs = casts.module, type(casts.module), casts.inputs
    weight: Any = getattr(module, "weight", None)
    hooks = casts.params is not None or casts.outputs is not None or casts.positions or "forward" in vars(module)
    if inputs is None or hooks or params.get(weight) != inputs:
        return casts
    if kind is nn.Embedding:
        return ModuleCasts(module)
    return ModuleCasts(module, mixed=LAYERS[kind]) if kind in LAYERS else casts


def _forward_params(
    module: nn.Module, decided: Decision, params: Mapping[nn.Parameter, torch.dtype], *, named: bool
) -> torch.dtype | None:
    """Return what the parameters must be cast to in every forward, if they must; ``named``: a rule names one."""
    own = {params[p] for p in used_by(module) if p in params}
    asked = named or decided.rule.param != decided.rule.compute or decided.compute == torch.float32
    asked |= isinstance(module, nn.MultiheadAttention) and decided.rule is not QUANTISED
    if not asked or own <= {decided.compute}:
        return None
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
        raise ValueError(
            f"CastPolicy: {decided.reason} has param and compute differ for a sparse {type(module).__name__}, whose "
            "gradient no cast takes. Give both the same width."
        )
    if isinstance(module, nn.RNNBase):
        raise ValueError(
            f"CastPolicy: {decided.reason} has param and compute differ for a {type(module).__name__}, whose "
            "weights are packed. Give both the same width."
        )
    return decided.compute


def _left(module: nn.Module, leave: frozenset[str]) -> tuple[frozenset[str], frozenset[int], int | None]:
    """Return which names of ``leave`` the module's forward may take, at which positions, and from where on all."""
    if not leave:
        return leave, frozenset(), None
    try:
        arguments = list(inspect.signature(module.forward).parameters.values())
    except (TypeError, ValueError):
        return leave, frozenset(), None
    open_ended = any(a.kind is a.VAR_KEYWORD for a in arguments)
    names = leave if open_ended else leave & {a.name for a in arguments}
    places = {i: a.kind for i, a in enumerate(arguments) if a.name in leave and a.kind is not a.KEYWORD_ONLY}
    rest = [i for i, kind in places.items() if kind is inspect.Parameter.VAR_POSITIONAL]
    return names, frozenset(places), rest[0] if rest else None


def _masks(policy: CastPolicy, model: nn.Module, decisions: Mapping[nn.Module, Decision]) -> frozenset[nn.Module]:
    """Return the modules whose own code leads to an fp32 softmax."""
    listed = SOFTMAX_FUNCTIONS & set(policy.functions)
    soft = {m for m, d in decisions.items() if isinstance(m, SOFTMAX) and d.compute == torch.float32}
    return frozenset(
        module
        for module in decisions
        if not isinstance(module, nn.Sequential)
        and (soft & set(module.children()) or (listed and mentions(module, listed)))
    )


def _decision(rule: Rule, dtype: torch.dtype) -> Decision:
    return Decision(rule, _width(rule.param, dtype), _width(rule.compute, dtype), _width(rule.output, dtype))


def _width(width: str, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if width == "fp32" else dtype


def _names_by_id(model: nn.Module) -> dict[int, str]:
    named: Iterable[tuple[str, object]] = (*model.named_modules(), *model.named_parameters())
    return {id(thing): name for name, thing in named if name}


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
    hooked = any(isinstance(hook, (CastInputs, CastOutputs)) for hook in hooks)
    if hooked or any(type(module) in PLAIN for module in model.modules()):
        raise ValueError(
            "the model is converted already: converting it twice would round its weights again. Undo the first "
            "conversion with its handle's remove(), or wrap the optimizer without model=. A copy of a converted model "
            "(deepcopy, torch.save) has no handle: copy it before it is converted, or load "
            "optimizer.master_state_dict() into a new one."
        )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and (
            module is model or [*module.parameters(), *module.buffers()]
        ):
            raise ValueError(
                f"module {name!r} is a TorchScript module: its code cannot be given half weights. Convert the model "
                "first, and compile it with torch.compile, or script an fp32 copy for export."
            )
    for name, param in model.named_parameters():
        if nn.parameter.is_lazy(param):
            raise ValueError(f"parameter {name!r} is not initialised yet: run one forward pass before converting.")
        if param.dtype == torch.float64:
            raise ValueError(f"parameter {name!r} is float64: masters are fp32. Call model.float() first.")


def _check_buffers(model: nn.Module, decisions: Mapping[nn.Module, Decision]) -> None:
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.dtype in HALF_DTYPES and decisions[module].compute == torch.float32:
                raise ValueError(
                    f"buffer '{module_name}.{name}' is {buffer.dtype}, but its module computes in fp32. "
                    "Call model.float() before converting, not model.half()."
                )
