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
    if not _needs_cast(value, dtype):
        return value
    if isinstance(value, Tensor):
        return value.to(dtype)
    if isinstance(value, (list, tuple)):
        items = [cast(item, dtype) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        # A copy keeps the subclass (OrderedDict, the outputs of transformers); torch.compile traces dict() alone.
        new = dict(value) if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            new[key] = cast(item, dtype)
        return new
    fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
    return dataclasses.replace(value, **{name: cast(item, dtype) for name, item in fields.items()})


def _needs_cast(value: Any, dtype: torch.dtype) -> bool:
    """Return True iff there is a floating tensor of another dtype inside."""
    if isinstance(value, Tensor):
        return value.dtype in CASTABLE and value.dtype != dtype
    if isinstance(value, (list, tuple)):
        return any([_needs_cast(item, dtype) for item in value])  # noqa: C419 (torch.compile traces no generator)
    if isinstance(value, dict):
        return any([_needs_cast(item, dtype) for item in value.values()])  # noqa: C419
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        inside = [getattr(value, field.name) for field in dataclasses.fields(value) if field.init]
        return any([_needs_cast(item, dtype) for item in inside])  # noqa: C419
    return False


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


class RootOutputs(CastOutputs):
    """The output cast of a whole model, by which its conversion is found again.

    It does not keep the handle alive; a copy of the model has none.
    """

    def __init__(self, dtype: torch.dtype, handle: object = None) -> None:
        super().__init__(dtype)
        self._handle = None if handle is None else weakref.ref(handle)

    @property
    def handle(self) -> object:
        """The handle of the conversion, ``None`` if it is gone."""
        return None if self._handle is None else self._handle()

    def __reduce__(self) -> tuple[type[RootOutputs], tuple[torch.dtype]]:
        return RootOutputs, (self.dtype,)


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
