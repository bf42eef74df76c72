"""Flat storage: where slots lie, and that views of them are the tensors' twins."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from strategies import NON_DENSE, TensorSpec, layouts, named_tensors
from torch import Tensor, nn

from mixedopt import CastPolicy, MixedPrecisionOptimizer
from mixedopt.flat import ALIGNMENT, Layout, plan_layout

CPU = torch.device("cpu")
DTYPES = [torch.float16, torch.bfloat16]


def elements_of(layout: Layout, index: int) -> Tensor:
    """Return the offsets in the buffer that a slot's view reaches."""
    return layout.views(torch.arange(layout.size))[index].flatten()


@given(specs=layouts)
def test_slots_are_aligned_disjoint_and_cover_the_buffer_but_for_padding(specs: list[TensorSpec]) -> None:
    """Every slot starts at a multiple of 64, no value belongs to two, and less than 64 follow a slot."""
    named = named_tensors(specs, CPU, torch.float32)
    layout = plan_layout(named)
    reached = [elements_of(layout, index) for index in range(len(named))]
    everything = torch.cat(reached)

    assert 64 == ALIGNMENT
    assert all(slot.offset % ALIGNMENT == 0 for slot in layout.slots)
    assert layout.size % ALIGNMENT == 0
    assert everything.unique().numel() == everything.numel() == layout.numel
    assert sum(tensor.numel() for _, tensor in named) == layout.numel
    for slot, mine in zip(layout.slots, reached, strict=True):
        assert slot.numel == mine.numel()
        assert set(range(slot.offset, slot.offset + slot.numel)) == set(mine.tolist())
    assert set(layout.padding().tolist()) == set(range(layout.size)) - set(everything.tolist())
    ends = [slot.offset + slot.numel for slot in layout.slots]
    starts = [slot.offset for slot in layout.slots[1:]] + [layout.size]
    assert all(0 <= start - end < ALIGNMENT for end, start in zip(ends, starts, strict=True))


@given(specs=layouts)
def test_slots_keep_names_shapes_and_dense_strides(specs: list[TensorSpec]) -> None:
    """Order and names are the caller's; a dense tensor's strides survive, others get those of empty_like."""
    named = named_tensors(specs, CPU, torch.float32)
    layout = plan_layout(named)

    assert [name for name, _ in named] == [slot.name for slot in layout.slots]
    for (_, tensor), slot, spec in zip(named, layout.slots, specs, strict=True):
        assert tuple(tensor.shape) == slot.shape
        assert torch.empty_like(tensor).stride() == slot.stride
        assert (tensor.stride() == slot.stride) or spec.kind in NON_DENSE


