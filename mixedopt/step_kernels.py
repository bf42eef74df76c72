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
import itertools
import linecache
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
import triton.language as tl  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor
from triton.language.extra import libdevice  # type: ignore[import-not-found,import-untyped,unused-ignore]

from mixedopt.dialects import TRITON
from mixedopt.flat import plan_layout
from mixedopt.forms import OWN, ZEROS, Form, lines_of_judgement, lines_of_numbers, lines_of_update, where_of
from mixedopt.gather_kernels import gather_ as gather_
from mixedopt.gather_kernels import measuring as measuring
from mixedopt.gather_kernels import restore_
from mixedopt.judgement import NEXT_SCALE, REPORT, Rules, Standing
from mixedopt.kernel_writer import lines_of
from mixedopt.launching import Launcher
from mixedopt.numbering import PIECE
from mixedopt.pieces import plan_pieces
from mixedopt.split import join, remainder_of

BLOCK = 1024  # values of a piece that a program of the update works on at once
WARPS = 8
MEASURED = 2048  # pieces that the plan looks at at once
LINES = 512  # slots that it works on at once
PLAN_WARPS = 16


def plan_source(form: Form | None) -> str:
    """Return the first kernel as text; without a rule it decides only."""
    standing = [f"now_{name}" for name in Standing._fields]
    rules = [f"rule_{name}" for name in Rules._fields]
    judging, results = lines_of_judgement(TRITON)
    following, (skip, factor, unscaled) = results[: len(standing)], results[len(standing) :]
    scalars = () if form is None else form.rule.scalars
    signals = ["scale", "found_inf", "divisor", "multiplier"]
    arguments = ["peaks", "sums", "slots_of", "standing", "rules", "told"]
    arguments += [*(f"signal_{name}" for name in signals), "report"]
    if form is not None:
        arguments += [
            "addresses",
            "steps",
            "begun",
            "hyper",
            "group_of",
            "table",
            *(f"scalar_{name}" for name in scalars),
        ]
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
            f"    next_scale = (report + {NEXT_SCALE}).to(tl.pointer_type(tl.float32), bitcast=True)",
            f"    tl.store(next_scale, {following[0]}.to(tl.float32))",
            *([] if form is None else numbers_source(form, skip, factor)),
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
        peak = tl.load(peaks + place, mask=inside, other=0.0)
        squares = tl.load(sums + place, mask=inside, other=0.0)
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


def numbers_source(form: Form, skip: str, factor: str) -> list[str]:
    """Return the lines that work out the numbers of every slot."""
    rule, hypers = form.rule, form.hypers
    numbering, results = lines_of_numbers(form, TRITON)
    numbers, scalars = results[: form.numbers], results[form.numbers :]
    columns = [*(f"hyper_{i}" for i in range(hypers)), *(f"initial_{name}" for name in form.initial)]
    written = ["active", f"sign * {factor}", *numbers, "first_step", *(f"initial_{name}" for name in form.initial)]
    return [
        "    for first in range(0, slots, LINES):",
        "        slot = first + tl.arange(0, LINES)",
        "        inside = slot < slots",
        "        group = tl.load(group_of + slot, mask=inside, other=0)",
        "        address = tl.load(addresses + slot, mask=inside, other=0)",
        "        before = tl.load(steps + slot, mask=inside, other=0.0)",
        f"        active = (address != 0) & (({skip}) == 0)",
        "        first_step = tl.load(begun + slot, mask=inside, other=0.0) == 0",
        "        step = before.to(tl.float64) + 1.0",
        f"        own = hyper + group * {1 + len(columns)}",
        "        sign = tl.load(own, mask=inside, other=1.0).to(tl.float32)",
        *(f"        {name} = tl.load(own + {1 + i}, mask=inside, other=0.0)" for i, name in enumerate(columns)),
        *(f"        old_{name} = tl.load(scalar_{name} + slot, mask=inside, other=0.0)" for name in rule.scalars),
        *(
            f"        old_{name} = tl.where(first_step, initial_{name}.to(tl.float32), old_{name})"
            for name in rule.scalars
            if name in form.initial
        ),
        *(f"        {text}" for text in numbering),
        f"        row = table + slot * {form.width}",
        *(f"        tl.store(row + {i}, ({value}).to(tl.float32), mask=inside)" for i, value in enumerate(written)),
        "        tl.store(steps + slot, before + active.to(tl.float32), mask=inside)",
        "        tl.store(begun + slot, 1.0, mask=inside & active)",
        *(
            f"        tl.store(scalar_{name} + slot, {new}, mask=inside & active)"
            for name, new in zip(rule.scalars, scalars, strict=True)
        ),
    ]


