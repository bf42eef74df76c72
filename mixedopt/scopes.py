"""Where ``FunctionCasts`` are in force: in the own code of the modules that need them.

A mode costs about 1.5 us per torch call, so it must not run everywhere. The
first forward of each kind (training or not, with gradients or not, which
arguments) watches every module; afterwards only those stay watched whose code
called a function that a rule changes, or names one that the policy lists, and
the modules that these call, to lift the mode there.

A watched module is of a class whose ``forward`` does that. Hooks would do it
too, but they cost more than the code of a small module, none is called after a
KeyboardInterrupt, and a compiler traces a forward and not the hooks around the
outermost one: compiled code would then run under the mode.
"""

from __future__ import annotations

import copyreg
import functools
import logging
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Proxy

from mixedopt.functions import FunctionCasts, mentions

log = logging.getLogger("mixedopt")


class OwnCode:
    """Runs the forward of one module in a mode, and not in that of its caller.

    Args:
        mode: ``None`` lifts that of the caller only.
    """

    def __init__(self, mode: FunctionCasts | None) -> None:
        self.mode = mode

    def run(self, module: nn.Module, kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the forward of ``kind`` returns."""
        mode = self.mode
        if torch.compiler.is_compiling():  # nothing costs anything there, so nothing is lifted
            if mode is None:
                return kind.forward(module, *args, **kwargs)
            with mode:
                return kind.forward(module, *args, **kwargs)
        outer = _pop_ours()
        if mode is not None:
            torch._C._push_on_torch_function_stack(mode)
        try:
            return kind.forward(module, *args, **kwargs)
        finally:
            if mode is not None:
                _pop_ours()
            if outer is not None:
                torch._C._push_on_torch_function_stack(outer)


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
        self._codes = {"": OwnCode(self._modes[""])}
        self._known: set[tuple[Any, ...]] = set()
        self._learning: tuple[Any, ...] | None = None
        self._warned = False

    def run(self, model: nn.Module, kind: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what the forward of ``kind``, that of the root, returns, and learn from it."""
        own = self._codes[""]
        # Nothing can be learnt where a compiler or a symbolic trace looks at the code without values.
        if torch.compiler.is_compiling() or any(isinstance(value, Proxy) for value in (*args, *kwargs.values())):
            return own.run(model, kind, args, kwargs)
        self._begin(model, args, kwargs)
        output = own.run(model, kind, args, kwargs)
        self._end(model, output)
        return output

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Watch everything if this forward is of a new kind."""
        given = tuple([_given(value) for value in args]), _given(kwargs)
        kind = (model.training, torch.is_grad_enabled(), given)
        self._learning = None if kind in self._known else kind
        if self._learning is not None:
            for name, mode in self._modes.items():
                self.watch(model, name, mode)

    def _end(self, model: nn.Module, output: Any) -> None:
        """Keep those watched that need it."""
        if self._learning is not None:
            self._known.add(self._learning)
            self._settle(model)
            if _half_loss(output, self._dtype):
                self._warn()
        elif not self._warned and _half_loss(output, self._dtype):
            self._known.clear()  # the code took a way that was not seen before

    def watch(self, model: nn.Module, name: str, mode: FunctionCasts | None) -> None:
        """Put a mode in force in one module, or lift that of its callers."""
        if name in self._codes:
            self._codes[name].mode = mode
            return
        module = _submodule(model, name)
        if module is None:
            return
        self._codes[name] = OwnCode(mode)
        _put_(module, self._codes[name])

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
                    take_off_(module)
        for name in lifting:
            self.watch(model, name, None)

    def _warn(self) -> None:
        self._warned = True
        log.warning(
            "the model returns a loss in half precision: %s. Compute it with a loss function of torch.nn.functional, "
            "or from .float() values.",
            "with a loss scale of 65536 its gradient is infinite" if self._dtype == torch.float16 else "it has 8 bits",
        )


class Scoped(nn.Module):
    """What the class of a watched module is, beside its own."""

    _mixedopt_code: OwnCode | FunctionScopes | None = None  # none in a module that such a class has made since

    def __init_subclass__(cls, **options: Any) -> None:
        """Do nothing: what the user's class does for each subclass is not meant for these."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle by the class that the module had."""
        made: Any = super().__reduce_ex__(protocol)
        if made[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return made
        kind, *args = made[1]
        return _anew, (kind_of(kind), *args), *made[2:]


def scoped(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a watched module becomes: a ``kind``, of its name; its code runs the forward."""
    if (known := next((each for each in type.__subclasses__(kind) if Scoped in each.__bases__), None)) is not None:
        return known

    @functools.wraps(kind.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        code = self._mixedopt_code
        return kind.forward(self, *args, **kwargs) if code is None else code.run(self, kind, args, kwargs)

    about = {name: getattr(kind, name) for name in ("__module__", "__qualname__", "__doc__")}
    return types.new_class(kind.__name__, (Scoped, kind), {}, lambda body: body.update(about, forward=forward))


def kind_of(kind: type[nn.Module]) -> type[nn.Module]:
    """Return the class that a watched module had."""
    return kind.__bases__[1] if Scoped in kind.__bases__ else kind


def install(model: nn.Module, scopes: FunctionScopes) -> None:
    """Put scopes on their model; ``take_off_`` takes them off, of each module."""
    _put_(model, scopes)
    scopes.watch_all(model)


def take_off_(module: nn.Module) -> None:
    """Give a module its class back, also one that was parametrized since, whose class is made for it alone."""
    kind = type(module)
    if Scoped in kind.__mro__:
        vars(module).pop("_mixedopt_code", None)
        if Scoped in kind.__bases__:
            module.__class__ = kind_of(kind)
        else:
            kind.__bases__ = tuple(kind_of(base) for base in kind.__bases__)


def _put_(module: nn.Module, code: OwnCode | FunctionScopes) -> None:
    module.__class__ = scoped(kind_of(type(module)))
    module._mixedopt_code = code  # type: ignore[assignment]


def _anew(kind: type[nn.Module], *args: Any) -> nn.Module:
    """Return an empty module of the class that a ``kind`` becomes."""
    kind = scoped(kind)
    made: nn.Module = kind.__new__(kind, *args)
    return made


def _pop_ours() -> FunctionCasts | None:
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
