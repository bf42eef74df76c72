"""The hooks that cast values between modules of different precision.

Hooks are small picklable objects, so they survive ``deepcopy`` and
``torch.save(model)`` and outlive the optimizer.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
import weakref
from collections import UserDict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

CASTABLE = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


NOTHING: frozenset[str] = frozenset()


def cast(value: Any, dtype: torch.dtype, leave: frozenset[str] = NOTHING, *, lower: bool = False) -> Any:
    """Return ``value`` with every floating tensor in it cast to ``dtype``.

    Looks into lists, tuples, named tuples, dicts and dataclasses. Integers,
    bools, complex and quantised tensors and all other objects pass untouched;
    what needs no cast comes back as the same object. Differentiable.

    Args:
        value: any object.
        dtype: of the floating tensors that come back.
        leave: keys of dicts and fields of named tuples and dataclasses whose
            values pass untouched.
        lower: finite values below the range become its lowest value, not -inf;
            see ``lowered``.
    """
    if not _needs_cast(value, dtype, leave):
        return value
    if isinstance(value, Tensor):
        return _lowered_tensor(value, dtype) if lower else value.to(dtype)
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        if names is None:
            return _refilled(value, [cast(item, dtype, leave, lower=lower) for item in value])
        pairs = zip(names, value, strict=True)
        return type(value)(*[item if key in leave else cast(item, dtype, leave, lower=lower) for key, item in pairs])
    if isinstance(value, (dict, UserDict)):
        # A copy keeps the subclass (OrderedDict, those of transformers); torch.compile traces dict() alone.
        new = dict(value) if type(value) is dict else copy.copy(value)
        for key, item in value.items():
            if key not in leave:
                new[key] = cast(item, dtype, leave, lower=lower)
        return new
    names = [f.name for f in dataclasses.fields(value) if f.init and f.name not in leave]
    changed = {n: cast(getattr(value, n), dtype, leave, lower=lower) for n in names}
    if torch.compiler.is_compiling():  # which traces no copy
        return dataclasses.replace(value, **changed)
    new = copy.copy(value)  # not made anew: what its constructor did is not done twice
    for name, item in changed.items():
        object.__setattr__(new, name, item)
    return new


def lowered(value: Any, dtype: torch.dtype) -> Any:
    """As ``cast``, but a finite mask constant below the range becomes its lowest value.

    -1e9 and ``finfo(float32).min`` are constants that mean "never"; as -inf
    they turn a row that is masked as a whole into NaN. A -inf stays -inf, and so
    does what overflows upwards or in a tensor that requires a gradient.
    """
    return cast(value, dtype, lower=True)


def _lowered_tensor(value: Tensor, dtype: torch.dtype) -> Tensor:
    plain = value.requires_grad or value.layout != torch.strided or value.is_nested
    lowest = torch.finfo(dtype).min
    if plain or lowest <= torch.finfo(value.dtype).min:
        return value.to(dtype)
    if value.dtype.itemsize < 4:  # bf16 has no such lowest value
        return held(value, dtype)
    # The sum is -inf for -inf, and else what was clamped: its other part is too small, and at most 4 anyhow.
    clamped, tiny = value.clamp(min=lowest), torch.finfo(value.dtype).smallest_normal
    if type(value) is not Tensor or not value.is_cuda or not _is_plain_eager():
        return clamped.add(value, alpha=tiny).to(dtype)
    return torch.add(clamped, value, alpha=tiny, out=torch.empty_like(value, dtype=dtype))  # one kernel, not two


def _is_plain_eager() -> bool:
    """True iff torch may be told where to write: nobody traces, transforms or takes forward derivatives."""
    traced = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None
    return not (traced or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0)


def held(value: Tensor, dtype: torch.dtype) -> Tensor:
    """As ``lowered``, for one tensor of a wider dtype that may require a gradient."""
    half = value.to(dtype)
    lost = (half == -torch.inf).logical_and_(value != -torch.inf)
    return half.masked_fill_(lost, torch.finfo(dtype).min)


def _refilled(value: Any, items: list[Any]) -> Any:
    """Return a list or tuple like ``value`` with other items; a subclass need not take them in its constructor."""
    plain = type(value) in (list, tuple, torch.Size) or hasattr(value, "n_sequence_fields")  # torch.return_types
    if plain or torch.compiler.is_compiling():
        return type(value)(items)
    if isinstance(value, list):
        new = copy.copy(value)
        new[:] = items
        return new
    new = tuple.__new__(type(value), items)
    new.__dict__.update(getattr(value, "__dict__", {}))
    return new


def _needs_cast(value: Any, dtype: torch.dtype, leave: frozenset[str]) -> bool:
    """Return True iff there is a floating tensor of another dtype inside, but for what is left alone."""
    if isinstance(value, Tensor):
        return value.dtype in CASTABLE and value.dtype != dtype
    if isinstance(value, (dict, UserDict)):
        items = [item for key, item in value.items() if key not in leave] if leave else list(value.values())
    elif isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None) if leave else None
        pairs = [] if names is None else zip(names, value, strict=True)
        items = list(value) if names is None else [item for key, item in pairs if key not in leave]
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = [getattr(value, f.name) for f in dataclasses.fields(value) if f.init and f.name not in leave]
    else:
        return False
    return any([_needs_cast(item, dtype, leave) for item in items])  # noqa: C419 (torch.compile traces no generator)


def quantised(tensor: Tensor) -> bool:
    """True iff the tensor stands for values that no plain floating tensor holds: torchao's and the like."""
    if type(tensor) in (Tensor, nn.Parameter):
        return False
    return is_traceable_wrapper_subclass(tensor) and not hasattr(tensor, "placements") and not tensor.is_nested


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
    """Forward pre-hook: floating arguments become ``dtype``.

    Args:
        dtype: what they become.
        leave: names of arguments, and keys and fields in them, that do not.
        positions: where arguments of these names may stand.
        rest: from where on every argument is left; ``None`` if only those are.
        lower: a finite mask constant stays finite; see ``lowered``.
    """

    def __init__(
        self,
        dtype: torch.dtype,
        leave: frozenset[str] = NOTHING,
        positions: frozenset[int] = frozenset(),
        rest: int | None = None,
        *,
        lower: bool = False,
    ) -> None:
        self.dtype = dtype
        self.leave = leave
        self.positions = positions
        self.rest = sys.maxsize if rest is None else rest
        self.lower = lower

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        """Return the arguments with their tensors cast, ``None`` if nothing is to be done."""
        if len(args) == 1 and not kwargs and isinstance(args[0], Tensor) and not self.positions:  # the commonest call
            return None if args[0].dtype == self.dtype else ((self._cast(args[0]),), kwargs)
        if self.positions:
            args = tuple([a if i in self.positions or i > self.rest else self._cast(a) for i, a in enumerate(args)])
        else:
            args = self._cast(args)
        return args, self._cast(kwargs)

    def _cast(self, value: Any) -> Any:
        return cast(value, self.dtype, self.leave, lower=self.lower)


