"""The state dict: its format, written and read.

A state dict is torch's, with a few keys more; ``docs/checkpoint-format.md``
tells all of it::

    state         id -> {"master": fp32 tensor, <inner state under torch's names>}
    param_groups  as torch writes them; the first has a "mixedopt" text, too
    mixedopt      {"format", "names", "optimizer", "inner_keys", "fresh", "policy",
                   "loss_scale", "applied_steps", "skipped_steps"}

torch.distributed.checkpoint keeps ``state`` and ``param_groups`` alone, with
names as ids; the text in the first group is what ``mixedopt`` holds, as JSON.
A dict without either is a plain torch optimizer's: its moments and
hyperparameters are loaded, masters and scale are left alone. What else an
inner optimizer writes, beside or inside ``state``, is kept and handed back.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mixedopt.checkpoint.check import (
    FORMAT,
    KEY,
    Place,
    check_policy,
    check_structure,
    differences,
    entry_problems,
    group_problems,
    hyperparameter_problems,
)
from mixedopt.checkpoint.first_state import first_state
from mixedopt.copies import copied, mapped
from mixedopt.errors import CheckpointError
from mixedopt.groups import is_torchs


class IncompatibleKeys(NamedTuple):
    """Names that a non-strict load left out."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated state dict, in terms of this optimizer's parameter order.

    Attributes:
        inner: what the inner optimizer is to load; its tensors are the saved ones.
        expected: for every position, the state as a first step makes it, empty if that is not known.
        masters: position -> fp32 master, as saved; empty for a plain torch dict.
        extras: what the dict says of itself, ``None`` for plain torch.
        keys: names that did not match.
    """

    inner: dict[str, Any]
    expected: Sequence[Mapping[str, Any]]
    masters: dict[int, Tensor]
    extras: dict[str, Any] | None
    keys: IncompatibleKeys


def pack(inner: torch.optim.Optimizer, places: Sequence[Place], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inner optimizer's state dict with masters and our own keys.

    For parameters that have none yet, it shows the state that their first step
    will make, so that who reads into it finds a place for everything; ``fresh``
    names them, and a load makes nothing of it.

    Args:
        inner: the wrapped optimizer. Not modified.
        places: every parameter, in group order.
        extras: policy, loss scale and counters.
    """
    written = inner.state_dict()
    state = {key: dict(v) if isinstance(v, Mapping) else v for key, v in written.get("state", {}).items()}
    shown = _shown(inner, places)
    for index, place in enumerate(places):
        if place.master is not None:
            state[index] = {"master": place.master, **shown.get(index, {}), **state.get(index, {})}
    fresh = [places[index].name for index in shown]
    about = {"format": FORMAT, "optimizer": type(inner).__name__, "fresh": fresh, **extras}
    groups = [dict(group) for group in written.get("param_groups", [{"params": list(range(len(places)))}])]
    groups[0][KEY] = json.dumps(about)
    names = [place.name for place in places]
    about = {**about, "names": names, "inner_keys": list(written)}
    return {**written, "state": state, "param_groups": groups, KEY: about}


def _shown(inner: torch.optim.Optimizer, places: Sequence[Place]) -> dict[int, dict[str, Any]]:
    """Return the state to come of parameters without any, as if no step had been counted."""
    waiting = [index for index, place in enumerate(places) if place.master is not None and not place.state]
    small = first_state(inner) if waiting else None
    if small is None or not any(small[index] for index in waiting):
        return {}
    full = first_state(inner, whole=waiting) or small
    return {index: _uncounted(full[index]) for index in waiting if full[index]}


def _uncounted(entry: Mapping[str, Any]) -> dict[str, Any]:
    new = dict(entry)
    if "step" in new:
        new["step"] = torch.zeros_like(new["step"]) if isinstance(new["step"], Tensor) else 0
    return new


