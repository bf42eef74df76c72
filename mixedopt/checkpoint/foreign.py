"""Checkpoints of other tools: recognised, reported on, and loaded as our own.

Nothing of another tool is imported or run. A file is read with
``weights_only=True``; what a tool has pickled of its own classes becomes an
inert object with the same attributes.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mixedopt.checkpoint.check import KEY
from mixedopt.checkpoint.foreign_fit import Wrapper, fit
from mixedopt.checkpoint.foreign_layouts import (
    READERS,
    Content,
    apex_scalers,
    check_inner,
    grad_scaler,
    keys_of,
    last_step,
    optimizers,
    tensors_by_name,
    weights_in,
    with_keys,
)
from mixedopt.checkpoint.layout import IncompatibleKeys
from mixedopt.errors import CheckpointError

logger = logging.getLogger("mixedopt")

ZERO = {"base_optimizer_state", "single_partition_of_fp32_groups", "fp32_flat_groups", "zero_stage", "partition_count"}
MEGATRON = {"fp32_from_fp16_params", "param_state_sharding_type"}
SCALERS = ("scaler", "grad_scaler", "scaler_state_dict")
SHARDED = ("DTensor", "ShardedTensor")


class _Inert:
    """Stands for a class of another tool: takes any arguments and attributes, does nothing."""

    def __new__(cls, *args: object, **kwargs: object) -> _Inert:
        del args, kwargs
        return object.__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        del args, kwargs

    def __setstate__(self, state: object) -> None:
        if isinstance(state, dict):
            self.__dict__.update(state)


STAND_INS = [
    (_Inert, name)
    for name in (
        "apex.amp.scaler.LossScaler",
        "apex.fp16_utils.loss_scaler.DynamicLossScaler",
        "apex.fp16_utils.loss_scaler.LossScaler",
        "argparse.Namespace",  # the arguments in old fairseq and Megatron files
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.LossScalerBase",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    )
]


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint of another tool, read and not yet loaded.

    Attributes:
        source: the layout, one of the names that ``import_state`` takes.
        found: what is in it, a sentence each.
        lost: what is not in it, or has no counterpart here, a sentence each.
        content: what is to be laid out for an optimizer.
    """

    source: str
    found: tuple[str, ...]
    lost: tuple[str, ...]
    content: Content = field(repr=False, compare=False)

    def __str__(self) -> str:
        lines = [f"a checkpoint of {self.source}", *(f"  found: {text}" for text in self.found)]
        return "\n".join([*lines, *(f"  lost: {text}" for text in self.lost)])

    def state_dict(self, optimizer: Wrapper, *, strict: bool = True) -> dict[str, Any]:
        """Return the content as a state dict of ``optimizer``, which is not modified.

        Raises:
            CheckpointError: as ``load_into``.
        """
        return fit(self.content, optimizer, strict=strict).state_dict

    def load_into(self, optimizer: Wrapper, *, strict: bool = True) -> IncompatibleKeys:
        """Continue in ``optimizer`` where the other tool stopped.

        Everything is checked before the first write. What depends on the
        optimizer and could not be taken is logged as a WARNING: hyperparameters
        that its inner optimizer does not know, a loss scale of the other kind.

        Args:
            optimizer: a ``MixedPrecisionOptimizer``, between two steps. The
                model's buffers and frozen weights are the caller's to load.
            strict: a master without a weight is an error; otherwise it stays
                as it is and is among the missing keys.

        Raises:
            CheckpointError: it does not fit; nothing has been changed.
            StepOrderError: inside a window.
        """
        fitted = fit(self.content, optimizer, strict=strict)
        keys = optimizer.load_state_dict(fitted.state_dict, strict=strict)
        keys.missing_keys.extend(name for name in fitted.missing if name not in keys.missing_keys)
        for warning in fitted.warnings:
            logger.warning("import from %s: %s", self.source, warning)
        return keys


