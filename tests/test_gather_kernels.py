"""Kernels that gather, measure and restore: the same bits as plain torch, on whatever device runs Triton."""

from __future__ import annotations

import importlib
import math
import warnings
from types import ModuleType

import pytest
import torch
from evidence import evidence_of
from hypothesis import given
from hypothesis import strategies as st
from strategies import layouts, named_tensors
from torch import Tensor

from mixedopt.flat import Layout, Slot, plan_layout
from mixedopt.gradients import GradientBuffer
from mixedopt.pieces import Pieces, combine, plan_pieces

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
INTEGERS = {2: torch.int16, 4: torch.int32}
# A few roundings of every quotient, which may all point one way, and a sum of at most 8192 terms as a tree.
NORM_TOLERANCE = 1e-6
# From subnormal numbers to the largest one.
EXPONENTS = {torch.float16: [-24, -20, 0, 15], torch.bfloat16: [-133, -70, 0, 127], torch.float32: [-149, -70, 0, 127]}
# Two that are compiled with wide loads, one with pieces that are never whole.
PIECES = [64, 256, 192]


@pytest.fixture
def kernels() -> ModuleType:
    """The room, imported by those tests only that may run: it needs Triton."""
    return importlib.import_module("mixedopt.gather_kernels")


def bits(tensor: Tensor) -> Tensor:
    """Return the values as integers, so that a NaN equals itself."""
    return tensor.view(INTEGERS[tensor.dtype.itemsize])


def addresses_of(tensors: list[Tensor | None], device: torch.device) -> Tensor:
    return torch.tensor([0 if t is None else t.data_ptr() for t in tensors], dtype=torch.int64, device=device)


def gathered(
    kernels: ModuleType,
    layout: Layout,
    grads: list[Tensor | None],
    dtype: torch.dtype,
    device: torch.device,
    piece: int,
) -> tuple[Tensor, Tensor, Pieces]:
    """Return the buffer, the evidence and the plan; what was not written is NaN."""
    pieces = plan_pieces(layout, piece).to(device)
    flat = torch.full((layout.size,), math.nan, dtype=dtype, device=device)
    evidence = pieces.new_evidence().fill_(math.nan)
    aligned = not any(grad.data_ptr() % 16 for grad in grads if grad is not None)
    kernels.gather_(addresses_of(grads, device), pieces, dtype, flat, evidence, aligned)
    return flat, evidence, pieces


def check_evidence(evidence: Tensor, flat: Tensor, pieces: Pieces) -> None:
    """Assert that each pair is that of its piece, by an fp64 reference; and so is what they give together."""
    wide = flat.cpu().double()
    for (largest, squares), start, count in zip(
        evidence.cpu().double().T.tolist(), pieces.start.tolist(), pieces.count.tolist(), strict=True
    ):
        values = wide[start : start + count]
        if not bool(values.isfinite().all()):
            assert not math.isfinite(largest)
            continue
        assert largest == (float(values.abs().max()) if count else 0.0)
        expected = float(values.square().sum())
        assert abs(largest**2 * squares - expected) <= 2 * NORM_TOLERANCE * expected
    for found, other in zip(combine(evidence.cpu()), combine(evidence_of(flat.cpu())), strict=True):
        both = bool(found.isfinite()), bool(other.isfinite())
        assert (both == (False, False)) or abs(float(found - other)) <= 2 * NORM_TOLERANCE * float(other)


@st.composite
def gradients(draw: st.DrawFn, dtype: torch.dtype) -> tuple[Layout, list[Tensor | None]]:
    """A layout of every kind of tensor, packs too, and gradients on the host, some of them absent or misaligned."""
    named = named_tensors(draw(layouts), CPU, torch.float32)
    named += [(f"long{index}", torch.empty(length)) for index, length in enumerate(draw(st.lists(st.integers(1, 900))))]
    if draw(st.booleans()):
        storage = torch.empty(700)  # two members at odd places, a gap of one value, room behind them
        named += [("pack0", storage[:301].view(43, 7)), ("pack1", storage[302:602].view(3, 100).t())]
    layout = plan_layout(named)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))
    misaligned = draw(st.booleans())
    grads: list[Tensor | None] = []
    for slot in layout.slots:
        if draw(st.integers(0, 4)) == 0:
            grads.append(None)
            continue
        exponent = draw(st.sampled_from(EXPONENTS[dtype]))
        values = (
            torch.rand(slot.numel, generator=generator, dtype=torch.float64) * 2.0 ** (exponent + 1) - 2.0**exponent
        )
        offset = draw(st.integers(0, 9)) * misaligned
        memory = torch.empty(slot.numel + offset, dtype=dtype)
        memory[offset:] = values.to(dtype)
        grads.append(memory[offset:].as_strided(slot.shape, slot.stride))
    return layout, grads


