"""The fp32 model behind the half one: ``master_model``, and averages over it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_same, differs, force_grads, loss_of, masters_of, overflow, train, two_group_model, wrapped
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from mixedopt import CastPolicy, MixedPrecisionOptimizer


def test_the_master_model_is_the_fp32_model_over_the_masters(device: torch.device, dtype: torch.dtype) -> None:
    """Same structure, ties included; parameters share the masters' storage; no casts; nothing requires a gradient."""
    bare = two_group_model(device)
    for param in bare.frozen.parameters():
        param.data = param.data.to(dtype).float()  # frozen ones have no master
    _, optimizer = wrapped(device, dtype)
    twin = optimizer.master_model()
    assert type(twin) is type(bare)
    assert_same(bare.state_dict(), {name: value.clone() for name, value in twin.state_dict().items()})
    assert twin.head.weight is twin.embedding.weight
    masters = dict(optimizer.named_masters())
    assert all(param.data_ptr() == masters[n].data_ptr() for n, param in twin.named_parameters() if n in masters)
    assert not any(param.requires_grad for param in twin.parameters())
    assert all(param.requires_grad for param in masters.values())
    assert torch.equal(loss_of(bare, 0).detach(), loss_of(twin, 0))
    assert not any(m._forward_hooks or m._forward_pre_hooks or m._load_state_dict_pre_hooks for m in twin.modules())


def test_the_master_model_follows_the_training(device: torch.device, dtype: torch.dtype) -> None:
    """After each step, applied or skipped, it shows the masters; the half model is not touched by using it."""
    model, optimizer = wrapped(device, dtype)
    twin = optimizer.master_model()
    before = {name: value.clone() for name, value in twin.state_dict().items()}
    train(model, optimizer, [0, 1])
    overflow(optimizer)
    assert differs(before, {name: value.clone() for name, value in twin.state_dict().items()})
    masters = masters_of(optimizer)
    assert_same(masters, {n: p.detach().clone() for n, p in twin.named_parameters() if n in masters})
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    loss_of(twin, 3)
    assert_same(weights, dict(model.state_dict()))
    assert all(param.grad is None for param in model.parameters())


def test_buffers_of_the_master_model_are_the_models_own(device: torch.device, dtype: torch.dtype) -> None:
    """Running statistics move in both."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).to(device)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype)
    twin = optimizer.master_model()
    model(torch.randn(8, 4, device=device))
    assert twin[1].running_mean is model[1].running_mean
    assert twin[1].num_batches_tracked == 1


def test_hooks_of_the_user_stay_in_the_master_model(device: torch.device) -> None:
    """Only the casts are taken off the copy; the model keeps its own."""
    model, seen = nn.Linear(2, 2).to(device), []
    model.register_forward_hook(lambda *args: seen.append(1))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    hooks = len(model._forward_hooks), len(model._forward_pre_hooks)
    twin = optimizer.master_model()
    twin(torch.ones(1, 2, device=device))
    assert [1] == seen
    assert hooks == (len(model._forward_hooks), len(model._forward_pre_hooks))
    assert model(torch.ones(1, 2, device=device)).dtype == torch.float32
    assert model.weight.dtype == torch.float16


def test_without_a_model_there_is_no_master_model(device: torch.device) -> None:
    """The error says what to pass."""
    param = nn.Parameter(torch.ones(2, dtype=torch.float16, device=device))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([param], lr=0.1))
    with pytest.raises(ValueError, match=r"master_model\(\): the optimizer has no model. Pass model="):
        optimizer.master_model()


@pytest.mark.parametrize("multi", [None, get_ema_multi_avg_fn(0.999)], ids=["swa", "ema"])
def test_an_average_is_taken_over_the_masters(multi: Any, device: torch.device, dtype: torch.dtype) -> None:
    """``AveragedModel`` over ``master_model()`` equals, bit for bit, the average of an fp32 run with these masters."""
    model, optimizer = wrapped(device, dtype)
    twin = optimizer.master_model()
    average = AveragedModel(twin, multi_avg_fn=multi, use_buffers=True)
    plain = two_group_model(device)
    expected = AveragedModel(plain, multi_avg_fn=multi, use_buffers=True)
    start = copy.deepcopy(dict(average.module.state_dict()))
    for step in range(4):
        train(model, optimizer, [step])
        average.update_parameters(twin)
        plain.load_state_dict(optimizer.master_state_dict())
        expected.update_parameters(plain)
    assert_same(dict(expected.module.state_dict()), dict(average.module.state_dict()))
    assert differs(start, dict(average.module.state_dict()))


def test_an_average_of_the_halves_stalls_where_one_of_the_masters_moves(
    device: torch.device, dtype: torch.dtype
) -> None:
    """Why it is taken over the masters: a small part of a step is less than half an ulp of a half weight."""
    model = nn.Linear(4, 4).to(device)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(model.parameters(), lr=1e-2), model, dtype=dtype, policy=CastPolicy.none(), loss_scale=1.0
    )
    with torch.no_grad():
        for _, master in optimizer.named_masters():
            master.fill_(1.0)
    optimizer.publish()
    average = get_ema_multi_avg_fn(0.9999)
    twin = optimizer.master_model()
    of_masters = AveragedModel(twin, multi_avg_fn=average)
    of_halves = AveragedModel(model, multi_avg_fn=average)
    for step in range(20):
        force_grads(optimizer, 0.5)
        optimizer.step()
        of_masters.update_parameters(twin)
        of_halves.update_parameters(model)
        if step == 0:
            start = of_masters.module.weight.clone(), of_halves.module.weight.detach().clone()
    assert (of_masters.module.weight < start[0]).all()
    assert torch.equal(start[1], of_halves.module.weight)
