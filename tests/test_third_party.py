"""Optimizers of others, from the package index: what holds when they are wrapped.

They come with the extra ``third-party``; what is not installed is skipped.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn, optim

from mixedopt import MixedPrecisionOptimizer
from mixedopt.testing import check_optimizer

LAWS = ("equality", "refusal", "rollback", "resume", "none gradients", "scheduler")
P, NA = "passed", "not applicable"
USUAL = (P, NA, P, P, P, P)
SCALE = 2.0**4


@dataclass(frozen=True)
class Other:
    """One optimizer of another package.

    Attributes:
        kind: what is awkward about it.
        module: where it is.
        make: builds it from the module and parameters.
        holds: status of each law.
    """

    kind: str
    module: str
    make: Callable[[Any, list[nn.Parameter]], optim.Optimizer]
    holds: tuple[str, ...] = USUAL

    def factory(self) -> Callable[[list[nn.Parameter]], optim.Optimizer]:
        """Return a factory, or skip the test."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what others warn of when imported is theirs
            pytest.importorskip(self.module.split(".")[0])
            module = importlib.import_module(self.module)
        return lambda params: self.make(module, params)


def in_train_mode(optimizer: Any) -> optim.Optimizer:
    optimizer.train()
    return optimizer


def muon(module: Any, params: list[nn.Parameter]) -> optim.Optimizer:
    """Return a Muon for the matrices, with its AdamW for the rest, in the order of its groups."""
    groups = [{"params": [p for p in params if p.ndim == 2], "use_muon": True}]
    rest = [p for p in params if p.ndim != 2]
    groups += [{"params": rest, "use_muon": False, "lr": 1e-2}] if rest else []
    return module.Muon(groups, lr=0.02)


def adam_mini(module: Any, params: list[nn.Parameter]) -> optim.Optimizer:
    named = [(f"layer{index}.weight", param) for index, param in enumerate(params)]
    return module.Adam_mini(named, lr=1e-2, dim=16, n_heads=2, verbose=False)


SCHEDULEFREE, PYTORCH_OPTIMIZER = "schedulefree", "pytorch_optimizer"
TABLE: dict[str, Other] = {
    "schedulefree.AdamWScheduleFree": Other(
        "train and eval modes",
        SCHEDULEFREE,
        lambda module, params: in_train_mode(module.AdamWScheduleFree(params, lr=1e-2, warmup_steps=2)),
    ),
    "schedulefree.AdamWScheduleFreeClosure": Other(
        "requires a closure", SCHEDULEFREE, lambda module, params: module.AdamWScheduleFreeClosure(params, lr=1e-2)
    ),
    "prodigyopt.Prodigy": Other(
        "learning-rate-free", "prodigyopt", lambda module, params: module.Prodigy(params, d0=1e-3)
    ),
    "lion_pytorch.Lion": Other(
        "sign updates", "lion_pytorch", lambda module, params: module.Lion(params, lr=1e-3, weight_decay=0.1)
    ),
    "adam_mini.Adam_mini": Other("needs names", "adam_mini", adam_mini),
    "torchao.optim.AdamW8bit": Other(
        "8-bit tensor subclass", "torchao.optim", lambda module, params: module.AdamW8bit(params, lr=1e-2)
    ),
    "torchao.optim.AdamW4bit": Other(
        "4-bit tensor subclass", "torchao.optim", lambda module, params: module.AdamW4bit(params, lr=1e-2)
    ),
    "bitsandbytes.optim.AdamW8bit": Other(
        "8-bit blocks, moves its parameters",
        "bitsandbytes.optim",
        lambda module, params: module.AdamW8bit(params, lr=1e-2),
    ),
    "pytorch_optimizer.SAM": Other(
        "two phases", PYTORCH_OPTIMIZER, lambda module, params: module.SAM(params, optim.AdamW, rho=0.05, lr=1e-2)
    ),
    "pytorch_optimizer.LookSAM": Other(
        "two phases, a base with its own state",
        PYTORCH_OPTIMIZER,
        lambda module, params: module.LookSAM(params, optim.AdamW, lr=1e-2),
    ),
    "pytorch_optimizer.SOAP": Other(
        "lists of matrices",
        PYTORCH_OPTIMIZER,
        lambda module, params: module.SOAP(params, lr=1e-2, precondition_frequency=2),
    ),
    "pytorch_optimizer.Muon": Other("by shape", PYTORCH_OPTIMIZER, muon),
    "pytorch_optimizer.Lookahead": Other(
        "state made in __init__, own format",
        PYTORCH_OPTIMIZER,
        lambda module, params: module.Lookahead(optim.AdamW(params, lr=1e-2), k=2),
    ),
    "pytorch_optimizer.SaRA": Other(
        "state made in __init__", PYTORCH_OPTIMIZER, lambda module, params: module.SaRA(params, lr=1e-2)
    ),
    "pytorch_optimizer.FlashAdamW": Other(
        "8-bit state, fp16 scales", PYTORCH_OPTIMIZER, lambda module, params: module.FlashAdamW(params, lr=1e-2)
    ),
    "pytorch_optimizer.MADGRAD": Other(
        "a name in state", PYTORCH_OPTIMIZER, lambda module, params: module.MADGRAD(params, lr=1e-2)
    ),
    "pytorch_optimizer.StableSPAM": Other(
        "counts beside state", PYTORCH_OPTIMIZER, lambda module, params: module.StableSPAM(params, lr=1e-2)
    ),
    "pytorch_optimizer.Lamb": Other(
        "norms by layer", PYTORCH_OPTIMIZER, lambda module, params: module.Lamb(params, lr=1e-2)
    ),
}


