"""What a step that does not happen must take back.

The finite check precedes every write to masters and state, so a skipped step
needs no undo there. Two things are written before the decision or outside our
hands: running statistics, by the forward; and everything, by an inner
optimizer that raises in the middle of its first step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from mixedopt.bucket import Bucket
from mixedopt.casting import WeakHook
from mixedopt.copies import copied
from mixedopt.groups import nested


class NormStatistics:
    """Running statistics of norm layers as they were when the window began.

    A window begins with the first train-mode forward after a step: a hook on
    each norm layer copies all of them then. A compiled model runs no hook; for
    it the copy made at the end of the last step stands.

    Args:
        model: every norm layer with running statistics inside it is watched.
        kernels: on a GPU, choose what to write back by a kernel of ours.
    """

    def __init__(self, model: nn.Module, *, kernels: bool = False) -> None:
        self._kernels = kernels
        self._rows: list[list[int]] = []
        self._on_device = torch.empty(0)
        self._layers = [m for m in model.modules() if isinstance(m, _NormBase) and m.track_running_stats]
        self._live: list[Tensor] = []
        self._saved: list[Tensor] = []
        self._versions: list[int] = []
        self._open = False
        hook = WeakHook(self._before)
        self._handles: list[RemovableHandle] = [m.register_forward_pre_hook(hook) for m in self._layers]
        self._save_()

    def restore_(self) -> None:
        """Write the statistics back as they were."""
        moved = [buffer._version for buffer in self._live] != self._versions
        if self._layers and moved:
            _copy_(self._live, self._saved)

    def restore_if_(self, skipped: Tensor) -> None:
        """Write the statistics back iff ``skipped``, a number on the device, is not 0. Syncs: none."""
        if not self._layers or [buffer._version for buffer in self._live] == self._versions:
            return
        if skipped.device.type == "cpu":
            if bool(skipped):
                self.restore_()
            return
        if self._kernels and all(buffer.device == skipped.device for buffer in self._live):
            from mixedopt.gather_kernels import restore_

            restore_(skipped, *self._table(skipped.device).unbind())
            return
        for live, saved in zip(self._live, self._saved, strict=True):
            there = skipped.to(live.device, non_blocking=True)
            live.copy_(torch.where(there != 0, saved, live))

    def _table(self, device: torch.device) -> Tensor:
        """Return where the statistics lie, where their copies do, and how many bytes they take; int64, on a GPU."""
        pairs = list(zip(self._live, self._saved, strict=True))
        rows = [[live.data_ptr(), saved.data_ptr(), live.nbytes] for live, saved in pairs]
        rows += [[0, 0, 0]] * (len(rows) % 2)  # each line of the table then begins at a multiple of 16 bytes
        if rows != self._rows:
            table = torch.tensor(rows, dtype=torch.int64, device="cpu").t().contiguous().pin_memory()
            self._on_device, self._rows = table.to(device, non_blocking=True), rows
        return self._on_device

    def taken(self) -> list[Tensor]:
        """Return copies of the statistics as they are now."""
        return [buffer.clone() for buffer in self._buffers()]

    def put_back_(self, copies: Sequence[Tensor]) -> None:
        """Write back what ``taken`` returned."""
        _copy_(self._buffers(), copies)

    def close(self) -> None:
        """End the window: what is there now stands."""
        self._open = False
        self._save_()

    def remove(self) -> None:
        """Stop watching."""
        for handle in self._handles:
            handle.remove()

    def _buffers(self) -> list[Tensor]:
        """Return those that are there; several times in a step, so not by torch's iterator."""
        return [buffer for layer in self._layers for buffer in layer._buffers.values() if buffer is not None]

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if module.training and not self._open:
            self._open = True
            self._save_()

    def _save_(self) -> None:
        live = self._buffers()
        versions = [buffer._version for buffer in live]
        if [id(buffer) for buffer in live] != [id(buffer) for buffer in self._live]:
            self._saved = [buffer.clone() for buffer in live]
        elif versions != self._versions:
            _copy_(self._saved, live)
        self._live, self._versions = live, versions


@torch.no_grad()
def _copy_(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy in one call per dtype: mixed lists take torch's slow path."""
    for dtype in {target.dtype for target in targets}:
        pairs = [(t, s) for t, s in zip(targets, sources, strict=True) if t.dtype == dtype]
        torch._foreach_copy_([target for target, _ in pairs], [source for _, source in pairs])


class Snapshot:
    """Context of a step that may fail half-way: if it raises, all is undone.

    Optimizers refuse what they cannot do in the middle of their first step
    (Adafactor an empty tensor), and those that evaluate the model several times
    may meet an inf at any of them, with part of the weights moved. Masters,
    state and hyperparameters are copied for that one step.

    Args:
        inner: the optimizer about to step.
        buckets: whose masters it may write.
        device: where the copies of the masters go; ``None`` leaves them on
            theirs.
    """

    def __init__(
        self, inner: torch.optim.Optimizer, buckets: Sequence[Bucket], device: torch.device | None = None
    ) -> None:
        self._optimizers = nested(inner)
        self._buckets = buckets
        self._device = device
        self._masters: list[Tensor] = []
        self._state: list[dict[Tensor, Any]] = []
        self._hyper: list[list[dict[str, Any]]] = []
        self._counters: list[dict[str, Any]] = []

    def __enter__(self) -> None:
        self._masters = [b.flat_master.to(self._device or b.device, copy=True) for b in self._buckets]
        self._state = [_entries(optimizer.state) for optimizer in self._optimizers]
        self._hyper = [[_entries(g, but="params") for g in o.param_groups] for o in self._optimizers]
        self._counters = [{k: v for k, v in vars(o).items() if isinstance(v, (int, float))} for o in self._optimizers]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            return
        for bucket, saved in zip(self._buckets, self._masters, strict=True):
            bucket.flat_master.copy_(saved)
        saved_of = zip(self._optimizers, self._state, self._hyper, self._counters, strict=True)
        for optimizer, state, hyper, counters in saved_of:
            optimizer.state.clear()
            optimizer.state.update(state)
            vars(optimizer).update(counters)
            for group, values in zip(optimizer.param_groups, hyper, strict=True):
                _restore_(group, values)


def _entries(held: Mapping[Any, Any], but: str | None = None) -> dict[Any, Any]:
    return {key: copied(value) for key, value in held.items() if key != but}


def _restore_(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key in set(group) - set(values) - {"params"}:
        del group[key]
    for key, value in values.items():
        if isinstance(value, Tensor) and isinstance(group.get(key), Tensor):
            group[key].copy_(value)  # schedulers hold a tensor learning rate itself
        else:
            group[key] = value
