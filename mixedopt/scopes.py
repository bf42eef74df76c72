"""Where ``FunctionCasts`` are in force: in the own code of the modules that need them.

A mode costs about 1.5 us per torch call, so it must not run everywhere. The
first forward of each kind (training or not, with gradients or not, which
arguments) watches every module; afterwards hooks remain only on those whose
code called a function that a rule changes, and on the modules that these call,
to lift the mode there.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode

from mixedopt.casting import drop_hooks_, hookable
from mixedopt.functions import FunctionCasts

log = logging.getLogger("mixedopt")


class OwnCode:
    """Puts a mode in force around the code of one module, or lifts that of its caller.

    Args:
        mode: ``None`` lifts only.
    """

    def __init__(self, mode: FunctionCasts | None) -> None:
        self.mode = mode
        self._lifted: dict[int, list[FunctionCasts | None]] = {}

    def enter(self) -> None:
        """Lift the caller's mode, put ours in force."""
        if torch.compiler.is_compiling():  # nothing costs anything there, so nothing is lifted
            if self.mode is not None:
                self.mode.__enter__()  # type: ignore[no-untyped-call]
            return
        self._lifted.setdefault(threading.get_ident(), []).append(pop_ours())
        if self.mode is not None:
            _push_mode(self.mode)  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        """Undo ``enter``."""
        if torch.compiler.is_compiling():
            if self.mode is not None:
                self.mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            return
        lifted = self._lifted.get(threading.get_ident())
        if not lifted:  # a hook before ours raised
            return
        pop_ours()
        outer = lifted.pop()
        if outer is not None:
            _push_mode(outer)  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[type[OwnCode], tuple[FunctionCasts | None]]:
        return OwnCode, (self.mode,)


class Enter:
    """Forward pre-hook of a module with an ``OwnCode``."""

    def __init__(self, code: OwnCode) -> None:
        self.code = code

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Put the mode in force."""
        self.code.enter()


class Leave:
    """Forward hook of a module with an ``OwnCode``, called after exceptions too."""

    def __init__(self, code: OwnCode) -> None:
        self.code = code

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the mode away."""
        self.code.leave()


class FunctionScopes:
    """The modes of one converted model, and what was learnt about where they are needed.

    Args:
        model: the root.
        names: functions that run in fp32.
        dtype: the half format.
        masks: modules whose code leads to an fp32 softmax.
    """

    def __init__(
        self, model: nn.Module, names: frozenset[str], dtype: torch.dtype, masks: frozenset[nn.Module]
    ) -> None:
        self._model = model
        self._modes = {
            module: FunctionCasts(names, dtype, masks=module in masks)
            for module in hookable(model)
            if module is model or module in masks or _has_own_code(module)
        }
        self._codes: dict[nn.Module, OwnCode] = {}
        self._known: set[tuple[Any, ...]] = set()
        self._learning: tuple[Any, ...] | None = None
        self._warned = False
        self._watch(model, self._modes[model])

    def begin(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward of the root: watch everything if it is of a new kind."""
        given = tuple(sorted([key for key, value in kwargs.items() if value is not None]))
        kind = (self._model.training, torch.is_grad_enabled(), len(args), given)
        self.clear()
        self._learning = None if kind in self._known else kind
        if self._learning is not None:
            for module, mode in self._modes.items():
                self._watch(module, mode)

    def end(self, output: Any) -> None:
        """After a forward of the root: keep the hooks that are needed."""
        if self._learning is not None:
            self._known.add(self._learning)
            self._settle()
            if _half_loss(output, self._modes[self._model].dtype):
                self._warn()
        elif not self._warned and _half_loss(output, self._modes[self._model].dtype):
            self._known.clear()  # the code took a way that was not seen before

    def clear(self) -> None:
        """Take away what a KeyboardInterrupt left in force: torch calls no hook for it."""
        while isinstance(top := _get_current_function_mode(), FunctionCasts):  # type: ignore[no-untyped-call]
            if not any(top is mode for mode in self._modes.values()):
                return
            _pop_mode()  # type: ignore[no-untyped-call]

    def _watch(self, module: nn.Module, mode: FunctionCasts | None) -> None:
        if module in self._codes:
            self._codes[module].mode = mode
            return
        code = self._codes[module] = OwnCode(mode)
        module.register_forward_pre_hook(Enter(code), prepend=True)
        module.register_forward_hook(Leave(code), always_call=True)

    def _settle(self) -> None:
        acting = {module for module, mode in self._modes.items() if mode.acted}
        lifting = {child for module in acting for child in _called(module)} - acting
        for module in list(self._codes):
            if module in acting:
                continue
            if module in lifting or module is self._model:
                self._codes[module].mode = None
            else:
                del self._codes[module]
                drop_hooks_(module, (Enter, Leave))
        for module in lifting:
            self._watch(module, None)

    def _warn(self) -> None:
        self._warned = True
        log.warning(
            "the model returns a loss in half precision: with a loss scale of 65536 its gradient is infinite. Compute "
            "it with a function of torch.nn.functional, or from .float() values."
        )


class Begin:
    """Forward pre-hook of the root."""

    def __init__(self, scopes: FunctionScopes) -> None:
        self.scopes = scopes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the scopes."""
        if not torch.compiler.is_compiling():
            self.scopes.begin(args, kwargs)


class End:
    """Forward hook of the root."""

    def __init__(self, scopes: FunctionScopes) -> None:
        self.scopes = scopes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Tell the scopes."""
        if not torch.compiler.is_compiling():
            self.scopes.end(output)


HOOKS = (Begin, End, Enter, Leave)


def install(model: nn.Module, names: frozenset[str], dtype: torch.dtype, masks: frozenset[nn.Module]) -> FunctionScopes:
    """Put ``FunctionScopes`` on a model; ``drop_hooks_(module, HOOKS)`` takes them off each module."""
    scopes = FunctionScopes(model, names, dtype, masks)
    model.register_forward_pre_hook(Begin(scopes), with_kwargs=True, prepend=True)
    model.register_forward_hook(End(scopes))
    return scopes


def pop_ours() -> FunctionCasts | None:
    """Take a mode of ours off the top of torch's stack, if one is there."""
    top = _get_current_function_mode()  # type: ignore[no-untyped-call]
    if not isinstance(top, FunctionCasts):
        return None
    _pop_mode()  # type: ignore[no-untyped-call]
    return top


def _has_own_code(module: nn.Module) -> bool:
    """True iff the forward is not one of torch's modules, which call what they are named after."""
    return not type(module).__module__.startswith(("torch.nn.modules", "mixedopt."))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that the code of ``module`` may call and that call others."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif not isinstance(child, torch.jit.ScriptModule) and (any(child.children()) or _has_own_code(child)):
            yield child


def _half_loss(output: Any, dtype: torch.dtype) -> bool:
    """True iff a scalar with a gradient is among the outputs, in half."""
    inside = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else [output]
    return any(isinstance(v, Tensor) and v.dim() == 0 and v.dtype == dtype and v.requires_grad for v in inside)
