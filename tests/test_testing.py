"""``mixedopt.testing``: the conformance check, and the table of what holds for torch's own optimizers."""

from __future__ import annotations

import functools
import random
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn, optim

from mixedopt.testing import Conformance, check_optimizer, strategies
from mixedopt.testing.runs import Problem, difference

LAWS = ("equality", "refusal", "rollback", "resume", "none gradients", "scheduler")
P, F, NA = "passed", "failed", "not applicable"
# Nothing that was tried is refused; all else holds.
USUAL = (P, NA, P, P, P, P)
# Dense gradients, or parameters that are no matrices, are refused, wrapped as bare.
REFUSES = (P, P, P, P, P, P)

# name -> (factory, what holds), for every class of torch.optim.
TABLE: dict[str, tuple[Callable[[Any], optim.Optimizer], tuple[str, ...]]] = {
    "ASGD": (lambda params: optim.ASGD(params, lr=0.1, t0=1.0), USUAL),
    "Adadelta": (lambda params: optim.Adadelta(params), USUAL),
    "Adafactor": (lambda params: optim.Adafactor(params), USUAL),
    "Adagrad": (lambda params: optim.Adagrad(params, lr=0.1, lr_decay=0.1), USUAL),
    "Adam": (lambda params: optim.Adam(params, amsgrad=True), USUAL),
    "AdamW": (lambda params: optim.AdamW(params, lr=0.01), USUAL),
    "Adamax": (lambda params: optim.Adamax(params), USUAL),
    # Its direction comes from all parameters at once: one without a gradient moves, in torch too.
    "LBFGS": (lambda params: optim.LBFGS(params, lr=0.5), (P, NA, P, P, NA, P)),
    "Muon": (lambda params: optim.Muon(params), REFUSES),
    "NAdam": (lambda params: optim.NAdam(params), USUAL),
    "RAdam": (lambda params: optim.RAdam(params, lr=0.1), USUAL),
    "RMSprop": (lambda params: optim.RMSprop(params, momentum=0.9, centered=True), USUAL),
    "Rprop": (lambda params: optim.Rprop(params), USUAL),
    "SGD": (lambda params: optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True), USUAL),
    "SparseAdam": (lambda params: optim.SparseAdam(params), REFUSES),
}


def statuses(report: Conformance) -> tuple[str, ...]:
    """Return the status of each law, in the order of ``LAWS``."""
    return tuple(report[law].status for law in LAWS)


def test_every_optimizer_of_torch_is_in_the_table() -> None:
    """A class that torch adds must be checked, too."""
    classes = {n for n, c in vars(optim).items() if isinstance(c, type) and issubclass(c, optim.Optimizer)}
    assert classes - {"Optimizer"} == set(TABLE)


@functools.cache
def report_of(name: str) -> Conformance:
    """Return the report, made once."""
    return check_optimizer(TABLE[name][0])


@pytest.mark.parametrize("name", sorted(TABLE))
def test_what_holds_for_an_optimizer_of_torch(name: str) -> None:
    """The table is exact: each law passes, or does not apply for the known reason."""
    expected, report = TABLE[name][1], report_of(name)
    assert name == report.optimizer
    assert expected == statuses(report), str(report)
    assert report.holds


def test_a_report_reads_as_a_table_and_gives_reasons() -> None:
    """Every law has its line; whatever did not pass says why."""
    report = report_of("LBFGS")
    lines = str(report).splitlines()
    assert ["LBFGS", *(f"{law:<14}" for law in LAWS)] == [lines[0], *(line[:14] for line in lines[1:])]
    assert "moves a parameter without a gradient" in report["none gradients"].reason
    assert all(bool(outcome.reason) == (outcome.status != P) for outcome in report.outcomes)
    with pytest.raises(KeyError):
        report["gravity"]


class Plain(optim.Optimizer):
    """Gradient descent with a fault of choice."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, {"lr": 0.1, **defaults})
        self.cached = [param for group in self.param_groups for param in group["params"]]
        self.velocity: dict[int, Tensor] = {}
        self.before: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for index, param in enumerate(group["params"]):
                self.move(param, index, group["lr"])

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        if param.grad is not None:
            param.sub_(param.grad * lr)


class CachesParameters(Plain):
    """Keeps a list of its own: the wrapper finds it."""

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        super().move(self.cached[index], index, lr)


class HidesParameters(Plain):
    """Keeps them where nobody finds them."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, **defaults)
        hidden = list(self.cached)
        self.find = lambda index: hidden[index]

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        super().move(self.find(index), index, lr)


class KnowsHalf(Plain):
    """Behaves otherwise where its parameter shares storage with others."""

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        alone = param.untyped_storage().nbytes() == param.nbytes
        super().move(param, index, lr if alone else 2 * lr)


class Noisy(Plain):
    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        super().move(param, index, lr * random.random())


class Draws(Plain):
    """Draws from torch's generator, which the check seeds."""

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        super().move(param, index, lr * float(torch.rand(())))


class ForgetsMomentum(Plain):
    """Keeps its momentum outside ``state``: no checkpoint holds it."""

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        if param.grad is not None:
            old = self.velocity.get(index, torch.zeros_like(param.grad))
            self.velocity[index] = param.grad + 0.9 * old
            param.sub_(self.velocity[index] * lr)


class NeedsAll(Plain):
    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        param.sub_(param.grad * lr)  # a TypeError without a gradient


class Idle(Plain):
    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        del param, index, lr


class KeepsNoState(Plain):
    """Counts its steps in the state, but writes nothing of it into the file."""

    def move(self, param: nn.Parameter, index: int, lr: float) -> None:
        self.state[param]["rate"] = self.state[param].get("rate", lr) * 0.5
        super().move(param, index, self.state[param]["rate"])

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "state": {}}


