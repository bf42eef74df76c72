"""What the benchmarks write: JSON, tables in text and Markdown, a picture.

A report is a dict that JSON can hold: ``runs`` (what ran where), ``cells`` (whole iterations, one for each table of
``benchmark_training.py``) and ``tables`` (of ``benchmark_step.py``); both of the latter name their run by its number.
"""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import platform
import shlex
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import mixedopt

Report = dict[str, Any]

BEGIN, END = "<!-- tables: begin -->", "<!-- tables: end -->"
BLOCKS = "One arm after the other, for want of memory: ratios are not paired."
OUTPUTS = ("--json", "--png", "--markdown")
COLORS = {
    "fp32": "#9e9e9e",
    "tf32": "#616161",
    "half": "#9e9e9e",
    "torch.amp": "#212121",
    "mixedopt eager": "#90caf9",
    "mixedopt fused": "#1e88e5",
    "mixedopt compiled": "#0d47a1",
    "mixedopt auto": "#00897b",
}


# -- what ran where --------------------------------------------------------------------------------------------------


def facts(script: str, argv: Sequence[str], device: torch.device) -> dict[str, Any]:
    """Return versions, card and command of this run."""
    return {
        "command": shlex.join(["python", f"examples/{script}", *argv]),
        "date": datetime.date.today().isoformat(),
        "card": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "mixedopt": mixedopt.__version__,
        "transformers": installed("transformers"),
    }


def cpu_name() -> str:
    """Return what is known of a CPU."""
    return f"CPU ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads)"


def installed(package: str) -> str | None:
    """Return the version of a package, if it is there."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def describe(run: dict[str, Any]) -> str:
    """Return one line about a run."""
    names = ("torch", "cuda", "mixedopt", "transformers", "python")
    versions = ", ".join(f"{'CUDA' if name == 'cuda' else name} {run[name]}" for name in names if run.get(name))
    return f"{run['card']}; {versions}; {run['date']}"


def shown_command(run: dict[str, Any]) -> str:
    """Return the command line without the files it wrote."""
    words = iter(shlex.split(run["command"]))
    kept = []
    for word in words:
        if word in OUTPUTS:
            next(words, None)
        elif not word.startswith(tuple(f"{name}=" for name in OUTPUTS)):
            kept.append(word)
    return shlex.join(kept)


# -- JSON ------------------------------------------------------------------------------------------------------------


def empty() -> Report:
    """Return a report of nothing."""
    return {"runs": [], "cells": [], "tables": []}


def load(path: Path) -> Report:
    """Read a report."""
    return {**empty(), **json.loads(path.read_text(encoding="utf-8"))}


def save(report: Report, path: Path) -> None:
    """Write a report, whole or not at all."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)


