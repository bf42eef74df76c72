"""Sparse gradients: widened, summed over repeated rows in fp32, stepped and published row by row."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import assert_same, differs, snapshot, through_file
from optimizers import INNERS, Inner
from torch import Tensor, nn
from torch.nn import functional as F
from twins import all_same_bits, masters_of, same_bits

from mixedopt import (
    CastPolicy,
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    SharedLossScale,
    StaticLossScale,
    StepOrderError,
)

ROWS, WIDTH = 7, 3
START = 2.0**6
DYNAMIC = DynamicLossScale(init_scale=START)
# One rounding of a double to fp32, and those of the clip formula before it.
CLIP_ERROR = 2.0**-22
HOLDERS = ["autograd", "half", "fp32"]
every_holder = pytest.mark.parametrize("gradients", HOLDERS)

SPARSE = (
    Inner("sparse_adam", torch.optim.SparseAdam, {"lr": 0.01}, second={"lr": 0.02}),
    Inner("sgd", torch.optim.SGD, {"lr": 0.1}, second={"lr": 0.2}),
    Inner("adagrad", torch.optim.Adagrad, {"lr": 0.1, "lr_decay": 0.1}, second={"lr": 0.2}),
)
every_sparse = pytest.mark.parametrize("inner", SPARSE, ids=[inner.name for inner in SPARSE])


@pytest.fixture(autouse=True)
def _checked() -> Iterator[None]:
    """Let torch check sparse tensors; undecided, it warns at the first."""
    with torch.sparse.check_sparse_tensor_invariants(True):
        yield


def table(device: torch.device, dtype: torch.dtype, value: float | None = None) -> nn.Parameter:
    values = torch.randn(ROWS, WIDTH, device=device) if value is None else torch.full((ROWS, WIDTH), value)
    return nn.Parameter(values.to(device, dtype))


def look(param: nn.Parameter, ids: list[int], weight: Tensor | float = 1.0) -> Tensor:
    """Return a loss whose sparse gradient holds ``weight`` in the rows ``ids``, one entry for each."""
    rows = F.embedding(torch.tensor(ids, dtype=torch.long, device=param.device), param, sparse=True)
    return (rows.float() * weight).sum()


def widened(grad: Tensor | None, scale: float) -> Tensor | None:
    """Return what a bare fp32 optimizer gets: widened, divided by S, repeated rows added up in fp32."""
    if grad is None or not grad.is_sparse:
        return None if grad is None else grad.float() / scale
    values = grad._values().float() / scale
    return torch.sparse_coo_tensor(grad._indices(), values, grad.shape).coalesce()


def twin_of(param: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(param.detach().float().clone())


def rows_of(tensor: Tensor) -> list[bool]:
    """Return for each row whether it holds something."""
    return tensor.detach().ne(0).any(1).tolist()


def backward(optimizer: MixedPrecisionOptimizer, loss: Tensor, param: nn.Parameter) -> Tensor:
    """Run backward; return the scaled gradient of one parameter, whoever holds it now."""
    scaled = optimizer.scale(loss)
    (grad,) = torch.autograd.grad(scaled, [param], retain_graph=True)
    scaled.backward()
    return grad


def error_of(optimizer: torch.optim.Optimizer) -> tuple[type[Exception], str] | None:
    """Step; return what it raised."""
    try:
        optimizer.step()
    except RuntimeError as error:
        return type(error), str(error)
    return None


def wrap(params: list[nn.Parameter], **options: Any) -> MixedPrecisionOptimizer:
    """Return SGD with a learning rate of 1: what moves is the gradient."""
    return MixedPrecisionOptimizer(torch.optim.SGD(params, lr=1.0), **{"loss_scale": START, **options})


# -- against the bare optimizer ------------------------------------------------

ids_of_a_step = st.none() | st.lists(st.integers(0, ROWS - 1), max_size=12)


@every_sparse
@given(
    script=st.lists(st.tuples(ids_of_a_step, ids_of_a_step), min_size=1, max_size=4),
    dense=st.booleans(),
    gradients=st.sampled_from(HOLDERS),
    seed=st.integers(0, 2**16),
)
def test_sparse_steps_are_those_of_the_bare_optimizer(
    inner: Inner,
    dtype: torch.dtype,
    device: torch.device,
    script: list[tuple[list[int] | None, list[int] | None]],
    dense: bool,
    gradients: str,
    seed: int,
) -> None:
    """Masters and weights, bit for bit, for any ids: none, one, repeated; beside dense neighbours in one bucket."""
    torch.manual_seed(seed)
    tables = [table(device, dtype), table(device, dtype)]
    beside = [nn.Parameter(torch.randn(5, device=device).to(dtype)) for _ in range(2)]
    ours = [beside[0], tables[0], beside[1], tables[1]]
    theirs = [twin_of(param) for param in ours]
    options = {"loss_scale": DynamicLossScale(init_scale=START, growth_interval=2), "gradients": gradients}
    optimizer = MixedPrecisionOptimizer(inner([ours[:2], ours[2:]]), **options)
    bare = inner([theirs[:2], theirs[2:]])
    applied = 0
    for ids in script:
        losses = [look(t, i, torch.randn(len(i), WIDTH, device=device)) for t, i in zip(tables, ids, strict=True) if i]
        losses += [look(t, []) for t, i in zip(tables, ids, strict=True) if i == []]
        if dense and inner.name != "sparse_adam":
            losses.append((beside[0].float() * torch.randn(5, device=device)).sum())
        if losses:
            applied += 1
            scaled = optimizer.scale(torch.stack(losses).sum())
            grads = torch.autograd.grad(scaled, ours, retain_graph=True, allow_unused=True)
            for twin, grad in zip(theirs, grads, strict=True):
                twin.grad = widened(grad, optimizer.loss_scale)
            scaled.backward()
            bare.step()
            bare.zero_grad()
        optimizer.step()
        assert all_same_bits(theirs, masters_of(optimizer))
        assert all_same_bits([twin.to(dtype) for twin in theirs], [param.detach() for param in ours])
    assert applied == optimizer.applied_steps
    assert START * 2.0 ** (applied // 2) == optimizer.loss_scale
    assert all(param.grad is None for param in [*ours, *masters_of(optimizer)])


@pytest.mark.parametrize("inner", INNERS, ids=[inner.name for inner in INNERS])
def test_optimizer_takes_or_refuses_sparse_gradients_as_it_does_bare(
    inner: Inner, device: torch.device, dtype: torch.dtype
) -> None:
    """It raises its own error, with nothing changed; afterwards it trains as one that never saw them."""
    param = table(device, dtype)
    twin, spared = twin_of(param), twin_of(param)
    optimizer, bare, never = MixedPrecisionOptimizer(inner([[param]]), loss_scale=START), inner([[twin]]), None
    before = snapshot(None, optimizer)
    optimizer.backward(look(param, [1, 4, 1], 0.5))
    twin.grad = widened(param.grad, START)
    refusal = error_of(bare)
    if refusal is not None:
        assert refusal == error_of(optimizer)
        assert_same(before, snapshot(None, optimizer))
        assert all_same_bits([spared.to(dtype)], [param.detach()])
        never = inner([[spared]])
        optimizer.backward((param.float() * 0.25).sum())
        spared.grad = widened(param.grad, START)
        optimizer.step()
        never.step()
        twin = spared
    else:
        assert error_of(optimizer) is None
    assert (never is None) == (inner.name in ("sgd", "sgd_momentum", "sgd_nesterov", "adagrad"))
    assert optimizer.last_step.applied
    assert all_same_bits([twin], masters_of(optimizer))
    assert all_same_bits([twin.to(dtype)], [param.detach()])


def test_rows_that_momentum_moves_are_published(device: torch.device, dtype: torch.dtype) -> None:
    """SGD's sparse momentum goes on in rows that have no gradient any more: the model follows its masters."""
    param = table(device, dtype)
    inner = torch.optim.SGD([param], lr=0.5, momentum=0.9)
    optimizer = MixedPrecisionOptimizer(inner, loss_scale=START)
    for ids in ([0, 1], [2, 3]):
        optimizer.backward(look(param, ids))
        optimizer.step()
    assert all_same_bits([masters_of(optimizer)[0].to(dtype)], [param.detach()])


