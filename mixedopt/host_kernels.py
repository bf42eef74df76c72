"""The kernels of a step on a CPU, compiled and launched: what ``step_kernels`` is on a GPU.

A C++ compiler makes a library of each, in about a second, once a process. It
shares pieces out among as many threads as torch uses.
"""

from __future__ import annotations

import array
import ctypes
import functools
import itertools
import logging
import platform
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mixedopt.cxx import COMPILERS, compilers
from mixedopt.flat import plan_layout
from mixedopt.forms import ZEROS, Form, where_of
from mixedopt.host_sources import measure_source, plan_source, update_source
from mixedopt.judgement import REPORT, Rules, Standing
from mixedopt.numbering import PIECE
from mixedopt.pieces import Pieces, nothing, plan_pieces

# No contraction: what torch rounds twice is rounded twice.
FLAGS = ("-O3", "-std=c++17", "-shared", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
NATIVE = "-march=native" if platform.machine() in ("x86_64", "AMD64", "i686") else "-mcpu=native"
# From the best to what every compiler takes.
CHOICES = ((NATIVE, "-fopenmp"), ("-fopenmp",), (NATIVE,), ())
CPU = torch.device("cpu")
logger = logging.getLogger("mixedopt")
Function = Callable[[int, int, int], None]


@functools.cache
def made(source: str, name: str) -> Function:
    """Return a function of C++.

    Raises:
        RuntimeError: there is no compiler, or it fails.
    """
    said = ""
    with tempfile.TemporaryDirectory(prefix="mixedopt") as folder:
        text, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        text.write_text(source)
        for compiler, choice in itertools.product(compilers(), CHOICES):
            command = [*compiler, *FLAGS, *choice, "-o", str(library), str(text)]
            ran = subprocess.run(command, capture_output=True, text=True, check=False)
            if ran.returncode == 0 and library.exists():
                if "-fopenmp" not in choice:
                    logger.info("the compiled tier has one thread: %s knows no -fopenmp", shlex.join(compiler))
                function = getattr(ctypes.CDLL(str(library)), name)
                function.argtypes, function.restype = [ctypes.c_int64] * 3, None
                return function  # type: ignore[no-any-return]
            said = said or f"{shlex.join(compiler)}: {ran.stderr.strip() or 'wrote nothing'}"
    raise RuntimeError(said[:300] or f"no C++ compiler: {', '.join(COMPILERS)} not found, and $CXX names none")


class Again:
    """A call of a function of C++, to be made again and again, of the same memory; it keeps the tensors. In place.

    Args:
        function: (pieces, ``number``, address of the pointers).
        pieces: how many.
        tensors: in the order of the pointers; ``None`` stands for one that is given at each call.
        number: ``None`` for as many as torch uses threads.
    """

    def __init__(
        self, function: Function, pieces: int, tensors: Sequence[Tensor | None], number: int | None = None
    ) -> None:
        self._function, self._pieces, self._number, self._tensors = function, pieces, number, tuple(tensors)
        self._pointers = array.array("q", [0 if tensor is None else tensor.data_ptr() for tensor in tensors])
        self._open = [place for place, tensor in enumerate(tensors) if tensor is None]

    def __call__(self, *given: Tensor) -> None:
        """Call it."""
        for place, tensor in zip(self._open, given, strict=True):
            self._pointers[place] = tensor.data_ptr()
        number = torch.get_num_threads() if self._number is None else self._number
        self._function(self._pieces, number, self._pointers.buffer_info()[0])


class Launcher:
    """A function of C++; as ``launching.Launcher``."""

    def __init__(self, function: Function) -> None:
        self._function = function

    def again(self, pieces: int, tensors: Sequence[Tensor]) -> Callable[[], None]:
        """Return what calls it again and again, for so many pieces, with these tensors in the order of its pointers."""
        return Again(self._function, pieces, tensors)


@functools.cache
def measurer(grads: torch.dtype) -> Function:
    """Return the function that measures gradients of this dtype."""
    return made(measure_source(grads), "measure")


@functools.cache
def planner(form: Form) -> Function:
    """Return the function that decides."""
    return made(plan_source(form), "plan")


@functools.cache
def update_launcher(
    form: Form, device: torch.device, grads: torch.dtype, model: torch.dtype, split: bool, aligned: bool
) -> Launcher:
    """Return what launches the update.

    Raises:
        NotImplementedError: masters are split.
    """
    del device, aligned
    if split:
        raise NotImplementedError("split masters have no kernel on a CPU")
    return Launcher(made(update_source(form, grads, model), "update"))


def measuring(
    addresses: Tensor, pieces: Pieces, source: torch.dtype, evidence: Tensor, aligned: bool
) -> Callable[[], None]:
    """Return what measures gradients where they lie; as ``gather_kernels.measuring``."""
    del aligned
    if not pieces.number:
        return nothing
    return Again(measurer(source), pieces.number, (addresses, *where_of(pieces), *evidence))


def planning(form: Form, tensors: Sequence[Tensor | None], slots: int) -> Callable[[Tensor], None]:
    """Return what decides and works out the numbers; as ``step_kernels.planning``."""
    peaks: Any = tensors[0]
    return Again(planner(form), peaks.numel(), tensors, slots)


def try_kernels(form: Form, dtypes: Collection[torch.dtype]) -> None:
    """Make and run the kernels of a rule, on a parameter that is thrown away.

    Raises:
        Exception: whatever the compiler, or the trace of the rule, says.
    """
    pieces, rule = plan_pieces(plan_layout([("", ZEROS(64))]), PIECE), form.rule
    steps, begun, *scalars = (ZEROS(4) for _ in ("step", "begun", *rule.scalars))
    hyper, table = ZEROS((1, 1 + form.hypers + len(form.initial)), dtype=torch.float64), ZEROS((4, form.width))
    standing, rules = (ZEROS(len(kind._fields), dtype=torch.float64) + 1 for kind in (Standing, Rules))
    signals, report = [ZEROS(4) for _ in range(4)], ZEROS(REPORT, dtype=torch.float64)
    evidence, group_of = pieces.new_evidence(), ZEROS(4, dtype=torch.int32)
    pairs = list(itertools.product({*dtypes, torch.float32}, dtypes))
    with ThreadPoolExecutor() as pool:  # a compiler runs on one core
        jobs: list[Future[Any]] = [pool.submit(measurer, kind) for kind in {kind for kind, _ in pairs}]
        jobs += [pool.submit(update_launcher, form, CPU, kind, dtype, False, True) for kind, dtype in pairs]
        jobs.append(pool.submit(planner, form))
        for job in jobs:
            job.result()
    for kind, dtype in pairs:
        master, *state = (ZEROS(64) for _ in ("param", *rule.state))
        weights = (master,) if dtype == torch.float32 else (master, ZEROS(64, dtype=dtype))
        grad = ZEROS(64, dtype=kind)
        addresses = torch.tensor([grad.data_ptr(), 0, 0, 0], device="cpu")
        measuring(addresses, pieces, kind, evidence, True)()
        judging = (*evidence, pieces.slot, standing, rules, torch.ones_like(standing), *signals, None)
        planning(form, (*judging, addresses, steps, begun, hyper, group_of, table, *scalars), 4)(report)
        update = update_launcher(form, CPU, kind, dtype, False, True)
        update.again(pieces.number, (*where_of(pieces), table, addresses, *weights, *state))()
