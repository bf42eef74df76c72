"""What a policy makes of a model, as a table: which module, which dtype, why, and what to look at."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from mixedopt.casting import RootOutputs
from mixedopt.masters import HALF_DTYPES, beyond_range
from mixedopt.policy.dry_run import Calls, dry_run
from mixedopt.policy.handle import PolicyHandle, check_model_and_policy, unwrap
from mixedopt.policy.plan import CastPlan, plan_casts
from mixedopt.policy.rules import CastPolicy

VANISHES = 2.0**-24  # the smallest value that fp16 holds
SHORT: Mapping[Any, str] = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
# As many equal addends a half sum takes; the next one is less than half a unit in its last place.
STALLS = {torch.float16: 2**11, torch.bfloat16: 2**8}
PRODUCTS = (nn.Linear, nn.modules.conv._ConvNd, nn.MultiheadAttention, nn.RNNBase)
MOST = (36, 16, 7, 7, 7, 26, 14, 14)  # characters of a column


@dataclass(frozen=True, slots=True)
class Row:
    """One module.

    Attributes:
        module: its dotted name, ``""`` for the model itself.
        type: its class.
        param_dtype: of its own parameters; ``None`` without, ``"mixed"`` if they differ.
        compute_dtype: what it computes in.
        output_dtype: what it returns.
        rule: what decided, as text.
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
        widths = [min(max(len(line[i]) for line in lines), most) for i, most in enumerate(MOST)]
        text = [_aligned(line, widths) for line in lines]
        text.insert(1, "-" * (sum(widths) + 2 * len(widths) - 2))
        saved = f"{self.fp32_bytes:,} bytes in fp32"
        text.append(f"\n{self.parameters:,} parameters, {self.bytes:,} bytes; {saved}. Policy: {self.policy}")
        return "\n".join([*text, *(f"! {warning}" for warning in self.warnings)])


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
            tensor, a tuple of arguments, or a dict of keyword arguments.

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
            "policy with it. Keep that object, or explain the model before converting it."
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
    dtypes = {p: plan.dtypes.get(name, p.dtype) for name, p in plan.model.named_parameters()}
    counted: set[nn.Parameter] = set()
    above: dict[str, str] = {}
    for name, module in plan.model.named_modules():
        decided = plan.decisions[module]
        above[name] = decided.reason
        own = list(module.parameters(recurse=False))
        begins = not name or above.get(name.rpartition(".")[0]) != decided.reason
        if not (own or begins or any(True for _ in module.buffers(recurse=False))):
            continue
        new = [p for p in own if p not in counted]
        counted.update(own)
        kinds = {dtypes[p] for p in own}
        yield Row(
            name,
            type(module).__name__.removeprefix("Mixed"),
            None if not kinds else kinds.pop() if len(kinds) == 1 else "mixed",
            decided.compute,
            decided.output if name else plan.output,
            decided.reason,
            sum(p.numel() for p in new),
            sum(p.numel() * dtypes[p].itemsize for p in new),
        )


# -- the table ---------------------------------------------------------------------------------------------------------


