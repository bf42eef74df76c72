"""Small scripted runs that can be cut anywhere; as a program, goes on with every cut of a folder.

python tests/resume.py FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from optimizers import BY_NAME, INNERS
from torch import Tensor, nn

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, StaticLossScale

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
SCALES = {
    "dynamic": DynamicLossScale(init_scale=2.0**7, growth_interval=2, hysteresis=2),
    "odd": DynamicLossScale(init_scale=100.0, growth_factor=1.7, backoff_factor=0.3, growth_interval=1),
    "static": StaticLossScale(64.0),
}
GRADIENTS = "autograd", "half", "fp32"
EVENTS = "good", "good", "two micro-steps", "three micro-steps", "overflow", "no gradient", "other lr", "without branch"
COMPILED = "sgd_momentum", "sgd_nesterov", "adam", "adam_amsgrad", "adamw_foreach", "radam", "adamax", "adagrad"
NAMES = tuple(inner.name for inner in INNERS)


@dataclass(frozen=True)
class Script:
    """A run: how it is built, what happens, and where it is cut."""

    inner: str
    dtype: str
    scale: str
    gradients: str
    with_model: bool
    clip: bool
    events: tuple[str, ...]
    cut: int
    tier: str = "eager"
    master: str = "fp32"


class Net(nn.Module):
    """Matrices, a norm, a convolution in channels_last, a tied weight, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.conv = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)
        self.norm = nn.LayerNorm(6)
        self.branch = nn.Linear(6, 6, bias=False)
        self.last = nn.Linear(6, 4, bias=False)
        self.again = nn.Linear(6, 4, bias=False)
        self.again.weight = self.last.weight

    def forward(self, x: Tensor, use_branch: bool) -> Tensor:
        x = self.first(x)
        x = x + self.conv(x.view(-1, 2, 3, 1)).flatten(1)
        x = self.norm(x)
        return self.last(self.branch(x) if use_branch else x) + self.again(x)


class Run:
    """A model and its optimizer, and what happens to them."""

    def __init__(self, script: Script) -> None:
        torch.manual_seed(5)
        self.script, self.step = script, 0
        self.model = Net()
        dtype = DTYPES[script.dtype]
        if not script.with_model:
            self.model.to(dtype)
        inner = BY_NAME[script.inner]
        params = [p for p in self.model.parameters() if inner.accepts(p)]
        self.optimizer = MixedPrecisionOptimizer(
            inner([params[::2], params[1::2]]),
            self.model if script.with_model else None,
            dtype=dtype,
            loss_scale=SCALES[script.scale],
            gradients=script.gradients,
            max_grad_norm=0.5 if script.clip else None,
            tier=script.tier,
            master=script.master,
        )

    def play(self, start: int, stop: int) -> None:
        """Let the events from ``start`` to ``stop`` happen."""
        for self.step in range(start, stop):
            self._happen(self.script.events[self.step])

    def _happen(self, event: str) -> None:
        if event == "other lr":
            for group in self.optimizer.param_groups:
                group["lr"] *= 0.75
        micro = {"no gradient": 0, "two micro-steps": 2, "three micro-steps": 3}.get(event, 1)
        for index in range(micro):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * self.step + index))
            x = x if self.script.with_model else x.to(DTYPES[self.script.dtype])
            # The fused SGD refuses a parameter whose first gradient comes late, with and without this library.
            branch = event != "without branch" or BY_NAME[self.script.inner].refuses_late
            loss = self.model(x, branch).float().square().mean()
            self.optimizer.backward(loss * float("inf") if event == "overflow" else loss)
        self.optimizer.step()

    def saved(self) -> dict[str, Any]:
        """Return what a checkpoint holds; the tensors are those in use."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, saved: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.model.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


def cuts(folder: Path) -> Iterator[tuple[int, Script, Path, Path]]:
    """Yield number, script, the file of the cut and that of the end, in order."""
    scripts = torch.load(folder / "scripts.pt", weights_only=True)
    for number, fields in enumerate(scripts):
        script = Script(**{**fields, "events": tuple(fields["events"])})
        yield number, script, folder / f"{number}.cut.pt", folder / f"{number}.end.pt"


def main(folder: Path) -> None:
    """Load every cut into new objects, play the rest, and save the end."""
    torch.set_num_threads(1)  # as in the suite: the same sums
    for _, script, cut, end in cuts(folder):
        run = Run(script)
        run.load(torch.load(cut, weights_only=True))
        run.play(script.cut, len(script.events))
        torch.save(run.saved(), end)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
