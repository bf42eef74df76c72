"""All fp32 masters of one optimizer: the buckets, and which parameter has which master."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor, nn

from mixedopt.bucket import Bucket, Moved, NamedParameters, unfit_error
from mixedopt.gradients import largest


class MasterWeights:
    """All buckets of one optimizer.

    Invariants between calls: ``of`` maps every parameter that has a slot to
    its master; split masters are closed (see ``Bucket``) unless they are lent.

    Args:
        split: keep those of half parameters split.
    """

    def __init__(self, *, split: bool = False) -> None:
        self.split = split
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
            every._places.update(masters._places)
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
        made = [Bucket(members, dtype, split=self.split) for (_, dtype), members in sorted_in.items()]
        for bucket in made:
            self.of.update(zip(bucket.params, bucket.masters, strict=True))
            self._places.update((param, (bucket, index)) for index, param in enumerate(bucket.params))
        self.buckets.extend(made)

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Context in which masters hold their values; those that are written must be published inside. It nests."""
        entered: list[Bucket] = []
        try:
            for bucket in list(self.buckets):
                bucket.users += 1
                entered.append(bucket)
                with torch.no_grad():
                    bucket.open_()
            yield
        finally:
            for bucket in entered:
                bucket.users -= 1
            self.close_()

    @torch.no_grad()
    def lend_(self, params: Iterable[nn.Parameter] | None = None) -> None:
        """Open masters for somebody outside, of these parameters or all; publishing ends it."""
        buckets = self.buckets if params is None else {self._places[param][0]: None for param in params}
        for bucket in buckets:
            bucket.open_(lend=True)

    def end_loans_(self) -> None:
        """Publish split masters that are lent: what was written there counts, and they are closed. Syncs: none."""
        if any(bucket.lent for bucket in self.buckets):
            self.publish_()

    @torch.no_grad()
    def close_(self) -> None:
        """Split and free the masters that are neither in use nor lent; see ``Bucket.close_``."""
        for bucket in self.buckets:
            bucket.close_()

    @torch.no_grad()
    def value(self, param: nn.Parameter) -> Tensor:
        """Return the master of ``param``, fp32, to read: itself, or joined if it is closed. Syncs: none."""
        bucket, index = self._places[param]
        return bucket.value(index)

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
        """Write the masters into the model; see ``Bucket.publish_``. Split ones are closed, if not in use."""
        for index, bucket in enumerate(self.buckets):
            bucket.publish_(None if moved is None else moved[index])
        self.close_()

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
        bucket, index = self._places[param]
        bucket.refine_(index, value.to(bucket.device, torch.float32))

    @torch.no_grad()
    def widen_(self) -> None:
        """Make the half parameters of the model fp32: views of the masters."""
        for bucket in self.buckets:
            bucket.widen_()

    def check_range(self) -> None:
        """Raise if a master does not fit its half format. Syncs: one per parameter.

        Raises:
            ValueError: names the parameter.
        """
        for bucket in self.buckets:
            if (unfit := bucket.first_unfit()) is not None:
                raise unfit_error(*unfit, bucket.dtype)
