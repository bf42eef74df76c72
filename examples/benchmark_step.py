"""What does one optimizer step cost? Bare fp32, torch.amp and mixedopt, side by side.

Each arm does the work that follows ``backward`` with the same optimizer:

- ``bare fp32``: ``optimizer.step()`` on fp32 parameters, nothing else; on a CPU also with torch's fused kernel
  (``bare fused``), whatever ``--implementation`` says;
- ``torch.amp``: GradScaler's unscale, ``clip_grad_norm_``, step, update, on fp32 parameters; on a GPU also with torch's
  fused kernel, whatever ``--implementation`` says;
- ``mixedopt``: ``MixedPrecisionOptimizer(max_grad_norm=...)`` on half parameters, ``tier="eager"``;
- ``fused``, ``compiled``: the same with those tiers, n/a where one is refused.

The arms run in turn, and every ratio is the median of paired ratios, so it holds when the machine's speed drifts.
Two more tables show how each arm grows with the number of parameters and, at one size, with the number of tensors.

``--gpt2-xl`` takes the shapes of GPT-2 XL (1.56 B parameters in 580 tensors) and of a miniature, all inner optimizers
fused. "ms" is a step among others, with the device busy before it; "host ms" is how long ``step()`` keeps the host when
the device is idle, while somebody else holds the gradients, so that no arm frees them; "and freed" is a step after
which all gradients are free, by ``zero_grad()`` where the step leaves them; "x floor" compares with the bytes that a
step must move at the bandwidth of a copy, measured here; "peak B" are the bytes per parameter while stepping: weights,
masters, state and gradients.

    python examples/benchmark_step.py                      # 200 tensors, 10 M parameters, AdamW
    python examples/benchmark_step.py --device cuda --millions 1000
    python examples/benchmark_step.py --device cuda --gpt2-xl --json step.json
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import benchmark_report as reports
import torch
from benchmark_step_arms import ARMS, FLOOR_BYTES, GPT2_ARMS, GPT2_SHAPES, Arm, Setup, Spec, even, make_arm
from tqdm import tqdm

# glibc moves its mmap threshold while a program runs, which doubles allocation-heavy steps at random: pin it.
PINNED_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(2**30), "MALLOC_TRIM_THRESHOLD_": str(2**33)}
WARM_UP = 3
BYTES_PER_PARAMETER = 28  # of an arm with its source of gradients, for the choice whether all fit
SLEEP = 20_000_000  # cycles, about 10 ms: longer than any arm needs to queue its step


@dataclass
class Measured:
    """Seconds of each round of the arms that ran, and why others did not."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    host: dict[str, list[float]] = field(default_factory=dict)
    freed: dict[str, list[float]] = field(default_factory=dict)
    peak: dict[str, float | None] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    paired: bool = True

    def ratio(self, name: str, base: str) -> float:
        """Return the median of the paired ratios, or the ratio of the medians."""
        mine, theirs = self.seconds[name], self.seconds[base]
        if not self.paired:
            return statistics.median(mine) / statistics.median(theirs)
        return statistics.median(a / b for a, b in zip(mine, theirs, strict=True))


