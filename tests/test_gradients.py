"""Gradients: the norm, the clip and unscale factors, the buffer."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from strategies import KINDS, TensorSpec, layouts, named_tensors
from torch import Tensor, nn

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, StaticLossScale
from mixedopt.flat import plan_layout
from mixedopt.gradients import (
    ROW_OF_HALF,
    SMALL,
    GradientBuffer,
    clip_factor,
    global_norm,
    half_norm,
    may_overflow,
    row_squares,
    unscale_factor,
)

CPU = torch.device("cpu")
# What both norms promise: the quick one sums in fp32 within short rows, and in fp64 above.
NORM_ERROR = 1e-6
# One rounding of a double to fp32, and those of the formula before it.
CLIP_ERROR = 2.0**-22
BAD = [math.inf, -math.inf, math.nan]


def norms_of(*flats: Tensor, within_fp32: bool = False) -> list[float]:
    """Return every norm that is promised to be right: the exact one, and the quick one if it is sure."""
    within = [within_fp32] * len(flats)
    quick, unsure = global_norm(flats, within_fp32=within)
    exact, never = global_norm(flats, within_fp32=within, exact=True)
    assert not bool(never)
    return [float(exact)] + ([] if bool(unsure) else [float(quick)])


def norm_of(flat: Tensor) -> float:
    return norms_of(flat)[0]


def is_sure(*flats: Tensor, within_fp32: bool = False) -> bool:
    return 2 == len(norms_of(*flats, within_fp32=within_fp32))


def assert_norm_is_right(*flats: Tensor, within_fp32: bool = False) -> None:
    expected = float(torch.linalg.vector_norm(torch.cat(flats).double()))
    for actual in norms_of(*flats, within_fp32=within_fp32):
        assert math.isfinite(actual)
        assert abs(expected - actual) <= NORM_ERROR * expected


# -- norm ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 2, 511, 512, 513, 1000, 4096, 100_003, 1_000_000, 10_000_000])
@pytest.mark.parametrize("value", [0.1, 1 / 3])
def test_norm_of_a_constant_is_right_at_any_size(size: int, value: float, device: torch.device) -> None:
    """Equal values are the worst case of a long fp32 sum; the truth is known: value * sqrt(size)."""
    flat = torch.full((size,), value, device=device)
    expected = float(flat[0].double()) * math.sqrt(size)
    actual = norms_of(flat)

    assert 2 == len(actual)
    assert all(abs(expected - norm) <= NORM_ERROR * expected for norm in actual)


@pytest.mark.parametrize("size", [1, 513, 100_003, 10_000_000])
def test_norm_of_random_values_is_right_at_any_size(size: int, device: torch.device) -> None:
    """Against fp64 over the same values."""
    flat = torch.randn(size, device=device)
    assert_norm_is_right(flat)
    assert_norm_is_right(flat.half().float(), within_fp32=True)


@given(
    sizes=st.lists(st.integers(0, 2000), min_size=1, max_size=4).filter(any),
    exponent=st.floats(-30, 30),
    spread=st.floats(0, 10),
    seed=st.integers(0, 2**31),
)
def test_norm_is_right_at_any_magnitude(
    dtype: torch.dtype, sizes: list[int], exponent: float, spread: float, seed: int
) -> None:
    """From 1e-30 to 1e30, over several buffers, values of bf16 as well as of fp32."""
    generator = torch.Generator().manual_seed(seed)
    kept = torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
    flats = []
    for size in sizes:
        powers = exponent + (torch.rand(size, generator=generator) - 1) * spread
        values = torch.randn(size, generator=generator) * 10.0**powers
        flats.append(values.to(kept).float())

    assert_norm_is_right(*flats)
    params = [nn.Parameter(torch.zeros(size, dtype=kept)) for size in sizes]
    params.append(nn.Parameter(torch.zeros(1, dtype=torch.float32 if kept == torch.bfloat16 else torch.bfloat16)))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.0), loss_scale=1.0)
    for param, flat in zip(params, flats, strict=False):
        param.grad = flat.to(kept)
    optimizer.step()
    expected = float(torch.cat(flats).double().norm())
    assert optimizer.last_step.applied
    assert abs(expected - optimizer.last_step.grad_norm) <= NORM_ERROR * expected


@pytest.mark.parametrize("value", [1e30, 1e-30, 3e38, 1e-38, 1e-44, 1e19, 1e-19, 1e-23])
@pytest.mark.parametrize("size", [1, 512, 513, 70_000])
def test_norm_is_right_where_squares_leave_fp32(value: float, size: int, device: torch.device) -> None:
    """Squares of 1e30 are inf in fp32, those of 1e-30 are zero; the norm is neither."""
    flat = torch.full((size,), value, device=device)
    expected = float(flat[0].double()) * math.sqrt(size)
    for actual in norms_of(flat):
        assert math.isfinite(actual)
        assert abs(expected - actual) <= NORM_ERROR * expected


def test_norm_of_tiny_values_beside_large_ones_is_right(device: torch.device) -> None:
    """Rows whose squares vanish do not spoil rows that count, nor the other way round."""
    for large in (1e-10, 1.0, 1e30):
        flat = torch.full((512 * 40,), 1e-30, device=device)
        flat[1000:1003] = large
        assert_norm_is_right(flat)
        assert_norm_is_right(flat[2000:], flat[:1500])


def test_norm_of_zeros_and_of_nothing_is_zero(device: torch.device) -> None:
    """Zero gradients are finite and have norm 0."""
    for size in (0, 64, 700, 5000):
        assert {0.0} == set(norms_of(torch.zeros(size, device=device)))
        assert {0.0} == set(norms_of(torch.zeros(size, device=device), within_fp32=True))


def test_quick_norm_is_sure_of_ordinary_gradients(device: torch.device) -> None:
    """From 1e-12 to 1e12, and of any gradient that is known to be fp16."""
    for value in (1e-12, 1.0, 1e12):
        assert is_sure(torch.full((5000,), value, device=device))
    for value in (0.0, 2.0**-24, 65504.0):
        assert is_sure(torch.full((5000,), value, device=device), within_fp32=True)
        assert_norm_is_right(torch.full((5000,), value, device=device), within_fp32=True)


@given(
    size=st.integers(1, 3000),
    bad=st.lists(st.sampled_from(BAD), min_size=1, max_size=3),
    fill=st.sampled_from([0.0, 1e-30, 1.0, 3e38]),
    huge=st.booleans(),
    data=st.data(),
)
def test_norm_is_finite_iff_every_element_is(
    size: int, bad: list[float], fill: float, huge: bool, data: st.DataObject
) -> None:
    """One inf, -inf or NaN anywhere shows, beside finite values whose squares overflow too; without it nothing does."""
    flat = torch.full((size,), fill)
    if huge:
        flat[: data.draw(st.integers(0, size))] = 1e30
    cut = data.draw(st.integers(0, size))
    assert all(math.isfinite(norm) for norm in norms_of(flat[:cut], flat[cut:]))
    for value in bad:
        flat[data.draw(st.integers(0, size - 1))] = value

    assert not any(math.isfinite(norm) for norm in norms_of(flat[:cut], flat[cut:]))


LARGE = [SMALL + 1, SMALL + ROW_OF_HALF, 2 * SMALL - 1]


@given(
    size=st.sampled_from([0, 1, SMALL, *LARGE]),
    runs=st.lists(st.tuples(st.just(0) | st.integers(0, 2**15), st.integers(-134, 127)), max_size=4),
    bad=st.lists(st.sampled_from(BAD), max_size=2),
    seed=st.integers(0, 2**31),
)
def test_norm_of_half_values_is_right_and_finite_iff_they_are(
    dtype: torch.dtype, size: int, runs: list[tuple[int, int]], bad: list[float], seed: int
) -> None:
    """From subnormal numbers to the largest, in one buffer or not, never unsure: an fp64 norm, in relative terms."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn(size, generator=generator, dtype=torch.float64)
    for start, exponent in runs:
        wide[start:] *= 2.0**exponent / float(wide[start:].abs().max() if wide[start:].numel() else 1.0)
    limit = torch.finfo(dtype).max
    flat = wide.clamp(-limit, limit).to(dtype)
    expected = float(torch.linalg.vector_norm(flat.double()))
    found = half_norm(flat)
    assert found.dtype == torch.float64
    assert abs(expected - float(found)) <= NORM_ERROR * expected
    if size and bad:
        for value in bad:
            flat[int(torch.randint(size, (), generator=generator))] = value
        assert not math.isfinite(float(half_norm(flat)))


