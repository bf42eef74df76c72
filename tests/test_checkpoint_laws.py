"""What a load demands, what it leaves, what it costs; random damage; the way back to plain fp32."""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    assert_same,
    differs,
    force_grads,
    fp32_twin,
    loss_of,
    masters_of,
    overflow,
    seeded,
    snapshot,
    through_file,
    train,
    two_group_model,
    two_groups,
    wrapped,
)
from models import adamw as make_adamw
from models import momentum as make_momentum
from optimizers import IDS, INNERS, Inner
from torch import Tensor, nn

from mixedopt import CheckpointError, DynamicLossScale, MixedPrecisionOptimizer, StaticLossScale
from mixedopt.checkpoint import export_state, save_fp32_safetensors
from mixedopt.copies import mapped

SEED = 20180430
DAMAGES = 200


def trained(device: torch.device, dtype: torch.dtype, make: Any = make_adamw, **options: Any) -> dict[str, Any]:
    """Return the state of a run of three steps and a skip."""
    model, optimizer = wrapped(device, dtype, make, **options)
    train(model, optimizer, range(3))
    overflow(optimizer)
    return through_file(optimizer.state_dict())


# -- what is demanded -----------------------------------------------------------------------


def other_groups(params: Any) -> torch.optim.Optimizer:
    """The same parameters and sizes, but two have changed places between the groups."""
    first, second = ([*group["params"]] for group in params)
    first[0], second[0] = second[0], first[0]
    return torch.optim.AdamW([{"params": first}, {"params": second}], lr=1e-2)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (make_momentum, r"the state of AdamW, here SGD"),
        (lambda params: torch.optim.Adam(params, lr=1e-2), r"the state of AdamW, here Adam\b"),
        (other_groups, r"in group 0, here in group 1.*in group 1, here in group 0"),
        (lambda params: make_adamw([params[0]]), "2 parameter groups, here 1"),
    ],
    ids=["SGD", "Adam", "moved", "fewer groups"],
)
def test_another_optimizer_is_refused(make: Any, match: str, device: torch.device, dtype: torch.dtype) -> None:
    """By its class, its groups and who is in them; nothing is changed."""
    saved = trained(device, dtype)
    model, optimizer = wrapped(device, dtype, make)
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(model, optimizer))


PLAIN_MISFITS = {
    "Adam into SGD": (torch.optim.Adam, torch.optim.SGD, "no hyperparameter 'momentum' in group 0"),
    "SGD into Adam": (torch.optim.SGD, torch.optim.Adam, "no 'step' for"),
    "Adam into Adamax": (torch.optim.Adam, torch.optim.Adamax, "no 'exp_inf' for"),
    "RMSprop into Adagrad": (torch.optim.RMSprop, torch.optim.Adagrad, "no 'sum' for"),
}


@pytest.mark.parametrize("kind", list(PLAIN_MISFITS))
def test_the_plain_state_of_another_optimizer_is_refused_at_load(
    kind: str, device: torch.device, dtype: torch.dtype
) -> None:
    """Case 29: not at the first step, with a KeyError; also when the run here is fresh."""
    theirs, ours, match = PLAIN_MISFITS[kind]
    options = {"momentum": 0.9} if theirs is torch.optim.SGD else {}
    plain, bare = fp32_twin(device, lambda params: theirs(params, lr=1e-2, **options))
    loss_of(plain, 0).backward()
    bare.step()
    model, optimizer = wrapped(device, dtype, lambda params: ours(params, lr=1e-2))
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_state_dict(through_file(bare.state_dict()))
    assert_same(before, snapshot(model, optimizer))


def test_hyperparameters_of_the_file_hold(device: torch.device, dtype: torch.dtype) -> None:
    """Also those that change what the state is made of."""
    saved = trained(device, dtype, lambda params: torch.optim.AdamW(params, lr=0.5, amsgrad=True, betas=(0.5, 0.75)))
    model, optimizer = wrapped(device, dtype)
    optimizer.load_state_dict(saved)
    assert [(g["betas"], g["amsgrad"]) for g in optimizer.param_groups] == [((0.5, 0.75), True)] * 2
    train(model, optimizer, [4])
    assert optimizer.last_step.applied


def test_a_hyperparameter_younger_than_the_file_is_filled_in(device: torch.device, dtype: torch.dtype) -> None:
    """By the optimizer itself, as torch does it for its own older files."""
    saved = trained(device, dtype)
    for group in saved["param_groups"]:
        del group["maximize"], group["capturable"]
    _, optimizer = wrapped(device, dtype)
    optimizer.load_state_dict(saved)
    assert {group["maximize"] for group in optimizer.param_groups} == {False}


