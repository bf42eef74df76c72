"""What another tool's checkpoint holds, laid out for one optimizer."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mixedopt.checkpoint.check import KEY
from mixedopt.checkpoint.foreign_layouts import Content, bare_name, last_step
from mixedopt.checkpoint.layout import IncompatibleKeys
from mixedopt.errors import CheckpointError
from mixedopt.loss_scale import DynamicLossScale, StaticLossScale

HALF_DTYPES = (torch.float16, torch.bfloat16)
# How a step runs, not what it computes: this optimizer's own stay.
OWN = {"foreach", "fused", "capturable", "differentiable"}
NOT_TAKEN = OWN | {"params", "param_names", KEY}
# State that follows from a hyperparameter of the file: amsgrad, momentum, centered.
OPTIONAL = {"max_exp_avg_sq", "momentum_buffer", "grad_avg"}
# What schedulers of torch put beside the hyperparameters.
SCHEDULED = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}


class Wrapper(Protocol):
    """What is read of a ``MixedPrecisionOptimizer``."""

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""

    @property
    def param_groups(self) -> Sequence[Any]:
        """Groups with the model's parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return a version-1 state dict."""

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True) -> IncompatibleKeys:
        """Load one."""


class Slot(NamedTuple):
    """One parameter of the optimizer, at its position."""

    position: int
    name: str
    param: Tensor
    trained: bool


@dataclass(slots=True)
class Fitted:
    """A state dict for one optimizer, and what could not be fitted into it."""

    state_dict: dict[str, Any]
    missing: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def fit(content: Content, optimizer: Wrapper, *, strict: bool) -> Fitted:
    """Lay ``content`` out as a state dict of ``optimizer``, which is not modified.

    Raises:
        CheckpointError: it does not fit.
    """
    own = optimizer.state_dict()
    if KEY not in own:
        raise TypeError(f"import into a {type(optimizer).__name__}: must be a MixedPrecisionOptimizer. Wrap it first.")
    fitted = Fitted(own)
    groups = _slots(optimizer, own)
    shares = _shares(content, groups, fitted.warnings)
    masters = _masters(content, groups, shares)
    _add_weights_(masters, content, groups, fitted, strict=strict)
    state = {
        position: _state_of(entry, own, position, optimizer.inner) for position, entry in _entries(content, shares)
    }
    _warn_of_unknown_state(state, own, optimizer.inner, fitted.warnings)
    ids = {identity for group in content.inner["param_groups"] for identity in group["params"]}
    shared = {k: v for k, v in content.inner["state"].items() if k not in ids and not isinstance(k, int)}
    about = {**own[KEY], "applied_steps": last_step(content), "skipped_steps": 0}
    about["fresh"] = []
    for slot in (slot for group in groups for slot in group if slot.trained):
        shown = dict(own["state"][slot.position])
        master = masters.get(slot.position, shown.pop("master"))
        if not state.get(slot.position):  # the loader wants to see the state to come of what has none yet
            about["fresh"] += [slot.name] if shown else []
            state[slot.position] = {key: _zero(value) for key, value in shown.items()}
        state[slot.position]["master"] = master
    about["loss_scale"] = _loss_scale(content, own[KEY]["loss_scale"], fitted.warnings)
    rest = {key: content.inner.get(key, own[key]) for key in own if key not in ("state", "param_groups", KEY)}
    new_groups = _param_groups(content, own["param_groups"], optimizer.inner, fitted.warnings)
    if KEY in new_groups[0]:  # the same once more, as text
        text = {key: value for key, value in about.items() if key not in ("names", "inner_keys")}
        new_groups[0][KEY] = json.dumps(text)
    fitted.state_dict = {**rest, "state": {**state, **shared}, "param_groups": new_groups, KEY: about}
    return fitted


def _zero(value: Any) -> Any:
    return torch.zeros_like(value) if isinstance(value, Tensor) else value


def _slots(optimizer: Wrapper, own: Mapping[str, Any]) -> list[list[Slot]]:
    groups, position = [], 0
    for group in optimizer.param_groups:
        slots = []
        for param in group["params"]:
            trained = "master" in own["state"].get(position, {})
            slots.append(Slot(position, own[KEY]["names"][position], param, trained))
            position += 1
        groups.append(slots)
    return groups


# -- whose state ---------------------------------------------------------------

