"""The loss scale and the counters where the device moves them, and how the host hears of it.

Everything that moves is one fp64 vector, ``judgement.Standing``. Kernels write
it, and a copy of it into pinned memory of the host, which reads there without
waiting what was so some steps ago; it waits only if asked for a number now.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mixedopt.judgement import Rules, Standing, rules_of
from mixedopt.loss_scale import LossScaleConfig, LossScaleState, make_state
from mixedopt.scaler import HOST, LossScaler

STATE = len(LossScaleState.__dataclass_fields__)  # the first fields of a standing


class DeviceScaler(LossScaler):
    """A configuration, and the state that it moves, on a device.

    Attributes:
        standing: fp64, the fields of ``Standing``.
        rules: fp64, the fields of ``Rules``.
        told: the standing as the host sees it without a sync, some steps late;
            numbers of different steps may stand side by side.
        signals: fp32, 0-d, each aligned to 16 bytes: S; 1 iff the last step
            met an inf or NaN; what its gradients were to be divided by; and
            multiplied by. Their addresses stay.
        seed: S, fp32, 0-d, in memory of its own that nobody has seen, if a step has left one.

    Args:
        config: how S moves.
        device: where.
        max_grad_norm: limit of the unscaled global norm, ``None`` for none.
    """

    def __init__(self, config: LossScaleConfig, device: torch.device, max_grad_norm: float | None) -> None:
        super().__init__(config)
        self.device = device
        self._limit = max_grad_norm
        self.standing = torch.zeros(len(Standing._fields), dtype=torch.float64, device=device)
        self.told = torch.zeros_like(self.standing, device=HOST, pin_memory=device.type == "cuda")
        self.rules = torch.zeros(len(Rules._fields), dtype=torch.float64, device=device)
        self.seed: Tensor | None = None
        self.signals: tuple[Tensor, ...] = torch.zeros((4, 4), device=device, dtype=torch.float32)[:, 0].unbind()
        self.load_(config, self._state)
        self.write_("culprit", -1)

    @property
    def state(self) -> LossScaleState:
        """S and its counters, on the host. Syncs: one read."""
        scale, *counters = self.standing[:STATE].tolist()
        return make_state(scale, *map(int, counters), device=HOST)

    def capturing(self) -> bool:
        """True iff a graph is being captured."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def tensors(self) -> tuple[Tensor, ...]:
        """Return what a kernel reads and writes: standing, rules, told, and the signals, one by one."""
        return self.standing, self.rules, self.told, *self.signals

    def read(self, name: str) -> int:
        """Return one field of the standing. Syncs: one read."""
        return int(self.standing[Standing._fields.index(name)])

    def write_(self, name: str, value: float) -> None:
        """Set one field of the standing, and of what the host sees of it. Syncs: none."""
        index = Standing._fields.index(name)
        self.standing[index].fill_(value)
        self.told[index] = value

    def return_to_(self, standing: Tensor) -> None:
        """Take back what was judged since ``standing`` was: a step that failed counts for nothing. Syncs: none."""
        self.seed = None
        self.standing.copy_(standing)
        self.told.copy_(standing, non_blocking=True)
        self.signals[0].copy_(standing[0])

    def load_(self, config: LossScaleConfig, state: LossScaleState) -> None:
        """Take over what a checkpoint holds."""
        super().load_(config, state)
        self.rules.copy_(torch.tensor(rules_of(config, self._limit), dtype=torch.float64, device=HOST))

    def _take_(self, state: LossScaleState) -> None:
        self.seed = None
        values = torch.stack([value.double() for value in state.tensors()]).to(HOST)
        self.standing[:STATE].copy_(values)
        self.told[:STATE].copy_(values)
        self.signals[0].fill_(float(values[0]))

    def is_scale(self, constant: Tensor) -> bool:
        """True iff this tensor is S itself. Syncs: none."""
        return constant.data_ptr() == self.signals[0].data_ptr()

    def _like(self, loss: Tensor) -> Tensor:
        if type(loss) is not Tensor:  # it may be spread over devices
            return super()._like(loss)
        seed, self.seed = self.seed, None
        fits = loss.dtype == torch.float32 and loss.device == self.device
        if seed is not None and fits and not self.capturing():  # a graph would begin with this S for ever
            return seed.view_as(loss) if loss.dim() else seed
        away = loss.device.type != "cpu"  # the host must not look before the number is there
        own = self.signals[0].to(device=loss.device, dtype=loss.dtype, non_blocking=away, copy=True)
        return own.view_as(loss) if loss.dim() else own

    def _factor(self, loss: Tensor) -> Tensor:
        return self.signals[0].to(loss.device, non_blocking=loss.device.type != "cpu")
