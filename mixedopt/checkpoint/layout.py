"""The state dict: its format, and the checks that precede a load.

A state dict is torch's, with a few keys more::

    state         id -> {"master": fp32 tensor, <inner state under torch's names>}
    param_groups  as torch writes them
    mixedopt      {"format", "names", "policy", "loss_scale", "applied_steps", "skipped_steps"}

A dict without the ``mixedopt`` key is a plain torch optimizer's: its moments
and hyperparameters are loaded, masters and scale are left alone. What else an
inner optimizer writes, beside or inside ``state``, is kept and handed back.
"""

from __future__ import annotations

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
)
from mixedopt.copies import copied
from mixedopt.errors import CheckpointError
from mixedopt.masters import HALF_DTYPES


class IncompatibleKeys(NamedTuple):
    """Names that a non-strict load left out."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated state dict, in terms of this optimizer's parameter order.

    Attributes:
        inner: what the inner optimizer is to load; tensors are copies.
        masters: position -> fp32 master, as saved; empty for a plain torch dict.
        extras: the content of the ``mixedopt`` key, ``None`` for plain torch.
        keys: names that did not match.
    """

    inner: dict[str, Any]
    masters: dict[int, Tensor]
    extras: dict[str, Any] | None
    keys: IncompatibleKeys


def pack(inner: Mapping[str, Any], places: Sequence[Place], extras: Mapping[str, Any]) -> dict[str, Any]:
    """Add masters and our own keys to the inner optimizer's state dict.

    Args:
        inner: what ``inner.state_dict()`` returned. Not modified.
        places: every parameter, in group order.
        extras: loss scale and counters.
    """
    state = {key: dict(entry) if isinstance(entry, Mapping) else entry for key, entry in inner.get("state", {}).items()}
    for index, place in enumerate(places):
        if place.master is not None:
            state[index] = {"master": place.master.detach(), **state.get(index, {})}
    names = [place.name for place in places]
    groups = inner.get("param_groups", [{"params": list(range(len(places)))}])
    about = {"format": FORMAT, "names": names, "inner_keys": list(inner), **extras}
    return {**inner, "state": state, "param_groups": groups, KEY: about}


def unpack(
    saved: Mapping[str, Any],
    places: Sequence[Place],
    group_sizes: Sequence[int],
    *,
    strict: bool,
    policy: str | None = None,
) -> Checkpoint:
    """Check a state dict against this optimizer; write nothing.

    Parameters are matched by name where the dict has names, else by position.
    A cast policy other than ``policy``, as text, is a difference if ``strict``.

    Raises:
        CheckpointError: lists what differs. Nothing was loaded.

    Syncs: one read per parameter.
    """
    check_structure(saved)
    extras = saved.get(KEY)
    if strict:
        check_policy((extras or {}).get("policy"), policy)
    if len(saved["param_groups"]) == 1 and "param_groups" not in _inner_keys(saved):
        group_sizes = [sum(group_sizes)]  # the inner optimizer writes no groups
    ids = [identity for group in saved["param_groups"] for identity in group["params"]]
    saved_sizes = [len(group["params"]) for group in saved["param_groups"]]
    names = [place.name for place in places]
    saved_names = _saved_names(ids, names, saved)
    entries = {name: saved["state"].get(i, {}) for i, name in zip(ids, saved_names, strict=False)}
    keys = IncompatibleKeys(
        [name for name in names if name not in entries], [name for name in entries if name not in set(names)]
    )
    if not strict and extras is not None:
        keys.missing_keys.extend(
            p.name for p in places if p.master is not None and "master" not in entries.get(p.name, ["master"])
        )
    problems = group_problems(saved_sizes, group_sizes, by_position=strict or extras is None)
    if strict:
        problems += [f"no parameter {name!r}" for name in keys.missing_keys]
        problems += [f"an unexpected parameter {name!r}" for name in keys.unexpected_keys]
    for place in places:
        if place.name in entries:
            problems += entry_problems(place, entries[place.name], needs_master=strict and extras is not None)
    if problems:
        raise differences(problems)
    found = {index: entries[name] for index, name in enumerate(names) if name in entries}
    return Checkpoint(
        _for_inner(saved, found, set(ids), group_sizes),
        {index: entry["master"] for index, entry in found.items() if "master" in entry},
        extras,
        keys,
    )


def _for_inner(
    saved: Mapping[str, Any], found: Mapping[int, Mapping[str, Any]], ids: set[Any], sizes: Sequence[int]
) -> dict[str, Any]:
    """Return copies of what the inner optimizer wrote, numbered by position."""
    state = {i: {k: copied(v) for k, v in entry.items() if k != "master"} for i, entry in found.items()}
    shared = {k: copied(v) for k, v in saved["state"].items() if k not in ids and not isinstance(k, int)}
    new = {key: copied(value) for key, value in saved.items() if key not in ("state", "param_groups", KEY)}
    new["state"] = {**{index: entry for index, entry in state.items() if entry}, **shared}
    new["param_groups"] = _renumbered(saved["param_groups"], sizes)
    return {key: value for key, value in new.items() if key in _inner_keys(saved)}


def _inner_keys(saved: Mapping[str, Any]) -> list[str]:
    written: Sequence[str] | None = (saved.get(KEY) or {}).get("inner_keys")
    return [key for key in saved if key != KEY] if written is None else list(written)


def load_inner_(inner: torch.optim.Optimizer, loaded: Checkpoint) -> None:
    """Load into ``inner``; if that raises, ``inner`` is as it was.

    Raises:
        CheckpointError: with the inner optimizer's own words.
    """
    before = inner.state, inner.param_groups  # torch replaces both, it does not write into them
    try:
        inner.load_state_dict(loaded.inner)
    except Exception as error:
        inner.state, inner.param_groups = before
        raise CheckpointError(f"{type(inner).__name__} refused the state: {error}. Nothing was loaded.") from error
    params = [param for group in inner.param_groups for param in group["params"]]
    for index, entry in loaded.inner.get("state", {}).items():
        if isinstance(index, int) and params[index].dtype in HALF_DTYPES:  # frozen: torch has cast its state to half
            inner.state[params[index]] = entry


def _saved_names(ids: list[Any], names: Sequence[str], saved: Mapping[str, Any]) -> list[str]:
    if saved.get(KEY) is not None:
        return list(saved[KEY]["names"])
    given = [name for group in saved["param_groups"] for name in group.get("param_names", [])]
    if sorted(given) == sorted(names):
        return given
    if ids and all(isinstance(identity, str) for identity in ids):
        return ids  # names serve as ids in torch.distributed.checkpoint
    return list(names)[: len(ids)]


def _renumbered(groups: Sequence[Mapping[str, Any]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    positions = iter(range(sum(sizes)))
    return [
        {**{key: copied(value) for key, value in group.items()}, "params": [next(positions) for _ in range(size)]}
        for group, size in zip(groups, sizes, strict=True)
    ]
