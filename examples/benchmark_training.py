"""What does a whole training iteration cost? fp32, TF32, torch.amp and mixedopt's tiers, side by side.

An iteration is forward, backward, step and dropping the gradients; AdamW with torch's fused kernel in each arm, each
arm on a model of its own with the same first weights, and all on the same batch of random data. A cell is a model, a
dtype, with or without clipping, with an eager or a compiled model; each gives a table:

- ``fp32``, ``tf32`` (on a GPU): plain training, the products of ``fp32`` without TF32;
- ``half`` (on a GPU): model and optimizer in half, and nothing else, which does not train well: how fast it could be;
- ``torch.amp``: autocast, and GradScaler for fp16; the base of all ratios, which say how many times as fast an arm is;
- ``mixedopt TIER``: ``MixedPrecisionOptimizer(..., model, tier=TIER)``; a tier that refuses is n/a, with its reason;
- ``..., graphed`` (``--graph``): the iteration captured in a CUDA graph.

A sample is the time of a block of iterations that takes 20 ms or more, divided by their number; nothing waits for the
device inside. The arms run in turn, and every ratio is the median of paired ratios, so it holds when the machine's
speed drifts. Peak memory is what an arm allocates while the others hold still, theirs not counted. Needs
``pip install -e ".[examples]"``, BERT also ``".[transformers]"``.

    python examples/benchmark_training.py --json cells.json                  # the models in fp16, on a GPU
    python examples/benchmark_training.py --grid --json cells.json           # all of it; again: what is left
    python examples/benchmark_training.py --models ffn --graph --clip 1.0
    python examples/benchmark_training.py --tiny                             # seconds on a CPU
    python examples/benchmark_training.py --report cells.json --markdown docs/benchmarks.md --png docs/benchmarks.png
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import benchmark_report as reports
import torch
from benchmark_arms import BASE, Arm, Cell, Spec, first_line, make_arm, matmul_precision, specs
from benchmark_models import CLASSIC, Batch, workloads
from tqdm import tqdm

BLOCK = 0.02  # seconds of one sample, at least
LONGEST_BLOCK = 200
FEWEST_ROUNDS = 5  # however slow
WARM_UP, LONGEST_WARM_UP = 5, 10  # iterations of an eager model; of a compiled one, until it is steady
STEADY = 0.1
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Prepared:
    """An arm that has run: ``block`` iterations make a sample, ``peak`` in bytes (``None`` on a CPU)."""

    arm: Arm
    block: int
    peak: int | None
    warm_up: float


def main(argv: Sequence[str] | None = None) -> reports.Report:
    """Measure and print what was asked for, or read it; write it; return it."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse(words)
    report = reports.merge([reports.load(path) for path in args.report or []])
    if not args.report:
        report = measure(args, words)
    if args.png:
        reports.plot(report, args.png)
    if args.markdown:
        reports.write_page(report, args.markdown, args.png)
    return report


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    gpu = torch.cuda.is_available()
    names = list(workloads(tiny=True))
    parser.add_argument("--models", nargs="+", choices=names, default=list(CLASSIC))
    parser.add_argument("--dtype", choices=(*DTYPES, "both"), default="fp16" if gpu else "bf16")
    parser.add_argument("--clip", choices=("none", "1.0", "both"), default="none", help="limit of the gradients' norm")
    parser.add_argument("--compile-model", choices=("no", "yes", "both"), nargs="?", const="yes", default="no")
    parser.add_argument("--tiers", nargs="+", default=["eager", "fused", "compiled", "auto"], help="of mixedopt")
    parser.add_argument("--gradients", nargs="+", choices=("autograd", "half", "fp32"), default=["autograd"])
    parser.add_argument("--references", nargs="*", choices=("fp32", "tf32", "half"), help="what runs beside torch.amp")
    parser.add_argument("--graph", action="store_true", help="also iterations captured in CUDA graphs")
    parser.add_argument("--grid", action="store_true", help="both dtypes, with and without clip, eager and compiled")
    parser.add_argument("--rounds", type=int, default=30, help="samples of each arm")
    parser.add_argument("--cell-seconds", type=float, default=60.0, help="a slow cell ends after so long")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further cell after so long")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda" if gpu else "cpu"))
    parser.add_argument("--tiny", action="store_true", help="models that take no time")
    parser.add_argument("--json", type=Path, help="write after each cell; cells that it has already are skipped")
    parser.add_argument("--report", type=Path, nargs="+", help="run nothing: merge and show these JSON files")
    parser.add_argument("--markdown", type=Path, help="write the tables into this page")
    parser.add_argument("--png", type=Path, help="draw the ratios")
    args = parser.parse_args(argv)
    if args.grid:
        args.dtype = args.clip = args.compile_model = "both"
    if args.references is None:
        args.references = ["fp32", "tf32", "half"] if args.device.type == "cuda" else ["fp32"]
    return args


