"""Masters: the model always shows them, edits reach them, nothing is lost in silence."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from strategies import Bag, bags
from torch import Tensor, nn

from mixedopt import CastPolicy, MixedPrecisionOptimizer
from mixedopt.bucket import Bucket
from mixedopt.masters import MasterWeights

CPU = torch.device("cpu")
# Between two looks for a weight beyond the half range, in applied steps.
LOOK_INTERVAL = 64


class Mixed(nn.Module):
    """A half layer, an fp32 island, a tied head, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.frozen = nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.frozen(self.embed(ids))))


def wrapped(device: torch.device, dtype: torch.dtype, **options: Any) -> tuple[Mixed, MixedPrecisionOptimizer]:
    model = Mixed().to(device)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    return model, MixedPrecisionOptimizer(inner, model, dtype=dtype, **{"loss_scale": 8.0, **options})


def train_step(model: nn.Module, optimizer: MixedPrecisionOptimizer, device: torch.device) -> None:
    optimizer.backward(model(torch.tensor([0, 2, 5], device=device)).square().sum())
    optimizer.step()


def assert_model_shows_masters(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
    """Assert model weight == master.to(its dtype), exactly, for every master."""
    params = dict(model.named_parameters())
    masters = dict(optimizer.named_masters())
    assert masters
    for name, master in masters.items():
        assert master is not params[name]
        assert torch.float32 == master.dtype
        assert torch.equal(master.to(params[name].dtype), params[name])


def copies(named: Any) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in dict(named).items()}


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    """True iff both hold the same names and bits, in different tensors."""
    assert one.keys() == other.keys()
    assert all(one[name] is not other[name] for name in one)
    return all(torch.equal(one[name], other[name]) for name in one)


# -- the model shows the masters -------------------------------------------------


