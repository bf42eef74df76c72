"""The examples run, at a tiny size, and report what happened."""

from __future__ import annotations

import contextlib
import dataclasses
import doctest
import importlib
import io
import math
import re
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import optim

from mixedopt import MixedPrecisionOptimizer

README_BUDGET = 200
ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"


@pytest.fixture(scope="module")
def train_digits() -> Iterator[ModuleType]:
    for name in ("matplotlib", "sklearn", "tqdm"):
        pytest.importorskip(name, reason="needs the extra 'examples'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("train_digits")


@pytest.fixture(scope="module")
def digits_run(train_digits: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], str, Path]:
    """Results, printed text and picture of three steps per arm, run once."""
    picture = tmp_path_factory.mktemp("digits") / "digits.png"
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        results = train_digits.main(["--seeds", "1", "--max-steps", "3", "--plot", str(picture)])
    return results, printed.getvalue(), picture


def test_train_digits_runs_every_arm_and_draws(train_digits: ModuleType, digits_run: Any) -> None:
    """Each arm of each setting comes back and is in the table; the picture is a PNG."""
    results, printed, picture = digits_run
    expected = [(setting.name, arm.name) for setting in train_digits.SETTINGS for arm in setting.arms]
    assert [(result.setting.name, result.arm.name) for result in results] == expected
    for result in results:
        assert len(result.losses) == len(result.scales) == len(result.skips) == 3
        assert 0 <= result.accuracy <= 100
    assert all(f"  {arm} " in printed for _, arm in expected)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_train_digits_pairs_its_arms(digits_run: Any) -> None:
    """Before the first update all arms of a seed differ by half rounding only."""
    results, _, _ = digits_run
    half_rounding = 0.02  # bf16 keeps 8 bits of a loss of about 2.4
    assert all(abs(run.losses[0] - results[0].losses[0]) < half_rounding for run in results)


def test_train_digits_measures_the_bytes_that_training_holds(digits_run: Any) -> None:
    """AdamW holds 16 bytes per parameter in fp32 and 8 in naive fp16; a master adds 2 to the weights."""
    fp32, naive, fp16, bf16 = (run.bytes for run in digits_run[0][:4])
    padding = 0.1
    assert fp32.total == pytest.approx(16.0, abs=padding)
    assert naive.total == pytest.approx(8.0, abs=padding)
    for held in (fp16, bf16):
        assert held.weights + held.masters == pytest.approx(6.0, abs=padding)
        assert held.state == pytest.approx(8.0, abs=padding)


def test_forget_masters_leaves_what_the_half_weights_hold(train_digits: ModuleType) -> None:
    """The ablation takes the low bits of every half weight's master, and nothing else."""
    model = train_digits.make_model(0)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = MixedPrecisionOptimizer(optim.AdamW(model.parameters()), model)
    train_digits.forget_masters_(optimizer, model)
    masters = dict(optimizer.named_masters())
    for name, master in masters.items():
        norm = name.startswith("1.")  # an fp32 island
        assert master.equal(before[name] if norm else before[name].half().float())
    assert not masters["0.weight"].equal(before["0.weight"])


# -- the benchmarks -------------------------------------------------------------


def example(name: str) -> ModuleType:
    """Import an example, or what examples share."""
    pytest.importorskip("tqdm", reason="needs the extra 'examples'")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        return importlib.import_module(name)


def run_example(name: str, *words: object) -> tuple[Any, str]:
    """Return what the ``main`` of an example returns, and what it prints."""
    module = example(name)
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        result = module.main([str(word) for word in words])
    return result, printed.getvalue()


def test_benchmark_step_prints_its_tables(tmp_path: Path) -> None:
    """The arms, and how the cost grows; the JSON file gets the same, beside what it had."""
    sizes = ("--millions", 0.001, "--tensors", 4, "--rounds", 4, "--most-tensors", 20)
    ratios, printed = run_example("benchmark_step", *sizes, "--json", tmp_path / "step.json")
    assert {"mixedopt / bare fp32", "mixedopt / torch.amp", "compiled / torch.amp"} <= ratios.keys()
    assert all(ratio > 0 for ratio in ratios.values())
    for line in ("x torch.amp", "growth with parameters", "us per tensor"):
        assert line in printed

    run_example("benchmark_step", *sizes, "--quick", "--bf16", "--json", tmp_path / "step.json")
    report = example("benchmark_report").load(tmp_path / "step.json")
    assert [table["run"] for table in report["tables"]] == [0, 0, 0, 1]
    assert "bfloat16" in report["tables"][-1]["title"]
    assert len(report["runs"]) == 2