def measure(args: argparse.Namespace, words: Sequence[str]) -> reports.Report:
    """Run the cells that are not there yet; print and write each."""
    began = time.perf_counter()
    report = reports.load(args.json) if args.json and args.json.exists() else reports.empty()
    report["runs"].append(reports.facts("benchmark_training.py", words, args.device))
    run = len(report["runs"]) - 1
    wanted = specs(args.tiers, args.gradients, args.references, graph=args.graph)
    print(reports.describe(report["runs"][run]))
    for cell in cells(args):
        entry = describe(cell, run, graph=args.graph)
        if missing := cell.workload.missing():
            print(f"\n{reports.heading(entry)}\nleft out: {missing}")
        elif measured(report, entry, wanted):
            print(f"\n{reports.heading(entry)}\nthere already")
        elif time.perf_counter() - began > args.seconds:
            print(f"\n{reports.heading(entry)}\nleft for the next run")
        else:
            entry["arms"], entry["interleaved"] = run_cell(cell, wanted, args)
            reports.put(report, "cells", entry, reports.cell_key)
            print(f"\n{reports.heading(entry)}")
            if not entry["interleaved"]:
                print(reports.BLOCKS)
            print(reports.text_table(*reports.cell_table(entry)), flush=True)
            if args.json:
                reports.save(report, args.json)
            if capture_failed(entry["arms"]):
                print("\na capture failed, so what would follow in this process may be broken: run again for the rest")
                break
    return report


def cells(args: argparse.Namespace) -> Iterable[Cell]:
    """Yield the cells, a model at a time."""
    known = workloads(tiny=args.tiny)
    dtypes = list(DTYPES) if args.dtype == "both" else [args.dtype]
    clips = {"none": (None,), "1.0": (1.0,), "both": (None, 1.0)}[args.clip]
    compiled = {"no": [False], "yes": [True], "both": [False, True]}[args.compile_model]
    for model, compile_model, dtype, clip in itertools.product(args.models, compiled, dtypes, clips):
        yield Cell(known[model], model, DTYPES[dtype], clip, compile_model, args.device)


def describe(cell: Cell, run: int, *, graph: bool) -> dict[str, Any]:
    """Return what the report says of a cell, without its arms."""
    work = cell.workload
    dtype = next(name for name, dtype in DTYPES.items() if dtype is cell.dtype)
    facts = {"run": run, "model": cell.model, "title": work.title, "unit": work.unit, "items": work.items}
    return {**facts, "dtype": dtype, "clip": cell.clip, "compiled": cell.compiled, "graph": graph, "arms": []}


def measured(report: reports.Report, entry: dict[str, Any], wanted: Sequence[Spec]) -> bool:
    """True iff the report has this cell with all these arms."""
    key = reports.cell_key(report, entry)
    there = [cell["arms"] for cell in report["cells"] if reports.cell_key(report, cell) == key]
    return bool(there) and {spec.name for spec in wanted} <= {arm["name"] for arm in there[0]}


# -- one cell --------------------------------------------------------------------------------------------------------


