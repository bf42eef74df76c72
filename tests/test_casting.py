"""Casts at the borders: what they look into, what they leave, what a mask constant becomes."""

from __future__ import annotations

import collections
import copy
import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from models import seeded
from torch import Tensor, nn
from torch.autograd import forward_ad

from mixedopt import CastPolicy, convert
from mixedopt.casting import CastInputs, cast, lowered

HALVES = (torch.float16, torch.bfloat16)


class Point(NamedTuple):
    """A named tuple of a value and a time."""

    x: Tensor
    t: Tensor


@dataclasses.dataclass(frozen=True)
class Frozen:
    """A dataclass that cannot be written to."""

    x: Tensor
    t: Tensor
    name: str = "frozen"


@dataclasses.dataclass
class Made:
    """A dataclass with a field that its constructor does not take."""

    x: Tensor
    t: Tensor
    sum: Any = dataclasses.field(init=False, default=None)


class Ordered(collections.OrderedDict[str, Any]):
    """A dict of the user's own."""


def tensors() -> tuple[Tensor, Tensor]:
    return torch.tensor([1.5]), torch.tensor([2049.0])


CONTAINERS: dict[str, Any] = {
    "list": lambda x, t: [x, [t]],
    "tuple": lambda x, t: (x, (t,)),
    "named tuple": Point,
    "dict": lambda x, t: {"x": x, "t": t},
    "OrderedDict": lambda x, t: Ordered(x=x, t=t),
    "UserDict": lambda x, t: collections.UserDict(x=x, t=t),
    "frozen dataclass": Frozen,
    "dataclass": Made,
    "nested": lambda x, t: {"a": [Point(x, t), {"b": (Frozen(x, t), None, 3, "s")}]},
}


def flat(value: Any) -> list[Tensor]:
    """Return the tensors in a nested value, in order."""
    if isinstance(value, Tensor):
        return [value]
    if dataclasses.is_dataclass(value):
        value = [getattr(value, f.name) for f in dataclasses.fields(value)]
    dicts = (dict, collections.UserDict)
    inside = value.values() if isinstance(value, dicts) else value if isinstance(value, (list, tuple)) else []
    return [tensor for item in inside for tensor in flat(item)]


@pytest.mark.parametrize("kind", list(CONTAINERS))
def test_a_cast_looks_into_containers(kind: str, dtype: torch.dtype) -> None:
    """Every floating tensor inside is cast, the container is of the same type, the original is untouched."""
    value = CONTAINERS[kind](*tensors())
    found = cast(value, dtype)
    assert type(found) is type(value)
    assert {tensor.dtype for tensor in flat(found)} == {dtype}
    assert {tensor.dtype for tensor in flat(value)} == {torch.float32}
    assert len(flat(found)) == len(flat(value))
    assert cast(found, dtype) is found  # nothing to do


@pytest.mark.parametrize(
    "kind", ["named tuple", "dict", "OrderedDict", "UserDict", "frozen dataclass", "dataclass", "nested"]
)
def test_a_name_is_left_inside_a_container(kind: str, dtype: torch.dtype) -> None:
    """A key or field of that name passes as the same object; the others are cast."""
    x, t = tensors()
    found = flat(cast(CONTAINERS[kind](x, t), dtype, frozenset({"t"})))
    assert {tensor.dtype for tensor in found[::2]} == {dtype}
    assert all(tensor is t for tensor in found[1::2])


