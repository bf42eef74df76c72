"""The two kernels of a step on a GPU, and how they are launched.

The first, one program, looks at what the gather has measured, decides, lets the
loss scale and the counts of steps follow, and works out the numbers of every
slot. The second, one program for each piece of the flat buffers, applies the
rule in one pass: unscale, clip, update and publish. A slot whose step is not to
be taken is not touched, so a skip costs nothing. Rule and judgement are pure
functions of PyTorch; ``kernel_writer`` makes lines of them.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Collection, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra import libdevice  # type: ignore[import-not-found,import-untyped,unused-ignore]

from mixedopt.flat import plan_layout
from mixedopt.judgement import Rules, Standing, judge
from mixedopt.kernel_writer import TYPES, lines_of
from mixedopt.launching import Launcher
from mixedopt.numbering import PIECE
from mixedopt.pieces import Pieces, plan_pieces
from mixedopt.rules import Rule

BLOCK = 1024  # values of a piece that a program of the update works on at once
WARPS = 8
MEASURED = 2048  # pieces that the plan looks at at once
LINES = 512  # slots that it works on at once
PLAN_WARPS = 16
# Columns of the table of numbers before those of the rule: whether to step, and the factor on the gradient.
OWN = 2


def plan_source(rule: Rule | None, hypers: int) -> str:
    """Return the first kernel as text; without a rule it decides only."""
    scalar = torch.zeros((), dtype=torch.float64)
    standing = [f"now_{name}" for name in Standing._fields]
    rules = [f"rule_{name}" for name in Rules._fields]
    examples = Standing(*[scalar] * len(standing)), Rules(*[scalar] * len(rules)), scalar, scalar, scalar
    judging, results = lines_of(judge, examples, [*standing, *rules, "largest", "norm", "culprit"], "j")
    following, (skip, factor, unscaled) = results[: len(standing)], results[len(standing) :]
    scalars = () if rule is None else rule.scalars
    signals = ["scale", "found_inf", "divisor", "multiplier"]
    arguments = ["evidence", "slots_of", "standing", "rules", "told", *(f"signal_{name}" for name in signals), "report"]
    if rule is not None:
        arguments += ["addresses", "steps", "hyper", "group_of", "table", *(f"scalar_{name}" for name in scalars)]
    return "\n".join(
        [
            f"def plan_kernel({', '.join(arguments)}, pieces, slots, MEASURED: tl.constexpr, LINES: tl.constexpr):",
            *(f"    {name} = tl.load(standing + {index})" for index, name in enumerate(standing)),
            *(f"    {name} = tl.load(rules + {index})" for index, name in enumerate(rules)),
            *MEASURE.splitlines(),
            *(f"    {line}" for line in judging),
            "    tl.debug_barrier()",  # everybody has read what is written now
            *(f"    tl.store(standing + {index}, {name})" for index, name in enumerate(following)),
            *(f"    tl.store(told + {index}, {name})" for index, name in enumerate(following)),
            f"    tl.store(signal_scale, {following[0]}.to(tl.float32))",
            f"    tl.store(signal_found_inf, ({skip}).to(tl.float32))",
            f"    tl.store(signal_divisor, tl.div_rn(tl.full((), 1, tl.float32), {factor}))",
            f"    tl.store(signal_multiplier, {factor})",
            f"    tl.store(report, ({skip}).to(tl.float64))",
            f"    tl.store(report + 1, {unscaled})",
            "    tl.store(report + 2, now_scale)",
            f"    tl.store(report + 3, ({factor}).to(tl.float64))",
            *([] if rule is None else numbers_source(rule, hypers, skip, factor)),
            "",
        ]
    )


MEASURE = """\
    offset = tl.arange(0, MEASURED)
    most = tl.zeros([MEASURED], tl.float32)
    total = tl.zeros([MEASURED], tl.float64)
    first_bad = tl.full([MEASURED], 2147483647, tl.int32)
    for first in range(0, pieces, MEASURED):
        place = first + offset
        inside = place < pieces
        peak = tl.load(evidence + place, mask=inside, other=0.0)
        squares = tl.load(evidence + pieces + place, mask=inside, other=0.0)
        finite = peak <= 3.4028234663852886e38
        peak = tl.where(finite, peak, float("inf"))
        most = tl.maximum(most, peak)
        wide = tl.where(finite, peak, 0.0).to(tl.float64)
        total += wide * wide * tl.where(finite, squares, 0.0).to(tl.float64)
        first_bad = tl.minimum(first_bad, tl.where(finite, 2147483647, place))
    largest = tl.max(most, 0).to(tl.float64)
    bad = tl.min(first_bad, 0)
    culprit = tl.load(slots_of + bad, mask=bad < pieces, other=-1).to(tl.float64)
    norm = libdevice.sqrt(tl.sum(total, 0))
    norm = tl.where(largest < float("inf"), norm, largest)
