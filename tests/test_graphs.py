"""A whole iteration in one CUDA graph: the same numbers as without, through overflows, growth and schedules."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixedopt import (
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    StaticLossScale,
    StepOrderError,
    graphed,
)

pytestmark = pytest.mark.gpu

TIERS = ("compiled", "fused")
SCALE = DynamicLossScale(2.0**10, growth_interval=5)
BAD = (0, 7, 12)  # steps whose loss is infinite: in the warm-up, and in replays

Step = Callable[[Tensor, Tensor], Tensor]


def build(tier: str, **options: Any) -> tuple[nn.Module, MixedPrecisionOptimizer, Step]:
    """Return a model, its optimizer, and one iteration; the factor makes the loss infinite."""
    torch.manual_seed(0)
    layers = [nn.Linear(64, 128), nn.BatchNorm1d(128), nn.ReLU(), nn.LayerNorm(128), nn.Linear(128, 2)]
    model = nn.Sequential(*layers).cuda()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    options = {"loss_scale": SCALE, "max_grad_norm": 0.5} | options
    optimizer = MixedPrecisionOptimizer(inner, model, tier=tier, **options)

    def step(x: Tensor, factor: Tensor) -> Tensor:
        loss = model(x).square().mean()
        optimizer.backward(loss * factor)
        optimizer.step()
        return loss.detach()

    return model, optimizer, step


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).cuda()
    return x, torch.tensor(float("inf") if step in BAD else 1.0, device="cuda")


def everything(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> list[Tensor]:
    state = [value for entry in optimizer.state.values() for value in entry.values()]
    return [tensor.detach().clone() for tensor in (*model.state_dict().values(), *state)]


@pytest.mark.parametrize("gradients", ["autograd", "half", "fp32"])
@pytest.mark.parametrize("tier", TIERS)
def test_a_graph_replays_the_run(tier: str, gradients: str) -> None:
    """Losses, weights, state, statistics, S and counters, bit for bit, over OneCycleLR, overflows and growth."""
    found = []
    for captured in (False, True):
        model, optimizer, step = build(tier, gradients=gradients)
        run = graphed(step, *batch(1)) if captured else step
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=40)
        losses, told = [], []
        for index in range(30):
            losses.append(run(*batch(index)))
            told.append((optimizer.last_step.skipped, optimizer.loss_scale))
            scheduler.step()
        found.append((torch.stack(losses), told, optimizer.applied_steps, everything(model, optimizer)))
    (losses, *rest, tensors), (others, *more, values) = found
    assert torch.equal(losses, others)
    assert rest == more
    assert all(torch.equal(one, other) for one, other in zip(tensors, values, strict=True))
    assert [index for index, (skipped, _) in enumerate(rest[0]) if skipped] == list(BAD)


@pytest.mark.parametrize("tier", TIERS)
def test_replays_and_other_steps_may_alternate(tier: str) -> None:
    """Each begins with S as it is then."""
    found = []
    for captured in (False, True):
        model, optimizer, step = build(tier, loss_scale=DynamicLossScale(2.0**10, growth_interval=2))
        run = graphed(step, *batch(1)) if captured else step
        for index in range(24):
            (step if index % 4 == 3 else run)(*batch(index))
        found.append([torch.tensor(optimizer.loss_scale), *everything(model, optimizer)])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def by_hand(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """Return a graph of a step, captured without ``graphed``."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def test_a_step_beside_a_graph_made_by_hand_begins_with_the_scale() -> None:
    """Whose replays nobody tells of: S has moved all the same."""
    _, optimizer, step = build("compiled", loss_scale=DynamicLossScale(2.0**10, growth_interval=2))
    x, factor = batch(1)
    graph = by_hand(lambda: step(x, factor))
    scales = set()
    for _ in range(3):
        for _ in range(3):
            graph.replay()
        begun: list[Tensor] = []
        loss = x.sum().requires_grad_() * 1.5
        loss.register_hook(begun.append)
        optimizer.backward(loss)
        optimizer.zero_grad()
        assert begun[0] == optimizer.loss_scale
        scales.add(optimizer.loss_scale)
        step(x, factor)
    assert len(scales) == 3


def test_a_graph_made_by_hand_cannot_follow_the_rates_of_a_fused_optimizer() -> None:
    """Said so, with what to use."""
    _, _, step = build("fused")
    x, factor = batch(1)
    with pytest.raises(RuntimeError, match=r"in a graph made by hand.*Use mixedopt.graphed"):
        by_hand(lambda: step(x, factor))


