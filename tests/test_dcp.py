"""torch.distributed.checkpoint: saved from one run, loaded into a fresh one, which then goes on bit for bit."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from models import (
    DynamicLossScale,
    assert_same,
    differs,
    loss_of,
    overflow,
    snapshot,
    two_group_model,
    two_groups,
    wrapped,
)
from models import adamw as make_adamw
from models import momentum as make_momentum
from torch import distributed as dist
from torch import nn, optim
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn.parallel import DistributedDataParallel

from mixedopt import CheckpointError, MixedPrecisionOptimizer

RANKS = 2
LIMIT = timedelta(seconds=60)
MOVING = DynamicLossScale(init_scale=2.0**7, growth_interval=2)

pytestmark = [
    pytest.mark.skipif(sys.platform == "win32" or not dist.is_available(), reason="needs torch.distributed"),
    # Of torch, about a run in one process, and its own use of what it deprecates.
    pytest.mark.filterwarnings("ignore::UserWarning:torch.distributed", "ignore::FutureWarning:torch"),
]

Run = tuple[nn.Module, MixedPrecisionOptimizer]


def damped(params: Any) -> torch.optim.Optimizer:
    """Momentum whose first buffer is the gradient itself: a buffer of zeros would be another run."""
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, dampening=0.5)


def plain_sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=1e-2)


MAKES = {"AdamW": make_adamw, "momentum": make_momentum, "damped": damped, "SGD": plain_sgd}
MAKES |= {kind.__name__: functools.partial(kind, lr=1e-2) for kind in (optim.Adafactor, optim.NAdam, optim.Rprop)}


def go_on(run: Run, steps: range, *, branch: bool = True) -> None:
    model, optimizer = run
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step, use_branch=branch))
        optimizer.step()


def named_state(run: Run) -> dict[str, Any]:
    model, optimizer = run
    return {"model": get_model_state_dict(model), "optimizer": get_optimizer_state_dict(model, optimizer)}


def by_functions(source: Run, target: Run, folder: Path) -> None:
    """Save and load with torch's state dict functions, as its tutorial does."""
    dcp.save(named_state(source), checkpoint_id=folder)
    into = named_state(target)
    dcp.load(into, checkpoint_id=folder)
    set_model_state_dict(target[0], into["model"])
    set_optimizer_state_dict(*target, into["optimizer"])


def as_stateful(source: Run, target: Run, folder: Path) -> None:
    """Hand the objects themselves to DCP."""
    dcp.save(dict(zip(("model", "optimizer"), source, strict=True)), checkpoint_id=folder)
    dcp.load(dict(zip(("model", "optimizer"), target, strict=True)), checkpoint_id=folder)


def asynchronously(source: Run, target: Run, folder: Path) -> None:
    """Write in the background."""
    dcp.async_save(named_state(source), checkpoint_id=folder).result()
    into = named_state(target)
    dcp.load(into, checkpoint_id=folder)
    set_model_state_dict(target[0], into["model"])
    set_optimizer_state_dict(*target, into["optimizer"])


WAYS: dict[str, Callable[[Run, Run, Path], None]] = {
    "functions": by_functions,
    "objects": as_stateful,
    "async": asynchronously,
}


@pytest.fixture
def single(tmp_path: Path) -> Any:
    """A process group of one, for ``async_save``."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, timeout=LIMIT)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("single")
@pytest.mark.parametrize("way", list(WAYS))
@pytest.mark.parametrize("name", list(MAKES))
def test_a_fresh_run_goes_on_where_the_saved_one_was(
    name: str, way: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Masters, moments, counters and scale, through three steps, a skip, and two steps more."""
    source = wrapped(device, dtype, MAKES[name], loss_scale=MOVING)
    go_on(source, range(3))
    overflow(source[1])
    target = wrapped(device, dtype, MAKES[name], loss_scale=DynamicLossScale())
    WAYS[way](source, target, tmp_path / "checkpoint")
    assert_same(source[1].state_dict(), target[1].state_dict())
    go_on(source, range(3, 5))
    go_on(target, range(3, 5))
    assert_same(source[1].state_dict(), target[1].state_dict())
    assert_same(dict(source[0].state_dict()), dict(target[0].state_dict()))


