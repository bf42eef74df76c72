"""The ways to step that ``benchmark_step.py`` compares."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from mixedopt import MixedPrecisionOptimizer

Call = Callable[[], None]
Shapes = tuple[tuple[int, ...], ...]

CLIP = 1.0
LR = 1e-4
# GradScaler's first scale, and one that keeps gradients of 1e-3 well inside fp16.
AMP_SCALE, HALF_SCALE = 2.0**16, 2.0**10
# Bytes that a step must at least move for one parameter: the half gradient read twice (check and norm, then update),
# fp32 master and state read and written, the half weight written.
FLOOR_BYTES = {"adamw": 30, "sgd": 22}


@dataclass(frozen=True)
class Setup:
    """What one comparison runs on.

    Attributes:
        shapes: of the parameters.
        dtype: of half parameters.
        optimizer: ``"adamw"``, or ``"sgd"`` with momentum.
        implementation: torch's: ``"foreach"``, ``"loop"`` or ``"fused"``.
    """

    shapes: Shapes
    device: torch.device
    dtype: torch.dtype
    optimizer: str
    implementation: str
    rounds: int

    @property
    def parameters(self) -> int:
        """How many values."""
        return sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True)
class Spec:
    """What an arm is: ``kind`` is ``"bare"``, ``"amp"`` or ``"mixedopt"``; the rest are its options."""

    kind: str
    clip: bool = True
    fused: bool = False
    tier: str = "eager"
    master: str = "fp32"


@dataclass(frozen=True)
class Arm:
    """Parameters of its own: ``fill`` makes new gradients, ``step`` follows ``backward``, ``drop`` frees them."""

    params: list[nn.Parameter]
    fill: Call
    step: Call
    drop: Call


# name -> arm, in the order of the tables
ARMS = {
    "bare fp32": Spec("bare", clip=False),
    "bare fused": Spec("bare", clip=False, fused=True),
    "torch.amp": Spec("amp"),
    "torch.amp fused": Spec("amp", fused=True),
    "mixedopt": Spec("mixedopt"),
    "fused": Spec("mixedopt", fused=True, tier="fused"),
    "compiled": Spec("mixedopt", tier="compiled"),
}
GPT2_ARMS = {
    "bare fp32 + clip": Spec("bare", fused=True),
    "torch.amp + clip": Spec("amp", fused=True),
    "torch.amp, no clip": Spec("amp", fused=True, clip=False),
    "mixedopt eager": Spec("mixedopt", fused=True),
    "mixedopt fused": Spec("mixedopt", fused=True, tier="fused"),
    "mixedopt compiled": Spec("mixedopt", fused=True, tier="compiled"),
    "mixedopt compiled, split": Spec("mixedopt", fused=True, tier="compiled", master="split"),
}


def even(parameters: int, tensors: int) -> Shapes:
    """Return so many values in so many tensors."""
    return ((max(parameters // tensors, 1),),) * tensors


def gpt2(layers: int, d: int, vocabulary: int, context: int) -> Shapes:
    """Return the parameters' shapes of a GPT-2."""
    layer = ((d,), (d,), (3 * d, d), (3 * d,), (d, d), (d,), (d,), (d,), (4 * d, d), (4 * d,), (d, 4 * d), (d,))
    return ((vocabulary, d), (context, d), *(layer * layers), (d,), (d,))


GPT2_SHAPES = {
    "GPT-2 XL": gpt2(48, 1600, 50304, 1024),
    "GPT-2 of 4 layers, 256 wide": gpt2(4, 256, 1024, 256),
}


def make_arm(setup: Setup, spec: Spec) -> Arm:
    """Build one arm; all have the same weights and gradients.

    Raises:
        ValueError: mixedopt refuses the tier or the master.
    """
    generator = torch.Generator(setup.device).manual_seed(0)
    half = spec.kind == "mixedopt"
    dtype = setup.dtype if half else torch.float32
    scale = {"bare": 1.0, "amp": AMP_SCALE, "mixedopt": HALF_SCALE}[spec.kind]

    def random(factor: float) -> list[Tensor]:
        made = (torch.randn(shape, device=setup.device, generator=generator) for shape in setup.shapes)
        return [(tensor * factor).to(dtype) for tensor in made]

    params = [nn.Parameter(weight) for weight in random(1.0)]
    grads = random(1e-3 * scale)

    def fill() -> None:
        for param in params:
            param.grad = None
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad.clone()  # whoever steps may write into it, or free it

    inner = make_inner(setup, spec, params)
    if spec.kind == "bare":
        return Arm(params, fill, bare_step(inner, params, spec), inner.zero_grad)
    if spec.kind == "amp":
        return Arm(params, fill, amp_step(inner, params, spec, setup.device), inner.zero_grad)
    optimizer = MixedPrecisionOptimizer(
        inner, loss_scale=HALF_SCALE, max_grad_norm=CLIP if spec.clip else None, tier=spec.tier, master=spec.master
    )
    one = torch.ones((), device=setup.device)

    def scaled_fill() -> None:
        optimizer.scale(one)  # as a backward would: gradients that nobody scaled are warned of
        fill()

    def step() -> None:
        optimizer.step()

    return Arm(params, scaled_fill, step, optimizer.zero_grad)


def make_inner(setup: Setup, spec: Spec, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the inner optimizer, the same in each arm but for who asks for the fused kernel."""
    implementation = "fused" if spec.fused else setup.implementation
    flags = {"foreach": implementation == "foreach", "fused": implementation == "fused"}
    if setup.optimizer == "sgd":
        return torch.optim.SGD(params, lr=LR, momentum=0.9, **flags)
    return torch.optim.AdamW(params, lr=LR, **flags)


def bare_step(inner: torch.optim.Optimizer, params: list[nn.Parameter], spec: Spec) -> Call:
    """What fp32 training does."""

    def step() -> None:
        if spec.clip:
            nn.utils.clip_grad_norm_(params, CLIP)
        inner.step()

    return step


def amp_step(inner: torch.optim.Optimizer, params: list[nn.Parameter], spec: Spec, device: torch.device) -> Call:
    """What torch.amp's recipe does: unscale and clip, step, update."""
    scaler = torch.amp.GradScaler(device.type, init_scale=AMP_SCALE)
    scaler.scale(torch.ones((), device=device))  # the scaler makes its scale on first use

    def step() -> None:
        if spec.clip:
            scaler.unscale_(inner)
            nn.utils.clip_grad_norm_(params, CLIP)
        scaler.step(inner)
        scaler.update()

    return step
