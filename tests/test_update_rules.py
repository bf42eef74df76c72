"""Update rules as plain functions: torch's own steps, line by line; and how users register theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mixedopt import MixedPrecisionOptimizer, Rule, register_rule
from mixedopt.rules import RULES, fault_of, rule_for

# Torch forms 1 - beta**step by a subtraction, which costs 3 digits of 16 at 0.999; RAdam's length is a difference of
# numbers near 2000 that hold it. Formulas that differ do so in the first digits.
FP64_RELATIVE = 1e-9
# A weight cannot differ by less than its own roundings, however small its update.
FP64_ULPS = 8 * 2.0**-53
# Both round a handful of times on the way, in other places: torch does a product and a sum in one operation.
FP32_ULPS = 4 * 2.0**-23
# Where numbers cancel (in a variance, say) either may be the luckier one.
FP32_TIMES_TORCH_S_ERROR = 2
SIZE = 37


@dataclass(frozen=True)
class Case:
    """An optimizer with drawn hyperparameters, in mid-life."""

    make: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any]
    step: int
    seed: int


unit = st.floats(0.0, 1.0)
rates = st.floats(1e-5, 1e-1)
# Where alpha is small, a centered RMSprop takes nearly equal numbers from each other.
means = st.floats(0.5, 0.999)
betas = st.tuples(st.one_of(st.just(0.0), means), st.one_of(st.just(0.0), means))
epsilons = st.floats(1e-10, 1e-3)
decays = st.one_of(st.just(0.0), st.floats(1e-4, 1.0))
adam = {"lr": rates, "betas": betas, "eps": epsilons, "weight_decay": decays}
OPTIONS: dict[type[torch.optim.Optimizer], dict[str, st.SearchStrategy[Any]]] = {
    torch.optim.Adam: {**adam, "amsgrad": st.booleans()},
    torch.optim.AdamW: {**adam, "amsgrad": st.booleans()},
    torch.optim.NAdam: {**adam, "momentum_decay": st.floats(0.0, 0.1), "decoupled_weight_decay": st.booleans()},
    torch.optim.RAdam: {**adam, "decoupled_weight_decay": st.booleans()},
    torch.optim.Adamax: adam,
    torch.optim.Adagrad: {
        "lr": rates,
        "lr_decay": unit,
        "eps": epsilons,
        "weight_decay": decays,
        "initial_accumulator_value": st.floats(0.0, 2.0),
    },
    torch.optim.RMSprop: {
        "lr": rates,
        "alpha": means,
        "eps": epsilons,
        "weight_decay": decays,
        "momentum": st.one_of(st.just(0.0), means),
        "centered": st.booleans(),
    },
    torch.optim.Adadelta: {"lr": rates, "rho": means, "eps": epsilons, "weight_decay": decays},
    torch.optim.SGD: {
        "lr": rates,
        "momentum": st.one_of(st.just(0.0), means),
        "dampening": unit,
        "weight_decay": decays,
    },
    torch.optim.ASGD: {
        "lr": rates,
        "lambd": st.floats(0.0, 1.0),
        "alpha": st.floats(0.0, 2.0),
        "t0": st.floats(0.0, 20.0),
        "weight_decay": decays,
    },
    torch.optim.Rprop: {
        "lr": rates,
        "etas": st.tuples(st.floats(0.1, 0.9), st.floats(1.1, 2.0)),
        "step_sizes": st.tuples(st.floats(1e-6, 1e-3), st.floats(1e-2, 50.0)),
    },
}
KINDS = list(OPTIONS)


def cases(kind: type[torch.optim.Optimizer]) -> st.SearchStrategy[Case]:
    """Hyperparameters, a number of steps made, and a seed for everything else."""
    steps = st.one_of(st.integers(0, 8), st.integers(0, 2000))
    return st.builds(Case, st.just(kind), st.fixed_dictionaries(OPTIONS[kind]), steps, st.integers(0, 2**16))


def columns(rows: list[tuple[float, ...]]) -> tuple[Tensor, ...]:
    return torch.tensor(rows, dtype=torch.float64).unbind(1)


def by_rule(rule: Rule, group: Any, step: int, param: Tensor, grad: Tensor, state: dict[str, Tensor]) -> list[Tensor]:
    """Return the parameter, the state and the scalars after a step, as the rule says; before the first, none is."""
    initial = rule.initial(group)
    scalars = [state.get(name, torch.tensor(initial.get(name, 0.0))).float().view(1) for name in rule.scalars]
    count = torch.tensor([float(step)], dtype=torch.float64)
    numbers, new_scalars = rule.numbers(count, columns([rule.hyper(group)]), tuple(scalars))
    assert all(number.dtype == torch.float64 and number.shape == (1,) for number in numbers)
    assert all(scalar.dtype == torch.float32 and scalar.shape == (1,) for scalar in new_scalars)
    rounded = tuple(number[0].to(param.dtype) for number in numbers)
    before = [state.get(name, torch.full_like(param, initial.get(name, 0.0))) for name in rule.state]
    return [*rule.update(param, grad, rounded, *before), *(scalar[0] for scalar in new_scalars)]


def in_mid_life(case: Case, dtype: torch.dtype) -> tuple[nn.Parameter, torch.optim.Optimizer]:
    """Return a parameter and its optimizer after a real step, or none, then moved on to ``case.step``."""
    generator = torch.Generator().manual_seed(case.seed)

    def noise() -> Tensor:
        return torch.randn(SIZE, generator=generator, dtype=torch.float64).to(dtype)

    param = nn.Parameter(noise())
    optimizer = case.make([param], **case.options)
    for _ in range(min(case.step, 2)):
        param.grad = noise()
        optimizer.step()
    entry = optimizer.state.get(param, {})
    if "step" in entry:
        entry["step"].fill_(case.step)
    param.grad = noise()
    return param, optimizer


@dataclass(frozen=True)
class Stepped:
    """What a step has left, parameter, state and scalars by name.

    By the rule, by torch, and by the rule in fp64; there also from the two
    gradients that lie a rounding of gradient and decay away: where these cancel,
    the quotient of an optimizer makes much of it.
    """

    before: Tensor
    rule: dict[str, Tensor]
    torch: dict[str, Tensor]
    exact: dict[str, Tensor]
    near: list[dict[str, Tensor]]
    scalars: tuple[str, ...]


def stepped(case: Case, dtype: torch.dtype) -> Stepped:
    """Make one step in each way, from the same state."""
    param, optimizer = in_mid_life(case, dtype)
    rule, group = rule_for(optimizer), optimizer.param_groups[0]
    assert rule is not None
    before = param.detach().clone()
    state = {key: value.clone() for key, value in optimizer.state.get(param, {}).items() if value is not None}
    names = ["param", *rule.state, *rule.scalars]
    found = by_rule(rule, group, case.step + 1, before, param.grad, state)
    wide = {key: value.double() for key, value in state.items()}
    off = (param.grad.abs() + group.get("weight_decay", 0.0) * before.abs()).double() * 2.0**-23
    exact, *near = (
        by_rule(rule, group, case.step + 1, before.double(), param.grad.double() + sign * off, wide)
        for sign in (0.0, 1.0, -1.0)
    )
    optimizer.step()
    entry = {key: value for key, value in optimizer.state.get(param, {}).items() if value is not None}
    assert list(entry) == [*(["step"] if rule.counts else []), *rule.scalars, *rule.state]
    own = {"param": param.detach(), **entry}
    named = [dict(zip(names, values, strict=True)) for values in (found, exact, *near)]
    return Stepped(before, named[0], own, named[1], named[2:], rule.scalars)


def gap(found: Tensor, expected: Tensor) -> float:
    """Return the largest difference."""
    return float((found.double() - expected.double()).abs().max())


def size(tensor: Tensor) -> float:
    """Return the largest value."""
    return float(tensor.abs().max())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.data())
def test_a_rule_is_torch_s_formula(kind: type[torch.optim.Optimizer], data: Any) -> None:
    """In fp64, whatever hyperparameters and count: the same update, state and, to the bit, scalars."""
    step = stepped(data.draw(cases(kind)), torch.float64)
    assert not torch.equal(step.before, step.torch["param"])
    for name, expected in step.torch.items():
        if name in step.scalars:
            assert torch.equal(step.rule[name], expected), name
        elif name == "param":
            limit = FP64_RELATIVE * size(expected - step.before) + FP64_ULPS * size(step.before)
            assert gap(step.rule[name], expected) <= limit
        elif name != "step":
            assert gap(step.rule[name], expected) <= FP64_RELATIVE * size(expected), name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.data())
def test_a_rule_in_fp32_is_as_good_as_torch(kind: type[torch.optim.Optimizer], data: Any) -> None:
    """It is as near to the step in fp64 as torch's own in fp32, within a few units in the last place."""
    step = stepped(data.draw(cases(kind)), torch.float32)
    moved = size(step.torch["param"] - step.before)
    for name, exact in step.exact.items():
        if name in step.scalars:
            assert torch.equal(step.rule[name], step.torch[name]), name
            continue
        scale = max(size(exact), moved) if name == "param" else size(exact)
        unsure = max(gap(near[name], exact) for near in step.near)
        limit = FP32_TIMES_TORCH_S_ERROR * gap(step.torch[name], exact) + FP32_ULPS * scale
        assert gap(step.rule[name], exact) <= limit + unsure, name


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@given(st.data())
def test_numbers_are_those_of_each_line_alone(kind: type[torch.optim.Optimizer], data: Any) -> None:
    """A vector of lines gives what each line gives by itself, bit for bit, and writes over nothing."""
    drawn = data.draw(st.lists(cases(kind), min_size=1, max_size=40))
    groups = [kind([nn.Parameter(torch.ones(1))], **case.options).param_groups[0] for case in drawn]
    for rule in RULES[kind]:
        step = torch.tensor([case.step + 1.0 for case in drawn], dtype=torch.float64)
        hyper = columns([rule.hyper(group) for group in groups])
        scalars = tuple(torch.rand(len(drawn)) for _ in rule.scalars)
        given_ = [tensor.clone() for tensor in (step, *hyper, *scalars)]
        numbers, new = rule.numbers(step, hyper, scalars)
        assert all(map(torch.equal, given_, (step, *hyper, *scalars)))
        for i in range(len(drawn)):
            line = slice(i, i + 1)
            alone = rule.numbers(step[line], tuple(h[line] for h in hyper), tuple(s[line] for s in scalars))
            assert all(map(torch.equal, [n[line] for n in numbers], alone[0]))
            assert all(map(torch.equal, [n[line] for n in new], alone[1]))
        assert all(bool(number.isfinite().all()) for number in (*numbers, *new))


