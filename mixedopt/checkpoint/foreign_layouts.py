"""Where other tools' checkpoints hold what: facts about their files, and no code of theirs.

The facts are from PyTorch (``torch/amp/grad_scaler.py``), NVIDIA Apex
(``fp16_utils/fp16_optimizer.py``, ``fp16_utils/loss_scaler.py``,
``amp/frontend.py``, ``amp/scaler.py``, ``optimizers/fused_adam.py``), fairseq
(``optim/fp16_optimizer.py``, ``optim/dynamic_loss_scaler.py``, ``trainer.py``)
and DeepSpeed (``runtime/fp16/fused_optimizer.py``,
``runtime/fp16/unfused_optimizer.py``, ``ops/adam/fused_adam.py``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mixedopt.errors import CheckpointError

GRAD_SCALER = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}
# Where scripts and trainers keep it; a disabled one writes an empty dict, known by its place alone.
GRAD_SCALER_PLACES = ("scaler", "grad_scaler", "scaler_state_dict", "amp_scaler", "scaler_state", "MixedPrecision")
MODELS = ("model", "state_dict", "model_state_dict", "module")


@dataclass(frozen=True, slots=True)
class Scale:
    """A loss scale as a file has it.

    Attributes:
        kind: ``"dynamic"``, ``"static"``, or ``"either"`` if the file does not tell.
        scale: S.
        config: the fields of a ``DynamicLossScale`` that follow from the file.
        growth_tracker: ours, such that S grows at the same step.
        hysteresis_left: as in ``LossScaleState``, ``None`` if the file has none.
    """

    kind: str
    scale: float
    config: Mapping[str, float] = field(default_factory=dict)
    growth_tracker: int = 0
    hysteresis_left: int | None = None


@dataclass(slots=True)
class Content:
    """What a file holds, with its parameters still to be matched.

    Attributes:
        source: the layout.
        inner: ``state`` and ``param_groups`` as the inner optimizer wrote them.
        order: which parameters of a group have state, and how. ``"each"``: all;
            ``"in place"``: all, and masters of the fp16 ones that are trained;
            ``"trained"``: those with a gradient; ``"halves first"``: these, fp16
            before fp32; ``"flat"``: these, in one vector; ``"model"``: these, of
            all groups, in the model's order, in one vector or each for itself.
        masters: by group and in that order; fp16 parameters alone may have them.
        weights: canonical name -> the tensor that becomes a master.
        dtypes: canonical name -> dtype in the file's own model, in its order.
        scale: ``None`` if there is none.
        found, lost: sentences for people.
    """

    source: str
    inner: Mapping[str, Any]
    order: str = "each"
    masters: list[list[Tensor]] | None = None
    weights: dict[str, Tensor] | None = None
    dtypes: dict[str, torch.dtype] = field(default_factory=dict)
    scale: Scale | None = None
    found: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def bare_name(name: str) -> str:
    """Return a parameter's name without what DistributedDataParallel and torch.compile put before it."""
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def tensors_by_name(entry: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Return the tensors of a model's state dict under canonical names."""
    return {bare_name(str(key)): value for key, value in entry.items() if isinstance(value, Tensor)}


def weights_in(saved: Mapping[str, Any]) -> dict[str, Tensor] | None:
    """Return the model's tensors of a whole checkpoint, ``None`` if it has none."""
    entries = [saved[key] for key in MODELS if isinstance(saved.get(key), Mapping)]
    return next((found for entry in entries if (found := tensors_by_name(entry))), None)


def last_step(content: Content) -> int:
    """Return the largest step that a file has, 0 if it has none."""
    holders = [*content.inner["state"].values(), *content.inner["param_groups"]]
    steps = [holder["step"] for holder in holders if isinstance(holder, Mapping) and "step" in holder]
    return max((int(number(step, "step")) for step in steps), default=0)


def with_keys(saved: Mapping[str, Any], *keys: str) -> Mapping[str, Any] | None:
    """Return the checkpoint, or the first dict in it, that has all ``keys``."""
    entries = [saved, *(value for value in saved.values() if isinstance(value, Mapping))]
    return next((entry for entry in entries if all(key in entry for key in keys)), None)


def keys_of(saved: Mapping[str, Any]) -> str:
    """Return the keys of a checkpoint, and of its optimizer, for a message."""
    shown = [repr(key) for key in list(saved)[:10]]
    inner = saved.get("optimizer")
    more = f"; under 'optimizer' {keys_of(inner)}" if isinstance(inner, Mapping) else ""
    return (", ".join(shown) or "none") + (", ..." if len(saved) > 10 else "") + more


def _unlike(source: str, expected: str, saved: Mapping[str, Any]) -> CheckpointError:
    return CheckpointError(
        f"import_state(source={source!r}): expected {expected}; the keys are {keys_of(saved)}. Nothing was loaded. "
        "Leave source out to have it recognised."
    )


# -- torch ---------------------------------------------------------------------


def _is_optimizer(value: Any) -> bool:
    return isinstance(value, Mapping) and "state" in value and "param_groups" in value


def optimizers(saved: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return every plain optimizer state dict by where it is."""
    if _is_optimizer(saved):
        return {"it": saved}
    found = {repr(key): value for key, value in saved.items() if _is_optimizer(value)}
    for key, value in saved.items():
        if isinstance(value, (list, tuple)):  # Lightning's optimizer_states
            found |= {f"{key!r}[{i}]": item for i, item in enumerate(value) if _is_optimizer(item)}
    return found


def _optimizer(saved: Mapping[str, Any], source: str) -> Mapping[str, Any]:
    found = optimizers(saved)
    if not found:
        raise _unlike(source, "an optimizer's 'state' and 'param_groups'", saved)
    if len(found) > 1:
        raise CheckpointError(
            f"several optimizers, under {', '.join(found)}. Nothing was loaded. Pass a dict with one of them."
        )
    return next(iter(found.values()))


def grad_scaler(saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the state dict of a GradScaler, empty if it was disabled, ``None`` if there is none."""
    found = next((value for value in saved.values() if isinstance(value, Mapping) and set(value) >= GRAD_SCALER), None)
    if found is None:
        places = [saved[key] for key in GRAD_SCALER_PLACES if key in saved]
        found = next((value for value in places if isinstance(value, Mapping) and not value), None)
    return found


def _read_torch(saved: Mapping[str, Any]) -> Content:
    return Content("torch", _optimizer(saved, "torch"))


def _read_torch_amp(saved: Mapping[str, Any]) -> Content:
    scaler = grad_scaler(saved)
    if scaler is None:
        raise _unlike("torch.amp", f"a GradScaler's {', '.join(sorted(GRAD_SCALER))}", saved)
    content = Content("torch.amp", _optimizer(saved, "torch.amp"))
    if not scaler:
        content.found.append("a disabled GradScaler: no loss scale")
        return content
    interval, tracker = _count(scaler, "growth_interval"), _count(scaler, "_growth_tracker")
    config = {key: number(scaler.get(key), key) for key in ("growth_factor", "backoff_factor")}
    config["growth_interval"] = interval
    content.scale = Scale("dynamic", number(scaler.get("scale"), "scale"), config, tracker)
    content.lost.append("that S had no bounds: the optimizer's own min_scale and max_scale stay, widened to hold S")
    if tracker >= interval:
        content.lost.append("a growth tracker beyond its interval, with which GradScaler never grows S again")
    return content


# -- Apex ----------------------------------------------------------------------


def _read_apex_fp16(saved: Mapping[str, Any]) -> Content:
    holder = with_keys(saved, "fp32_from_fp16", "optimizer_state_dict", "loss_scaler")
    if holder is None:
        expected = "'fp32_from_fp16', 'optimizer_state_dict' and 'loss_scaler'"
        raise _unlike("apex.fp16_optimizer", expected, saved)
    masters = _tensor_lists(holder["fp32_from_fp16"], "fp32_from_fp16")
    content = Content("apex.fp16_optimizer", holder["optimizer_state_dict"], "halves first", masters)
    scaler = _attributes(holder["loss_scaler"])
    if "_loss_scale" in scaler:  # from 2019 on: amp's scaler, and masters in the places of their parameters
        content.order = "in place"
        content.scale = _amp_scaler(scaler)
        return content
    scale = number(scaler.get("cur_scale"), "cur_scale")
    if not number(holder.get("dynamic_loss_scale"), "dynamic_loss_scale", flag=True):
        content.scale = Scale("static", scale)
        return content
    # S grows in clean iteration i if (i - last overflow) % window is 0; cur_iter is the next one's i.
    since = _count(scaler, "cur_iter") - _count(scaler, "last_overflow_iter")
    config = _window_and_factors(scaler)
    config |= {"min_scale": min(1.0, scale), "max_scale": math.inf}
    content.scale = Scale("dynamic", scale, config, int((since - 1) % config["growth_interval"]))
    return content


def _amp_scaler(scaler: Mapping[str, Any]) -> Scale:
    """Return what Apex' later scaler object holds; its factors are 2 and 1/2."""
    scale = number(scaler["_loss_scale"], "_loss_scale")
    if not number(scaler.get("dynamic", True), "dynamic", flag=True):
        return Scale("static", scale)
    ceiling, floor = scaler.get("_max_loss_scale"), scaler.get("_min_loss_scale")
    config = {
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": _count(scaler, "_scale_seq_len"),
        "max_scale": math.inf if ceiling is None else max(number(ceiling, "_max_loss_scale"), scale),
    }
    if floor is not None:
        config["min_scale"] = min(number(floor, "_min_loss_scale"), scale)
    return Scale("dynamic", scale, config, _count(scaler, "_unskipped"))


def apex_scalers(saved: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return what ``amp.state_dict()`` wrote, ``None`` if it is not there."""
    entries = [value for value in saved.values() if isinstance(value, Mapping) and value]
    return next((e for e in entries if all(re.fullmatch(r"loss_scaler\d+", str(key)) for key in e)), None)


def _read_apex_amp(saved: Mapping[str, Any]) -> Content:
    scalers = apex_scalers(saved)
    if scalers is None or not isinstance(scalers.get("loss_scaler0"), Mapping):
        raise _unlike("apex.amp", "amp.state_dict(), with 'loss_scaler0'", saved)
    content = Content("apex.amp", _optimizer(saved, "apex.amp"))
    scaler, window = scalers["loss_scaler0"], 2000  # amp.initialize offers no other window, nor another factor than 2
    scale, unskipped = number(scaler.get("loss_scale"), "loss_scale"), _count(scaler, "unskipped")
    if unskipped >= window:  # a dynamic one starts to count anew there
        content.scale = Scale("static", scale)
    else:
        config = {"growth_factor": 2.0, "backoff_factor": 0.5, "growth_interval": window, "max_scale": 2.0**24}
        content.scale = Scale("either", scale, config, unskipped)
        content.lost.append(
            "the bounds of S: amp's default ceiling of 2**24 is taken, and the optimizer's own min_scale"
        )
    if len(scalers) > 1:
        content.lost.append(f"the scales of {len(scalers) - 1} more losses: 'loss_scaler0' is taken for all")
    return content


# -- fairseq -------------------------------------------------------------------


def _read_fairseq(saved: Mapping[str, Any]) -> Content:
    inner = saved.get("last_optimizer_state")
    inner = with_keys(saved, "state", "param_groups", "loss_scale") if inner is None else inner
    if inner is None or not _is_optimizer(inner):
        raise _unlike("fairseq", "'last_optimizer_state', or 'state', 'param_groups' and 'loss_scale'", saved)
    content = Content("fairseq", inner, "model")
    check_inner(content)
    if any(_is_scaled_fp16(entry) for entry in inner["state"].values()):
        raise CheckpointError(
            "the moments are scaled fp16 numbers (--fp16-adam-stats). Nothing was loaded. Save them unscaled in fp32, "
            "or load the weights alone."
        )
    if "loss_scale" in inner:
        content.scale = Scale("dynamic", number(inner["loss_scale"], "loss_scale"))
        content.lost.append("S's growth tracker, which starts at 0, and its window: the optimizer's own stays")
    return content


def _is_scaled_fp16(entry: Any) -> bool:
    if not isinstance(entry, Mapping):
        return False
    half = any(isinstance(value, Tensor) and value.dtype == torch.float16 for value in entry.values())
    return half and any(str(key).endswith("_scale") for key in entry)


# -- DeepSpeed -----------------------------------------------------------------


def _read_deepspeed(saved: Mapping[str, Any]) -> Content:
    fused = with_keys(saved, "fp32_groups_flat", "optimizer_state_dict")
    holder = fused or with_keys(saved, "fp32_groups", "optimizer_state_dict")
    if holder is None:
        expected = "'fp32_groups_flat' or 'fp32_groups' beside 'optimizer_state_dict'"
        raise _unlike("deepspeed", expected, saved)
    key = "fp32_groups_flat" if fused else "fp32_groups"
    groups = holder[key]
    if fused and isinstance(groups, Sequence):
        groups = [[flat] for flat in groups]
    masters = _tensor_lists(groups, key)
    content = Content("deepspeed", holder["optimizer_state_dict"], "flat" if fused else "trained", masters)
    content.lost.append("the true applied_steps: DeepSpeed starts with a step of zero gradients, which Adam counts")
    clip = holder.get("clip_grad")
    if isinstance(clip, (int, float)) and clip > 0:
        content.lost.append(f"clip_grad: build the optimizer with max_grad_norm={clip}")
    if "cur_scale" in holder:
        content.scale = _deepspeed_scale(holder, content.lost)
    return content


def _deepspeed_scale(holder: Mapping[str, Any], lost: list[str]) -> Scale:
    scale = number(holder["cur_scale"], "cur_scale")
    if not number(holder.get("dynamic_loss_scale"), "dynamic_loss_scale", flag=True):
        return Scale("static", scale)
    # S grows in clean iteration i if i - last overflow - 1 is a positive multiple of the window: the first growth
    # after an overflow takes one clean step more than the window, and what follows just the window.
    config = _window_and_factors(holder)
    ahead = _count(holder, "cur_iter") - _count(holder, "last_overflow_iter") - 1
    lost.append(
        "one step: after an overflow S first grows with clean step scale_window + 1 in DeepSpeed, with step "
        f"scale_window here, {'now and' if ahead == 0 else 'though not this time but'} from the next overflow on"
    )
    lost.append("the floor of S and the rule that refills hysteresis: the optimizer's own stay")
    left = max(_count(holder, "cur_hysteresis"), 1) if "cur_hysteresis" in holder else None
    tracker = int((ahead - 1) % config["growth_interval"]) if ahead else 0
    return Scale("dynamic", scale, config, tracker, left)


READERS: dict[str, Callable[[Mapping[str, Any]], Content]] = {
    "torch": _read_torch,
    "torch.amp": _read_torch_amp,
    "apex.fp16_optimizer": _read_apex_fp16,
    "apex.amp": _read_apex_amp,
    "fairseq": _read_fairseq,
    "deepspeed": _read_deepspeed,
}


# -- checks --------------------------------------------------------------------


def check_inner(content: Content) -> None:
    """Raise unless everything that is read later has the right type."""
    inner = content.inner
    if not _is_optimizer(inner) or not isinstance(inner["state"], Mapping):
        raise CheckpointError(f"the optimizer state of {content.source} is not one of torch's. Nothing was loaded.")
    groups = inner["param_groups"]
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups
    ):
        raise CheckpointError("'param_groups' is not a list of dicts with 'params'. Nothing was loaded.")
    ids = [identity for group in groups for identity in group["params"]]
    if not all(isinstance(identity, (int, str)) for identity in ids) or len(set(ids)) < len(ids):
        raise CheckpointError("'params' are not numbers or names, each once. Nothing was loaded.")
    if not all(isinstance(inner["state"].get(identity, {}), Mapping) for identity in ids):
        raise CheckpointError("'state' is not a dict of dicts. Nothing was loaded.")


def number(value: Any, key: str, *, flag: bool = False) -> float:
    """Return a finite number; True and False are numbers only for a ``flag``.

    Raises:
        CheckpointError: it is none.
    """
    if isinstance(value, Tensor) and value.numel() == 1:
        value = value.item()
    if not isinstance(value, (int, float)) or isinstance(value, bool) > flag or not math.isfinite(value):
        raise CheckpointError(f"{key!r} is {value!r:.50}, not a finite number. Nothing was loaded.")
    return float(value)


def _count(holder: Mapping[str, Any], key: str) -> int:
    return int(number(holder.get(key), key))


def _window_and_factors(holder: Mapping[str, Any]) -> dict[str, float]:
    window, factor = _count(holder, "scale_window"), number(holder.get("scale_factor"), "scale_factor")
    if window < 1 or factor <= 1:
        raise CheckpointError(
            f"'scale_window' is {window}, 'scale_factor' {factor}: no loss scale. Nothing was loaded."
        )
    return {"growth_factor": factor, "backoff_factor": 1 / factor, "growth_interval": window}


def _attributes(scaler: Any) -> Mapping[str, Any]:
    """Return the plain attributes of an object of any class; nothing of it is called."""
    if isinstance(scaler, Mapping):
        return scaler
    try:
        attributes: Mapping[str, Any] = object.__getattribute__(scaler, "__dict__")
    except AttributeError:
        raise CheckpointError(f"'loss_scaler' is a {type(scaler).__name__}, no scaler. Nothing was loaded.") from None
    return attributes


def _tensor_lists(groups: Any, key: str) -> list[list[Tensor]]:
    if not isinstance(groups, (list, tuple)) or not all(
        isinstance(group, (list, tuple)) and all(isinstance(value, Tensor) for value in group) for group in groups
    ):
        raise CheckpointError(f"{key!r} does not hold tensors for every group. Nothing was loaded.")
    return [[value.detach() for value in group] for group in groups]