"""


def numbers_source(rule: Rule, hypers: int, skip: str, factor: str) -> list[str]:
    """Return the lines that work out the numbers of every slot."""
    count = count_of(rule, hypers)
    line = torch.zeros(4, dtype=torch.float64)
    single = torch.zeros(4)
    names = ["step", *(f"hyper_{i}" for i in range(hypers)), *(f"old_{name}" for name in rule.scalars)]
    examples = line, (line,) * hypers, (single,) * len(rule.scalars)
    numbering, results = lines_of(rule.numbers, examples, names, "n")
    numbers, scalars = results[:count], results[count:]
    width = width_of(rule, hypers)
    return [
        "    for first in range(0, slots, LINES):",
        "        slot = first + tl.arange(0, LINES)",
        "        inside = slot < slots",
        "        group = tl.load(group_of + slot, mask=inside, other=0)",
        "        address = tl.load(addresses + slot, mask=inside, other=0)",
        "        before = tl.load(steps + slot, mask=inside, other=0.0)",
        f"        active = (address != 0) & (({skip}) == 0)",
        "        step = before.to(tl.float64) + 1.0",
        f"        sign = tl.load(hyper + group * {hypers + 1}, mask=inside, other=1.0).to(tl.float32)",
        *(f"        hyper_{i} = tl.load(hyper + group * {hypers + 1} + {i + 1}, mask=inside)" for i in range(hypers)),
        *(f"        old_{name} = tl.load(scalar_{name} + slot, mask=inside, other=0.0)" for name in rule.scalars),
        *(f"        {text}" for text in numbering),
        f"        row = table + slot * {width}",
        "        tl.store(row, active.to(tl.float32), mask=inside)",
        f"        tl.store(row + 1, sign * {factor}, mask=inside)",
        *(f"        tl.store(row + {OWN + i}, {name}.to(tl.float32), mask=inside)" for i, name in enumerate(numbers)),
        "        tl.store(steps + slot, before + active.to(tl.float32), mask=inside)",
        *(
            f"        tl.store(scalar_{name} + slot, tl.where(active, {new}, old_{name}), mask=inside)"
            for name, new in zip(rule.scalars, scalars, strict=True)
        ),
    ]


def update_source(rule: Rule, hypers: int, grads: torch.dtype, half: bool, split: bool) -> str:
    """Return the second kernel as text.

    A mask that may end anywhere forbids wide loads, so whole pieces go without one.
    """
    count = count_of(rule, hypers)
    kept = ["model", "remainder"] if split else ["master", *(["model"] if half else [])]
    arguments = ["slots_of", "starts", "withins", "counts", "table", "addresses", *kept]
    arguments += [f"state_{name}" for name in rule.state]
    return "\n".join(
        [
            f"def update_kernel({', '.join(arguments)},",
            "        PIECE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):",
            "    piece = tl.program_id(0)",
            "    slot = tl.load(slots_of + piece)",
            "    if slot >= 0:",
            f"        row = table + slot * {width_of(rule, hypers)}",
            "        if tl.load(row) != 0:",
            "            factor = tl.load(row + 1)",
            *(f"            n{i} = tl.load(row + {OWN + i})" for i in range(count)),
            "            start = tl.load(starts + piece)",
            "            count = tl.load(counts + piece)",
            f"            grads = tl.load(addresses + slot).to(tl.pointer_type({TYPES[grads]}))",
            "            grads += tl.load(withins + piece)",
            "            if ALIGNED:",
            "                start = tl.multiple_of(start, 64)",
            "                grads = tl.multiple_of(grads, 16)",
            "            if count == PIECE:",
            "                for first in range(0, PIECE, BLOCK):",
            "                    offset = first + tl.arange(0, BLOCK)",
            *(f"                    {text}" for text in body_source(rule, count, half, split, "")),
            "            else:",
            "                for first in range(0, count, BLOCK):",
            "                    offset = first + tl.arange(0, BLOCK)",
            "                    inside = offset < count",
            *(f"                    {text}" for text in body_source(rule, count, half, split, ", mask=inside")),
            "",
        ]
    )


def body_source(rule: Rule, count: int, half: bool, split: bool, mask: str) -> list[str]:
    """Return the lines that step some values."""
    wide = [torch.zeros(4) for _ in range(2 + len(rule.state))]
    examples = wide[0], wide[1], tuple(torch.zeros(()) for _ in range(count)), *wide[2:]
    state = [f"old_{name}" for name in rule.state]
    updating, results = lines_of(
        rule.update, examples, ["param", "grad", *(f"n{i}" for i in range(count)), *state], "u"
    )
    param, *new_state = results
    lines = [
        "place = start + offset",
        f"grad = tl.load(grads + offset{mask}).to(tl.float32) * factor",
        f"param = join(tl.load(model + place{mask}), tl.load(remainder + place{mask}))"
        if split
        else f"param = tl.load(master + place{mask})",
        *(f"old_{name} = tl.load(state_{name} + place{mask})" for name in rule.state),
        *updating,
        *(f"tl.store(state_{name} + place, {new}{mask})" for name, new in zip(rule.state, new_state, strict=True)),
    ]
    if half:
        lines += [
            f"rounded = ({param}).to(model.dtype.element_ty)",
            f"tl.store(model + place, rounded{mask})",
        ]
    if split:
        return [*lines, f"tl.store(remainder + place, remainder_of({param}, rounded){mask})"]
    return [*lines, f"tl.store(master + place, {param}{mask})"]


@functools.cache
def count_of(rule: Rule, hypers: int) -> int:
    """Return how many numbers a rule makes of its hyperparameters."""
    line = torch.ones(1, dtype=torch.float64, device="cpu")
    numbers, _ = rule.numbers(line, (line,) * hypers, (line.float(),) * len(rule.scalars))
    return len(numbers)


def width_of(rule: Rule, hypers: int) -> int:
    """Return the columns of the table of numbers, filled up so that every row is aligned to 16 bytes."""
    return -(-(OWN + count_of(rule, hypers)) // 4) * 4


def kernel_of(source: str, names: dict[str, Any], whole: Sequence[str] = ()) -> Any:
    """Return a kernel made of text; the text is shown in tracebacks, and read by Triton."""
    title = f"<mixedopt kernel {hash(source):x}>"
    linecache.cache[title] = len(source), None, source.splitlines(keepends=True), title
    scope: dict[str, Any] = {"tl": tl, "libdevice": libdevice, **names}
    exec(compile(source, title, "exec"), scope)
    function = scope[source[4 : source.index("(")]]
    function.__module__ = __name__
    return triton.jit(function, do_not_specialize=list(whole))


@functools.cache
def plan_launcher(rule: Rule | None, hypers: int, device: int) -> Launcher:
    """Return the launcher of the first kernel: (pointers in the order of its arguments, pieces, slots)."""
    kernel = kernel_of(plan_source(rule, hypers), {}, ["pieces", "slots"])
    return Launcher(kernel, device, (MEASURED, LINES), PLAN_WARPS)


@functools.cache
def update_launcher(
    rule: Rule, hypers: int, device: int, grads: torch.dtype, model: torch.dtype, split: bool, aligned: bool
) -> Launcher:
    """Return the launcher of the second kernel for gradients and weights of these dtypes."""
    kernel = kernel_of(update_source(rule, hypers, grads, model != torch.float32, split), {})
    return Launcher(kernel, device, (PIECE, BLOCK, aligned), WARPS)


def launch_plan(rule: Rule | None, tensors: Sequence[Tensor], slots: int, hypers: int = 0) -> None:
    """Decide and work out the numbers; see ``plan_source``. In place; no sync.

    Args:
        rule: whose numbers; ``None`` decides only.
        tensors: evidence, slots_of, standing, rules, told, the four signals,
            report; with a rule also addresses, steps, hyper, group_of, table, and its scalars.
        slots: how many numbers of slots there are.
        hypers: how many hyperparameters the rule has.
    """
    plan_launcher(rule, hypers, tensors[0].get_device())(1, tensors, tensors[0].shape[1], slots)


def where_of(pieces: Pieces) -> tuple[Tensor, ...]:
    """Return the first arguments of the second kernel: which values a program steps."""
    return pieces.slot, pieces.start, pieces.within, pieces.count


def try_kernels(rule: Rule, hypers: int, device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Make and run the kernels of a rule, on a parameter that is thrown away.

    Raises:
        Exception: whatever Triton, the compiler or the trace of the rule says.
    """
    from mixedopt.gather_kernels import measure_

    pieces = plan_pieces(plan_layout([("", torch.zeros(64, device="cpu"))]), PIECE).to(device)
    with torch.cuda.device(device):
        for dtype in dtypes:
            grad, master, *state = (torch.zeros(64, device=device) for _ in range(2 + len(rule.state)))
            grad = grad.to(dtype)
            addresses = torch.tensor([grad.data_ptr(), 0, 0, 0], device=device)
            evidence = pieces.new_evidence()
            for aligned in (True, False):
                measure_(addresses, pieces, dtype, evidence, aligned)
            standing = torch.ones(len(Standing._fields), dtype=torch.float64, device=device)
            rules = torch.ones(len(Rules._fields), dtype=torch.float64, device=device)
            signals = [torch.zeros(4, device=device) for _ in range(4)]
            report = torch.zeros(4, dtype=torch.float64, device=device)
            steps, *scalars = (torch.zeros(4, device=device) for _ in range(1 + len(rule.scalars)))
            hyper = torch.zeros((1, 1 + hypers), dtype=torch.float64, device=device)
            group_of = torch.zeros(4, dtype=torch.int32, device=device)
            table = torch.zeros((4, width_of(rule, hypers)), device=device)
            tensors = (evidence, pieces.slot, standing, rules, torch.ones_like(standing), *signals, report)
            launch_plan(rule, (*tensors, addresses, steps, hyper, group_of, table, *scalars), 4, hypers)
            weights = (master, master.to(dtype)) if dtype != torch.float32 else (master,)
            for aligned in (True, False):
                launch = update_launcher(rule, hypers, grad.get_device(), dtype, dtype, False, aligned)
                launch(pieces.number, (*where_of(pieces), table, addresses, *weights, *state))