# -- rows ----------------------------------------------------------------------


@every_sparse
def test_only_touched_rows_move_and_are_published(inner: Inner, device: torch.device, dtype: torch.dtype) -> None:
    """Other rows keep every bit, even one that no master knows; neighbours without gradient keep their versions."""
    params = [nn.Parameter(torch.randn(5, device=device).to(dtype)), table(device, dtype)]
    params += [nn.Parameter(torch.randn(4, 4, device=device).to(dtype)), table(device, dtype)]
    optimizer = MixedPrecisionOptimizer(inner([params]), loss_scale=START)
    versions = [param._version for param in params]
    before = [param.detach().clone() for param in params]
    masters = [master.detach().clone() for master in masters_of(optimizer)]
    params[1].data[5] = before[1][5] = 0.125  # through .data: nobody notices
    optimizer.backward(look(params[1], [2, 4, 2]))
    optimizer.step()
    pairs = (params[1], before[1]), (masters_of(optimizer)[1], masters[1])
    moved = [(now != was).any(1).tolist() for now, was in pairs]
    assert [[row in (2, 4) for row in range(ROWS)]] * 2 == moved
    others = [0, 2, 3]
    assert all_same_bits([before[i] for i in others], [params[i].detach() for i in others])
    assert all_same_bits([masters[i] for i in others], [masters_of(optimizer)[i] for i in others])
    assert [versions[i] for i in others] == [params[i]._version for i in others]
    assert params[1]._version > versions[1]


