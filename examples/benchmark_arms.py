"""The ways to train that ``benchmark_training.py`` compares: each makes a function that runs one whole iteration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from benchmark_models import Batch, Workload
from torch import Tensor, nn

import mixedopt
from mixedopt import MixedPrecisionOptimizer

LR = 1e-4
BASE = "torch.amp"
WARM_UP = 3  # iterations before a capture, as torch's notes on CUDA graphs ask for

TrainStep = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Spec:
    """What an arm is.

    Attributes:
        name: for the tables.
        kind: ``"fp32"``, ``"tf32"``, ``"half"``, ``"amp"`` or ``"mixedopt"``.
        tier, gradients: of a ``MixedPrecisionOptimizer``.
        graph: capture the iteration in a CUDA graph.
    """

    name: str
    kind: str
    tier: str = ""
    gradients: str = "autograd"
    graph: bool = False


@dataclass(frozen=True)
class Cell:
    """What all arms of one table share."""

    workload: Workload
    model: str
    dtype: torch.dtype
    clip: float | None
    compiled: bool
    device: torch.device


@dataclass(frozen=True)
class Arm:
    """A model of its own, ready to train.

    Attributes:
        step: forward, backward, step, gradients dropped; returns the loss, on its device.
        optimizer: that of mixedopt, for what it counts, else ``None``.
        note: what a reader of the table should know.
    """

    spec: Spec
    step: TrainStep
    optimizer: MixedPrecisionOptimizer | None = None
    note: str = ""

    @property
    def tier(self) -> str | None:
        """The tier that runs."""
        return None if self.optimizer is None else self.optimizer.tier


def specs(tiers: Sequence[str], gradients: Sequence[str], references: Sequence[str], *, graph: bool) -> list[Spec]:
    """Return the arms in the order of the tables."""
    ours = [
        Spec(f"mixedopt {tier}" + ("" if kind == "autograd" else f", {kind} gradients"), "mixedopt", tier, kind)
        for tier in tiers
        for kind in gradients
    ]
    found = [Spec(kind, kind) for kind in references] + [Spec(BASE, "amp"), *ours]
    if graph:
        found.append(Spec(f"{BASE}, graphed", "amp", graph=True))
        # an eager step reads from the device, which no capture allows
        found += [
            Spec(f"{spec.name}, graphed", spec.kind, spec.tier, spec.gradients, graph=True)
            for spec in ours
            if spec.tier != "eager"
        ]
    return found


def make_arm(spec: Spec, cell: Cell, batch: Batch) -> Arm:
    """Build one arm; each has the same first weights.

    Raises:
        ValueError: mixedopt refuses, or this machine cannot.
    """
    if spec.graph and cell.device.type != "cuda":
        raise ValueError("CUDA graphs need a GPU")
    if spec.kind == "mixedopt":
        return mixedopt_arm(spec, cell, batch)
    if not spec.graph:
        return Arm(spec, plain_steps(spec, cell)[0])
    try:
        step, note = captured_amp(spec, cell, batch)
        return Arm(spec, step, note=note)
    except RuntimeError as error:  # what a broken capture leaves behind is not used again
        step, note = captured_amp(spec, cell, batch, whole=False)
        return Arm(spec, step, note=f"{note}: {first_line(error)}")


def model_and_inner(spec: Spec, cell: Cell) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model, with the same weights for each arm, and its optimizer."""
    torch.manual_seed(0)
    model = cell.workload.make().to(cell.device).train()
    # the fused tier steps by the inner optimizer's own kernel, which a capture wants to be told
    capturable = spec.graph and (spec.kind == "amp" or spec.tier == "fused")
    return model, torch.optim.AdamW(model.parameters(), lr=LR, fused=True, capturable=capturable)