def test_what_a_scheduler_keeps_in_the_groups_stays(device: torch.device, dtype: torch.dtype) -> None:
    """A run that was saved without one resumes with one."""
    saved = trained(device, dtype)
    _, optimizer = wrapped(device, dtype)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.5, 0.25], total_steps=10)
    optimizer.load_state_dict(saved)
    force_grads(optimizer, 1e-3)
    optimizer.step()
    scheduler.step()
    assert [group["max_lr"] for group in optimizer.param_groups] == [0.5, 0.25]


def test_ten_differences_are_listed_and_the_rest_counted(device: torch.device, dtype: torch.dtype) -> None:
    """A message fits a screen."""
    saved = trained(device, dtype)
    for entry in saved["state"].values():
        entry["master"] = torch.zeros(77)
        entry.pop("exp_avg", None)
    _, optimizer = wrapped(device, dtype)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(saved)
    assert str(caught.value).count(";") == 10
    assert "; and 6 more. Nothing was loaded." in str(caught.value)


# -- what matches -----------------------------------------------------------------------------


def test_a_shape_that_does_not_fit_is_left_out_if_not_strict(device: torch.device, dtype: torch.dtype) -> None:
    """It is missing and unexpected; the others are loaded."""
    saved = trained(device, dtype)
    names = saved["mixedopt"]["names"]
    saved["state"][names.index("head.bias")]["master"] = torch.zeros(3)
    saved["state"][names.index("norm.bias")]["exp_avg"] = torch.zeros(3)
    _, optimizer = wrapped(device, dtype)
    before = masters_of(optimizer)
    keys = optimizer.load_state_dict(saved, strict=False)
    assert sorted(keys.missing_keys) == sorted(keys.unexpected_keys) == ["head.bias", "norm.bias"]
    after = masters_of(optimizer)
    assert_same({n: before[n] for n in keys.missing_keys}, {n: after[n] for n in keys.missing_keys})
    assert_same(saved["state"][names.index("hidden.weight")]["master"], after["hidden.weight"])
    assert optimizer.applied_steps == 3


def test_parameters_in_other_groups_keep_the_hyperparameters_here(device: torch.device, dtype: torch.dtype) -> None:
    """Those of the file belong to others."""
    saved = trained(device, dtype)
    _, optimizer = wrapped(device, dtype, other_groups)
    for group, lr in zip(optimizer.param_groups, (0.5, 0.25), strict=True):
        group["lr"] = lr
    assert optimizer.load_state_dict(saved, strict=False) == ([], [])
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
    assert_same(saved["state"][0]["master"], masters_of(optimizer)[saved["mixedopt"]["names"][0]])


@pytest.mark.parametrize("from_model", [True, False])
def test_without_a_model_on_one_side_places_count(from_model: bool, device: torch.device, dtype: torch.dtype) -> None:
    """A ``model.half()`` run and one with a model read each other's checkpoints, shapes checked."""

    def build(*, with_model: bool, width: int = 8) -> MixedPrecisionOptimizer:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2)), device)
        if not with_model:
            model.to(dtype)
        inner = make_adamw(model.parameters())
        return MixedPrecisionOptimizer(inner, model if with_model else None, dtype=dtype, loss_scale=4.0)

    source = build(with_model=from_model)
    force_grads(source, 1e-3)
    source.step()
    target = build(with_model=not from_model)
    assert target.load_state_dict(through_file(source.state_dict())) == ([], [])
    assert_same(list(masters_of(source).values()), list(masters_of(target).values()))
    with pytest.raises(CheckpointError, match="of shape"):
        build(with_model=not from_model, width=6).load_state_dict(source.state_dict())


@pytest.mark.parametrize("strict", [True, False])
def test_a_scale_of_the_other_kind_stays_if_not_strict(strict: bool, device: torch.device, dtype: torch.dtype) -> None:
    """Strict, it is refused; else everything but the scale is loaded."""
    saved = trained(device, dtype, loss_scale=StaticLossScale(8.0))
    model, optimizer = wrapped(device, dtype)
    if strict:
        with pytest.raises(CheckpointError, match="holds the state of a StaticLossScale"):
            optimizer.load_state_dict(saved)
        return
    assert optimizer.load_state_dict(saved, strict=False) == ([], [])
    assert (optimizer.loss_scale, optimizer.applied_steps) == (SMALL_SCALE.init_scale, 3)
    train(model, optimizer, [4])


