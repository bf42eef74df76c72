"""The hooks that cast values between modules of different precision.

Hooks are small picklable objects, so they survive ``deepcopy`` and
``torch.save(model)`` and outlive the optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return ``value`` with every floating tensor in it cast to ``dtype``.

    Looks into lists, tuples, named tuples, dicts and dataclasses. Integers,
    bools, complex and quantised tensors and all other objects pass untouched;
    what needs no cast comes back as the same object. Differentiable.
    """
    if isinstance(value, Tensor):
        return value.to(dtype) if value.dtype in CASTABLE and value.dtype != dtype else value
    if isinstance(value, (list, tuple)):
        items = [cast(item, dtype) for item in value]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = _changed(value, dtype)
        return _updated(value, changed) if changed else value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        changed = _changed(fields, dtype)
        return dataclasses.replace(value, **changed) if changed else value
    return value


def _changed(mapping: dict[Any, Any], dtype: torch.dtype) -> dict[Any, Any]:
    # Plain loops: torch.compile traces this, and no walrus inside a comprehension.
    changed = {}
    for key, old in mapping.items():
        new = cast(old, dtype)
        if new is not old:
            changed[key] = new
    return changed


def _updated(mapping: dict[Any, Any], changed: dict[Any, Any]) -> dict[Any, Any]:
    # A copy keeps the subclass (OrderedDict, the outputs of transformers); torch.compile traces dict() alone.
    new = dict(mapping) if type(mapping) is dict else copy.copy(mapping)
    for key, item in changed.items():
        new[key] = item
    return new


class WeakHook:
    """A module hook that calls a method of an object it does not keep alive.

    A copy of the model, by ``deepcopy`` or ``torch.save``, gets a hook that does
    nothing: the object watches the original only.
    """

    def __init__(self, method: Callable[..., Any] | None = None) -> None:
        self._method = None if method is None else weakref.WeakMethod(method)

    def __call__(self, *args: Any) -> Any:
        """Call the method, if its object is still there.

        Not inside a compiled graph, where a write to the object would be
        replayed after the graph, too late.
        """
        if torch.compiler.is_compiling():
            return None
        method = None if self._method is None else self._method()
        return None if method is None else method(*args)

    def __reduce__(self) -> tuple[type[WeakHook], tuple[()]]:
        return WeakHook, ()


class CastInputs:
    """Forward pre-hook: floating arguments become ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        """Return the arguments with their tensors cast."""
        return cast(args, self.dtype), cast(kwargs, self.dtype)


class CastOutputs:
    """Forward hook: floating results become ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result with its tensors cast."""
        return cast(output, self.dtype)


class RefuseAssign:
    """State-dict pre-hook of each module: ``assign=True`` would orphan masters."""

    def __call__(
        self, module: nn.Module, state_dict: dict[str, Any], prefix: str, metadata: dict[str, Any], *rest: Any
    ) -> None:
        """Raise ``ValueError`` before anything is loaded."""
        if metadata.get("assign_to_params_buffers", False):
            raise ValueError(
                "load_state_dict(assign=True): would replace the parameters of a converted model and orphan their "
                "masters. Load without assign; values are copied into the existing parameters."
            )