def test_backward_over_a_graph_from_before_the_step_raises(device: torch.device, dtype: torch.dtype) -> None:
    """A table that is used densely too was written in place: autograd notices, as with plain torch."""
    param = table(device, dtype)
    optimizer = wrap([param])
    old = (param * param).float().sum()
    optimizer.backward(look(param, [2, 4]))
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        optimizer.backward(old)


@every_holder
def test_one_id_five_thousand_times_sums_exactly(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """A half sum stops at 2048 in fp16 and at 256 in bf16; the true gradient is 5000."""
    embedding = nn.Embedding(4, 1, sparse=True, device=device)
    embedding.weight.data.zero_()
    inner = torch.optim.SGD(embedding.parameters(), lr=1.0)
    optimizer = MixedPrecisionOptimizer(inner, embedding, dtype=dtype, loss_scale=4.0, gradients=gradients)
    optimizer.backward(embedding(torch.full((5000,), 2, device=device)).sum())
    optimizer.step()
    assert [0.0, 0.0, -5000.0, 0.0] == masters_of(optimizer)[0].flatten().tolist()
    assert torch.equal(masters_of(optimizer)[0].to(dtype), embedding.weight)
    assert 5000.0 == optimizer.last_step.grad_norm


@every_sparse
@every_holder
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_bad_row_skips_and_leaves_everything_bit_identical(
    inner: Inner, gradients: str, device: torch.device, dtype: torch.dtype, bad: float
) -> None:
    """One bad value in one row of the last table: no row of any table moves, S backs off."""
    params = [table(device, dtype), table(device, dtype)]
    optimizer = MixedPrecisionOptimizer(inner([params]), loss_scale=DYNAMIC, gradients=gradients)
    optimizer.backward(look(params[0], [0, 3]) + look(params[1], [1]))
    optimizer.step()
    before, weights = snapshot(None, optimizer), [param.detach().clone() for param in params]
    weight = torch.ones(3, WIDTH, device=device)
    weight[-1, -1] = bad
    optimizer.backward(look(params[0], [2, 5]) + look(params[1], [6, 0, 6], weight))
    optimizer.step()
    after = snapshot(None, optimizer)
    assert ((1, 0), (1, 1)) == (before.pop("counters"), after.pop("counters"))
    assert (START, START / 2) == (before.pop("scale"), after.pop("scale"))
    assert_same(before, after)
    assert all_same_bits(weights, [param.detach() for param in params])
    assert optimizer.last_step.skipped
    optimizer.backward(look(params[1], [6, 0, 6]))
    optimizer.step()
    assert optimizer.last_step.applied
    assert differs(before, snapshot(None, optimizer))


def test_error_names_the_table_with_the_bad_row(device: torch.device, dtype: torch.dtype) -> None:
    """The first bad parameter is found among sparse gradients as well."""
    model = nn.ModuleDict({name: nn.Embedding(4, 2, sparse=True, device=device) for name in ("good", "bad")})
    scale = StaticLossScale(START, max_consecutive_skips=1)
    inner = torch.optim.SparseAdam(model.parameters())
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=scale)
    ids = torch.tensor([1, 2], device=device)
    optimizer.backward(model["good"](ids).sum() + (model["bad"](ids) * math.inf).sum())
    with pytest.raises(LossScaleError, match=r"'bad\.weight'"):
        optimizer.step()