@pytest.fixture(autouse=True)
def _uncompiled() -> Any:
    """Run compiled steps eagerly: compiling takes a minute, and no compiler may be there."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize("name", sorted(TABLE))
def test_what_holds_for_an_optimizer_of_others(name: str) -> None:
    """The table is exact."""
    report = check_optimizer(TABLE[name].factory())
    assert TABLE[name].holds == tuple(report[law].status for law in LAWS), str(report)
    assert name.rpartition(".")[2] == report.optimizer


def test_the_table_holds_at_least_ten_and_every_awkward_kind() -> None:
    """State made early, quantised, modes, closures, no learning rate, shapes, signs."""
    kinds = " ".join(other.kind for other in TABLE.values())
    assert len(TABLE) >= 10
    for kind in ("__init__", "8-bit", "modes", "closure", "two phases", "learning-rate-free", "shape", "sign"):
        assert kind in kinds


def run(optimizer: Any, params: list[nn.Parameter], steps: range, scale: float = 1.0) -> None:
    """Step on gradients that depend on the step alone, rounded to bf16."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in params:
            grad = torch.randn(param.shape, generator=generator).to(torch.bfloat16)
            param.grad = (grad * scale).to(param.dtype)
        optimizer.step()


def test_the_evaluation_weights_of_a_schedule_free_optimizer_reach_the_model() -> None:
    """``inner.eval()`` and ``publish()`` show its average; ``train()`` and ``publish()`` go on where it was."""
    make = TABLE["schedulefree.AdamWScheduleFree"].factory()
    ours, theirs = nn.Linear(6, 4), nn.Linear(6, 4)
    theirs.load_state_dict(ours.state_dict())
    bare, params = make(list(theirs.parameters())), list(ours.parameters())
    optimizer = MixedPrecisionOptimizer(make(params), ours, dtype=torch.bfloat16, loss_scale=SCALE)
    optimizer.scale(torch.zeros(()))
    for steps in (range(3), range(3, 6)):
        run(bare, list(theirs.parameters()), steps)
        run(optimizer, params, steps, SCALE)
        trained = ours.weight.detach().clone()
        bare.eval()
        optimizer.inner.eval()
        optimizer.publish()
        assert torch.equal(theirs.weight.detach().to(torch.bfloat16), ours.weight.detach())
        assert not torch.equal(trained, ours.weight.detach())
        bare.train()
        optimizer.inner.train()
        optimizer.publish()
        assert torch.equal(theirs.weight.detach(), dict(optimizer.named_masters())["weight"].detach())


@pytest.mark.parametrize(
    "name",
    [
        "torchao.optim.AdamW8bit",
        "bitsandbytes.optim.AdamW8bit",
        "pytorch_optimizer.Lookahead",
        "pytorch_optimizer.SOAP",
        "pytorch_optimizer.MADGRAD",
        "prodigyopt.Prodigy",
    ],
)
def test_wrapping_and_unwrapping_in_mid_life_lose_nothing(name: str) -> None:
    """Two bare steps, two wrapped, two bare again equal six bare ones; the weight is a transposed matrix."""
    make = TABLE[name].factory()
    start = torch.randn(64, 96)
    ours, theirs = (nn.ParameterList([nn.Parameter(start.clone().t())]) for _ in range(2))
    inner, bare = make(list(ours.parameters())), make(list(theirs.parameters()))
    run(bare, list(theirs.parameters()), range(6))
    run(inner, list(ours.parameters()), range(2))
    optimizer = MixedPrecisionOptimizer(inner, ours, dtype=torch.bfloat16, loss_scale=SCALE)
    optimizer.scale(torch.zeros(()))
    run(optimizer, list(ours.parameters()), range(2, 4), SCALE)
    assert 2 == optimizer.applied_steps
    assert torch.equal(ours[0].detach(), next(m for _, m in optimizer.named_masters()).detach().to(torch.bfloat16))
    optimizer.policy_handle.remove()
    run(inner, list(ours.parameters()), range(4, 6))
    assert torch.equal(theirs[0].detach(), ours[0].detach())
    assert not torch.equal(start.t(), ours[0].detach())
