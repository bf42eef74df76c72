"""What a state dict must be before anything of it is loaded."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.errors import CheckpointError

FORMAT = 1
KEY = "mixedopt"
# What a state dict of version 1 says of itself.
ABOUT = (
    "format", "names", "optimizer", "inner_keys", "fresh", "policy", "loss_scale", "applied_steps", "skipped_steps",
)  # fmt: skip
SHOWN = 10


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter of this optimizer, in group order.

    Attributes:
        name: canonical.
        param: the model's.
        master: its master, to read, ``None`` while it is frozen.
        state: what the inner optimizer holds for it now.
    """

    name: str
    param: nn.Parameter
    master: Tensor | None
    state: Mapping[str, Any]


def check_structure(saved: Any, about: Any) -> None:
    """Raise unless everything that is read later has the right type.

    Args:
        saved: the state dict.
        about: what it says of itself, ``None`` for a plain torch dict.
    """
    if not _is_state_dict(saved):
        inside = [key for key, value in saved.items() if _is_state_dict(value)] if isinstance(saved, Mapping) else []
        hint = f" Pass what stands under {inside[0]!r}." if inside else ""
        raise CheckpointError(
            f"not an optimizer state_dict: it has no 'state' and 'param_groups'. Nothing was loaded.{hint}"
        )
    state, groups = saved["state"], saved["param_groups"]
    if not isinstance(state, Mapping):
        raise differences(["a 'state' that is not a dict"])
    if not (isinstance(groups, Sequence) and all(_is_group(group) for group in groups)):
        raise differences(["'param_groups' that are not a list of dicts with 'params'"])
    ids = [identity for group in groups for identity in group["params"]]
    if not all(isinstance(identity, (int, str)) for identity in ids) or len(set(ids)) != len(ids):
        raise differences(["'params' that are not numbers or names, each once"])
    if not all(isinstance(entry, Mapping) for identity, entry in state.items() if identity in set(ids)):
        raise differences(["a 'state' that is not a dict of dicts"])
    if about is not None:
        _check_about(about, len(ids))
        if set(ids) not in (set(range(len(ids))), set(about["names"])):
            raise differences(["'params' that are neither the numbers from 0 on nor the names"])


def _is_state_dict(value: Any) -> bool:
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def _check_about(about: Any, count: int) -> None:
    if not isinstance(about, Mapping):
        raise differences([f"a {KEY!r} entry that is not a dict"])
    if about.get("format") != FORMAT:
        raise CheckpointError(
            f"state_dict has format {about.get('format')!r}, this version reads {FORMAT}. Nothing was loaded. "
            "Load it with the mixedopt version that wrote it."
        )
    if missing := [key for key in ABOUT if key not in about]:
        raise differences([f"no {key!r} under {KEY!r}" for key in missing])
    names: Any = about["names"]
    if not _is_list_of_text(names):
        raise differences([f"'names' under {KEY!r} that are not a list of names"])
    if not isinstance(about["loss_scale"], Mapping):
        raise differences([f"a loss scale that is not a dict under {KEY!r}"])
    if len(names) != count or len(set(names)) != count:
        raise differences([f"{len(set(names))} names for {count} parameters"])
    for key in ("inner_keys", "fresh"):
        if not _is_list_of_text(about[key]):
            raise differences([f"{key!r} under {KEY!r} that are not a list of names"])
    for key in ("optimizer", "policy"):
        if not isinstance(about[key], (str, type(None))):
            raise differences([f"{key!r} under {KEY!r} that is not text"])
    for counter in ("applied_steps", "skipped_steps"):
        if not (type(about[counter]) is int and 0 <= about[counter] < 2**63):
            raise differences([f"{counter} = {about[counter]!r}, not a count"])


def _is_list_of_text(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(item, str) for item in value)


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple))


def check_policy(saved: Any, ours: str | None) -> None:
    """Raise if both are known and differ; masters and state would fit all the same."""
    if saved is not None and ours is not None and saved != ours:
        raise CheckpointError(
            f"state_dict was saved under the cast policy {saved!r}, here it is {ours!r}. Nothing was loaded. Build the "
            "optimizer with policy=CastPolicy.from_string(...), or load it all the same with strict=False."
        )


def group_problems(saved: Sequence[Sequence[str]], ours: Sequence[Sequence[str]], *, strict: bool) -> list[str]:
    """Return what differs between the groups, given as the names of their parameters."""
    if len(saved) != len(ours):
        return [f"{len(saved)} parameter groups, here {len(ours)} (add_param_group() comes before a load)"]
    if not strict:
        return []
    here = {name: index for index, group in enumerate(ours) for name in group}
    moved = [(n, i, here[n]) for i, group in enumerate(saved) for n in group if here.get(n, i) != i]
    return [f"{name!r} in group {index}, here in group {other}" for name, index, other in moved]