def main(argv: Sequence[str] | None = None) -> dict[str, float]:
    """Print the tables; return the ratios of the first."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    pin_malloc(args.device)
    dtype = torch.bfloat16 if args.bf16 else torch.float16
    implementation = args.implementation or ("fused" if args.device.type == "cuda" else "foreach")
    shapes = even(int(args.millions * 1e6), args.tensors)
    base = Setup(shapes, args.device, dtype, args.optimizer, implementation, args.rounds)
    report = reports.load(args.json) if args.json and args.json.exists() else reports.empty()
    report["runs"].append(reports.facts("benchmark_step.py", words, args.device))
    run = len(report["runs"]) - 1
    print(reports.describe(report["runs"][run]))

    def show(table: dict[str, Any]) -> None:
        table = {"run": run, "note": "", **table}
        print(f"\n{table['title']}\n{reports.text_table(table['head'], table['rows'])}")
        print(table["note"], end="\n" if table["note"] else "", flush=True)
        reports.put(report, "tables", table, reports.table_key)
        if args.json:
            reports.save(report, args.json)

    if args.gpt2_xl:
        return gpt2_tables(base, args.gpt2_xl, show)
    ratios = arms_table(base, show)
    if not args.quick:
        parameters_table(base, points(args), show)
        tensors_table(base, args.most_tensors, show)
    return ratios


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", type=torch.device, default=torch.device("cpu"))
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--millions", type=float, default=10.0, help="parameters, in millions")
    parser.add_argument("--rounds", type=int, default=40, help="timed rounds over the arms")
    parser.add_argument("--bf16", action="store_true", help="bf16 instead of fp16")
    parser.add_argument("--optimizer", choices=tuple(FLOOR_BYTES), default="adamw", help="sgd has momentum")
    parser.add_argument("--implementation", choices=("foreach", "loop", "fused"), help="foreach; fused on a GPU")
    parser.add_argument("--growth-millions", type=float, nargs="+", help="where the second table looks")
    parser.add_argument("--most-tensors", type=int, default=5000, help="where the last table ends")
    parser.add_argument("--quick", action="store_true", help="only the first table")
    parser.add_argument("--gpt2-xl", choices=("full", "mini", "both"), nargs="?", const="both", help="its shapes")
    parser.add_argument("--json", type=Path, help="write the tables, after each, beside those that it has")
    return parser.parse_args(argv)


def points(args: argparse.Namespace) -> list[float]:
    """Return the sizes of the second table, in millions."""
    if args.growth_millions:
        return list(args.growth_millions)
    gpu = [1.0, 10.0, 100.0, 1500.0]
    return gpu if args.device.type == "cuda" else [args.millions * share for share in (0.1, 0.3, 1.0, 3.0)]


def pin_malloc(device: torch.device) -> None:
    """Start the program again with malloc pinned, once."""
    if device.type == "cpu" and __name__ == "__main__" and not PINNED_MALLOC.keys() <= os.environ.keys():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **PINNED_MALLOC})


# -- measuring -------------------------------------------------------------------------------------------------------


def compare(setup: Setup, specs: dict[str, Spec], *, gpt2: bool = False) -> Measured:
    """Time the arms: in turn if the memory holds them all, else one after the other."""
    found = Measured(paired=fits(setup, len(specs)))
    title = f"{setup.parameters / 1e6:g} M in {len(setup.shapes)}"
    for together in [specs] if found.paired else [{name: spec} for name, spec in specs.items()]:
        arms = build(setup, together, found, measure_peak=gpt2)
        time_in_turn(setup, arms, found, title, step_seconds if gpt2 else synchronous_seconds)
        if gpt2:
            host_in_turn(setup, arms, found)
        del arms
        clean_up(setup.device)
    return found


def fits(setup: Setup, arms: int) -> bool:
    """True iff so many arms may be alive at once."""
    free = torch.cuda.mem_get_info()[0] if setup.device.type == "cuda" else 8 * 2**30
    return setup.parameters * BYTES_PER_PARAMETER * arms < free / 2


def clean_up(device: torch.device) -> None:
    """Free what arms have left."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()


def build(setup: Setup, specs: dict[str, Spec], found: Measured, *, measure_peak: bool) -> dict[str, Arm]:
    """Return the arms that can be had, warm; note those that cannot, and the memory of the others."""
    arms = {}
    for name, spec in specs.items():
        clean_up(setup.device)
        gpu = setup.device.type == "cuda"
        before = torch.cuda.memory_allocated() if gpu else 0
        try:
            arm = make_arm(setup, spec)
        except ValueError as error:
            found.refused[name] = (str(error).splitlines() or [""])[0]
            continue
        for _ in range(WARM_UP):
            arm.fill()
            arm.step()
        if measure_peak and gpu:
            torch.cuda.reset_peak_memory_stats()
            arm.fill()
            arm.step()
            torch.cuda.synchronize()
            source = setup.parameters * (2 if spec.kind == "mixedopt" else 4)  # of the gradients: the benchmark's own
            found.peak[name] = (torch.cuda.max_memory_allocated() - before - source) / setup.parameters
        arms[name] = arm
    return arms


def time_in_turn(
    setup: Setup,
    arms: dict[str, Arm],
    found: Measured,
    title: str,
    seconds_of: Callable[[Setup, Arm], float],
) -> None:
    """Time each arm once a round."""
    found.seconds |= {name: [] for name in arms}
    for index in tqdm(range(setup.rounds + WARM_UP), desc=title, leave=False):
        for name, arm in arms.items():
            seconds = seconds_of(setup, arm)
            if index >= WARM_UP:  # the first rounds warm up
                found.seconds[name].append(seconds)