def mixedopt_arm(spec: Spec, cell: Cell, batch: Batch) -> Arm:
    """Return the loop's body with this package."""
    model, inner = model_and_inner(spec, cell)
    optimizer = MixedPrecisionOptimizer(
        inner, model, dtype=cell.dtype, max_grad_norm=cell.clip, tier=spec.tier, gradients=spec.gradients
    )
    forward = compiled(model, cell)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = cell.workload.loss(forward, x, y)
        optimizer.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    if not spec.graph:
        return Arm(spec, step, optimizer)
    if not hasattr(mixedopt, "graphed"):
        raise ValueError("this mixedopt has no graphed()")
    return Arm(spec, mixedopt.graphed(step, *batch), optimizer, "whole iteration in one graph")


def compiled(model: nn.Module, cell: Cell) -> Callable[..., object]:
    """Return what runs the forward."""
    return torch.compile(model) if cell.compiled else model


def plain_steps(spec: Spec, cell: Cell) -> tuple[TrainStep, TrainStep, Callable[[], None]]:
    """Return the loop's body as torch has it, and its halves: forward and backward, update.

    What is disabled of GradScaler and autocast costs nothing. ``half`` is how fast half precision can be where nothing
    is scaled, checked, clipped or kept in fp32; it does not train well.
    """
    model, inner = model_and_inner(spec, cell)
    if spec.kind == "half":
        model.to(cell.dtype)
    forward, params = compiled(model, cell), list(model.parameters())
    amp, clip = spec.kind == "amp", None if spec.kind == "half" else cell.clip
    kind = cell.device.type
    scaler = torch.amp.GradScaler(kind, enabled=amp and cell.dtype is torch.float16)

    def forward_backward(x: Tensor, y: Tensor) -> Tensor:
        if spec.kind == "half" and x.is_floating_point():
            x = x.to(cell.dtype)
        with torch.autocast(kind, cell.dtype) if amp else contextlib.nullcontext():
            loss = cell.workload.loss(forward, x, y)
        scaler.scale(loss).backward()
        return loss.detach()

    def update() -> None:
        if clip is not None:
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(params, clip)
        scaler.step(inner)
        scaler.update()

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = forward_backward(x, y)
        update()
        inner.zero_grad()
        return loss

    return step, forward_backward, update


# -- CUDA graphs without this package --------------------------------------------------------------------------------


def captured_amp(spec: Spec, cell: Cell, batch: Batch, *, whole: bool = True) -> tuple[TrainStep, str]:
    """Capture torch.amp's iteration, ``whole`` or all but the update; return also what was done.

    With a fused, capturable optimizer nothing in GradScaler reads from the device: the check, the step that skips by
    itself and the next scale are kernels.

    Raises:
        RuntimeError: the capture met what no graph can hold.
    """
    step, forward_backward, update = plain_steps(spec, cell)
    warm_up(step, batch)
    if whole:
        return captured(step, batch), "whole iteration in one graph"
    # the graph writes the gradients to the same place each time, so they are not dropped
    replay = captured(forward_backward, batch)

    def partly(x: Tensor, y: Tensor) -> Tensor:
        loss = replay(x, y)
        update()
        return loss

    return partly, "step outside the graph"


def warm_up(step: TrainStep, batch: Batch) -> None:
    """Run on another stream, so that what is made on first use is made."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            step(*batch)
    torch.cuda.current_stream().wait_stream(stream)


@dataclass(frozen=True)
class Captured:
    """A graph, and the step whose tensors it reads and writes: they must stay alive."""

    step: TrainStep
    graph: torch.cuda.CUDAGraph
    loss: Tensor

    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """Run the iteration; the batch is read where it was at the capture."""
        self.graph.replay()
        return self.loss


def captured(step: TrainStep, batch: Batch) -> TrainStep:
    """Capture ``step``; what is returned reads the batch where it lies, and returns the same tensor each time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(*batch)

    return Captured(step, graph, loss)


# -- what holds around an arm ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def matmul_precision(spec: Spec) -> Iterator[None]:
    """Context in which fp32 products are TF32 for the arm of that name, and fp32 for all others."""
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    tf32 = spec.kind == "tf32"
    try:
        torch.set_float32_matmul_precision("high" if tf32 else "highest")
        torch.backends.cudnn.allow_tf32 = tf32
        yield
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


def first_line(error: BaseException) -> str:
    """Return an error in one line."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
