"""The kernels of a CPU: conversions, measures and steps are torch's, bit for bit or nearly, on any compiler."""

from __future__ import annotations

import logging
import math
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same, masters_of, train, wrapped
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from written import EVERY_RULE, of_rule, rule_of

from mixedopt import MixedPrecisionOptimizer, cxx, host_kernels, host_sources
from mixedopt.compiled import CompiledTier, covering_rule
from mixedopt.flat import plan_layout
from mixedopt.forms import ZEROS, Form, where_of
from mixedopt.host_kernels import Again, made, measuring, planning, update_launcher
from mixedopt.host_sources import HEAD, LANES, PUBLISH, STORED, function
from mixedopt.judgement import NEXT_SCALE, REPORT, Rules, Standing, rules_of
from mixedopt.loss_scale import DynamicLossScale
from mixedopt.numbering import PIECE
from mixedopt.pieces import combine, plan_pieces

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# One rounding to fp32 of what two libraries of fp64 functions differ by in the last place.
ONE_ULP = 2.0**-23
# Sums of 32 squares in fp32, of those in fp64.
NORM = 1e-6


def a_rule(name: str, number: int) -> tuple[Form, dict[str, Any]]:
    """Return the form of a rule, and a group of parameters that it serves."""
    rule, group = rule_of(name, number)
    return Form(rule, len(rule.hyper(group)), tuple(rule.initial(group))), group


# -- half values -----------------------------------------------------------------------------------------------------


def converted(values: Tensor, dtype: torch.dtype, *, portable: bool) -> Tensor:
    """Return values as C++ widens them from half, or narrows them to ``dtype``."""
    wide, kind = dtype == torch.float32, STORED[values.dtype if dtype == torch.float32 else dtype]
    pointers = {"from": kind if wide else "float", "to": "float" if wide else kind}
    body = "    widen(to, from, pieces);" if wide else "    narrow(to, from, pieces);"
    undone = "#undef __F16C__\n" if portable else ""
    names = {"from": "source", "to": "target"}
    body = body.replace("to, from", "target, source")
    source = undone + HEAD + function("convert", "number", {names[n]: k for n, k in pointers.items()}, [body])
    found = torch.zeros_like(values, dtype=dtype)
    Again(made(source, "convert"), values.numel(), (values, found))()
    return found


@pytest.mark.parametrize("portable", [True, False], ids=["portable", "native"])
def test_every_half_value_is_widened_as_torch_does(portable: bool, dtype: torch.dtype) -> None:
    """All 2**16, subnormal and infinite ones too."""
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    found = converted(half, torch.float32, portable=portable)
    assert torch.equal(found.isnan(), half.isnan())
    there = ~half.isnan()
    assert torch.equal(found[there].view(torch.int32), half[there].float().view(torch.int32))


@pytest.mark.parametrize("portable", [True, False], ids=["portable", "native"])
def test_values_are_rounded_to_half_as_torch_does(portable: bool, dtype: torch.dtype) -> None:
    """Every half value, what lies half-way to its neighbours, a little beside that, and drawn bits."""
    half = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float()
    half = half[half.isfinite()].sort().values
    middles = ((half[1:].double() + half[:-1].double()) / 2).float()
    beside = [torch.nextafter(middles, torch.tensor(end)) for end in (math.inf, -math.inf)]
    drawn = torch.randint(-(2**31), 2**31 - 1, (2**18,), generator=torch.Generator().manual_seed(0)).int()
    ends = torch.tensor([math.inf, -math.inf, math.nan, 65519.996, 65520.0, -65520.0, 3.4e38, 1e-45, -0.0])
    values = torch.cat([half, middles, *beside, drawn.view(torch.float32), ends])
    found, expected = converted(values, dtype, portable=portable), values.to(dtype)
    assert torch.equal(found.isnan(), expected.isnan())
    there = ~expected.isnan()
    assert torch.equal(found[there].view(torch.int16), expected[there].view(torch.int16))


# -- what is measured ------------------------------------------------------------------------------------------------


def measured(grads: list[Tensor | None], sizes: list[int], dtype: torch.dtype) -> Tensor:
    """Return the evidence of gradients, some of which are not there."""
    layout = plan_layout([(str(index), ZEROS(size)) for index, size in enumerate(sizes)])
    pieces = plan_pieces(layout, PIECE)
    addresses = torch.tensor([0 if grad is None else grad.data_ptr() for grad in grads])
    evidence = pieces.new_evidence().fill_(math.nan)
    measuring(addresses, pieces, dtype, evidence, False)()
    return evidence


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(st.lists(st.integers(0, 9000), min_size=1, max_size=4), st.integers(-140, 120), st.integers(0, 9), st.booleans())
def test_gradients_are_measured_where_they_lie(
    dtype: torch.dtype, sizes: list[int], power: int, odd: int, absent: bool
) -> None:
    """The largest value exactly and the norm nearly, whatever the magnitude and the place; absent ones do not count."""
    generator = torch.Generator().manual_seed(sum(sizes))
    grads: list[Tensor | None] = []
    for size in sizes:
        whole = (torch.randn(size + odd, generator=generator) * 2.0**power).clamp(-3e38, 3e38).to(dtype)
        grads.append(whole[odd:])
    if absent:
        grads[0] = None
    largest, norm = combine(measured(grads, sizes, dtype))
    there = torch.cat([grad.double() for grad in grads if grad is not None] or [torch.zeros(1).double()])
    if there.isfinite().all():
        assert float(largest) == (float(there.abs().max()) if there.numel() else 0.0)
        exact = float(there.square().sum().sqrt())
        assert float(norm) == pytest.approx(exact, rel=NORM, abs=0)
    else:
        assert not math.isfinite(float(norm))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("place", [0, 255, 256, 4095, 4096, 5000])
