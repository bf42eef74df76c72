"""Two processes on gloo: one rank's overflow is everybody's, and the ranks stay equal."""

from __future__ import annotations

import math
import sys
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


def train(rank: int, dtype: torch.dtype) -> list[dict[str, Any]]:
    """Six steps of two micro-steps: rank 1 overflows in step 2, the branch is used in step 4."""
    torch.manual_seed(3)
    bare = Branches()
    scale = DynamicLossScale(init_scale=2.0**8, growth_interval=3)
    inner = torch.optim.AdamW(bare.parameters(), lr=1e-2)
    optimizer = MixedPrecisionOptimizer(inner, bare, dtype=dtype, loss_scale=scale, max_grad_norm=1.0)
    model = DistributedDataParallel(bare, find_unused_parameters=True)
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
    return seen


def work(rank: int, folder: str, dtype: torch.dtype) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS, timeout=LIMIT)
    try:
        torch.save(train(rank, dtype), f"{folder}/seen{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_ranks_decide_alike_and_stay_equal(dtype: torch.dtype, tmp_path: Path) -> None:
    """DDP spreads an inf with the gradients: all ranks skip step 2, keep one S and equal masters."""
    mp.start_processes(work, args=(str(tmp_path), dtype), nprocs=RANKS, start_method="spawn")
    first, second = (torch.load(tmp_path / f"seen{rank}.pt") for rank in range(RANKS))
    assert [step == 2 for step in range(6)] == [report["skipped"] for report in first]
    assert 2.0**7 == first[2]["scale"]
    for mine, theirs in zip(first, second, strict=True):
        assert (mine["skipped"], mine["scale"]) == (theirs["skipped"], theirs["scale"])
        assert all(torch.equal(mine["masters"][name], theirs["masters"][name]) for name in mine["masters"])
    weights = [report["masters"]["branch.weight"] for report in first]
    assert all(torch.equal(weights[0], weight) for weight in weights[1:4])  # unused until step 4
    assert not torch.equal(weights[3], weights[4])
    assert not torch.equal(first[0]["masters"]["head.weight"], first[5]["masters"]["head.weight"])


def test_a_model_inside_ddp_is_refused(tmp_path: Path) -> None:
    """Its buckets hold fp32 gradients; the error says which way round it works."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meet", rank=0, world_size=1, timeout=LIMIT)
    try:
        model = DistributedDataParallel(nn.Linear(2, 2))
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        with pytest.raises(ValueError, match=r"buckets are made for fp32 .*Wrap the optimizer around the bare"):
            MixedPrecisionOptimizer(inner, model)
        assert all(param.dtype == torch.float32 for param in model.parameters())
    finally:
        dist.destroy_process_group()