def synchronous_seconds(setup: Setup, arm: Arm) -> float:
    """Return the time of a step that begins and ends with an idle device."""
    arm.fill()
    synchronize(setup.device)
    start = time.perf_counter()
    arm.step()
    synchronize(setup.device)
    return time.perf_counter() - start


def step_seconds(setup: Setup, arm: Arm) -> float:
    """Return the device's time of a step while it is busy; on a CPU as ``synchronous_seconds``."""
    if setup.device.type != "cuda":
        return synchronous_seconds(setup, arm)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    arm.fill()
    torch.cuda._sleep(SLEEP)  # so that the host is ahead, as it is behind a backward
    start.record()
    arm.step()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def host_in_turn(setup: Setup, arms: dict[str, Arm], found: Measured) -> None:
    """Time how long ``step`` keeps the host, the device idle before it: nobody frees gradients, or all are freed."""
    found.host |= {name: [] for name in arms}
    found.freed |= {name: [] for name in arms}
    for _ in range(setup.rounds):
        for name, arm in arms.items():
            arm.fill()
            kept = [param.grad for param in arm.params]
            synchronize(setup.device)
            start = time.perf_counter()
            arm.step()
            found.host[name].append(time.perf_counter() - start)
            del kept
            arm.fill()
            synchronize(setup.device)
            start = time.perf_counter()
            arm.step()
            arm.drop()
            found.freed[name].append(time.perf_counter() - start)
            synchronize(setup.device)


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bandwidth(device: torch.device) -> float:
    """Return bytes read and written per second by a copy of 4 GiB, 0.25 GiB on a CPU."""
    size = 2**32 if device.type == "cuda" else 2**28
    source, target = (torch.ones(size // 4, device=device) for _ in range(2))
    seconds = []
    for _ in range(10):
        synchronize(device)
        start = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    return 2 * size / statistics.median(seconds)


# -- the tables ------------------------------------------------------------------------------------------------------

Show = Callable[[dict[str, Any]], None]


def what(setup: Setup) -> str:
    """Return what the arms have in common."""
    name = {"adamw": "AdamW", "sgd": "SGD with momentum"}[setup.optimizer]
    return f"{name} ({setup.implementation}), {str(setup.dtype).removeprefix('torch.')}, {setup.device.type}"


def default_arms(setup: Setup) -> dict[str, Spec]:
    """Return the arms that say something here."""
    other = "bare fused" if setup.device.type == "cuda" else "torch.amp fused"
    left_out = ("bare fused", "torch.amp fused") if setup.implementation == "fused" else (other,)
    return {name: spec for name, spec in ARMS.items() if name not in left_out}


def arms_table(setup: Setup, show: Show) -> dict[str, float]:
    """Show the first table; return name of ratio -> median."""
    found = compare(setup, default_arms(setup))
    bases = [name for name in ("bare fp32", "bare fused", "torch.amp") if name in found.seconds]
    rows, ratios = [], {}
    for name, times in found.seconds.items():
        low, middle, high = (value * 1e3 for value in reports.spread(times))
        to = {base: found.ratio(name, base) for base in bases}
        figures = f"{middle:.2f}", f"{low:.2f} - {high:.2f}", *(f"{ratio:.2f}" for ratio in to.values())
        rows.append([name, *figures, ""])
        ratios |= {f"{name} / {base}": ratio for base, ratio in to.items()}
    rows += refused_rows(found, 2 + len(bases))
    title = (
        f"Step: {what(setup)}, clip but for the bare step, "
        f"{len(setup.shapes)} tensors, {setup.parameters / 1e6:g} M parameters, {setup.rounds} rounds"
    )
    head = ["", "ms, median", "quartiles", *(f"x {base}" for base in bases), ""]
    show({"title": title, "head": head, "rows": rows, "data": found.seconds})
    return ratios


def refused_rows(found: Measured, columns: int) -> list[list[str]]:
    """Return a row for each arm that was refused."""
    return [[name, "n/a", *[""] * (columns - 1), reason] for name, reason in found.refused.items()]


def growth(setups: Iterable[tuple[str, Setup]]) -> tuple[list[list[str]], dict[str, Measured]]:
    """Return the rows of a table of growth, and what was measured at each point."""
    rows, all_found = [], {}
    for label, setup in setups:
        found = compare(setup, default_arms(setup))
        medians = {name: statistics.median(times) * 1e3 for name, times in found.seconds.items()}
        cells = [f"{medians[name]:.3f}" if name in medians else "n/a" for name in default_arms(setup)]
        rows.append([label, *cells])
        all_found[label] = found
    return rows, all_found


def show_growth(
    setup: Setup, title: str, first: str, rows: list[list[str]], found: dict[str, Measured], note: str, show: Show
) -> None:
    """Show a table of growth."""
    data = {label: measured.seconds for label, measured in found.items()}
    show({"title": title, "note": note, "head": [first, *default_arms(setup)], "rows": rows, "data": data})


def parameters_table(base: Setup, millions: Sequence[float], show: Show) -> None:
    """Show how each arm grows with the number of parameters."""
    tensors, rounds = len(base.shapes), max(base.rounds // 2, 2)
    setups = ((f"{size:g} M", replace(base, shapes=even(int(size * 1e6), tensors), rounds=rounds)) for size in millions)
    rows, found = growth(setups)
    title = f"Step, ms: growth with parameters, {tensors} tensors, {what(base)}"
    show_growth(base, title, "parameters", rows, found, "", show)


def tensors_table(base: Setup, most: int, show: Show) -> None:
    """Show how each arm grows with the number of tensors, at one size.

    The inner optimizer is the fused one: a slow inner step would bury the difference in its noise. So would large
    tensors on a CPU.
    """
    base = replace(base, implementation="fused")
    total = most * 64 if base.device.type == "cpu" else max(base.parameters, most * 64)
    counts = [count for count in (10, 20, 100, 1000, 5000) if count <= most]
    rows, found = growth((f"{count}", replace(base, shapes=even(total, count))) for count in counts)
    few, many = found[str(counts[0])], found[str(counts[-1])]
    slopes = []
    for name in few.seconds:
        rise = statistics.median(many.seconds[name]) - statistics.median(few.seconds[name])
        slopes.append(f"{name} {rise / max(counts[-1] - counts[0], 1) * 1e6:.2f}")
    title = f"Step, ms: growth with tensors, {total / 1e6:g} M parameters, {what(base)}"
    note = f"From the first row to the last, us per tensor: {', '.join(slopes)}."
    show_growth(base, title, "tensors", rows, found, note, show)


def gpt2_tables(base: Setup, which: str, show: Show) -> dict[str, float]:
    """Show a table for each size of GPT-2; return "name / base" -> ratio, of the last."""
    bandwidth = copy_bandwidth(base.device)
    clean_up(base.device)
    names = {"full": list(GPT2_SHAPES)[:1], "mini": list(GPT2_SHAPES)[1:], "both": list(GPT2_SHAPES)}[which]
    amp, ratios = "torch.amp + clip", {}
    for title in names:
        setup = replace(base, shapes=GPT2_SHAPES[title], implementation="fused")
        found = compare(setup, GPT2_ARMS, gpt2=True)
        floor = FLOOR_BYTES[setup.optimizer] * setup.parameters / bandwidth
        rows = []
        for name, times in found.seconds.items():
            low, middle, high = (value * 1e3 for value in reports.spread(times))
            ratios[f"{name} / {amp}"] = found.ratio(name, amp)
            host, freed = (f"{statistics.median(times[name]) * 1e3:.3f}" for times in (found.host, found.freed))
            peak = found.peak.get(name)
            figures = (f"{middle:.3f}", f"{low:.3f} - {high:.3f}", f"{ratios[f'{name} / {amp}']:.2f}", host, freed)
            rows.append([name, *figures, f"{middle / 1e3 / floor:.2f}", "-" if peak is None else f"{peak:.1f}", ""])
        size = f"{setup.parameters / 1e6:.4g} M parameters in {len(setup.shapes)} tensors"
        note = (
            f"Floor: {FLOOR_BYTES[setup.optimizer]} bytes per parameter at the {bandwidth / 1e12:.3g} TB/s of a copy, "
        )
        note += f"{floor * 1e3:.3f} ms." + ("" if found.paired else " One arm after the other: ratios are of medians.")
        head = ["", "ms", "quartiles", "x torch.amp", "host ms", "and freed", "x floor", "peak B", ""]
        data = {
            "seconds": found.seconds,
            "host": found.host,
            "freed": found.freed,
            "peak": found.peak,
            "bandwidth": bandwidth,
        }
        data |= {"floor": floor, "in turn": found.paired}
        line = f"Step: {title}, {size}, {what(setup)}"
        show({"title": line, "note": note, "head": head, "rows": rows + refused_rows(found, 7), "data": data})
    return ratios


if __name__ == "__main__":
    main()