@pytest.mark.parametrize("name", list(MAKES))
def test_a_parameter_that_never_had_a_gradient_has_its_place(
    name: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """A branch that was not used before the save has no state, nor after the load; its first step is a first one."""
    source, target = (wrapped(device, dtype, MAKES[name], loss_scale=MOVING) for _ in range(2))
    go_on(source, range(2), branch=False)
    by_functions(source, target, tmp_path)
    for run in (source, target):
        assert not run[1].state.get(run[0].branch.weight)
        go_on(run, range(2, 4))
    assert_same(source[1].state_dict(), target[1].state_dict())


@pytest.mark.parametrize("name", list(MAKES))
def test_looking_at_a_fresh_optimizer_changes_nothing(
    name: str, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """DCP makes a step with zero gradients where it finds no state; saved before the first step, a run is fresh."""
    run = wrapped(device, dtype, MAKES[name], loss_scale=MOVING)
    before = snapshot(*run)
    state = get_optimizer_state_dict(*run)["state"]
    assert_same(before, snapshot(*run))
    stepped = wrapped(device, dtype, MAKES[name], loss_scale=MOVING)
    go_on(stepped, range(1))
    full = get_optimizer_state_dict(*stepped)["state"]
    assert {key: set(entry) for key, entry in state.items()} == {key: set(entry) for key, entry in full.items()}

    resumed = wrapped(device, dtype, MAKES[name], loss_scale=MOVING)
    by_functions(run, resumed, tmp_path)
    assert_same(before["inner"], snapshot(*resumed)["inner"])
    go_on(run, range(3))
    go_on(resumed, range(3))
    assert_same(run[1].state_dict(), resumed[1].state_dict())


def test_a_half_model_without_casts_is_served(tmp_path: Path, device: torch.device, dtype: torch.dtype) -> None:
    """Without ``model=`` the optimizer knows no names, DCP does: they stand for the places."""

    def build() -> Run:
        model = two_group_model(device).to(dtype)
        return model, MixedPrecisionOptimizer(make_adamw(two_groups(model)), loss_scale=MOVING)

    source, target = build(), build()
    go_on(source, range(2))
    by_functions(source, target, tmp_path)
    go_on(source, range(2, 4))
    go_on(target, range(2, 4))
    assert_same(source[1].state_dict(), target[1].state_dict())


def test_a_flattened_state_is_told_apart(
    device: torch.device, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Torch drops the masters from it: a warning says so, and what to do."""
    source, target = (wrapped(device, dtype) for _ in range(2))
    go_on(source, range(2))
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(*source, options=options)
    with caplog.at_level(logging.WARNING, "mixedopt"):
        set_optimizer_state_dict(*target, flat, options=options)
    assert "flatten_optimizer_state_dict=True loses them" in caplog.text


def test_another_model_is_refused(tmp_path: Path, device: torch.device, dtype: torch.dtype) -> None:
    """A name that is not here, by DCP's own form."""
    source, target = (wrapped(device, dtype) for _ in range(2))
    go_on(source, range(2))
    state = get_optimizer_state_dict(*source)
    state["state"]["head.bias"]["master"] = torch.zeros(3)
    before = snapshot(*target)
    with pytest.raises(CheckpointError, match=r"'head.bias' of shape \(3,\), here \(12,\)"):
        set_optimizer_state_dict(*target, state)
    assert_same(before, snapshot(*target))


# -- several processes ------------------------------------------------------------------


def data_parallel(dtype: torch.dtype) -> Run:
    model, optimizer = wrapped(torch.device("cpu"), dtype, loss_scale=MOVING)
    return DistributedDataParallel(model), optimizer


def work(rank: int, folder: str) -> None:
    """Save from two processes, load into fresh ones, go on; then one process reads what two wrote."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS, timeout=LIMIT)
    torch.set_num_threads(1)  # as in the process that reads it: the same sums
    for dtype in (torch.float16, torch.bfloat16):
        source, target = data_parallel(dtype), data_parallel(dtype)
        go_on(source, range(3))
        by_functions(source, target, Path(folder) / str(dtype))
        assert_same(source[1].state_dict(), target[1].state_dict())
        go_on(source, range(3, 5))
        go_on(target, range(3, 5))
        assert_same(source[1].state_dict(), target[1].state_dict())
        if rank == 0:
            torch.save(source[1].state_dict(), f"{folder}/{dtype}.pt")
    dist.barrier()  # nobody leaves while another still writes
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What two processes wrote; starting them is dear."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, args=(str(folder),), nprocs=RANKS, start_method="spawn")
    return folder


@pytest.mark.skipif(not dist.is_gloo_available(), reason="needs gloo")
def test_two_processes_save_and_one_loads(written: Path, dtype: torch.dtype) -> None:
    """Under DDP, and what they wrote goes on in one process without DDP: names are the bare model's."""
    model, optimizer = wrapped(torch.device("cpu"), dtype, loss_scale=MOVING)
    into = named_state((model, optimizer))
    dcp.load(into, checkpoint_id=written / str(dtype))
    set_model_state_dict(model, into["model"])
    set_optimizer_state_dict(model, optimizer, into["optimizer"])
    assert optimizer.applied_steps == 3
    final = torch.load(written / f"{dtype}.pt", weights_only=True)
    assert differs(final, optimizer.state_dict())
    go_on((model, optimizer), range(3, 5))
    assert_same(final, optimizer.state_dict())