def test_other_trainable_parameters_are_matched_by_name(device: torch.device, dtype: torch.dtype) -> None:
    """A layer that is frozen here, or trained here only, moves no other's state."""
    saved = trained(device, dtype)
    model = two_group_model(device)
    for name, param in model.named_parameters():
        param.requires_grad_("hidden" not in name)  # the frozen layer is trained here, the hidden one is not
    groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in two_groups(model)]
    optimizer = MixedPrecisionOptimizer(make_adamw(groups), model, dtype=dtype, loss_scale=SMALL_SCALE)
    with pytest.raises(CheckpointError, match=r"an unexpected parameter 'hidden\.weight'"):
        optimizer.load_state_dict(saved)
    keys = optimizer.load_state_dict(saved, strict=False)
    names = saved["mixedopt"]["names"]
    assert set(keys.unexpected_keys) == {"hidden.weight", "hidden.bias"}
    for name, master in masters_of(optimizer).items():
        entry = saved["state"].get(names.index(name), {})
        if "master" in entry:
            assert_same(entry["master"], master)


def test_names_are_those_of_the_bare_model(device: torch.device, dtype: torch.dtype) -> None:
    """Compiled as a whole or a part of it."""
    saved = trained(device, dtype)
    model = two_group_model(device)
    model.hidden = torch.compile(model.hidden, backend="eager")
    optimizer = MixedPrecisionOptimizer(make_adamw(two_groups(model)), model, dtype=dtype, loss_scale=SMALL_SCALE)
    assert optimizer.load_state_dict(saved) == ([], [])
    assert_same(saved["mixedopt"], optimizer.state_dict()["mixedopt"])


# -- what it costs ----------------------------------------------------------------------------


def test_state_is_written_over_in_place(device: torch.device, dtype: torch.dtype) -> None:
    """No second copy of it is made, and nothing is shared with the caller."""
    saved = trained(device, dtype)
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [7])
    held = {id(v): v.data_ptr() for entry in optimizer.inner.state.values() for v in entry.values()}
    optimizer.load_state_dict(saved)
    after = {id(v): v.data_ptr() for entry in optimizer.inner.state.values() for v in entry.values()}
    assert held == after
    theirs = {v.data_ptr() for entry in saved["state"].values() for v in entry.values()}
    assert not theirs & set(after.values())


@pytest.mark.gpu
@pytest.mark.parametrize("stepped", [False, True], ids=["fresh", "in mid-life"])
def test_a_load_needs_the_memory_of_one_tensor(stepped: bool, dtype: torch.dtype) -> None:
    """Beside the loaded file and the state itself, measured by the allocator."""
    device = torch.device("cuda")

    def build() -> MixedPrecisionOptimizer:
        model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False, device=device) for _ in range(16)])
        return MixedPrecisionOptimizer(make_adamw(model.parameters()), model, dtype=dtype, loss_scale=4.0)

    source = build()
    force_grads(source, 1e-3)
    source.step()
    saved = copy.deepcopy(source.state_dict())
    del source
    target = build()
    if stepped:
        force_grads(target, 1e-3)
        target.step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    target.load_state_dict(saved)
    largest, moments = 4 * 1024 * 1024, 16 * 2 * 4 * 1024 * 1024
    assert torch.cuda.max_memory_allocated() - before <= largest + (0 if stepped else moments) + 2**16


# -- random damage ----------------------------------------------------------------------------