ALL_RULES = [(kind, i) for kind, rules in RULES.items() for i in range(len(rules))]


@pytest.mark.parametrize(("kind", "index"), ALL_RULES, ids=lambda value: getattr(value, "__name__", value))
def test_nothing_is_read_on_the_host(kind: type[torch.optim.Optimizer], index: int) -> None:
    """Numbers and update run on tensors without values, where a read or a branch raises."""
    rule, group = RULES[kind][index], kind([nn.Parameter(torch.ones(1))], lr=0.1).param_groups[0]
    line = torch.empty(3, dtype=torch.float64, device="meta")
    numbers, scalars = rule.numbers(
        line, tuple(line for _ in rule.hyper(group)), tuple(line.float() for _ in rule.scalars)
    )
    assert {(n.dtype, n.shape) for n in numbers} == {(torch.float64, line.shape)}
    assert {(s.dtype, s.shape) for s in scalars} <= {(torch.float32, line.shape)}
    values = torch.empty(5, device="meta")
    update = rule.update(values, values, tuple(n.float()[0] for n in numbers), *(values for _ in rule.state))
    assert [(u.dtype, u.shape) for u in update] == [(torch.float32, values.shape)] * (1 + len(rule.state))


@pytest.mark.parametrize(("kind", "index"), ALL_RULES, ids=lambda value: getattr(value, "__name__", value))
def test_numbers_are_one_graph_for_any_number_of_lines(kind: type[torch.optim.Optimizer], index: int) -> None:
    """Traced with ``fullgraph`` and dynamic sizes, they give the same bits, for more lines without another trace."""
    rule, group = RULES[kind][index], kind([nn.Parameter(torch.ones(1))], lr=0.1).param_groups[0]
    traced = torch.compile(rule.numbers, backend="eager", fullgraph=True, dynamic=True)
    for lines in (3, 5):
        step = torch.arange(1.0, lines + 1, dtype=torch.float64)
        # Each with a storage of its own: where a view begins in another's is traced, too.
        hyper = tuple(column.clone() for column in columns([rule.hyper(group)] * lines))
        scalars = tuple(torch.full((lines,), 0.5) for _ in rule.scalars)
        with torch._dynamo.config.patch(error_on_recompile=lines == 5):
            found = traced(step, hyper, scalars)
        for ours, theirs in zip(rule.numbers(step, hyper, scalars), found, strict=True):
            assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize(("kind", "index"), ALL_RULES, ids=lambda value: getattr(value, "__name__", value))
