"""What a policy makes of a model, as a table: which module, which dtype, why, and what to look at."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.bucket import HALF_DTYPES, beyond_range
from mixedopt.casting import RootOutputs
from mixedopt.functions import not_in_place, spelt
from mixedopt.layers import PLAIN
from mixedopt.policy.dry_run import Calls, dry_run, rule_name
from mixedopt.policy.handle import PolicyHandle, check_model_and_policy, unwrap
from mixedopt.policy.plan import CastPlan, Decision, plan_casts
from mixedopt.policy.rules import CastPolicy

SMALLEST = 2.0**-24  # above zero in fp16
SHORT: Mapping[Any, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# As many equal addends a half sum takes; the next one is less than half a unit in its last place.
STALLS = {torch.float16: 2**11, torch.bfloat16: 2**8}
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase)
SCREEN = 120  # characters of a line
# Column -> characters it keeps, in the order in which columns give way: type, rule, module, type again.
GIVES_WAY = ((1, 14), (5, 18), (0, 28), (1, 8))
ADDED = "added since the conversion"


@dataclass(frozen=True, slots=True)
class Row:
    """One module.

    Attributes:
        module: its dotted name, ``""`` for the model itself.
        type: its class.
        param_dtype: of its own parameters; ``None`` without, ``"mixed"`` if they differ.
        compute_dtype: what it computes in.
        output_dtype: what it returns.
        rule: what decided, as text; ``"added since the conversion"`` where nothing was.
        parameters: how many it owns; tied ones count where they come first.
        bytes: what these take after conversion.
    """

    module: str
    type: str
    param_dtype: torch.dtype | str | None
    compute_dtype: torch.dtype
    output_dtype: torch.dtype
    rule: str
    parameters: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """What ``explain`` found; prints as a table.

    Attributes:
        rows: a module each: all that own parameters or buffers or begin a rule.
        policy: as text.
        dtype: the half format.
        parameters: in the whole model.
        bytes: what they take after conversion, without masters.
        fp32_bytes: what they take in fp32.
        warnings: a line each.
    """

    rows: tuple[Row, ...]
    policy: str
    dtype: torch.dtype
    parameters: int
    bytes: int
    fp32_bytes: int
    warnings: tuple[str, ...]

    def __str__(self) -> str:
        head = ("module", "type", "param", "compute", "output", "rule", "parameters", "bytes")
        lines = [head, *_folded(self.rows)]
        widths = _widths(lines)
        text = [_aligned(line, widths) for line in lines]
        text.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
        saved = f"{self.fp32_bytes:,} bytes in fp32"
        totals = f"{self.parameters:,} parameters, {self.bytes:,} bytes; {saved}. Policy: {self.policy}"
        below = [line for entry in (totals, *(f"! {warning}" for warning in self.warnings)) for line in _wrapped(entry)]
        return "\n".join([*text, "", *below])


def explain(
    model: nn.Module,
    policy: CastPolicy | None = None,
    dtype: torch.dtype = torch.float16,
    *,
    inputs: Tensor | tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> Explanation:
    """Say what a policy makes of a model, and why. Changes nothing.

    Args:
        model: converted or not.
        policy: ``None`` is the one in force, else ``CastPolicy.default()``.
        dtype: fp16 or bf16; that of a conversion in force counts.
        inputs: one batch, for a dry run (in eval mode, without gradients) that
            finds functions no module rule reaches and ids that repeat: a
            tensor, a tuple of arguments, or a dict of keyword arguments. An
            fp32 model does not show where its code casts up itself; the same
            model converted does.

    Returns:
        Rows, totals and warnings; ``print`` shows them as a table.

    Raises:
        TypeError: if this is no model, no policy or no input.
        ValueError: as ``convert``, or if the dry run fails.

    Syncs: a few host reads per parameter.
    """
    check_model_and_policy("explain", model, policy)
    if inputs is not None and not isinstance(inputs, (Tensor, tuple, Mapping)):
        raise TypeError(f"explain(inputs={type(inputs).__name__}): must be a tensor, a tuple of arguments, or a dict.")
    root = unwrap(model)
    plan = _plan(root, policy, dtype)
    calls = None if inputs is None else dry_run(root, inputs)
    rows = tuple(_rows(plan))
    params = list(root.parameters())
    return Explanation(
        rows,
        plan.text,
        plan.dtype,
        sum(p.numel() for p in params),
        sum(row.bytes for row in rows),
        sum(4 * p.numel() if p.is_floating_point() else p.numel() * p.element_size() for p in params),
        tuple(_warnings(plan, calls)),
    )


def _plan(root: nn.Module, policy: CastPolicy | None, dtype: torch.dtype) -> CastPlan:
    handles = [hook.handle for hook in root._forward_hooks.values() if isinstance(hook, RootOutputs)]
    handle = next((h for h in handles if isinstance(h, PolicyHandle)), None)
    if handles and handle is None:
        raise ValueError(
            "explain(model): the model is converted, but what converted it, an optimizer or a handle, is gone, and the "
            "policy with it. Keep what convert() returns, or the optimizer; a copy of a converted model has neither."
        )
    if handle is None:
        return plan_casts(policy or CastPolicy.default(), root, dtype)
    if policy is not None and policy != handle.plan.policy:
        raise ValueError(
            f"explain(policy=...): the model is converted already, by {handle.plan.text!r}. Leave policy out to see "
            "that, or undo the conversion first with its handle's remove()."
        )
    return handle.plan


def _rows(plan: CastPlan) -> Iterator[Row]:
    converted = any(isinstance(hook, RootOutputs) for hook in plan.model._forward_hooks.values())
    dtypes = {p: p.dtype if converted else plan.dtypes.get(n, p.dtype) for n, p in plan.model.named_parameters()}
    counted: set[nn.Parameter] = set()
    named: dict[str, Decision | None] = {}
    for name, module in plan.model.named_modules():
        decided = named[name] = plan.decisions.get(module)
        own = list(module.parameters(recurse=False))
        begins = not name or named.get(name.rpartition(".")[0]) != decided
        if not (own or begins or any(True for _ in module.buffers(recurse=False))):
            continue
        new = [p for p in own if p not in counted]
        counted.update(own)
        kinds = {dtypes[p] for p in own}
        untouched = next((d for d in kinds if d.is_floating_point), torch.float32)
        yield Row(
            name,
            PLAIN.get(type(module), type(module)).__name__,
            None if not kinds else kinds.pop() if len(kinds) == 1 else "mixed",
            decided.compute if decided else untouched,
            plan.output if not name else decided.output if decided else untouched,
            decided.reason if decided else ADDED,
            sum(p.numel() for p in new),
            sum(p.numel() * dtypes[p].itemsize for p in new),
        )


# -- the table ---------------------------------------------------------------------------------------------------------


def _folded(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return lines of cells, those that differ in the numbers of their names only as one line."""
    alike: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        key = (row.type, row.param_dtype, row.compute_dtype, row.output_dtype, row.rule, row.parameters, row.bytes)
        alike.setdefault((_shape(row.module), *key), []).append(row)
    lines = []
    for same in alike.values():
        of = {row.module: row for row in same}
        lines += [_cells(name, [of[each] for each in names]) for name, names in _merged(list(of)).items()]
    return lines


