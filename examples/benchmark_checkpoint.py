"""What do atomic, checked checkpoint files cost? torch.save and torch.load beside mixedopt.checkpoint's.

The file holds what a resumed AdamW run needs: half weights, fp32 masters and two moments, 14 bytes per parameter.

- save: ``torch.save`` onto the old file; the same and fsync; the same into a temporary file, fsync and rename, which
  is as safe against a crash as ``save`` is, and the base of the ratios; ``save``, which adds the checks.
- load: ``torch.load(weights_only=True)``, the base; ``load``; and both with ``mmap=True``.

The arms run in turn, each in a process of its own that is forked for it, because a resumed run starts with fresh memory
too; the pages of the file are in the system's cache. Ratios are medians of paired ratios. "Extra memory" is how much
the process grew at its peak, in bytes per byte of the file; pages of the file that a process maps are counted there
although the system can drop them at any time.

    python examples/benchmark_checkpoint.py                          # 64 M parameters, 0.9 GB, the temporary directory
    python examples/benchmark_checkpoint.py --folder /dev/shm --folder ~/runs --millions 200
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from mixedopt.checkpoint.files import load, save

Arm = Callable[[], object]
RENAMED = "torch.save, fsync, rename"
TABLES = (("save", RENAMED), ("load", "torch.load"), ("load, mmap", "torch.load, mmap"))


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, float]]:
    """Print a table per folder; return folder -> name of arm -> ratio to its base."""
    args = parse(argv)
    items = make_items(int(args.millions * 1e6), args.tensors)
    ratios = {}
    for folder in args.folder or [tempfile.gettempdir()]:
        with tempfile.TemporaryDirectory(dir=folder) as place:
            ratios[folder] = report(folder, Path(place), items, args)
    return ratios


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=64.0, help="parameters, in millions")
    parser.add_argument("--tensors", type=int, default=200, help="parameters are spread over so many tensors")
    parser.add_argument("--folder", action="append", help="where the files go; may be given several times")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds over the arms")
    parser.add_argument("--in-process", action="store_true", help="fork nothing: memory is used again and again")
    parser.add_argument("--tiny", action="store_true", help="a thousandth of the size, in-process: to try it out")
    args = parser.parse_args(argv)
    if args.tiny:
        args.millions, args.tensors, args.in_process = args.millions / 1000, 10, True
    return args


def make_items(parameters: int, tensors: int) -> dict[str, Any]:
    """Return the state of a model and of an AdamW with masters."""
    shape = (max(parameters // tensors, 1),)
    generator = torch.Generator().manual_seed(0)
    masters = [torch.randn(shape, generator=generator) for _ in range(tensors)]
    state = {
        index: {"step": torch.tensor(1.0), "master": master, "exp_avg": master * 0.1, "exp_avg_sq": master * master}
        for index, master in enumerate(masters)
    }
    return {
        "model": {f"layers.{index}.weight": master.half() for index, master in enumerate(masters)},
        "optimizer": {"state": state, "param_groups": [{"lr": 1e-3, "params": list(range(tensors))}]},
        "step": 1,
    }


# -- the arms ------------------------------------------------------------------------------------------------------


def make_arms(folder: Path, items: dict[str, Any]) -> dict[str, dict[str, Arm]]:
    """Return table -> name -> what is timed; ``load`` reads what ``save`` wrote."""
    bare, sealed = folder / "bare.pt", folder / "sealed.pt"

    def durable(path: Path) -> None:
        with open(path, "wb") as file:
            torch.save(items, file)
            file.flush()
            os.fsync(file.fileno())

    def renamed() -> None:
        durable(folder / "bare.tmp")
        (folder / "bare.tmp").replace(folder / "renamed.pt")

    return {
        "save": {
            "torch.save": lambda: torch.save(items, bare),
            "torch.save, fsync": lambda: durable(bare),
            RENAMED: renamed,
            "mixedopt save": lambda: save(sealed, **items),
        },
        "load": {
            "torch.load": lambda: torch.load(bare, weights_only=True),
            "mixedopt load": lambda: load(sealed),
        },
        "load, mmap": {
            "torch.load, mmap": lambda: torch.load(bare, weights_only=True, mmap=True),
            "mixedopt load, mmap": lambda: load(sealed, mmap=True),
        },
    }


# -- measuring -----------------------------------------------------------------------------------------------------


def timed(arm: Arm) -> tuple[float, int]:
    """Return the seconds of one call, and by how many bytes the process grew at its peak."""
    before = peak_memory()
    start = time.perf_counter()
    kept = arm()
    seconds = time.perf_counter() - start
    del kept
    return seconds, peak_memory() - before


def peak_memory() -> int:
    """Return the most bytes that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def timed_in_a_fork(arm: Arm) -> tuple[float, int]:
    """Do the same in a process of its own."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            os.write(writer, json.dumps(timed(arm)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, "rb") as file:
        answer = file.read()
    os.waitpid(child, 0)
    seconds, grown = json.loads(answer)
    return seconds, grown


def report(name: str, folder: Path, items: dict[str, Any], args: argparse.Namespace) -> dict[str, float]:
    """Measure in one folder, print its table, return name of arm -> median ratio."""
    tables = make_arms(folder, items)
    measure = timed if args.in_process else timed_in_a_fork
    seconds: dict[str, list[float]] = {arm: [] for arms in tables.values() for arm in arms}
    grown = dict.fromkeys(seconds, 0)
    for index in range(args.rounds + 1):
        for arms in tables.values():
            for arm, call in arms.items():
                os.sync()  # no arm pays for the pages of another
                taken, memory = measure(call)
                if index:  # the first round warms up
                    seconds[arm].append(taken)
                    grown[arm] = max(grown[arm], memory)
    size = (folder / "bare.pt").stat().st_size
    return print_table(f"{name}: {size / 1e9:.3g} GB in {args.tensors * 5} tensors", tables, seconds, grown, size)


def print_table(
    title: str, tables: dict[str, dict[str, Arm]], seconds: dict[str, list[float]], grown: dict[str, int], size: int
) -> dict[str, float]:
    """Print the arms; return name -> median ratio to the base of its table."""
    print(f"\n{title}, torch {torch.__version__}")
    print(f"{'':28}{'ms per GB':>10}{'quartiles':>16}{'x base':>8}{'extra memory':>14}")
    ratios = {}
    for table, base in TABLES:
        for arm in tables[table]:
            low, middle, high = (value / size * 1e12 for value in statistics.quantiles(seconds[arm], n=4))
            pairs = zip(seconds[arm], seconds[base], strict=True)
            ratios[arm] = statistics.median(mine / theirs for mine, theirs in pairs)
            spread = f"{low:.0f} - {high:.0f}"
            print(f"{arm:28}{middle:10.0f}{spread:>16}{ratios[arm]:8.2f}{grown[arm] / size:14.2f}")
    return ratios


if __name__ == "__main__":
    main()