def test_no_bad_value_escapes(dtype: torch.dtype, bad: float, place: int) -> None:
    """Wherever it is; NaN is told from inf."""
    grad = torch.ones(5001).to(dtype)
    grad[place] = bad
    largest, _ = combine(measured([grad], [5001], dtype))
    assert math.isnan(float(largest)) if math.isnan(bad) else float(largest) == math.inf


class ExactRoots(TorchDispatchMode):
    """Square roots rounded once: those of torch on a CPU are up to a unit off."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.sqrt.default and args[0].dtype == torch.float32:
            return args[0].double().sqrt().float()
        return func(*args, **(kwargs or {}))


# -- rules -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "number"), EVERY_RULE)
def test_the_update_of_a_rule_is_the_rule(name: str, number: int) -> None:
    """Bit for bit what its operations give one by one, for whole pieces and rests; publishing rounds once."""
    form, (rule, _, _, (_, update)) = a_rule(name, number)[0], of_rule(name, number)
    generator = torch.Generator().manual_seed(1)

    def drawn(size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    size = PIECE + 300
    pieces = plan_pieces(plan_layout([("", ZEROS(size))]), PIECE)
    room = int((pieces.start + pieces.extent).max())
    grad, numbers = drawn(size), drawn(form.numbers).abs()
    master, state = drawn(room), [drawn(room).abs() for _ in rule.state]
    model = torch.zeros(room, dtype=torch.float16)
    table = torch.zeros(1, form.width)
    first = [1.0, *(0.25 for _ in form.initial)]  # its first step: what is not zero then is 0.25 here
    table[0, : 2 + form.numbers + len(first)] = torch.cat([torch.tensor([1.0, 0.5]), numbers, torch.tensor(first)])
    expected = [value.clone() for value in (master, *state)]
    for name, value in zip(rule.state, expected[1:], strict=True):
        if name in form.initial:
            value.fill_(0.25)
    with ExactRoots():
        new = update(expected[0][:size], grad * 0.5, tuple(numbers.unbind()), *(each[:size] for each in expected[1:]))
    addresses = torch.tensor([grad.data_ptr()])
    step = update_launcher(form, torch.device("cpu"), torch.float32, torch.float16, False, True)
    step.again(pieces.number, (*where_of(pieces), table, addresses, master, model, *state))()
    for found, value in zip((master, *state), torch.utils._pytree.tree_leaves(new), strict=True):
        assert torch.equal(torch.nan_to_num(found[:size]), torch.nan_to_num(value.expand(size))), name
    assert torch.equal(torch.nan_to_num(model[:size]), torch.nan_to_num(master[:size].half()))


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16], ids=str)
@given(st.integers(1, 200), st.integers(0, 9))
def test_weights_are_published_the_same_past_the_caches(half: torch.dtype, size: int, odd: int) -> None:
    """Wherever they begin, whole groups and rests; nothing beside them is touched."""
    pointers = {"from": "float", "to": STORED[half], "past": "int64_t"}
    lines = [
        f"    for (int64_t i = 0; i < pieces; i += {LANES})",
        f"        publish(to + i, from + i, pieces - i < {LANES} ? pieces - i : {LANES}, *past);",
        "    settle();",
    ]
    show = made(HEAD + PUBLISH.replace("LANES", str(LANES)) + function("show", "number", pointers, lines), "show")
    values = torch.linspace(-3.0, 7.0, size)
    for past in (0, 1):
        room = torch.full((size + 32,), 5.0).to(half)
        Again(show, size, (values, room[odd:], torch.tensor(past)))()
        assert torch.equal(room[odd : odd + size], values.to(half))
        assert (room[:odd] == 5).all()
        assert (room[odd + size :] == 5).all()


def test_steps_of_many_values_are_those_of_few(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bit for bit, wherever one kind ends."""
    found = []
    for far in (1, 2**40):
        monkeypatch.setattr(host_sources, "FAR", far)
        host_kernels.update_launcher.cache_clear()
        model, optimizer = wrapped(torch.device("cpu"), dtype, tier="compiled")
        train(model, optimizer, range(3))
        found.append((masters_of(optimizer), model.state_dict()))
    host_kernels.update_launcher.cache_clear()
    for one, other in zip(*found, strict=True):
        assert_same(one, other)