def _cells(name: str, rows: Sequence[Row]) -> tuple[str, ...]:
    first = rows[0]
    size, bytes_ = sum(row.parameters for row in rows), sum(row.bytes for row in rows)
    kinds = (first.param_dtype, first.compute_dtype, first.output_dtype)
    dtypes = [SHORT.get(kind, str(kind or "").removeprefix("torch.")) for kind in kinds]
    rule = first.rule.replace("<torch.nn.", "<")
    return (name or "(model)", first.type, *dtypes, rule, f"{size:,}" if size else "", f"{bytes_:,}" if size else "")


def _shape(name: str) -> str:
    """Return the name with its numbers left out."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", name)


def _merged(names: Sequence[str]) -> dict[str, list[str]]:
    """Return names of one shape, the last of their numbers first, as ranges: ``layers.0-5,7.q`` -> what it stands for.

    A range stands for no name that is not there: of 0.0, 0.1 and 1.0 it makes 0.0-1 and 1.0.
    """
    found = {tuple(name.split(".")): [name] for name in names}
    for at in reversed(range(len(next(iter(found))))):
        groups: dict[tuple[Any, ...], dict[str, list[str]]] = {}
        for parts, held in found.items():
            groups.setdefault((parts[:at], parts[at + 1 :]), {})[parts[at]] = held
        found = {
            (*before, _runs(list(group)), *after): [name for held in group.values() for name in held]
            for (before, after), group in groups.items()
        }
    return {".".join(parts): held for parts, held in found.items()}


def _runs(parts: Sequence[str]) -> str:
    """Return numbers as text: ``0-2,5``. One part alone need be no number."""
    if len(parts) == 1:
        return parts[0]
    runs: list[list[int]] = []
    for number in sorted(map(int, parts)):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _widths(lines: Sequence[tuple[str, ...]]) -> list[int]:
    """Return the widths of the columns; some give way if a line would not fit the screen, numbers never."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for column, least in GIVES_WAY:
        excess = sum(widths) + 2 * len(widths) - 2 - SCREEN
        if excess > 0:
            widths[column] = min(widths[column], max(least, widths[column] - excess))
    return widths


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [_shortened(c, w, w // (2 if i else 8)) for i, (c, w) in enumerate(zip(cells, widths, strict=True))]
    numbers = len(cells) - 2  # the last two columns
    padded = [f"{c:<{w}}" if i < numbers else f"{c:>{w}}" for i, (c, w) in enumerate(zip(shown, widths, strict=True))]
    return "  ".join(padded).rstrip()


def _shortened(cell: str, width: int, front: int) -> str:
    """Return the cell, some of its middle left out if it is too long. The end of a module's name says most."""
    return cell if len(cell) <= width else f"{cell[:front]}~{cell[len(cell) - (width - front - 1) :]}"


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, SCREEN, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


# -- the warnings ------------------------------------------------------------------------------------------------------


def _warnings(plan: CastPlan, calls: Calls | None) -> Iterator[str]:
    if calls is not None:
        yield from _call_warnings(plan, calls)
    yield from _dimension_warnings(plan, set() if calls is None else calls.products)
    yield from _range_warnings(plan)
    if calls is not None:
        yield from _id_warnings(plan, calls)
    unknown = [(name, m) for name, m in plan.model.named_modules() if m not in plan.decisions]
    added = [name for name, module in unknown if any(True for _ in module.parameters(recurse=False))]
    if added:
        yield (
            f"{_several(added)}: {ADDED}, so no cast stands before it. Undo the conversion with its handle's remove(), "
            "and convert anew."
        )


def _call_warnings(plan: CastPlan, calls: Calls) -> Iterator[str]:
    half = {name for name, m in plan.model.named_modules() if m in plan.decisions and _computes_half(plan, m)}
    for kind, modules in calls.functions.items():
        functions = sorted(
            {f for n in modules if n in half for f in modules[n] if spelt(f) not in plan.policy.functions}
        )
        if not functions:
            continue
        where = _several([n or "(model)" for n in modules if n in half and modules[n] & set(functions)])
        if kind.safe:
            what = "Half kernels accumulate it in fp32 and round once; keep_functions() only if you want fp32 results"
        else:
            half_only = "In half" if calls.half else "In half, unless the code casts up itself,"
            what = f"{half_only} it loses small terms or overflows: {_keep_functions(functions)}"
        yield f"{', '.join(functions)} called in {where}: no module rule reaches that. {what}."


def _computes_half(plan: CastPlan, module: nn.Module) -> bool:
    return plan.decisions[module].compute == plan.dtype


def _keep_functions(functions: Sequence[str]) -> str:
    """Return the call that keeps these in fp32, and which must be written in another way to be reached."""
    kept = ", ".join(repr(name) for name in dict.fromkeys(map(rule_name, functions)))
    other = [f"{not_in_place(name)} for {name}" for name in functions if not_in_place(name) != name]
    return f"policy.keep_functions({kept})" + (f", and write {', '.join(other)}" if other else "")


def _dimension_warnings(plan: CastPlan, multiplied: set[nn.Parameter]) -> Iterator[str]:
    found: dict[tuple[str, int], list[str]] = {}
    products = {p for m in plan.model.modules() if isinstance(m, PRODUCTS) for p in m.parameters(recurse=False)}
    kinds = {p: type(m).__name__ for m in plan.model.modules() for p in m.parameters(recurse=False)}
    for name, param in plan.model.named_parameters():
        if plan.dtypes.get(name) in HALF_DTYPES and param.dim() >= 2 and param in products | multiplied:
            for size in dict.fromkeys(param.shape[:2]):
                if size > 8 and size % 8:
                    found.setdefault((kinds[param], size), []).append(name)
    for (_, size), names in found.items():
        eight, many = -(-size // 8) * 8, -(-size // 64) * 64
        pad = f"{eight}" if eight == many else f"{eight} (or {many})"
        yield f"a dimension of {size} in {_several(names)}: tensor cores want a multiple of 8. Pad to {pad}."


def _range_warnings(plan: CastPlan) -> Iterator[str]:
    for name, param in plan.model.named_parameters():
        half = plan.dtypes.get(name)
        if half not in HALF_DTYPES or param.numel() == 0 or param.is_meta:
            continue
        remedy = f"policy.keep({name!r})" + (" or dtype=torch.bfloat16" if half == torch.float16 else "")
        if (size := beyond_range(param.detach(), half)) is not None:
            yield f"{name} holds {size:.4g}, which {half} cannot: {remedy}."
        elif half == torch.float16:
            sizes = param.detach().abs()
            nonzero = int((sizes > 0).sum())
            tiny = int(((sizes > 0) & (sizes < SMALLEST)).sum())
            if tiny > nonzero / 2:
                yield f"{name}: {tiny:,} of {nonzero:,} values are below 2**-24, the least fp16 holds: {remedy}."


def _id_warnings(plan: CastPlan, calls: Calls) -> Iterator[str]:
    for name, param in plan.model.named_parameters():
        half, most = plan.dtypes.get(name), calls.repeats.get(param, 0)
        if half in HALF_DTYPES and most > STALLS[half]:
            yield (
                f"{name}: one id occurs {most:,} times in a batch. Where gradients are added up in half, as torch does "
                f"on CPU, equal ones stop counting after {STALLS[half]:,}: policy.keep({name!r})."
            )


def _several(names: Sequence[str]) -> str:
    """Return the names, those that differ in numbers only as one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_shape(name), []).append(name)
    shown = [name for same in alike.values() for name in _merged(same)]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
