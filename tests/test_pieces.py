"""Pieces: they tile the buffer once, and what is measured of them gives the norm at every magnitude."""

from __future__ import annotations

import math

import pytest
import torch
from evidence import ROW, evidence_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import TensorSpec, layouts, named_tensors
from torch import Tensor

from mixedopt.flat import ALIGNMENT, Layout, Slot, plan_layout
from mixedopt.pieces import Pieces, combine, plan_pieces

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
# Four roundings of each quotient and one of each square, which may all point one way, and a sum of 512 terms in fp32
# (3e-7 where all are equal); the root halves what the squares add.
NORM_TOLERANCE = 1e-6

multiples = st.sampled_from([ALIGNMENT, 2 * ALIGNMENT, 3 * ALIGNMENT, 8192])


def packed_lstm(bias: bool, hidden: int) -> list[tuple[str, Tensor]]:
    """Return weights that share one storage at odd places, with room behind them, as cuDNN's do."""
    shapes = [(4 * hidden, 3), (4 * hidden, hidden)] + [(4 * hidden,)] * (2 * bias)
    storage = torch.randn(sum(math.prod(shape) for shape in shapes) + 5 * hidden)
    named, start = [], 0
    for index, shape in enumerate(shapes):
        start += index % 2  # a gap of one value
        named.append((f"lstm{index}", storage[start : start + math.prod(shape)].view(shape)))
        start += math.prod(shape)
    return named


@st.composite
def plans(draw: st.DrawFn) -> tuple[list[tuple[str, Tensor]], Layout]:
    """Named tensors of every layout, some longer than a piece, some in packs; and their layout."""
    named = named_tensors(draw(layouts), CPU, torch.float32)
    lengths = draw(st.lists(st.integers(1, 300), max_size=3))
    named += [(f"long{index}", torch.randn(length)) for index, length in enumerate(lengths)]
    if draw(st.booleans()):
        named += packed_lstm(draw(st.booleans()), draw(st.integers(1, 20)))
    named += [("last", torch.randn(draw(st.integers(0, 200))))]
    return named, plan_layout(named)


def copied(layout: Layout, pieces: Pieces, grads: list[Tensor | None]) -> Tensor:
    """Return the buffer, filled piece by piece from the memory of each gradient."""
    flat = torch.full((layout.size,), math.nan)
    rows = zip(
        *(getattr(pieces, name).tolist() for name in ("slot", "start", "within", "count", "extent")), strict=True
    )
    for slot, start, within, count, extent in rows:
        flat[start : start + extent] = 0.0
        grad = grads[slot] if slot >= 0 else None
        if grad is not None:
            memory = grad.as_strided((grad.numel(),), (1,))
            flat[start : start + count] = memory[within : within + count]
    return flat


@given(plans(), multiples)
def test_pieces_tile_the_buffer_once(plan: tuple[list[tuple[str, Tensor]], Layout], piece: int) -> None:
    """In order, without a gap, none empty or longer than ``piece``; values and padding are those of the layout."""
    _, layout = plan
    pieces = plan_pieces(layout, piece)
    ends = pieces.start + pieces.extent
    assert torch.equal(pieces.start[1:], ends[:-1])
    assert (0, layout.size) == (int(pieces.start[0]), int(ends[-1]))
    assert bool(((pieces.extent > 0) & (pieces.extent <= piece) & (pieces.count <= pieces.extent)).all())
    assert torch.equal(pieces.count > 0, pieces.slot >= 0)
    values = torch.bincount(pieces.slot.long() + 1, pieces.count, minlength=len(layout.slots) + 1)[1:]
    assert values.tolist() == [slot.numel for slot in layout.slots]


