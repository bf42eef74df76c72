"""What does one optimizer step cost? Bare fp32, torch.amp and mixedopt, side by side.

Four arms do the work that follows ``backward`` with the same optimizer:

- ``bare fp32``: ``optimizer.step()`` on fp32 parameters, nothing else;
- ``torch.amp``: GradScaler's unscale, ``clip_grad_norm_``, step, update, on fp32 parameters;
- ``mixedopt``: ``MixedPrecisionOptimizer(max_grad_norm=...)`` on half parameters;
- ``compiled``: the same with ``tier="compiled"``.

The arms run in turn, and every ratio is the median of paired ratios, so it holds when the machine's speed drifts.
A second and a third table show how the cost grows with the number of parameters and with the number of tensors.

    python examples/benchmark_step.py                      # 200 tensors, 10 M parameters, AdamW
    python examples/benchmark_step.py --device cuda --millions 1000
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from tqdm import tqdm

from mixedopt import MixedPrecisionOptimizer

# glibc moves its mmap threshold while a program runs, which doubles allocation-heavy steps at random: pin it.
PINNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}

Step = Callable[[], None]


@dataclass(frozen=True)
class Setup:
    """What one comparison runs on."""

    tensors: int
    parameters: int
    device: torch.device
    dtype: torch.dtype
    implementation: str
    rounds: int


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Print the tables; return the ratios of the first."""
    args = parse(argv)
    pin_malloc(args.device)
    torch.manual_seed(0)
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    base = Setup(args.tensors, int(args.millions * 1e6), args.device, dtype, args.implementation, args.rounds)

    print(f"AdamW ({base.implementation}), clip to a global norm, {base.device}, {dtype}, torch {torch.__version__}\n")
    seconds = compare(base)
    ratios = report_arms(base, seconds)
    if not args.quick:
        report_parameters(base, args.millions)
        report_tensors(base, args.most_tensors)
    return ratios


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--millions", type=float, default=10.0, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds over the arms")
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp16")
    parser.add_argument("--implementation", choices=("foreach", "loop", "fused"), default="foreach")
    parser.add_argument("--most-tensors", type=int, default=5000, help="where the last table ends")
    parser.add_argument("--quick", action="store_true", help="only the first table")
    return parser.parse_args(argv)


def pin_malloc(device: torch.device) -> None:
    """Start the program again with malloc pinned, once."""
    if device.type == "cpu" and __name__ == "__main__" and not PINNED_MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PINNED_MALLOC})


# -- the arms: each returns a function that hands out gradients, and one that steps ----------------------------------