def cell_key(report: Report, cell: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes a cell the same as another."""
    card = report["runs"][cell["run"]]["card"]
    return card, cell["model"], cell["title"], cell["dtype"], cell["clip"], cell["compiled"], cell["graph"]


def table_key(report: Report, table: dict[str, Any]) -> tuple[Any, ...]:
    """Return what makes a table the same as another."""
    return report["runs"][table["run"]]["card"], table["title"]


def put(report: Report, kind: str, item: dict[str, Any], key: Callable[..., Any]) -> None:
    """Add a cell or table; one of the same key is replaced."""
    for index, other in enumerate(report[kind]):
        if key(report, other) == key(report, item):
            report[kind][index] = item
            return
    report[kind].append(item)


def merge(reports: Sequence[Report]) -> Report:
    """Return all runs in one report; of the same cell the last counts."""
    merged = empty()
    for report in reports:
        first = len(merged["runs"])
        merged["runs"] += report["runs"]
        for kind, key in (("cells", cell_key), ("tables", table_key)):
            for item in report[kind]:
                put(merged, kind, {**item, "run": item["run"] + first}, key)
    return merged


# -- numbers ---------------------------------------------------------------------------------------------------------


def spread(values: Sequence[float]) -> tuple[float, float, float]:
    """Return lower quartile, median, upper quartile."""
    if len(values) < 2:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def number(value: float | None, digits: int = 3) -> str:
    """Return a number with so many significant digits, ``-`` for none."""
    if value is None:
        return "-"
    if value == 0 or abs(value) >= 10 ** (digits - 1):
        return f"{value:.0f}"
    return f"{value:#.{digits}g}".rstrip(".")


# -- tables ----------------------------------------------------------------------------------------------------------


def heading(cell: dict[str, Any]) -> str:
    """Return the name of a cell."""
    clip = "no clip" if cell["clip"] is None else f"clip {cell['clip']:g}"
    graphs = ", with CUDA graphs" if cell["graph"] else ""
    return f"{cell['title']}; {cell['dtype']}, {clip}, {'compiled' if cell['compiled'] else 'eager'} model{graphs}"


def cell_table(cell: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of a cell: one row for each arm."""
    head = ["", "ms", "quartiles", "x torch.amp", "quartiles", f"{cell['unit']}/s", "peak MiB", "loss", ""]
    rows = []
    for arm in cell["arms"]:
        if arm["reason"]:
            rows.append([arm["name"], "n/a", *[""] * 6, arm["reason"]])
            continue
        low, middle, high = (value * 1e3 for value in spread(arm["seconds"]))
        ratios = arm["ratio"] or [None] * 3
        peak = None if arm["peak"] is None else arm["peak"] / 2**20
        quartiles = f"{number(low)} - {number(high)}", f"{number(ratios[0])} - {number(ratios[2])}"
        speed = number(cell["items"] / middle * 1e3)
        loss = "not finite" if arm["loss"] is None else f"{arm['loss']:.4f}"
        figures = number(middle), quartiles[0], number(ratios[1]), quartiles[1], speed, number(peak), loss
        rows.append([arm["name"], *figures, arm["note"]])
    return head, rows


def overview(cells: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows of the ratios to torch.amp: one row for each cell."""
    names = list(dict.fromkeys(arm["name"] for cell in cells for arm in cell["arms"]))
    rows = []
    for cell in cells:
        found = {arm["name"]: arm["ratio"] for arm in cell["arms"]}
        row = [number(ratio[1]) if (ratio := found.get(name)) else "n/a" for name in names]
        clip = "-" if cell["clip"] is None else f"{cell['clip']:g}"
        name = cell["model"] + (", graphs" if cell["graph"] else "")
        rows.append([name, cell["dtype"], clip, "compiled" if cell["compiled"] else "eager", *row])
    return ["", "dtype", "clip", "model", *names], rows


def text_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table for a terminal; the first and last columns are words."""
    widths = [max(len(row[index]) for row in [head, *rows]) for index in range(len(head))]
    lines = []
    for row in [head, *rows]:
        cells = [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
        if head[-1] == "":
            cells[-1] = row[-1]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the same in Markdown; what has a name is aligned to the right."""
    used = [index for index, name in enumerate(head) if name or any(row[index] for row in rows)]
    align = ["---" if index == 0 or not head[index] else "---:" for index in used]
    lines = [
        [head[index] for index in used],
        align,
        *([row[index].replace("|", "/") for index in used] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


# -- the page --------------------------------------------------------------------------------------------------------


def markdown(report: Report, picture: str | None = None) -> str:
    """Return all tables in Markdown, a card at a time, with versions and commands."""
    parts = []
    for card in dict.fromkeys(run["card"] for run in report["runs"]):
        runs = [run for run in report["runs"] if run["card"] == card]
        parts += [f"## {card}", "\n".join(f"- {line}" for line in dict.fromkeys(describe(run) for run in runs))]
        commands = "\n".join(dict.fromkeys(shown_command(run) for run in runs))
        parts.append(f"```bash\n{commands}\n```")
        cells = [cell for cell in report["cells"] if report["runs"][cell["run"]]["card"] == card]
        if cells:
            parts += ["### Whole iterations: torch.amp's time divided by the arm's", markdown_table(*overview(cells))]
            if picture is not None and card == main_card(report):
                parts.append(f"![torch.amp's time divided by the arm's]({picture})")
        for cell in cells:
            parts += [f"#### {heading(cell)}", markdown_table(*cell_table(cell))]
            parts.append("" if cell["interleaved"] else BLOCKS)
        for table in (table for table in report["tables"] if report["runs"][table["run"]]["card"] == card):
            parts += [f"### {table['title']}", markdown_table(table["head"], table["rows"]), table["note"]]
    return "\n\n".join(part for part in parts if part)


def write_page(report: Report, path: Path, picture: Path | None) -> None:
    """Write the tables into a page: between its two marks, or as all of it."""
    tables = markdown(report, None if picture is None else picture.name)
    page = path.read_text(encoding="utf-8") if path.exists() else ""
    if BEGIN not in page or END not in page:
        page = f"# Benchmarks\n\n{BEGIN}\n{END}\n"
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    path.write_text(f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}", encoding="utf-8")


# -- the picture -----------------------------------------------------------------------------------------------------


def main_card(report: Report) -> str | None:
    """Return the card of the most cells."""
    cards = [report["runs"][cell["run"]]["card"] for cell in report["cells"]]
    return max(cards, key=cards.count) if cards else None


def plot(report: Report, path: Path) -> None:
    """Write a PNG of the card of the most cells: a panel for each setting, a bar for each model and arm."""
    from matplotlib.figure import Figure

    card = main_card(report)
    cells = [cell for cell in report["cells"] if report["runs"][cell["run"]]["card"] == card]
    settings = sorted({(cell["compiled"], cell["clip"] or 0.0, cell["dtype"]) for cell in cells}, key=fp16_first)
    models = list(dict.fromkeys(cell["model"] for cell in cells))
    timed = [arm["name"] for cell in cells for arm in cell["arms"] if arm["ratio"]]
    names = [name for name in dict.fromkeys(timed) if name != "torch.amp"]
    columns = 2 if len(settings) > 1 else 1
    rows = max(-(-len(settings) // columns), 1)
    figure = Figure(figsize=(max(7.0, 1.0 + 0.26 * len(models) * (len(names) + 1)) * columns, 3.4 * rows + 0.9))
    figure.set_layout_engine("constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, setting in zip(panels, settings, strict=False):
        inside = [cell for cell in cells if (cell["compiled"], cell["clip"] or 0.0, cell["dtype"]) == setting]
        draw_panel(panel, setting, inside, models, names)
    for panel in panels[len(settings) :]:
        panel.set_visible(False)
    if settings:
        handles: dict[str, Any] = {}
        for panel in panels:
            handles |= dict(zip(*panel.get_legend_handles_labels()[::-1], strict=True))
        figure.legend(list(handles.values()), list(handles), loc="outside lower center", ncols=min(len(handles), 6))
    figure.suptitle(f"Whole training iterations on {card}: speed relative to torch.amp (1 is as fast, 2 twice)")
    figure.savefig(path, dpi=110)


def fp16_first(setting: tuple[bool, float, str]) -> tuple[bool, float, bool]:
    """Return what settings are sorted by."""
    compiled, clip, dtype = setting
    return compiled, clip, dtype != "fp16"


def draw_panel(
    panel: Any, setting: tuple[bool, float, str], cells: Sequence[dict[str, Any]], models: list[str], names: list[str]
) -> None:
    """Draw one setting."""
    compiled, clip, dtype = setting
    found = {(cell["model"], arm["name"]): arm["ratio"] for cell in cells for arm in cell["arms"] if arm["ratio"]}
    names = [name for name in names if any(there == name for _, there in found)]
    width = 0.84 / max(len(names), 1)
    for index, name in enumerate(names):
        points = [(place, found[model, name]) for place, model in enumerate(models) if (model, name) in found]
        centres = [place + (index - (len(names) - 1) / 2) * width for place, _ in points]
        middles = [ratio[1] for _, ratio in points]
        whiskers = [[r[1] - r[0] for _, r in points], [r[2] - r[1] for _, r in points]]
        look = {"color": COLORS.get(name.split(",")[0], f"C{index}"), "edgecolor": "white", "linewidth": 0}
        look["hatch"] = ("//" if "gradients" in name else "") + (".." if "graphed" in name else "")
        panel.bar(centres, middles, 0.92 * width, yerr=whiskers, ecolor="#00000080", label=name, **look)
        for centre, (_, ratio) in zip(centres, points, strict=True):
            text = {"ha": "center", "va": "bottom", "fontsize": 7, "rotation": 90 if len(names) > 3 else 0}
            panel.annotate(f"{ratio[1]:.2f}", (centre, ratio[2]), (0, 3), textcoords="offset points", **text)
    panel.axhline(1.0, color="#212121", linewidth=1.2, linestyle="--", label="torch.amp")
    panel.set_xticks(range(len(models)), models)
    panel.set_xlim(-0.5, len(models) - 0.5)
    panel.margins(y=0.2)
    panel.set_ylabel("x torch.amp's speed")
    panel.set_title(f"{dtype}, {f'clip {clip:g}' if clip else 'no clip'}, {'compiled' if compiled else 'eager'} model")
    panel.grid(axis="y", alpha=0.3)
    panel.set_axisbelow(True)
