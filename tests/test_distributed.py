"""Two processes on gloo: one rank's overflow is everybody's, and the ranks stay equal."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer

RANKS = 2
LIMIT = timedelta(seconds=60)
DTYPES = torch.float16, torch.bfloat16
ORDERS = "optimizer_first", "ddp_first", "half"

pytestmark = pytest.mark.skipif(
    sys.platform == "win32" or not (dist.is_available() and dist.is_gloo_available()), reason="needs gloo"
)


class Branches(nn.Module):
    """A norm in fp32, half layers, and a branch that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8))
        self.branch = nn.Linear(8, 8)
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, use_branch: bool) -> torch.Tensor:
        x = self.stem(x)
        return self.head(self.branch(x) if use_branch else x)


def train(rank: int, dtype: torch.dtype, order: str) -> list[dict[str, Any]]:
    """Six steps of two micro-steps: rank 1 overflows in step 2, the branch is used in step 4."""
    torch.manual_seed(3)
    bare = Branches()
    options: dict[str, Any] = {"max_grad_norm": 1.0}
    options["loss_scale"] = DynamicLossScale(init_scale=2.0**8, growth_interval=3)
    if order == "optimizer_first":
        inner = torch.optim.AdamW(bare.parameters(), lr=1e-2)
        optimizer = MixedPrecisionOptimizer(inner, bare, dtype=dtype, **options)
        model = DistributedDataParallel(bare, find_unused_parameters=True)
    elif order == "ddp_first":
        model = DistributedDataParallel(bare, find_unused_parameters=True)
        inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
        optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, **options)
    else:
        model = DistributedDataParallel(bare.to(dtype), find_unused_parameters=True)
        inner = torch.optim.AdamW(model.module.named_parameters(), lr=1e-2)
        optimizer = MixedPrecisionOptimizer(inner, **options)
    identities = [id(param) for param in model.parameters()]
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            x = x.to(dtype) if order == "half" else x
            bad = math.inf if (step, micro, rank) == (2, 1, 1) else 1.0
            with model.no_sync() if micro == 0 else contextlib.nullcontext():
                optimizer.backward(model(x, step == 4).float().square().mean() * bad)
        optimizer.step()
        masters = {name: master.detach().clone() for name, master in optimizer.named_masters()}
        seen.append({"skipped": optimizer.last_step.skipped, "scale": optimizer.loss_scale, "masters": masters})
    assert [id(param) for param in model.parameters()] == identities
    return seen


def undo(rank: int) -> torch.Tensor:
    """Return the gradient of an fp32 model, inside DDP, whose conversion was removed."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.policy_handle.remove()
    model(torch.full((1, 2), float(rank))).sum().backward()
    return next(model.parameters()).grad


def seeded_apart(rank: int) -> list[str]:
    """Return what is logged when DDP overwrites the weights of all ranks but the first after wrapping."""
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("mixedopt").addHandler(handler)
    torch.manual_seed(rank)
    model = nn.Linear(2, 1)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, loss_scale=1.0)
    for _ in range(2):
        optimizer.backward(DistributedDataParallel(model)(torch.ones(1, 2)).sum())
        optimizer.step()
    return said


def work(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=LIMIT)
    try:
        seen: dict[Any, Any] = {(d, order): train(rank, d, order) for d in DTYPES for order in ORDERS}
        seen |= {"undone": undo(rank), "said": seeded_apart(rank)}
        torch.save(seen, f"{folder}/seen{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each rank saw; starting processes is dear, so all runs share them."""
    folder = tmp_path_factory.mktemp("ranks")
    mp.start_processes(work, args=(str(folder),), nprocs=RANKS, start_method="spawn")
    return [torch.load(folder / f"seen{rank}.pt", weights_only=False) for rank in range(RANKS)]


@pytest.mark.parametrize("order", ORDERS)
def test_ranks_decide_alike_and_stay_equal(order: str, dtype: torch.dtype, ranks: list[dict[Any, Any]]) -> None:
    """DDP spreads an inf with the gradients: all ranks skip step 2, keep one S and equal masters."""
    first, second = (seen[dtype, order] for seen in ranks)
    assert [step == 2 for step in range(6)] == [report["skipped"] for report in first]
    assert 2.0**7 == first[2]["scale"]
    for mine, theirs in zip(first, second, strict=True):
        assert (mine["skipped"], mine["scale"]) == (theirs["skipped"], theirs["scale"])
        assert all(torch.equal(mine["masters"][name], theirs["masters"][name]) for name in mine["masters"])
    weights = [report["masters"]["branch.weight"] for report in first]
    assert all(torch.equal(weights[0], weight) for weight in weights[1:4])  # unused until step 4
    assert not torch.equal(weights[3], weights[4])
    assert not torch.equal(first[0]["masters"]["head.weight"], first[5]["masters"]["head.weight"])


def test_gradients_are_averaged_again_after_remove(ranks: list[dict[Any, Any]]) -> None:
    """A removed conversion under DDP leaves an fp32 model inside working buckets."""
    assert [[0.5, 0.5]] * RANKS == [seen["undone"].flatten().tolist() for seen in ranks]


def test_ranks_that_were_seeded_apart_are_warned(ranks: list[dict[Any, Any]]) -> None:
    """DDP after the optimizer overwrites rounded weights: their masters lost the low bits, and the log says so once."""
    said = [[line for line in seen["said"] if "weights were overwritten" in line] for seen in ranks]
    assert [0, 1] == [len(lines) for lines in said]
    assert "or seed all ranks alike" in said[1][0]


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """A process group of this process alone."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, timeout=LIMIT)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_ddp_whose_buckets_cannot_be_made_anew_is_refused() -> None:
    """A group of its own or a communication hook would be lost: refused before anything is changed."""
    own_group = DistributedDataParallel(nn.Linear(2, 2), process_group=dist.new_group([0]))
    hooked = DistributedDataParallel(nn.Linear(2, 2))
    hooked.register_comm_hook(None, lambda state, bucket: bucket.buffer())
    for model, match in (
        (own_group, "a process group of its own: .*around the bare model"),
        (hooked, "after wrapping"),
    ):
        with pytest.raises(ValueError, match=match):
            MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        assert all(param.dtype == torch.float32 for param in model.parameters())


def test_gradients_are_not_taken_before_other_ranks_have_seen_them(
    one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several ranks ``gradients=`` other than autograd is refused by name."""
    model = nn.Linear(2, 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    with pytest.raises(ValueError, match=r"gradients='fp32'\): would take each gradient before Distributed"):
        MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model, gradients="fp32")
