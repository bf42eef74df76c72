"""The examples run, at a tiny size, and report what happened."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
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


def test_benchmark_step_prints_its_tables() -> None:
    """The arms, and how the cost grows."""
    pytest.importorskip("tqdm", reason="needs the extra 'examples'")
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(io.StringIO()) as printed:
        patch.syspath_prepend(EXAMPLES)
        ratios = importlib.import_module("benchmark_step").main(
            ["--millions", "0.001", "--tensors", "4", "--rounds", "4", "--most-tensors", "20"]
        )
    assert {"mixedopt / bare fp32", "mixedopt / torch.amp", "compiled / torch.amp"} <= ratios.keys()
    assert all(ratio > 0 for ratio in ratios.values())
    for line in ("x torch.amp", "growth with parameters", "us per tensor"):
        assert line in printed.getvalue()


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
    if name.endswith("_kernels"):
        pytest.importorskip("triton")
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module)
    assert failed == 0