def hyperparameter_problems(
    saved: Sequence[Mapping[str, Any]], ours: Sequence[Mapping[str, Any]], defaults: Mapping[str, Any]
) -> list[str]:
    """Return which hyperparameters are of another type than ours, or NaN."""
    return [
        f"{key} = {group[key]!r} in group {index}, here {own[key]!r}"
        for index, (group, own) in enumerate(zip(saved, ours, strict=True))
        for key in defaults
        if key in group and key in own and not _alike(group[key], own[key])
    ]


def _alike(saved: Any, ours: Any) -> bool:
    """True iff a hyperparameter could have become the other in the course of a training."""
    if ours is None or isinstance(ours, bool):
        return saved is None or isinstance(saved, (bool, int) if isinstance(ours, bool) else (bool, int, float, Tensor))
    if isinstance(ours, (int, float, Tensor)):
        number = isinstance(saved, (int, float)) or (isinstance(saved, Tensor) and saved.numel() == 1)
        return number and not isinstance(saved, bool) and not math.isnan(float(saved))
    if isinstance(ours, (list, tuple)):
        pairs = zip(saved, ours, strict=False) if isinstance(saved, (list, tuple)) else ()
        return isinstance(saved, (list, tuple)) and len(saved) == len(ours) and all(_alike(s, o) for s, o in pairs)
    return isinstance(saved, str) == isinstance(ours, str)


def entry_problems(
    place: Place, entry: Mapping[str, Any], expected: Mapping[str, Any], *, needs_master: bool
) -> list[str]:
    """Return what is wrong with the saved state of one parameter. Syncs: one read.

    Args:
        place: the parameter.
        entry: what was saved for it.
        expected: the state as the first step makes it for a parameter two
            values long in every dimension, empty if that is not known.
        needs_master: it must have one, and all of the state that is expected.
    """
    problems = []
    state = {key: value for key, value in entry.items() if key != "master"}
    if state or (needs_master and "master" in entry):
        problems += [f"no {key!r} for {place.name!r}" for key in expected if key not in state]
    for key, value in state.items():
        wanted = place.state.get(key)
        if wanted is None:
            wanted = _full(place.param, expected[key]) if key in expected else None
        problems += _value_problems(f"{key!r} for {place.name!r}", value, wanted)
    if "master" in entry:
        return problems + _master_problems(place, entry["master"])
    if needs_master and place.master is not None:
        problems.append(f"no master weight for {place.name!r} (if it was frozen then, load with strict=False)")
    return problems


def _full(param: nn.Parameter, seen: Any) -> Any:
    """Return a stand-in, on no device, for what ``seen`` of a small parameter becomes for ``param``."""
    if not isinstance(seen, Tensor):
        return seen
    small = tuple(min(size, 2) for size in param.shape)
    if not seen.dim():
        return seen
    return torch.empty(param.shape, dtype=seen.dtype, device="meta") if tuple(seen.shape) == small else seen.dtype


def _value_problems(what: str, value: Any, wanted: Any) -> list[str]:
    """Return how a saved value cannot be what it stands for; ``wanted`` may be a dtype, if no shape is known."""
    if isinstance(wanted, (Tensor, torch.dtype)):
        dtype = wanted if isinstance(wanted, torch.dtype) else wanted.dtype
        if isinstance(value, (int, float)) and not isinstance(value, bool):
            return [] if isinstance(wanted, torch.dtype) or wanted.numel() == 1 else [f"a number as {what}"]
        if not isinstance(value, Tensor):
            return [] if value is None and "momentum_buffer" in what else [f"a {type(value).__name__} as {what}"]
        if isinstance(wanted, Tensor) and wanted.shape != value.shape:
            return [f"{what} of shape {tuple(value.shape)}, here {tuple(wanted.shape)}"]
        if value.is_floating_point() != dtype.is_floating_point or value.is_complex() != dtype.is_complex:
            return [f"{what} of {value.dtype}, here {dtype}"]
    elif isinstance(wanted, (int, float)) and not isinstance(value, (int, float, Tensor)):
        return [f"a {type(value).__name__} as {what}"]
    return []


def _master_problems(place: Place, value: Any) -> list[str]:
    what = f"a master weight for {place.name!r}"
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return [f"{what} of {getattr(value, 'dtype', type(value).__name__)}, not fp32"]
    if value.shape != place.param.shape:
        return [f"{what} of shape {tuple(value.shape)}, here {tuple(place.param.shape)}"]
    if value.numel() and not bool(_extremes(value).to(place.param.dtype).isfinite().all()):
        return [f"{what} that is not finite in {place.param.dtype}"]
    return []


def _extremes(value: Tensor) -> Tensor:
    """Return the least and the largest value, NaN if there is one. Rounding keeps their order; no copy is made."""
    return torch.stack(torch.aminmax(value))


def differences(problems: list[str]) -> CheckpointError:
    """Return the error that lists the first ten problems."""
    shown = "; ".join(problems[:SHOWN]) + (f"; and {len(problems) - SHOWN} more" if len(problems) > SHOWN else "")
    return CheckpointError(f"state_dict has {shown}. Nothing was loaded.")
