"""Splitting fp32 values: the half value is the rounded one, and the pair is the value wherever 16 bits can tell."""

from __future__ import annotations

import shutil
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from mixedopt.split import LIMIT, Curtain, join, join_into_, mend_, remainder_of, split_into_

# Below it an fp16 value stands for more fp32 values than a remainder has.
EXACT_FROM = 2.0**-16
# What is lost there: half a unit of 2**-40, and a whole one beside a tie, which would round to the neighbour.
LOST, LOST_AT_TIES = 2.0**-41, 2.0**-40
BOUNDARY = (0, 1, -1, 2, -2, 4095, 4096, -4096, LIMIT - 1, LIMIT, -LIMIT, -LIMIT - 1)


def every_half(dtype: torch.dtype) -> Tensor:
    """Return all 2**16 values, NaNs too."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def bits(tensor: Tensor) -> Tensor:
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def same(one: Tensor, other: Tensor) -> Tensor:
    """Return where two tensors have the same bits; NaNs are all the same."""
    return (bits(one) == bits(other)) | (one.isnan() & other.isnan())


def from_bits(patterns: Tensor) -> Tensor:
    return patterns.to(torch.int32).view(torch.float32)


def check(master: Tensor, dtype: torch.dtype) -> None:
    """Assert every law for these fp32 values."""
    half = master.to(dtype)
    remainder = remainder_of(master, half)
    joined = join(half, remainder)
    assert remainder.dtype == torch.int16
    assert same(joined.to(dtype), half).all()  # the model shows the master
    assert torch.equal(remainder_of(joined, half)[~half.isnan()], remainder[~half.isnan()])
    assert same(join(half, remainder_of(joined, half)), joined).all()  # splitting again changes nothing
    error = (joined.double() - master.double()).abs()
    finite = half.isfinite()
    if dtype == torch.float16:
        exact = finite & (master.abs() >= EXACT_FROM)
        beyond = half.isinf() & master.isfinite()
        kept = (bits(master) & ~0xFFFF).view(torch.float32).abs().clamp(min=65536.0).copysign(master)
        assert same(joined, kept)[beyond].all()
        exact |= half.isinf() & ~beyond
        assert (error[finite] <= LOST_AT_TIES).all()
        to_tie = distance_to_tie(master, half)
        assert (error[finite & (to_tie >= LOST)] <= LOST).all()
    else:
        upper_tie = ((bits(master) & 0x1FFFF) == 0x8000) & ~master.isnan()  # rounds down, to an even one
        exact = ~upper_tie
        off = (bits(master).long() - bits(joined).long())[upper_tie]
        assert (off == 1).all()
    assert same(joined, master)[exact].all()


def distance_to_tie(master: Tensor, half: Tensor) -> Tensor:
    """Return how far each value is from the ends of its rounding interval, where fp16 is subnormal."""
    return (2.0**-25 - (master.double() - half.double()).abs()).abs()


def test_all_ties_and_their_neighbours(dtype: torch.dtype) -> None:
    """Every value within two fp32 ulps of a half value, of a tie, and of the middle between them."""
    every = every_half(dtype)
    every = every[every.isfinite()]
    around = torch.arange(-2, 3)
    # Patterns of fp32 that lie between two neighbouring half values, from each of them.
    wide = bits(every.float()).long()
    following = bits(torch.nextafter(every.abs(), torch.full_like(every, torch.inf)).float()).long()
    following = torch.where(every.abs() == torch.finfo(dtype).max, wide.abs(), following & 0x7FFFFFFF)
    low = wide & 0x7FFFFFFF
    sign = wide & ~0x7FFFFFFF
    tie = bits(((low.int().view(torch.float32).double() + following.int().view(torch.float32).double()) / 2).float())
    for start in (low, tie.long(), (low + tie.long()) // 2):
        patterns = (start[:, None] + around).clamp(min=0) + sign[:, None]
        check(from_bits(patterns.flatten()), dtype)


@pytest.mark.parametrize("remainder", BOUNDARY)
def test_every_half_value_with_remainders_at_the_boundaries(dtype: torch.dtype, remainder: int) -> None:
    """Joined, any pair is on the half value's side of zero, never beyond a tie, and NaN only if the half is."""
    half = every_half(dtype)
    joined = join(half, torch.full((2**16,), remainder, dtype=torch.int16))
    other = half.isinf() & (remainder > 0) if dtype == torch.bfloat16 else torch.zeros_like(half, dtype=torch.bool)
    half, joined = half[~other], joined[~other]  # beyond inf there is nothing that rounds to it
    assert torch.equal(joined.isnan(), half.isnan())
    assert torch.equal(joined.signbit()[~half.isnan()], half.signbit()[~half.isnan()])
    check(joined, dtype)
    if remainder == 0:
        assert same(joined, half.float()).all()
    back = joined.to(dtype)
    apart = (bits(back).int() - bits(half).int()).abs()[~half.isnan()]
    assert (apart <= (0 if abs(remainder) <= LIMIT - 16 else 1)).all()  # a pair of our own rounds to its half


def test_every_half_value_with_random_remainders(dtype: torch.dtype) -> None:
    """The laws hold for whatever two buffers may hold, after mending."""
    generator = torch.Generator().manual_seed(0)
    half = every_half(dtype)
    for _ in range(20):
        remainder = torch.randint(-(2**15), 2**15, (2**16,), generator=generator).to(torch.int16)
        check(join(half, remainder), dtype)
        mend_(remainder, half)
        joined = join(half, remainder)
        assert same(joined.to(dtype), half).all()
        assert torch.equal(remainder_of(joined, half)[~half.isnan()], remainder[~half.isnan()])