@pytest.mark.parametrize("tier", TIERS)
def test_split_masters_may_be_lent_between_calls(tier: str) -> None:
    """Before the capture and between replays, edited and published or only read: as without a graph."""
    found = []
    for captured in (False, True):
        model, optimizer, step = build(tier, master="split")
        run = graphed(step, *batch(1)) if captured else step
        for index in range(14):
            run(*batch(index))
            if index in (2, 6, 9):
                shown = dict(optimizer.named_masters())
                if index == 6:
                    with torch.no_grad():
                        shown["0.weight"].mul_(0.5)
                    optimizer.publish()
        found.append([*everything(model, optimizer), *optimizer.master_state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_graph_of_a_removed_conversion_is_not_replayed() -> None:
    """The weights that it writes to are gone."""
    _, optimizer, step = build("compiled")
    run = graphed(step, *batch(1))
    for index in range(1, 6):
        run(*batch(index))
    optimizer.policy_handle.remove()
    with pytest.raises(StepOrderError, match="the conversion was removed"):
        run(*batch(6))


def test_a_compiled_model_can_be_captured() -> None:
    """What torch.compile made runs inside the graph."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 4)).cuda()
    optimizer = MixedPrecisionOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-2), model, tier="compiled")
    forward = torch.compile(model)

    def step(x: Tensor, y: Tensor) -> Tensor:
        loss = F.cross_entropy(forward(x), y)
        optimizer.backward(loss)
        optimizer.step()
        return loss.detach()

    x = torch.randn(64, 32, device="cuda")
    y = x[:, :4].argmax(1)
    run = graphed(step, x, y)
    losses = [float(run(x, y)) for _ in range(60)]
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("tier", TIERS)
def test_a_load_is_seen_by_the_graph(tier: str) -> None:
    """State that is loaded, and weights that are edited, count for the next call."""
    model, optimizer, step = build(tier)
    run = graphed(step, *batch(1))
    for index in range(1, 7):
        run(*batch(index))
    saved = {"model": {k: v.clone() for k, v in model.state_dict().items()}, "optimizer": optimizer.state_dict()}
    saved = torch.utils._pytree.tree_map_only(Tensor, Tensor.clone, saved)
    for index in range(8, 11):
        run(*batch(index))
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    other, resumed, plain = build(tier)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    for index in (13, 14, 15, 16):
        assert torch.equal(run(*batch(index)), plain(*batch(index))), index
    assert all(torch.equal(a, b) for a, b in zip(everything(model, optimizer), everything(other, resumed), strict=True))


def test_what_changes_in_a_call_is_an_error() -> None:
    """Another shape, dtype or constant: before anything runs, with a remedy."""
    _, optimizer, step = build("compiled")
    run = graphed(step, *batch(1))
    for index in range(5):
        run(*batch(index + 1))
    applied = optimizer.applied_steps
    x, factor = batch(1)
    with pytest.raises(ValueError, match=r"argument 0 is torch\.float32\[16, 64\].*Pad the batch"):
        run(x[:16], factor)
    with pytest.raises(ValueError, match=r"argument 1 is 1\.0"):
        run(x, 1.0)
    with pytest.raises(ValueError, match="called with"):
        run(x)
    assert optimizer.applied_steps == applied
    with pytest.raises(ValueError, match="a sample tensor is on cpu"):
        graphed(step, x.cpu(), factor)


def test_what_cannot_be_captured_is_explained() -> None:
    """A value read on the host; an eager tier; no optimizer at all."""
    model, optimizer, _ = build("compiled")

    def reads(x: Tensor, factor: Tensor) -> float:
        loss = model(x).square().mean()
        optimizer.backward(loss)
        optimizer.step()
        return loss.item()

    def idle(x: Tensor, factor: Tensor) -> Tensor:
        return model(x).sum()

    _, _, eager = build("eager")
    for step, words in ((reads, "cannot be captured.*wait for the device"), (idle, "none"), (eager, "'eager'")):
        run = graphed(step, *batch(1))
        for index in range(1, 4):
            run(*batch(index))
        with pytest.raises(RuntimeError, match=words):
            run(*batch(4))


def test_an_exhausted_scale_is_told() -> None:
    """Replays raise, some calls late, and the weights are as before."""
    model, _, step = build("compiled", loss_scale=StaticLossScale(8.0, max_consecutive_skips=4))
    run = graphed(step, *batch(1))
    for index in range(1, 6):
        run(*batch(index))
    before = [param.detach().clone() for param in model.parameters()]

    def spoil() -> None:
        for _ in range(10):
            run(*batch(0))
            torch.cuda.synchronize()

    with pytest.raises(LossScaleError, match="skips in a row"):
        spoil()
    assert all(torch.equal(now, then) for now, then in zip(model.parameters(), before, strict=True))