@pytest.mark.parametrize("size", [*LARGE, 1_000_003])
@pytest.mark.parametrize("value", [0.1, 1 / 3, 1.9])
def test_norm_of_equal_half_values_is_right(size: int, value: float, dtype: torch.dtype) -> None:
    """The worst case of a long fp32 sum."""
    flat = torch.full((size,), value, dtype=dtype)
    expected = float(flat[0].double()) * math.sqrt(size)
    assert abs(expected - float(half_norm(flat))) <= NORM_ERROR * expected


@pytest.mark.parametrize("value", [6e-8, 1e-7, 1e-3, 1.0, 65504.0, 1e-30, 1e-12, 1e12, 1e30, 3e38, 0.0, math.inf])
def test_half_values_are_measured_once_unless_their_squares_leave_fp32(
    value: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fp16 values, whatever they are, and ordinary bf16 ones: one pass; it reads each value once."""
    again: list[int] = []
    monkeypatch.setattr("mixedopt.gradients.exact_norm", lambda flat: again.append(1) or flat.double().norm())
    rows: list[int] = []
    flat = torch.full((LARGE[-1],), value).to(dtype)
    half_norm(flat, lambda part: rows.append(part.numel()) or row_squares(part))
    assert [flat.numel() // ROW_OF_HALF * ROW_OF_HALF] == rows
    assert bool(again) == (dtype == torch.bfloat16 and not 1e-11 < value < 1e17)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("size", [64, 512, 1024, 1088])
def test_bad_element_shows_at_every_edge_of_a_buffer(bad: float, size: int, device: torch.device) -> None:
    """First, last, and both sides of the borders between the rows of a sum."""
    for position in {0, 1, 511 % size, 512 % size, size - 2, size - 1}:
        flat = torch.ones(size, device=device)
        flat[position] = bad
        assert not any(math.isfinite(norm) for norm in norms_of(flat))
        assert not any(math.isfinite(norm) for norm in norms_of(flat, within_fp32=True))


@pytest.mark.parametrize("bad", BAD)
def test_bad_element_at_the_end_of_the_last_parameter_skips_the_step(
    bad: float, device: torch.device, dtype: torch.dtype
) -> None:
    """The last value of the last slot, in half and in fp32 parameters; everything stays bit-identical."""
    for target in (1, 2):
        params = [nn.Parameter(torch.ones(n, device=device, dtype=dtype)) for n in (600, 70)]
        params.append(nn.Parameter(torch.ones(130, device=device)))
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5), loss_scale=1.0)
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.ones_like(param)
        params[target].grad[-1] = bad
        optimizer.step()
        assert optimizer.last_step.skipped
        assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
        assert optimizer.last_step.applied
        assert all(bool((param == 0.5).all()) for param in params)


@pytest.mark.parametrize("beside", [1.0, 0.0, 60000.0, 1e30])
@pytest.mark.parametrize("bad", BAD)
def test_inf_that_the_users_edits_hide_still_skips(bad: float, beside: float, device: torch.device) -> None:
    """unscale_, then edits that make everything finite: the step that met an inf is a skip all the same."""
    params = [nn.Parameter(torch.ones(1500, device=device, dtype=own)) for own in (torch.bfloat16, torch.float32)]
    for target in (0, 1):
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.5), loss_scale=1.0)
        before = [param.detach().clone() for param in params]
        for param in params:
            param.grad = torch.full_like(param, beside)
        params[target].grad[-1] = bad
        optimizer.unscale_()
        for _, master in optimizer.named_masters():
            master.grad.nan_to_num_(0.0, 0.0, 0.0).clamp_(-1, 1)
        optimizer.step()
        assert optimizer.last_step.skipped
        assert all(torch.equal(old, new) for old, new in zip(before, params, strict=True))
        params = [nn.Parameter(param.detach().clone()) for param in params]


# -- clip and unscale ----------------------------------------------------------


def clipped_by_torch(grads: list[Tensor], limit: float) -> tuple[Tensor, list[Tensor]]:
    params = [nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    norm = torch.nn.utils.clip_grad_norm_(params, limit)
    return norm, [param.grad for param in params]


@given(norm=st.floats(0, 1e30), exponent=st.integers(-14, 32), limit=st.floats(1e-6, 1e6))
def test_clip_factor_follows_torch_formula(norm: float, exponent: int, limit: float) -> None:
    """1/S * min(1, limit / (norm/S + 1e-6)), in doubles, rounded once."""
    scale = 2.0**exponent
    expected = 1 / scale * min(1.0, limit / (norm / scale + 1e-6))
    actual = clip_factor(torch.tensor(norm, dtype=torch.float64), unscale_factor(torch.tensor(scale)), limit)

    assert torch.float32 == actual.dtype
    assert abs(expected - float(actual)) <= CLIP_ERROR * expected + 2.0**-149


def test_norm_below_the_limit_is_not_touched(device: torch.device) -> None:
    """The factor is then 1/S exactly."""
    norm, scale = torch.tensor(99.0, dtype=torch.float64, device=device), torch.tensor(128.0, device=device)

    assert 1 / 128 == float(clip_factor(norm, unscale_factor(scale), 1.0))
    assert 1 / 128 != float(clip_factor(norm, unscale_factor(scale), 0.5))


@pytest.mark.parametrize("limit", [1e-3, 1.0, 5.0, 1e4])
def test_clipped_step_equals_torch_clip_grad_norm(limit: float, device: torch.device) -> None:
    """With SGD(lr=1) the master moves by the gradient that clip_grad_norm_ leaves, within rounding."""
    grads = [torch.randn(n, device=device).half().float() for n in (3, 300, 700)]
    params = [nn.Parameter(torch.zeros_like(grad).half()) for grad in grads]
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(params, lr=1.0), loss_scale=StaticLossScale(64.0), max_grad_norm=limit
    )
    optimizer.backward(sum((p.float() * g).sum() for p, g in zip(params, grads, strict=True)))
    optimizer.step()
    norm, expected = clipped_by_torch(grads, limit)

    assert abs(float(norm) - optimizer.last_step.grad_norm) <= NORM_ERROR * float(norm)
    for grad, (_, master) in zip(expected, optimizer.named_masters(), strict=True):
        assert grad.any()
        torch.testing.assert_close(-grad, master.detach(), rtol=NORM_ERROR, atol=0.0)


def test_finite_gradients_whose_half_norm_overflows_are_clipped_to_the_limit(device: torch.device) -> None:
    """One gradient of 300 and sixteen of 3e4: norms 300 and 1.2e5, both clipped to unit norm."""
    for count, value, norm in [(1, 300.0, 300.0), (16, 3e4, 1.2e5)]:
        param = nn.Parameter(torch.zeros(count, device=device, dtype=torch.float16))
        optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=1.0), loss_scale=1.0, max_grad_norm=1.0)
        param.grad = torch.full_like(param, value)
        optimizer.step()
        master = next(master for _, master in optimizer.named_masters())

        assert optimizer.last_step.applied
        assert abs(norm - optimizer.last_step.grad_norm) <= NORM_ERROR * norm
        assert abs(1.0 - float(torch.linalg.vector_norm(master.detach()))) <= 2 * NORM_ERROR


def test_finite_gradients_whose_half_sum_overflows_are_applied(device: torch.device) -> None:
    """[6e4, 6e4]: the sum is inf in half, the elements are finite, the step happens."""
    param = nn.Parameter(torch.zeros(2, device=device, dtype=torch.float16))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=2.0**-10), loss_scale=1.0)
    param.grad = torch.full_like(param, 6e4)
    assert param.grad.sum().isinf()
    optimizer.step()

    assert optimizer.last_step.applied
    assert abs(6e4 * math.sqrt(2) - optimizer.last_step.grad_norm) <= NORM_ERROR * 1e5
    assert [-6e4 * 2.0**-10] * 2 == next(master for _, master in optimizer.named_masters()).tolist()


@given(scale=st.floats(2.0**-126, 2.0**127, width=32))
def test_unscale_factor_equals_grad_scalers(scale: float) -> None:
    """GradScaler takes the reciprocal in double and rounds once."""
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    param = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=1.0)
    scaler.scale(torch.ones(()))
    param.grad = torch.ones(1)
    scaler.unscale_(optimizer)

    assert float(param.grad) == float(unscale_factor(torch.tensor(scale)))


@given(gradient=st.floats(2.0**-14, 60000.0, width=16), exponent=st.integers(-14, 40))
def test_unscale_after_scale_is_identity_for_powers_of_two(gradient: float, exponent: int) -> None:
    """S*g/S is g, bit for bit, while S*g is a normal number."""
    scale = torch.tensor(2.0**exponent)

    assert gradient == float(torch.tensor(gradient) * scale * unscale_factor(scale))


@given(value=st.floats(2.0**-33, 2.0**127, width=32), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_overflow_of_g_over_s_is_never_overlooked(value: float, scale: float) -> None:
    """If g/S is inf in fp32, ``may_overflow`` says so; with S >= 1 it never does."""
    flat, factor = torch.tensor([value]), torch.tensor(scale)
    suspected = bool(may_overflow(torch.tensor(norm_of(flat), dtype=torch.float64), unscale_factor(factor)))

    assert suspected or bool((flat * unscale_factor(factor)).isfinite().all())
    assert not suspected or scale < 1


@pytest.mark.parametrize("unscale_first", [False, True])
def test_gradients_whose_norm_but_no_element_leaves_fp32_when_unscaled_are_applied(
    unscale_first: bool, device: torch.device
) -> None:
    """S=0.5, 64 gradients of 1e38: each g/S is finite, only the norm is 1.6e39."""
    param = nn.Parameter(torch.zeros(64, device=device, dtype=torch.bfloat16))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=2.0**-100), loss_scale=0.5)
    param.grad = torch.full_like(param, 1e38)
    expected = -(param.grad.float() * 2) * 2.0**-100
    if unscale_first:
        optimizer.unscale_()
    optimizer.step()

    assert optimizer.last_step.applied
    assert torch.equal(expected, next(master for _, master in optimizer.named_masters()).detach())


# -- buffer ----------------------------------------------------------------------


@given(specs=layouts, data=st.data())
def test_gathered_gradients_are_the_widened_ones_and_absent_ones_are_zero(
    dtype: torch.dtype, specs: list[TensorSpec], data: st.DataObject
) -> None:
    """Over several rounds: present views equal the gradients, absent slots and padding are zero, none leaks."""
    layout = plan_layout(named_tensors(specs, CPU, torch.float32))
    buffer = GradientBuffer(layout, CPU)
    for _ in range(3):
        grads = [
            spec.make(CPU, data.draw(st.sampled_from([dtype, torch.float32]))) if data.draw(st.booleans()) else None
            for spec in specs
        ]
        shown = buffer.gather_(grads)
        reached = torch.zeros(layout.size, dtype=torch.bool)
        for slot, grad, view in zip(layout.slots, grads, shown, strict=True):
            assert (grad is None) == (view is None)
            if grad is not None and view is not None:
                assert grad is not view
                assert torch.equal(grad.float(), view)
                assert (
                    view.numel() == 0 or view.untyped_storage().data_ptr() == buffer.flat.untyped_storage().data_ptr()
                )
                slot.view(reached).fill_(True)
        assert not buffer.flat[~reached].any()
        assert layout.size == buffer.flat.numel()


def test_views_of_the_buffer_are_in_slot_order_and_alias_it(device: torch.device, dtype: torch.dtype) -> None:
    """Multiplying the flat buffer multiplies every gradient, padding stays zero."""
    named = named_tensors([TensorSpec(kind) for kind in KINDS], device, dtype)
    buffer = GradientBuffer(plan_layout(named), device)
    shown = buffer.gather_([tensor for _, tensor in named])
    buffer.flat.mul_(0.5)

    for (_, grad), view, same in zip(named, shown, buffer.views, strict=True):
        assert view is same
        assert torch.equal(grad.float() * 0.5, view)
    assert torch.linalg.vector_norm(torch.cat([g.float().flatten() for _, g in named])) > 0
    expected = torch.cat([grad.float().flatten() for _, grad in named]).double().norm() / 2
    assert abs(float(expected) - norm_of(buffer.flat)) <= NORM_ERROR * float(expected)


def test_stale_values_do_not_count_after_a_bad_round(device: torch.device, dtype: torch.dtype) -> None:
    """An inf of the last round is gone, whether its parameter has a gradient now or none."""
    named = [("a", torch.ones(5, device=device, dtype=dtype)), ("b", torch.ones(70, device=device, dtype=dtype))]
    buffer = GradientBuffer(plan_layout(named), device)
    bad = [torch.full_like(tensor, math.nan) for _, tensor in named]
    for grads, expected in [
        ([named[0][1], None], math.sqrt(5)),
        ([None, named[1][1]], math.sqrt(70)),
        ([None, None], 0),
    ]:
        buffer.gather_(bad)
        buffer.release(keep=False)
        assert not math.isfinite(norm_of(torch.cat([b.flatten().float() for b in bad])))
        buffer.gather_(grads)
        assert abs(expected - norm_of(buffer.flat)) <= NORM_ERROR * max(expected, 1)


def test_buffer_is_made_lazily_and_zero(device: torch.device) -> None:
    """Reading ``flat`` or ``views`` first makes it."""
    layout = plan_layout([("a", torch.ones(3, device=device)), ("b", torch.ones(2, 2, device=device))])

    assert not GradientBuffer(layout, device).flat.any()
    assert [(3,), (2, 2)] == [tuple(view.shape) for view in GradientBuffer(layout, device).views]
    assert torch.float32 == GradientBuffer(layout, device).flat.dtype


def test_parameter_without_gradient_is_not_stepped_and_does_not_count(device: torch.device, dtype: torch.dtype) -> None:
    """After a step with both, a step with one alone moves that one, with its own norm."""
    params = [nn.Parameter(torch.ones(n, device=device, dtype=dtype)) for n in (4, 9)]
    optimizer = MixedPrecisionOptimizer(torch.optim.Adam(params, lr=0.1), loss_scale=1.0)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    other, moved = params[1].detach().clone(), params[0].detach().clone()
    params[0].grad = torch.ones_like(params[0])
    optimizer.step()

    assert 2.0 == optimizer.last_step.grad_norm
    assert torch.equal(other, params[1])
    assert not torch.equal(moved, params[0])
    assert [2, 1] == [int(entry["step"]) for entry in optimizer.inner.state.values()]


@pytest.mark.parametrize("loss_scale", [StaticLossScale(2.0**-130), DynamicLossScale(2.0**-130, min_scale=2.0**-149)])
def test_padding_stays_zero_when_the_unscale_factor_overflows(loss_scale: object) -> None:
    """A subnormal S skips its steps; after a load of S=1 clean steps are applied again."""
    kind = type(loss_scale)
    param = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.5), loss_scale=loss_scale)
    other = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    healthy = MixedPrecisionOptimizer(torch.optim.SGD([other], lr=0.5), loss_scale=kind(1.0))
    param.grad = torch.ones_like(param)
    optimizer.step()
    assert optimizer.last_step.skipped
    optimizer.load_state_dict(healthy.state_dict())
    param.grad = torch.ones_like(param)
    optimizer.step()

    assert optimizer.last_step.applied


def test_group_added_between_unscale_and_step_waits_for_the_next_step(device: torch.device) -> None:
    """The old gradients are applied, the new parameter has none and stays put."""
    old = nn.Parameter(torch.ones(3, device=device, dtype=torch.float16))
    new = nn.Parameter(torch.ones(3, device=device))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([old], lr=0.5), loss_scale=1.0)
    old.grad = torch.ones_like(old)
    optimizer.unscale_()
    optimizer.add_param_group({"params": [new]})
    optimizer.step()

    assert optimizer.last_step.applied
    assert bool((old == 0.5).all())
    assert bool((new == 1.0).all())
