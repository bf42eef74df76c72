"""Rules: what matches, what wins, three widths, and the way to text and back."""

from __future__ import annotations

import copy
import sys
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


@pytest.mark.parametrize(
    "rule", ["nothing", nn.LSTM, lambda name, module: False, nn.Linear(1, 1), nn.Parameter(torch.ones(1))]
)
def test_a_rule_that_matches_nothing_changes_nothing(rule: Any, device: torch.device, dtype: torch.dtype) -> None:
    """It raises before the first parameter is converted, whatever its kind."""
    model = two_group_model(device)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match="matches no module and no parameter"):
        convert(model, dtype, CastPolicy.default().keep("hidden").half(rule))
    assert_same(dict(before), dict(model.state_dict()))
    assert set(hook_counts(model).values()) == {0}
    convert(model, dtype, CastPolicy.default())  # a preset's rules need no match


# -- three widths -----------------------------------------------------------------

KINDS = {
    "Linear": lambda: nn.Linear(4, 4),
    "Sequential": lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh()),
    "LayerNorm": lambda: nn.LayerNorm(4),
    "Attention": lambda: nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True),
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
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), KINDS[kind](), nn.Linear(4, 4)), device)
    policy = CastPolicy.none().rule("1", param=param, compute=compute, output=output)
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model, dtype=dtype, loss_scale=1.0, policy=policy
    )
    seen: dict[str, torch.dtype] = {}
    inside = model[1][0] if kind == "Sequential" else model[1]
    inside.register_forward_pre_hook(lambda module, args: seen.update(input=args[0].dtype))
    model[1].register_forward_hook(lambda module, args, out: seen.update(output=out.dtype))
    before = {name: master.clone() for name, master in optimizer.named_masters()}

    loss = model(torch.randn(2, 3, 4, device=device)).square().mean()
    optimizer.backward(loss)
    optimizer.step()

    assert {p.dtype for p in model[1].parameters()} == {width[param]}
    mixed = kind == "LayerNorm" and (param, compute, output) == ("fp32", "fp32", "half")
    assert seen == {"input": dtype if mixed else width[compute], "output": width[output]}
    assert not optimizer.last_step.skipped
    moved = [name for name, master in optimizer.named_masters() if not torch.equal(before[name], master)]
    assert len(moved) >= len(before) - 1  # attention's key bias has no gradient


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

names = st.one_of(
    st.sampled_from(
        ["head", "*.router", "layers.[0-3].*", 'a"b', "a;b", "a=b", "a b", "é.ü", "{x}", "<x>", "x?", "default"]
    ),
    st.text(min_size=1, max_size=6),
)
types = st.sampled_from([nn.Linear, nn.GroupNorm, nn.Module, nn.modules.conv._ConvNd, MyLinear, Net])
width = st.sampled_from(WIDTHS)
rules = st.builds(Rule, st.one_of(names, types), width, width, width, st.booleans())
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


def test_presets_have_short_texts() -> None:
    """What everybody uses is a word."""
    texts = [str(policy) for policy in (CastPolicy.default(), CastPolicy.none(), CastPolicy.fp32())]
    assert texts == ["default", "none", "fp32"]
    policy = CastPolicy.default().keep("lm_head", "*.router").half(nn.GroupNorm).keep_functions(torch.cumsum)
    assert str(policy) == "<torch.nn.GroupNorm>=half; lm_head=fp32; *.router=fp32; default; functions+=cumsum"
    assert str(policy.leaving("t").returning("half")).endswith("; functions+=cumsum; leave=t; output=half")


@pytest.mark.parametrize("match", [lambda name, module: True, nn.Linear(1, 1), nn.Parameter(torch.ones(2))])
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
        lambda: CastPolicy.default().keep_functions(len),
        lambda: CastPolicy.default().leaving("a.b"),
        lambda: CastPolicy(rules=("head",)),
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
