"""Train one small network on handwritten digits in fp32, fp16 and bf16.

What it shows:

1. **An ordinary run.** The same loop in fp32; in naive fp16, which is
   ``model.half()`` and a bare optimizer; and in fp16 and bf16 with
   ``MixedPrecisionOptimizer``. Look for "the one changed line" in ``train``.
2. **What the fp32 master is for.** In fp16 the weights between 1/16 and 1/8
   lie 2^-14 = 6.1e-5 apart. AdamW moves a weight by about lr, so with lr 3e-5
   such a weight rounds back to where it was, step after step. The master adds
   the small moves up.
3. **What the loss scale is for.** fp16 holds nothing under 2^-25: smaller
   gradients become zero. Gradients are that small when a loss is one among
   many: averaged over all pixels of an image, or weighted in a sum, as in
   distillation. Here the loss is multiplied by 3e-6. In fp32 that does no
   harm, since AdamW divides by the size of the gradients.

2 and 3 are the two ablations of "Mixed Precision Training" (Micikevicius et
al., 2018, arXiv:1710.03740). Each stands next to fp32 in the same setting:
same split of the data, same initial weights, same batches for each seed.

How to run, in under a minute on two CPU cores::

    pip install "mixedopt[examples]"
    python train_digits.py                 # 5 seeds, writes train_digits.png
    python train_digits.py --seeds 1       # a quick look

Options: ``--seeds N``, ``--max-steps N`` (cut every run short) and
``--plot PATH``. It runs on a GPU when there is one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer

TRAIN_SIZE = 1200  # of 1797 images; the others test
BATCH_SIZE = 32
HIDDEN = 128
TOP_LOSS = 1.5 * math.log(10)  # of the picture; log(10) is the loss of a guess

# S starts at its default, 2^16, but grows after 100 clean steps instead of 2000:
# these runs have a few hundred steps, and the picture should show it move.
DYNAMIC = DynamicLossScale(growth_interval=100)


@dataclass(frozen=True, slots=True)
class Arm:
    """One way to train: the format of the weights, and what helps it."""

    name: str
    color: str
    dtype: torch.dtype = torch.float32
    mixed: bool = False
    loss_scale: float | DynamicLossScale | None = None
    keep_masters: bool = True


@dataclass(frozen=True, slots=True)
class Setting:
    """What all arms of one comparison share; the first arm is the yardstick."""

    name: str
    arms: tuple[Arm, ...]
    steps: int
    lr: float = 3e-3
    eps: float = 1e-8
    loss_weight: float = 1.0


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes per parameter, by what they hold."""

    weights: float
    masters: float
    gradients: float
    state: float

    @property
    def total(self) -> float:
        """All four together."""
        return self.weights + self.masters + self.gradients + self.state


@dataclass(frozen=True, slots=True)
class Result:
    """One finished run; ``losses`` are unweighted, one per step as ``scales`` and ``skips``."""

    setting: Setting
    arm: Arm
    seed: int
    accuracy: float  # percent of the test images
    losses: tuple[float, ...]
    scales: tuple[float, ...]  # S used by each step; 1 in arms without any
    skips: tuple[bool, ...]
    bytes: Bytes
    seconds: float

    @property
    def final_loss(self) -> float:
        """Mean over the last ten steps."""
        return statistics.fmean(self.losses[-10:])


FP32 = Arm("fp32", "black")
NAIVE = Arm("naive fp16", "tab:red", torch.float16)
FP16 = Arm("mixedopt fp16", "tab:blue", torch.float16, mixed=True, loss_scale=DYNAMIC)
BF16 = Arm("mixedopt bf16", "tab:green", torch.bfloat16, mixed=True)
NO_MASTER = Arm("fp16 without master", "tab:orange", torch.float16, mixed=True, loss_scale=DYNAMIC, keep_masters=False)
NO_SCALE = Arm("fp16 without loss scale", "tab:purple", torch.float16, mixed=True, loss_scale=1.0)

SETTINGS = (
    Setting("ordinary", (FP32, NAIVE, FP16, BF16), steps=150),
    Setting("small learning rate", (FP32, NO_MASTER, FP16, BF16), steps=400, lr=3e-5),
    # eps must be small against the gradients, in fp32 as well
    Setting("small gradients", (FP32, NO_SCALE, FP16, BF16), steps=150, loss_weight=3e-6, eps=1e-12),
)


