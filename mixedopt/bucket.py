"""The fp32 masters of one device and dtype: made, published to the model, refreshed from it.

A bucket holds the slots of one device and one model dtype. Half parameters are
views of the bucket's flat half buffer and have masters in its flat fp32
buffer; fp32 parameters are views of that fp32 buffer themselves, so they are
their own masters and there is no second copy.

Of split masters the fp32 buffer is there only while it is in use; between
steps the half buffer and one of 16-bit remainders stand for it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from mixedopt.flat import Layout, plan_layout
from mixedopt.split import Curtain, join, join_into_, mend_, remainder_of, split_into_
from mixedopt.walks import number_at, numbers, walks_for, with_number

HALF_DTYPES = (torch.float16, torch.bfloat16)

NamedParameters = Sequence[tuple[str, nn.Parameter]]
# What of a slot has changed: all, nothing, or some rows.
Moved = bool | Tensor


class Bucket:
    """Parameters of one device and one dtype, with their masters.

    Making one re-points the storage of every parameter: parameter *identity* stays, so hooks, ties and groups hold.
    The peak is 8 bytes a value and one tensor for fp32 parameters that become half, 6 afterwards, 4 if split.

    Invariants between calls: ``params[i]`` equals ``masters[i]`` rounded to ``dtype``; both are views of the flat
    buffers at slot ``i``. Split masters are open or closed. Closed, they are ``join(flat_model, flat_remainder)``;
    ``flat_master`` and ``masters``, still the same objects, show NaN. Open, ``flat_remainder`` means nothing.

    Args:
        named: names and parameters, all on one device.
        dtype: what the parameters become: fp16, bf16 or fp32.
        split: keep the masters of half parameters split.

    Attributes:
        flat_remainder: int16, laid out as ``flat_model``; ``None`` unless split.
        users: how many ``MasterWeights.opened()`` need them open.
        lent: True iff they were handed out and not published since.
    """

    def __init__(self, named: NamedParameters, dtype: torch.dtype, *, split: bool = False) -> None:
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
        self._walks = walks_for([self.device])
        self._versions = b""
        self._note_storage()
        self._master_pointers = self._walks.pointers(self.masters)
        self.flat_remainder: Tensor | None = None
        self.users, self.lent = 0, False
        self.is_open = True
        self._curtain = Curtain(self.masters)
        self._sum: Tensor | None = None  # of the weights as they were made
        self._seen = False  # by somebody outside, since they were opened
        if split and self.is_half:
            self.flat_remainder = torch.empty_like(self.flat_model, dtype=torch.int16)
            self._sum = _sum_of(self.flat_model)
            self.close_()

    @property
    def is_half(self) -> bool:
        """True iff the model's parameters are half, and not their own masters."""
        return self.dtype in HALF_DTYPES

    @property
    def names(self) -> list[str]:
        """Parameter names in slot order."""
        return [slot.name for slot in self.layout.slots]

    def open_(self, *, lend: bool = False) -> None:
        """Bring split masters back, at another address. Syncs: none.

        Args:
            lend: to somebody outside, who may edit them, until they are published.

        Raises:
            ValueError: one was written while it was closed, or a parameter was moved.
        """
        if self.flat_remainder is None:
            return
        if not self.is_open:
            self.adopt_edits_()
            self._curtain.check()
            self.flat_master = torch.empty_like(self.flat_model, dtype=torch.float32)
            join_into_(self.flat_master, self.flat_model, self.flat_remainder)
            self._curtain.open_(self.layout.views(self.flat_master))
            self._master_pointers = self._walks.pointers(self.masters)
            self.is_open = True
        self.lent |= lend
        self._seen |= lend

    def close_(self) -> None:
        """Split masters that the model shows, and free them; not while anybody uses them. Syncs: none."""
        if self.flat_remainder is None or not self.is_open or self.users or self.lent:
            return
        split_into_(self.flat_remainder, self.flat_master, self.flat_model)
        if self._seen:
            self.flat_master.fill_(torch.nan)  # whoever still holds a view shall not take it for the masters
            self._seen = False
        self.flat_master = self._curtain.draw_(self.layout.size)
        self.is_open = False

    def value(self, index: int) -> Tensor:
        """Return the master of one slot, fp32: itself, or joined if it is closed. Syncs: none."""
        if self.is_open or self.flat_remainder is None:
            return self.masters[index].detach()
        self.adopt_(index)
        return join(self.params[index].detach(), self.layout.slots[index].view(self.flat_remainder))

    def publish_(self, moved: Sequence[Moved] | None = None) -> None:
        """Write the masters, rounded once, into the model. Syncs: none.

        Args:
            moved: which slots have changed, all if ``None``. Their version counters move, so that a backward over a
                graph recorded before raises as with plain torch; those of the others stay.
        """
        if not self.is_half:
            return
        if self.is_open:
            if moved is not None and any(isinstance(mark, Tensor) for mark in moved):
                self._publish_rows_(moved)
            else:
                self.flat_model.copy_(self.flat_master)
        self.note_published_(moved)

    def note_published_(self, moved: Sequence[Moved] | None = None) -> None:
        """Move the version counters of what was written into the model by others, remainders too; see ``publish_``."""
        self._sum, self.lent = None, False
        if moved is None:
            self._versions = self._walks.bump(self.params, self._versions)
        else:
            params = [param for param, mark in zip(self.params, moved, strict=True) if mark is True]
            torch.autograd.graph.increment_version(params)
            self._versions = self._walks.versions(self.params)

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
        """Take weights that were edited in the model into the masters. Syncs: none.

        Only values whose half rounding differs from the weight are rewritten, so the low bits of untouched values stay.
        Of closed masters nobody knows which weights were edited: all keep their remainders, see ``mend_``.
        """
        self._check_places()
        if self.is_half:
            for index in range(len(self.params)):
                self._refresh_(index)
            self._versions = self._walks.versions(self.params)

    def _refresh_(self, index: int) -> None:
        weight, master = self.params[index].detach(), self.masters[index]
        if self.is_open or self.flat_remainder is None:
            edited = master.to(self.dtype) != weight
            master.copy_(torch.where(edited, weight.float(), master))
        else:
            mend_(self.layout.slots[index].view(self.flat_remainder), weight)

    def adopt_(self, index: int) -> None:
        """Refresh one slot, if its weight was written in place since the last publish."""
        param = self.params[index]
        if not self.is_half or param._version == number_at(self._versions, index):
            return
        if param.data_ptr() == number_at(self._pointers, index):
            self._refresh_(index)
            self._versions = with_number(self._versions, index, param._version)

    def refine_(self, index: int, value: Tensor) -> None:
        """Take the low bits of ``value``, fp32, where it rounds to the weight. Syncs: none."""
        weight, master = self.params[index].detach(), self.masters[index]
        known = value.to(self.dtype) == weight
        if self.is_open or self.flat_remainder is None:
            master.copy_(torch.where(known, value, master))
        else:
            kept = self.layout.slots[index].view(self.flat_remainder)
            kept.copy_(torch.where(known, remainder_of(value, weight), kept))

    def adopt_edits_(self) -> None:
        """Refresh if a weight was written in place since the last publish.

        Raises:
            ValueError: if a parameter no longer lies in the flat buffer.
        """
        if self._walks.stand(self.params, self._pointers, self._versions if self.is_half else None):
            return
        self._check_places()
        if self.is_half and self._walks.versions(self.params) != self._versions:
            with torch.no_grad():  # in the rare case alone: a context costs as much as the look at ten weights
                if self.is_open:
                    self.refresh_()
                    return
                for index in range(len(self.params)):
                    self.adopt_(index)

    def shows_masters(self) -> bool:
        """True iff every weight is its master, rounded; closed ones: is as it was made. Syncs: one read."""
        if self.is_open:
            return torch.equal(self.flat_model, self.flat_master.to(self.dtype))
        return self._sum is None or torch.equal(self._sum, _sum_of(self.flat_model))

    def _check_places(self) -> None:
        """Raise ``ValueError`` if a parameter no longer lies in the flat buffer.

        Weights that ``flatten_parameters()`` of a recurrent layer moves to a new pack are brought back as they are.
        """
        pointers = self._walks.pointers(self.params)
        if pointers == self._pointers:
            return
        views = self.layout.model_views(self.flat_model)
        places = zip(self.layout.slots, self.params, views, numbers(pointers), numbers(self._pointers), strict=True)
        moved = [(slot, param, view) for slot, param, view, now, was in places if now != was]
        for slot, param, view in moved:
            if slot.pack is None or (param.dtype, param.device, param.shape) != (view.dtype, view.device, view.shape):
                raise ValueError(
                    f"parameter {slot.name!r} was moved out of the optimizer's flat storage (model.to(), p.data = "
                    "...): its master would be lost. Move the model before wrapping it, and edit weights in place."
                )
        with torch.no_grad():
            for _, param, view in moved:
                view.copy_(param.detach())
                param.data = view

    def reclaim_(self) -> None:
        """Bring back masters that the inner optimizer has moved (``p.data = p.data.contiguous()``). Syncs: none.

        The flat buffer, and with it the model, would stay behind.
        """
        if self.is_open and self._walks.pointers(self.masters) != self._master_pointers:
            known = numbers(self._master_pointers)
            for slot, master, pointer in zip(self.layout.slots, self.masters, known, strict=True):
                if master.data_ptr() != pointer:
                    view = slot.view(self.flat_master)
                    view.copy_(master.detach())
                    master.data = view

    def first_unfit(self) -> tuple[str, float] | None:
        """Return name and size of the first finite master beyond the half range."""
        if not self.is_half:
            return None
        for index, name in enumerate(self.names):
            if (size := beyond_range(self.value(index), self.dtype)) is not None:
                return name, size
        return None

    def widen_(self) -> None:
        """Make the parameters fp32: views of the masters."""
        self.open_()
        for param, view in zip(self.params, self.layout.model_views(self.flat_master), strict=True):
            param.grad = None
            param.data = view
        self.flat_model, self.flat_remainder = self.flat_master, None
        self.dtype = torch.float32
        self._note_storage()

    def _note_storage(self) -> None:
        self._pointers, self._versions = self._walks.pointers(self.params), self._walks.versions(self.params)


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


def _sum_of(half: Tensor) -> Tensor:
    return half.view(torch.int16).sum(dtype=torch.int64)