class CastParameters:
    """Forward pre-hook: the module computes with its parameters cast to ``dtype``.

    The cast tensors hide the parameters under their names until ``ShowParameters``
    takes them away again; gradients reach the parameters themselves.
    """

    def __init__(self, dtype: torch.dtype, inside: frozenset[str] = frozenset({""})) -> None:
        self.dtype = dtype
        self.inside = inside

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Hide the parameters of the module and of what is inside it under the same rule."""
        for path, inner in module.named_modules():
            if path not in self.inside:
                continue
            for name, param in inner._parameters.items():
                if param is not None and param.dtype in CASTABLE and param.dtype != self.dtype:
                    inner.__dict__[name] = param.to(self.dtype)


class ShowParameters:
    """Forward hook, also after an exception: take away what ``CastParameters`` put there."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Show the parameters again, unless the module called itself and goes on with them."""
        if not torch.compiler.is_compiling() and runs_already(module):
            return
        for inner in module.modules():
            for name in inner._parameters:
                inner.__dict__.pop(name, None)


class CastOutputs:
    """Forward hook: floating results become ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        """Return the result with its tensors cast, ``None`` if nothing is to be done."""
        if isinstance(output, Tensor) and output.dtype == self.dtype:
            return None
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


def runs_already(model: nn.Module) -> bool:
    """True iff the forward of ``model`` that begins or ends is one within another. Looks at the call stack."""
    frame, calls = sys._getframe(), 0
    while frame is not None and calls < 2:
        calls += frame.f_code is nn.Module._call_impl.__code__ and frame.f_locals.get("self") is model
        frame = frame.f_back  # type: ignore[assignment]
    return calls == 2


def hookable(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules of ``model``, but for TorchScript's, which take no hooks on loading."""
    return (module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule))


def drop_hooks_(module: nn.Module, kinds: tuple[type, ...]) -> None:
    """Take hooks of these classes off one module, whoever registered them."""
    for hooks in (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._load_state_dict_pre_hooks,
        module._load_state_dict_post_hooks,
    ):
        for key in [key for key, hook in hooks.items() if isinstance(getattr(hook, "hook", hook), kinds)]:
            del hooks[key]
            for more in (
                module._forward_pre_hooks_with_kwargs,
                module._forward_hooks_with_kwargs,
                module._forward_hooks_always_called,
            ):
                more.pop(key, None)
