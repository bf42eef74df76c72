"""Two processes on gloo: one rank's overflow is everybody's, and the ranks stay equal."""

from __future__ import annotations

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


def train(rank: int, dtype: torch.dtype, ddp_first: bool) -> list[dict[str, Any]]:
    """Six steps of two micro-steps: rank 1 overflows in step 2, the branch is used in step 4."""
    torch.manual_seed(3)
    bare = Branches()
    options: dict[str, Any] = {"dtype": dtype, "max_grad_norm": 1.0}
    options["loss_scale"] = DynamicLossScale(init_scale=2.0**8, growth_interval=3)
    if ddp_first:
        model = DistributedDataParallel(bare, find_unused_parameters=True)
        optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, **options)
    else:
        optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(bare.parameters(), lr=1e-2), bare, **options)
        model = DistributedDataParallel(bare, find_unused_parameters=True)
    identities = [id(param) for param in model.parameters()]
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        for micro in range(2):
            x = torch.randn(5, 4, generator=torch.Generator().manual_seed(100 * step + 10 * micro + rank))
            bad = math.inf if (step, micro, rank) == (2, 1, 1) else 1.0
            if micro == 0:
                with model.no_sync():
                    optimizer.backward(model(x, step == 4).square().mean() * bad)
            else:
                optimizer.backward(model(x, step == 4).square().mean() * bad)
        optimizer.step()
        masters = {name: master.detach().clone() for name, master in optimizer.named_masters()}
        seen.append({"skipped": optimizer.last_step.skipped, "scale": optimizer.loss_scale, "masters": masters})
    assert [id(param) for param in model.parameters()] == identities
    return seen


def undo(rank: int, seen: list[dict[str, Any]]) -> None:
    """A removed conversion under DDP leaves an fp32 model whose gradients are averaged again."""
    model = DistributedDataParallel(nn.Linear(2, 1, bias=False))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
    optimizer.policy_handle.remove()
    model(torch.full((1, 2), float(rank))).sum().backward()
    seen.append({"gradient": next(model.parameters()).grad})


def work(rank: int, folder: str, dtype: torch.dtype, ddp_first: bool) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=LIMIT)
    try:
        seen = train(rank, dtype, ddp_first)
        if ddp_first:
            undo(rank, seen)
        torch.save(seen, f"{folder}/seen{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ddp_first", [False, True], ids=["optimizer_first", "ddp_first"])
def test_ranks_decide_alike_and_stay_equal(ddp_first: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """DDP spreads an inf with the gradients: all ranks skip step 2, keep one S and equal masters."""
    mp.start_processes(work, args=(str(tmp_path), dtype, ddp_first), nprocs=RANKS, start_method="spawn")
    first, second = (torch.load(tmp_path / f"seen{rank}.pt") for rank in range(RANKS))
    if ddp_first:
        assert [0.5, 0.5] == first.pop()["gradient"].flatten().tolist()
        assert [0.5, 0.5] == second.pop()["gradient"].flatten().tolist()
    assert [step == 2 for step in range(6)] == [report["skipped"] for report in first]
    assert 2.0**7 == first[2]["scale"]
    for mine, theirs in zip(first, second, strict=True):
        assert (mine["skipped"], mine["scale"]) == (theirs["skipped"], theirs["scale"])
        assert all(torch.equal(mine["masters"][name], theirs["masters"][name]) for name in mine["masters"])
    weights = [report["masters"]["branch.weight"] for report in first]
    assert all(torch.equal(weights[0], weight) for weight in weights[1:4])  # unused until step 4
    assert not torch.equal(weights[3], weights[4])
    assert not torch.equal(first[0]["masters"]["head.weight"], first[5]["masters"]["head.weight"])


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