Share = tuple[list[Slot], Any]


def _shares(content: Content, groups: list[list[Slot]], warnings: list[str]) -> list[Share]:
    """Return which parameters each entry of the file is for: one, or those of a flat vector."""
    saved = [list(group["params"]) for group in content.inner["param_groups"]]
    if content.order == "model":
        return _shares_in_model_order(content, groups, [i for ids in saved for i in ids], warnings)
    if content.order == "each" and (named := _saved_names(content, groups)):
        return _shares_by_name(named, groups)
    _same("parameter groups", len(saved), len(groups))
    shares: list[Share] = []
    for index, (ids, slots) in enumerate(zip(saved, groups, strict=True)):
        trained = [slot for slot in slots if slot.trained]
        if content.order == "flat":
            _same(f"vectors in group {index}", len(ids), 1)
            shares.append((trained, ids[0]))
            continue
        if content.order == "halves first":
            halves = _halves(content, index, trained)
            trained = [*halves, *(slot for slot in trained if slot.position not in {half.position for half in halves})]
        chosen = slots if content.order in ("each", "in place") else trained
        _same(f"parameters in group {index}", len(ids), len(chosen))
        shares += [([slot], identity) for slot, identity in zip(chosen, ids, strict=True)]
    return shares


def _same(what: str, saved: int, ours: int) -> None:
    if saved != ours:
        raise CheckpointError(f"the checkpoint has {saved} {what}, here {ours}. Nothing was loaded.")


def _halves(content: Content, index: int, trained: list[Slot]) -> list[Slot]:
    """Return the parameters of a group that have masters in the file: those that are half here, as a rule."""
    masters = (content.masters or [])[index : index + 1]
    halves = [slot for slot in trained if slot.param.dtype in HALF_DTYPES]
    # A file that names its halves knows better than what is half here.
    saved_halves = [slot for slot in trained if content.dtypes.get(bare_name(slot.name)) in HALF_DTYPES]
    for chosen in (saved_halves, halves):
        if masters and [m.shape for m in masters[0]] == [slot.param.shape for slot in chosen]:
            return chosen
    raise CheckpointError(
        f"group {index} of the checkpoint has {len(masters[0]) if masters else 0} masters of fp16 parameters, here "
        f"{len(halves)} are half, or their shapes differ. Nothing was loaded. Keep the same modules in fp32."
    )


def _saved_names(content: Content, ours: list[list[Slot]]) -> list[dict[str, Any]]:
    """Return name -> id for each group of the file; nothing if it has no names, or others beside its numbers."""
    groups = content.inner["param_groups"]
    if all(isinstance(identity, str) for group in groups for identity in group["params"]):
        return [{bare_name(identity): identity for identity in group["params"]} for group in groups]
    given = [group.get("param_names") for group in groups]
    if not all(isinstance(n, (list, tuple)) and len(n) == len(g["params"]) for n, g in zip(given, groups, strict=True)):
        return []
    named = [
        {bare_name(str(n)): i for n, i in zip(group["param_names"], group["params"], strict=True)} for group in groups
    ]
    return named if {n for group in named for n in group} == {bare_name(s.name) for g in ours for s in g} else []


def _shares_by_name(named: list[dict[str, Any]], groups: list[list[Slot]]) -> list[Share]:
    _same("parameter groups", len(named), len(groups))
    shares: list[Share] = []
    for index, (saved, slots) in enumerate(zip(named, groups, strict=True)):
        ours = {bare_name(slot.name) for slot in slots}
        if ours != set(saved):
            raise CheckpointError(
                f"group {index} of the checkpoint and here differ in {_listed(sorted(ours ^ set(saved)))}. Nothing was "
                "loaded. Build the optimizer with the same groups, and with model= to have names."
            )
        shares += [([slot], saved[bare_name(slot.name)]) for slot in slots]
    return shares


def _shares_in_model_order(
    content: Content, groups: list[list[Slot]], ids: list[Any], warnings: list[str]
) -> list[Share]:
    """Match fairseq's parameters: all that are trained, in the order of the model."""
    line = [slot for group in groups for slot in group if slot.trained]
    order = {name: index for index, name in enumerate(content.dtypes)}
    if all(bare_name(slot.name) in order for slot in line):
        line.sort(key=lambda slot: order[bare_name(slot.name)])
    elif len(groups) > 1:
        warnings.append("its parameters are matched in the order of the groups, as it has no model with their names")
    if len(ids) == 1:
        return [(line, ids[0])]
    _same("parameters", len(ids), len(line))
    return [([slot], identity) for slot, identity in zip(line, ids, strict=True)]


