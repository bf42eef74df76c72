"""Optimizers that evaluate the model themselves: LBFGS, SAM and their kind, at published weights and unscaled."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import (
    FP32,
    SMALL_SCALE,
    assert_same,
    differs,
    loss_of,
    masters_of,
    seeded,
    snapshot,
    through_file,
    two_group_model,
    two_groups,
    vector,
)
from torch import Tensor, nn
from torch.nn import functional as F

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, StaticLossScale, StepOrderError

INF = float("inf")
S = 2.0**7
STATIC = StaticLossScale(S)
Model, Wrapper = nn.Module, MixedPrecisionOptimizer
Meddle = Callable[[int, Tensor], Tensor]

search = pytest.mark.parametrize("search", [None, "strong_wolfe"], ids=["plain", "strong_wolfe"])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are too small to be shared out: one thread is three times as fast."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Run:
    """A model, its optimizer, wrapped or not, and a closure that writes down every evaluation.

    Args:
        loss: of the model.
        meddle: changes the loss of an evaluation, by its number from 1.
    """

    def __init__(self, model: Model, optimizer: Any, loss: Callable[[Model], Tensor], meddle: Any = None) -> None:
        self.model, self.optimizer, self.loss, self.meddle = model, optimizer, loss, meddle
        self.backward = optimizer.backward if isinstance(optimizer, Wrapper) else torch.autograd.backward
        self.forget()

    def forget(self) -> None:
        self.losses: list[Tensor] = []
        self.weights: list[dict[str, Tensor]] = []
        self.grads: list[list[Tensor | None]] = []

    def closure(self) -> Tensor:
        self.optimizer.zero_grad()
        return self.evaluate()

    def evaluate(self) -> Tensor:
        loss = self.loss(self.model)
        if self.meddle is not None:
            loss = self.meddle(len(self.losses) + 1, loss)
        self.losses.append(loss.detach().clone())
        self.weights.append({name: value.detach().clone() for name, value in self.model.state_dict().items()})
        self.backward(loss)
        self.grads.append([None if p.grad is None else p.grad.clone() for p in self.model.parameters()])
        return loss

    def step(self) -> Any:
        return self.optimizer.step(self.closure)


def network(norm: bool = False) -> nn.Module:
    layers = [nn.Linear(3, 8), *([nn.BatchNorm1d(8)] if norm else []), nn.Tanh(), nn.Linear(8, 1)]
    return nn.Sequential(*layers)


def waves(model: Model) -> Tensor:
    """Return the loss of a regression that needs a few steps."""
    x = torch.linspace(-1, 1, 96, device=next(model.parameters()).device).view(32, 3).roll(1, 1)
    return (model(x).float() - torch.sin(3 * x.sum(1, keepdim=True))).square().mean()


def lbfgs(params: Any, search: str | None = None, **options: Any) -> torch.optim.LBFGS:
    return torch.optim.LBFGS(params, max_iter=options.pop("max_iter", 6), line_search_fn=search, **options)


def wrapped_run(device: torch.device, dtype: torch.dtype, search: str | None, **options: Any) -> Run:
    """Return a half network under LBFGS."""
    norm, max_eval = options.pop("norm", False), options.pop("max_eval", None)
    model = seeded(lambda: network(norm), device)
    options.setdefault("loss_scale", SMALL_SCALE)
    return Run(
        model, Wrapper(lbfgs(model.parameters(), search, max_eval=max_eval), model, dtype=dtype, **options), waves
    )


def twins(model: Model, search: str | None, loss: Callable[[Model], Tensor], **options: Any) -> tuple[Run, Run]:
    """Return a model under bare LBFGS, and a copy of it under one that is wrapped and stays in fp32."""
    twin = copy.deepcopy(model)
    given = {"model": twin, "policy": FP32} if options.pop("with_model", True) else {}
    wrapper = Wrapper(lbfgs(twin.parameters(), search), loss_scale=1.0, **given, **options)
    return Run(model, lbfgs(model.parameters(), search), loss), Run(twin, wrapper, loss)


def infinite(loss: Tensor) -> Tensor:
    return loss * INF


def steep(loss: Tensor) -> Tensor:
    """Return the same value, with gradients that overflow once scaled."""
    big = loss * 1e38
    return loss + (big - big.detach())


def at(bad: int, how: Callable[[Tensor], Tensor]) -> Meddle:
    return lambda number, loss: how(loss) if number == bad else loss


def unmoved(model: Model | None, optimizer: Wrapper) -> dict[str, Any]:
    """Return a snapshot without what a skip may move."""
    taken = snapshot(model, optimizer)
    return {key: value for key, value in taken.items() if key not in ("scale", "counters", "grads")}


# -- as the bare optimizer ----------------------------------------------------


@pytest.mark.parametrize(
    "options", [{}, {"gradients": "fp32"}, {"with_model": False}], ids=["model", "held gradients", "no model"]
)
@search
def test_lbfgs_in_fp32_is_bare_lbfgs(search: str | None, options: dict[str, Any], device: torch.device) -> None:
    """Weights, state, losses and evaluations agree bit for bit; unused, frozen, then unfrozen layers too."""
    bare, run = twins(two_group_model(device), search, lambda model: loss_of(model, 0), **options)
    start = copy.deepcopy(dict(run.model.state_dict()))
    for step in range(5):
        if step == 3:
            for each in (bare, run):
                each.model.frozen.requires_grad_(True)
        expected, result = bare.step(), run.step()
        assert_same(expected.detach(), result)
        assert_same(bare.losses, run.losses)
        assert_same(dict(bare.model.state_dict()), dict(run.model.state_dict()))
        assert_same(bare.optimizer.state_dict(), run.optimizer.inner.state_dict())
        assert len(masters_of(run.optimizer)) == sum(p.requires_grad for p in run.model.parameters())
        assert differs(start["frozen.weight"], run.model.frozen.weight.detach()) == (step >= 3)
    assert len(run.losses) > 10
    assert run.optimizer.applied_steps == 5
    assert torch.equal(run.model.branch.weight, start["branch.weight"])


def test_micro_steps_in_an_evaluation_add_up(device: torch.device) -> None:
    """A closure may call ``backward`` several times."""
    bare, run = twins(two_group_model(device), None, lambda model: loss_of(model, 0))
    for each in (bare, run):
        for _ in range(2):
            each.optimizer.step(lambda each=each: each.closure().detach() + each.evaluate().detach())
    assert_same(bare.losses, run.losses)
    assert_same(dict(bare.model.state_dict()), dict(run.model.state_dict()))
    assert len(run.losses) > 8


def test_a_double_loss_reaches_the_line_search_as_it_is(device: torch.device) -> None:
    """Only a half loss is widened; a double keeps its bits, as with bare LBFGS."""
    bare, run = twins(seeded(network, device), "strong_wolfe", lambda model: waves(model).double() / 3)
    for _ in range(3):
        assert_same(bare.step().detach(), run.step())
    assert_same(dict(bare.model.state_dict()), dict(run.model.state_dict()))


# -- an evaluation in half ----------------------------------------------------


class Watched(torch.optim.LBFGS):
    """Writes down the loss and the gradients that each evaluation gives it."""

    def step(self, closure: Callable[[], Any]) -> Any:
        def noted() -> Any:
            loss, params = closure(), self.param_groups[0]["params"]
            self.seen.append((loss, [p.grad.clone() for p in params], [p.detach().clone() for p in params]))
            return loss

        self.seen: list[Any] = []
        return super().step(noted)


@pytest.mark.parametrize("half_loss", [False, True], ids=["fp32 loss", "half loss"])
@search
def test_an_evaluation_sees_published_weights_and_leaves_unscaled_gradients(
    search: str | None, half_loss: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Weights are the masters of that moment, rounded; gradients fp32 and divided by S; the loss true and fp32."""
    model = seeded(network, device)
    inner = Watched(model.parameters(), max_iter=6, line_search_fn=search)
    optimizer = Wrapper(inner, model, dtype=dtype, loss_scale=SMALL_SCALE)
    run = Run(model, optimizer, lambda model: waves(model).to(dtype) if half_loss else waves(model))
    for step in range(2):
        run.forget()
        result = run.step()
        assert len(run.losses) == len(inner.seen) > 1
        noted = zip(inner.seen, run.weights, run.grads, run.losses, strict=True)
        for (loss, grads, masters), weights, scaled, own in noted:
            assert_same([master.to(dtype) for master in masters], list(weights.values()))
            assert_same([grad.float() / S for grad in scaled], grads)
            assert_same(own.float(), loss)
        if step == 0:  # later the moves get smaller than half can show
            assert all(differs(one, two) for one, two in zip(run.weights, run.weights[1:], strict=False))
        assert_same(run.losses[0].float(), result)
        assert optimizer.last_step.applied
        assert optimizer.last_step.loss_scale == S
        assert optimizer.applied_steps == step + 1
        for name, master in optimizer.named_masters():
            assert torch.equal(dict(model.named_parameters())[name], master.to(dtype))


