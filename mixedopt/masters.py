"""The fp32 masters: made, published to the model, refreshed from it.

A bucket holds the slots of one device and one model dtype. Half parameters are
views of the bucket's flat half buffer and have masters in its flat fp32
buffer; fp32 parameters are views of that fp32 buffer themselves, so they are
their own masters and there is no second copy.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from mixedopt.flat import Layout, plan_layout
from mixedopt.gradients import largest

HALF_DTYPES = (torch.float16, torch.bfloat16)

_VERSION = operator.attrgetter("_version")  # mapped: half the time of a comprehension, every step

NamedParameters = Sequence[tuple[str, nn.Parameter]]
# What of a slot has changed: all, nothing, or some rows.
Moved = bool | Tensor


class Bucket:
    """Parameters of one device and one dtype, with their masters.

    Making one re-points the storage of every parameter: parameter *identity*
    stays, so hooks, ties and groups hold. The peak is 8 bytes a value and one
    tensor for fp32 parameters that become half, 6 afterwards.

    Invariants between calls: ``params[i]`` equals ``masters[i]`` rounded to
    ``dtype``; both are views of the flat buffers at slot ``i``.

    Args:
        named: names and parameters, all on one device.
        dtype: what the parameters become: fp16, bf16 or fp32.
    """

    def __init__(self, named: NamedParameters, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.params = [param for _, param in named]
        self.device = self.params[0].device
        self.layout: Layout = plan_layout([(name, param.detach()) for name, param in named])
        self.flat_master = torch.zeros(self.layout.size, dtype=torch.float32, device=self.device)
        for param, view in zip(self.params, self.layout.model_views(self.flat_master), strict=True):
            view.copy_(param.detach())
            param.grad = None
            if param.dtype not in HALF_DTYPES:
                # Frees the original before the half buffer is made. A half one must not change its dtype for a
                # moment: it would get another gradient accumulator, without DDP's hook.
                param.data = view
        # An fp32 parameter and its master share storage and version counter.
        shown = self.layout.views(self.flat_master) if self.is_half else [param.detach() for param in self.params]
        self.masters = [nn.Parameter(view) for view in shown]
        self.flat_model = self.flat_master
        if self.is_half:
            self.flat_model = self.flat_master.to(dtype)
            for param, view in zip(self.params, self.layout.model_views(self.flat_model), strict=True):
                param.data = view
        self._note_storage()
        self._master_pointers = list(map(Tensor.data_ptr, self.masters))

    @property
    def is_half(self) -> bool:
        """True iff the model's parameters are half, and not their own masters."""
        return self.dtype in HALF_DTYPES

    @property
    def names(self) -> list[str]:
        """Parameter names in slot order."""
        return [slot.name for slot in self.layout.slots]

    def publish_(self, moved: Sequence[Moved] | None = None) -> None:
        """Write the masters, rounded once, into the model. Syncs: none.

        Args:
            moved: which slots have changed, all if ``None``. Their version
                counters move, so that a backward over a graph recorded before
                raises as with plain torch; those of the others stay.
        """
        if not self.is_half:
            return
        if moved is not None and any(isinstance(mark, Tensor) for mark in moved):
            self._publish_rows_(moved)
        else:
            self.flat_model.copy_(self.flat_master)
        self.note_published_(moved)

    def note_published_(self, moved: Sequence[Moved] | None = None) -> None:
        """Move the version counters of what was written into the model; see ``publish_``."""
        params = (
            self.params if moved is None else [p for p, mark in zip(self.params, moved, strict=True) if mark is True]
        )
        torch.autograd.graph.increment_version(params)
        self._versions = list(map(_VERSION, self.params))

    def _publish_rows_(self, moved: Sequence[Moved]) -> None:
        """Write the slots between those of which only rows have changed, and these rows."""
        start = 0
        for slot, param, master, mark in zip(self.layout.slots, self.params, self.masters, moved, strict=True):
            if isinstance(mark, Tensor):
                self.flat_model[start : slot.offset].copy_(self.flat_master[start : slot.offset])
                start = slot.offset + slot.numel
                param.index_copy_(0, mark, master.index_select(0, mark).to(self.dtype))
        self.flat_model[start:].copy_(self.flat_master[start:])

    def refresh_(self) -> None:
        """Take weights that were edited in the model into the masters.

        Only values whose half rounding differs from the weight are rewritten,
        so the low bits of untouched values stay. Syncs: none.
        """
        self._check_places()
        if self.is_half:
            for param, master in zip(self.params, self.masters, strict=True):
                self._refresh_(param, master)
            self._versions = list(map(_VERSION, self.params))

    def _refresh_(self, param: nn.Parameter, master: nn.Parameter) -> None:
        weight = param.detach()
        edited = master.to(self.dtype) != weight
        master.copy_(torch.where(edited, weight.float(), master))

    def adopt_(self, index: int) -> None:
        """Refresh one slot, if its weight was written in place since the last publish."""
        param, master = self.params[index], self.masters[index]
        if self.is_half and param._version != self._versions[index] and param.data_ptr() == self._pointers[index]:
            self._refresh_(param, master)
            self._versions[index] = param._version

    def adopt_edits_(self) -> None:
        """Refresh if a weight was written in place since the last publish.

        Raises:
            ValueError: if a parameter no longer lies in the flat buffer.
        """
        self._check_places()
        if self.is_half and list(map(_VERSION, self.params)) != self._versions:
            self.refresh_()

    def shows_masters(self) -> bool:
        """True iff every weight is its master, rounded. Syncs: one read."""
        return torch.equal(self.flat_model, self.flat_master.to(self.dtype))

    def _check_places(self) -> None:
        """Raise ``ValueError`` if a parameter no longer lies in the flat buffer.

        ``flatten_parameters()`` of a recurrent layer moves its weights to a new
        pack; they are brought back, with their values.
        """
        pointers = list(map(Tensor.data_ptr, self.params))
        if pointers == self._pointers:
            return
        views = self.layout.model_views(self.flat_model)
        places = zip(self.layout.slots, self.params, views, pointers, self._pointers, strict=True)
        moved = [(slot, param, view) for slot, param, view, now, was in places if now != was]
        for slot, param, view in moved:
            if slot.pack is None or (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
                raise ValueError(
                    f"parameter {slot.name!r} was moved out of the optimizer's flat storage (model.to(), p.data = "
                    "...): its master would be lost. Move the model before wrapping it, and edit weights in place."
                )
        for _, param, view in moved:
            view.copy_(param.detach())
            param.data = view

    def reclaim_(self) -> None:
        """Bring back masters that the inner optimizer has moved to storage of their own.

        Some do (``p.data = p.data.contiguous()``): the flat buffer, and with it
        the model, would stay behind. Syncs: none.
        """
        if list(map(Tensor.data_ptr, self.masters)) != self._master_pointers:
            for slot, master, pointer in zip(self.layout.slots, self.masters, self._master_pointers, strict=True):
                if master.data_ptr() != pointer:
                    view = slot.view(self.flat_master)
                    view.copy_(master.detach())
                    master.data = view

    def first_unfit(self) -> tuple[str, float] | None:
        """Return name and size of the first finite master beyond the half range."""
        if not self.is_half:
            return None
        for name, master in zip(self.names, self.masters, strict=True):
            if (size := beyond_range(master.detach(), self.dtype)) is not None:
                return name, size
        return None

    def _note_storage(self) -> None:
        self._pointers = list(map(Tensor.data_ptr, self.params))
        self._versions = list(map(_VERSION, self.params))


class MasterWeights:
    """All buckets of one optimizer.

    Invariants between calls: ``of`` maps every parameter that has a slot to
    its master.
    """

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.of: dict[nn.Parameter, nn.Parameter] = {}
        self._places: dict[nn.Parameter, tuple[Bucket, int]] = {}

    @classmethod
    def union(cls, parts: Iterable[MasterWeights]) -> MasterWeights:
        """Return the masters of several optimizers, up to date, to read."""
        every = cls()
        for masters in parts:
            masters.adopt_edits_()
            every.buckets += masters.buckets
            every.of.update(masters.of)
        return every

    @torch.no_grad()
    def extend(self, named: NamedParameters, dtypes: Sequence[torch.dtype]) -> None:
        """Make masters for more parameters; the older ones stay where they are.

        Args:
            named: names and parameters, none of which has a master yet.
            dtypes: what each parameter becomes.
        """
        sorted_in: dict[tuple[torch.device, torch.dtype], list[tuple[str, nn.Parameter]]] = {}
        for (name, param), dtype in zip(named, dtypes, strict=True):
            sorted_in.setdefault((param.device, dtype), []).append((name, param))
        made = [Bucket(members, dtype) for (_, dtype), members in sorted_in.items()]
        for bucket in made:
            self.of.update(zip(bucket.params, bucket.masters, strict=True))
            self._places.update((param, (bucket, index)) for index, param in enumerate(bucket.params))
        self.buckets.extend(made)

    @torch.no_grad()
    def adopt_edits_(self) -> None:
        """Notice weights written in place; see ``Bucket.adopt_edits_``."""
        for bucket in self.buckets:
            bucket.adopt_edits_()

    @torch.no_grad()
    def adopt_(self, params: Iterable[nn.Parameter]) -> None:
        """Take over the weights of some parameters that were written in place; see ``Bucket.refresh_``."""
        for param in params:
            bucket, index = self._places[param]
            bucket.adopt_(index)

    @torch.no_grad()
    def reclaim_(self) -> None:
        """Bring masters back into the flat buffers; see ``Bucket.reclaim_``."""
        for bucket in self.buckets:
            bucket.reclaim_()

    @torch.no_grad()
    def refresh_(self) -> None:
        """Take edited weights into the masters; see ``Bucket.refresh_``."""
        for bucket in self.buckets:
            bucket.refresh_()

    @torch.no_grad()
    def publish_(self, moved: Sequence[Sequence[Moved] | None] | None = None) -> None:
        """Write the masters into the model; see ``Bucket.publish_``."""
        for index, bucket in enumerate(self.buckets):
            bucket.publish_(None if moved is None else moved[index])

    def largest_half(self) -> Tensor | None:
        """Return the largest |weight| in fp16, inf iff one does not fit.

        ``None`` without fp16 parameters: bf16 has the range of fp32.

        Syncs: none.
        """
        flats = [bucket.flat_model for bucket in self.buckets if bucket.dtype == torch.float16 and bucket.layout.size]
        return largest(flats) if flats else None

    @torch.no_grad()
    def refine_(self, param: nn.Parameter, value: Tensor) -> None:
        """Give the master of ``param`` the low bits of ``value``, where it rounds to the weight. Syncs: none."""
        master = self.of[param]
        value = value.to(master)
        master.copy_(torch.where(value.to(param.dtype) == param.detach(), value, master))

    @torch.no_grad()
    def widen_(self) -> None:
        """Make the half parameters of the model fp32: views of the masters."""
        for bucket in self.buckets:
            for param, view in zip(bucket.params, bucket.layout.model_views(bucket.flat_master), strict=True):
                param.grad = None
                param.data = view
            bucket.flat_model = bucket.flat_master
            bucket.dtype = torch.float32
            bucket._note_storage()

    def check_range(self) -> None:
        """Raise if a master does not fit its half format. Syncs: one per parameter.

        Raises:
            ValueError: names the parameter.
        """
        for bucket in self.buckets:
            if (unfit := bucket.first_unfit()) is not None:
                raise unfit_error(*unfit, bucket.dtype)


def beyond_range(tensor: Tensor, dtype: torch.dtype) -> float | None:
    """Return the largest finite |value| if rounding to ``dtype`` makes it inf."""
    if tensor.is_meta:
        return None
    lost = tensor.to(dtype).isinf() & tensor.isfinite()
    return float(tensor[lost].abs().max()) if bool(lost.any()) else None


def unfit_error(name: str, size: float, dtype: torch.dtype) -> ValueError:
    """Return the error for a weight that its half format cannot hold."""
    return ValueError(
        f"parameter {name!r} holds {size:g}, beyond the largest value of {dtype}, {torch.finfo(dtype).max:g}. "
        f"Keep it in fp32 with policy.keep({name!r}), or use dtype=torch.bfloat16."
    )