def unpack(
    saved: Mapping[str, Any],
    inner: torch.optim.Optimizer,
    places: Sequence[Place],
    *,
    strict: bool,
    policy: str | None = None,
) -> Checkpoint:
    """Check a state dict against this optimizer; write nothing.

    Parameters are matched by name, by position where one side has no names.

    Args:
        saved: the state dict.
        inner: the wrapped optimizer. Not modified.
        places: every parameter, in group order.
        strict: anything that differs is an error. Otherwise what matches by
            name is taken; the scale, too, if it is of the same kind.
        policy: the cast policy here, as text.

    Raises:
        CheckpointError: lists what differs. Nothing was loaded.

    Syncs: one read per parameter.
    """
    extras = _about(saved)
    check_structure(saved, extras)
    if strict:
        check_policy((extras or {}).get("policy"), policy)
    sizes = [len(group["params"]) for group in inner.param_groups]
    if len(saved["param_groups"]) == 1 and "param_groups" not in _inner_keys(saved, extras):
        sizes = [sum(sizes)]  # the inner optimizer writes no groups
    names = [place.name for place in places]
    groups = _named_groups(saved, extras, names)
    ids = [identity for group in saved["param_groups"] for identity in group["params"]]
    entries = dict(zip([n for group in groups for n in group], [saved["state"].get(i, {}) for i in ids], strict=True))
    ours = _cut(names, sizes)
    problems = _shared_problems(saved, extras, inner, groups, ours, strict=strict)
    if problems:
        raise differences(problems)
    kept = inner.param_groups if group_problems(groups, ours, strict=True) else None
    keys = IncompatibleKeys([n for n in names if n not in entries], [n for n in entries if n not in set(names)])
    if names and not set(names) & set(entries):
        raise differences(
            [f"no parameter of this optimizer: its names look like {list(entries)[:3]}, here {names[:3]}"]
        )
    expected = _expected(saved, inner, places)
    wanting, unfit = _unfit(places, entries, expected, strict=strict, ours=extras is not None)
    if strict:
        problems = [f"no parameter {name!r}" for name in keys.missing_keys]
        problems += [f"an unexpected parameter {name!r}" for name in keys.unexpected_keys]
        problems += _unowned(saved, ids)
        problems += [problem for found in unfit.values() for problem in found]
        if problems:
            raise differences(problems)
    fresh = set((extras or {}).get("fresh", ()))
    keys.missing_keys.extend([*unfit, *(name for name in wanting if name not in unfit)])
    keys.unexpected_keys.extend(unfit)
    found = {i: entries[name] for i, name in enumerate(names) if name in entries and name not in unfit}
    stepped = {i: {} if names[i] in fresh else entry for i, entry in found.items()}
    return Checkpoint(
        _for_inner(saved, stepped, set(ids), sizes, extras, kept),
        expected,
        {index: entry["master"] for index, entry in found.items() if "master" in entry},
        extras,
        keys,
    )


def _about(saved: Any) -> Any:
    """Return what a state dict says of itself: under its key, or as text in a group."""
    if not isinstance(saved, Mapping) or saved.get(KEY) is not None:
        return saved.get(KEY) if isinstance(saved, Mapping) else None
    groups: Any = saved.get("param_groups")
    texts = [g[KEY] for g in groups if isinstance(g, Mapping) and KEY in g] if isinstance(groups, list) else []
    if not texts:
        return None
    try:
        about = dict(json.loads(texts[0]))
        names = [str(identity) for group in groups for identity in group["params"]]
    except (TypeError, ValueError, KeyError) as error:
        raise CheckpointError(f"state_dict has an unreadable {KEY!r} text ({error}). Nothing was loaded.") from error
    return {**about, "names": names, "inner_keys": ["state", "param_groups"]}


def _named_groups(saved: Mapping[str, Any], extras: Mapping[str, Any] | None, names: list[str]) -> list[list[str]]:
    """Return the names of the saved parameters, by group."""
    sizes = [len(group["params"]) for group in saved["param_groups"]]
    ids = [identity for group in saved["param_groups"] for identity in group["params"]]
    if extras is not None:
        given = list(extras["names"])
        placed = len(given) == len(names) and (_are_places(given) or _are_places(names))
        return _cut(names if placed else given, sizes)
    given = [name for group in saved["param_groups"] for name in group.get("param_names", [])]
    if sorted(given) == sorted(names):
        return _cut(given, sizes)
    if ids and all(isinstance(identity, str) for identity in ids):
        return _cut(ids, sizes)  # names serve as ids in torch.distributed.checkpoint
    return _cut([*names, *(f"number {n}" for n in range(len(names), len(ids)))], sizes)


def _are_places(names: Sequence[str]) -> bool:
    """True iff these are what parameters are called without a model."""
    return all(re.fullmatch(r"group\d+\.param\d+", name) for name in names)


