"""The state dict: its format, and the checks that precede a load.

A state dict is torch's, with a few keys more::

    state         id -> {"master": fp32 tensor, <inner state under torch's names>}
    param_groups  as torch writes them
    mixedopt      {"format", "names", "loss_scale", "applied_steps", "skipped_steps"}

A dict without the ``mixedopt`` key is a plain torch optimizer's: its moments
and hyperparameters are loaded, masters and scale are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from mixedopt.errors import CheckpointError

FORMAT = 1
KEY = "mixedopt"


class IncompatibleKeys(NamedTuple):
    """Names that a non-strict load left out."""

    missing_keys: list[str]
    unexpected_keys: list[str]


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A validated state dict, in terms of this optimizer's parameter order.

    Attributes:
        inner: what ``inner.load_state_dict`` takes; tensors are copies.
        masters: position -> fp32 master; empty for a plain torch dict.
        extras: the content of the ``mixedopt`` key, ``None`` for plain torch.
        keys: names that did not match.
    """

    inner: dict[str, Any]
    masters: dict[int, Tensor]
    extras: dict[str, Any] | None
    keys: IncompatibleKeys


def pack(
    inner: Mapping[str, Any],
    masters: Sequence[nn.Parameter | None],
    names: Sequence[str],
    extras: Mapping[str, Any],
) -> dict[str, Any]:
    """Add masters and our own keys to the inner optimizer's state dict.

    Args:
        inner: what ``inner.state_dict()`` returned. Not modified.
        masters: one per parameter in group order, ``None`` for frozen ones.
        names: canonical names in the same order.
        extras: loss scale and counters.
    """
    state = {key: dict(entry) for key, entry in inner["state"].items()}
    for index, master in enumerate(masters):
        if master is not None:
            state[index] = {"master": master.detach(), **state.get(index, {})}
    return {**inner, "state": state, KEY: {"format": FORMAT, "names": list(names), **extras}}


def unpack(
    saved: Mapping[str, Any],
    masters: Sequence[nn.Parameter | None],
    names: Sequence[str],
    group_sizes: Sequence[int],
    *,
    strict: bool,
) -> Checkpoint:
    """Check a state dict against this optimizer; write nothing.

    Parameters are matched by name where the dict has names, else by position.

    Raises:
        CheckpointError: lists what differs. Nothing was loaded.
    """
    if not (isinstance(saved, Mapping) and isinstance(saved.get("state"), Mapping) and "param_groups" in saved):
        raise CheckpointError("not an optimizer state_dict: it has no 'state' and 'param_groups'. Nothing was loaded.")
    extras = saved.get(KEY)
    if extras is not None and extras.get("format") != FORMAT:
        raise CheckpointError(
            f"state_dict has format {extras.get('format')!r}, this version reads {FORMAT}. Nothing was loaded. "
            "Load it with the mixedopt version that wrote it."
        )
    saved_groups = saved["param_groups"]
    ids = [identity for group in saved_groups for identity in group["params"]]
    saved_names = _saved_names(ids, names, extras)
    problems = _group_problems([len(group["params"]) for group in saved_groups], group_sizes, extras, strict=strict)
    entry_of = {name: saved["state"].get(i, {}) for i, name in zip(ids, saved_names, strict=False)}
    keys = IncompatibleKeys(
        [name for name in names if name not in entry_of], [name for name in entry_of if name not in set(names)]
    )
    if strict:
        problems += [f"no parameter {name!r}" for name in keys.missing_keys]
        problems += [f"an unexpected parameter {name!r}" for name in keys.unexpected_keys]
    state: dict[int, dict[str, Any]] = {}
    new_masters: dict[int, Tensor] = {}
    for index, (name, master) in enumerate(zip(names, masters, strict=True)):
        entry = dict(entry_of.get(name, {}))
        value = entry.pop("master", None)
        if entry:
            state[index] = {key: _copied(item) for key, item in entry.items()}
        required = extras is not None and name in entry_of
        if master is not None and (required or value is not None):
            problems += _master_problems(name, master, value, new_masters, index)
    if problems:
        raise _error(problems)
    positions = iter(range(len(names)))
    groups = [
        {**{k: _copied(v) for k, v in group.items()}, "params": [next(positions) for _ in range(size)]}
        for group, size in zip(saved_groups, group_sizes, strict=True)
    ]
    return Checkpoint({"state": state, "param_groups": groups}, new_masters, extras, keys)


def load_inner_(inner: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    """Load into ``inner``; if that raises, ``inner`` is as it was.

    Raises:
        CheckpointError: with the inner optimizer's own words.
    """
    before = inner.state, inner.param_groups  # torch replaces both, it does not write into them
    try:
        inner.load_state_dict(state_dict)
    except Exception as error:
        inner.state, inner.param_groups = before
        raise CheckpointError(f"{type(inner).__name__} refused the state: {error}. Nothing was loaded.") from error


def _saved_names(ids: list[Any], names: Sequence[str], extras: Mapping[str, Any] | None) -> list[str]:
    if extras is not None:
        return list(extras["names"])
    if ids and all(isinstance(identity, str) for identity in ids):
        return ids  # names serve as ids in torch.distributed.checkpoint
    return list(names)[: len(ids)]


def _group_problems(
    saved: Sequence[int], ours: Sequence[int], extras: Mapping[str, Any] | None, *, strict: bool
) -> list[str]:
    if len(saved) != len(ours):
        return [f"{len(saved)} parameter groups, here {len(ours)}"]
    if (strict or extras is None) and list(saved) != list(ours):
        return [f"parameter groups of sizes {list(saved)}, here {list(ours)}"]
    return []


def _master_problems(name: str, master: nn.Parameter, value: Any, accepted: dict[int, Tensor], index: int) -> list[str]:
    if value is None:
        return [f"no master weight for {name!r}"]
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return [f"a master weight for {name!r} of {getattr(value, 'dtype', type(value).__name__)}, not fp32"]
    if value.shape != master.shape:
        return [f"a master weight for {name!r} of shape {tuple(value.shape)}, here {tuple(master.shape)}"]
    accepted[index] = value
    return []


def _error(problems: list[str]) -> CheckpointError:
    shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
    return CheckpointError(f"state_dict has {shown}. Nothing was loaded.")


def _copied(value: Any) -> Any:
    # torch's load_state_dict keeps the caller's tensors: two optimizers would share them.
    return value.clone() if isinstance(value, Tensor) else value
