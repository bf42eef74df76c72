"""Rules: what matches, what wins, three widths, and the way to text and back."""

from __future__ import annotations

import copy
import json
import pickle
import sys
import types
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from models import assert_same, hook_counts, seeded, two_group_model
from torch import Tensor, nn

from mixedopt import CastPolicy, MixedPrecisionOptimizer, convert
from mixedopt.policy import Rule

WIDTHS = ("half", "fp32")


class MyLinear(nn.Linear):
    """A type of the user's own."""

    class Inner(nn.Module):
        """A type inside a type."""


class Net(nn.Module):
    """A body of two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), MyLinear(4, 4)))
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x))


def kept(model: nn.Module, policy: CastPolicy, dtype: torch.dtype) -> set[str]:
    """Return which modules have fp32 weights after a conversion, which is undone."""
    handle = convert(model, dtype, policy)
    found = {n.removesuffix(".weight") for n, p in model.named_parameters() if p.dtype == torch.float32 and "w" in n}
    handle.remove()
    return found


# -- what matches ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("match", "found"),
    [
        ("head", {"head"}),
        ("body.*", {"body.0", "body.1.0", "body.1.1"}),
        ("*.1", {"body.1.0", "body.1.1"}),
        ("body.?.weight", {"body.0"}),
        (MyLinear, {"body.1.1"}),
        (nn.Linear, {"body.0", "body.1.0", "body.1.1", "head"}),
        (nn.Module, {"body.0", "body.1.0", "body.1.1", "head"}),
        (lambda name, module: isinstance(module, nn.Linear) and name.endswith("0"), {"body.0", "body.1.0"}),
    ],
    ids=["name", "glob", "subtree", "parameter", "type", "supertype", "root", "predicate"],
)
def test_a_rule_matches_with_all_inside(match: Any, found: set[str], device: torch.device, dtype: torch.dtype) -> None:
    """By name, type (subclasses too) or predicate, what is inside included."""
    assert kept(Net().to(device), CastPolicy.none().keep(match), dtype) == found


def test_a_rule_matches_an_object(device: torch.device, dtype: torch.dtype) -> None:
    """A module or a parameter itself, compared by identity, printed by its name once there is a model."""
    model = Net().to(device)
    for thing, found in ((model.body[1], {"body.1.0", "body.1.1"}), (model.head.weight, {"head"})):
        policy = CastPolicy.none().keep(thing)
        assert kept(model, policy, dtype) == found
        assert policy == CastPolicy.none().keep(thing)
        assert policy != CastPolicy.none().keep(Net().body[1])
        assert hash(policy) == hash(CastPolicy.none().keep(thing))
        handle = convert(model, dtype, policy)
        assert handle.plan.text == ("body.1=fp32; none" if thing is model.body[1] else "head.weight=fp32; none")
        handle.remove()


def test_what_is_said_last_wins(device: torch.device, dtype: torch.dtype) -> None:
    """A later call stands before the earlier ones; within an island a half part, and within that an fp32 one."""
    model = Net().to(device)
    none = CastPolicy.none()
    assert kept(model, none.keep("head").half("head"), dtype) == set()
    assert kept(model, none.half("head").keep("head"), dtype) == {"head"}
    assert kept(model, none.keep("body").half("body.1"), dtype) == {"body.0"}
    assert kept(model, none.half("body.1").keep("body"), dtype) == {"body.0", "body.1.0", "body.1.1"}
    assert kept(model, none.keep("body").half("body.1").keep(MyLinear), dtype) == {"body.0", "body.1.1"}
    norm = nn.Sequential(nn.Linear(4, 4), nn.GroupNorm(2, 4), nn.LayerNorm(4)).to(device)
    assert kept(norm, CastPolicy.default().half(nn.GroupNorm), dtype) == {"2"}


def test_an_island_with_a_half_hole_casts_at_every_border(device: torch.device, dtype: torch.dtype) -> None:
    """The numbers are those of casts written by hand."""
    model = seeded(Net, device)
    reference = copy.deepcopy(model)
    convert(model, dtype, CastPolicy.none().keep("body").half("body.1.0"))
    x = torch.randn(3, 4, device=device)

    out = reference.body[0](x.to(dtype).float())
    reference.body[1][0].to(dtype)
    out = reference.body[1][0](out.to(dtype)).float()
    out = reference.body[1][1](out).to(dtype)
    expected = reference.head.to(dtype)(out).float()

    found = model(x)
    assert torch.equal(expected, found)
    assert not torch.equal(found, seeded(Net, device)(x))


def test_an_fp32_island_inside_a_half_block_casts_at_every_border(device: torch.device, dtype: torch.dtype) -> None:
    """The numbers are those of casts written by hand; the island is not rounded on the way through."""
    model = seeded(Net, device)
    reference = copy.deepcopy(model)
    convert(model, dtype, CastPolicy.none().half("body").rule("body.1.0", param="fp32", compute="fp32", output="half"))
    x = torch.randn(3, 4, device=device)

    out = reference.body[0].to(dtype)(x.to(dtype))
    out = reference.body[1][0](out.float()).to(dtype)
    expected = reference.head.to(dtype)(reference.body[1][1].to(dtype)(out)).float()

    found = model(x)
    assert torch.equal(expected, found)
    assert not torch.equal(found, seeded(Net, device).to(dtype)(x.to(dtype)).float())
    assert {n for n, p in model.named_parameters() if p.dtype == torch.float32} == {"body.1.0.weight", "body.1.0.bias"}


def test_objects_are_compared_by_identity(device: torch.device) -> None:
    """Never element by element: equal values are not the same parameter, and a comparison is no tensor."""
    one, other = (nn.Parameter(torch.ones(3, device=device)) for _ in range(2))
    first, second = CastPolicy.none().keep(one), CastPolicy.none().keep(other)
    assert first == CastPolicy.none().keep(one) is not first
    assert (first == second) is False
    assert (Rule(one) == Rule("ones")) is (Rule(nn.Linear(1, 1)) == Rule(nn.Linear)) is False
    assert len({first, second, CastPolicy.none().keep(one)}) == 2
    assert Rule(one).matches_param("x", one)
    assert not Rule(one).matches_param("x", other)
    layer = nn.Linear(1, 1)
    assert Rule(layer) == Rule(layer) != Rule(nn.Linear(1, 1))


def test_policies_are_composed_and_copied() -> None:
    """Every call gives a new value, the old one is as it was, and copies are equal."""
    policy = CastPolicy.default().keep("head").rule("lm", output="fp32").keep_functions("softmax").leaving("t")
    longer = policy.half("head").returning("half")
    assert policy != longer
    assert longer.rules[1:] == policy.rules
    assert [rule.match for rule in longer.rules[:3]] == ["head", "lm", "head"]
    for twin in (copy.deepcopy(policy), pickle.loads(pickle.dumps(policy)), eval(repr(CastPolicy.none()))):
        assert twin in (policy, CastPolicy.none())
        assert hash(twin) in (hash(policy), hash(CastPolicy.none()))
    assert CastPolicy.default().keep_functions("softmax", "softmax", nn.functional.softmax) == CastPolicy.default(
    ).keep_functions("softmax")  # fmt: skip
    spelt = CastPolicy.none().keep_functions(torch.linalg.norm, torch.special.softmax, "__rpow__", "linalg_qr")
    assert spelt.functions == ("norm", "pow", "qr", "softmax")
    with pytest.raises(ValueError, match=r"'__ipow__' writes into its argument, which stays half\. Use 'pow'"):
        CastPolicy.none().keep_functions("__ipow__")


def test_a_predicate_is_asked_for_every_module_by_name(device: torch.device, dtype: torch.dtype) -> None:
    """The root's name is empty, a module that stands twice is asked for twice, any truth will do."""
    asked: list[tuple[str, str]] = []

    def predicate(name: str, module: nn.Module) -> Any:
        asked.append((name, type(module).__name__))
        return "yes" if name == "again" else 0

    model = Net().to(device)
    model.add_module("again", model.head)
    convert(model, dtype, CastPolicy.none().keep(predicate))
    names = ["", "body", "body.0", "body.1", "body.1.0", "body.1.1", "head", "again"]
    assert [name for name, _ in asked] == names
    assert dict(asked)[""] == "Net"
    assert model.head.weight.dtype == torch.float32
    assert model.body[0].weight.dtype == dtype