def run_cell(cell: Cell, wanted: Sequence[Spec], args: argparse.Namespace) -> tuple[list[dict[str, Any]], bool]:
    """Measure the arms of a cell; return them for the report, and whether they ran in turn.

    Graphs come last, beside torch.amp once more: a capture that fails may break what runs after it.
    """
    torch.manual_seed(1)
    x, y = cell.workload.batch()
    batch = x.to(cell.device), y.to(cell.device)
    found, in_turn = run_in_turn(cell, [spec for spec in wanted if not spec.graph], batch, args)
    if graphs := [spec for spec in wanted if spec.graph]:
        base = [spec for spec in wanted if spec.name == BASE]
        try:
            (_, *more), together = run_in_turn(cell, base + graphs, batch, args)
        except Exception as error:  # what was measured without graphs is kept
            reason = f"{type(error).__name__}: {first_line(error)}"
            more, together = [entry_of(cell, spec, reason) for spec in graphs], True
        found, in_turn = found + more, in_turn and together
    return found, in_turn


def capture_failed(arms: Sequence[dict[str, Any]]) -> bool:
    """True iff a graph could not be captured whole; CUDA's random numbers and memory may be unusable then."""
    graphs = [arm for arm in arms if arm["graph"]]
    return any("Error: " in (arm["reason"] or "") or arm["note"].startswith("step outside") for arm in graphs)


def run_in_turn(
    cell: Cell, wanted: Sequence[Spec], batch: Batch, args: argparse.Namespace
) -> tuple[list[dict[str, Any]], bool]:
    """Measure these arms in turn, or one after the other if the memory does not hold them all."""
    clean_up(cell)
    try:
        # Dynamo's own limit is less than the arms, which all compile the same forward
        with torch._dynamo.config.patch(recompile_limit=64) if cell.compiled else contextlib.nullcontext():
            return run_arms(cell, wanted, batch, args), True
    except torch.OutOfMemoryError:
        found: list[dict[str, Any]] = []
    # a new try outside the handler: the error holds the frames, and they the arms
    for spec in wanted:
        clean_up(cell)
        try:
            found += run_arms(cell, [spec], batch, args)
        except torch.OutOfMemoryError as error:
            found.append(entry_of(cell, spec, f"out of memory: {first_line(error)}"))
    compare(found)
    return found, False


def clean_up(cell: Cell) -> None:
    """Free what the cells and arms before have left; the library's workspaces are made now, so no arm pays for them."""
    if cell.compiled:
        torch.compiler.reset()
    gc.collect()
    if cell.device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        square = torch.ones(256, 256, device=cell.device, dtype=cell.dtype)
        (square @ square).sum().item()