def moved(grads: list[Tensor | None], device: torch.device) -> list[Tensor | None]:
    """Return the gradients on the device, as far from an aligned place as they were from the start of a storage."""
    there: list[Tensor | None] = []
    for grad in grads:
        if grad is None:
            there.append(None)
            continue
        offset = int(grad.storage_offset())
        memory = grad.as_strided((grad.numel() + offset,), (1,), 0).to(device, copy=True)
        there.append(memory.as_strided(grad.shape, grad.stride(), offset))
    return there


@pytest.mark.parametrize("piece", PIECES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_a_gather_is_the_copy_of_each_gradient(
    kernels: ModuleType, dtype: torch.dtype, piece: int, device: torch.device, data: st.DataObject
) -> None:
    """Bit for bit what plain copies leave, padding and absent gradients zero; the evidence is that of the values."""
    layout, on_host = data.draw(gradients(dtype))
    grads = moved(on_host, device)
    flat, evidence, pieces = gathered(kernels, layout, grads, dtype, device, piece)
    expected = GradientBuffer(layout, device, dtype)
    expected.gather_(grads)
    assert torch.equal(bits(flat), bits(expected.flat))
    check_evidence(evidence, flat, pieces)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_gradients_are_measured_where_they_lie(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """The evidence of a gather, without one."""
    layout, on_host = data.draw(gradients(dtype))
    grads = moved(on_host, device)
    piece = data.draw(st.sampled_from(PIECES))
    flat, evidence, pieces = gathered(kernels, layout, grads, dtype, device, piece)
    again = pieces.new_evidence().fill_(math.nan)
    aligned = not any(grad.data_ptr() % 16 for grad in grads if grad is not None)
    kernels.measure_(addresses_of(grads, device), pieces, dtype, again, aligned)
    assert torch.equal(bits(evidence), bits(again))
    check_evidence(again, flat, pieces)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@given(data=st.data())
def test_half_gradients_may_be_gathered_in_fp32(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """The same values, widened; the same evidence."""
    layout, on_host = data.draw(gradients(dtype))
    grads = moved(on_host, device)
    half, evidence, pieces = gathered(kernels, layout, grads, dtype, device, 256)
    flat, again = torch.full((layout.size,), math.nan, device=device), pieces.new_evidence()
    aligned = not any(grad.data_ptr() % 16 for grad in grads if grad is not None)
    kernels.gather_(addresses_of(grads, device), pieces, dtype, flat, again, aligned)
    assert torch.equal(flat, half.float())
    assert torch.equal(bits(evidence), bits(again))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_every_bit_pattern_is_copied(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """NaN with any payload, inf, subnormal numbers, negative zero."""
    numel, offset = data.draw(st.integers(1, 1000)), data.draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16)))
    high = 2 ** (8 * dtype.itemsize - 1)
    kind = INTEGERS[dtype.itemsize]
    grad = torch.randint(-high, high, (numel + offset,), generator=generator, dtype=kind).to(device)[offset:]
    layout = plan_layout([("a", torch.empty(numel))])
    flat, evidence, pieces = gathered(kernels, layout, [grad.view(dtype)], dtype, device, 256)
    assert torch.equal(bits(flat)[:numel], grad)
    assert not bool(bits(flat)[numel:].any())
    check_evidence(evidence, flat, pieces)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(data=st.data())
def test_one_bad_value_is_seen_wherever_it_is(
    kernels: ModuleType, dtype: torch.dtype, device: torch.device, data: st.DataObject
) -> None:
    """Inf or NaN, among zeros or the largest finite numbers: the pair of its piece is not finite, all others are."""
    numel = data.draw(st.integers(1, 1500))
    grad = torch.full((numel,), data.draw(st.sampled_from([0.0, 1.0, torch.finfo(dtype).max])), dtype=dtype)
    place = data.draw(st.integers(0, numel - 1))
    grad[place] = data.draw(st.sampled_from([math.inf, -math.inf, math.nan]))
    layout = plan_layout([("a", torch.empty(numel))])
    _, evidence, pieces = gathered(kernels, layout, [grad.to(device)], dtype, device, 256)
    bad = [place // 256 == piece for piece in range(pieces.number)]
    assert bad == (~evidence[0].isfinite()).tolist()


def test_without_values_nothing_is_launched(kernels: ModuleType, device: torch.device) -> None:
    """Empty parameters alone have no pieces."""
    layout = plan_layout([("a", torch.empty(0))])
    flat, evidence, _ = gathered(kernels, layout, [None], torch.float16, device, 64)
    kernels.restore_(torch.ones((), device=device, dtype=torch.bool), *[addresses_of([], device)] * 3)
    assert (0, (2, 0)) == (flat.numel(), tuple(evidence.shape))


SHAPES = [
    (torch.float32, 7),
    (torch.int64, 1),
    (torch.uint8, 5),
    (torch.float32, 0),
    (torch.float16, 3),
    (torch.int8, 0),
]
SHAPES += [(torch.float32, 9001), (torch.uint8, 8193), (torch.bfloat16, 4 * 1024 * 4)]


@pytest.mark.parametrize("flag", [torch.bool, torch.uint8, torch.int32, torch.int64], ids=str)
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("offset", [0, 1])
def test_statistics_are_restored_iff_the_step_is_skipped(
    kernels: ModuleType, flag: torch.dtype, skip: bool, offset: int, device: torch.device
) -> None:
    """Every byte of every tensor, of any dtype, size and alignment, and no byte beside it; or none."""
    lengths = [dtype.itemsize * numel for dtype, numel in SHAPES]
    guard = 16
    live, saved = (
        [torch.randint(0, 256, (offset + length + guard,), dtype=torch.uint8).to(device) for length in lengths]
        for _ in range(2)
    )
    expected = [tensor.clone() for tensor in live]
    for target, source, length in zip(expected, saved, lengths, strict=True):
        if skip:
            target[offset : offset + length] = source[offset : offset + length]
    kernels.restore_(
        torch.tensor(3 * skip, device=device).to(flag),
        addresses_of([tensor[offset:] for tensor in live], device),
        addresses_of([tensor[offset:] for tensor in saved], device),
        torch.tensor(lengths, dtype=torch.int64, device=device),
    )
    for found, value in zip(live, expected, strict=True):
        assert torch.equal(found, value)


def test_places_beyond_two_to_the_31_are_reached(kernels: ModuleType, device: torch.device) -> None:
    """Offsets are 64-bit all the way."""
    if torch.cuda.mem_get_info()[0] < 6 * 2**30:
        pytest.skip("needs 6 GiB of free memory")
    far = 2**31 + 64
    slots = Slot("a", (far,), (1,), 0, far), Slot("b", (100,), (1,), far, 100)
    grad = torch.randn(100, device=device, dtype=torch.float16)
    grads: list[Tensor | None] = [None, grad]
    layout = Layout(slots, far + 128, frozenset())
    flat, evidence, _ = gathered(kernels, layout, grads, torch.float16, device, 8192)
    assert torch.equal(flat[far : far + 100], grad)
    assert 100 == int(flat.view(torch.int16).count_nonzero())
    assert abs(float(combine(evidence)[1] / grad.double().norm()) - 1) <= NORM_TOLERANCE


def test_no_launch_waits_for_the_device(kernels: ModuleType, device: torch.device) -> None:
    """Neither the first, which compiles, nor a later one."""
    layout = plan_layout([("a", torch.empty(10_000))])
    grads: list[Tensor | None] = [torch.randn(10_000, device=device)]
    pieces = plan_pieces(layout, 1024).to(device)
    addresses, sizes = addresses_of(grads, device), torch.full((1,), 64, dtype=torch.int64, device=device)
    flat, evidence = torch.empty(layout.size, device=device), pieces.new_evidence()
    skip = torch.zeros((), dtype=torch.bool, device=device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                kernels.gather_(addresses, pieces, torch.float32, flat, evidence, True)
                kernels.measure_(addresses, pieces, torch.float32, evidence, True)
                kernels.restore_(skip, addresses, addresses, sizes)
                combine(evidence)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(flat[:10_000], grads[0])