def test_benchmark_step_takes_the_shapes_of_gpt2() -> None:
    """The large one has 1.56 B parameters in 580 tensors; every arm of the small one has a row."""
    arms = example("benchmark_step_arms")
    large = arms.GPT2_SHAPES["GPT-2 XL"]
    assert (len(large), sum(math.prod(shape) for shape in large)) == (580, 1_557_686_400)
    ratios, printed = run_example("benchmark_step", "--gpt2-xl", "mini", "--rounds", 2)
    assert ratios["mixedopt eager / torch.amp + clip"] > 0
    assert all(f"\n{name} " in printed for name in arms.GPT2_ARMS)
    assert "x floor" in printed


TRAINING = ("--tiny", "--device", "cpu", "--models", "ffn", "gpt-20m", "--rounds", 2, "--clip", "both", "--graph")
TRAINING += ("--dtype", "bf16", "--tiers", "eager", "nonsense", "auto", "--gradients", "autograd", "half")


@pytest.fixture(scope="module")
def training_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], str, Path]:
    """Report, printed text and folder of two tiny models in bf16, run once."""
    pytest.importorskip("matplotlib", reason="needs the extra 'examples'")
    folder = tmp_path_factory.mktemp("training")
    report, printed = run_example(
        "benchmark_training",
        *TRAINING,
        "--json",
        folder / "a.json",
        "--png",
        folder / "a.png",
        "--markdown",
        folder / "a.md",
    )
    return report, printed, folder


def test_benchmark_training_measures_every_arm_or_says_why_not(training_run: Any) -> None:
    """A cell for each model and clip; what was timed is finite, what was not has a reason."""
    report, printed, _ = training_run
    expected = [("ffn", None), ("ffn", 1.0), ("gpt-20m", None), ("gpt-20m", 1.0)]
    assert [(cell["model"], cell["clip"]) for cell in report["cells"]] == expected
    for cell in report["cells"]:
        arms = {arm["name"]: arm for arm in cell["arms"]}
        for name in ("fp32", "torch.amp", "mixedopt eager", "mixedopt eager, half gradients"):
            assert arms[name]["reason"] is None
            assert len(arms[name]["seconds"]) == 2
            assert min(arms[name]["seconds"]) > 0
            assert math.isfinite(arms[name]["loss"])
            assert arms[name]["skipped"] == 0
        assert arms["torch.amp"]["ratio"] == (1.0, 1.0, 1.0)
        assert "tier='nonsense'" in arms["mixedopt nonsense"]["reason"]
        assert arms["mixedopt auto"]["reason"] == "runs as mixedopt eager"
        assert arms["mixedopt auto"]["ratio"] == arms["mixedopt eager"]["ratio"]
        assert arms["torch.amp, graphed"]["reason"] == "CUDA graphs need a GPU"
        assert all(f"\n{name} " in printed for name in arms)


def test_benchmark_training_writes_tables_and_a_picture(training_run: Any) -> None:
    """The page names versions and command, has a row for each arm, and shows the picture."""
    report, _, folder = training_run
    page = (folder / "a.md").read_text(encoding="utf-8")
    assert (folder / "a.png").read_bytes().startswith(b"\x89PNG")
    assert "](a.png)" in page
    assert report["runs"][0]["torch"] in page
    assert "python examples/benchmark_training.py --tiny --device cpu" in page
    assert str(folder) not in page
    assert page.count("\n| mixedopt eager |") == len(report["cells"])


def test_benchmark_training_goes_on_where_it_was_stopped(training_run: Any, tmp_path: Path) -> None:
    """Cells that a file has are not run again; those that it lacks are."""
    report, _, folder = training_run
    reports = example("benchmark_report")
    reports.save({**report, "cells": report["cells"][1:]}, tmp_path / "rest.json")
    whole, printed = run_example("benchmark_training", *TRAINING, "--json", tmp_path / "rest.json")
    assert printed.count("there already") == 3
    assert [cell["run"] for cell in whole["cells"]] == [0, 0, 0, 1]
    assert reports.load(tmp_path / "rest.json")["cells"][:3] == reports.load(folder / "a.json")["cells"][1:]