@every_sparse
@every_holder
def test_gradient_without_rows_is_a_gradient(
    inner: Inner, gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """An empty batch of ids: the step counts, as it does bare, and no weight moves."""
    param = table(device, dtype)
    twin = twin_of(param)
    optimizer, bare = MixedPrecisionOptimizer(inner([[param]]), loss_scale=START, gradients=gradients), inner([[twin]])
    for ids in ([], [3, 3], []):
        twin.grad = widened(backward(optimizer, look(param, ids), param), START)
        optimizer.step()
        bare.step()
        assert optimizer.last_step.applied
        assert all_same_bits([twin], masters_of(optimizer))
        assert_same(bare.state_dict()["state"], optimizer.inner.state_dict()["state"])
    assert differs(twin.detach(), table(device, dtype).float())


# -- between backward and step -------------------------------------------------


@every_holder
def test_unscale_shows_a_sparse_fp32_gradient_whose_edits_count(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Unscaled, repeated rows added up; values changed in place, another tensor, a dense one and none all count."""
    names = ("in place", "replaced", "uncoalesced", "dense", "none")
    params = dict(zip(names, (table(device, dtype, 0.0) for _ in names), strict=True))
    optimizer = wrap(list(params.values()), gradients=gradients)
    optimizer.backward(sum(look(param, [1, 2, 1]) for param in params.values()))
    optimizer.unscale_()
    masters = dict(zip(names, masters_of(optimizer), strict=True))
    for master in masters.values():
        assert master.grad.is_sparse
        assert torch.float32 == master.grad.dtype
        assert [[1, 2], [[2.0] * WIDTH, [1.0] * WIDTH]] == [
            master.grad._indices()[0].tolist(),
            master.grad._values().tolist(),
        ]
    masters["in place"].grad._values().mul_(3.0)
    masters["replaced"].grad = masters["replaced"].grad * 0.5
    where, ones = torch.tensor([[6, 6]], device=device), torch.ones(2, WIDTH, device=device)
    masters["uncoalesced"].grad = torch.sparse_coo_tensor(where, ones, (ROWS, WIDTH))
    masters["dense"].grad = torch.full_like(masters["dense"], 7.0)
    masters["none"].grad = None
    optimizer.step()
    assert optimizer.last_step.applied
    expected = {"in place": [0, 6, 3], "replaced": [0, 1, 0.5], "dense": [7, 7, 7], "none": [0, 0, 0]}
    for name, rows in expected.items():
        assert [[-value] * WIDTH for value in rows] == masters[name][:3].tolist() == params[name][:3].tolist()
    assert [row == 6 for row in range(ROWS)] == rows_of(params["uncoalesced"]) == rows_of(masters["uncoalesced"])
    assert all_same_bits([masters[name].to(dtype) for name in names], [param.detach() for param in params.values()])


@every_holder
def test_norm_and_clip_count_sparse_values(gradients: str, device: torch.device, dtype: torch.dtype) -> None:
    """A dense 3 and two entries of 2 in one row make 5, clipped to 2.5 together."""
    dense, sparse = nn.Parameter(torch.zeros(1, device=device, dtype=dtype)), table(device, dtype, 0.0)
    optimizer = wrap([dense, sparse], max_grad_norm=2.5, gradients=gradients)
    weight = torch.zeros(2, WIDTH, device=device)
    weight[:, 0] = 2.0
    optimizer.backward((dense.float() * 3.0).sum() + look(sparse, [4, 4], weight))
    optimizer.step()
    assert 5.0 == optimizer.last_step.grad_norm
    masters = masters_of(optimizer)
    for expected, actual in ((-1.5, masters[0][0]), (-2.0, masters[1][4, 0])):
        assert abs(expected - actual.item()) <= 2 * CLIP_ERROR * abs(expected)
    assert [row == 4 for row in range(ROWS)] == rows_of(masters[1]) == rows_of(sparse)


@every_holder
def test_parameter_used_densely_and_sparsely_gets_the_sum(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """A tied table: autograd makes one dense gradient of both; every row moves."""
    param = table(device, dtype, 0.0)
    optimizer = wrap([param], gradients=gradients)
    optimizer.backward(look(param, [1, 2, 1]) + (param.float() * 4.0).sum())
    optimizer.step()
    expected = torch.tensor([4, 6, 5, 4, 4, 4, 4], dtype=torch.float32).view(-1, 1).expand(ROWS, WIDTH)
    assert torch.equal(-expected.to(device), masters_of(optimizer)[0])
    assert torch.equal(masters_of(optimizer)[0].to(dtype), param)


@pytest.mark.parametrize(
    ("gradients", "dense_first"),
    [
        *((holder, False) for holder in HOLDERS),
        ("autograd", True),
        *((holder, True) for holder in HOLDERS[1:]),
    ],
)
def test_dense_and_sparse_micro_steps_of_one_parameter_add_up(
    gradients: str, dense_first: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """One micro-step uses the tied table densely, the other looks rows up: in either order, nothing is lost."""
    param = table(device, dtype, 0.0)
    optimizer = wrap([param], gradients=gradients)
    losses = [lambda: (param.float() * 4.0).sum(), lambda: look(param, [1, 2, 1])]
    for loss in losses if dense_first else reversed(losses):
        optimizer.backward(loss())
    optimizer.step()
    assert [-4.0, -6.0, -5.0, -4.0, -4.0, -4.0, -4.0] == masters_of(optimizer)[0][:, 0].tolist()


@every_sparse
@every_holder
def test_table_kept_in_fp32_steps_as_bare(
    inner: Inner, gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Its own master: micro-steps add up, repeated ids as well, bit for bit as without a wrapper."""
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True), nn.Linear(WIDTH, 2)).to(device)
    twin = twin_of(model[0].weight)
    policy = CastPolicy.default().keep("0")
    options = {"dtype": dtype, "policy": policy, "loss_scale": START, "gradients": gradients}
    optimizer = MixedPrecisionOptimizer(inner([model[0].parameters()]), model, **options)
    bare = inner([[twin]])
    for ids in ([1, 4, 1], [2, 4, 6]):
        for micro in (ids, [4, 5]):
            grad = backward(optimizer, model(torch.tensor(micro, device=device)).square().mean(), model[0].weight)
            assert (torch.float32, True) == (grad.dtype, grad.is_sparse)
            twin.grad = widened(grad, START) if twin.grad is None else twin.grad + widened(grad, START)
        optimizer.step()
        twin.grad = twin.grad.coalesce()  # else a GPU adds repeated rows in any order
        bare.step()
        bare.zero_grad()
        assert all_same_bits([twin], masters_of(optimizer))
        assert same_bits(twin.detach(), model[0].weight.detach())
    assert [torch.float32, dtype] == [layer.weight.dtype for layer in model]