def test_a_predicate_needs_no_hash(device: torch.device, dtype: torch.dtype) -> None:
    """Anything that can be called with a name and a module."""

    class Predicate:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, name: str, module: nn.Module) -> bool:
            return name == "head"

    assert kept(Net().to(device), CastPolicy.none().keep(Predicate()), dtype) == {"head"}


@pytest.mark.parametrize("name", ["quantised", "everything else"])
def test_no_name_is_reserved(name: str, device: torch.device, dtype: torch.dtype) -> None:
    """A module may be called as the plan's own rules are."""
    model = nn.Sequential()
    model.add_module(name, nn.LayerNorm(4))
    model.to(device)
    convert(model, dtype, CastPolicy((Rule(name, required=False), *CastPolicy.default().rules)))
    assert model[0].weight.dtype == dtype


@pytest.mark.parametrize("preset", ["default", "none", "fp32"])
def test_a_preset_says_what_stays_fp32(preset: str, device: torch.device, dtype: torch.dtype) -> None:
    """Norms only; nothing; everything."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1)).to(device)
    wide = {"default": {"1"}, "none": set(), "fp32": {"0", "1"}}[preset]
    assert kept(model, CastPolicy.from_string(preset), dtype) == wide
    assert CastPolicy.from_string(preset) == getattr(CastPolicy, preset)()
    convert(model, dtype, getattr(CastPolicy, preset)())
    seen = []
    model[2].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    out = model(torch.randn(2, 4, device=device))
    assert (out.dtype, *seen) == (torch.float32, dtype if preset == "none" else torch.float32)


@pytest.mark.parametrize(
    "rule",
    ["nothing", nn.LSTM, lambda name, module: False, nn.Linear(1, 1), nn.Parameter(torch.ones(1))],
    ids=["name", "type", "predicate", "module", "parameter"],
)
def test_a_rule_that_matches_nothing_changes_nothing(rule: Any, device: torch.device, dtype: torch.dtype) -> None:
    """It raises before the first parameter is converted, whatever its kind."""
    model = two_group_model(device)
    before, classes = copy.deepcopy(model.state_dict()), [type(module) for module in model.modules()]
    with pytest.raises(ValueError, match="matches no module and no parameter"):
        convert(model, dtype, CastPolicy.default().keep("hidden").half(rule))
    assert_same(dict(before), dict(model.state_dict()))
    assert set(hook_counts(model).values()) == {0}
    assert [type(module) for module in model.modules()] == classes
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="matches no module and no parameter"):
        MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=CastPolicy.default().keep(rule))
    assert_same(dict(before), dict(model.state_dict()))
    assert set(hook_counts(model).values()) == {0}
    convert(model, dtype, CastPolicy.default())  # a preset's rules need no match


# -- three widths -----------------------------------------------------------------


class Ids(nn.Module):
    """Makes token ids of values."""

    def forward(self, x: Tensor) -> Tensor:
        return (x[..., 0] > 0).long()


class Attends(nn.Module):
    """Attention of a sequence to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