def update_source(form: Form, grads: torch.dtype, model: torch.dtype, split: bool) -> str:
    """Return the second kernel as text.

    A mask that may end anywhere forbids wide loads, so whole pieces go without one.
    """
    rule, count = form.rule, form.numbers
    kept = ["model", "remainder"] if split else ["master", *(["model"] if model != torch.float32 else [])]
    arguments = ["slots_of", "starts", "withins", "counts", "table", "addresses", *kept]
    arguments += [f"state_{name}" for name in rule.state]
    return "\n".join(
        [
            f"def update_kernel({', '.join(arguments)},",
            "        PIECE: tl.constexpr, BLOCK: tl.constexpr, ALIGNED: tl.constexpr):",
            "    piece = tl.program_id(0)",
            "    slot = tl.load(slots_of + piece)",
            "    if slot >= 0:",
            f"        row = table + slot * {form.width}",
            "        if tl.load(row) != 0:",
            "            factor = tl.load(row + 1)",
            *(f"            n{i} = tl.load(row + {OWN + i})" for i in range(count)),
            f"            first_step = tl.load(row + {OWN + count})",
            *(f"            initial_{n} = tl.load(row + {OWN + count + 1 + i})" for i, n in enumerate(form.initial)),
            "            start = tl.load(starts + piece)",
            "            count = tl.load(counts + piece)",
            f"            grads = tl.load(addresses + slot).to(tl.pointer_type({TRITON.types[grads]}))",
            "            grads += tl.load(withins + piece)",
            "            if ALIGNED:",
            "                start = tl.multiple_of(start, 64)",
            "                grads = tl.multiple_of(grads, 16)",
            "            if count == PIECE:",
            "                for first in range(0, PIECE, BLOCK):",
            "                    offset = first + tl.arange(0, BLOCK)",
            *(f"                    {text}" for text in body_source(form, model, split, "")),
            "            else:",
            "                for first in range(0, count, BLOCK):",
            "                    offset = first + tl.arange(0, BLOCK)",
            "                    inside = offset < count",
            *(f"                    {text}" for text in body_source(form, model, split, ", mask=inside")),
            "",
        ]
    )


def body_source(form: Form, model: torch.dtype, split: bool, mask: str) -> list[str]:
    """Return the lines that step some values."""
    rule = form.rule
    updating, (param, *new_state) = lines_of_update(form, TRITON)
    half, bits = ZEROS(4, dtype=model), ZEROS(4, dtype=torch.int16)
    kept = [f"param = tl.load(master + place{mask})"]
    published = [f"tl.store(master + place, {param}{mask})"]
    if model != torch.float32:
        published += [
            f"rounded = ({param}).to(model.dtype.element_ty)",
            f"tl.store(model + place, rounded{mask})",
        ]
    if split:
        joining, (joined,) = lines_of(join, (half, bits), ["half", "bits"], "q")
        splitting, (rest,) = lines_of(remainder_of, (ZEROS(4), half), [param, "rounded"], "r")
        loads = [f"half = tl.load(model + place{mask})", f"bits = tl.load(remainder + place{mask})"]
        kept = [*loads, *joining, f"param = {joined}"]
        published = [*published[1:], *splitting, f"tl.store(remainder + place, {rest}{mask})"]
    return [
        "place = start + offset",
        f"grad = tl.load(grads + offset{mask}).to(tl.float32) * factor",
        *kept,
        *(f"old_{name} = tl.load(state_{name} + place{mask})" for name in rule.state),
        *(
            f"old_{name} = tl.where(first_step != 0, initial_{name}, old_{name})"
            for name in rule.state
            if name in form.initial
        ),
        *updating,
        *(f"tl.store(state_{name} + place, {new}{mask})" for name, new in zip(rule.state, new_state, strict=True)),
        *published,
    ]


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
def plan_launcher(form: Form | None, device: int) -> Launcher:
    """Return the launcher of the first kernel: (pointers in the order of its arguments, pieces, slots)."""
    kernel = kernel_of(plan_source(form), {}, ["pieces", "slots"])
    return Launcher(kernel, device, (MEASURED, LINES), PLAN_WARPS)