def test_micro_steps_of_one_row_sum_exactly_in_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """``gradients="fp32"`` loses nothing of sparse gradients either: 512 times half(0.01)."""
    param = table(device, dtype, 0.0)
    optimizer = wrap([param], loss_scale=1.0, gradients="fp32")
    for _ in range(512):
        optimizer.backward(look(param, [3], 0.01))
    optimizer.step()
    expected = -512 * float(torch.tensor(0.01, dtype=dtype))
    assert [expected] * WIDTH == masters_of(optimizer)[0][3].tolist()


def test_sparse_gradients_are_not_droppable(device: torch.device, dtype: torch.dtype) -> None:
    """They are no part of a flat buffer: refused by name before anything is gathered."""
    param = table(device, dtype, 0.0)
    optimizer = wrap([param], gradients="fp32", drop_bad_micro_steps=lambda kept, total: total / kept)
    optimizer.backward(look(param, [3]))
    with pytest.raises(ValueError, match=r"gradient of parameter 'group0.param0' is sparse and cannot be dropped"):
        optimizer.step()
    assert param.grad is not None
    assert not any(rows_of(param))


@every_holder
def test_waiting_sparse_gradients_do_not_outlive_their_scale(
    gradients: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Under the old S: refused once another optimizer has moved it; those in fp32 follow it."""
    params = [table(device, dtype, 0.0), table(device, dtype, 0.0)]
    shared = SharedLossScale(DynamicLossScale(init_scale=START, growth_interval=1))
    first, second = (wrap([param], loss_scale=shared, gradients=gradients) for param in params)
    first.backward(look(params[0], [1, 2]) + look(params[1], [1, 2]))
    shared.step(second)
    if gradients != "fp32":
        with pytest.raises(StepOrderError, match="before the shared loss scale moved"):
            shared.step(first)
        assert not any(rows_of(params[0]))
        first.zero_grad()
        first.backward(look(params[0], [1, 2]))
    shared.step(first)
    assert torch.equal(params[0].detach(), params[1].detach())
    assert [row in (1, 2) for row in range(ROWS)] == rows_of(params[0])


@every_sparse
def test_training_resumes_exactly_after_sparse_steps(inner: Inner, device: torch.device, dtype: torch.dtype) -> None:
    """Cut after two steps through a file, the rest is the uncut run."""
    params = [table(device, dtype)]
    params.append(nn.Parameter(params[0].detach().clone()))
    ours, theirs = (MixedPrecisionOptimizer(inner([[param]]), loss_scale=DYNAMIC) for param in params)
    for step in range(4):
        if step == 2:
            theirs.load_state_dict(through_file(ours.state_dict()))
        for optimizer, param in zip((ours, theirs), params, strict=True):
            if step >= 2 or optimizer is ours:
                optimizer.backward(look(param, [step, 4, step]))
                optimizer.step()
    assert all_same_bits(masters_of(ours), masters_of(theirs))
    assert_same(ours.inner.state_dict(), theirs.inner.state_dict())
    assert all_same_bits([params[0].detach()], [params[1].detach()])