def run_arms(cell: Cell, wanted: Sequence[Spec], batch: Batch, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure these arms in turn."""
    ready: dict[str, Prepared] = {}
    refused: dict[str, str] = {}
    twins: dict[str, str] = {}
    for spec in (bar := tqdm(wanted, leave=False)):
        bar.set_description(f"{cell.model}: {spec.name}")
        try:
            prepared = prepare(cell, spec, batch)
        except torch.OutOfMemoryError:
            raise
        except ValueError as error:
            refused[spec.name] = first_line(error)
        except Exception as error:  # one broken arm must not end a long run; its row says so
            refused[spec.name] = f"{type(error).__name__}: {first_line(error)}"
        else:
            twin = same_tier(prepared.arm, ready) if spec.tier == "auto" else None
            if twin is None:
                ready[spec.name] = prepared
            else:
                refused[spec.name], twins[spec.name] = f"runs as {twin}", twin
            del prepared
    seconds = time_arms(cell, ready, batch, args)
    losses = {name: final_loss(prepared.arm, batch) for name, prepared in ready.items()}
    found = []
    for spec in wanted:
        entry = entry_of(cell, spec, refused.get(spec.name))
        if spec.name in ready:
            entry |= figures(ready[spec.name], seconds[spec.name], losses[spec.name])
        found.append(entry)
    compare(found)
    for name, twin in twins.items():
        by_name = {entry["name"]: entry for entry in found}
        by_name[name]["ratio"] = by_name[twin]["ratio"]
    return found


def same_tier(arm: Arm, ready: dict[str, Prepared]) -> str | None:
    """Return the arm that does the same as this one."""
    for name, other in ready.items():
        spec = other.arm.spec
        if arm.tier == other.arm.tier and (arm.spec.gradients, arm.spec.graph) == (spec.gradients, spec.graph):
            return name
    return None


def prepare(cell: Cell, spec: Spec, batch: Batch) -> Prepared:
    """Build an arm, warm it up, and measure its memory and about how long an iteration takes."""
    gpu = cell.device.type == "cuda"
    before = 0
    if gpu:
        gc.collect()  # what refused arms have left would be freed while this one is measured
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    with matmul_precision(spec):
        arm = make_arm(spec, cell, batch)
        warm_up(arm, batch, cell)
        warm = time.perf_counter() - began
        if gpu and not spec.graph:  # the memory of a graph is taken when it is captured
            torch.cuda.reset_peak_memory_stats()
        seconds = run_block(arm, batch, 2, cell) / 2
    peak = torch.cuda.max_memory_allocated() - before if gpu else None
    return Prepared(arm, min(max(math.ceil(BLOCK / seconds), 1), LONGEST_BLOCK), peak, warm)


def warm_up(arm: Arm, batch: Batch, cell: Cell) -> None:
    """Run until the time is steady, a few iterations."""
    last = math.inf
    for index in range(LONGEST_WARM_UP if cell.compiled else WARM_UP):
        seconds = run_block(arm, batch, 1, cell)
        if index + 1 >= WARM_UP and abs(seconds - last) < STEADY * seconds:
            break
        last = seconds


def run_block(arm: Arm, batch: Batch, count: int, cell: Cell) -> float:
    """Return the seconds that so many iterations take, to the end on the device."""
    wait = torch.cuda.synchronize if cell.device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    for _ in range(count):
        arm.step(*batch)
    wait()
    return time.perf_counter() - began


def time_arms(cell: Cell, ready: dict[str, Prepared], batch: Batch, args: argparse.Namespace) -> dict[str, list[float]]:
    """Return name -> seconds per iteration, a sample a round; each round begins with another arm."""
    seconds: dict[str, list[float]] = {name: [] for name in ready}
    names = list(ready)
    began = time.perf_counter()
    for index in tqdm(range(args.rounds), desc=cell.model, leave=False):
        if index >= FEWEST_ROUNDS and time.perf_counter() - began > args.cell_seconds:
            break
        start = index % max(len(names), 1)
        for name in names[start:] + names[:start]:
            prepared = ready[name]
            with matmul_precision(prepared.arm.spec):
                seconds[name].append(run_block(prepared.arm, batch, prepared.block, cell) / prepared.block)
    return seconds


def final_loss(arm: Arm, batch: Batch) -> float | None:
    """Return the loss of one more iteration, ``None`` if it is not finite."""
    with matmul_precision(arm.spec):
        loss = arm.step(*batch).item()
    return loss if math.isfinite(loss) else None


# -- for the report --------------------------------------------------------------------------------------------------


def entry_of(cell: Cell, spec: Spec, reason: str | None) -> dict[str, Any]:
    """Return an arm that was not measured, ``reason`` says why."""
    what = {"name": spec.name, "kind": spec.kind, "tier": spec.tier, "gradients": spec.gradients, "graph": spec.graph}
    return {**what, "reason": reason, "seconds": [], "ratio": None, "peak": None, "loss": None, "note": ""}


def figures(prepared: Prepared, seconds: list[float], loss: float | None) -> dict[str, Any]:
    """Return what was measured of an arm."""
    optimizer, notes = prepared.arm.optimizer, [prepared.arm.note]
    if prepared.arm.spec.tier == "auto":
        notes.append(f"runs as {prepared.arm.tier}")
    skipped = optimizer.skipped_steps if optimizer is not None else 0
    if skipped:
        notes.append(f"{skipped} steps skipped")
    return {
        "seconds": seconds,
        "block": prepared.block,
        "peak": prepared.peak,
        "warm_up": prepared.warm_up,
        "loss": loss,
        "skipped": skipped,
        "note": "; ".join(note for note in notes if note),
    }


def compare(found: list[dict[str, Any]]) -> None:
    """Write the ratios to torch.amp into the arms: quartiles and median, paired where the arms ran in turn."""
    base: list[float] = next((arm["seconds"] for arm in found if arm["name"] == BASE), [])
    for arm in found:
        if base and arm["seconds"]:
            pairs = zip(base, arm["seconds"], strict=False)
            arm["ratio"] = reports.spread([theirs / mine for theirs, mine in pairs])


if __name__ == "__main__":
    main()
