"""One forward that changes nothing, to see which functions a model's own code calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mixedopt.functions import LOSS_FUNCTIONS


@dataclass(frozen=True, slots=True)
class Kind:
    """A group of functions.

    Attributes:
        name: what they have in common.
        safe: True iff on half inputs they equal casting up and rounding back.
    """

    name: str
    safe: bool


SAFE = Kind("softmax, norms, attention", True)
LOSSES = Kind("losses", False)
SUMS = Kind("long sums", False)
POWERS = Kind("exponentials", False)
# fmt: off
KINDS: Mapping[str, Kind] = {
    **dict.fromkeys([
        "batch_norm", "group_norm", "instance_norm", "layer_norm", "log_softmax", "rms_norm",
        "scaled_dot_product_attention", "softmax",
    ], SAFE),
    **dict.fromkeys(LOSS_FUNCTIONS, LOSSES),
    **dict.fromkeys([
        "cumprod", "cumsum", "logcumsumexp", "logsumexp", "mean", "nansum", "norm", "prod", "std", "sum", "var",
    ], SUMS),
    **dict.fromkeys(["__pow__", "__rpow__", "exp", "expm1", "pow", "square"], POWERS),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class Calls:
    """What a dry run saw.

    Attributes:
        functions: kind -> module name -> functions its own code called.
        repeats: embedding's name -> how often its commonest id came up.
    """

    functions: dict[Kind, dict[str, set[str]]] = field(default_factory=dict)
    repeats: dict[str, int] = field(default_factory=dict)


class _Recorder(TorchFunctionMode):
    """Notes calls on floating tensors under the name of the module that makes them."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls
        self.within: list[tuple[str, bool]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        floating = any(isinstance(a, Tensor) and a.is_floating_point() for a in (*args, *(kwargs or {}).values()))
        if name in KINDS and floating and self.within and not self.within[-1][1]:
            self._calls.functions.setdefault(KINDS[name], {}).setdefault(self.within[-1][0], set()).add(name)
        return func(*args, **(kwargs or {}))


def dry_run(model: nn.Module, inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> Calls:
    """Run ``model`` once in eval mode, without gradients, and say what its code called.

    Buffers, training flags and random state are as before afterwards. Calls
    that torch's own leaf modules make are what these are named after; they are
    left out.

    Raises:
        ValueError: if the forward raises; that error is its cause.
    """
    calls = Calls()
    recorder = _Recorder(calls)
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    with ExitStack() as stack:
        stack.enter_context(_as_before(model))
        for name, module in model.named_modules():
            for handle in _watch(recorder, calls, name, module):
                stack.callback(handle.remove)
        stack.enter_context(torch.no_grad())
        stack.enter_context(recorder)
        try:
            model(*args, **kwargs)
        except Exception as error:
            raise ValueError(f"explain(inputs=...): the model raised {type(error).__name__}: {error}") from error
    return calls


def _watch(recorder: _Recorder, calls: Calls, name: str, module: nn.Module) -> Iterator[Any]:
    leaf = type(module).__module__.startswith("torch.nn.modules") and not any(module.children())

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        recorder.within.append((name, leaf))
        if isinstance(module, nn.Embedding) and args and isinstance(args[0], Tensor) and args[0].numel():
            most = int(torch.bincount(args[0].flatten()).max())
            calls.repeats[name] = max(most, calls.repeats.get(name, 0))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.within.pop()

    yield module.register_forward_pre_hook(enter)
    yield module.register_forward_hook(leave)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put training flags, buffers and random state back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            model.eval()
            yield
        finally:
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for buffer, saved in buffers:
                    buffer.copy_(saved)