@pytest.mark.parametrize(("name", "number"), EVERY_RULE)
def test_the_numbers_of_a_rule_are_the_rule(name: str, number: int) -> None:
    """Within a rounding; a slot without a gradient keeps its count and its scalars, and a skip those of all."""
    form, group = a_rule(name, number)
    rule, slots, kinds = form.rule, 4, (Standing, Rules)
    hyper = torch.tensor([[1.0, *rule.hyper(group), *(rule.initial(group)[n] for n in form.initial)]]).double()
    for bad in (False, True):
        # A count may be edited: the second slot has begun, though it says 0.
        steps, begun = torch.tensor([3.0, 0.0, 5.0, 7.0]), torch.tensor([0.0, 1.0, 1.0, 1.0])
        scalars = [torch.rand(slots) + 0.5 for _ in rule.scalars]
        before = [each.clone() for each in (steps, *scalars)]
        used = [each.clone() for each in before[1:]]
        for values, key in zip(used, rule.scalars, strict=True):
            values[0] = rule.initial(group).get(key, values[0])
        addresses, table = torch.tensor([16, 16, 0, 16]), torch.full((slots, form.width), math.nan)
        standing, rules = (torch.zeros(len(kind._fields), dtype=torch.float64) for kind in kinds)
        standing[0] = 8.0
        rules.copy_(torch.tensor(rules_of(DynamicLossScale(8.0), None)))
        signals, report = [torch.zeros(1) for _ in range(4)], torch.zeros(REPORT, dtype=torch.float64)
        evidence = torch.tensor([[math.inf if bad else 2.0], [1.0]])
        judging = (*evidence, torch.zeros(1, dtype=torch.int32), standing, rules, torch.zeros_like(standing))
        of_slots = (addresses, steps, begun, hyper, torch.zeros(slots, dtype=torch.int32), table)
        planning(form, (*judging, *signals, None, *of_slots, *scalars), slots)(report)
        columns = tuple(hyper[0, 1 + i].expand(slots) for i in range(form.hypers))
        numbers, new = rule.numbers(before[0].double() + 1, columns, tuple(used))
        active = torch.tensor([True, True, False, True]) & (not bad)
        assert torch.equal(table[:, 0] != 0, active)
        assert torch.equal(steps, before[0] + active.float())
        assert torch.equal(table[:, 2 + form.numbers] != 0, torch.tensor([True, False, False, False]))
        for index, column in enumerate(numbers):
            found, expected = table[:, 2 + index], column.float()
            torch.testing.assert_close(found, expected, rtol=ONE_ULP, atol=0, equal_nan=True)
        for found, then, now in zip(scalars, before[1:], new, strict=True):
            torch.testing.assert_close(found, torch.where(active, now.float(), then), rtol=ONE_ULP, atol=0)
        assert report[:3].tolist() == [float(bad), math.inf if bad else 0.25, 8.0]
        assert bad or report[3] == 0.125
        assert report[NEXT_SCALE:].view(torch.float32)[0] == signals[0] == (4.0 if bad else 8.0)


def test_threads_do_not_matter(dtype: torch.dtype) -> None:
    """One or several: the same bits, of the same gradients; products of matrices by torch may differ."""
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            generator = torch.Generator().manual_seed(0)
            params = [nn.Parameter(torch.randn(size, generator=generator).to(dtype)) for size in (9000, 1, 5000, 70)]
            optimizer = MixedPrecisionOptimizer(
                torch.optim.AdamW(params, lr=0.1), loss_scale=1.0, tier="compiled", max_grad_norm=0.1
            )
            for _ in range(4):
                for param in params:
                    param.grad = torch.randn(param.shape, generator=generator).to(dtype)
                optimizer.step()
            found.append(masters_of(optimizer))
    finally:
        torch.set_num_threads(before)
    assert_same(*found)


def test_the_compiler_may_have_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """As make takes it; one that does not work is passed over for those that are there."""
    for command in ("c++ -O1", "false --nothing", "no-such-compiler"):
        monkeypatch.setenv("CXX", command)
        host_kernels.made.cache_clear()
        written = torch.zeros(1)
        write = made(HEAD + function("write", "number", {"to": "float"}, ["    *to = number;"]), "write")
        Again(write, 0, (written,), 7)()
        assert written == 7, command


@pytest.mark.parametrize("named", ["no-such-compiler", "false"])
def test_where_kernels_cannot_be_made_torch_compiles(
    named: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a compiler that works: the same tier by another way, said at INFO."""
    monkeypatch.setenv("CXX", named)
    monkeypatch.setattr(cxx, "COMPILERS", ())
    for cached in (host_kernels.made, host_kernels.measurer, host_kernels.planner, host_kernels.update_launcher):
        cached.cache_clear()
    monkeypatch.setattr("mixedopt.tiers.check_rule", lambda inner, dtypes: covering_rule(inner))
    inner = torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    with caplog.at_level(logging.INFO, logger="mixedopt"):
        optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0, tier="compiled")
    assert isinstance(optimizer._tier, CompiledTier)
    assert "no kernels on a CPU, torch.compile instead" in caplog.text