def import_state(
    obj: Mapping[str, Any] | str | os.PathLike[str],
    source: str = "auto",
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> Imported:
    """Read a checkpoint of another tool.

    Args:
        obj: what ``torch.load`` returned, of a whole checkpoint or of the
            optimizer alone, or a path, which is read without running any code.
        source: ``"auto"``, ``"torch"``, ``"torch.amp"``, ``"apex.fp16_optimizer"``,
            ``"apex.amp"``, ``"fairseq"`` or ``"deepspeed"``.
        weights: a model's state dict whose values become those masters that
            the checkpoint has none of. ``None`` takes the checkpoint's own
            model; ``{}`` leaves the masters as they are.

    Raises:
        CheckpointError: it is not laid out so, or as nothing known.
        ValueError: ``source`` is none of these.

    Example:
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> print(import_state({"model": model.state_dict(), "optimizer": inner.state_dict()}).source)
        torch
    """
    if source != "auto" and source not in READERS:
        raise ValueError(f"import_state(source={source!r}): must be 'auto' or one of {', '.join(map(repr, READERS))}.")
    if weights is not None and not isinstance(weights, Mapping):
        raise TypeError(f"import_state(weights=a {type(weights).__name__}): must be a model's state dict, or None.")
    saved = _loaded(obj) if isinstance(obj, (str, os.PathLike)) else obj
    if not isinstance(saved, Mapping):
        raise CheckpointError(f"a {type(saved).__name__} is no checkpoint. Nothing was loaded. Pass a dict or a path.")
    if any(KEY in holder for holder in _holders(saved)):
        raise CheckpointError(
            "this is mixedopt's own checkpoint. Nothing was loaded. Read the file with checkpoint.load(path), and load "
            "its state dict with optimizer.load_state_dict(...)."
        )
    _refuse_partitioned(saved)
    content = READERS[_recognised(saved) if source == "auto" else source](saved)
    check_inner(content)
    own = weights_in(saved)
    content.dtypes = {name: value.dtype for name, value in (own or {}).items()}
    content.weights = own if weights is None else tensors_by_name(weights)
    _describe_(content, given=weights is not None)
    if content.scale is None and (named := [key for key in SCALERS if saved.get(key)]):
        content.lost.append(f"what is under {named[0]!r}: its keys are not those of a GradScaler")
    return Imported(content.source, tuple(content.found), tuple(content.lost), content)


def _loaded(path: str | os.PathLike[str]) -> Any:
    if os.path.isdir(path):
        raise CheckpointError(f"{os.fspath(path)!r} is a folder, of shards perhaps. Consolidate it into a file first.")
    try:
        with torch.serialization.safe_globals(list(STAND_INS)), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about TorchScript archives, which are refused here
            return torch.load(path, map_location="cpu", weights_only=True)
    except (FileNotFoundError, PermissionError):
        raise
    except Exception as error:  # whatever an unpickler makes of a file
        name = re.search(r"GLOBAL ([\w.]+)", str(error))
        reason = f"it holds {name[1]}" if name else "it is no whole torch file"
        trusted = "If you trust it, pass what torch.load(..., weights_only=False) returns."
        raise CheckpointError(
            f"{os.fspath(path)!r} cannot be read as plain data ({reason}), and no code of its own is run. Nothing was "
            f"loaded. {trusted if name else 'Use an undamaged copy.'}"
        ) from error


def _recognised(saved: Mapping[str, Any]) -> str:
    if with_keys(saved, "fp32_groups_flat") or with_keys(saved, "fp32_groups"):
        return "deepspeed"
    if with_keys(saved, "fp32_from_fp16"):
        return "apex.fp16_optimizer"
    if apex_scalers(saved):
        return "apex.amp"
    if {"last_optimizer_state", "optimizer_history"} & set(saved) or with_keys(saved, "param_groups", "loss_scale"):
        return "fairseq"
    if grad_scaler(saved) is not None:
        return "torch.amp"
    if optimizers(saved):
        return "torch"
    raise CheckpointError(
        f"no known layout: the keys are {keys_of(saved)}. Nothing was loaded. Known are those of {', '.join(READERS)}."
    )


def _refuse_partitioned(saved: Mapping[str, Any]) -> None:
    holders = list(_holders(saved))
    apart = {"module", "ds_version"} <= set(saved) and not isinstance(saved.get("optimizer"), Mapping)
    if apart or any(ZERO & set(holder) for holder in holders):
        raise CheckpointError(
            "this is a part of a ZeRO-partitioned DeepSpeed checkpoint. Nothing was loaded. Consolidate it first, with "
            "DeepSpeed's zero_to_fp32 script, and load the fp32 weights that it writes into the model before wrapping "
            "it; the moments start anew."
        )
    if any(MEGATRON & set(holder) for holder in holders) or {"checkpoint_version", "iteration"} <= set(saved):
        raise CheckpointError(
            "this is a Megatron-LM checkpoint, whose weights are split over ranks. Nothing was loaded. Consolidate it "
            "first, with Megatron's conversion tools, and load the weights into the model before wrapping it."
        )
    if "shard_metadata" in saved or any(_is_sharded(holder) for holder in holders):
        raise CheckpointError(
            "this is a sharded FSDP checkpoint. Nothing was loaded. Consolidate it first: "
            "torch.distributed.checkpoint.state_dict.get_state_dict with StateDictOptions(full_state_dict=True)."
        )


def _holders(saved: Mapping[str, Any]) -> Iterator[Mapping[Any, Any]]:
    """Yield the checkpoint and the dicts in it, three levels down: as far as a parameter's state."""
    level: list[Mapping[Any, Any]] = [saved]
    for _ in range(4):
        yield from level
        level = [value for holder in level for value in holder.values() if isinstance(value, Mapping)]


def _is_sharded(holder: Mapping[Any, Any]) -> bool:
    return any(
        type(value).__name__ in SHARDED
        or ("flat_param" in str(key) and isinstance(value, (Tensor, Mapping)))  # also without its other shards
        for key, value in holder.items()
    )


def _describe_(content: Content, *, given: bool) -> None:
    """Put into words what is there and what is not."""
    groups, state = content.inner["param_groups"], content.inner["state"]
    kinds = sorted({str(key) for entry in state.values() if isinstance(entry, Mapping) for key in entry})
    count = sum(len(group["params"]) for group in groups)
    step = last_step(content)
    content.found.append(f"{count} entries of state in {len(groups)} groups: {', '.join(kinds) or 'all empty'}")
    content.found.append(f"step {step}: applied_steps are {step}, skipped_steps 0" if step else "no count of steps")
    if content.scale is not None:
        scale = content.scale
        tracker = "" if scale.kind == "static" else f", growth tracker {scale.growth_tracker}"
        kind = "" if scale.kind == "either" else f"{scale.kind} "
        content.found.append(f"a {kind}loss scale of {scale.scale:g}{tracker}")
    if content.masters is not None:
        content.found.append(f"fp32 masters of {len(content.masters)} groups")
    if content.weights:
        halves = sum(value.dtype in (torch.float16, torch.bfloat16) for value in content.weights.values())
        content.found.append(f"{'given' if given else 'its'} model weights, {len(content.weights)} tensors")
        if halves and content.masters is None:
            content.lost.append(f"the low bits of the masters: {halves} of the weights are half")
        if content.source == "apex.amp" and not given and _is_rounded(content.weights):
            content.lost.append("the low bits of the masters: opt_level O2 saves the fp16 weights, cast to fp32")
    elif content.source == "apex.fp16_optimizer":
        content.lost.append("the values of fp32 parameters, of which Apex saves no masters: they stay as they are")
    elif content.masters is None:
        content.lost.append("the masters, as there are no model weights: they stay as the optimizer has them")


def _is_rounded(weights: Mapping[str, Tensor]) -> bool:
    """True iff every matrix holds fp16 numbers; biases may do so by chance."""
    full = [value for value in weights.values() if value.dtype == torch.float32]
    matrices = [value for value in full if value.ndim > 1] or full
    return bool(matrices) and all(torch.equal(value.half().float(), value) for value in matrices)