def test_padding_stays_padding(kind: type[torch.optim.Optimizer], index: int) -> None:
    """Zeros and no gradient: the parameter stays 0 and the state finite, over many steps."""
    rule, group = RULES[kind][index], kind([nn.Parameter(torch.ones(1))], lr=0.1).param_groups[0]
    values = [torch.zeros(2) for _ in range(1 + len(rule.state))]
    scalars = tuple(torch.full((1,), rule.initial(group).get(name, 0.0)) for name in rule.scalars)
    for step in range(1, 9):
        count = torch.tensor([float(step)], dtype=torch.float64)
        numbers, scalars = rule.numbers(count, columns([rule.hyper(group)]), scalars)
        values = list(rule.update(values[0], torch.zeros(2), tuple(n.float()[0] for n in numbers), *values[1:]))
        assert not values[0].any()
        assert all(bool(value.isfinite().all()) for value in values)


# A double keeps 53 bits; a logarithm, a product, an exponential and a quotient each round once, and step * log(beta)
# is up to 700 before the power vanishes beside 1.
EXACT = 2.0**-48


@given(st.floats(0.0, 0.9999999), st.floats(0.0, 0.9999999), st.integers(1, 100_000))
def test_corrections_do_not_cancel(beta1: float, beta2: float, step: int) -> None:
    """The factors lr / (1 - beta1**step) and sqrt(1 - beta2**step) are exact to the last digits."""
    rule = RULES[torch.optim.Adam][0]
    group = torch.optim.Adam([nn.Parameter(torch.ones(1))], lr=1.0, betas=(beta1, beta2)).param_groups[0]
    numbers, _ = rule.numbers(torch.tensor([float(step)], dtype=torch.float64), columns([rule.hyper(group)]), ())
    with localcontext() as context:
        context.prec = 50
        rate = 1 / (1 - Decimal(beta1) ** step)
        root = (1 - Decimal(beta2) ** step).sqrt()
    assert float(numbers[5]) == pytest.approx(float(rate), rel=EXACT)
    assert float(numbers[6]) == pytest.approx(float(root), rel=EXACT)


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax])
def test_without_a_first_beta_the_mean_is_the_gradient(kind: type[torch.optim.Optimizer]) -> None:
    """To the bit, however large the old mean was; as torch's lerp has it."""
    param, group_of = torch.zeros(5), kind([nn.Parameter(torch.ones(1))], betas=(0.0, 0.9))
    rule, grad = RULES[kind][0], torch.linspace(-1e-4, 1e-4, 5)
    state = {"exp_avg": torch.full((5,), 1e4), rule.state[1]: torch.ones(5)}
    assert torch.equal(by_rule(rule, group_of.param_groups[0], 3, param, grad, state)[1], grad)


