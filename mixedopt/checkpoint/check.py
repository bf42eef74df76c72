"""What a state dict must be before anything of it is loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.errors import CheckpointError

FORMAT = 1
KEY = "mixedopt"


@dataclass(frozen=True, slots=True)
class Place:
    """One parameter of this optimizer, in group order.

    Attributes:
        name: canonical.
        param: the model's.
        master: its master, ``None`` while it is frozen.
        state: what the inner optimizer holds for it now.
    """

    name: str
    param: nn.Parameter
    master: nn.Parameter | None
    state: Mapping[str, Any]


def check_structure(saved: Any) -> None:
    """Raise unless everything that is read later has the right type."""
    if not (isinstance(saved, Mapping) and "state" in saved and "param_groups" in saved):
        raise CheckpointError("not an optimizer state_dict: it has no 'state' and 'param_groups'. Nothing was loaded.")
    state, groups, extras = saved["state"], saved["param_groups"], saved.get(KEY)
    if not isinstance(state, Mapping):
        raise differences(["a 'state' that is not a dict"])
    if not (isinstance(groups, Sequence) and all(_is_group(group) for group in groups)):
        raise differences(["'param_groups' that are not a list of dicts with 'params'"])
    ids = {identity for group in groups for identity in group["params"]}
    if not all(isinstance(entry, Mapping) for identity, entry in state.items() if identity in ids):
        raise differences(["a 'state' that is not a dict of dicts"])
    if extras is None:
        return
    if not isinstance(extras, Mapping):
        raise differences([f"a {KEY!r} entry that is not a dict"])
    if extras.get("format") != FORMAT:
        raise CheckpointError(
            f"state_dict has format {extras.get('format')!r}, this version reads {FORMAT}. Nothing was loaded. "
            "Load it with the mixedopt version that wrote it."
        )
    if not (isinstance(extras.get("names"), Sequence) and isinstance(extras.get("loss_scale"), Mapping)):
        raise differences([f"no names or no loss scale under {KEY!r}"])
    for counter in ("applied_steps", "skipped_steps"):
        if not (isinstance(extras.get(counter), int) and extras[counter] >= 0):
            raise differences([f"{counter} = {extras.get(counter)!r}, not a count"])


def check_policy(saved: Any, ours: str | None) -> None:
    """Raise if both are known and differ; masters and state would fit all the same."""
    if saved is not None and ours is not None and saved != ours:
        raise CheckpointError(
            f"state_dict was saved under the cast policy {saved!r}, here it is {ours!r}. Nothing was loaded. Build the "
            "optimizer with policy=CastPolicy.from_string(...), or change the policy on purpose with strict=False."
        )


def _is_group(group: Any) -> bool:
    return isinstance(group, Mapping) and isinstance(group.get("params"), Sequence)


def group_problems(saved: Sequence[int], ours: Sequence[int], *, by_position: bool) -> list[str]:
    """Return what differs between the sizes of the saved groups and ours."""
    if len(saved) != len(ours):
        return [f"{len(saved)} parameter groups, here {len(ours)}"]
    if by_position and list(saved) != list(ours):
        return [f"parameter groups of sizes {list(saved)}, here {list(ours)}"]
    return []


def entry_problems(place: Place, entry: Mapping[str, Any], *, needs_master: bool) -> list[str]:
    """Return what is wrong with the saved state of one parameter. Syncs: one read."""
    problems = []
    for key, value in entry.items():
        held = place.state.get(key)
        if isinstance(held, Tensor) and isinstance(value, Tensor) and held.shape != value.shape:
            problems.append(f"{key!r} of shape {tuple(value.shape)} for {place.name!r}, here {tuple(held.shape)}")
    if "master" in entry:
        return problems + _master_problems(place, entry["master"])
    if needs_master and place.master is not None:
        problems.append(f"no master weight for {place.name!r}")
    return problems


def _master_problems(place: Place, value: Any) -> list[str]:
    what = f"a master weight for {place.name!r}"
    if not isinstance(value, Tensor) or value.dtype != torch.float32:
        return [f"{what} of {getattr(value, 'dtype', type(value).__name__)}, not fp32"]
    if value.shape != place.param.shape:
        return [f"{what} of shape {tuple(value.shape)}, here {tuple(place.param.shape)}"]
    if not bool(value.to(place.param.dtype).isfinite().all()):
        return [f"{what} that is not finite in {place.param.dtype}"]
    return []


def differences(problems: list[str]) -> CheckpointError:
    """Return the error that lists the first ten problems."""
    shown = "; ".join(problems[:10]) + (f"; and {len(problems) - 10} more" if len(problems) > 10 else "")
    return CheckpointError(f"state_dict has {shown}. Nothing was loaded.")