KINDS: dict[str, Callable[[], nn.Module]] = {
    "Linear": lambda: nn.Linear(4, 4),
    "Embedding": lambda: nn.Embedding(2, 4),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "MultiheadAttention": Attends,
    "Encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
}


@pytest.mark.parametrize("output", WIDTHS)
@pytest.mark.parametrize("compute", WIDTHS)
@pytest.mark.parametrize("param", WIDTHS)
@pytest.mark.parametrize("kind", list(KINDS))
def test_the_three_widths_are_as_said(
    kind: str, param: Any, compute: Any, output: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Parameters, what is computed in, and what comes out; gradients reach the parameters and the masters move."""
    width = {"half": dtype, "fp32": torch.float32}
    first = Ids if kind == "Embedding" else lambda: nn.Linear(4, 4)
    model = seeded(lambda: nn.Sequential(first(), KINDS[kind](), nn.Linear(4, 4)), device)
    name = "1.attention" if kind == "MultiheadAttention" else "1"
    policy = CastPolicy.none().rule(name, param=param, compute=compute, output=output)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype, loss_scale=1.0, policy=policy
    )
    ruled = model.get_submodule(name)
    inside = ruled[0] if kind == "Sequential" else ruled
    seen: dict[str, Any] = {}

    def look(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        names = [path.rpartition(".") for path, _ in module.named_parameters()]
        weights = {getattr(module.get_submodule(path), leaf).dtype for path, _, leaf in names}
        seen.update(input=args[0].dtype, weights=weights)

    def look_after(module: nn.Module, args: Any, out: Any) -> None:
        seen.update(output=(out[0] if isinstance(out, tuple) else out).dtype)

    inside.register_forward_pre_hook(look)
    ruled.register_forward_hook(look_after)
    before = {name: master.clone() for name, master in optimizer.named_masters()}

    loss = model(torch.randn(2, 3, 4, device=device)).square().mean()
    optimizer.backward(loss)
    grads = {n: p.grad for n, p in model[1].named_parameters()}
    assert {g.dtype for g in grads.values() if g is not None} == {p.dtype for p in model[1].parameters()}
    assert all(g is not None and g.isfinite().all() for g in grads.values())
    optimizer.step()

    assert {p.dtype for p in model[1].parameters()} == {width[param]}
    widens_inside = kind == "LayerNorm" and (param, compute, output) == ("fp32", "fp32", "half")
    given_ = torch.int64 if kind == "Embedding" else dtype if widens_inside else width[compute]
    # an encoder's parts cast for themselves
    weights = {width[param] if kind == "Encoder" else width[compute]}
    assert seen == {"input": given_, "weights": weights, "output": width[output]}
    assert not optimizer.last_step.skipped
    moved = [name for name, master in optimizer.named_masters() if not torch.equal(before[name], master)]
    assert len(moved) >= len(before) - 1  # attention's key bias has no gradient


@pytest.mark.parametrize("output", WIDTHS)
@pytest.mark.parametrize("compute", WIDTHS)
@pytest.mark.parametrize("param", WIDTHS)
def test_the_numbers_of_three_widths_are_those_of_casts_by_hand(
    param: Any, compute: Any, output: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """Weights are rounded to ``param``, then cast to ``compute`` with the input, the result to ``output``."""
    width = {"half": dtype, "fp32": torch.float32}
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4)), device)
    weight, bias = (p.detach().clone() for p in model[0].parameters())
    convert(model, dtype, CastPolicy.none().rule("0", param=param, compute=compute, output=output))
    x = torch.randn(3, 4, device=device)
    weight, bias = (value.to(width[param]).to(width[compute]) for value in (weight, bias))
    y = nn.functional.linear(x.to(dtype).to(width[compute]), weight, bias)

    found = model(x)

    assert found.dtype == torch.float32
    assert torch.equal(y.to(width[output]).float(), found)
    assert not torch.equal(seeded(lambda: nn.Sequential(nn.Linear(4, 4)), device)(x), found)


class Scaled(nn.Module):
    """A block with a parameter of its own around two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 1.1))
        self.body, self.router = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.router(self.body(x * self.scale))