def test_model_shows_masters_after_construction_step_skip_publish_and_refresh(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Exactly, at every moment between two calls."""
    model, optimizer = wrapped(device, dtype)
    assert_model_shows_masters(model, optimizer)
    before = copies(optimizer.named_masters())
    for _ in range(3):
        train_step(model, optimizer, device)
        assert_model_shows_masters(model, optimizer)
    assert not same(before, copies(optimizer.named_masters()))
    model.embed.weight.grad = torch.full_like(model.embed.weight, math.inf)
    optimizer.step()
    assert optimizer.last_step.skipped
    assert_model_shows_masters(model, optimizer)
    with torch.no_grad():
        for _, master in optimizer.named_masters():
            master.add_(1 / 3)
    optimizer.publish()
    assert_model_shows_masters(model, optimizer)
    model.embed.weight.data.mul_(1.7)
    optimizer.refresh_masters()
    assert_model_shows_masters(model, optimizer)


@given(model=bags(CPU))
def test_masters_keep_fp32_values_and_every_layout(dtype: torch.dtype, model: Bag) -> None:
    """0-d, empty, strided, tied, channels_last: masters are the fp32 weights, bit for bit, of the same shape."""
    before = copies(model.named_parameters())
    identities = [id(param) for param in model.parameters()]
    inner = torch.optim.SGD(model.parameters(), lr=0.125)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=2.0)

    assert identities == [id(param) for param in model.parameters()]
    assert same(before, copies(optimizer.named_masters()))
    assert_model_shows_masters(model, optimizer)
    for (_, master), param in zip(optimizer.named_masters(), model.parameters(), strict=True):
        assert (param.shape, param.stride()) == (master.shape, master.stride())
    optimizer.backward(model())
    optimizer.step()
    assert_model_shows_masters(model, optimizer)
    # d(sum of squares) = 2w, w in half.
    for name, master in optimizer.named_masters():
        assert torch.equal(before[name] - 0.125 * 2 * before[name].to(dtype).float(), master.detach())


def test_tied_parameter_has_one_master_and_its_gradient_counts_once(device: torch.device, dtype: torch.dtype) -> None:
    """The embedding and the head stay one object, of one dtype, with one master."""
    model, optimizer = wrapped(device, dtype)
    train_step(model, optimizer, device)

    assert model.head.weight is model.embed.weight
    assert ["embed.weight", "norm.weight", "norm.bias"] == [name for name, _ in optimizer.named_masters()]
    assert_model_shows_masters(model, optimizer)


def test_frozen_parameters_have_no_master_and_never_move(device: torch.device, dtype: torch.dtype) -> None:
    """They become half with the rest, and keep their bits."""
    model, optimizer = wrapped(device, dtype)
    before = copies(model.frozen.named_parameters())
    for _ in range(2):
        train_step(model, optimizer, device)

    assert same(before, copies(model.frozen.named_parameters()))
    assert {dtype} == {param.dtype for param in model.frozen.parameters()}
    assert not any(name.startswith("frozen") for name, _ in optimizer.named_masters())


def test_fp32_parameters_are_their_own_masters(device: torch.device, dtype: torch.dtype) -> None:
    """Same storage, no second copy: a write to one shows in the other."""
    model, optimizer = wrapped(device, dtype)
    master = dict(optimizer.named_masters())["norm.weight"]

    assert torch.float32 == model.norm.weight.dtype
    assert master.data_ptr() == model.norm.weight.data_ptr()
    assert master is not model.norm.weight
    with torch.no_grad():
        master.fill_(3.0)
    assert bool((model.norm.weight == 3.0).all())


def test_slots_hold_only_the_trainable_values(device: torch.device, dtype: torch.dtype) -> None:
    """10 trainable of 1000 values, a second group all frozen: 10 values in a buffer of 64."""
    params = [torch.ones(10, device=device), torch.ones(990, device=device), torch.ones(500, device=device)]
    trainable, frozen, other = (nn.Parameter(value.to(dtype)) for value in params)
    frozen.requires_grad_(False)
    other.requires_grad_(False)
    inner = torch.optim.AdamW([{"params": [trainable, frozen]}, {"params": [other]}], lr=0.1)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=1.0)
    masters = [master for _, master in optimizer.named_masters()]
    trainable.grad = torch.ones_like(trainable)
    optimizer.step()

    assert [10] == [master.numel() for master in masters]
    assert 64 * 4 == masters[0].untyped_storage().nbytes()
    assert [2, 1] == [len(group["params"]) for group in optimizer.param_groups]
    assert optimizer.last_step.applied
    assert not (trainable == 1).any()
    assert bool((frozen == 1).all())
    assert bool((other == 1).all())


def test_bucket_of_ten_values_has_a_layout_of_ten_in_sixty_four(device: torch.device, dtype: torch.dtype) -> None:
    """The same, one room below: layout.numel is 10, its size 64."""
    masters = MasterWeights()
    param = nn.Parameter(torch.ones(10, device=device))
    masters.extend([("a", param)], [dtype])
    (bucket,) = masters.buckets

    assert (10, 64) == (bucket.layout.numel, bucket.layout.size)
    assert 64 == bucket.flat_master.numel() == bucket.flat_model.numel()
    assert dtype == bucket.flat_model.dtype == param.dtype
    assert {param: bucket.masters[0]} == masters.of


def test_one_bucket_per_dtype_and_older_masters_stay_where_they_are(device: torch.device) -> None:
    """Adding parameters makes new buckets; the old storage does not move."""
    masters = MasterWeights()
    params = [nn.Parameter(torch.randn(3, device=device)) for _ in range(5)]
    dtypes = [torch.float16, torch.float32, torch.bfloat16, torch.float16]
    masters.extend([(f"p{i}", p) for i, p in enumerate(params[:4])], dtypes)
    pointers = [masters.of[param].data_ptr() for param in params[:4]]
    masters.extend([("p4", params[4])], [torch.float16])

    half, single = torch.float16, torch.float32
    assert [half, single, torch.bfloat16, half] == [bucket.dtype for bucket in masters.buckets]
    assert [["p0", "p3"], ["p1"], ["p2"], ["p4"]] == [bucket.names for bucket in masters.buckets]
    assert pointers == [masters.of[param].data_ptr() for param in params[:4]]
    assert dtypes == [param.dtype for param in params[:4]]


def test_weights_and_masters_are_views_of_flat_buffers_with_padding_zero(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Invariants of a bucket after construction, publish and refresh."""
    named = [("a", nn.Parameter(torch.ones(3, device=device))), ("b", nn.Parameter(torch.ones(70, device=device)))]
    bucket = Bucket(named, dtype)
    with torch.no_grad():
        bucket.masters[0].fill_(1 / 3)
        bucket.publish_()
        bucket.params[1].fill_(2.0)
        bucket.refresh_()

    for flat, tensors in ((bucket.flat_master, bucket.masters), (bucket.flat_model, bucket.params)):
        assert 192 == flat.numel()
        assert 73 == int((flat != 0).sum())
        assert {flat.untyped_storage().data_ptr()} == {tensor.untyped_storage().data_ptr() for tensor in tensors}
    assert torch.equal(bucket.flat_master.to(dtype), bucket.flat_model)
    assert bool((bucket.masters[1] == 2.0).all())


# -- edits -------------------------------------------------------------------------


def test_refresh_rewrites_only_values_whose_half_rounding_differs(device: torch.device, dtype: torch.dtype) -> None:
    """An untouched weight keeps the low bits of its master; an edited one becomes the weight."""
    param = nn.Parameter(torch.full((4,), 1.0003, device=device))
    model = nn.ParameterList([param])
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.0), model, dtype=dtype)
    master = next(master for _, master in optimizer.named_masters())
    low_bits = float(torch.tensor(1.0003))
    assert low_bits != float(param.detach()[0])
    param.data[1] = 5.0
    param.data[2] = param.data[2].clone()
    optimizer.refresh_masters()

    assert [low_bits, 5.0, low_bits, low_bits] == master.tolist()