def _folded(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return lines of cells, those that differ in one number only as one line."""
    lines: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        lines.setdefault(
            (_shape(row.module), row.type, row.param_dtype, row.compute_dtype, row.rule, row.bytes), []
        ).append(row)
    return [_cells(same) for same in lines.values()]


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    first = rows[0]
    name = first.module or "(model)"
    if len(rows) > 1:
        name = f"{_ranges([row.module for row in rows])} ({len(rows)}x)"
    size, bytes_ = sum(row.parameters for row in rows), sum(row.bytes for row in rows)
    dtypes = [SHORT.get(d, str(d or "")) for d in (first.param_dtype, first.compute_dtype, first.output_dtype)]
    return (name, first.type, *dtypes, first.rule, f"{size:,}" if size else "", f"{bytes_:,}" if size else "")


def _shape(name: str) -> str:
    """Return the name with its numbers left out."""
    return re.sub(r"(^|\.)\d+(?=\.|$)", r"\1#", name)


def _ranges(names: Sequence[str]) -> str:
    """Return one name for several that differ in their numbers: ``layers.0-11.q``."""
    columns = zip(*(name.split(".") for name in names), strict=True)
    return ".".join(c[0] if len(set(c)) == 1 else f"{min(c, key=int)}-{max(c, key=int)}" for c in columns)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    shown = [_shortened(cell, width) for cell, width in zip(cells, widths, strict=True)]
    numbers = len(cells) - 2  # the last two columns
    padded = [f"{c:<{w}}" if i < numbers else f"{c:>{w}}" for i, (c, w) in enumerate(zip(shown, widths, strict=True))]
    return "  ".join(padded).rstrip()


def _shortened(cell: str, width: int) -> str:
    """Return the cell, its middle left out if it is too long."""
    front = width // 2
    return cell if len(cell) <= width else f"{cell[:front]}~{cell[len(cell) - (width - front - 1) :]}"


# -- the warnings ------------------------------------------------------------------------------------------------------


def _warnings(plan: CastPlan, calls: Calls | None) -> Iterator[str]:
    if calls is not None:
        yield from _call_warnings(plan, calls)
    yield from _dimension_warnings(plan)
    yield from _range_warnings(plan)
    if calls is not None:
        yield from _id_warnings(plan, calls)


def _call_warnings(plan: CastPlan, calls: Calls) -> Iterator[str]:
    for kind, modules in calls.functions.items():
        names = [n for n in modules if plan.decisions[plan.model.get_submodule(n)].compute == plan.dtype]
        functions = sorted({f for n in names for f in modules[n]} - set(plan.policy.functions))
        if not functions:
            continue
        if kind.safe:
            what = "Half kernels accumulate it in fp32 and round once; keep_functions() only if you want fp32 results"
        else:
            what = f"In half it loses small terms or overflows: policy.keep_functions({functions[0]!r})"
        where = _several([n or "(model)" for n in names if set(functions) & modules[n]])
        yield f"{', '.join(functions)} called in {where}: no module rule reaches that. {what}."


def _dimension_warnings(plan: CastPlan) -> Iterator[str]:
    found: dict[tuple[str, int], list[str]] = {}
    tied = {id(p) for m in plan.model.modules() if isinstance(m, PRODUCTS) for p in m.parameters(recurse=False)}
    for name, module in plan.model.named_modules():
        products = isinstance(module, PRODUCTS)
        for param_name, param in module.named_parameters(recurse=False):
            full = f"{name}.{param_name}".lstrip(".")
            if plan.dtypes.get(full) not in HALF_DTYPES or param.dim() < 2 or not (products or id(param) in tied):
                continue
            for size in param.shape[:2]:
                if size > 8 and size % 8:
                    found.setdefault((type(module).__name__, size), []).append(full)
    for (_, size), names in found.items():
        eight, many = -(-size // 8) * 8, -(-size // 64) * 64
        pad = f"{eight}" if eight == many else f"{eight} (or {many})"
        yield f"a dimension of {size} in {_several(names)}: tensor cores want a multiple of 8. Pad to {pad}."


def _range_warnings(plan: CastPlan) -> Iterator[str]:
    for name, param in plan.model.named_parameters():
        half = plan.dtypes.get(name)
        if half not in HALF_DTYPES or param.numel() == 0:
            continue
        remedy = f"policy.keep({name!r})" + (" or dtype=torch.bfloat16" if half == torch.float16 else "")
        if (size := beyond_range(param.detach(), half)) is not None:
            yield f"{name} holds {size:.4g}, which {half} cannot: {remedy}."
        elif half == torch.float16:
            values = param.detach()
            nonzero = int((values != 0).sum())
            tiny = int(((values.abs() < VANISHES) & (values != 0)).sum())
            if tiny > nonzero / 2:
                yield f"{name}: {tiny:,} of {nonzero:,} values are below 2**-24 and vanish in fp16: {remedy}."


def _id_warnings(plan: CastPlan, calls: Calls) -> Iterator[str]:
    for name, most in calls.repeats.items():
        weight = f"{name}.weight".lstrip(".")
        half = plan.dtypes.get(weight)
        if half in HALF_DTYPES and most > STALLS[half]:
            yield (
                f"{weight}: one id occurs {most:,} times in a batch; a sum of equal half gradients stops growing after "
                f"{STALLS[half]:,}. policy.keep({name!r})."
            )


def _several(names: Sequence[str]) -> str:
    """Return the names, those that differ in one number only as one."""
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(_shape(name), []).append(name)
    shown = [_ranges(same) for same in alike.values()]
    return ", ".join(shown[:3]) + (f" and {len(shown) - 3} more" if len(shown) > 3 else "")
