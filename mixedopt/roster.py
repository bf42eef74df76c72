"""The roster: which parameters an optimizer trains, their names, groups and masters."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt import validate
from mixedopt.bucket import HALF_DTYPES
from mixedopt.checkpoint import Place
from mixedopt.groups import GroupView, rekey_
from mixedopt.masters import MasterWeights
from mixedopt.walks import walks_for


class Roster:
    """The parameters of one optimizer, and the masters that it was handed.

    Invariants between calls: ``names`` holds every parameter of ``inner``, in
    group order; ``inner`` holds the master wherever ``masters.of`` has one, and
    its state is keyed by it.

    Args:
        inner: the wrapped optimizer, with the model's parameters.
        root: the model, if there is one.
        names: parameter -> canonical name, in group order.
        dtypes: what each parameter becomes.
        split: see ``MasterWeights``.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        root: nn.Module | None,
        names: dict[nn.Parameter, str],
        dtypes: Mapping[nn.Parameter, torch.dtype],
        *,
        split: bool = False,
    ) -> None:
        self.inner = inner
        self.root = root
        self.names = names
        self.groups = [GroupView(inner, i, list(g["params"])) for i, g in enumerate(inner.param_groups)]
        self.masters = MasterWeights(split=split)
        self._walks = walks_for(param.device for param in names)
        self._adopt([param for param in names if param.requires_grad], dtypes)

    def named_masters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Return (name, master) pairs in group order; split ones are lent."""
        self.masters.lend_()
        return ((name, self.masters.of[p]) for p, name in self.names.items() if p in self.masters.of)

    def state(self) -> dict[Tensor, Any]:
        """Return model parameter -> the inner optimizer's state of its master.

        As long as there is none at all, every entry is there and empty: who
        finds no entry makes a step to get some (torch.distributed.checkpoint).
        """
        held = {param: self.masters.of.get(param, param) for param in self.names}
        found: dict[Tensor, Any] = defaultdict(dict)  # as torch's: what has no entry has an empty one
        found.update((param, self.inner.state[key]) for param, key in held.items() if key in self.inner.state)
        if not found:
            found.update((param, {}) for param in self.masters.of)
        return found

    def places(self, *, values: bool = False) -> list[Place]:
        """Return every parameter as a checkpoint sees it, in group order.

        Args:
            values: masters are to be read; split ones are copies then.
        """
        masters, state = self.masters.of, self.inner.state
        found = {p: self.masters.value(p) if values else master for p, master in masters.items()}
        return [
            Place(name, param, found.get(param), state.get(masters.get(param, param), {}))
            for param, name in self.names.items()
        ]

    def drop_grads_(self) -> None:
        """Set every ``.grad`` of the model to ``None``, those of frozen parameters too."""
        self._walks.take(self.names)

    def has_gradients(self) -> bool:
        """True iff some ``.grad`` of the model is not ``None``."""
        return any(param.grad is not None for param in self.names)

    def add_group_(self, param_group: dict[str, Any], taken: Collection[nn.Parameter]) -> None:
        """Add parameters, with masters for those that are trained; none that is ``taken``.

        Raises:
            ValueError, TypeError: as torch, or a parameter cannot be trained
                here; nothing is changed.
        """
        params, given = validate.group_params(param_group)
        fresh = validate.new_parameters(params, self.names, self.root, len(self.groups), given)
        validate.not_taken(fresh, taken)
        members: Sequence[Any] = list(zip(given, params, strict=True)) if given else params
        self.inner.add_param_group({**param_group, "params": members})
        self.names.update(fresh)
        self.groups.append(GroupView(self.inner, len(self.groups), params))
        self._adopt_late([param for param in fresh if param.requires_grad])

    def adopt_unfrozen_(self, *, without_gradient: bool = False) -> None:
        """Make masters for parameters that were frozen and now have a gradient.

        Args:
            without_gradient: also for those that may get one.
        """
        if len(self.masters.of) < len(self.names):
            waiting = [p for p in self.names if p not in self.masters.of]
            self._adopt_late([p for p in waiting if p.grad is not None or (without_gradient and p.requires_grad)])

    def refine_(self, original: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Give masters the low bits that ``original`` still knows."""
        for param in self.masters.of:
            if (value := original(param)) is not None:
                self.masters.refine_(param, value)

    @torch.no_grad()
    def load_masters_(self, saved: Mapping[int, Tensor]) -> None:
        """Write masters by position, also of parameters that are frozen here, and publish."""
        params = list(self.names)
        self._adopt_late([params[index] for index in saved if params[index] not in self.masters.of])
        with self.masters.opened():
            for index, value in saved.items():
                self.masters.of[params[index]].copy_(value)
            self.masters.publish_()

    def return_(self) -> None:
        """Leave the model fp32 and hand its parameters back to ``inner``."""
        self.masters.adopt_edits_()
        self.masters.widen_()
        rekey_(self.inner, {master: param for param, master in self.masters.of.items()}, {})

    def _adopt(self, params: list[nn.Parameter], dtypes: Mapping[nn.Parameter, torch.dtype]) -> None:
        """Make masters for ``params`` and hand them to the inner optimizer."""
        named = [(self.names[param], param) for param in params]
        halves = {param: param.dtype for param in params if param.dtype in HALF_DTYPES}
        self.masters.extend(named, [dtypes[param] for param in params])
        rekey_(self.inner, {param: self.masters.of[param] for param in params}, halves)

    def _adopt_late(self, params: Iterable[nn.Parameter]) -> None:
        """Make masters in mid-life: dtypes and gradients stay as they are."""
        grads = {param: param.grad for param in params}
        self._adopt(list(grads), {param: param.dtype for param in grads})
        for param, grad in grads.items():
            param.grad = grad