@search
def test_the_scale_moves_once_a_step(search: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """However many evaluations there are, S is the same for all, and grows after the last."""
    scales = []
    run = wrapped_run(device, dtype, search, loss_scale=DynamicLossScale(init_scale=4.0, growth_interval=2))
    run.meddle = lambda number, loss: scales.append(run.optimizer.loss_scale) or loss
    for used, after in ((4.0, 4.0), (4.0, 8.0), (8.0, 8.0)):
        scales.clear()
        run.step()
        assert len(scales) > 3
        assert set(scales) == {used}
        assert run.optimizer.loss_scale == after


# -- skips --------------------------------------------------------------------


# Of the others a line search hears instead, see below.
ENDING = [
    (None, STATIC, 1, infinite),
    (None, STATIC, 4, infinite),
    (None, SMALL_SCALE, 1, steep),
    (None, SMALL_SCALE, 4, steep),
    ("strong_wolfe", STATIC, 1, steep),
    ("strong_wolfe", SMALL_SCALE, 1, infinite),
    ("strong_wolfe", SMALL_SCALE, 4, steep),
]


@pytest.mark.parametrize(("search", "scale", "bad", "how"), ENDING)
def test_an_evaluation_that_is_not_finite_takes_everything_back(
    search: str | None, scale: Any, bad: int, how: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Weights, statistics, masters, state and groups are as before the step; S backs off once, if it can."""
    run = wrapped_run(device, dtype, search, norm=True, loss_scale=scale)
    run.step()
    run.step()
    before = unmoved(run.model, run.optimizer)
    run.forget()
    run.meddle = at(bad, how)
    result = run.step()
    assert len(run.losses) == bad
    assert differs(before["weights"], run.weights[-1])  # statistics, and the weights unless it was the first
    assert (bad > 1) == differs(before["weights"]["0.weight"], run.weights[-1]["0.weight"])
    assert_same(before, unmoved(run.model, run.optimizer))
    assert_same(run.losses[0], result)
    report = run.optimizer.last_step
    assert (report.skipped, report.applied, report.loss_scale) == (True, False, S)
    assert (run.optimizer.applied_steps, run.optimizer.skipped_steps) == (2, 1)
    assert run.optimizer.loss_scale == (S / 2 if scale is SMALL_SCALE else S)
    assert all(master.grad is None for _, master in run.optimizer.named_masters())
    run.meddle = None
    run.step()
    assert run.optimizer.last_step.applied


def test_a_loss_that_is_a_number_blames_the_scale_too(device: torch.device, dtype: torch.dtype) -> None:
    """LBFGS takes ``loss.item()`` as well: at a finite loss an overflow in a line search is S's fault."""
    run = wrapped_run(device, dtype, "strong_wolfe")
    run.meddle = at(3, steep)
    run.optimizer.step(lambda: run.closure().item())
    assert len(run.losses) == 3
    assert run.optimizer.last_step.skipped
    assert run.optimizer.loss_scale == S / 2


# -- points that a line search rejects ----------------------------------------


def constant_infinity(loss: Tensor) -> Tensor:
    """Return an infinite loss whose gradients are finite: zero."""
    return torch.where(torch.ones_like(loss, dtype=torch.bool), INF, loss)


def bounded(device: torch.device, dtype: torch.dtype, size: int, how: Any, scale: Any, **options: Any) -> Run:
    """Return a quadratic with its minimum at 0.6 that is infinite beyond 1.5, and a first step that goes beyond."""
    param = vector(device, dtype, size, value=0.0)
    model = nn.ParameterDict({"w": param})
    inner = lbfgs([param], "strong_wolfe", lr=50.0 * size, **options)

    def loss(model: Any) -> Tensor:
        w = model["w"].float()
        value = (w - torch.linspace(0.4, 0.6, size, device=device)).square().sum()
        return how(value) if bool((w.abs() > 1.5).any()) else value

    return Run(model, Wrapper(inner, loss_scale=scale), loss)


@pytest.mark.parametrize("scale", [STATIC, SMALL_SCALE], ids=["static", "dynamic"])
@pytest.mark.parametrize(
    ("size", "how"),
    [
        (64, infinite),
        (5, infinite),
        (64, constant_infinity),
        (5, constant_infinity),
    ],
)
def test_a_line_search_rejects_a_point_with_an_infinite_loss(
    size: int, how: Any, scale: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """The search goes on to better points: the step is applied, the loss falls, S stays."""
    run = bounded(device, dtype, size, how, scale)
    first = run.step()
    assert any(loss.isinf() for loss in run.losses)
    assert run.optimizer.last_step.applied
    assert (run.optimizer.applied_steps, run.optimizer.loss_scale) == (1, S)
    assert all(bool(master.isfinite().all()) for master in masters_of(run.optimizer).values())
    assert run.loss(run.model) < first / 2


def test_a_step_that_ends_at_a_rejected_point_is_applied(device: torch.device, dtype: torch.dtype) -> None:
    """What the line search found before it ran out of evaluations counts as a step."""
    run = wrapped_run(device, dtype, "strong_wolfe", max_eval=4)
    run.meddle = lambda number, loss: loss * INF if number >= 4 else loss
    before = masters_of(run.optimizer)
    run.step()
    assert run.losses[-1].isinf()
    assert differs(before, masters_of(run.optimizer))
    assert run.optimizer.last_step.applied
    assert run.optimizer.applied_steps == 1


def test_a_rejected_point_leaves_no_mark_in_the_statistics(device: torch.device, dtype: torch.dtype) -> None:
    """A forward that overflowed in a line search does not stay in the running statistics."""
    run = wrapped_run(device, dtype, "strong_wolfe", norm=True, loss_scale=STATIC)
    calls = []

    def overflow(module: Model, args: Any) -> Any:
        calls.append(1)
        return (args[0] * INF,) if len(calls) == 3 else None

    run.model[1].register_forward_pre_hook(overflow)
    run.step()
    assert run.losses[2].isnan()
    assert not run.optimizer.last_step.skipped
    assert bool(run.model[1].running_mean.isfinite().all())


# -- what is reached ----------------------------------------------------------


def least_squares(device: torch.device) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Return inputs, targets and the loss of outputs, targets and weights."""
    generator = torch.Generator().manual_seed(0)
    x, noise = torch.randn(64, 5, generator=generator), torch.randn(64, 1, generator=generator)
    y = x @ torch.linspace(-2, 2, 5).view(5, 1) + 0.3 + 0.5 * noise
    return x.to(device), y.to(device), lambda out, y, weight: (out - y).square().mean()


def logistic(device: torch.device) -> tuple[Tensor, Tensor, Callable[..., Tensor]]:
    """Return the same of L2-regularised logistic regression on the breast-cancer data, standardised."""
    datasets = pytest.importorskip("sklearn.datasets")
    x, y = map(torch.from_numpy, datasets.load_breast_cancer(return_X_y=True))
    x = (x - x.mean(0)) / x.std(0, correction=0)

    def loss(out: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(out, y) + 0.005 * weight.square().sum()

    return x.float().to(device), y.float()[:, None].to(device), loss


# Relative excess of the loss at the masters, in fp64, over the optimum of fp32 LBFGS. A search ends where the
# rounding of a half forward hides what is left to descend: a fraction of eps. The worst measured, with 10 seeds of
# overflows: 4.3e-5 in fp16, 5.8e-4 in bf16.
EXCESS = {dtype: torch.finfo(dtype).eps / 4 for dtype in (torch.float16, torch.bfloat16)}  # 2.4e-4, 2e-3
CHANCE = 0.05  # of an overflow, for each evaluation


@pytest.mark.parametrize("overflows", [False, True], ids=["clean", "overflows"])
@pytest.mark.parametrize("problem", [least_squares, logistic])
@search
def test_lbfgs_in_half_reaches_the_fp32_optimum(
    search: str | None, problem: Any, overflows: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Of a convex problem, also when evaluations overflow at random; only the number of steps suffers."""
    x, y, objective = problem(device)
    generator = random.Random(3)

    def meddle(number: int, loss: Tensor) -> Tensor:
        bad = overflows and generator.random() < CHANCE
        return generator.choice([infinite, steep])(loss) if bad else loss

    def exact(weights: dict[str, Tensor]) -> float:
        weight, bias = weights["weight"].double(), weights["bias"].double()
        return float(objective(x.double() @ weight.t() + bias, y.double(), weight))

    found = []
    for half in (False, True):
        model = nn.Linear(x.shape[1], 1, device=device)
        nn.init.zeros_(model.weight)
        nn.init.zeros_(model.bias)
        optimizer: Any = lbfgs(model.parameters(), search, max_iter=5)
        if half:
            optimizer = Wrapper(optimizer, model, dtype=dtype, loss_scale=DynamicLossScale(init_scale=2.0**10))
        run = Run(model, optimizer, lambda m: objective(m(x).float(), y, m.weight.float()), meddle if half else None)
        values = [exact(dict(model.state_dict()))]
        for _ in range(10):
            run.step()
            values.append(exact(masters_of(optimizer) if half else dict(model.state_dict())))
        found.append(values)
    fp32, half = found
    assert fp32[0] == half[0] > 2 * fp32[-1]
    assert (optimizer.skipped_steps > 0) == overflows
    # The best, not the last: without a search, rounding makes LBFGS leap away at times, and come back.
    assert min(half) <= fp32[-1] * (1 + EXCESS[dtype])


# -- two phases: SAM ----------------------------------------------------------


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation in the manner of davda54/sam: two evaluations a step, around an optimizer.

    Args:
        evaluates: the first evaluation is made here too, not by the caller.
        rebinds: the climb makes new tensors.
    """

    def __init__(
        self, params: Any, base: Any, rho: float = 0.05, *, evaluates: bool = False, rebinds: bool = False, **hyper: Any
    ) -> None:
        super().__init__(params, {"rho": rho, **hyper})
        self.evaluates, self.rebinds = evaluates, rebinds
        self.base_optimizer = base(self.param_groups, **hyper)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    def moving(self) -> list[tuple[nn.Parameter, float]]:
        return [(p, group["rho"]) for group in self.param_groups for p in group["params"] if p.grad is not None]

    def first_step(self) -> None:
        norm = torch.stack([p.grad.norm() for p, _ in self.moving()]).norm()
        for p, rho in self.moving():
            self.state[p]["old_p"] = p.data.clone()
            climb = p.grad * (rho / (norm + 1e-12))
            if self.rebinds:
                p.data = p.data + climb
            else:
                p.add_(climb)
        self.zero_grad()

    def second_step(self) -> None:
        for p, _ in self.moving():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        assert closure is not None, "SAM needs a closure"
        closure = torch.enable_grad()(closure)
        if self.evaluates:
            closure()
        self.first_step()
        loss = closure()
        self.second_step()
        return loss


class Extragradient(SAM):
    """Looks ahead with the optimizer inside it, whose state has moved when the second evaluation comes."""

    def first_step(self) -> None:
        for p, _ in self.moving():
            self.state[p]["old_p"] = p.data.clone()
        self.base_optimizer.step()
        self.zero_grad()


def sam_step(run: Run, *, evaluates: bool = False) -> Any:
    """Make a step as davda54's loop does: backward, then a closure for the second evaluation."""
    if not evaluates:
        run.evaluate()
    result = run.optimizer.step(run.closure if evaluates else run.evaluate)
    run.optimizer.zero_grad()
    return result


@pytest.mark.parametrize("rebinds", [False, True], ids=["in place", "rebinds"])
@pytest.mark.parametrize("wrap_at", [0, 2], ids=["fresh", "mid-life"])
@pytest.mark.parametrize("evaluates", [False, True], ids=["backward before", "closure only"])
@pytest.mark.parametrize(("base", "hyper"), [(torch.optim.SGD, {"momentum": 0.9}), (torch.optim.AdamW, {})])
def test_sam_in_fp32_is_bare_sam(
    base: Any, hyper: Any, evaluates: bool, wrap_at: int, rebinds: bool, device: torch.device
) -> None:
    """Weights, losses and both optimizers' state agree bit for bit."""
    runs = []
    for _ in range(2):
        model = two_group_model(device)
        inner = SAM(two_groups(model), base, lr=1e-2, evaluates=evaluates, rebinds=rebinds, **hyper)
        runs.append(Run(model, inner, lambda model: loss_of(model, 0)))
    (bare, run), inner = runs, runs[1].optimizer
    start = dict(two_group_model(device).state_dict())
    for step in range(4):
        if step == wrap_at:
            run = Run(run.model, Wrapper(inner, run.model, policy=FP32, loss_scale=1.0), run.loss)
        expected, result = sam_step(bare, evaluates=evaluates), sam_step(run, evaluates=evaluates)
        assert_same(expected.detach(), result.detach())
        assert_same(dict(bare.model.state_dict()), dict(run.model.state_dict()))
        assert_same(bare.optimizer.state_dict(), inner.state_dict())
        assert_same(bare.optimizer.base_optimizer.state_dict(), inner.base_optimizer.state_dict())
    assert run.optimizer.applied_steps == 4 - wrap_at
    assert differs(start["head.weight"], dict(run.model.state_dict())["head.weight"])


def quadratic(device: torch.device, dtype: torch.dtype, scale: Any, cls: Any = SAM) -> Run:
    """Return one half vector under SAM, with a loss whose gradient is 2 (w - target)."""
    param = vector(device, dtype, 8)
    optimizer = Wrapper(cls([param], torch.optim.SGD, lr=0.1, momentum=0.9), loss_scale=scale)
    target = torch.linspace(-1, 1, 8, device=device)
    return Run(nn.ParameterDict({"w": param}), optimizer, lambda model: (model["w"].float() - target).square().sum())


@pytest.mark.parametrize("cls", [SAM, Extragradient])
def test_sam_in_half_is_sam_that_rounds_weights_and_gradients(
    cls: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """The climb and the step are made in fp32; only what the model sees and gives is half."""
    run = quadratic(device, dtype, STATIC, cls)
    plain = nn.Parameter(torch.ones(8, device=device))
    reference = cls([plain], torch.optim.SGD, lr=0.1, momentum=0.9)

    def evaluate() -> Tensor:
        apart = plain.detach().to(dtype).float() - torch.linspace(-1, 1, 8, device=device)
        plain.grad = (2 * S * apart).to(dtype).float() / S
        return apart.square().sum()

    for _ in range(5):
        evaluate()
        expected, result = reference.step(evaluate), sam_step(run)
        reference.zero_grad()
        assert_same(expected, result)
        assert_same(plain.detach(), masters_of(run.optimizer)["group0.param0"])
        assert_same(plain.detach().to(dtype), run.model["w"].detach())
    assert run.optimizer.applied_steps == 5
    assert not torch.equal(run.weights[0]["w"], run.weights[1]["w"])  # the second evaluation was made up the hill


@pytest.mark.parametrize("how", [infinite, steep])
@pytest.mark.parametrize("scale", [STATIC, SMALL_SCALE], ids=["static", "dynamic"])
@pytest.mark.parametrize(("cls", "bad"), [(SAM, 1), (SAM, 2), (Extragradient, 2)])
def test_an_overflow_in_either_evaluation_of_sam_takes_everything_back(
    cls: Any, bad: int, scale: Any, how: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Also the state of the optimizer inside it; a bad first gradient ends the step before the closure is called."""
    run = quadratic(device, dtype, scale, cls)
    base = run.optimizer.inner.base_optimizer
    sam_step(run)
    sam_step(run)
    before = unmoved(run.model, run.optimizer), copy.deepcopy(base.state_dict())
    run.forget()
    run.meddle = at(bad, how)
    result = sam_step(run)
    assert len(run.losses) == bad
    assert differs(before[0]["weights"], run.weights[-1]) == (bad == 2)
    assert_same(before, (unmoved(run.model, run.optimizer), base.state_dict()))
    assert run.optimizer.last_step.skipped
    assert run.optimizer.loss_scale == (S / 2 if scale is SMALL_SCALE else S)
    assert_same(None if bad == 1 else run.losses[1], result)
    run.meddle = None
    sam_step(run)
    assert run.optimizer.applied_steps == 3


# -- every form of closure ----------------------------------------------------


class Foreign(torch.optim.SGD):
    """Not torch's: nobody can know how often it evaluates."""

    def step(self, closure: Any = None) -> Any:
        self.evaluated = closure is not None
        return super().step(closure)


def clipping(run: Run) -> Tensor:
    """Clip by hand, between the backward and the step."""
    loss = run.closure()
    run.optimizer.unscale_()
    nn.utils.clip_grad_norm_([master for _, master in run.optimizer.named_masters()], 0.05)
    return loss


@pytest.mark.parametrize("closure", [Run.closure, Run.evaluate, clipping])
@pytest.mark.parametrize("keyword", [False, True], ids=["positional", "keyword"])
def test_a_foreign_optimizer_steps_as_torchs(
    keyword: bool, closure: Callable[[Run], Tensor], device: torch.device, dtype: torch.dtype
) -> None:
    """One that evaluates once gives the bits of ``torch.optim.SGD``, overflows and clipping included."""
    runs = []
    for cls in (torch.optim.SGD, Foreign):
        model = two_group_model(device)
        limit = None if closure is clipping else 0.5
        inner = cls(two_groups(model), momentum=0.9)
        optimizer = Wrapper(inner, model, dtype=dtype, loss_scale=SMALL_SCALE, max_grad_norm=limit)
        runs.append(Run(model, optimizer, lambda model: loss_of(model, 0), at(3, infinite)))
    torchs, foreign = runs
    for step in range(5):
        expected = torchs.optimizer.step(lambda: closure(torchs))
        given = {"closure": lambda: closure(foreign)} if keyword else None
        result = foreign.optimizer.step(**given) if given else foreign.optimizer.step(lambda: closure(foreign))
        assert_same(expected.detach(), result.detach())
        one, two = (snapshot(run.model, run.optimizer) for run in runs)
        assert_same({**one, "identity": None}, {**two, "identity": None})
        assert repr(torchs.optimizer.last_step) == repr(foreign.optimizer.last_step)
        assert foreign.optimizer.last_step.skipped == (step == 2)
    assert foreign.optimizer.inner.evaluated
    assert foreign.optimizer.applied_steps == 4


def test_a_foreign_optimizer_may_use_a_graph_from_before_the_step(device: torch.device, dtype: torch.dtype) -> None:
    """A closure that calls ``backward`` of a loss computed earlier works, as with torch's optimizers."""
    for cls in (torch.optim.SGD, Foreign):
        model = two_group_model(device)
        optimizer = Wrapper(cls(two_groups(model)), model, dtype=dtype, loss_scale=SMALL_SCALE)
        loss = loss_of(model, 0)
        optimizer.step(lambda loss=loss, optimizer=optimizer: optimizer.backward(loss))
        assert optimizer.last_step.applied


# -- errors -------------------------------------------------------------------


@search
def test_a_closure_must_drop_the_gradients_of_the_evaluation_before(
    search: str | None, device: torch.device, dtype: torch.dtype
) -> None:
    """The error names ``zero_grad``, and nothing has moved."""
    run = wrapped_run(device, dtype, search)
    before = unmoved(run.model, run.optimizer)
    with pytest.raises(StepOrderError, match=r"closure added to .* Begin it with optimizer.zero_grad\(\)"):
        run.optimizer.step(run.evaluate)
    assert len(run.losses) == 2
    assert_same(before, unmoved(run.model, run.optimizer))


@pytest.mark.parametrize("norm", [False, True], ids=["weights", "statistics"])
@search
def test_an_error_in_the_closure_leaves_everything_as_before(
    search: str | None, norm: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """In the middle of a search, with masters and state moved; the next step is as if there had been no error."""

    def raising(number: int, loss: Tensor) -> Tensor:
        if number == 4:
            raise KeyError("the user's")
        return loss

    run, twin = (wrapped_run(device, dtype, search, norm=norm) for _ in range(2))
    for each in (run, twin):
        each.step()
    before = snapshot(run.model, run.optimizer)
    run.forget()
    run.meddle = raising
    with pytest.raises(KeyError, match="the user's"):
        run.step()
    assert differs(before["weights"], run.weights[2])
    assert_same(before, snapshot(run.model, run.optimizer))
    run.meddle = None
    assert_same(twin.step(), run.step())
    assert_same(snapshot(twin.model, twin.optimizer)["masters"], masters_of(run.optimizer))
    assert run.optimizer.applied_steps == 2


# -- absent gradients, checkpoints --------------------------------------------


@search
def test_lbfgs_in_half_serves_absent_frozen_and_unfrozen_parameters(
    search: str | None, device: torch.device, dtype: torch.dtype
) -> None:
    """What is frozen or unused stays, be it the parameter that carries LBFGS' state; what is unfrozen moves."""
    model = two_group_model(device)
    model.embedding.weight.requires_grad_(False)
    inner = lbfgs(model.parameters(), search)
    optimizer = Wrapper(inner, model, dtype=dtype, loss_scale=SMALL_SCALE)
    run = Run(model, optimizer, lambda model: loss_of(model, 0))
    frozen = ["embedding.weight", "frozen.weight", "frozen.bias"]
    for step in range(4):
        if step == 2:
            model.requires_grad_(True)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        run.step()
        assert optimizer.last_step.applied
        for name, param in model.named_parameters():
            assert (name in masters_of(optimizer)) == (step >= 2 or name not in frozen)
            stays = name.startswith("branch") or (step < 2 and name in frozen)
            assert differs(before[name], param.detach()) != stays
        for name, master in optimizer.named_masters():
            param = model.get_parameter(name)
            assert torch.equal(param, master.to(param.dtype))
            assert bool(master.isfinite().all())
    assert inner.state[inner.param_groups[0]["params"][0]]["n_iter"] > 10


@pytest.mark.parametrize("frozen", [False, True], ids=["all", "first frozen"])
@pytest.mark.parametrize("half", [None, torch.float16, torch.bfloat16], ids=["bare", "fp16", "bf16"])
@search
def test_lbfgs_resumes_as_if_it_had_never_stopped(
    search: str | None, half: torch.dtype | None, frozen: bool, device: torch.device
) -> None:
    """Bare and wrapped: three steps, a save, a load into fresh ones and two steps are five steps, bit for bit."""

    def fresh() -> Run:
        model = seeded(network, device)
        model[0].requires_grad_(not frozen)
        optimizer: Any = lbfgs(model.parameters(), search)
        if half is not None:
            optimizer = Wrapper(optimizer, model, dtype=half, loss_scale=SMALL_SCALE)
        return Run(model, optimizer, waves)

    run, resumed = fresh(), fresh()
    for _ in range(3):
        run.step()
    saved = through_file(run.optimizer.state_dict())
    as_saved = copy.deepcopy(saved)
    resumed.optimizer.load_state_dict(saved)
    resumed.model.load_state_dict(through_file(run.model.state_dict()))
    for _ in range(2):
        expected, result = run.step(), resumed.step()
        assert_same(expected.detach(), result.detach())
    assert_same(run.optimizer.state_dict(), resumed.optimizer.state_dict())
    assert_same(dict(run.model.state_dict()), dict(resumed.model.state_dict()))
    assert differs(saved, run.optimizer.state_dict())
    if half is not None:
        assert_same(as_saved, saved)  # torch's own load shares the tensors of the dict, ours does not


def test_a_closure_does_not_return_the_scaled_loss(device: torch.device, dtype: torch.dtype) -> None:
    """A line search would compare it with unscaled slopes: refused, everything as before."""
    param = vector(device, dtype, 4)
    optimizer = Wrapper(lbfgs([param], "strong_wolfe"), loss_scale=S)
    before = param.detach().clone()

    def closure() -> Tensor:
        optimizer.zero_grad()
        scaled = optimizer.scale(param.float().square().sum())
        scaled.backward()
        return scaled

    with pytest.raises(StepOrderError, match=r"the closure returned the scaled loss. Return the loss itself"):
        optimizer.step(closure)
    assert torch.equal(before, param.detach())