def make_arms(setup: Setup) -> dict[str, tuple[Step, Step]]:
    """Return name -> (fill the gradients, step) over separate copies of the parameters."""
    shape = (max(setup.parameters // setup.tensors, 1),)
    weights = [torch.randn(shape, device=setup.device) for _ in range(setup.tensors)]
    grads = [torch.randn(shape, device=setup.device) * 1e-3 for _ in range(setup.tensors)]
    return {
        "bare fp32": bare_arm(setup, weights, grads),
        "torch.amp": amp_arm(setup, weights, grads),
        "mixedopt": mixedopt_arm(setup, weights, grads, "eager"),
        "compiled": mixedopt_arm(setup, weights, grads, "compiled"),
    }


def adamw(setup: Setup, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the inner optimizer, the same in each arm."""
    flags = {"foreach": setup.implementation == "foreach", "fused": setup.implementation == "fused"}
    return torch.optim.AdamW(params, lr=1e-4, **flags)


def bare_arm(setup: Setup, weights: list[torch.Tensor], grads: list[torch.Tensor]) -> tuple[Step, Step]:
    """What fp32 training does: step."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = adamw(setup, params)

    def fill() -> None:
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad

    def step() -> None:
        optimizer.step()

    return fill, step


def amp_arm(setup: Setup, weights: list[torch.Tensor], grads: list[torch.Tensor]) -> tuple[Step, Step]:
    """What torch.amp's recipe does: unscale, clip, step, update."""
    params = [nn.Parameter(weight.clone()) for weight in weights]
    optimizer = adamw(setup, params)
    scaler = torch.amp.GradScaler(setup.device.type)
    scaler.scale(torch.ones((), device=setup.device))  # the scaler makes its scale on first use
    own = [grad * scaler.get_scale() for grad in grads]

    def fill() -> None:
        torch._foreach_copy_(own, grads)  # unscale and clip write into the gradients
        torch._foreach_mul_(own, 2.0**16)
        for param, grad in zip(params, own, strict=True):
            param.grad = grad

    def step() -> None:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        scaler.step(optimizer)
        scaler.update()

    return fill, step


def mixedopt_arm(setup: Setup, weights: list[torch.Tensor], grads: list[torch.Tensor], tier: str) -> tuple[Step, Step]:
    """What this package does: one call, which drops the gradients too."""
    params = [nn.Parameter(weight.to(setup.dtype)) for weight in weights]
    optimizer = MixedPrecisionOptimizer(adamw(setup, params), loss_scale=2.0**10, max_grad_norm=1.0, tier=tier)
    scaled = [(grad * 2.0**10).to(setup.dtype) for grad in grads]

    def fill() -> None:
        optimizer.scale(torch.ones((), device=setup.device))
        for param, grad in zip(params, scaled, strict=True):
            param.grad = grad

    def step() -> None:
        optimizer.step()

    return fill, step


# -- measuring -------------------------------------------------------------------------------------------------------


def compare(setup: Setup) -> dict[str, list[float]]:
    """Time the arms in turn; return name -> seconds of each round."""
    arms = make_arms(setup)
    seconds: dict[str, list[float]] = {name: [] for name in arms}
    for index in tqdm(range(setup.rounds + 3), desc=f"{setup.parameters / 1e6:g} M in {setup.tensors}", leave=False):
        for name, (fill, step) in arms.items():
            fill()
            synchronize(setup.device)
            start = time.perf_counter()
            step()
            synchronize(setup.device)
            if index >= 3:  # the first rounds warm up
                seconds[name].append(time.perf_counter() - start)
    return seconds


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def paired(seconds: dict[str, list[float]], name: str, base: str) -> list[float]:
    """Return the sorted ratios of two arms, round by round."""
    return sorted(mine / theirs for mine, theirs in zip(seconds[name], seconds[base], strict=True))


def report_arms(setup: Setup, seconds: dict[str, list[float]]) -> dict[str, float]:
    """Print the first table; return name of ratio -> median."""
    print(f"{setup.tensors} tensors, {setup.parameters / 1e6:g} M parameters, {setup.rounds} rounds")
    print(f"{'':12}{'ms, median':>12}{'quartiles':>18}{'x bare fp32':>14}{'x torch.amp':>14}")
    ratios = {}
    for name, times in seconds.items():
        low, middle, high = (value * 1e3 for value in statistics.quantiles(times, n=4))
        to_bare = statistics.median(paired(seconds, name, "bare fp32"))
        to_amp = statistics.median(paired(seconds, name, "torch.amp"))
        print(f"{name:12}{middle:12.2f}{low:10.2f} -{high:6.2f}{to_bare:14.2f}{to_amp:14.2f}")
        ratios[f"{name} / bare fp32"], ratios[f"{name} / torch.amp"] = to_bare, to_amp
    return ratios


def report_parameters(base: Setup, millions: float) -> None:
    """Print how the step grows with the number of parameters."""
    print(f"\ngrowth with parameters, {base.tensors} tensors")
    print(f"{'parameters':>12}{'mixedopt, ms':>15}{'ns/parameter':>15}{'x bare fp32':>14}")
    for share in (0.1, 0.3, 1.0, 3.0):
        setup = Setup(
            base.tensors, int(millions * share * 1e6), base.device, base.dtype, base.implementation, base.rounds // 2
        )
        seconds = compare(setup)
        ours = statistics.median(seconds["mixedopt"])
        ratio = statistics.median(paired(seconds, "mixedopt", "bare fp32"))
        print(f"{setup.parameters / 1e6:10g} M{ours * 1e3:15.2f}{ours / setup.parameters * 1e9:15.2f}{ratio:14.2f}")


def report_tensors(base: Setup, most: int) -> None:
    """Print how our share of the step grows with the number of tensors.

    The inner optimizer is the fused one: a slow inner step would bury the difference in its noise.
    """
    print("\ngrowth with tensors, 64 values each, AdamW (fused): mixedopt minus the bare step")
    print(f"{'tensors':>12}{'bare, ms':>12}{'mixedopt, ms':>15}{'difference, ms':>16}")
    points = []
    for tensors in (count for count in (10, 20, 100, 1000, 5000) if count <= most):
        setup = Setup(tensors, tensors * 64, base.device, base.dtype, "fused", base.rounds)
        seconds = compare(setup)
        bare, ours = (statistics.median(seconds[name]) * 1e3 for name in ("bare fp32", "mixedopt"))
        differences = (b - a for a, b in zip(seconds["bare fp32"], seconds["mixedopt"], strict=True))
        points.append((tensors, statistics.median(differences) * 1e6))
        print(f"{tensors:12}{bare:12.2f}{ours:15.2f}{points[-1][1] / 1e3:16.2f}")
    (few, low), (many, high) = points[0], points[-1]
    print(f"{(high - low) / (many - few):.2f} us per tensor")


if __name__ == "__main__":
    main()