# -- state ---------------------------------------------------------------------


def _entries(content: Content, shares: list[Share]) -> Iterable[tuple[int, dict[str, Any]]]:
    """Yield position and state, in the file's own form but for the flat vectors."""
    counted = {i: group["step"] for group in content.inner["param_groups"] if "step" in group for i in group["params"]}
    for slots, identity in shares:
        entry = dict(content.inner["state"].get(identity, {}))
        if entry and identity in counted:  # FusedAdam counts once for a group
            entry.setdefault("step", counted[identity])
        flat = content.order == "flat" or (content.order == "model" and len(slots) > 1)
        values = {key: _split(value, slots, repr(key)) if flat else [value] for key, value in entry.items()}
        for index, slot in enumerate(slots):
            yield slot.position, {key: pieces[index] for key, pieces in values.items()}


def _split(value: Any, slots: list[Slot], what: str) -> list[Any]:
    """Return one piece for each parameter of a flat vector; a count is the same for all."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return [value for _ in slots]
    sizes = [slot.param.numel() for slot in slots]
    if value.ndim != 1 or value.numel() != sum(sizes):
        raise CheckpointError(
            f"{what} of the checkpoint is flat, with {value.numel()} values, and the {len(slots)} parameters here that "
            f"it is for have {sum(sizes)}. Nothing was loaded."
        )
    pieces = torch.split(value.detach(), sizes)
    return [piece.clone().view(slot.param.shape) for piece, slot in zip(pieces, slots, strict=True)]


def _state_of(
    entry: dict[str, Any], own: Mapping[str, Any], position: int, inner: torch.optim.Optimizer
) -> dict[str, Any]:
    """Return a parameter's state with ``step`` in the form that the inner optimizer keeps."""
    if "step" not in entry:
        return entry
    entries = [own["state"].get(position, {}), *(e for e in own["state"].values() if isinstance(e, Mapping))]
    like = next((known["step"] for known in entries if "step" in known), None)
    if like is None and type(inner).__module__.startswith("torch.optim") and type(inner).__name__ != "SparseAdam":
        like = torch.zeros((), dtype=torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32)
    step = entry["step"]
    if isinstance(like, Tensor):
        step = torch.full_like(like, float(step))
    elif isinstance(like, int):
        step = int(step)
    return {**entry, "step": step}


def _warn_of_unknown_state(
    state: Mapping[int, Mapping[str, Any]], own: Mapping[str, Any], inner: torch.optim.Optimizer, warnings: list[str]
) -> None:
    known = {key for entry in own["state"].values() if isinstance(entry, Mapping) for key in entry} - {"master"}
    unknown = sorted({str(key) for entry in state.values() for key in entry if key not in known | OPTIONAL})
    if known and unknown:
        warnings.append(f"state that a step of {type(inner).__name__} does not make is kept: {_listed(unknown)}")


# -- masters -------------------------------------------------------------------


def _masters(content: Content, groups: list[list[Slot]], shares: list[Share]) -> dict[int, Tensor]:
    """Return position -> master, of the masters that the file has."""
    if content.masters is None:
        return {}
    _same("groups of masters", len(content.masters), len(groups))
    found: dict[int, Tensor] = {}
    for index, (values, group) in enumerate(zip(content.masters, groups, strict=True)):
        mine = {slot.position for slot in group}
        slots = [slot for share, _ in shares for slot in share if slot.position in mine]
        if content.order == "flat":
            pieces = _split(values[0], slots, f"the master of group {index}")
        elif content.order == "trained":
            _same(f"masters in group {index}", len(values), len(slots))
            pieces = list(values)
        else:
            pieces = list(values)  # as many as are half, which _halves has checked
            slots = _halves(content, index, [slot for slot in slots if slot.trained])
        found |= {slot.position: _fp32(piece, slot) for slot, piece in zip(slots, pieces, strict=False)}
    return found


