"""Where ``FunctionCasts`` are in force: in the own code of the modules that need them.

A mode costs about 1.5 us per torch call, so it must not run everywhere. The
first forward of each kind (training or not, with gradients or not, which
arguments) watches every module; afterwards hooks remain only on those whose
code called a function that a rule changes, or names one that the policy lists,
and on the modules that these call, to lift the mode there.

A compiler traces the forward of the outermost module and not the hooks around
it, so a mode of theirs would be in force while the compiled code runs: see ``tracing``.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode, _pop_mode, _push_mode

from mixedopt.casting import drop_hooks_, runs_already
from mixedopt.functions import FunctionCasts, mentions
from mixedopt.tracing import Traced, trace_in_mode_, traces_its_mode

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
        if not (isinstance(module, Traced) and traces_its_mode(module)):
            self.code.enter()


class Leave:
    """Forward hook of a module with an ``OwnCode``, called after exceptions too."""

    def __init__(self, code: OwnCode) -> None:
        self.code = code

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Take the mode away."""
        if not (isinstance(module, Traced) and traces_its_mode(module)):
            self.code.leave()


class FunctionScopes:
    """The modes of one converted model, and what was learnt about where they are needed.

    It knows modules by their names, so no model is kept alive by its own hooks.

    Args:
        model: the root.
        names: functions that run in fp32.
        dtype: the half format.
        masks: modules whose code leads to an fp32 softmax.
        alone: modules whose code nothing is done to.
    """

    def __init__(
        self,
        model: nn.Module,
        names: frozenset[str],
        dtype: torch.dtype,
        masks: frozenset[nn.Module] = frozenset(),
        alone: frozenset[nn.Module] = frozenset(),
    ) -> None:
        self._dtype = dtype
        self._modes = {
            name: FunctionCasts(names, dtype, masks=module in masks, narrows=bool(masks))
            for name, module in model.named_modules()
            if module is model or module in masks or (module not in alone and _has_own_code(module))
        }
        # Code that may take another way one day, without its arguments saying so.
        self._named = {
            name for name, module in model.named_modules() if name in self._modes and mentions(module, names)
        }
        self._codes: dict[str, OwnCode] = {}
        self._known: set[tuple[Any, ...]] = set()
        self._learning: tuple[Any, ...] | None = None
        self._warned = False

    @property
    def mode(self) -> FunctionCasts:
        """That of the root."""
        return self._modes[""]

    def begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before a forward of the root: watch everything if it is of a new kind."""
        given = tuple([_given(value) for value in args]), _given(kwargs)
        kind = (model.training, torch.is_grad_enabled(), given)
        if self._left_over() and not runs_already(model):
            self.clear()
        self._learning = None if kind in self._known else kind
        if self._learning is not None:
            for name, mode in self._modes.items():
                self.watch(model, name, mode)

    def end(self, model: nn.Module, output: Any) -> None:
        """After a forward of the root: keep the hooks that are needed."""
        if self._learning is not None:
            self._known.add(self._learning)
            self._settle(model)
            if _half_loss(output, self._dtype):
                self._warn()
        elif not self._warned and _half_loss(output, self._dtype):
            self._known.clear()  # the code took a way that was not seen before

    def clear(self) -> None:
        """Take away what a KeyboardInterrupt left in force: torch calls no hook for it."""
        while self._left_over():
            _pop_mode()  # type: ignore[no-untyped-call]

    def _left_over(self) -> bool:
        top = _get_current_function_mode()  # type: ignore[no-untyped-call]
        return isinstance(top, FunctionCasts) and any(top is mode for mode in self._modes.values())

    def watch(self, model: nn.Module, name: str, mode: FunctionCasts | None) -> None:
        """Put a mode in force in one module, or lift that of its callers."""
        if name in self._codes:
            self._codes[name].mode = mode
            return
        module = _submodule(model, name)
        if module is None:
            return
        code = self._codes[name] = OwnCode(mode)
        module.register_forward_pre_hook(Enter(code))
        module.register_forward_hook(Leave(code), always_call=True)

    def watch_all(self, model: nn.Module) -> None:
        """Put the modes in force everywhere, for a compiler, which runs no ``begin``."""
        for name, mode in self._modes.items():
            self.watch(model, name, mode)

    def _settle(self, model: nn.Module) -> None:
        acting = {name for name, mode in self._modes.items() if mode.acted} | self._named
        names = {module: name for name, module in model.named_modules()}  # one each, also of a shared module
        callers = [module for name in acting if (module := _submodule(model, name)) is not None]
        lifting = {names[child] for caller in callers for child in _called(caller)} - acting
        for name in list(self._codes):
            if name in acting:
                continue
            if name in lifting or not name:
                self._codes[name].mode = None
            else:
                del self._codes[name]
                if (module := _submodule(model, name)) is not None:
                    drop_hooks_(module, (Enter, Leave))
        for name in lifting:
            self.watch(model, name, None)

    def _warn(self) -> None:
        self._warned = True
        log.warning(
            "the model returns a loss in half precision: %s. Compute it with a loss function of torch.nn.functional, "
            "or from .float() values.",
            "with a loss scale of 65536 its gradient is infinite" if self._dtype == torch.float16 else "it has 8 bits",
        )


class Begin:
    """Forward pre-hook of the root."""

    def __init__(self, scopes: FunctionScopes) -> None:
        self.scopes = scopes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Tell the scopes."""
        if not torch.compiler.is_compiling():
            self.scopes.begin(module, args, kwargs)