def test_a_million_random_patterns(dtype: torch.dtype) -> None:
    """Any fp32 bits at all: subnormal, inf, NaN."""
    generator = torch.Generator().manual_seed(1)
    check(from_bits(torch.randint(-(2**31), 2**31, (2**20,), generator=generator)), dtype)


def test_small_weights_of_fp16(dtype: torch.dtype) -> None:
    """Around and below the smallest half values, where the bounds are met."""
    generator = torch.Generator().manual_seed(2)
    exponents = torch.randint(-30, -12, (2**18,), generator=generator).double()
    values = (torch.rand(2**18, generator=generator).double() * 2 - 1) * 2.0**exponents
    check(values.float(), dtype)
    check(torch.tensor([0.0, -0.0, 2.0**-149, -(2.0**-149), 2.0**-126, 2.0**-24, 2.0**-25, -(2.0**-25)]), dtype)


@given(st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=20))
def test_any_fp32_value(dtype: torch.dtype, patterns: list[int]) -> None:
    """The laws, for patterns that hypothesis thinks of."""
    check(torch.tensor([struct.unpack("f", struct.pack("I", p))[0] for p in patterns], dtype=torch.float32), dtype)


@given(st.lists(st.floats(width=32, allow_nan=False, min_value=-65504, max_value=65504), min_size=1, max_size=20))
def test_any_weight(dtype: torch.dtype, values: list[float]) -> None:
    """The laws, for values that hypothesis thinks of."""
    check(torch.tensor(values, dtype=torch.float32), dtype)


def test_part_by_part_is_all_at_once(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loops over parts write what the functions return, and only there."""
    monkeypatch.setattr("mixedopt.split.CHUNK_HOST", 7)
    master = torch.randn(100, generator=torch.Generator().manual_seed(3))
    half = master.to(dtype)
    remainder, joined = torch.zeros(100, dtype=torch.int16), torch.zeros(100)
    split_into_(remainder, master, half)
    join_into_(joined, half, remainder)
    assert torch.equal(remainder, remainder_of(master, half))
    assert torch.equal(joined, join(half, remainder))
    assert torch.equal(master, torch.randn(100, generator=torch.Generator().manual_seed(3)))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_fused_into_one_kernel_it_is_the_same(dtype: torch.dtype) -> None:
    """A compiled step that joins, moves, rounds and splits: no rounding is left out between two casts."""

    def step_(half: Tensor, remainder: Tensor, grad: Tensor) -> None:
        master = join(half, remainder) - 0.01 * grad
        half.copy_(master)
        remainder.copy_(remainder_of(master, half))

    grad = torch.randn(1000, generator=torch.Generator().manual_seed(5))
    master = torch.randn(1000, generator=torch.Generator().manual_seed(6))
    half = master.to(dtype)
    pairs = [[half.clone(), remainder_of(master, half)] for _ in range(2)]
    step_(*pairs[0], grad)
    torch.compile(step_, fullgraph=True, dynamic=True)(*pairs[1], grad)
    assert torch.equal(pairs[0][0], pairs[1][0])
    assert torch.equal(pairs[0][1], pairs[1][1])
    assert not torch.equal(pairs[0][0], half)


def test_mending_keeps_what_fits(dtype: torch.dtype) -> None:
    """Remainders of values that nobody wrote stay; a zeroed weight never becomes NaN or changes its sign."""
    master = torch.randn(1000, generator=torch.Generator().manual_seed(4))
    half = master.to(dtype)
    remainder = remainder_of(master, half)
    kept = remainder.clone()
    mend_(remainder, half)
    assert torch.equal(remainder, kept)
    half[::2] = 0
    mend_(remainder, half)
    assert torch.equal(remainder[1::2], kept[1::2])
    joined = join(half, remainder)
    assert torch.equal(joined.to(dtype), half)
    assert (joined[::2].abs() <= 2.0**-25).all()


def test_the_curtain_is_fp32_whatever_the_default() -> None:
    """A half default dtype does not reach the masters, which take fp32 gradients while they are split."""
    master, default = torch.nn.Parameter(torch.ones(3)), torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        assert Curtain([master]).draw_(64).dtype == torch.float32
    finally:
        torch.set_default_dtype(default)
    assert master.dtype == torch.float32
    master.grad = torch.ones(3, dtype=torch.float32)


def test_behind_the_curtain_nothing_is_read_or_written_in_silence() -> None:
    """Closed masters show NaN; torch refuses writes to several values, and a write to a single one is noticed."""
    masters = [torch.nn.Parameter(torch.ones(shape)) for shape in ((3, 2), (), (1,), (0,))]
    curtain = Curtain(masters)
    flat = curtain.draw_(64)
    assert flat.isnan().all()
    assert [m.shape for m in masters] == [(3, 2), (), (1,), (0,)]
    assert all(m.isnan().all() for m in masters)
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="single memory location"):
            masters[0].add_(1)
        curtain.check()
        masters[2].fill_(1.0)
    with pytest.raises(ValueError, match=r"masters .* were written while they were split.*named_masters\(\)"):
        curtain.check()
    assert all(m.isnan().all() for m in masters)
    curtain.check()
