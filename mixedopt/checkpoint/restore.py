"""A validated state dict into an inner optimizer, with one tensor's memory to spare."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from mixedopt.bucket import HALF_DTYPES
from mixedopt.checkpoint.check import differences
from mixedopt.checkpoint.layout import Checkpoint
from mixedopt.copies import copied
from mixedopt.errors import CheckpointError

log = logging.getLogger("mixedopt")

Groups = list[dict[str, Any]]


def load_inner_(inner: torch.optim.Optimizer, loaded: Checkpoint) -> None:
    """Load into ``inner``; if that raises, ``inner`` is as it was.

    State that was there is written over in place where shapes and dtypes
    allow, so no second copy of it is made; nothing is shared with the caller.

    Raises:
        CheckpointError: with the inner optimizer's own words.
    """
    before = inner.state, inner.param_groups  # torch replaces both, it does not write into them
    try:
        inner.load_state_dict(loaded.inner)
        _keep_what_is_missing_(inner, before[1])
        _undo_rounding_(inner, loaded)
        _bring_home_(inner, loaded.expected)
        _own_(inner.state, before[0], loaded.inner.get("state", {}))
    except CheckpointError:
        inner.state, inner.param_groups = before
        raise
    except Exception as error:
        inner.state, inner.param_groups = before
        raise CheckpointError(f"{type(inner).__name__} refused the state: {error}. Nothing was loaded.") from error


def log_plain(saved: Mapping[str, Any]) -> None:
    """Say what a plain torch dict leaves alone."""
    named = any(isinstance(identity, str) for group in saved["param_groups"] for identity in group["params"])
    log.warning(
        "loaded the state of a plain torch optimizer: it has no master weights and no loss scale, so these stay as "
        "they are.%s",
        " (If it is of mixedopt: flatten_optimizer_state_dict=True loses them, leave it out.)" if named else "",
    )


def _keep_what_is_missing_(inner: torch.optim.Optimizer, before: Groups) -> None:
    """Keep what others put into the groups, a scheduler say; hyperparameters must have been saved.

    Those that are younger than the file the optimizer has filled in by itself.
    """
    lost = []
    for index, (group, old) in enumerate(zip(inner.param_groups, before, strict=True)):
        for key in old.keys() - group.keys():
            if key in inner.defaults:
                lost.append(f"no hyperparameter {key!r} in group {index}")
            group[key] = old[key]
    if lost:
        raise differences(sorted(lost))


def _undo_rounding_(inner: torch.optim.Optimizer, loaded: Checkpoint) -> None:
    """Take the saved state of frozen half parameters, which torch has cast to half."""
    params = [param for group in inner.param_groups for param in group["params"]]
    for index, entry in loaded.inner.get("state", {}).items():
        if isinstance(index, int) and params[index].dtype in HALF_DTYPES:
            inner.state[params[index]] = dict(entry)


def _bring_home_(inner: torch.optim.Optimizer, expected: Sequence[Mapping[str, Any]]) -> None:
    """Put state where a first step puts it: torch moves all but ``step`` to the parameter, NAdam's product, too."""
    params = [param for group in inner.param_groups for param in group["params"]]
    for param, seen in zip(params, expected, strict=True):
        entry = inner.state.get(param, {})
        for key, made in seen.items():
            value = entry.get(key)
            if isinstance(value, Tensor) and isinstance(made, Tensor) and value.device != made.device:
                entry[key] = value.to(made.device)


def _own_(state: Any, before: Mapping[Any, Any], saved: Any) -> None:
    """Replace the caller's tensors in ``state`` by our own: those of ``before`` where they fit, else copies."""
    theirs = {tensor.untyped_storage().data_ptr() for tensor in _tensors(saved) if tensor.numel()}
    writes: list[tuple[Tensor, Tensor]] = []
    memo: dict[int, Any] = {}
    for key, entry in state.items():
        old = before.get(key, {}) if isinstance(before, Mapping) else {}
        if not isinstance(entry, dict):
            state[key] = copied(entry)
            continue
        for name, value in entry.items():
            if not any(t.numel() and t.untyped_storage().data_ptr() in theirs for t in _tensors(value)):
                continue
            if id(value) not in memo:
                target: Any = old.get(name) if isinstance(old, Mapping) else None
                if _fits(value, target):
                    writes.append((target, value))
                    memo[id(value)] = target
                else:
                    memo[id(value)] = copied(value)
            entry[name] = memo[id(value)]
    with torch.no_grad():
        for target, value in writes:  # last: nothing can go wrong any more
            target.copy_(value)


def _fits(value: Any, target: Any) -> bool:
    """True iff ``target`` can take the value's place."""
    if type(value) is not Tensor or type(target) is not Tensor or value.layout != torch.strided:
        return False
    return (
        (value.shape, value.dtype, value.device, value.layout)
        == (target.shape, target.dtype, target.device, target.layout)
        and value.stride() == target.stride()
        and not target.requires_grad
    )


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested value that have a storage of their own."""
    if isinstance(value, Tensor):
        if hasattr(value, "__tensor_flatten__"):
            for name in value.__tensor_flatten__()[0]:
                yield from _tensors(getattr(value, name))
        elif value.layout == torch.strided:
            yield value
        else:
            yield from (value._indices(), value._values()) if value.is_sparse else ()
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)