@pytest.mark.parametrize(
    ("cls", "law", "status", "reason"),
    [
        (CachesParameters, "equality", P, ""),
        (HidesParameters, "equality", F, "float16: step 0: master 0 differs by up to"),
        (KnowsHalf, "equality", F, "float16: step 0: master 0 differs by up to"),
        (KnowsHalf, "rollback", F, "inf in step 0: master 0 differs"),
        (Idle, "equality", NA, "the bare optimizer moves nothing"),
        (Draws, "equality", P, ""),
        (Noisy, "equality", NA, "two bare runs differ"),
        (ForgetsMomentum, "resume", NA, "does not resume exactly (0 differs by up to"),
        (KeepsNoState, "resume", NA, "does not resume exactly"),
        (NeedsAll, "none gradients", NA, "refuses a missing gradient (TypeError"),
        (Plain, "equality", P, ""),
        (Plain, "resume", P, ""),
    ],
)
def test_a_faulty_optimizer_is_told_from_a_sound_one(cls: type[Plain], law: str, status: str, reason: str) -> None:
    """A law fails on the fault that it is about, and does not apply where the bare optimizer has it too."""
    outcome = check_optimizer(cls)[law]
    assert status == outcome.status, outcome
    assert reason in outcome.reason


def test_an_optimizer_without_a_learning_rate_has_no_scheduler() -> None:
    """Not applicable, by name."""

    class Free(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for param in self.param_groups[0]["params"]:
                if param.grad is not None:
                    param.sub_(param.grad)

    report = check_optimizer(Free)
    assert (P, NA, P, P, P, NA) == statuses(report)
    assert "it has no learning rate" == report["scheduler"].reason


def test_what_is_no_optimizer_is_refused() -> None:
    """The error says what the factory returned, or what the optimizer said."""
    with pytest.raises(TypeError, match=r"check_optimizer: the factory returned 7, no torch optimizer"):
        check_optimizer(lambda params: 7)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"holds 1 of 5 parameters; it must hold all"):
        check_optimizer(lambda params: optim.SGD(params[:1]))
    with pytest.raises(ValueError, match=r"steps over none of the tried parameters. It says \['ValueError: never"):
        check_optimizer(lambda params: never())


def never() -> Any:
    raise ValueError("never")


def test_the_check_needs_neither_pytest_nor_hypothesis() -> None:
    """An author runs it wherever torch is."""
    code = (
        "import sys; sys.modules['pytest'] = sys.modules['hypothesis'] = None\n"
        "import torch; from mixedopt.testing import check_optimizer\n"
        "print(check_optimizer(torch.optim.SGD).holds)\n"
        "try: import mixedopt.testing.strategies\n"
        "except ImportError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ["True", "mixedopt.testing.strategies needs hypothesis: pip install hypothesis."] == done.stdout.splitlines()


@given(strategies.layouts, st.data())
def test_a_gradient_spec_makes_what_it_says(specs: list[strategies.TensorSpec], data: st.DataObject) -> None:
    """Dtype, shape and strides are the parameter's; exactly one element is bad, if one is asked for."""
    params = [spec.make(torch.device("cpu")) for spec in specs]
    script = data.draw(strategies.gradient_scripts(len(params), max_steps=3))
    for step in script:
        for spec, param in zip(step, params, strict=True):
            grad = spec.make(param)
            assert (grad is None) == (spec.kind == "none")
            if grad is not None:
                assert (param.dtype, param.shape) == (grad.dtype, grad.shape)
                bad = spec.kind in ("inf", "-inf", "nan") and grad.numel() > 0
                assert int(bad) == int((~grad.isfinite()).sum())
                assert difference(grad, spec.make(param)) is None
                assert grad is not spec.make(param)


@given(strategies.static_scales(), strategies.dynamic_scales(), strategies.found_infs())
def test_strategies_give_valid_configurations(static: Any, dynamic: Any, overflows: list[bool]) -> None:
    """Whatever is drawn was accepted by its class."""
    assert static.scale > 0
    assert dynamic.min_scale <= dynamic.init_scale <= dynamic.max_scale
    assert set(overflows) <= {True, False}


def test_difference_names_the_place() -> None:
    """Nested values, tensors bit for bit: NaN equals NaN, another dtype or a number does not."""
    nan = torch.tensor([1.0, float("nan")])
    assert difference({"a": [nan, 1]}, {"a": [nan.clone(), 1]}) is None
    assert "a.1 is 1, not 2" == difference({"a": [nan, 1]}, {"a": [nan, 2]})
    assert "a.0 differs by up to 1" == difference({"a": [torch.zeros(2)]}, {"a": [torch.tensor([0.0, 1.0])]})
    assert "a has 1 entries, not 2" == difference({"a": [1]}, {"a": [1, 2]})
    assert " has the keys ['a'], not ['b']" == difference({"a": 1}, {"b": 1})
    assert "x differs" == difference(torch.zeros(2, dtype=torch.int32), torch.zeros(2), "x")
    assert "x is a Tensor, not a float" == difference(torch.zeros(()), 0.0, "x")


def test_a_problem_is_the_same_at_every_call() -> None:
    """Weights and gradients depend on seed and step alone."""
    problem = Problem(((4, 3),), torch.float16)
    assert difference(problem.weights(), problem.weights()) is None
    assert difference(problem.gradients(1, []), problem.gradients(1, [])) is None
    assert difference(problem.gradients(1, []), problem.gradients(2, [])) is not None
