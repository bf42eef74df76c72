"""What a compiler sees of the mode of a model.

It traces the forward of the outermost module, and not the hooks around it: a
mode that such a hook puts in force would be in force while the compiled code
runs, where every call of torch pays for it. So the root becomes a subclass of
its class whose ``forward`` enters the mode where it is traced, and which does
nothing otherwise.
"""

from __future__ import annotations

import copyreg
import functools
import inspect
import types
from abc import ABCMeta
from typing import Any

import torch
from torch import nn

from mixedopt.functions import FunctionCasts


class Traced(nn.Module):
    """What the class of a converted root is, beside its own; without a compiler it does nothing."""

    _mixedopt_mode: FunctionCasts | None = None  # none in a module that such a class has made since

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing: what the user's class does for each subclass is not meant for these."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that the root had."""
        made: Any = super().__reduce_ex__(max(protocol, 2))
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        kind, *args = made[1]
        return _anew, (_kind_of(kind), *args), *made[2:]


def traced(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a ``kind`` of its name, whose ``forward`` enters the mode of the module where a compiler traces it."""
    if (known := next((each for each in type.__subclasses__(kind) if Traced in each.__bases__), None)) is not None:
        return known

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if traces_its_mode(self):
            with self._mixedopt_mode:
                return kind.forward(self, *args, **kwargs)
        return kind.forward(self, *args, **kwargs)

    vars(forward)["_mixedopt_enters"] = True
    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(kind.__name__, (Traced, kind), {}, lambda body: body.update(about, forward=forward))


def take_off_(module: nn.Module) -> None:
    """Give a root its class back, also one that was parametrized since, whose class is made for it alone."""
    kind = type(module)
    vars(module).pop("_mixedopt_mode", None)
    if Traced in kind.__mro__:
        if Traced in kind.__bases__:
            module.__class__ = _kind_of(kind)
        else:
            kind.__bases__ = tuple(_kind_of(base) for base in kind.__bases__)


def trace_in_mode_(model: nn.Module, mode: FunctionCasts) -> None:
    """Let compilers trace the mode of a root of a common kind; that of others stays in force while their code runs."""
    kind = type(model)
    forward = inspect.getattr_static(kind, "forward", None)
    common = (
        type(kind) in (type, ABCMeta)
        and inspect.isfunction(forward)
        and not (inspect.iscoroutinefunction(forward) or inspect.isgeneratorfunction(forward))
        and "__class__" not in forward.__code__.co_names  # ``super(self.__class__, self)`` would find itself
        and "forward" not in vars(model)
        and not isinstance(model, torch.fx.GraphModule)
        and not nn.utils.parametrize.is_parametrized(model)
        and all(getattr(kind, name) is getattr(object, name) for name in ("__reduce__", "__reduce_ex__"))
        and not any(hasattr(kind, name) for name in ("__getnewargs__", "__getnewargs_ex__"))
        and kind.__getattribute__ is object.__getattribute__
        and kind.__setattr__ is nn.Module.__setattr__
    )
    if common:
        model.__class__ = traced(kind)
        vars(model)["_mixedopt_mode"] = mode


def traces_its_mode(module: Traced) -> bool:
    """True iff a compiler traces this module, and its ``forward`` enters the mode itself."""
    held = module.__dict__
    if not torch.compiler.is_compiling() or "forward" in held or "_mixedopt_mode" not in held:
        return False
    return hasattr(type(module).forward, "_mixedopt_enters")  # nobody has given the class another


def _kind_of(kind: type[nn.Module]) -> type[nn.Module]:
    return kind.__bases__[1] if Traced in kind.__bases__ else kind


def _anew(kind: type[nn.Module], *args: Any) -> nn.Module:
    """Return an empty root."""
    kind = traced(kind)
    made: nn.Module = kind.__new__(kind, *args)
    return made