class End:
    """Forward hook of the root."""

    def __init__(self, scopes: FunctionScopes) -> None:
        self.scopes = scopes

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Tell the scopes."""
        if not torch.compiler.is_compiling():
            self.scopes.end(module, output)


HOOKS = (Begin, End, Enter, Leave)


def install(model: nn.Module, scopes: FunctionScopes) -> None:
    """Put scopes on their model; ``drop_hooks_(module, HOOKS)`` takes them off each module."""
    model.register_forward_pre_hook(Begin(scopes), with_kwargs=True)  # in this order
    model.register_forward_hook(End(scopes))
    scopes.watch_all(model)
    if _has_own_code(model):
        trace_in_mode_(model, scopes.mode)


def pop_ours() -> FunctionCasts | None:
    """Take a mode of ours off the top of torch's stack, if one is there."""
    if not torch._C._len_torch_function_stack():
        return None
    top: Any = torch._C._pop_torch_function_stack()
    if isinstance(top, FunctionCasts):
        return top
    torch._C._push_on_torch_function_stack(top)
    return None


def runs_own_code(module: nn.Module) -> bool:
    """True iff code that is not torch's runs when the module is called: its class, or a hook, or a parametrization."""
    hooks = module._forward_pre_hooks or module._forward_hooks
    return bool(hooks) or nn.utils.parametrize.is_parametrized(module) or _has_own_code(module)


def _has_own_code(module: nn.Module) -> bool:
    """True iff the forward is not one of torch's modules, which call what they are named after."""
    return not type(module).__module__.startswith(("torch.", "mixedopt."))


def _called(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that the code of ``module`` may call and that call others."""
    for child in module.children():
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
            yield from _called(child)
        elif _has_own_code(child) or (any(child.children()) and not isinstance(child, torch.jit.ScriptModule)):
            yield child


def _submodule(model: nn.Module, name: str) -> nn.Module | None:
    """Return the module of that name, ``None`` if it was taken out of the model since."""
    module: Any = model
    for part in name.split(".") if name else ():
        module = module._modules.get(part)
        if module is None:
            return None
    return module  # type: ignore[no-any-return]


def _given(value: Any) -> Any:
    """Return what an argument says about the way through the code: whether it is there, and its keys."""
    if isinstance(value, dict):
        return tuple(sorted([(str(key), _given(item)) for key, item in value.items() if item is not None], key=str))
    return value if isinstance(value, bool) else value is not None


def _half_loss(output: Any, dtype: torch.dtype) -> bool:
    """True iff a scalar with a gradient is among the outputs, in half, and none in fp32."""
    inside = output.values() if isinstance(output, dict) else output if isinstance(output, (list, tuple)) else [output]
    scalars = {v.dtype for v in inside if isinstance(v, Tensor) and v.dim() == 0 and v.requires_grad}
    return dtype in scalars and torch.float32 not in scalars
