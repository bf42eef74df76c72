"""Optimizer state in flat buffers, shown as views under torch's names."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mixedopt.bucket import Bucket
from mixedopt.rules import Rule


class FlatState:
    """The state of one bucket: a flat fp32 buffer for each name, and numbers for each slot.

    Invariants after ``adopt_``: what ``inner.state`` has for a master are views
    of the buffers; a slot without an entry has zeros and the count 0.

    Attributes:
        flats: fp32, of the bucket's layout, in the order of the rule's names.
        steps: fp32, how many steps each slot has made.
        begun: fp32, 1 for each slot that has made one; not the same, since counts may be edited.
        scalars: fp32, the rule's numbers of each slot.

    Args:
        bucket: whose parameters.
        rule: which state.
        steps, begun, scalars: see there; taken, not copied.
    """

    def __init__(self, bucket: Bucket, rule: Rule, steps: Tensor, begun: Tensor, scalars: Sequence[Tensor]) -> None:
        self.bucket = bucket
        self.steps, self.begun = steps, begun
        self.scalars = tuple(scalars)
        self.flats = [torch.zeros(bucket.layout.size, dtype=torch.float32, device=bucket.device) for _ in rule.state]
        self._rule = rule
        self._entries: list[dict[str, Any]] = []
        for index, slot in enumerate(bucket.layout.slots):
            views = {name: values[index] for name, values in zip(rule.scalars, self.scalars, strict=True)}
            views |= {name: slot.view(flat) for name, flat in zip(rule.state, self.flats, strict=True)}
            self._entries.append({"step": self.steps[index], **views} if rule.counts else views)

    def moves(self, inner: torch.optim.Optimizer, ours: Collection[int]) -> Iterator[tuple[Tensor, Tensor | float]]:
        """Yield our views, and what ``inner`` has in their place that they are to become. Writes nothing.

        Args:
            inner: whose state.
            ours: where the memory of all flat state begins. What lies there is yielded as a copy.
        """
        group_of = {param: group for group in inner.param_groups for param in group["params"]}
        for master, own in zip(self.bucket.masters, self._entries, strict=True):
            held = inner.state.get(master)
            for name, view in own.items():
                value = held.get(name) if held else 0.0
                if not isinstance(value, Tensor):
                    missing = self._rule.initial(group_of[master]).get(name, 0.0) if value is None else value
                    yield view, float(missing)
                elif value.data_ptr() != view.data_ptr():
                    yield view, value.clone() if value.untyped_storage().data_ptr() in ours else value

    def show_(self, inner: torch.optim.Optimizer) -> None:
        """Leave ``inner`` the views of ours, and note which slots have begun; after the ``moves``."""
        for master, own in zip(self.bucket.masters, self._entries, strict=True):
            if held := inner.state.get(master):
                held.update(own)
        begun = [1.0 if inner.state.get(master) else 0.0 for master in self.bucket.masters]
        self.begun.copy_(torch.tensor(begun, dtype=torch.float32, device="cpu"))
        if not self._rule.counts:
            self.steps.copy_(self.begun)

    def begin_(self, inner: torch.optim.Optimizer, slots: tuple[int, int]) -> None:
        """Fill in what is not zero before the first step; only then, since it may be the learning rate.

        Args:
            inner: whose state, and hyperparameters.
            slots: the first, and the one after the last; all of one group.
        """
        first, last = slots
        of = self.bucket.masters[first]
        group = next(group for group in inner.param_groups if any(of is param for param in group["params"]))
        for name, value in self._rule.initial(group).items():
            for master, own in zip(self.bucket.masters[first:last], self._entries[first:last], strict=True):
                if not inner.state.get(master):
                    own[name].fill_(value)

    def enter_(self, inner: torch.optim.Optimizer, slots: tuple[int, int]) -> None:
        """Make the entries of the inner state, views of ours, where there are none."""
        first, last = slots
        for master, own in zip(self.bucket.masters[first:last], self._entries[first:last], strict=True):
            if own and not inner.state.get(master):
                inner.state[master] = dict(own)

    def forget_untouched_(self, inner: torch.optim.Optimizer) -> None:
        """Drop our entries of slots that have made no step; what others have put there stays. Syncs: one read."""
        for master, begun, own in zip(self.bucket.masters, self.begun.tolist(), self._entries, strict=True):
            entry = inner.state.get(master)
            if not begun and isinstance(entry, dict) and all(entry.get(name) is view for name, view in own.items()):
                del inner.state[master]


@torch.no_grad()
def adopt_(states: Sequence[FlatState], inner: torch.optim.Optimizer) -> None:
    """Take the values that ``inner`` has, and leave it the views of ours. Syncs: one read a slot at most.

    All is read before anything is written: ours may have changed places.
    """
    tensors = (each for state in states for each in (*state.flats, state.steps, *state.scalars))
    ours = {each.untyped_storage().data_ptr() for each in tensors}
    for view, value in [move for state in states for move in state.moves(inner, ours)]:
        view.copy_(value) if isinstance(value, Tensor) else view.fill_(value)
    for state in states:
        state.show_(inner)


def hand_over_(inner: torch.optim.Optimizer, rule: Rule) -> None:
    """Put counts and scalars where the inner optimizer's own step wants them.

    Fused and capturable optimizers have their counts on the device, others on
    the host; scalars follow the parameter. Syncs: one read for each that moves.
    """
    for group in inner.param_groups:
        on_device = group.get("fused") or group.get("capturable")
        for param in group["params"]:
            entry = inner.state.get(param, {})
            if rule.counts and isinstance(entry.get("step"), Tensor):
                entry["step"] = entry["step"].to(param.device if on_device else "cpu")
            entry.update({name: entry[name].to(param.device) for name in rule.scalars if name in entry})