def test_strides_of_channels_last_and_transposed_tensors_survive(device: torch.device) -> None:
    """A convolution stays channels_last, a transposed matrix transposed."""
    image = TensorSpec("channels_last").make(device)
    matrix = TensorSpec("transposed").make(device)
    layout = plan_layout([("image", image), ("matrix", matrix)])
    first, second = layout.views(torch.zeros(layout.size, device=device))

    assert first.is_contiguous(memory_format=torch.channels_last)
    assert not first.is_contiguous()
    assert matrix.stride() == second.stride() == (1, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@given(specs=layouts)
def test_collect_after_write_is_identity_on_half_values(dtype: torch.dtype, specs: list[TensorSpec]) -> None:
    """Half values written through the views come back bit for bit; padding stays zero."""
    named = named_tensors(specs, CPU, dtype)
    layout = plan_layout(named)
    flat = torch.zeros(layout.size)
    for view, (_, tensor) in zip(layout.views(flat), named, strict=True):
        view.copy_(tensor)
    collected = [view.to(dtype) for view in layout.views(flat)]

    assert any(bool(tensor.any()) for tensor in collected)
    for (_, expected), actual in zip(named, collected, strict=True):
        assert expected is not actual
        assert torch.equal(expected, actual)
    padding = torch.ones(layout.size, dtype=torch.bool)
    padding[torch.cat([elements_of(layout, index) for index in range(len(named))])] = False
    assert layout.size - layout.numel == int(padding.sum())
    assert not flat[padding].any()


def test_views_alias_the_buffer(device: torch.device, dtype: torch.dtype) -> None:
    """A write on either side shows on the other, for every kind of tensor."""
    named = named_tensors([TensorSpec(kind) for kind in ("scalar", "transposed", "one", "strided")], device, dtype)
    layout = plan_layout(named)
    flat = torch.zeros(layout.size, dtype=dtype, device=device)
    views = layout.views(flat)
    for value, view in enumerate(views, start=1):
        view.fill_(value)
    expected = [value for value, slot in enumerate(layout.slots, start=1) for _ in range(slot.numel)]

    assert all(view.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() for view in views)
    assert expected == flat[flat != 0].tolist()
    flat.fill_(9)
    assert all(bool((view == 9).all()) for view in views)


def test_scalar_empty_and_single_element_tensors_have_slots(device: torch.device) -> None:
    """A 0-d and a 1-element tensor take one line, an empty one takes none."""
    named = [(kind, TensorSpec(kind).make(device)) for kind in ("empty", "scalar", "one", "empty")]
    layout = plan_layout(named)

    assert [0, 0, 64, 128] == [slot.offset for slot in layout.slots]
    assert [0, 1, 1, 0] == [slot.numel for slot in layout.slots]
    assert (2, 128) == (layout.numel, layout.size)
    assert [(2, 0, 3), (), (1,), (2, 0, 3)] == [tuple(v.shape) for v in layout.views(torch.zeros(128, device=device))]


def test_layout_of_nothing_and_of_empty_tensors_is_empty(device: torch.device) -> None:
    """No values, no buffer, and views still work."""
    assert plan_layout([]) == Layout((), 0, frozenset())
    layout = plan_layout([("a", torch.zeros(0, device=device)), ("b", torch.zeros(3, 0, device=device))])

    assert (0, 0) == (layout.numel, layout.size)
    assert [(0,), (3, 0)] == [tuple(view.shape) for view in layout.views(torch.zeros(0, device=device))]


def test_tensors_packed_in_one_storage_keep_their_relative_offsets(device: torch.device) -> None:
    """Whatever the order of the names, and between other tensors; the pack starts aligned."""
    storage = torch.randn(100, device=device)
    pieces = {"a": storage[3:23].view(4, 5), "b": storage[23:30], "c": storage[40:90].view(5, 10).t()}
    for order in itertools.permutations(pieces):
        named = [("before", torch.randn(7, device=device)), *((n, pieces[n]) for n in order)]
        named.insert(2, ("between", torch.randn(70, device=device)))
        layout = plan_layout(named)
        offsets = {slot.name: slot.offset for slot in layout.slots}
        reached = torch.cat([elements_of(layout, index) for index in range(len(named))])

        assert [20, 17] == [offsets["b"] - offsets["a"], offsets["c"] - offsets["b"]]
        assert offsets["a"] % ALIGNMENT == 0
        assert reached.unique().numel() == reached.numel() == layout.numel == 20 + 7 + 50 + 7 + 70
        assert int(reached.max()) < layout.size
        assert {slot.name: slot.stride for slot in layout.slots}["c"] == pieces["c"].stride()


def test_weights_of_a_recurrent_layer_packed_together_stay_packed(device: torch.device) -> None:
    """What cuDNN flattens into one storage is one span after wrapping, too."""
    lstm = nn.LSTM(3, 5, num_layers=2, device=device)
    shapes = [param.shape for param in lstm.parameters()]
    packed = torch.cat([param.detach().flatten() for param in lstm.parameters()])
    start = 0
    for param, shape in zip(lstm.parameters(), shapes, strict=True):
        param.data = packed[start : start + shape.numel()].view(shape)
        start += shape.numel()
    policy = CastPolicy.none()
    MixedPrecisionOptimizer(torch.optim.SGD(lstm.parameters(), lr=0.1), lstm, dtype=torch.bfloat16, policy=policy)
    params = list(lstm.parameters())
    ends = [param.storage_offset() + param.numel() for param in params]

    assert 1 == len({param.untyped_storage().data_ptr() for param in params})
    assert [param.storage_offset() for param in params[1:]] == ends[:-1]
    assert torch.equal(packed.bfloat16(), torch.cat([param.detach().flatten() for param in params]))


def test_views_scattered_over_a_large_storage_are_not_a_pack(device: torch.device) -> None:
    """Two small slices of a big tensor do not drag its gaps along."""
    storage = torch.randn(100_000, device=device)
    layout = plan_layout([("a", storage[:10]), ("b", storage[-10:])])

    assert [0, 64] == [slot.offset for slot in layout.slots]
    assert 128 == layout.size


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda t: t[:10], lambda t: t[5:15]),
        (lambda t: t, lambda t: t),
        (lambda t: t[:20].view(4, 5), lambda t: t[:20].view(4, 5).t()),
        (lambda t: t[:40], lambda t: t[10:11]),
    ],
    ids=["partly", "same", "transposed", "inside"],
)
def test_tensors_that_overlap_are_refused_by_name(first: object, second: object, device: torch.device) -> None:
    """Two different tensors over the same memory would be torn apart."""
    storage = torch.randn(100, device=device)
    named = [("one", first(storage)), ("apart", torch.zeros(3, device=device)), ("two", second(storage))]
    message = r"parameters '(one|two)' and '(one|two)' overlap in memory: each must have its own values\. Tie weights"
    with pytest.raises(ValueError, match=message):
        plan_layout(named)


def test_optimizer_refuses_parameters_that_overlap(device: torch.device) -> None:
    """Also on the public way in."""
    weight = nn.Parameter(torch.randn(4, 4, device=device).half())
    twin = nn.Parameter(weight.detach().t())
    with pytest.raises(ValueError, match="overlap in memory"):
        MixedPrecisionOptimizer(torch.optim.SGD([weight, twin], lr=0.1))


@pytest.mark.parametrize(
    "slices",
    [
        [slice(0, 10), slice(5, 15), slice(20, 40, 2)],
        [slice(0, 10, 2), slice(0, 4)],
        [slice(0, 10, 2), slice(0, 10, 2)],
    ],
    ids=["a strided third", "strided and dense", "the same strided twice"],
)
def test_tensors_that_overlap_are_refused_when_one_is_not_dense(slices: list[slice], device: torch.device) -> None:
    """As documented: ``ValueError`` if two tensors overlap in memory."""
    storage = torch.randn(100, device=device)
    with pytest.raises(ValueError, match="overlap in memory"):
        plan_layout([(f"param{index}", storage[part]) for index, part in enumerate(slices)])


def test_interleaved_tensors_that_share_no_value_are_accepted(device: torch.device) -> None:
    """The even and the odd elements of one storage are two parameters."""
    storage = torch.arange(20.0, device=device)
    layout = plan_layout([("even", storage[::2]), ("odd", storage[1::2])])

    assert [0, 64] == [slot.offset for slot in layout.slots]
    assert [(1,), (1,)] == [slot.stride for slot in layout.slots]