def test_reports_merge_and_the_last_of_a_cell_counts(training_run: Any) -> None:
    """Merging keeps every cell once, with its own run; the page keeps what stands around the tables."""
    report, _, folder = training_run
    reports = example("benchmark_report")
    slow = [{**cell, "items": 7} for cell in report["cells"][:1]]
    merged = reports.merge([report, {**report, "cells": slow}])
    assert [cell["items"] for cell in merged["cells"]] == [7, *(cell["items"] for cell in report["cells"][1:])]
    assert [cell["run"] for cell in merged["cells"]] == [1, 0, 0, 0]

    page = folder / "page.md"
    page.write_text((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8"), encoding="utf-8")
    before = page.read_text(encoding="utf-8").split(reports.BEGIN)
    written = []
    for _ in range(2):
        run_example("benchmark_training", "--report", folder / "a.json", "--markdown", page)
        written.append(page.read_text(encoding="utf-8"))
    assert written[0] == written[1]
    assert written[0].startswith(before[0])
    assert written[0].endswith(before[1].split(reports.END)[1])
    assert "\n| ffn, graphs | bf16 |" in written[0]


def test_benchmark_training_falls_back_to_one_arm_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the memory does not hold all arms, each is measured alone, and the cell says so."""
    training = example("benchmark_training")
    alive, prepare = weakref.WeakSet(), training.prepare

    def small_memory(*args: Any) -> Any:
        if len(alive) == 1:
            raise torch.OutOfMemoryError("no room for two")
        prepared = prepare(*args)
        alive.add(prepared)
        return prepared

    monkeypatch.setattr(training, "prepare", small_memory)
    report, printed = run_example(
        "benchmark_training", "--tiny", "--device", "cpu", "--models", "ffn", "--rounds", 2, "--tiers", "eager"
    )
    (cell,) = report["cells"]
    assert not cell["interleaved"]
    assert "One arm after the other" in printed
    for arm in cell["arms"]:
        assert arm["reason"] is None
        assert arm["ratio"] is not None


def test_a_capture_that_fails_ends_the_run_and_spares_the_other_arms(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was timed before stands; the row says what happened; the next cell is left for a new process."""
    training = example("benchmark_training")
    make_arm = training.make_arm

    def no_capture(spec: Any, *args: Any) -> Any:
        if spec.graph:
            raise RuntimeError("operation not permitted when stream is capturing\nand more")
        return make_arm(spec, *args)

    monkeypatch.setattr(training, "make_arm", no_capture)
    words = (
        "--tiny",
        "--device",
        "cpu",
        "--models",
        "ffn",
        "--rounds",
        2,
        "--tiers",
        "eager",
        "--clip",
        "both",
        "--graph",
    )
    report, printed = run_example("benchmark_training", *words)
    (cell,) = report["cells"]
    *timed, graphed = cell["arms"]
    assert [arm["name"] for arm in timed] == ["fp32", "torch.amp", "mixedopt eager"]
    assert all(arm["reason"] is None for arm in timed)
    assert graphed["reason"] == "RuntimeError: operation not permitted when stream is capturing"
    assert "run again for the rest" in printed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_benchmark_training_captures_torch_amp_whole(dtype: str) -> None:
    """On a GPU torch.amp's iteration fits into one graph, with clipping too, and all arms tell their peak memory."""
    words = ("--tiny", "--device", "cuda", "--models", "ffn", "gpt-20m", "--rounds", 2, "--tiers", "eager")
    report, _ = run_example("benchmark_training", *words, "--graph", "--clip", "both", "--dtype", dtype)
    assert len(report["cells"]) == 4
    for cell in report["cells"]:
        for arm in cell["arms"]:
            assert arm["reason"] is None
            assert arm["peak"] > 0
            assert math.isfinite(arm["loss"])
        assert cell["arms"][-1]["name"] == "torch.amp, graphed"
        assert cell["arms"][-1]["note"] == "whole iteration in one graph"


@pytest.mark.gpu
def test_benchmark_step_measures_gpt2_on_a_gpu() -> None:
    """Peak memory, host time and the floor are there."""
    arms = example("benchmark_step_arms")
    ratios, printed = run_example("benchmark_step", "--device", "cuda", "--gpt2-xl", "mini", "--rounds", 2)
    assert ratios["mixedopt eager / torch.amp + clip"] > 0
    assert all(f"\n{name} " in printed for name in arms.GPT2_ARMS)
    assert "TB/s" in printed


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of transformers' own making
@pytest.mark.parametrize("name", ["ffn", "unet", "unet-groupnorm", "bert-base", "gpt-20m"])
def test_the_arms_of_benchmark_training_train_the_same_model(name: str) -> None:
    """The first loss of each arm is that of fp32 but for half rounding, and the last one is lower."""
    arms, models = example("benchmark_arms"), example("benchmark_models")
    work = models.workloads(tiny=True)[name]
    if work.missing():
        pytest.skip(work.missing())
    torch.manual_seed(1)
    batch = work.batch()
    cell = arms.Cell(work, name, torch.bfloat16, 1.0, False, torch.device("cpu"))
    losses = {}
    for spec in arms.specs(["eager"], ["autograd", "half"], ["fp32"], graph=False):
        step = arms.make_arm(spec, cell, batch).step
        losses[spec.name] = [step(*batch).item() for _ in range(100)]
    half_rounding = 0.02  # bf16 keeps 8 bits of a loss of at most 4.2
    for mine in losses.values():
        assert mine[0] == pytest.approx(losses["fp32"][0], abs=half_rounding)
        assert mine[-1] < mine[0]
    assert len(losses) == 4


def test_a_workload_names_the_package_that_it_lacks() -> None:
    """Without transformers BERT is left out, with a note."""
    models = example("benchmark_models")
    bert = models.workloads(tiny=True)["bert-base"]
    assert dataclasses.replace(bert, needs="no_such_package").missing() == "no_such_package is not installed"
    assert dataclasses.replace(bert, needs="torch").missing() is None


@pytest.mark.parametrize(
    ("value", "shown"),
    [(None, "-"), (0.0, "0"), (0.01234, "0.0123"), (1.0, "1.00"), (12.34, "12.3"), (12345.6, "12346")],
)
def test_reports_show_three_digits(value: float | None, shown: str) -> None:
    """Enough to compare, no more than the measurement holds."""
    assert example("benchmark_report").number(value) == shown


def test_benchmark_norms_prints_its_tables() -> None:
    """Four ways for each shape."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(EXAMPLES)
        ratios = importlib.import_module("benchmark_norms").main(["--tiny", "--rounds", "2"])
    assert len(ratios) == 3
    for ways in ratios.values():
        assert set(ways) == {"half", "casts", "two passes", "mixedopt"}
    assert "GroupNorm" in printed.getvalue()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # of transformers' own making
def test_benchmark_policy_prints_its_tables() -> None:
    """Every arm trains both models."""
    pytest.importorskip("tqdm", reason="needs the extra 'examples'")
    pytest.importorskip("transformers", reason="needs the extra 'transformers'")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(EXAMPLES)
        ratios = importlib.import_module("benchmark_policy").main(["--tiny", "--rounds", "2"])
    assert set(ratios) == {"BERT", "GPT"}
    for arms in ratios.values():
        assert arms["all half"] == 1.0
        assert len(arms) == 7
    assert "autocast" in printed.getvalue()


# -- what the README says -------------------------------------------------------


def blocks(language: str, file: str = "README.md") -> list[str]:
    """Return the fenced blocks of one language in a page."""
    return re.findall(rf"(?ms)^```{language}\n(.*?)^```", (ROOT / file).read_text(encoding="utf-8"))


def test_benchmark_checkpoint_prints_its_tables() -> None:
    """Saving and loading, beside torch's."""
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(EXAMPLES)
        ratios = importlib.import_module("benchmark_checkpoint").main(["--tiny", "--rounds", "2"])
    for arms in ratios.values():
        assert {"mixedopt save", "mixedopt load", "mixedopt load, mmap"} <= arms.keys()
        assert all(ratio > 0 for ratio in arms.values())
    assert "x base" in printed.getvalue()


@pytest.mark.parametrize(
    "file",
    [
        "README.md",
        "docs/recipes.md",
        "docs/cast-policy.md",
        "docs/checkpoint-format.md",
        "docs/from-other-tools.md",
        "docs/update-rules.md",
        "docs/tiers.md",
    ],
)
def test_the_python_blocks_of_a_page_run(file: str) -> None:
    """A newcomer can paste them, one after the other."""
    assert blocks("python", file)
    if file == "docs/update-rules.md":
        pytest.importorskip("lion_pytorch")
        if shutil.which("g++") is None:
            pytest.skip("torch.compile needs a C++ compiler")
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile("\n".join(blocks("python", file)), file, "exec"), {})


def test_the_readme_stays_short() -> None:
    """What does not fit goes to a page of ``docs``."""
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= README_BUDGET


def test_ci_runs_the_test_command_of_the_readme() -> None:
    """One command for everybody."""
    command = next(block.strip() for block in blocks("bash") if "pytest" in block)
    assert command in (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()


ROOMS = [".".join(p.relative_to(ROOT).with_suffix("").parts) for p in sorted((ROOT / "mixedopt").rglob("[!_]*.py"))]


@pytest.mark.parametrize("name", ROOMS)
def test_the_examples_in_docstrings_hold(name: str) -> None:
    """Every ``>>>`` gives what it shows."""
    if name.endswith(("_kernels", ".launching")):
        pytest.importorskip("triton")
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0
