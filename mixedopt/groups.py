"""Live views of the inner optimizer's groups, and moving it between parameters."""

from __future__ import annotations

import functools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from mixedopt.copies import widened
from mixedopt.errors import StepOrderError


def init_protocol(wrapper: torch.optim.Optimizer, inner: torch.optim.Optimizer) -> None:
    """Set what ``torch.optim.Optimizer.__init__`` would, groups and state left out.

    The base class insists on real dicts as groups; the wrapper's are views.
    """
    wrapper.defaults = inner.defaults
    wrapper._optimizer_step_pre_hooks = OrderedDict()
    wrapper._optimizer_step_post_hooks = OrderedDict()
    wrapper._optimizer_state_dict_pre_hooks = OrderedDict()
    wrapper._optimizer_state_dict_post_hooks = OrderedDict()
    wrapper._optimizer_load_state_dict_pre_hooks = OrderedDict()
    wrapper._optimizer_load_state_dict_post_hooks = OrderedDict()
    wrapper._patch_step_function()


def watched(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``step`` of an optimizer class as torch makes it: with its hooks, and a range for profilers.

    That costs 30 us a step, so it is done if somebody looks: a hook, of all optimizers or of this one, or a profiler.
    """
    with_hooks = torch.optim.Optimizer.profile_hook_step(step)

    @functools.wraps(step)
    def wrapper(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        for_all = _global_optimizer_pre_hooks or _global_optimizer_post_hooks
        hooks = for_all or self._optimizer_step_pre_hooks or self._optimizer_step_post_hooks
        looks = hooks or torch.autograd.profiler._is_profiler_enabled
        return (with_hooks if looks else step)(self, *args, **kwargs)

    wrapper.hooked = True  # type: ignore[attr-defined]  # what torch asks before it does the same
    return wrapper


class StepGuard:
    """Step pre-hook of a wrapped optimizer: only its wrapper may call ``step()``.

    Called directly it would step on gradients that are scaled, stale or absent,
    and leave the model behind. ``with guard:`` opens it.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._open = False
        self._handle = inner.register_step_pre_hook(self)

    def __call__(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Raise ``StepOrderError`` unless the wrapper is calling."""
        if not self._open:
            raise StepOrderError(
                f"{type(optimizer).__name__}.step() was called directly, but it is wrapped: the model would not "
                "follow. Call step() of the MixedPrecisionOptimizer."
            )

    def __enter__(self) -> None:
        self._open = True

    def __exit__(self, *error: object) -> None:
        self._open = False

    def remove(self) -> None:
        """Give the optimizer back to its owner."""
        self._handle.remove()


def is_torchs(optimizer: torch.optim.Optimizer) -> bool:
    """True iff its class is torch's own, whose ways are known."""
    return type(optimizer).__module__.startswith("torch.optim.")


def has_hooks(inner: torch.optim.Optimizer) -> bool:
    """True iff somebody beside the guard waits for a step of this optimizer."""
    return len(inner._optimizer_step_pre_hooks) + len(inner._optimizer_step_post_hooks) > 1


def is_wrapped(inner: torch.optim.Optimizer) -> bool:
    """Return True iff a wrapper owns this optimizer."""
    return any(isinstance(hook, StepGuard) for hook in inner._optimizer_step_pre_hooks.values())


class GroupView(MutableMapping[str, Any]):
    """One group of the inner optimizer, with the model's parameters in it.

    Every key but ``params`` reads and writes the inner group itself, so both
    optimizers, and schedulers made on either, see one value. ``params`` are
    the model's parameters here and the masters there.
    """

    def __init__(self, inner: torch.optim.Optimizer, index: int, params: list[nn.Parameter]) -> None:
        self._inner = inner
        self._index = index  # not the dict: load_state_dict replaces it
        self._params = params

    @property
    def _group(self) -> dict[str, Any]:
        return self._inner.param_groups[self._index]

    def __getitem__(self, key: str) -> Any:
        return self._params if key == "params" else self._group[key]

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "params":
            raise ValueError("param_groups[i]['params'] cannot be assigned. Use add_param_group().")
        self._group[key] = value

    def __delitem__(self, key: str) -> None:
        if key == "params":
            raise ValueError("param_groups[i]['params'] cannot be deleted.")
        del self._group[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._group)

    def __len__(self) -> int:
        return len(self._group)

    def copy(self) -> dict[str, Any]:
        """Return the group as a plain dict, as ``dict.copy`` would."""
        return dict(self)

    def __or__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(self) | dict(other)

    def __ror__(self, other: Mapping[str, Any]) -> dict[str, Any]:
        return dict(other) | dict(self)

    def __ior__(self, other: Mapping[str, Any]) -> GroupView:
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))


def nested(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return ``optimizer`` and those that it holds as attributes (SAM, Lookahead), each once."""
    found = [optimizer]
    for each in found:
        held = [value for value in vars(each).values() if isinstance(value, torch.optim.Optimizer)]
        found += [value for value in held if not any(value is other for other in found)]
    return found


def rekey_(
    inner: torch.optim.Optimizer,
    moved: Mapping[nn.Parameter, nn.Parameter],
    halves: Mapping[nn.Parameter, torch.dtype],
) -> None:
    """Hand ``inner`` other parameters in the place of those it has.

    State follows its parameter, also in optimizers that ``inner`` holds; so do
    lists, tuples and dicts of parameters among its attributes. What was kept in
    the format of a half parameter is widened to fp32; what is half beside an
    fp32 parameter is meant to be.

    Args:
        inner: groups and state are modified in place.
        moved: old parameter -> new parameter; others stay.
        halves: old parameters that were half, and their dtype.
    """
    for optimizer in nested(inner):
        for name, value in vars(optimizer).items():
            if name not in ("state", "param_groups", "defaults"):
                vars(optimizer)[name] = _with(value, moved)
        for group in optimizer.param_groups:
            group["params"][:] = [moved.get(param, param) for param in group["params"]]  # LBFGS keeps the list itself
        for old, new in moved.items():
            if old in optimizer.state:
                state = optimizer.state.pop(old)
                optimizer.state[new] = widened(state, halves[old]) if old in halves else state


def _with(value: Any, moved: Mapping[nn.Parameter, nn.Parameter]) -> Any:
    """Return ``value`` with the parameters in it replaced; lists and dicts are changed in place."""
    if isinstance(value, nn.Parameter):
        return moved.get(value, value)
    if type(value) is list:
        value[:] = [_with(item, moved) for item in value]
    elif type(value) is tuple:
        return tuple(_with(item, moved) for item in value)
    elif type(value) in (dict, defaultdict):
        items = [(_with(key, moved), _with(item, moved)) for key, item in value.items()]
        value.clear()
        value.update(items)
    return value