@pytest.mark.parametrize(
    "value",
    [
        None,
        3,
        2.5,
        "text",
        torch.tensor([2049]),
        torch.tensor([True]),
        torch.tensor([1 + 2j]),
        torch.uint8,
        nn.Identity(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_is_no_floating_tensor_is_the_same_object(value: Any, dtype: torch.dtype) -> None:
    """Alone and in a container that needs a cast."""
    assert cast(value, dtype) is value
    assert cast([torch.ones(1), value], dtype)[1] is value


def test_torch_s_own_tuples_are_cast(dtype: torch.dtype) -> None:
    """What ``max`` returns, and a packed sequence: values are cast, indices are not."""
    largest = cast(torch.ones(3, 2).max(0), dtype)
    assert (largest.values.dtype, largest.indices.dtype) == (dtype, torch.int64)
    packed = nn.utils.rnn.pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    found = cast(packed, dtype)
    assert type(found) is type(packed)
    assert found.data.dtype == dtype
    assert found.batch_sizes is packed.batch_sizes


def test_a_cast_is_differentiable_in_a_container(dtype: torch.dtype) -> None:
    """The gradient goes through to the caller's tensor, in its own dtype."""
    x = torch.ones(2, requires_grad=True)
    cast({"a": [x]}, dtype)["a"][0].sum().backward()
    assert torch.equal(x.grad, torch.ones(2))


def test_a_hook_that_has_nothing_to_do_changes_nothing(dtype: torch.dtype) -> None:
    """The commonest call, a tensor of the right dtype, is not even looked into."""
    hook, x = CastInputs(dtype), torch.ones(2, dtype=dtype)
    assert hook(nn.Identity(), (x,), {}) is None
    args, kwargs = hook(nn.Identity(), (x, None), {"y": x})
    assert args[0] is kwargs["y"] is x
    args, kwargs = hook(nn.Identity(), (x.float(), 3), {"y": [x.float(), 3]})
    assert (args[0].dtype, kwargs["y"][0].dtype, args[1], kwargs["y"][1]) == (dtype, dtype, 3, 3)


@dataclasses.dataclass
class Doubled:
    """A dataclass that computes when it is made."""

    x: Tensor
    count: int = dataclasses.field(init=False, default=0)
    factor: dataclasses.InitVar[int] = 1

    def __post_init__(self, factor: int) -> None:
        self.x = self.x * (2 if self.count == 0 else factor)


@dataclasses.dataclass
class Needs:
    """A dataclass whose constructor takes what it does not keep."""

    x: Tensor
    factor: dataclasses.InitVar[int]

    def __post_init__(self, factor: int) -> None:
        self.factor_squared = factor * factor


@pytest.mark.parametrize("value", [Doubled(torch.ones(1)), Needs(torch.full((1,), 2.0), 3)], ids=["fields", "InitVar"])
def test_a_dataclass_is_copied_not_made_anew(value: Any, dtype: torch.dtype) -> None:
    """What its constructor computed stays, and what was set on it since."""
    value = copy.copy(value)
    value.count, value.note = 7, "mine"
    found = cast(value, dtype)
    assert found.x.item() == value.x.item() == 2
    assert found.x.dtype == dtype
    assert (found.count, found.note) == (7, "mine")
    assert found is not value


class Pair(list[Any]):
    """A list that is made of two arguments."""

    def __init__(self, first: Any, second: Any) -> None:
        super().__init__([first, second])


class Twin(tuple[Any, ...]):
    """A tuple that is made of two arguments."""

    def __new__(cls, first: Any, second: Any) -> Twin:
        return super().__new__(cls, (first, second))


@pytest.mark.parametrize("kind", [Pair, Twin])
def test_a_container_with_a_constructor_of_its_own_is_cast(kind: Any, dtype: torch.dtype) -> None:
    """A subclass of list or tuple need not be made of one iterable."""
    found = cast(kind(torch.ones(1), 3), dtype)
    assert type(found) is kind
    assert (found[0].dtype, found[1]) == (dtype, 3)


def test_a_container_of_what_is_left_is_the_same_object(dtype: torch.dtype) -> None:
    """If all that would be cast is left alone, nothing is to be done."""
    value = {"t": torch.ones(1), "n": 3}
    assert cast(value, dtype, frozenset({"t"})) is value


# -- arguments that are left alone ----------------------------------------------------


class Timed(nn.Module):
    """Echoes what arrives, and uses its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Any, timesteps: Any = None, *, scale: Any = None, **more: Any) -> dict[str, Any]:
        self.got = [x, timesteps, scale, more]
        return {"got": self.got, "y": self.layer(x if isinstance(x, Tensor) else torch.ones(1, 1))}


class Outer(nn.Module):
    """Hands its arguments on."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Timed()

    def forward(self, x: Any, timesteps: Any = None, *, scale: Any = None, **more: Any) -> Any:
        return self.inner(x, timesteps, scale=scale, **more)


@pytest.mark.parametrize("island", [False, True], ids=["half", "island"])
@pytest.mark.parametrize("how", ["position", "keyword", "keyword only", "more", "nested"])
def test_a_named_argument_arrives_as_it_was_given(how: str, island: bool, dtype: torch.dtype) -> None:
    """By position, by keyword, among ``**kwargs``, as a key inside; at the model's door and at an island's."""
    x, t = torch.ones(1, 1), torch.tensor([2049.0], dtype=torch.float64)
    name = {"keyword only": "scale", "more": "extra"}.get(how, "timesteps")
    policy = CastPolicy.default().leaving(name)
    model = Outer() if island else Timed()
    convert(model, dtype, policy.keep("inner") if island else policy)
    args, kwargs = ((x, t), {}) if how == "position" else ((x,), {name: t})
    if how == "nested":
        args, kwargs = ({"timesteps": t, "x": x},), {}
    model(*args, **kwargs)
    got = model.inner.got if isinstance(model, Outer) else model.got
    place = {"position": got[1], "keyword": got[1], "keyword only": got[2], "more": got[3].get("extra")}
    left = got[0]["timesteps"] if how == "nested" else place[how]
    rest = got[0]["x"] if how == "nested" else got[0]
    assert left is t
    assert rest.dtype == (torch.float32 if island else dtype)


class Positions(nn.Module):
    """Takes arguments by position only, and any number more."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, x: Tensor, t: Tensor, /, *rest: Tensor) -> Tensor:
        self.got = (t, *rest)
        return self.layer(x)


def test_a_positional_only_argument_is_left(dtype: torch.dtype) -> None:
    """It has a name, too; those after it are cast."""
    model = Positions()
    convert(model, dtype, CastPolicy.default().leaving("t"))
    t = torch.ones(1)
    model(torch.ones(1, 1), t, t, t)
    assert model.got[0] is t
    assert {v.dtype for v in model.got[1:]} == {dtype}


def test_all_of_the_further_arguments_are_left(dtype: torch.dtype) -> None:
    """The name of ``*rest`` stands for every one of them."""
    model = Positions()
    convert(model, dtype, CastPolicy.default().leaving("rest"))
    t = torch.ones(1)
    model(torch.ones(1, 1), t, t, t)
    assert [v is t for v in model.got] == [False, True, True]


@pytest.mark.parametrize("rule", ["keep", "fp32 weights", "half weights", "hole"])
def test_a_named_argument_is_left_under_every_rule(rule: str, dtype: torch.dtype) -> None:
    """At a border of any widths, and where an island has a half part."""
    policy = {
        "keep": CastPolicy.default().keep("inner"),
        "fp32 weights": CastPolicy.default().rule("inner", param="fp32", compute="half", output="fp32"),
        "half weights": CastPolicy.default().rule("inner", param="half", compute="fp32"),
        "hole": CastPolicy.default().keep("inner").half("inner.layer"),
    }[rule]
    model, t = Outer(), torch.tensor([2049.0], dtype=torch.float64)
    convert(model, dtype, policy.leaving("timesteps", "scale"))
    model(torch.ones(1, 1), t, scale=t)
    assert model.inner.got[1] is model.inner.got[2] is t
    assert model.inner.got[0].dtype == (dtype if rule == "fp32 weights" else torch.float32)


def test_a_name_that_no_forward_takes_is_refused(dtype: torch.dtype) -> None:
    """Before anything is changed."""
    model = nn.Sequential(nn.Linear(1, 1))
    with pytest.raises(ValueError, match=r"leaving\('timestep'\): no module's forward has an argument of that name"):
        convert(model, dtype, CastPolicy.default().leaving("timestep"))
    assert model[0].weight.dtype == torch.float32


class Reads(nn.Module):
    """Takes a key and a field out of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, batch: Any) -> Tensor:
        self.got = batch["when"] if isinstance(batch, dict) else batch.where
        return self.layer(torch.ones(1, 1))


@dataclasses.dataclass
class Sample:
    """What has a field."""

    where: Tensor


@pytest.mark.parametrize("kind", ["when", "where"])
def test_a_key_or_field_that_only_the_code_names_is_left(kind: str, dtype: torch.dtype) -> None:
    """No forward has an argument of that name."""
    model, t = Reads(), torch.ones(1)
    convert(model, dtype, CastPolicy.default().leaving(kind))
    model({"when": t} if kind == "when" else Sample(t))
    assert model.got is t


@pytest.mark.parametrize("output", ["fp32", "half"])
def test_the_model_returns_what_the_policy_says(output: Any, device: torch.device, dtype: torch.dtype) -> None:
    """fp32 by default, nested values included."""
    model = seeded(Timed, device)
    policy = CastPolicy.default() if output == "fp32" else CastPolicy.default().returning("half")
    convert(model, dtype, policy)
    out = model(torch.ones(1, 1, device=device), torch.ones(1, device=device))
    assert {tensor.dtype for tensor in flat(out)} == {torch.float32 if output == "fp32" else dtype}


# -- constants ---------------------------------------------------------------------------


@given(st.floats(width=32), st.sampled_from(HALVES))
def test_a_finite_value_below_the_range_becomes_the_lowest(value: float, dtype: torch.dtype) -> None:
    """And everything else, -inf and NaN included, what ``to`` makes of it."""
    given_, plain = torch.tensor([value]), torch.tensor([value]).to(dtype)
    found = lowered(given_, dtype)
    if plain.isneginf() and not given_.isneginf():
        assert found.item() == torch.finfo(dtype).min
    else:
        assert torch.equal(found, plain) or (found.isnan() and plain.isnan())


@pytest.mark.parametrize("source", [torch.float64, torch.float32, torch.bfloat16])
def test_values_are_lowered_from_every_wider_range(source: torch.dtype, dtype: torch.dtype) -> None:
    """From the range of the source to that of the target; the shape stays, and what is in range."""
    value = torch.tensor([[torch.finfo(source).min, 1.0], [-torch.inf, torch.inf]], dtype=source)
    found = lowered(value, dtype)
    assert found.dtype == dtype
    assert found.tolist() == [[torch.finfo(dtype).min, 1.0], [-torch.inf, torch.inf]]
    assert lowered(value[:, :0], dtype).shape == (2, 0)
    assert lowered(value[0, 0], dtype).item() == torch.finfo(dtype).min


@pytest.mark.parametrize("layout", ["coo", "csr"])
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning")
def test_a_sparse_input_reaches_the_model(layout: str, device: torch.device, dtype: torch.dtype) -> None:
    """An adjacency matrix is no mask; it is cast as it is."""
    model = seeded(Timed, device)
    convert(model, dtype)
    matrix = torch.eye(3, device=device)
    model(torch.ones(1, 1, device=device), matrix.to_sparse() if layout == "coo" else matrix.to_sparse_csr())
    assert model.got[1].dtype == dtype
    assert torch.equal(model.got[1].to_dense(), matrix.to(dtype))


def test_a_tensor_with_a_gradient_keeps_its_infinity(dtype: torch.dtype) -> None:
    """An activation that overflows must be seen; its gradient is that of a cast."""
    value = torch.tensor([torch.finfo(torch.float32).min], requires_grad=True)
    found = lowered(value, dtype)
    assert found.isneginf()
    found.backward()
    assert value.grad.item() == 1
    assert lowered(value.detach(), dtype).item() == torch.finfo(dtype).min


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # of forward derivatives
def test_a_derivative_goes_through_the_door(device: torch.device, dtype: torch.dtype) -> None:
    """Forward-mode, on every device."""
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(torch.ones(3, device=device), torch.full((3,), 2.0, device=device))
        tangent = forward_ad.unpack_dual(lowered(dual, dtype)).tangent
    assert tangent is not None
    assert bool((tangent == 2.0).all())


def test_a_mask_of_the_model_is_lowered_at_its_door(device: torch.device, dtype: torch.dtype) -> None:
    """-1e9 in a float argument stays finite in fp16 and rounds in bf16; positive overflow stays visible."""
    model = seeded(Timed, device)
    convert(model, dtype)
    model(torch.ones(1, 1, device=device), torch.tensor([-1e9, 1e39, -torch.inf], device=device))
    expected = -65504.0 if dtype == torch.float16 else torch.tensor(-1e9).bfloat16().item()
    assert isinstance(model, Timed)
    assert model.got[1].tolist() == [expected, torch.inf, -torch.inf]


# -- islands that are entered by another way than their forward ---------------------------


class Entered(nn.Module):
    """Uses what is inside ``part`` in some way, and notes the dtypes in which the layers in there compute."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.before, self.after = how, nn.Linear(4, 4), nn.Linear(4, 4)
        blocks = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2)]
        self.part: Any = nn.ModuleDict(zip("ab", blocks, strict=True)) if how == "dict" else nn.ModuleList(blocks)
        if how == "list of lists":
            self.part = nn.ModuleList([nn.ModuleList(block) for block in blocks])
        if how in ("children", "forward"):
            self.part = blocks[0]
        self.seen: set[torch.dtype] = set()
        for layer in self.part.modules():
            if isinstance(layer, nn.Linear):
                layer.register_forward_hook(lambda module, args, out: self.seen.update([args[0].dtype, out.dtype]))

    def forward(self, x: Tensor) -> Tensor:
        x = self.before(x)
        if self.how == "forward":
            return self.after(self.part.forward(x))
        parts = self.part.values() if self.how == "dict" else self.part
        called = [inner for part in parts for inner in part] if self.how == "list of lists" else parts
        for module in called:
            x = module(x)
        return self.after(x)


@pytest.mark.parametrize("preset", ["default", "none"])
@pytest.mark.parametrize("how", ["list", "dict", "list of lists", "children", "forward"])
def test_an_island_computes_in_fp32_however_it_is_entered(
    how: str, preset: str, device: torch.device, dtype: torch.dtype
) -> None:
    """A ``ModuleList`` is never called, and a module can be used by its parts: no hook of its own runs."""
    model = seeded(lambda: Entered(how), device)
    convert(model, dtype, getattr(CastPolicy, preset)().keep("part"))
    model.seen.clear()
    for _ in range(3):  # the first forward runs with every function rule in force
        assert model(torch.randn(2, 4, device=device)).isfinite().all()
    assert model.seen - {dtype} == {torch.float32}
    for layer in model.part.modules():
        if isinstance(layer, nn.Linear):
            seen: list[torch.dtype] = []
            hook = layer.register_forward_hook(lambda module, args, out, seen=seen: seen.append(args[0].dtype))
            model(torch.randn(2, 4, device=device))
            hook.remove()
            assert seen == [torch.float32]


class OwnBlock(nn.Module):
    """Computes with code of its own, and notes in what."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.came, y = x.dtype, x.exp()
        self.computed = y.dtype
        return self.layer(y)


class Listed(nn.Module):
    """Blocks in a list, and what each returns to the code outside."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.blocks = nn.Linear(4, 4), nn.ModuleList([OwnBlock(), OwnBlock()])

    def forward(self, x: Tensor) -> Tensor:
        x, self.returned = self.before(x), []
        for block in self.blocks:
            x = block(x)
            self.returned.append(x.dtype)
        return x


@pytest.mark.parametrize("preset", ["default", "none"])
def test_a_kept_list_keeps_the_code_of_what_is_in_it(preset: str, device: torch.device, dtype: torch.dtype) -> None:
    """The border runs around each block: it computes in fp32 and returns half, as ``keep`` says."""
    model = seeded(Listed, device)
    convert(model, dtype, getattr(CastPolicy, preset)().keep("blocks"))
    for _ in range(2):
        model(torch.randn(2, 4, device=device))
        assert {(block.came, block.computed) for block in model.blocks} == {(torch.float32, torch.float32)}
        assert model.returned == [dtype, dtype]


@pytest.mark.parametrize("preset", ["default", "none"])
@pytest.mark.parametrize("name", ["0.weight", "1.0.weight"])
def test_a_parameter_of_a_rule_is_cast_in_every_forward(
    name: str, preset: str, device: torch.device, dtype: torch.dtype
) -> None:
    """fp32 for one weight, half for the product; gradients reach the fp32 weight."""
    make = lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))  # noqa: E731
    model = seeded(make, device)
    convert(model, dtype, getattr(CastPolicy, preset)().rule(name, param="fp32", compute="half"))
    for _ in range(2):
        model(torch.randn(2, 4, device=device)).sum().backward()
    assert {key for key, p in model.named_parameters() if p.dtype == torch.float32} == {name}
    assert model.get_parameter(name).grad.dtype == torch.float32


def test_a_nested_tensor_passes_the_door(dtype: torch.dtype) -> None:
    """It is cast as any other."""
    nested = torch.nested.nested_tensor([torch.ones(2, 1), torch.ones(3, 1)], layout=torch.jagged)
    assert cast(nested, dtype, lower=True).dtype == dtype