@pytest.mark.parametrize("param", WIDTHS)
def test_a_rule_for_a_block_does_not_reach_into_an_exception_from_it(
    param: Any, device: torch.device, dtype: torch.dtype
) -> None:
    """The router inside has one width of its own, whatever is done to the parameters around it."""
    other = {"half": "fp32", "fp32": "half"}[param]
    model = seeded(lambda: nn.Sequential(Scaled()), device)
    policy = CastPolicy.none().rule("0", param=param, compute=other)
    convert(model, dtype, policy.rule("0.router", param=param, compute=param))
    seen = []
    model[0].router.register_forward_pre_hook(lambda module, args: seen.append((args[0].dtype, module.weight.dtype)))
    model(torch.randn(3, 4, device=device)).sum().backward()
    width = torch.float32 if param == "fp32" else dtype
    assert seen == [(width, width)]
    assert all(p.grad is not None for p in model.parameters())


def test_a_sparse_embedding_has_three_widths(device: torch.device, dtype: torch.dtype) -> None:
    """Its sparse gradient reaches the fp32 parameter, or the policy is refused."""
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 4)).to(device)
    try:
        convert(model, dtype, CastPolicy.none().rule("0", param="fp32", compute="half"))
    except ValueError:
        return
    model(torch.arange(3, device=device)).sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_parameters_are_cast_for_the_forward_only(device: torch.device, dtype: torch.dtype) -> None:
    """fp32 weights that compute in half: the numbers, and nothing left behind, also after an exception."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4)), device)
    weight = model[0].weight.detach().clone()
    convert(model, dtype, CastPolicy.none().rule("0", param="fp32", compute="half"))
    x = torch.randn(3, 4, device=device)
    expected = nn.functional.linear(x.to(dtype), weight.to(dtype), model[0].bias.to(dtype)).float()
    assert torch.equal(expected, model(x))
    with pytest.raises(RuntimeError):
        model(torch.randn(3, 5, device=device))
    assert "weight" not in vars(model[0])
    assert torch.equal(weight, model[0].weight)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.RNN], ids=lambda make: make.__name__)
def test_packed_weights_need_one_width(make: Any, device: torch.device, dtype: torch.dtype) -> None:
    """A recurrent layer cannot cast its packed weights in every forward; it says so."""
    model = nn.Sequential(make(4, 4)).to(device)
    with pytest.raises(ValueError, match="weights are packed"):
        convert(model, dtype, CastPolicy.default().rule("0", param="fp32", compute="half"))
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    convert(model, dtype, CastPolicy.default().keep("0"))


# -- text and JSON ------------------------------------------------------------------

# fmt: off
AWKWARD = (
    "head", "*.router", "layers.[0-3].*", "default", "*", "?", "é.ü", "模型", "a,b", "+", "'", "<", ">", "<x>", "{",
    "}", "{x}", "=", ";", "?=", "x?", "\\", '"', 'a"b', "a;b", "a=b", "a b", " a", "a ", "a\n", "\x1c", "\u2028",
)
# fmt: on
names = st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1, max_size=6))
kinds = st.sampled_from([nn.Linear, nn.GroupNorm, nn.Module, nn.modules.conv._ConvNd, MyLinear, MyLinear.Inner, Net])
width = st.sampled_from(WIDTHS)
rules = st.builds(Rule, st.one_of(names, kinds), width, width, width, st.booleans())
presets = st.sampled_from([CastPolicy.default(), CastPolicy.none(), CastPolicy.fp32()])


@st.composite
def policies(draw: st.DrawFn) -> CastPolicy:
    preset = draw(presets)
    functions = draw(st.sets(st.sampled_from(["softmax", "cumsum", "exp", "cross_entropy", "mse_loss"])))
    return CastPolicy(
        (*draw(st.lists(rules, max_size=4)), *(preset.rules if draw(st.booleans()) else ())),
        draw(st.sampled_from([preset.functions, (*preset.functions, *functions), tuple(functions)])),
        tuple(draw(st.lists(st.sampled_from(["timesteps", "mask", "x"]), max_size=2, unique=True))),
        draw(width),
    )


@given(policies())
def test_a_policy_comes_back_from_its_text_and_its_json(policy: CastPolicy) -> None:
    """Any policy, awkward names included."""
    for again in (CastPolicy.from_string(str(policy)), CastPolicy.from_json(policy.to_json())):
        assert again == policy
        assert again is not policy
        assert hash(again) == hash(policy)
        assert str(again) == str(policy)


@given(names, st.lists(names, min_size=1, max_size=3))
def test_a_name_in_a_text_matches_what_it_matched(name: str, others: list[str]) -> None:
    """A rule that came back from a text matches the same modules."""
    rule = CastPolicy.none().keep(name).rules[0]
    again = CastPolicy.from_string(str(CastPolicy.none().keep(name))).rules[0]
    assert [rule.matches(other, nn.Module()) for other in others] == [
        again.matches(other, nn.Module()) for other in others
    ]
    assert again is not rule


def test_presets_have_short_texts() -> None:
    """What everybody uses is a word."""
    texts = [str(policy) for policy in (CastPolicy.default(), CastPolicy.none(), CastPolicy.fp32())]
    assert texts == ["default", "none", "fp32"]
    policy = CastPolicy.default().keep("lm_head", "*.router").half(nn.GroupNorm).keep_functions(torch.cumsum)
    assert str(policy) == "<torch.nn.GroupNorm>=half; lm_head=fp32; *.router=fp32; default; functions+=cumsum"
    assert str(policy.leaving("t").returning("half")).endswith("; functions+=cumsum; leave=t; output=half")


@pytest.mark.parametrize(
    "match",
    [lambda name, module: True, nn.Linear(1, 1), nn.Parameter(torch.ones(2))],
    ids=["predicate", "module", "parameter"],
)
def test_what_no_text_brings_back_prints_all_the_same(match: Any) -> None:
    """A function or an object has a text to read, no JSON, and cannot be parsed."""
    policy = CastPolicy.default().keep(match)
    assert str(policy).endswith("}=fp32; default")
    with pytest.raises(TypeError, match="Name the modules instead"):
        policy.to_json()
    with pytest.raises(ValueError, match="is not a rule"):
        CastPolicy.from_string(str(policy))


@pytest.mark.parametrize(
    "text",
    ["", "head=fp32", "head; default", "head=quarter; default", "=fp32; default", "default; nonsense=1", "default; x",
     "<torch.nn.NoSuchLayer>=fp32; default", "<this.Poem>=fp32; default", "default; functions=no_such_function",
     "default; output=quarter", "default; leave=not-a-name", "a=half/half; default"],
)  # fmt: skip
def test_a_text_that_is_no_policy_is_refused(text: str) -> None:
    """By name, and without importing what it names."""
    before = set(sys.modules)
    with pytest.raises((ValueError, TypeError), match="CastPolicy"):
        CastPolicy.from_string(text)
    assert "this" not in set(sys.modules) - before


def test_a_type_of_a_lazy_module_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package such as transformers imports what it is asked for: it is not asked."""
    lazy, asked = types.ModuleType("lazy"), []

    def imports(name: str) -> type:
        asked.append(name)
        return nn.Linear

    monkeypatch.setattr(lazy, "__getattr__", imports, raising=False)
    monkeypatch.setitem(sys.modules, "lazy", lazy)
    with pytest.raises(ValueError, match="is not known here"):
        CastPolicy.from_string("<lazy.Net>=fp32; default")
    assert asked == []