def test_refresh_keeps_moments_and_counters(device: torch.device, dtype: torch.dtype) -> None:
    """Weights change, the inner state does not."""
    model, optimizer = wrapped(device, dtype)
    train_step(model, optimizer, device)
    before = copy.deepcopy(list(optimizer.inner.state.values()))
    masters = copies(optimizer.named_masters())
    model.embed.weight.data.mul_(3.0)
    optimizer.refresh_masters()
    after = list(optimizer.inner.state.values())

    assert not same(masters, copies(optimizer.named_masters()))
    assert len(before) == len(after) == 3
    assert all(torch.equal(one[key], other[key]) for one, other in zip(before, after, strict=True) for key in one)


@pytest.mark.parametrize("edit", ["in place", "load_state_dict", "copy_ of one row"])
def test_weights_edited_in_place_are_noticed_by_step(edit: str, device: torch.device, dtype: torch.dtype) -> None:
    """With lr=0 the model still holds the edit after a step, and the masters have it."""
    model = nn.Linear(4, 2, device=device)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, dtype=dtype, loss_scale=1.0)
    other = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    masters = copies(optimizer.named_masters())
    with torch.no_grad():
        if edit == "in place":
            model.weight.add_(1)
            model.bias.add_(1)
        elif edit == "load_state_dict":
            model.load_state_dict(other)
        else:
            model.weight[0].copy_(other["weight"][0])
    edited = copies(model.named_parameters())
    optimizer.backward(model(torch.ones(3, 4, device=device)).sum())
    optimizer.step()

    assert optimizer.last_step.applied
    assert same(edited, copies(model.named_parameters()))
    assert not same(masters, copies(optimizer.named_masters()))
    assert_model_shows_masters(model, optimizer)


@pytest.mark.parametrize("same_values", [True, False])
def test_masters_edited_after_a_load_are_published(same_values: bool, device: torch.device, dtype: torch.dtype) -> None:
    """What was loaded into the model is taken over at once, not later over the edit: schedule-free resumes do this."""
    model = nn.Linear(4, 2, device=device)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.0), model, dtype=dtype, loss_scale=1.0)
    model.load_state_dict({name: t.clone() if same_values else t + 1 for name, t in model.state_dict().items()})
    loaded = copies(model.named_parameters())
    with torch.no_grad():
        for _, master in optimizer.named_masters():
            master.mul_(2)
    optimizer.publish()
    assert same({name: 2 * value for name, value in loaded.items()}, copies(model.named_parameters()))
    assert_model_shows_masters(model, optimizer)