def _add_weights_(
    masters: dict[int, Tensor], content: Content, groups: list[list[Slot]], fitted: Fitted, *, strict: bool
) -> None:
    """Fill in the masters that the file has none of, from the model's weights."""
    if not content.weights:
        return
    for slot in (slot for group in groups for slot in group if slot.trained and slot.position not in masters):
        value = content.weights.get(bare_name(slot.name))
        if value is None:
            fitted.missing.append(slot.name)
        else:
            masters[slot.position] = _fp32(value, slot)
    if strict and fitted.missing:
        raise CheckpointError(
            f"the model weights have no {_listed(fitted.missing)}. Nothing was loaded. Pass weights= with the names of "
            "this model, or weights={} to leave the masters as they are."
        )


def _fp32(value: Tensor, slot: Slot) -> Tensor:
    if value.shape != slot.param.shape or not value.is_floating_point():
        raise CheckpointError(
            f"the weight of {slot.name!r} is of {value.dtype} and shape {tuple(value.shape)}, here the shape is "
            f"{tuple(slot.param.shape)}. Nothing was loaded."
        )
    return value.detach().float()


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(map(repr, names[:5])) + more


# -- groups and scale ----------------------------------------------------------


def _param_groups(
    content: Content, own: Sequence[Mapping[str, Any]], inner: torch.optim.Optimizer, warnings: list[str]
) -> list[dict[str, Any]]:
    """Return our groups with the file's hyperparameters, as far as the inner optimizer knows them."""
    saved = content.inner["param_groups"]
    if len(saved) != len(own):
        warnings.append(f"hyperparameters were not taken: the checkpoint has {len(saved)} groups, here {len(own)}")
        return [dict(group) for group in own]
    for index, (theirs, ours) in enumerate(zip(saved, own, strict=True)):
        absent = [k for k in inner.defaults if k in ours and k not in theirs and k not in OWN and _decisive(ours[k])]
        if absent:
            raise CheckpointError(
                f"group {index} of the checkpoint has no {_listed(absent)}, which {type(inner).__name__} needs: it is "
                "of another kind of optimizer. Nothing was loaded."
            )
    unknown = sorted({str(k) for theirs, ours in zip(saved, own, strict=True) for k in theirs if k not in ours})
    unknown = [key for key in unknown if key not in SCHEDULED | NOT_TAKEN | {"step"}]
    if unknown:
        warnings.append(f"hyperparameters that {type(inner).__name__} does not know were not taken: {_listed(unknown)}")
    kept = [
        {k: v for k, v in theirs.items() if k in SCHEDULED or (k in ours and k not in NOT_TAKEN)}
        for theirs, ours in zip(saved, own, strict=True)
    ]
    return [{**ours, **taken} for ours, taken in zip(own, kept, strict=True)]


def _decisive(value: Any) -> bool:
    """True iff a hyperparameter is a number, or some, and not a switch."""
    return isinstance(value, (int, float, list, tuple, Tensor)) and not isinstance(value, bool)


def _loss_scale(content: Content, own: Mapping[str, Any], warnings: list[str]) -> Mapping[str, Any]:
    """Return our loss scale with the file's values, or as it is if that is of the other kind."""
    scale = content.scale
    if scale is None:
        return own
    kind = own["kind"] if scale.kind == "either" else scale.kind
    if kind != own["kind"]:
        warnings.append(f"its loss scale is {kind}, S = {scale.scale:g}; this optimizer's is {own['kind']} and stays")
        return own
    state = {**own["state"], "scale": scale.scale, "growth_tracker": 0, "floor_skips": 0}
    config = {**own["config"]}
    try:
        if kind == "static":
            config["scale"] = scale.scale
            StaticLossScale(**config)
            return {"kind": kind, "config": config, "state": state}
        config |= scale.config
        config["min_scale"] = min(config["min_scale"], scale.scale)
        config["max_scale"] = max(config["max_scale"], scale.scale)
        if not config["min_scale"] <= config["init_scale"] <= config["max_scale"]:
            config["init_scale"] = scale.scale
        config["hysteresis"] = max(config["hysteresis"], scale.hysteresis_left or 1)
        DynamicLossScale(**config)
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"the checkpoint holds no valid loss scale ({error}). Nothing was loaded.") from error
    state["growth_tracker"] = scale.growth_tracker
    state["hysteresis_left"] = scale.hysteresis_left or config["hysteresis"]
    return {"kind": kind, "config": config, "state": state}
