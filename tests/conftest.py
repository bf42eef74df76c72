"""Profiles, the device, seeds and shared models."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings
from pairs import Bench

from mixedopt import assembly

COMMON = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]}
settings.register_profile("dev", max_examples=50, **COMMON)
settings.register_profile("ci", max_examples=100, **COMMON)
settings.register_profile("thorough", max_examples=2000, **COMMON)
# These tensors are too small to be shared out: a second thread only waits.
torch.set_num_threads(1)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "dev"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, never fail, what needs a GPU that is not there."""
    if not torch.cuda.is_available():
        for item in items:
            if "gpu" in item.keywords:
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture
def device() -> torch.device:
    """The device that the suite runs on: ``MIXEDOPT_DEVICE``, else a GPU if there is one."""
    default = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(os.environ.get("MIXEDOPT_DEVICE", default))


@pytest.fixture(autouse=True)
def _eager_unless_named(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, too, a test that names no tier is about the eager one, whose laws are bit for bit."""
    if torch.cuda.is_available() and request.node.get_closest_marker("auto") is None:
        choose = assembly.choose
        monkeypatch.setattr(assembly, "choose", lambda tier, asked: choose("eager" if tier == "auto" else tier, asked))


@pytest.fixture(params=[torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    """Both half formats, in turn."""
    return request.param


@pytest.fixture
def at(device: torch.device, dtype: torch.dtype) -> Bench:
    """Both half formats, in turn."""
    return Bench(device, dtype)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(int(os.environ.get("MIXEDOPT_SEED", "0")))