def test_edit_of_one_weight_leaves_the_low_bits_of_the_others(device: torch.device, dtype: torch.dtype) -> None:
    """step() takes over the edited parameter, not the roundings of the rest."""
    params = [nn.Parameter(torch.full((3,), 1.0003, device=device)) for _ in range(2)]
    model = nn.ParameterList(params)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(params, lr=0.0), model, dtype=dtype, loss_scale=1.0)
    with torch.no_grad():
        params[0].fill_(2.0)
    params[1].grad = torch.ones_like(params[1])
    optimizer.step()
    first, second = (master.tolist() for _, master in optimizer.named_masters())

    assert [2.0] * 3 == first
    assert [float(torch.tensor(1.0003))] * 3 == second


@pytest.mark.parametrize("target", ["embed.weight", "norm.weight"])
def test_parameter_moved_out_of_the_flat_storage_is_refused_by_name(
    target: str, device: torch.device, dtype: torch.dtype
) -> None:
    """``p.data = ...`` orphans the master: step() raises and nothing has changed."""
    model, optimizer = wrapped(device, dtype)
    train_step(model, optimizer, device)
    before = copies(optimizer.named_masters())
    param = dict(model.named_parameters())[target]
    param.data = param.data.clone()
    optimizer.backward(model(torch.tensor([1], device=device)).sum())
    with pytest.raises(ValueError, match=rf"parameter '{target}' was moved out of the optimizer's flat storage"):
        optimizer.step()

    assert same(before, copies(optimizer.named_masters()))
    assert 1 == optimizer.applied_steps


def test_master_edited_in_place_is_shown_after_publish(device: torch.device, dtype: torch.dtype) -> None:
    """Edit, publish, step: the edit counts."""
    model, optimizer = wrapped(device, dtype)
    master = dict(optimizer.named_masters())["embed.weight"]
    with torch.no_grad():
        master.fill_(1 / 3)
    optimizer.publish()

    assert torch.equal(torch.full_like(model.embed.weight, 1 / 3), model.embed.weight)
    model.embed.weight.grad = torch.zeros_like(model.embed.weight)
    optimizer.param_groups[0]["lr"] = 0.0
    optimizer.step()
    assert bool((master == float(torch.tensor(1 / 3))).all())


# -- the half range ------------------------------------------------------------------


def half_model(device: torch.device, value: float, lr: float = 0.0) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.ParameterDict({"small": nn.Parameter(torch.ones(3)), "large": nn.Parameter(torch.full((3,), value))})
    model.to(device)
    return model, torch.optim.SGD(model.parameters(), lr=lr)


UNFIT = r"parameter 'large' holds {}, beyond the largest value of torch\.{}, {}\. Keep it in fp32 with policy\.keep"


@pytest.mark.parametrize(
    ("half", "value", "shown", "limit"),
    [(torch.float16, -70000.0, "70000", "65504"), (torch.bfloat16, 3.4e38, r"3\.4e\+38", r"3\.38953e\+38")],
    ids=["fp16", "bf16"],
)
def test_weight_beyond_the_half_range_is_refused_at_construction(
    half: torch.dtype, value: float, shown: str, limit: str, device: torch.device
) -> None:
    """The parameter is named and nothing has changed: same dtypes, same bits, same objects."""
    model, inner = half_model(device, value)
    before = copies(model.named_parameters())
    held = [id(param) for param in inner.param_groups[0]["params"]]
    with pytest.raises(ValueError, match=UNFIT.format(shown, str(half).split(".")[1], limit)):
        MixedPrecisionOptimizer(inner, model, dtype=half)

    assert same(before, copies(model.named_parameters()))
    assert {torch.float32} == {param.dtype for param in model.parameters()}
    assert held == [id(param) for param in inner.param_groups[0]["params"]]