@functools.cache
def update_launcher(
    form: Form, device: torch.device, grads: torch.dtype, model: torch.dtype, split: bool, aligned: bool
) -> Launcher:
    """Return the launcher of the second kernel for gradients and weights of these dtypes."""
    kernel = kernel_of(update_source(form, grads, model, split), {})
    return Launcher(kernel, device.index or 0, (PIECE, BLOCK, aligned), WARPS)


def planning(form: Form | None, tensors: Sequence[Tensor | None], slots: int) -> Callable[[Tensor], None]:
    """Return what decides and works out the numbers, again and again; see ``plan_source``. In place; no sync.

    Args:
        form: whose numbers; ``None`` decides only.
        tensors: both rows of the evidence, slots_of, standing, rules, told, the four
            signals, ``None`` for the report, which each call is given; with a form also
            addresses, steps, begun, hyper, group_of, table, and the rule's scalars.
        slots: how many numbers of slots there are.
    """
    peaks: Any = tensors[0]
    return plan_launcher(form, peaks.get_device()).again(1, tensors, peaks.numel(), slots)


def try_judging(device: torch.device, dtypes: Collection[torch.dtype]) -> None:
    """Make and run what needs no rule: gathering to fp32, and the decision.

    Raises:
        Exception: whatever Triton or the compiler says.
    """
    pieces = plan_pieces(plan_layout([("", ZEROS(64))]), PIECE).to(device)
    zeros = functools.partial(ZEROS, device=device)
    standing, rules = (zeros(len(kind._fields), dtype=torch.float64) + 1 for kind in (Standing, Rules))
    with torch.cuda.device(device):
        for dtype, aligned in itertools.product(dtypes, (True, False)):
            grad, evidence = zeros(64, dtype=dtype), pieces.new_evidence()
            addresses = torch.tensor([grad.data_ptr(), 0, 0, 0], device=device)
            gather_(addresses, pieces, dtype, zeros(64), evidence, aligned)
        signals, report = [zeros(4) for _ in range(4)], zeros(REPORT, dtype=torch.float64)
        judging = (*evidence, pieces.slot, standing, rules, torch.ones_like(standing), *signals, None)
        planning(None, judging, 4)(report)
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        restore_(signals[0], nothing, nothing, nothing)


def try_kernels(form: Form, device: torch.device, dtypes: Collection[torch.dtype], *, split: bool) -> None:
    """Make and run the kernels of a rule, on a parameter that is thrown away.

    Raises:
        Exception: whatever Triton, the compiler or the trace of the rule says.
    """
    pieces = plan_pieces(plan_layout([("", ZEROS(64))]), PIECE).to(device)
    rule, zeros = form.rule, functools.partial(ZEROS, device=device)
    steps, begun, *scalars = (zeros(4) for _ in ("step", "begun", *rule.scalars))
    hyper, table = zeros((1, 1 + form.hypers + len(form.initial)), dtype=torch.float64), zeros((4, form.width))
    standing, rules = (zeros(len(kind._fields), dtype=torch.float64) + 1 for kind in (Standing, Rules))
    signals, report = [zeros(4) for _ in range(4)], zeros(REPORT, dtype=torch.float64)
    evidence, group_of = pieces.new_evidence(), zeros(4, dtype=torch.int32)
    with torch.cuda.device(device):
        for dtype, aligned in itertools.product(dtypes, (True, False)):
            master, *state = (zeros(64) for _ in ("param", *rule.state))
            weights = (master,) if dtype == torch.float32 else (master, zeros(64, dtype=dtype))
            splits = split and dtype != torch.float32
            if splits:
                weights = (zeros(64, dtype=dtype), zeros(64, dtype=torch.int16))
            for kind in {dtype, torch.float32}:
                grad = zeros(64, dtype=kind)
                addresses = torch.tensor([grad.data_ptr(), 0, 0, 0], device=device)
                measuring(addresses, pieces, kind, evidence, aligned)()
                judging = (*evidence, pieces.slot, standing, rules, torch.ones_like(standing), *signals, None)
                planning(form, (*judging, addresses, steps, begun, hyper, group_of, table, *scalars), 4)(report)
                launch = update_launcher(form, device, kind, dtype, splits, aligned)
                launch.again(pieces.number, (*where_of(pieces), table, addresses, *weights, *state))()