class Harmless:
    """What no checkpoint holds."""


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path to everything inside."""
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        yield from places(item, (*path, key))


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def wrong_for(value: Any, rng: random.Random) -> Any:
    """Return something of another type than ``value``, or of a shape that cannot be."""
    huge = torch.zeros(()).expand(2**20, 2**20)
    if isinstance(value, Tensor):
        return rng.choice(["text", [1.0], {}, huge, torch.zeros(3, 3, 3), value.to(torch.complex64), Harmless()])
    if isinstance(value, dict):
        return rng.choice([[], "text", 3, None, huge])
    if isinstance(value, list):
        return rng.choice([{}, 3, None, "text"])
    if isinstance(value, bool) or value is None:
        return rng.choice([[1.0], {}, "text"])
    if isinstance(value, str):
        return rng.choice([3, [], "nothing like it"])
    return rng.choice(["text", [], {}, math.nan, Harmless()])


def damaged(saved: dict[str, Any], rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return what was done, and a dict that no run can have written."""
    saved = copy.deepcopy(saved)
    # Known from nothing else: any text is a policy, any name of a parameter may be fresh.
    free = {("mixedopt", "policy"), ("mixedopt", "optimizer"), *(("mixedopt", "fresh", index) for index in range(9))}
    paths = [p for p in places(saved) if p not in free and p[-2:] != (0, "mixedopt") and "config" not in p[:-1]]
    kind = rng.choice(["wrong", "wrong", "missing", "extra", "number"])
    if kind == "extra":
        saved["state"][99] = copy.deepcopy(saved["state"][0])
        return "a number that no group has", saved
    if kind == "number":
        numbers = [p for p in paths if type(at(saved, p)) is int]
        path = rng.choice([p for p in numbers if p[0] != "param_groups" or "params" in p])  # others may be any number
        at(saved, path[:-1])[path[-1]] = rng.choice([-1, 10**30, "1", None])
        return f"{kind} at {path}", saved
    path = rng.choice(paths)
    if kind == "missing":
        # A parameter without any state had no gradient, and a younger hyperparameter is filled in: both can be.
        path = rng.choice([p for p in paths if not (p[0] == "state" and len(p) == 2) and p[:1] != ("param_groups",)])
        del at(saved, path[:-1])[path[-1]]
    else:
        at(saved, path[:-1])[path[-1]] = wrong_for(at(saved, path), rng)
    return f"{kind} at {path}", saved


def refused(optimizer: MixedPrecisionOptimizer, saved: Any) -> bool:
    """True iff loading it is an error that says that nothing was loaded."""
    try:
        optimizer.load_state_dict(saved)
    except CheckpointError as error:
        return "Nothing was loaded." in str(error)
    return False