def test_largest_value_that_rounds_into_the_range_is_accepted(device: torch.device) -> None:
    """65519 rounds to 65504; 65520 rounds to inf; a kept parameter may hold anything."""
    model, inner = half_model(device, 65519.0)
    MixedPrecisionOptimizer(inner, model)
    assert [65504.0] * 3 == model["large"].tolist()

    model, inner = half_model(device, 65520.0)
    with pytest.raises(ValueError, match=UNFIT.format("65520", "float16", "65504")):
        MixedPrecisionOptimizer(inner, model)
    MixedPrecisionOptimizer(inner, model, policy=CastPolicy.default().keep("large"))
    assert [65520.0] * 3 == model["large"].tolist()


def test_publish_of_a_master_beyond_the_half_range_is_refused(device: torch.device) -> None:
    """Nothing is written, of the other masters neither."""
    model, inner = half_model(device, 1.0)
    optimizer = MixedPrecisionOptimizer(inner, model)
    before = copies(model.named_parameters())
    with torch.no_grad():
        for name, master in optimizer.named_masters():
            master.fill_(1e5 if name == "large" else 2.0)
    with pytest.raises(ValueError, match=UNFIT.format("100000", "float16", "65504")):
        optimizer.publish()

    assert same(before, copies(model.named_parameters()))


def grown_beyond_range(device: torch.device) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Return an optimizer that has just let the weight 'large' grow to 1.3e5."""
    model, inner = half_model(device, 50000.0, lr=2.0)
    optimizer = MixedPrecisionOptimizer(inner, model, loss_scale=1.0)
    step_with(model, optimizer, large=-40000.0)
    assert optimizer.last_step.applied
    assert model["large"].isinf().all()
    return model, optimizer


def step_with(model: nn.Module, optimizer: MixedPrecisionOptimizer, *, large: float = 0.0) -> None:
    model["small"].grad = torch.zeros_like(model["small"])
    model["large"].grad = torch.full_like(model["large"], large)
    optimizer.step()


def test_weight_that_outgrows_the_half_range_raises_in_the_step_after_a_skip(device: torch.device) -> None:
    """The skip looks, the following step raises by name, and masters and counters stay."""
    model, optimizer = grown_beyond_range(device)
    step_with(model, optimizer, large=math.inf)
    assert optimizer.last_step.skipped
    before = copies(optimizer.named_masters())
    with pytest.raises(ValueError, match=UNFIT.format("130000", "float16", "65504")):
        step_with(model, optimizer, large=1.0)

    assert same(before, copies(optimizer.named_masters()))
    assert (1, 1) == (optimizer.applied_steps, optimizer.skipped_steps)


def test_weight_that_outgrows_the_half_range_raises_within_64_applied_steps(device: torch.device) -> None:
    """Without any skip, the look after the 64th applied step finds it; the 65th call raises."""
    model, optimizer = grown_beyond_range(device)
    for _ in range(LOOK_INTERVAL - 1):
        step_with(model, optimizer, large=1.0)
    before = copies(optimizer.named_masters())
    assert LOOK_INTERVAL == optimizer.applied_steps
    with pytest.raises(ValueError, match=r"parameter 'large' holds .*, beyond the largest value of torch\.float16"):
        step_with(model, optimizer, large=1.0)

    assert same(before, copies(optimizer.named_masters()))
    assert LOOK_INTERVAL == optimizer.applied_steps


def test_weights_within_the_half_range_never_raise(device: torch.device, dtype: torch.dtype) -> None:
    """130 steps with skips between them, at 65504."""
    model, inner = half_model(device, 65504.0, lr=1.0)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=1.0)
    for index in range(130):
        step_with(model, optimizer, large=math.inf if index % 5 == 0 else 0.0)

    assert (104, 26) == (optimizer.applied_steps, optimizer.skipped_steps)


def test_weight_repaired_after_the_error_trains_on(device: torch.device) -> None:
    """Once the caller has clamped it, steps are applied again."""
    model, optimizer = grown_beyond_range(device)
    step_with(model, optimizer, large=math.inf)
    with pytest.raises(ValueError, match="beyond the largest value"):
        step_with(model, optimizer, large=1.0)
    with torch.no_grad():
        model["large"].clamp_(-100, 100)
    step_with(model, optimizer, large=1.0)

    assert optimizer.last_step.applied
    assert [98.0] * 3 == model["large"].tolist()


@pytest.mark.parametrize("repair", ["weight", "master"])
def test_weight_repaired_before_the_error_trains_on(repair: str, device: torch.device) -> None:
    """A caller who sees the skip and clamps the weight at once never meets the error."""
    model, optimizer = grown_beyond_range(device)
    step_with(model, optimizer, large=math.inf)
    with torch.no_grad():
        if repair == "weight":
            model["large"].clamp_(-100, 100)
        else:
            dict(optimizer.named_masters())["large"].clamp_(-100, 100)
            optimizer.publish()
    step_with(model, optimizer, large=1.0)

    assert optimizer.last_step.applied
    assert [98.0] * 3 == model["large"].tolist()


# -- version counters --------------------------------------------------------------


def products(params: list[nn.Parameter]) -> list[Tensor]:
    """Return losses whose backward needs the parameters' values at recording."""
    return [(param * param).sum() for param in params]


