"""An fp32 checkpoint loaded into the half model reaches the masters unrounded."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mixedopt.bucket import HALF_DTYPES, beyond_range, unfit_error
from mixedopt.casting import WeakHook, hookable
from mixedopt.masters import MasterWeights


class Fp32Loads:
    """Hooks on ``load_state_dict`` of every module of a wrapped model.

    Torch rounds the values into the half parameters; the masters take the fp32
    values from which that was done. Values that the half format cannot hold are
    refused before their module is written.

    Args:
        model: whose loads are watched.
        masters: where the values go.
    """

    def __init__(self, model: nn.Module, masters: MasterWeights) -> None:
        self._masters = masters
        self._offered: list[tuple[nn.Parameter, Tensor]] = []
        before, after = WeakHook(self._before), WeakHook(self._after)
        self._handles: list[RemovableHandle] = []
        for module in hookable(model):
            self._handles.append(module.register_load_state_dict_pre_hook(before))  # type: ignore[no-untyped-call]
            self._handles.append(module.register_load_state_dict_post_hook(after))  # type: ignore[no-untyped-call]

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _before(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        params = dict(module.named_parameters(recurse=False))
        # The values that are written over tell which are new; split masters are joined while they are there.
        self._masters.lend_(p for n, p in params.items() if prefix + n in state_dict and p in self._masters.of)
        for name, param in params.items():
            value = state_dict.get(prefix + name)
            if param.dtype not in HALF_DTYPES or not isinstance(value, Tensor) or value.dtype != torch.float32:
                continue
            if (size := beyond_range(value, param.dtype)) is not None:
                raise unfit_error(prefix + name, size, param.dtype)
            if param in self._masters.of and value.shape == param.shape:
                self._offered.append((param, value))

    def _after(self, module: nn.Module, keys: Any) -> None:
        offered, self._offered = self._offered, []
        with torch.no_grad():
            for param, value in offered:
                if torch.equal(param, value.to(param)):  # it was taken
                    self._masters.of[param].copy_(value)
            # At once: what the masters show next may be another point, as after a schedule-free eval().
            self._masters.adopt_(param for param in module.parameters(recurse=False) if param in self._masters.of)