def _cut(items: list[str], sizes: Sequence[int]) -> list[list[str]]:
    source = iter(items)
    return [[next(source) for _ in range(size)] for size in sizes]


def _shared_problems(
    saved: Mapping[str, Any],
    extras: Mapping[str, Any] | None,
    inner: torch.optim.Optimizer,
    groups: list[list[str]],
    ours: list[list[str]],
    *,
    strict: bool,
) -> list[str]:
    """Return what differs between the optimizers and their groups: it cannot be left out."""
    by_position = all(isinstance(i, int) for group in saved["param_groups"] for i in group["params"])
    named = extras is not None or not by_position
    if not named and [len(group) for group in groups] != [len(group) for group in ours]:
        return [f"parameter groups of sizes {[len(g) for g in groups]}, here {[len(g) for g in ours]}"]
    problems = group_problems(groups, ours, strict=strict)
    written = (extras or {}).get("optimizer")
    if strict and written not in (None, type(inner).__name__):
        problems.append(f"the state of {written}, here {type(inner).__name__}")
    if not problems and len(saved["param_groups"]) == len(inner.param_groups):
        problems += hyperparameter_problems(saved["param_groups"], inner.param_groups, inner.defaults)
    return problems


def _expected(
    saved: Mapping[str, Any], inner: torch.optim.Optimizer, places: Sequence[Place]
) -> list[Mapping[str, Any]]:
    """Return for every parameter the state that a first step makes, small, with the hyperparameters of the file."""
    if not is_torchs(inner):  # others may make their state as they please
        return [{} for _ in places]
    made = first_state(inner, saved["param_groups"]) or [{} for _ in places]
    return [seen or place.state for seen, place in zip(made, places, strict=True)]


def _unfit(
    places: Sequence[Place],
    entries: Mapping[str, Mapping[str, Any]],
    expected: Sequence[Mapping[str, Any]],
    *,
    strict: bool,
    ours: bool,
) -> tuple[list[str], dict[str, list[str]]]:
    """Return who lacks a master, and for each parameter that does not fit what is wrong."""
    unfit, wanting = {}, []
    for place, small in zip(places, expected, strict=True):
        if place.name not in entries:
            continue
        entry = entries[place.name]
        if problems := entry_problems(place, entry, small, needs_master=ours and strict):
            unfit[place.name] = problems
        if ours and place.master is not None and "master" not in entry:
            wanting.append(place.name)
    return wanting, unfit


def _unowned(saved: Mapping[str, Any], ids: list[Any]) -> list[str]:
    """Return the numbers in the state that no group has; what an inner optimizer shares has other keys."""
    numbers = [key for key in saved["state"] if type(key) is int and key not in set(ids)]
    return [f"state for number {key}, which no group has" for key in numbers]


def _for_inner(
    saved: Mapping[str, Any],
    found: Mapping[int, Mapping[str, Any]],
    ids: set[Any],
    sizes: Sequence[int],
    extras: Mapping[str, Any] | None,
    kept: Sequence[Mapping[str, Any]] | None,
) -> dict[str, Any]:
    """Return what the inner optimizer wrote, numbered by position; tensors of the state are the saved ones.

    Hyperparameters are those of ``kept``, if given: parameters are in other groups than they were.
    """
    own = {i: {k: _held(v) for k, v in entry.items() if k != "master"} for i, entry in found.items()}
    shared = {k: _held(v) for k, v in saved["state"].items() if k not in ids and not isinstance(k, int)}
    new = {key: copied(value) for key, value in saved.items() if key not in ("state", "param_groups", KEY)}
    new["state"] = {**{index: entry for index, entry in own.items() if entry}, **shared}
    positions = iter(range(sum(sizes)))
    new["param_groups"] = [
        {
            **{key: copied(value) for key, value in group.items() if key not in (KEY, "params")},
            "params": [next(positions) for _ in range(size)],
        }
        for group, size in zip(kept or saved["param_groups"], sizes, strict=True)
    ]
    return {key: value for key, value in new.items() if key in _inner_keys(saved, extras)}


def _held(value: Any) -> Any:
    return mapped(value, lambda tensor: tensor)


def _inner_keys(saved: Mapping[str, Any], extras: Mapping[str, Any] | None) -> list[str]:
    written: Sequence[str] | None = (extras or {}).get("inner_keys")
    return [key for key in saved if key != KEY] if written is None else list(written)