@given(plans(), multiples, st.data())
def test_a_copy_by_pieces_is_the_copy_by_views(
    plan: tuple[list[tuple[str, Tensor]], Layout], piece: int, data: st.DataObject
) -> None:
    """Whatever the layouts, with gradients missing: the values of every slot, and zero elsewhere."""
    _, layout = plan
    absent = data.draw(st.sets(st.integers(0, len(layout.slots) - 1)))
    grads: list[Tensor | None] = []
    expected = torch.zeros(layout.size)
    for index, slot in enumerate(layout.slots):
        grad = torch.empty_strided(slot.shape, slot.stride).copy_(torch.randn(slot.shape))
        grads.append(None if index in absent else grad)
        if index not in absent:
            slot.view(expected).copy_(grad)
    assert torch.equal(copied(layout, plan_pieces(layout, piece), grads), expected)


@given(plans(), multiples)
def test_padding_belongs_to_the_last_piece_of_its_slot(
    plan: tuple[list[tuple[str, Tensor]], Layout], piece: int
) -> None:
    """Without packs every piece belongs to a slot, and starts and ends where the layout aligns."""
    named, _ = plan
    layout = plan_layout([(name, tensor) for name, tensor in named if not name.startswith("lstm")])
    pieces = plan_pieces(layout, piece)
    assert pieces.aligned
    assert bool((pieces.slot >= 0).all())
    assert not bool(((pieces.start | pieces.extent) % ALIGNMENT).any())
    assert sum(-(-slot.numel // piece) for slot in layout.slots) == pieces.number


def test_gaps_of_a_pack_belong_to_no_slot() -> None:
    """What lies between the members of a pack, or behind them, are pieces of slot -1, cut like others."""
    slots = (Slot("a", (3,), (1,), 0, 3, (0, 600)), Slot("b", (100,), (1,), 67, 100, (0, 600)))
    pieces = plan_pieces(Layout(slots, 640, frozenset()), 64)
    assert [0, -1, 1, 1] + 7 * [-1] == pieces.slot.tolist()
    assert [0, 64, 67, 131, *range(192, 640, 64)] == pieces.start.tolist()
    assert [3, 0, 64, 36] + 7 * [0] == pieces.count.tolist()
    assert not pieces.aligned


@pytest.mark.parametrize("shapes", [[], [(0,)], [(0, 3), (0,)]])
def test_a_buffer_without_values_has_no_pieces(shapes: list[tuple[int, ...]]) -> None:
    """Of no tensors, or of empty ones alone; its norm is zero."""
    pieces = plan_pieces(plan_layout([(str(shape), torch.empty(shape)) for shape in shapes]), 64)
    assert pieces.number == 0
    assert [0.0, 0.0] == [float(value) for value in combine(pieces.new_evidence())]


def test_a_large_layout_is_cut_beyond_32_bits() -> None:
    """Ten thousand slots and two hundred thousand pieces."""
    numel = 2**18 + 1
    slots = tuple(Slot("", (numel,), (1,), index * (2**18 + 64), numel) for index in range(10_000))
    layout = Layout(slots, 10_000 * (2**18 + 64), frozenset())
    pieces = plan_pieces(layout, 2**14)
    assert 10_000 * 17 == pieces.number
    assert layout.size == int(pieces.start[-1] + pieces.extent[-1])


@pytest.mark.parametrize("piece", [0, -64, 63, 100])
def test_a_piece_is_a_multiple_of_the_alignment(piece: int) -> None:
    """Anything else is refused, by name."""
    with pytest.raises(ValueError, match=rf"plan_pieces\(piece={piece}\): must be a positive multiple of 64"):
        plan_pieces(plan_layout([("a", torch.empty(3))]), piece)


def test_a_plan_moves_as_a_whole(device: torch.device) -> None:
    """Every tensor of it; the evidence is made where it is."""
    named = named_tensors([TensorSpec("contiguous")], CPU, torch.float32)
    pieces = plan_pieces(plan_layout(named), 64)
    moved = pieces.to(device)
    assert (moved.piece, moved.aligned, moved.number) == (pieces.piece, pieces.aligned, pieces.number)
    for name in ("slot", "start", "within", "count", "extent"):
        assert torch.equal(getattr(moved, name).cpu(), getattr(pieces, name))
        assert getattr(moved, name).device.type == device.type
    assert (moved.new_evidence().device.type, moved.new_evidence().shape) == (device.type, (2, pieces.number))


# Powers of two from below the smallest subnormal of the dtype to its largest number: some become zero.
EXPONENTS = {torch.float16: (-25, 15), torch.bfloat16: (-134, 127), torch.float32: (-150, 127)}


@st.composite
def buffers(draw: st.DrawFn, dtype: torch.dtype) -> Tensor:
    """Values of wild magnitudes, a run of each; sizes at, over and under a row."""
    low, high = EXPONENTS[dtype]
    runs = draw(st.lists(st.tuples(st.integers(low, high), st.integers(1, 700)), max_size=4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    parts = [
        (1 + draw(st.booleans()) * torch.rand(length, generator=generator, dtype=torch.float64)) * 2.0**exponent
        for exponent, length in runs
    ]
    flat = torch.cat([torch.zeros(draw(st.sampled_from([0, 64, 512, 1024]))), *parts])
    flat = flat[torch.randperm(len(flat), generator=generator)] if draw(st.booleans()) else flat
    return flat.clamp(max=torch.finfo(dtype).max).to(dtype)


def check(flat: Tensor, found: tuple[Tensor, Tensor]) -> None:
    """Assert that (largest, norm) are those of an fp64 reference."""
    largest, norm = (float(value) for value in found)
    exact = flat.double()
    if not bool(exact.isfinite().all()):
        expected = math.nan if bool(exact.isnan().any()) else math.inf
        assert str([expected] * 2) == str([largest, norm])  # a NaN equals no other
        return
    assert largest == (float(exact.abs().max()) if len(flat) else 0.0)
    expected = float(exact.square().sum().sqrt())
    assert abs(norm - expected) <= NORM_TOLERANCE * expected


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_the_norm_is_exact_at_every_magnitude(dtype: torch.dtype, device: torch.device, data: st.DataObject) -> None:
    """From subnormal numbers to the largest one, in one buffer or not, relative to an fp64 reference."""
    flat = data.draw(buffers(dtype))
    found = combine(evidence_of(flat.to(device)))
    assert [torch.float64, torch.float64] == [value.dtype for value in found]
    check(flat, found)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_the_norm_is_finite_iff_every_value_is(dtype: torch.dtype, device: torch.device, data: st.DataObject) -> None:
    """One inf or NaN anywhere is seen, by the largest value and by the norm."""
    flat = torch.cat([data.draw(buffers(dtype)), torch.ones(1, dtype=dtype)])
    for bad in data.draw(st.lists(st.sampled_from([math.inf, -math.inf, math.nan]), min_size=1, max_size=2)):
        flat[data.draw(st.integers(0, len(flat) - 1))] = bad
    check(flat, combine(evidence_of(flat.to(device))))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_largest_numbers_need_no_subnormal_ones(dtype: torch.dtype) -> None:
    """Where those are flushed to zero, a row of the largest numbers has its norm all the same."""
    flat = torch.full((ROW,), torch.finfo(dtype).max, dtype=dtype, device=CPU)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor flushes none")
    try:
        found = combine(evidence_of(flat))
    finally:
        torch.set_flush_denormal(False)
    check(flat, found)


@pytest.mark.parametrize("size", [0, 1, ROW - 1, ROW, ROW + 1, 3 * ROW])
def test_every_row_is_measured(size: int, device: torch.device) -> None:
    """The largest value of each row; s is 0 for a row of zeros and else at least 1 and at most the row."""
    flat = torch.randn(size, device=device)
    flat[:ROW] = 0.0
    largest, squares = evidence_of(flat)
    rows = torch.nn.functional.pad(flat, (0, (size // ROW + 1) * ROW - size)).view(-1, ROW)
    assert torch.equal(largest, rows.abs().amax(1))
    assert torch.equal(squares == 0, largest == 0)
    assert bool(((squares <= ROW * (1 + NORM_TOLERANCE)) & ((squares >= 1 - NORM_TOLERANCE) | (squares == 0))).all())
