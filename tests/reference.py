"""The walk of "Mixed Precision Training" as the paper writes it, tensor by tensor.

Slow and plain on purpose. The library must do the same, bit for bit; only its clip factor is formed in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from mixedopt import DynamicLossScale


class Reference:
    """One mixed-precision run. ``weights[i]`` shows ``masters[i]``, rounded."""

    def __init__(
        self,
        make_inner: Callable[[list[list[nn.Parameter]]], torch.optim.Optimizer],
        groups: Sequence[Sequence[tuple[Tensor, torch.dtype]]],
        config: DynamicLossScale,
        max_grad_norm: float | None = None,
    ) -> None:
        mine = [[nn.Parameter(value.detach().float().clone()) for value, _ in group] for group in groups]
        self.masters = [master for group in mine for master in group]
        dtypes = [dtype for group in groups for _, dtype in group]
        self.weights = [m.detach().to(d, copy=True) for m, d in zip(self.masters, dtypes, strict=True)]
        self.grads: list[Tensor | None] = [None] * len(self.masters)
        self.inner = make_inner(mine)
        self.config, self.max_grad_norm = config, max_grad_norm
        self.scale, self.tracker, self.hysteresis_left = config.init_scale, 0, config.hysteresis
        self.applied = self.skipped = 0

    def add_group(self, group: Sequence[Tensor], **hyper: float) -> None:
        """Take in more parameters; they keep their dtype."""
        fresh = [nn.Parameter(weight.detach().float().clone()) for weight in group]
        self.inner.add_param_group({"params": fresh, **hyper})
        self.masters += fresh
        self.weights += [weight.detach().clone() for weight in group]
        self.grads += [None] * len(fresh)

    def accumulate(self, scaled: Sequence[Tensor | None]) -> None:
        """Add one micro-step's gradients, scaled and rounded as the weights are."""
        for i, grad in enumerate(scaled):
            if grad is not None:
                self.grads[i] = grad if self.grads[i] is None else self.grads[i] + grad

    @torch.no_grad()
    def step(self) -> None:
        """Check; skip or (unscale, clip, step, publish); then move the scale."""
        present = [(m, g.float()) for m, g in zip(self.masters, self.grads, strict=True) if g is not None]
        self.grads = [None] * len(self.masters)
        if not present:
            return
        found_inf = not all(bool(grad.isfinite().all()) for _, grad in present)
        if not found_inf:
            unscaled = [grad / self.scale for _, grad in present]
            if self.max_grad_norm is not None:
                norm = sum(float(grad.double().square().sum()) for grad in unscaled) ** 0.5
                unscaled = [grad * min(1.0, self.max_grad_norm / (norm + 1e-6)) for grad in unscaled]
            for (master, _), grad in zip(present, unscaled, strict=True):
                master.grad = grad
            self.inner.step()
            self.inner.zero_grad()
            for weight, master in zip(self.weights, self.masters, strict=True):
                weight.copy_(master)
        self.move_scale(found_inf)

    def move_scale(self, found_inf: bool) -> None:
        """Apply the dynamic rule; exact in Python floats for powers of two."""
        c = self.config
        self.applied, self.skipped = self.applied + (not found_inf), self.skipped + found_inf
        self.tracker = 0 if found_inf else self.tracker + 1
        self.hysteresis_left = max(self.hysteresis_left - 1, 0) if found_inf else c.hysteresis
        if self.hysteresis_left == 0:
            self.scale = max(self.scale * c.backoff_factor, c.min_scale)
        elif self.tracker >= c.growth_interval:
            self.tracker, self.scale = 0, min(self.scale * c.growth_factor, c.max_scale)
