"""One forward that changes nothing, to see which functions a model's own code calls."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import _len_torch_function_stack
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode

from mixedopt.functions import LOSS_FUNCTIONS, PRODUCTS, not_in_place, spelt

HALF = frozenset({torch.float16, torch.bfloat16})
WIDE = frozenset({torch.float32, torch.float64})


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
        "batch_norm", "group_norm", "instance_norm", "layer_norm", "log_softmax", "multi_head_attention_forward",
        "rms_norm", "scaled_dot_product_attention", "softmax", "softmin",
    ], SAFE),
    **dict.fromkeys(LOSS_FUNCTIONS, LOSSES),
    **dict.fromkeys([
        "cosine_similarity", "cumprod", "cumsum", "logcumsumexp", "logsumexp", "mean", "nanmean", "nansum", "norm",
        "normalize", "prod", "std", "std_mean", "sum", "var", "var_mean", "vector_norm",
    ], SUMS),
    **dict.fromkeys(["exp", "expm1", "pow", "square"], POWERS),
}
# What a module holds beside plain attributes, and the hooks on its forward.
HELD = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")
HOOKS = (
    "_forward_pre_hooks", "_forward_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs",
    "_forward_hooks_always_called",
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Calls:
    """What a dry run saw.

    Attributes:
        half: True iff parameters were half, so that only calls on half tensors count.
        functions: kind -> module name -> functions its own code called.
        products: parameters that were operands of a matrix product.
        repeats: weight of an embedding -> how often its commonest id came up in one call.
    """

    half: bool = False
    functions: dict[Kind, dict[str, set[str]]] = field(default_factory=dict)
    products: set[nn.Parameter] = field(default_factory=set)
    repeats: dict[nn.Parameter, int] = field(default_factory=dict)


class _Recorder(TorchFunctionMode):
    """Notes calls on floating tensors under the name of the module that makes them."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self._calls = calls
        self.within: list[tuple[str, bool]] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if spelt(name) in PRODUCTS:
            self._calls.products.update(v for v in (*args, *kwargs.values()) if isinstance(v, nn.Parameter))
        elif name in ("embedding", "embedding_bag") and kwargs.get("mode") != "max":
            self._count(*args, **kwargs)
        kind = KINDS.get(rule_name(name))
        module, own_code = self.within[-1] if self.within else ("", False)
        if kind and own_code and self._narrow([*args, *kwargs.values()]):
            self._calls.functions.setdefault(kind, {}).setdefault(module, set()).add(name)
        return func(*args, **kwargs)

    def _narrow(self, values: list[Any]) -> bool:
        """True iff there is an operand that is or becomes half, and the call asks for no wider ``dtype``."""
        asked = any(isinstance(value, torch.dtype) and value in WIDE for value in values)
        tensors = [value for value in values if isinstance(value, Tensor)]
        return not asked and any(t.dtype in HALF if self._calls.half else t.is_floating_point() for t in tensors)

    def _count(self, input: Tensor, weight: Tensor, *rest: Any, padding_idx: int | None = None, **more: Any) -> None:
        """Count the commonest id; that of the padding gets no gradient."""
        if not isinstance(weight, nn.Parameter) or not weight.requires_grad or input.is_meta:
            return
        ids = input.flatten()
        if padding_idx is not None:
            ids = ids[ids != padding_idx % weight.shape[0]]
        if ids.numel():
            most = int(torch.unique(ids, return_counts=True)[1].max())
            self._calls.repeats[weight] = max(most, self._calls.repeats.get(weight, 0))


def rule_name(name: str) -> str:
    """Return a name for ``keep_functions``: for what writes into its argument, the one that does not."""
    return not_in_place(spelt(name))


def dry_run(model: nn.Module, inputs: Tensor | tuple[Any, ...] | Mapping[str, Any]) -> Calls:
    """Run ``model`` once in eval mode, without gradients, and say what its code called.

    Attributes, buffers, hooks, training flags and torch's random state are as
    before afterwards; what the code writes elsewhere, as into a list, is not
    undone. Calls that torch's own modules make are left out: module rules
    reach those. Compiled parts run eagerly.

    Raises:
        ValueError: if the forward raises; that error is its cause.

    Syncs: one read of random state, one for each embedding.
    """
    calls = Calls(half=any(param.dtype in HALF for param in model.parameters()))
    recorder = _Recorder(calls)
    args: tuple[Any, ...] = inputs if isinstance(inputs, tuple) else () if isinstance(inputs, Mapping) else (inputs,)
    kwargs = dict(inputs) if isinstance(inputs, Mapping) else {}
    with ExitStack() as stack:
        stack.enter_context(_as_before(model))
        for name, module in model.named_modules():
            if not isinstance(module, torch.jit.ScriptModule):  # takes no hooks; its calls are its own
                _watch(recorder, name, module)
        stack.enter_context(torch.no_grad())
        if "torch._dynamo" in sys.modules:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(_unwind, _len_torch_function_stack())
        _push_mode(recorder)  # type: ignore[no-untyped-call]
        try:
            model(*args, **kwargs)
        except Exception as error:
            raise ValueError(f"explain(inputs=...): the model raised {type(error).__name__}: {error}") from error
    return calls


def _unwind(depth: int) -> None:
    """Take off the recorder, and what a KeyboardInterrupt left above it."""
    while _len_torch_function_stack() > depth:
        _pop_mode()  # type: ignore[no-untyped-call]


def _watch(recorder: _Recorder, name: str, module: nn.Module) -> None:
    own_code = not type(module).__module__.startswith(("torch.", "mixedopt."))

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        recorder.within.append((name, own_code))

    def leave(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        recorder.within.pop()

    module.register_forward_pre_hook(enter, prepend=True)  # so that no leave is without its enter
    module.register_forward_hook(leave, always_call=True)


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Put attributes, hooks, training flags, buffers and random state back afterwards."""
    flags = [(module, module.training) for module in model.modules()]
    plain = [module for module in model.modules() if not isinstance(module, torch.jit.ScriptModule)]
    attributes = [(vars(module), dict(vars(module))) for module in plain]
    held = [(table, copy.copy(table)) for module in plain for table in (vars(module)[key] for key in HELD)]
    buffers = [(b, b.clone(), b._version) for b in model.buffers() if not b.is_inference()]
    devices = {t.device for t in (*model.parameters(), *model.buffers()) if t.is_cuda}
    with torch.random.fork_rng(devices=list(devices)):
        try:
            _set_hooks_aside(plain)
            model.eval()
            yield
        finally:
            for live, saved in (*attributes, *held):
                live.clear()
                live.update(saved)
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for buffer, values, version in buffers:
                    if buffer._version != version:  # a write that changes nothing would break a waiting backward
                        buffer.copy_(values)


def _set_hooks_aside(modules: list[nn.Module]) -> None:
    """Let copies of the hooks run: those of a conversion learn from every forward."""
    memo: dict[int, Any] = {}
    for module in modules:
        for key in HOOKS:
            table = copy.copy(vars(module)[key])
            for hook_id, hook in table.items():
                if type(hook).__module__.startswith("mixedopt."):
                    table[hook_id] = copy.deepcopy(hook, memo)
            vars(module)[key] = table