@pytest.mark.parametrize("make", [make_adamw, make_momentum], ids=["AdamW", "SGD"])
def test_damage_is_refused_and_changes_nothing(make: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Wrong types, missing and extra keys, shapes that cannot be, at random: always a ``CheckpointError``."""
    saved = trained(device, dtype, make)
    model, optimizer = wrapped(device, dtype, make)
    train(model, optimizer, [5])
    before = snapshot(model, optimizer)
    rng = random.Random(SEED)
    for _ in range(DAMAGES):
        what, broken = damaged(saved, rng)
        assert refused(optimizer, broken), what
        assert not differs(before, snapshot(model, optimizer)), what
    train(model, optimizer, [6])
    assert optimizer.last_step.applied


# -- back to fp32 ------------------------------------------------------------------------------


@pytest.mark.parametrize("inner", INNERS, ids=IDS)
def test_a_plain_optimizer_goes_on_from_the_export(inner: Inner, device: torch.device, dtype: torch.dtype) -> None:
    """Its next step is that of the masters, fed the same half-rounded gradients; and back again."""
    weights = [torch.randn(4, 6), torch.randn(6, 4), torch.randn(3, 8)]
    model = nn.ParameterList([nn.Parameter(w.to(device)) for w in weights])
    plain = nn.ParameterList([nn.Parameter(w.to(device)) for w in weights])
    groups = [list(model)[::2], list(model)[1::2]]
    optimizer = MixedPrecisionOptimizer(inner(groups), model, dtype=dtype, loss_scale=SMALL_SCALE)

    def grads(step: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(step)
        return [torch.randn(w.shape, generator=generator).to(device, dtype) for w in weights]

    def step(step_: int) -> None:
        optimizer.scale(torch.zeros((), device=device))
        for param, grad in zip(model, grads(step_), strict=True):
            param.grad = grad * SMALL_SCALE.init_scale
        optimizer.step()

    step(0)
    step(1)
    plain.load_state_dict(optimizer.master_state_dict())
    bare = inner([list(plain)[::2], list(plain)[1::2]])
    bare.load_state_dict(through_file(export_state(optimizer)))
    step(2)
    for param, grad in zip(plain, grads(2), strict=True):
        param.grad = grad.float()
    bare.step()
    assert_same(optimizer.master_state_dict(), dict(plain.state_dict()))
    # Torch has moved NAdam's product to the device of the parameters.
    assert_same(mapped(export_state(optimizer), Tensor.cpu), mapped(through_file(bare.state_dict()), Tensor.cpu))

    back = MixedPrecisionOptimizer(inner(groups_of(plain)), plain, dtype=dtype, loss_scale=SMALL_SCALE)
    back.load_state_dict(through_file(bare.state_dict()))
    assert_same(export_state(optimizer), export_state(back))
    assert_same(masters_of(optimizer), masters_of(back))


def test_sparse_adam_goes_there_and_back(device: torch.device, dtype: torch.dtype) -> None:
    """The one optimizer of torch whose gradients are never dense."""
    model, plain = (seeded(lambda: nn.Embedding(9, 4, sparse=True), device) for _ in range(2))
    optimizer = MixedPrecisionOptimizer(
        torch.optim.SparseAdam(model.parameters(), lr=0.1), model, dtype=dtype, loss_scale=SMALL_SCALE
    )

    def rows(step: int) -> Tensor:
        indices = torch.tensor([[step, step + 3]], device=device)
        values = torch.arange(1.0, 9.0, device=device).view(2, 4)
        return torch.sparse_coo_tensor(indices, values, (9, 4), check_invariants=True).coalesce()

    def step(step_: int) -> None:
        optimizer.scale(torch.zeros((), device=device))
        model.weight.grad = (rows(step_) * SMALL_SCALE.init_scale).to(dtype)
        optimizer.step()

    step(0)
    step(1)
    plain.load_state_dict(optimizer.master_state_dict())
    bare = torch.optim.SparseAdam(plain.parameters(), lr=0.1)
    bare.load_state_dict(through_file(export_state(optimizer)))
    step(2)
    plain.weight.grad = rows(2)
    bare.step()
    assert_same(optimizer.master_state_dict(), dict(plain.state_dict()))
    assert_same(export_state(optimizer), through_file(bare.state_dict()))
    back = MixedPrecisionOptimizer(
        torch.optim.SparseAdam(plain.parameters(), lr=0.1), plain, dtype=dtype, loss_scale=SMALL_SCALE
    )
    back.load_state_dict(through_file(bare.state_dict()))
    assert_same(export_state(optimizer), export_state(back))


def groups_of(plain: nn.ParameterList) -> list[list[nn.Parameter]]:
    return [list(plain)[::2], list(plain)[1::2]]


@pytest.mark.parametrize("compiled", [False, True])
def test_safetensors_hold_the_fp32_model(
    compiled: bool, tmp_path: Path, device: torch.device, dtype: torch.dtype
) -> None:
    """Every name, tied ones too, in the dtypes of the fp32 model; no half-written file stays behind."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'safetensors'")
    model, optimizer = wrapped(device, dtype)
    model.register_buffer("ids", torch.arange(5, device=device))
    model.register_buffer("table", torch.rand(3, device=device))
    train(model, optimizer, range(2))
    path = tmp_path / "model.safetensors"
    path.write_text("old")
    save_fp32_safetensors(path, torch.compile(model, backend="eager") if compiled else model, optimizer)
    assert [entry.name for entry in tmp_path.iterdir()] == ["model.safetensors"]
    found = safetensors.load_file(path, device=str(device))
    assert_same(dict(optimizer.master_state_dict()), found)
    assert_same(found["head.weight"], found["embedding.weight"])
    assert found["ids"].dtype == torch.int64

    for other in (nn.Linear(2, 2), wrapped(device, dtype)[0]):  # another model, another of the same kind
        with pytest.raises(ValueError, match="which is not in this model"):
            save_fp32_safetensors(path, other, optimizer)
    assert_same(found, safetensors.load_file(path, device=str(device)))


def test_a_half_model_is_exported_under_its_names(tmp_path: Path, device: torch.device, dtype: torch.dtype) -> None:
    """The optimizer was built without it."""
    safetensors = pytest.importorskip("safetensors.torch", reason="needs the extra 'safetensors'")
    model = two_group_model(device).to(dtype)
    optimizer = MixedPrecisionOptimizer(make_adamw(two_groups(model)), loss_scale=SMALL_SCALE)
    train(model, optimizer, range(2))
    plain = two_group_model(device)
    plain.load_state_dict(optimizer.master_state_dict(model), strict=True)
    save_fp32_safetensors(tmp_path / "model", model, optimizer)
    assert_same(dict(plain.state_dict()), safetensors.load_file(tmp_path / "model", device=str(device)))
    assert_same(masters_of(optimizer)["group0.param0"], plain.embedding.weight.detach())


def test_without_safetensors_an_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    """It is an extra."""
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    model, optimizer = wrapped(device, dtype, loss_scale=DynamicLossScale())
    with pytest.raises(ImportError, match="pip install safetensors"):
        save_fp32_safetensors(tmp_path / "x", model, optimizer)
    assert list(tmp_path.iterdir()) == []
