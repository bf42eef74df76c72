"""The fused tier: an inner optimizer of torch that skips by itself.

Fused optimizers of torch honour two attributes: ``grad_scale``, by which they
divide the gradients, and ``found_inf``, with which they leave everything as it
is. Both are tensors on the device, so nobody waits; the factor of clipping is
part of the first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from mixedopt.collecting import Collected
from mixedopt.decision import Decision
from mixedopt.device_scaler import DeviceScaler
from mixedopt.device_tier import DeviceTier
from mixedopt.gradients import FP32_MAX
from mixedopt.groups import has_hooks
from mixedopt.judgement import NEXT_SCALE, Judgement, Rules, Standing, judge
from mixedopt.kernels import on_device
from mixedopt.pieces import combine
from mixedopt.rollback import Snapshot
from mixedopt.scaler import HOST

# The optimizers whose kernels take both; each but SGD leaves fresh state fresh when its first step is skipped.
FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def is_fused(inner: torch.optim.Optimizer) -> bool:
    """True iff ``inner`` honours ``grad_scale`` and ``found_inf``, in all its groups."""
    return type(inner) in FUSED and all(group.get("fused") is True for group in inner.param_groups)


class FusedTier(DeviceTier):
    """Steps of the inner optimizer's own, judged on the device; see the module.

    Before a parameter's first step the host asks what was decided: a fused SGD
    leaves its momentum undefined if that one is skipped, and an optimizer that
    refuses a parameter does so in the middle of it.
    """

    name = "fused"

    def __init__(self, *args: Any, kernels: Any, **options: Any) -> None:
        super().__init__(*args, kernels=kernels, wide=True, **options)
        self._kernels = kernels
        self._judging: Any = None  # the kernel that judges this evidence
        self._judges: Tensor | None = None
        self._stepped: set[int] = set()
        self._state_of: Any = None
        self._rates: list[Tensor] = []
        self._form: list[dict[str, Any]] = []
        self._token = object()
        # What the inner optimizer is given: they stay where they are.
        _, self._found_inf, self._grad_scale, _ = self.scaler.signals

    def _serves(self) -> bool:
        # A hook would find gradients that are scaled, and be called at skips, too.
        return not self.measured and is_fused(self.inner) and not has_hooks(self.inner)

    def _apply_(self, decision: Decision) -> None:
        stepping = _numbers(self.window.there())
        super()._apply_(decision)
        self._stepped |= stepping

    def _advance_(self, collected: Collected, report: Tensor) -> None:
        if self._state_of is not self.inner.state:
            self._stepped, self._state_of = set(), self.inner.state
        stepping = _numbers(collected.there)
        before = self.scaler.standing.clone()
        self._judge_(collected, report)
        try:
            if stepping <= self._stepped:
                self._step_all_(collected)
            elif not bool(self._found_inf):
                with Snapshot(self.inner, self.masters.buckets, HOST):
                    self._step_all_(collected)
                self._stepped |= stepping
        except BaseException:
            self.scaler.return_to_(before)
            self.masters.publish_()
            raise

    def _step_all_(self, collected: Collected) -> None:
        """Let the inner optimizer step, or skip, and show the masters."""
        inner: Any = self.inner
        there = [part for _, part in self.collector.numbering.spread(collected.there)]
        with self.masters.opened():
            try:
                for bucket, flat, mine in zip(self.masters.buckets, collected.wide, there, strict=True):
                    for master, slot, is_there in zip(bucket.masters, bucket.layout.slots, mine, strict=True):
                        master.grad = slot.view(flat) if is_there else None
                inner.grad_scale, inner.found_inf = self._grad_scale, self._found_inf
                with self.at_work(), self._capturable():
                    inner.step()
            finally:
                vars(inner).pop("grad_scale", None)
                vars(inner).pop("found_inf", None)
                for bucket in self.masters.buckets:
                    for master in bucket.masters:
                        master.grad = None
                self.masters.publish_([None if all(mine) else list(mine) for mine in there])

    @contextlib.contextmanager
    def _capturable(self) -> Iterator[None]:
        """Context in which a step may be captured: torch asks for the flag, and a graph for rates on the device."""
        if not self.scaler.capturing():
            yield
            return
        groups = self.inner.param_groups
        if len(self._rates) != len(groups):
            raise RuntimeError(
                "step() of the fused tier in a graph made by hand: learning rates would stay those of the capture. "
                "Use mixedopt.graphed(train_step, *samples), or tier='compiled'."
            )
        before = [(group.get("capturable"), group["lr"]) for group in groups]
        for group, rate in zip(groups, self._rates, strict=True):
            group.update({"lr": rate} | ({"capturable": True} if "capturable" in group else {}))
        try:
            yield
        finally:
            for group, (capturable, rate) in zip(groups, before, strict=True):
                group.update({"lr": rate} | ({"capturable": capturable} if "capturable" in group else {}))

    def before_replay_(self) -> object:
        """As in ``DeviceTier``; learning rates are brought along, other hyperparameters void the graph."""
        super().before_replay_()
        groups = self.inner.param_groups
        if len(self._rates) != len(groups):
            self._rates = [torch.zeros((), dtype=torch.float32, device=self.home) for _ in groups]
        for rate, group in zip(self._rates, groups, strict=True):
            rate.fill_(float(group["lr"]))
        form = [{k: v for k, v in group.items() if k not in ("params", "lr")} for group in groups]
        if form != self._form or self._state_of is not self.inner.state or not self._serves():
            self._form, self._token = form, object()
        return self._token

    def _judge_(self, collected: Collected, report: Tensor) -> None:
        scaler, slots_of = self.scaler, self.collector.numbering.slots_of
        if self._kernels:
            if self._judges is not collected.evidence:
                tensors = *collected.evidence, slots_of, *scaler.tensors(), None
                self._judging = self._kernels.planning(None, tensors, self.collector.numbering.slots)
                self._judges = collected.evidence
            with on_device(self.home):
                self._judging(report)
        else:
            judge_(scaler, collected.evidence, slots_of, report)


def judge_(scaler: DeviceScaler, evidence: Tensor, slots_of: Tensor, report: Tensor) -> Judgement:
    """Judge by torch's operations; in place as the kernel does it. Syncs: none."""
    largest, norm = combine(evidence)
    culprit = norm.new_full((), -1.0)  # no slot
    if slots_of.numel():  # some parameter is not empty
        # Not by an index of no dimensions, which torch asks the host for.
        first_bad = (~(evidence[0] <= FP32_MAX)).to(torch.uint8).argmax().view(1)
        culprit = slots_of.index_select(0, first_bad).squeeze(0).double()
    standing, rules = Standing(*scaler.standing.unbind()), Rules(*scaler.rules.unbind())
    judgement = judge(standing, rules, largest, norm, culprit)
    skip, factor = judgement.skip.float(), judgement.factor
    report[:NEXT_SCALE].copy_(torch.stack([skip.double(), judgement.norm, standing.scale, factor.double()]))
    report[NEXT_SCALE:].view(torch.float32)[0].copy_(judgement.standing.scale)
    scaler.standing.copy_(torch.stack(judgement.standing))
    scaler.told.copy_(scaler.standing, non_blocking=True)
    for signal, value in zip(
        scaler.signals, (judgement.standing.scale, skip, factor.reciprocal(), factor), strict=True
    ):
        signal.copy_(value)
    return judgement


def _numbers(there: Sequence[bool]) -> set[int]:
    return {number for number, is_there in enumerate(there) if is_there}
