"""The shape of the library: imports point one way, rooms stay small, the door is what it says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mixedopt

LIBRARY = Path(mixedopt.__file__).parent
FILES = sorted(LIBRARY.rglob("*.py"))
FILE_BUDGET = 450
FUNCTION_BUDGET = 60

# room -> the rooms that it may import. Down the walk only: errors, then the
# leaf rooms, then the tier, then the optimizer, then the door.
ALLOWED: dict[str, set[str]] = {
    "errors": set(),
    "flat": set(),
    "casting": set(),
    "report": set(),
    "distributed": set(),
    "copies": set(),
    "naming": set(),
    "loss_scale": {"errors"},
    "checkpoint.check": {"errors"},
    "checkpoint.first_state": set(),
    "checkpoint.layout": {"checkpoint.check", "checkpoint.first_state", "copies", "errors", "groups"},
    "checkpoint.restore": {"bucket", "checkpoint.check", "checkpoint.layout", "copies", "errors"},
    "checkpoint.replacing": {"errors"},
    "checkpoint.files": {"checkpoint.replacing", "errors"},
    "checkpoint.plain": {"checkpoint.replacing", "copies", "errors"},
    "checkpoint.foreign_layouts": {"errors"},
    "checkpoint.foreign_fit": {
        "checkpoint.check",
        "checkpoint.foreign_layouts",
        "checkpoint.layout",
        "errors",
        "loss_scale",
    },
    "checkpoint.foreign": {
        "checkpoint.check",
        "checkpoint.foreign_fit",
        "checkpoint.foreign_layouts",
        "checkpoint.layout",
        "errors",
    },
    "checkpoint.__init__": {
        "checkpoint.check",
        "checkpoint.files",
        "checkpoint.foreign",
        "checkpoint.layout",
        "checkpoint.plain",
        "checkpoint.restore",
    },
    "gradients": {"flat"},
    "cxx": set(),
    "native.__init__": {"cxx"},
    "walks": {"native.__init__"},
    "pieces": {"flat"},
    "gather_kernels": {"launching", "pieces"},
    "split": set(),
    "bucket": {"flat", "split", "walks"},
    "masters": {"bucket", "gradients"},
    "holding": {"bucket", "gradients"},
    "groups": {"copies", "errors"},
    "loading": {"bucket", "casting", "masters"},
    "rollback": {"bucket", "casting", "copies", "gather_kernels", "groups"},
    "functions": {"casting", "losses"},
    "kernels": {"launching"},
    "losses": {"kernels", "loss_kernels", "native.__init__"},
    "loss_kernels": {"launching"},
    "tracing": {"functions"},
    "scopes": {"casting", "functions", "tracing"},
    "norms": {"kernels", "native.__init__", "norm_group_kernels", "norm_kernels"},
    "layers": {"casting", "native.__init__", "norms"},
    "launching": {"native.__init__"},
    "norm_kernels": {"launching"},
    "norm_group_kernels": {"launching", "norm_kernels"},
    "policy.rule": set(),
    "policy.spelling": {"policy.rule"},
    "policy.rules": {"functions", "policy.rule", "policy.spelling"},
    "policy.ranks": {"casting", "policy.rule", "policy.rules"},
    "policy.plan": {"bucket", "casting", "functions", "layers", "policy.ranks", "policy.rule", "policy.rules"},
    "policy.handle": {
        "bucket",
        "casting",
        "distributed",
        "errors",
        "flat",
        "layers",
        "masters",
        "policy.plan",
        "policy.ranks",
        "policy.rules",
        "scopes",
        "tracing",
    },
    "policy.dry_run": {"functions"},
    "policy.explain": {
        "bucket",
        "casting",
        "functions",
        "layers",
        "policy.dry_run",
        "policy.handle",
        "policy.plan",
        "policy.rules",
    },
    "policy.__init__": {"policy.explain", "policy.handle", "policy.plan", "policy.rule", "policy.rules"},
    "export": {"bucket", "masters", "naming", "policy.__init__"},
    "window": {"bucket", "errors", "flat", "gradients", "holding", "masters", "walks"},
    "decision": {"gradients", "loss_scale"},
    "scaler": {"decision", "errors", "loss_scale", "window"},
    "validate": {"bucket", "distributed", "errors", "flat", "groups", "naming", "policy.__init__", "scaler"},
    "roster": {"bucket", "checkpoint.__init__", "groups", "masters", "validate", "walks"},
    "eager": {
        "bucket",
        "decision",
        "distributed",
        "flat",
        "gradients",
        "groups",
        "loss_scale",
        "masters",
        "report",
        "rollback",
        "scaler",
        "window",
    },
    "rules.rule": set(),
    "rules.moments": {"rules.rule"},
    "rules.squares": {"rules.rule"},
    "rules.gradients": {"rules.rule"},
    "rules.registry": {"errors", "rules.gradients", "rules.moments", "rules.rule", "rules.squares"},
    "rules.__init__": {"rules.registry", "rules.rule"},
    "judgement": {"gradients", "loss_scale"},
    "device_scaler": {"judgement", "loss_scale", "scaler"},
    "numbering": {"bucket", "pieces"},
    "collecting": {"kernels", "gradients", "masters", "numbering", "walks", "window"},
    "dialects": set(),
    "kernel_writer": {"dialects"},
    "forms": {"dialects", "judgement", "kernel_writer", "pieces", "rules.__init__"},
    "host_sources": {"dialects", "forms", "judgement", "numbering"},
    "host_kernels": {"cxx", "flat", "forms", "host_sources", "judgement", "numbering", "pieces"},
    "step_kernels": {
        "dialects",
        "flat",
        "forms",
        "gather_kernels",
        "judgement",
        "kernel_writer",
        "launching",
        "numbering",
        "pieces",
        "split",
    },
    "device_tier": {"collecting", "device_scaler", "eager", "judgement", "loss_scale", "report", "scaler"},
    "flat_state": {"bucket", "rules.__init__"},
    "fused": {
        "collecting",
        "decision",
        "device_scaler",
        "device_tier",
        "gradients",
        "groups",
        "judgement",
        "kernels",
        "pieces",
        "rollback",
        "scaler",
    },
    "kernel_tier": {
        "collecting",
        "decision",
        "device_tier",
        "flat_state",
        "forms",
        "groups",
        "kernels",
        "numbering",
        "rules.__init__",
        "walks",
    },
    "compiled": {"bucket", "decision", "eager", "flat", "flat_state", "gradients", "groups", "rules.__init__", "walks"},
    "graphs": {"device_tier", "errors", "optimizer"},
    "tiers": {
        "collecting",
        "compiled",
        "device_scaler",
        "eager",
        "errors",
        "forms",
        "fused",
        "host_kernels",
        "kernel_tier",
        "loss_scale",
        "native.__init__",
        "rules.__init__",
        "scaler",
        "step_kernels",
    },
    "closures": {"bucket", "decision", "eager", "errors", "groups", "loss_scale", "masters", "report"},
    "assembly": {
        "bucket",
        "closures",
        "distributed",
        "eager",
        "errors",
        "loading",
        "loss_scale",
        "masters",
        "policy.__init__",
        "rollback",
        "roster",
        "scaler",
        "tiers",
        "validate",
        "window",
    },
    "optimizer": {
        "assembly",
        "checkpoint.__init__",
        "closures",
        "errors",
        "export",
        "groups",
        "loss_scale",
        "policy.__init__",
        "report",
        "scaler",
        "validate",
    },
    "__init__": {
        "errors",
        "graphs",
        "loss_scale",
        "optimizer",
        "policy.__init__",
        "report",
        "rules.__init__",
        "scaler",
    },
    "testing.runs": {"closures", "copies", "groups", "optimizer", "policy.__init__"},
    "testing.conformance": {"errors", "groups", "testing.runs"},
    "testing.strategies": {"loss_scale"},
    "testing.__init__": {"testing.conformance"},
}
# Rooms of several files.
FOLDERS = ("checkpoint.", "native.", "policy.", "rules.", "testing.")
# What a room needs beside torch: an optional extra.
# (Triton comes with torch's builds for CUDA.)
EXTRAS = {
    "testing.strategies": {"hypothesis"},
    "checkpoint.plain": {"safetensors"},
    "gather_kernels": {"triton"},
    "step_kernels": {"triton"},
    "launching": {"triton"},
    "loss_kernels": {"triton"},
    "norm_kernels": {"triton"},
    "norm_group_kernels": {"triton"},
}

PUBLIC = {
    "CastPolicy",
    "CheckpointError",
    "DynamicLossScale",
    "Explanation",
    "LossScaleError",
    "MixedPrecisionOptimizer",
    "PolicyHandle",
    "Rule",
    "SharedLossScale",
    "StaticLossScale",
    "StepOrderError",
    "StepReport",
    "convert",
    "explain",
    "graphed",
    "register_rule",
}


def room(file: Path) -> str:
    """Return the name of a room: a file, or a file in a folder as ``folder.file``."""
    return ".".join(file.relative_to(LIBRARY).with_suffix("").parts)


def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


def imported(file: Path) -> Iterator[str]:
    """Yield the full name of every import in ``file``, wherever it stands."""
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file.name}:{node.lineno} is a relative import"
            assert node.module is not None
            yield from ([f"mixedopt.{a.name}" for a in node.names] if node.module == "mixedopt" else [node.module])


def rooms(file: Path) -> set[str]:
    names = (name.removeprefix("mixedopt.") for name in imported(file) if name.startswith("mixedopt."))
    found = {".".join(name.split(".")[: 2 if name.startswith(FOLDERS) else 1]) for name in names}
    return {f"{name}.__init__" if f"{name}." in FOLDERS else name for name in found}


def test_every_room_is_in_the_table_of_imports() -> None:
    """A new room must be given its place before it is built."""
    assert {room(file) for file in FILES} == set(ALLOWED)


@pytest.mark.parametrize("file", FILES, ids=room)
def test_imports_point_down_the_walk(file: Path) -> None:
    """A room imports only what the table allows."""
    assert rooms(file) <= ALLOWED[room(file)]


def test_the_table_of_imports_has_no_cycle() -> None:
    """The rooms can be put in one order in which each imports only earlier ones."""
    placed: set[str] = set()
    while len(placed) < len(ALLOWED):
        ready = {room for room, needs in ALLOWED.items() if room not in placed and needs <= placed}
        assert ready, f"a cycle among {sorted(set(ALLOWED) - placed)}"
        placed |= ready


@pytest.mark.parametrize("file", FILES, ids=room)
def test_the_library_needs_only_torch_and_the_standard_library(file: Path) -> None:
    """No third package is imported, but by a room that an extra is for."""
    outside = {name.split(".")[0] for name in imported(file)} - set(sys.stdlib_module_names) - {"torch", "mixedopt"}
    assert outside == EXTRAS.get(room(file), set())


def test_importing_the_door_imports_nothing_more_than_torch_does() -> None:
    """``import mixedopt`` loads no third package and no torch subsystem that compiles or talks to other ranks."""
    code = (
        "import torch, sys; before = {m.split('.')[0] for m in sys.modules}\n"
        "import mixedopt; after = {m.split('.')[0] for m in sys.modules}\n"
        "print(*sorted(after - before - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=LIBRARY.parent)
    assert done.stdout.split() == ["mixedopt"]


def test_public_names_are_those_of_the_door() -> None:
    """``__all__`` is sorted, complete, and every name is there."""
    assert set(mixedopt.__all__) == PUBLIC
    assert list(mixedopt.__all__) == sorted(mixedopt.__all__)
    door = tree(LIBRARY / "__init__.py")
    bound = {a.asname or a.name for n in door.body if isinstance(n, ast.ImportFrom) for a in n.names}
    assert bound == PUBLIC
    assert all(hasattr(mixedopt, name) for name in PUBLIC)
    assert re.fullmatch(r"\d+\.\d+\.\d+", mixedopt.__version__)


def test_every_public_name_has_a_docstring() -> None:
    """Each public class, and each of its public methods, says what it does."""
    for name in PUBLIC:
        thing = getattr(mixedopt, name)
        assert thing.__doc__, name
        for attribute, value in vars(thing).items():
            if not attribute.startswith("_") and (callable(value) or isinstance(value, property)):
                assert getattr(value, "__doc__", None), f"{name}.{attribute}"


@pytest.mark.parametrize("file", FILES, ids=room)
def test_files_stay_within_their_budget(file: Path) -> None:
    """A room that outgrows its budget becomes a folder with the same door."""
    lines = len(file.read_text(encoding="utf-8").splitlines())
    assert lines <= FILE_BUDGET, f"{file.name} has {lines} lines"


@pytest.mark.parametrize("file", sorted((LIBRARY / "native").glob("*.[ch]*")), ids=lambda file: file.name)
def test_sources_of_cxx_stay_within_their_budget(file: Path) -> None:
    """As those of Python: their lines too, which no linter reads; each header is included once."""
    lines = file.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= FILE_BUDGET
    assert max(map(len, lines)) <= 120
    assert lines[0].startswith("// "), "says what it is for"
    assert file.suffix == ".cpp" or "#pragma once" in lines


@pytest.mark.parametrize("file", FILES, ids=room)
def test_functions_stay_within_their_budget(file: Path) -> None:
    """No function is longer than its budget, its docstring left out."""
    for node in ast.walk(tree(file)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) is not None else node.body
            length = (body[-1].end_lineno or 0) - body[0].lineno + 1 if body else 0
            assert length <= FUNCTION_BUDGET, f"{file.name}: {node.name} has {length} lines"


@pytest.mark.parametrize("file", FILES, ids=room)
def test_the_library_neither_asserts_nor_prints(file: Path) -> None:
    """User input is never checked with ``assert``; what is to be told is logged or raised."""
    for node in ast.walk(tree(file)):
        assert not isinstance(node, ast.Assert), f"{file.name}:{node.lineno} asserts"
        called = isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id
        assert called != "print", f"{file.name}:{getattr(node, 'lineno', 0)} prints"


@pytest.mark.parametrize("file", FILES, ids=room)
def test_no_module_holds_state(file: Path) -> None:
    """Two optimizers know nothing of each other: no ``global``, no mutable variable but constants."""
    module = tree(file)
    assert not any(isinstance(node, ast.Global) for node in ast.walk(module))
    for node in module.body:
        if isinstance(node, (ast.Assign, ast.AnnAssign)):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name) and not target.id.lstrip("_").isupper() and target.id != "__all__":
                assert not isinstance(node.value, (ast.List, ast.Dict, ast.Set)), f"{file.name}: {target.id} is mutable"


def test_the_package_is_typed() -> None:
    """``py.typed`` ships, so that users' type checkers read the annotations."""
    assert (LIBRARY / "py.typed").is_file()