def test_a_new_rate_reaches_eta_one_step_late() -> None:
    """ASGD steps with the eta that its last step left; the first one with the rate it finds then."""
    param = nn.Parameter(torch.ones(2))
    group = torch.optim.ASGD([param], lr=0.5).param_groups[0]
    rule = RULES[torch.optim.ASGD][0]
    group["lr"] = 0.25
    assert rule.initial(group) == {"eta": 0.25, "mu": 1.0}
    count = torch.ones(1, dtype=torch.float64)
    scalars = tuple(torch.full((1,), rule.initial(group)[name]) for name in rule.scalars)
    group["lr"] = 0.125
    numbers, (eta, mu) = rule.numbers(count, columns([rule.hyper(group)]), scalars)
    assert float(numbers[2]) == 0.25
    assert float(eta) == pytest.approx(0.125, rel=1e-4)
    assert float(mu) == 1.0


# -- Registering ------------------------------------------------------------------------


class Scaled(torch.optim.Optimizer):
    """Somebody's optimizer: gradient descent that remembers the last gradient."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                last = self.state[param].setdefault("last", torch.full_like(param, 2.0))
                param.sub_(group["lr"] * (param.grad + last))
                last.copy_(param.grad)


def _numbers(step: Tensor, hyper: tuple[Tensor, ...], scalars: tuple[Tensor, ...]) -> Any:
    return hyper, ()


def _update(param: Tensor, grad: Tensor, numbers: tuple[Tensor, ...], last: Tensor) -> tuple[Tensor, ...]:
    return param - numbers[0] * (grad + last), grad


SCALED = Rule(
    state=("last",),
    scalars=(),
    counts=False,
    serves=lambda group: group["lr"] < 1,
    hyper=lambda group: (group["lr"],),
    numbers=_numbers,
    update=_update,
)


@pytest.fixture
def param() -> Iterator[nn.Parameter]:
    """A parameter; afterwards the class has no rules, whatever a test did."""
    yield nn.Parameter(torch.ones(3))
    assert rule_for(Scaled([nn.Parameter(torch.ones(1))])) is None


def test_a_registered_rule_serves_instances_of_exactly_that_class(param: nn.Parameter) -> None:
    """From then on, until it is removed; not subclasses; only groups that it serves; the first that does."""
    early, other = Scaled([param]), replace(SCALED, serves=lambda group: True)
    assert rule_for(early) is None
    handle = register_rule(Scaled, SCALED, other)
    assert rule_for(early) is SCALED
    assert rule_for(Scaled([param], lr=2.0)) is other
    assert rule_for(type("Mine", (Scaled,), {})([param])) is None
    handle.remove()
    assert rule_for(early) is None
    handle.remove()  # a second time does nothing


def test_an_old_handle_removes_nothing_of_a_later_registration(param: nn.Parameter) -> None:
    """Not even where both have the same rule."""
    first = register_rule(Scaled, SCALED)
    first.remove()
    second = register_rule(Scaled, SCALED)
    first.remove()
    assert rule_for(Scaled([param])) is SCALED
    second.remove()


@pytest.mark.parametrize("what", [nn.Linear, "Scaled", None, Scaled([nn.Parameter(torch.ones(1))])])
def test_only_an_optimizer_class_has_rules(what: Any) -> None:
    """Another class, a name, an instance."""
    with pytest.raises(TypeError, match=r"must be a class of torch\.optim\.Optimizer\. Pass the class itself"):
        register_rule(what, SCALED)


@pytest.mark.parametrize("rules", [(), (3,), (SCALED, _update), (Rule,)])
def test_only_a_rule_is_a_rule(rules: tuple[Any, ...], param: nn.Parameter) -> None:
    """One at least; nothing is registered where one is wrong."""
    with pytest.raises(TypeError, match=r"register_rule\(Scaled\): got .* where a Rule must be\. Pass one or more"):
        register_rule(Scaled, *rules)


def test_a_class_has_rules_once(param: nn.Parameter) -> None:
    """Neither torch's are replaced nor what was registered before."""
    handle = register_rule(Scaled, SCALED)
    for kind in (torch.optim.AdamW, Scaled):
        with pytest.raises(
            ValueError, match=rf"register_rule\({kind.__name__}\): the class has rules already\. Remove"
        ):
            register_rule(kind, replace(SCALED))
    assert rule_for(Scaled([param])) is SCALED
    handle.remove()


