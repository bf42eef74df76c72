"""Version 1 of the format, which every later version reads."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from make_checkpoint_v1 import FILE, SCRIPT
from models import assert_same
from resume import Run

from mixedopt import CheckpointError, checkpoint
from mixedopt.checkpoint.check import ABOUT

MASTERS = "8245810ee10391a0797784d2e5f4eaf4edef62b814b8bcf92d754346d626973a"


def digest(tensors: list[torch.Tensor]) -> str:
    """Return the SHA-256 of the bytes of fp32 tensors."""
    flat = torch.cat([tensor.flatten() for tensor in tensors]).view(torch.uint8)
    return hashlib.sha256(bytes(flat.tolist())).hexdigest()


@pytest.fixture
def found() -> dict[str, Any]:
    return checkpoint.load(FILE)


def test_version_1_loads(found: dict[str, Any]) -> None:
    """Into a fresh run, without a difference, and all of it arrives."""
    run = Run(SCRIPT)
    run.model.load_state_dict(found["model"])
    assert run.optimizer.load_state_dict(found["optimizer"]) == ([], [])
    state, saved = run.optimizer.state_dict(), found["optimizer"]
    assert_same(saved["state"], state["state"])
    assert_same(saved["mixedopt"], {key: state["mixedopt"][key] for key in saved["mixedopt"]})
    for group, old in zip(state["param_groups"], saved["param_groups"], strict=True):
        assert_same(old, {key: group[key] for key in old})
    assert_same(found["model"], dict(run.model.state_dict()))


def test_version_1_means_what_it_meant(found: dict[str, Any]) -> None:
    """Values that the run had when the file was written."""
    run = Run(SCRIPT)
    run.optimizer.load_state_dict(found["optimizer"])
    optimizer = run.optimizer
    assert digest([master.detach() for _, master in optimizer.named_masters()]) == MASTERS
    assert (optimizer.loss_scale, optimizer.applied_steps, optimizer.skipped_steps) == (128.0, 3, 3)
    assert run.model.branch.weight not in optimizer.state
    assert {int(entry["step"]) for entry in optimizer.state.values()} == {3}
    optimizer.scale(torch.zeros(()))
    run.model.first.bias.grad = torch.ones(6, dtype=torch.float16)
    optimizer.step()
    assert optimizer.loss_scale == 256.0  # the second clean step in a row: the tracker was 1


def test_the_page_names_every_key(found: dict[str, Any]) -> None:
    """What a file says of itself, and what the page says of that."""
    assert set(found["optimizer"]["mixedopt"]) == set(ABOUT)
    page = (FILE.parents[2] / "docs" / "checkpoint-format.md").read_text("utf-8")
    assert [key for key in ABOUT if f'["{key}"]' not in page] == []


@pytest.mark.parametrize("version", [0, 2, "1", None])
def test_another_version_is_refused_by_its_number(version: Any, found: dict[str, Any]) -> None:
    """It may mean something else."""
    found["optimizer"]["mixedopt"]["format"] = version
    match = rf"has format {version!r}, this version reads 1\. Nothing was loaded\. Load it with the mixedopt version"
    with pytest.raises(CheckpointError, match=match):
        Run(SCRIPT).optimizer.load_state_dict(found["optimizer"])


def test_a_key_that_a_later_version_adds_is_ignored(found: dict[str, Any]) -> None:
    """Keys may be added within a version."""
    found["optimizer"]["mixedopt"]["later"] = {"anything": 1}
    assert Run(SCRIPT).optimizer.load_state_dict(found["optimizer"]) == ([], [])