def backward_raises(loss: Tensor) -> bool:
    try:
        loss.backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error)  # noqa: PT017
        return True
    return False


@pytest.mark.parametrize("kind", ["half", "fp32"])
@pytest.mark.parametrize("event", ["step", "skip", "no gradients", "edit"])
def test_backward_over_a_graph_from_before_a_step_raises_where_plain_torch_raises(
    event: str, kind: str, device: torch.device, dtype: torch.dtype
) -> None:
    """A parameter that stepped raises, one without a gradient and one that was skipped do not."""
    own = dtype if kind == "half" else torch.float32
    plain = [nn.Parameter(torch.ones(3, device=device)) for _ in range(2)]
    ours = [nn.Parameter(torch.ones(3, device=device, dtype=own)) for _ in range(2)]
    inner = torch.optim.SGD(plain, lr=0.5)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(ours, lr=0.5), loss_scale=1.0)
    for params, step in ((plain, inner.step), (ours, optimizer.step)):
        for param in params:  # out of the first step, which is special inside
            param.grad = torch.ones_like(param)
        step()
    inner.zero_grad()
    graphs = products(plain), products(ours)
    if event in ("step", "skip"):
        plain[0].grad, ours[0].grad = torch.ones_like(plain[0]), torch.ones_like(ours[0])
    if event == "skip":
        ours[0].grad.fill_(math.inf)
    if event == "edit":
        with torch.no_grad():
            plain[0].mul_(2)
            ours[0].mul_(2)
    if event != "skip":  # as GradScaler does
        inner.step()
    optimizer.step()
    inner.zero_grad()
    expected = [backward_raises(loss) for loss in graphs[0]]

    assert [event in ("step", "edit"), False] == expected
    assert expected == [backward_raises(loss) for loss in graphs[1]]


@pytest.mark.parametrize("call", ["publish", "load_state_dict"])
def test_backward_over_a_graph_from_before_a_rewrite_of_weights_raises(
    call: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Publishing and loading write the weights, so a stale graph is refused."""
    model, optimizer = wrapped(device, dtype)
    train_step(model, optimizer, device)
    saved = copy.deepcopy(optimizer.state_dict())
    loss = (model.embed.weight * model.embed.weight).sum()
    if call == "publish":
        optimizer.publish()
    else:
        optimizer.load_state_dict(saved)

    assert backward_raises(loss)


def test_own_writes_are_not_taken_for_edits(device: torch.device, dtype: torch.dtype) -> None:
    """Low bits under the half rounding add up over steps: 100 steps of 2^-14 from 1.0."""
    param = nn.Parameter(torch.ones(3, device=device, dtype=dtype))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=2.0**-14), loss_scale=1.0)
    for _ in range(100):
        param.grad = torch.ones_like(param)
        optimizer.step()

    assert [1 - 100 * 2.0**-14] * 3 == next(master for _, master in optimizer.named_masters()).tolist()