@pytest.mark.parametrize(
    "names", [{"state": "last"}, {"state": ["last"]}, {"scalars": (1,)}], ids=["a string", "a list", "a number"]
)
def test_names_of_state_are_a_tuple(names: dict[str, Any]) -> None:
    """A string would be taken for its letters."""
    with pytest.raises(ValueError, match=r"must be a tuple of names\. Write \('exp_avg',\)"):
        replace(SCALED, **names)


@pytest.mark.parametrize("names", [{"state": ("a", "a")}, {"state": ("a",), "scalars": ("a",)}, {"scalars": ("step",)}])
def test_names_of_state_differ(names: dict[str, Any]) -> None:
    """From each other, and from the count's."""
    with pytest.raises(ValueError, match=r"must differ, and none be 'step'\. For 'step' set counts=True"):
        replace(SCALED, **names)


@pytest.mark.parametrize("name", ["serves", "hyper", "numbers", "update", "initial"])
def test_functions_are_functions(name: str) -> None:
    """Said when the rule is made, in one line."""
    with pytest.raises(TypeError, match=rf"^Rule\({name}=3\): must be a function\. See docs"):
        replace(SCALED, **{name: 3})


WRONG: dict[str, dict[str, Any]] = {
    r"hyper\(group\) returned 0\.1: must be a tuple of numbers": {"hyper": lambda group: group["lr"]},
    r"hyper\(group\) returned \('0\.1',\): must be a tuple": {"hyper": lambda group: ("0.1",)},
    r"numbers\(\) returned tuple: must be two tuples": {"numbers": lambda step, hyper, scalars: hyper},
    r"numbers\(\) returned 1 new scalars: must be 0": {
        "numbers": lambda step, hyper, scalars: (hyper, (step.float(),))
    },
    r"numbers\(\) returned a shape \(\) for 2 lines": {"numbers": lambda step, hyper, scalars: ((step.sum(),), ())},
    r"update\(\) returned Tensor: must be a tuple of 2": {"update": lambda param, grad, numbers, last: param},
    r"update\(\) returned 1 values: must be a tuple of 2": {"update": lambda param, grad, numbers, last: (param,)},
    r"update\(\) wrote into a tensor": {"update": lambda param, grad, numbers, last: (param.sub_(grad), grad)},
    r"update\(\) returned a shape \(\) for parameters": {
        "update": lambda param, grad, numbers, last: (param.sum(), grad)
    },
    r"update\(\) left zeros": {"update": lambda param, grad, numbers, last: (param, grad / last)},
    r"update\(\) is not element-wise": {
        "update": lambda param, grad, numbers, last: (param - grad / (grad.norm() + 1), grad)
    },
    r"update\(\) is not element-wise: a": {"update": lambda param, grad, numbers, last: (param, grad.cumsum(0))},
}


@pytest.mark.parametrize("words", WRONG)
def test_a_wrong_rule_is_refused_before_anything_is_converted(words: str) -> None:
    """By the compiled tier, saying what is wrong with it; a shape would be broadcast over the weights in silence."""
    model = nn.Linear(3, 2)
    handle = register_rule(Scaled, replace(SCALED, **WRONG[words]))
    try:
        with pytest.raises(ValueError, match=rf"^the Rule of Scaled: {words}.* or use tier='eager'\.$"):
            MixedPrecisionOptimizer(Scaled(model.parameters()), model, tier="compiled")
    finally:
        handle.remove()
    assert model.weight.dtype == torch.float32


@pytest.mark.parametrize("kind", RULES)
def test_no_fault_is_found_in_the_library_s_rules(kind: type[torch.optim.Optimizer]) -> None:
    """With any options that they serve; nor does the search need the default device or dtype."""
    group = kind([nn.Parameter(torch.ones(3))]).param_groups[0]
    for rule in RULES[kind]:
        with torch.device("meta"):
            assert fault_of(rule, group) is None