@pytest.mark.parametrize(
    "change",
    [
        {"rules": [{"type": 3}]},
        {"leave": ["a.b"]},
        {"leave": "abc"},
        {"rules": [{"name": "a", "required": "no"}]},
        {"surprise": 1},
    ],
    ids=["type", "name of an argument", "string", "not a bool", "unknown field"],
)
def test_a_json_that_is_almost_a_policy_is_refused(change: dict[str, Any]) -> None:
    """With the same kind of error."""
    data = {**json.loads(CastPolicy.none().to_json()), **change}
    with pytest.raises(ValueError, match="CastPolicy"):
        CastPolicy.from_json(json.dumps(data))


@pytest.mark.parametrize("text", ["", "{}", "[]", "3", '{"rules": 3}', '{"rules": [{}], "functions": [], "leave": []}'])
def test_a_json_that_is_no_policy_is_refused(text: str) -> None:
    """With one kind of error."""
    with pytest.raises(ValueError, match="CastPolicy"):
        CastPolicy.from_json(text)


@pytest.mark.parametrize(
    "make",
    [
        lambda: CastPolicy.default().rule("a", param="quarter"),
        lambda: CastPolicy.default().rule("a", compute=torch.float16),
        lambda: CastPolicy.default().returning("bf16"),
        lambda: CastPolicy.default().keep_functions("sofmax"),
        lambda: CastPolicy.default().keep_functions("exp_"),
        lambda: CastPolicy.default().keep_functions("__ipow__"),
        lambda: CastPolicy.default().keep_functions("linalg_sofmax"),
        lambda: CastPolicy.default().keep_functions(len),
        lambda: CastPolicy.default().leaving("a.b"),
        lambda: CastPolicy(rules=("head",)),
        lambda: CastPolicy(output="quarter"),
        lambda: CastPolicy.default().keep(None),
        lambda: CastPolicy.default().keep(nn.Parameter),
        lambda: CastPolicy.default().keep(torch.ones(1)),
        lambda: CastPolicy.default().keep(b"head"),
        lambda: CastPolicy.default().half(dict),
        lambda: CastPolicy.default().leaving(3),
        lambda: CastPolicy.default().keep_functions(3),
    ],
)
def test_a_wrong_word_is_refused_where_it_is_written(make: Any) -> None:
    """Before any model is there."""
    with pytest.raises((ValueError, TypeError), match="CastPolicy"):
        make()


def test_a_checkpoint_names_another_policy(device: torch.device, dtype: torch.dtype) -> None:
    """A strict load under another policy raises, names both and changes nothing; the same one, built anew, loads."""

    def build(policy: CastPolicy) -> tuple[nn.Module, MixedPrecisionOptimizer]:
        model = seeded(Net, device)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return model, MixedPrecisionOptimizer(inner, model, dtype=dtype, policy=policy)

    model, optimizer = build(CastPolicy.default().keep("head"))
    optimizer.backward(model(torch.randn(2, 4, device=device)).mean())
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert CastPolicy.from_string(saved["mixedopt"]["policy"]) == CastPolicy.default().keep("head")
    _, other = build(CastPolicy.default())
    before = other.master_state_dict()
    with pytest.raises(Exception, match=r"'head=fp32; default', here it is 'default'\. Nothing was loaded"):
        other.load_state_dict(saved)
    assert_same(before, other.master_state_dict())
    other.load_state_dict(saved, strict=False)
    assert_same(optimizer.master_state_dict(), other.master_state_dict())
    build(CastPolicy.default().keep("head"))[1].load_state_dict(saved)