# -- data and model -----------------------------------------------------------


def load_data(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return 1797 images, normalised rows of 64 pixels, and their labels."""
    images, labels = load_digits(return_X_y=True)
    x = torch.tensor(images, dtype=torch.float32, device=device)
    return (x - x.mean()) / x.std(), torch.tensor(labels, device=device)


def make_model(seed: int) -> nn.Module:
    """Return the network: fp32, the same for the same seed."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(64, HIDDEN), nn.LayerNorm(HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))


def make_batches(train_set: Tensor, steps: int, shuffle: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of ``steps`` batches, shuffled anew each epoch."""
    per_epoch = len(train_set) // BATCH_SIZE
    for step in range(steps):
        if step % per_epoch == 0:
            order = train_set[torch.randperm(len(train_set), generator=shuffle)]
        yield order[step % per_epoch * BATCH_SIZE :][:BATCH_SIZE]


# -- the loop -----------------------------------------------------------------


def train(setting: Setting, arm: Arm, seed: int, data: tuple[Tensor, Tensor], progress: tqdm) -> Result:
    """Train one network and measure it."""
    x, y = data
    shuffle = torch.Generator().manual_seed(seed)
    train_set, test_set = torch.randperm(len(x), generator=shuffle).split([TRAIN_SIZE, len(x) - TRAIN_SIZE])
    losses, scales, skips = [], [], []

    # an fp32 model and any torch optimizer, as always
    model = make_model(seed).to(x.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=setting.lr, eps=setting.eps, fused=True)

    if arm.mixed:
        # the model becomes half, except its LayerNorm; the optimizer gets fp32 masters
        optimizer = MixedPrecisionOptimizer(optimizer, model, dtype=arm.dtype, loss_scale=arm.loss_scale)
    else:
        # fp32, or naive fp16: everything is cast, the inputs too
        model.to(arm.dtype)
        x = x.to(arm.dtype)

    start = time.perf_counter()
    for batch in make_batches(train_set, setting.steps, shuffle):
        # forward; the loss is always fp32
        loss = F.cross_entropy(model(x[batch]).float(), y[batch])

        # backward
        optimizer.zero_grad()
        if arm.mixed:
            optimizer.backward(loss * setting.loss_weight)  # the one changed line
        else:
            (loss * setting.loss_weight).backward()

        # update; a step whose gradients hold an inf or NaN is skipped and lowers S
        optimizer.step()
        if not arm.keep_masters:
            forget_masters_(optimizer, model)

        # keep the records; reading S makes the host wait for a GPU, so in a long run do it less often
        losses.append(loss.detach())
        scales.append(optimizer.last_step.loss_scale if arm.mixed else 1.0)
        skips.append(arm.mixed and optimizer.last_step.skipped)
        progress.update()
    history = torch.stack(losses).tolist()  # waits for the device
    seconds = time.perf_counter() - start

    return Result(
        setting=setting,
        arm=arm,
        seed=seed,
        accuracy=accuracy(model, x[test_set], y[test_set]),
        losses=tuple(history),
        scales=tuple(scales),
        skips=tuple(skips),
        bytes=measure_bytes(model, optimizer, F.cross_entropy(model(x[batch]).float(), y[batch])),
        seconds=seconds,
    )


@torch.no_grad()
def forget_masters_(optimizer: MixedPrecisionOptimizer, model: nn.Module) -> None:
    """Take from the masters what the half weights cannot hold: the ablation."""
    masters = dict(optimizer.named_masters())
    for name, weight in model.named_parameters():
        masters[name].copy_(weight)


@torch.no_grad()
def accuracy(model: nn.Module, x: Tensor, y: Tensor) -> float:
    """Return the percentage of images that ``model`` gets right."""
    model.eval()
    hits = model(x).argmax(dim=1) == y
    return 100 * hits.float().mean().item()


def measure_bytes(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Tensor) -> Bytes:
    """Count the storage that training holds; runs a last backward, no step.

    Padding counts, activations do not. What is shared counts once: in mixed
    precision the weights of a LayerNorm are fp32 and their own masters.
    """
    params = list(model.parameters())
    masters: list[Tensor] = []
    inner = optimizer
    if isinstance(optimizer, MixedPrecisionOptimizer):
        masters = [master for _, master in optimizer.named_masters()]
        inner = optimizer.inner
        optimizer.backward(loss)
        gradients = [param.grad for param in params]
        optimizer.unscale_()  # gathers them in fp32
        gradients += [master.grad for master in masters]
    else:
        loss.backward()
        gradients = [param.grad for param in params]
    state = [value for entry in inner.state.values() for value in entry.values() if isinstance(value, Tensor)]
    optimizer.zero_grad()

    count = sum(param.numel() for param in params)
    sizes, seen = [], set()
    for tensors in (params, masters, gradients, state):
        storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
        sizes.append(sum(size for pointer, size in storages.items() if pointer not in seen) / count)
        seen |= storages.keys()
    return Bytes(*sizes)


# -- what came out ------------------------------------------------------------


def of(results: Iterable[Result], setting: Setting, arm: Arm) -> list[Result]:
    """Return the runs of one arm in one setting, one per seed."""
    return [result for result in results if result.setting == setting and result.arm == arm]


def against_fp32(results: Sequence[Result], setting: Setting, arm: Arm) -> float:
    """Return the mean over paired seeds of accuracy minus fp32's, in points."""
    pairs = zip(of(results, setting, arm), of(results, setting, setting.arms[0]), strict=True)
    return statistics.fmean(mine.accuracy - fp32.accuracy for mine, fp32 in pairs)


def power_of_two(scale: float) -> str:
    """Return ``scale`` as a power of two, which it always is here."""
    return "1" if scale == 1 else f"2^{math.log2(scale):.0f}"


def format_table(results: Sequence[Result]) -> str:
    """Return one row per arm: means over the seeds, the median for S."""
    head = ("test accuracy", "vs fp32", "final loss", "loss scale", "applied", "skipped", "bytes/param", "seconds")
    lines = []
    for setting in dict.fromkeys(result.setting for result in results):
        title = f"{setting.name}: lr {setting.lr:g}, loss x {setting.loss_weight:g}"
        lines += ["", title, f"  {'':<24}" + "".join(f"{name:>14}" for name in head)]
        for arm in setting.arms:
            runs = of(results, setting, arm)
            cells = (
                f"{statistics.fmean(run.accuracy for run in runs):.1f} %",
                f"{against_fp32(results, setting, arm):+.1f}",
                f"{statistics.fmean(run.final_loss for run in runs):.3f}",
                power_of_two(statistics.median_low(run.scales[-1] for run in runs)) if arm.mixed else "-",
                f"{statistics.fmean(len(run.skips) - sum(run.skips) for run in runs):.1f}",
                f"{statistics.fmean(sum(run.skips) for run in runs):.1f}",
                f"{runs[0].bytes.total:.1f}",
                f"{statistics.fmean(run.seconds for run in runs):.2f}",
            )
            lines.append(f"  {arm.name:<24}" + "".join(f"{cell:>14}" for cell in cells))
    return "\n".join(lines[1:])


def format_bytes(results: Sequence[Result]) -> str:
    """Return where the bytes per parameter of the first setting are."""
    setting = results[0].setting
    lines = ["bytes per parameter"]
    lines.append(f"  {'':<24}" + "".join(f"{name:>14}" for name in ("weights", "masters", "gradients", "state")))
    for arm in setting.arms:
        held = of(results, setting, arm)[0].bytes
        cells = (held.weights, held.masters, held.gradients, held.state)
        lines.append(f"  {arm.name:<24}" + "".join(f"{cell:>14.1f}" for cell in cells))
    return "\n".join(lines)


def format_lesson(results: Sequence[Result]) -> str:
    """Return what the numbers say, a sentence per setting."""
    sentences = []
    for setting in dict.fromkeys(result.setting for result in results):
        fp32, plain, *ours = setting.arms
        level = statistics.fmean(run.accuracy for run in of(results, setting, fp32))
        ends = [f"{arm.name} {distance(against_fp32(results, setting, arm))}" for arm in (plain, *ours)]
        broken = [run for run in of(results, setting, plain) if not math.isfinite(run.final_loss)]
        if broken:
            ends[0] += f" (its loss is NaN in {len(broken)} of {len(of(results, setting, plain))} runs)"
        sentences.append(f"{setting.name.capitalize()}: fp32 reaches {level:.1f} %; {'; '.join(ends)}.")
    return "\n".join(sentences)


def distance(points: float) -> str:
    """Return a difference of accuracy in words."""
    if abs(points) < 0.05:
        return "ends level with it"
    return f"ends {abs(points):.1f} points {'below' if points < 0 else 'above'} it"


def smooth(values: Iterable[float], keep: float = 0.9) -> list[float]:
    """Return the exponential moving average, started at the first value."""
    averages: list[float] = []
    for value in values:
        averages.append(value if not averages else keep * averages[-1] + (1 - keep) * value)
    return averages


def plot(results: Sequence[Result], path: Path) -> None:
    """Write a PNG: loss above, loss scale below, a column per setting."""
    settings = list(dict.fromkeys(result.setting for result in results))
    figure = Figure(figsize=(5.2 * len(settings), 7.5), layout="constrained")
    grid = figure.subplots(2, len(settings), squeeze=False, height_ratios=(3, 2), sharex="col", sharey="row")
    for setting, above, below in zip(settings, *grid, strict=True):
        # thick below thin: curves that lie on each other can be told apart
        for width, arm in zip((5, 3.5, 2.2, 1), setting.arms, strict=True):
            runs = of(results, setting, arm)
            plot_loss(above, runs, width)
            if arm.loss_scale is not None:
                plot_scale(below, runs[0], width)
        above.set_title(f"{setting.name} (lr {setting.lr:g}, loss x {setting.loss_weight:g})")
        above.legend(loc="best")
        below.set_yscale("log", base=2)
        below.set_ylim(2**-2, 2**22)
        below.set_xlabel("step")
        below.legend(loc="center right")
        for axes in (above, below):
            axes.grid(alpha=0.3)
    grid[0][0].set_ylim(0, TOP_LOSS)
    grid[0][0].set_ylabel("training loss, unweighted and smoothed")
    grid[1][0].set_ylabel("loss scale S, first seed")
    figure.suptitle("Handwritten digits in fp32, fp16 and bf16", fontsize=14)
    figure.savefig(path, dpi=110)


def plot_loss(axes: Axes, runs: Sequence[Result], width: float) -> None:
    """Draw the loss of one arm, the mean over its seeds, until one is NaN."""
    arm = runs[0].arm
    means = [statistics.fmean(losses) for losses in zip(*(run.losses for run in runs), strict=True)]
    finite = list(itertools.takewhile(math.isfinite, means))
    axes.plot(smooth(finite), color=arm.color, linewidth=width, label=arm.name)
    if 0 < len(finite) < len(means):
        last = min(smooth(finite)[-1], 0.96 * TOP_LOSS)
        axes.plot(len(finite) - 1, last, "X", color=arm.color, markersize=11, label="NaN from here on")


def plot_scale(axes: Axes, run: Result, width: float) -> None:
    """Draw S over the steps of one run, with a cross at each skipped step."""
    steps = range(len(run.scales))
    axes.step(steps, run.scales, where="post", color=run.arm.color, linewidth=width, label=run.arm.name)
    skipped = [step for step in steps if run.skips[step]]
    if skipped and run.arm.keep_masters:
        axes.plot(skipped, [run.scales[step] for step in skipped], "kx", markersize=8, label="skipped step")


# -- the program --------------------------------------------------------------


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5, help="runs of each arm (default: 5)")
    parser.add_argument("--max-steps", type=int, default=10_000, help="cut every run short (default: never)")
    parser.add_argument("--plot", type=Path, default=Path("train_digits.png"), help="where the picture goes")
    args = parser.parse_args(argv)
    if args.seeds < 1 or args.max_steps < 1:
        parser.error("--seeds and --max-steps must be at least 1")
    return args


def main(argv: Sequence[str] | None = None) -> list[Result]:
    """Run every arm of every setting for every seed; print, draw, return."""
    args = parse_args(argv)
    data = load_data(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    settings = [replace(setting, steps=min(setting.steps, args.max_steps)) for setting in SETTINGS]
    results = []
    with tqdm(total=sum(len(s.arms) * s.steps for s in settings) * args.seeds, unit="step") as progress:
        for setting in settings:
            for arm in setting.arms:
                progress.set_description(f"{setting.name}: {arm.name}")
                results += [train(setting, arm, seed, data, progress) for seed in range(args.seeds)]
    print(format_table(results), format_bytes(results), format_lesson(results), sep="\n\n")
    plot(results, args.plot)
    return results


if __name__ == "__main__":
    torch.set_num_threads(1)  # matrices this small gain nothing from more
    main()
