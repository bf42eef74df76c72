"""Other tools' checkpoints: a run moved here goes on with the bits that it would have had there."""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import pickle
import random
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import (
    FP32,
    SMALL_SCALE,
    Factory,
    adamw,
    assert_same,
    differs,
    fp32_twin,
    loss_of,
    masters_of,
    momentum,
    overflow,
    seeded,
    snapshot,
    train,
    two_group_model,
    two_groups,
    wrapped,
)
from torch import Tensor, nn

from mixedopt import CheckpointError, DynamicLossScale, MixedPrecisionOptimizer, StaticLossScale, StepOrderError
from mixedopt.checkpoint import Imported, import_state, save
from mixedopt.loss_scale import state_from_dict, update

CPU = torch.device("cpu")
MAKERS: dict[str, Factory] = {"AdamW": adamw, "SGD": momentum}
# One that overflows never move: no gradient here comes near, and growth is far.
S, TRACKER = 2.0**7, 5
GRAD_SCALER = {
    "scale": S,
    "growth_factor": 4.0,
    "backoff_factor": 0.25,
    "growth_interval": 7,
    "_growth_tracker": TRACKER,
}
Damage = Callable[[Any], Any]


# -- files as the tools lay them out --------------------------------------------


class Row(NamedTuple):
    """One parameter of a trained wrapper, as a tool would have it."""

    name: str
    half: bool
    master: Tensor | None
    state: dict[str, Any]


def rows(optimizer: MixedPrecisionOptimizer) -> list[list[Row]]:
    """Return every parameter by group; steps are ints, as these tools have them."""
    saved, states = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(optimizer.inner.state_dict()["state"])
    groups, position = [], 0
    for group in optimizer.param_groups:
        members = []
        for param in group["params"]:
            entry = dict(states.get(position, {}))
            master = saved["state"].get(position, {}).get("master")
            if "step" in entry:
                entry["step"] = int(entry["step"])
            name = saved["mixedopt"]["names"][position]
            members.append(Row(name, param.dtype != torch.float32, master, entry))
            position += 1
        groups.append(members)
    return groups


def inner_dict(optimizer: MixedPrecisionOptimizer, groups: Sequence[Sequence[Row]], **more: Any) -> dict[str, Any]:
    """Return a torch optimizer's state dict over these rows, renumbered; hyperparameters of the groups."""
    state, saved, position = {}, [], 0
    for own, members in zip(optimizer.inner.param_groups, groups, strict=False):
        ids = list(range(position, position + len(members)))
        state.update({i: row.state for i, row in zip(ids, members, strict=True) if row.state})
        kept = {k: v for k, v in own.items() if k not in ("params", "foreach", "fused", "capturable", "differentiable")}
        saved.append({**kept, **more, "params": ids})
        position += len(members)
    return {"state": state, "param_groups": saved}


def trained(optimizer: MixedPrecisionOptimizer) -> list[list[Row]]:
    return [[row for row in group if row.master is not None] for group in rows(optimizer)]


def flat(members: Sequence[Row]) -> Row:
    """Return rows as one: masters and moments in one vector each, the count once."""
    keys = {key: None for row in members for key in row.state}
    zeros = {key: [torch.zeros_like(row.master) for row in members] for key in keys}
    state: dict[str, Any] = {}
    for key in keys:
        values = [row.state.get(key, zero) for row, zero in zip(members, zeros[key], strict=True)]
        known = [value for value in values if not isinstance(value, Tensor)]
        is_count = bool(known)
        state[key] = known[0] if is_count else torch.cat([value.flatten() for value in values])
    return Row("flat", True, torch.cat([row.master.flatten() for row in members]), state)


def half_model(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy(dict(model.state_dict()))


def torch_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return copy.deepcopy({"model": dict(model.state_dict()), "optimizer": optimizer.state_dict(), "epoch": 3})


def apex_fp16_file(model: nn.Module, optimizer: MixedPrecisionOptimizer, scaler: Any, dynamic: bool) -> dict[str, Any]:
    """Lay out what Apex's FP16_Optimizer saves: per group the fp16 parameters first, masters for those alone."""
    groups = [sorted(group, key=lambda row: not row.half) for group in trained(optimizer)]
    saved = {
        "loss_scaler": scaler,
        "dynamic_loss_scale": dynamic,
        "overflow": False,
        "first_closure_call_this_step": True,
        "optimizer_state_dict": inner_dict(optimizer, groups),
        "fp32_from_fp16": [[nn.Parameter(row.master) for row in group if row.half] for group in groups],
    }
    return {"model": half_model(model), "optimizer": saved}


def apex_amp_file(optimizer: MixedPrecisionOptimizer, *, rounded: bool, unskipped: int = TRACKER) -> dict[str, Any]:
    weights = {name: value.float() for name, value in optimizer.master_state_dict().items()}
    if rounded:
        weights = {name: value.half().float() for name, value in weights.items()}
    scalers = {f"loss_scaler{i}": {"loss_scale": S * 2**i, "unskipped": unskipped} for i in range(2)}
    inner = inner_dict(optimizer, rows(optimizer))
    return copy.deepcopy({"model": weights, "optimizer": inner, "amp": scalers})


def in_model_order(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> list[Row]:
    order = {name: index for index, (name, _) in enumerate(model.named_parameters())}
    return sorted((row for group in trained(optimizer) for row in group), key=lambda row: order[row.name])


def fairseq_file(model: nn.Module, optimizer: MixedPrecisionOptimizer, *, one_vector: bool) -> dict[str, Any]:
    line = in_model_order(model, optimizer)
    inner = inner_dict(optimizer, [[flat(line)] if one_vector else line])
    return {
        "args": None,
        "model": half_model(model),
        "optimizer_history": [{"optimizer_name": "FP16Optimizer", "num_updates": 2}],
        "last_optimizer_state": {**inner, "loss_scale": S},
    }


def deepspeed_file(
    model: nn.Module, optimizer: MixedPrecisionOptimizer, *, fused: bool, **scale: Any
) -> dict[str, Any]:
    groups = trained(optimizer)
    held = {
        "dynamic_loss_scale": True,
        "cur_scale": S,
        "cur_iter": 10,
        "last_overflow_iter": 3,
        "scale_factor": 2.0,
        "scale_window": 8,
        **scale,
    }
    if fused:
        saved = {
            **held,
            "optimizer_state_dict": inner_dict(optimizer, [[flat(group)] for group in groups]),
            "fp32_groups_flat": [flat(group).master for group in groups],
            "clip_grad": 1.0,
        }
    else:
        masters = [[row.master for row in group] for group in groups]
        saved = {**held, "optimizer_state_dict": inner_dict(optimizer, groups), "fp32_groups": masters}
    return {"module": half_model(model), "optimizer": saved, "ds_version": "0.17", "global_steps": 2}


@contextmanager
def foreign_class(module: str, name: str) -> Iterator[type]:
    """Give out a class under another tool's name, which exists only inside."""
    parts = module.split(".")
    modules = [".".join(parts[: i + 1]) for i in range(len(parts))]
    cls = type(name, (), {"__module__": module})
    try:
        for path in modules:
            sys.modules[path] = types.ModuleType(path)
        setattr(sys.modules[module], name, cls)
        yield cls
    finally:
        for path in modules:
            del sys.modules[path]


def with_attributes(cls: type, **attributes: Any) -> Any:
    scaler = cls()
    vars(scaler).update(attributes)
    return scaler


# cur_iter 9 after an overflow in iteration 3: five clean ones, so TRACKER
APEX_DYNAMIC = {"cur_scale": S, "cur_iter": 9, "last_overflow_iter": 3, "scale_factor": 2.0, "scale_window": 7}


def plain_scaler(**attributes: Any) -> Any:
    return types.SimpleNamespace(**attributes)


# -- helpers --------------------------------------------------------------------


def trained_pair(make: Factory, dtype: torch.dtype, **options: Any) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Return a run of two steps, whose hyperparameters are not those of a fresh one."""
    model, optimizer = wrapped(CPU, dtype, make, **options)
    train(model, optimizer, [0, 1])
    for index, group in enumerate(optimizer.param_groups):
        group["lr"] = 0.02 / (index + 1)
    return model, optimizer


def continues(
    reference: tuple[nn.Module, MixedPrecisionOptimizer], resumed: Any, steps: Sequence[int] = (2, 3)
) -> None:
    """Assert that two runs have the same bits now and after more steps, and that they move."""
    for step in (None, *steps):
        if step is not None:
            before = masters_of(reference[1])
            train(*reference, [step])
            train(*resumed, [step])
            assert differs(before, masters_of(reference[1]))
        assert_same(masters_of(reference[1]), masters_of(resumed[1]))
        assert_same(reference[1].inner.state_dict(), resumed[1].inner.state_dict())
        assert_same(dict(reference[0].state_dict()), dict(resumed[0].state_dict()))


def scale_of(optimizer: MixedPrecisionOptimizer) -> dict[str, Any]:
    return optimizer.state_dict()["mixedopt"]["loss_scale"]


def resumed_from(
    saved: Any, make: Factory, dtype: torch.dtype, source: str, model_state: Any = None, **options: Any
) -> tuple[nn.Module, MixedPrecisionOptimizer, Imported]:
    """Import into a fresh run, recognised and named; both must agree."""
    imported = import_state(saved)
    assert imported.source == source
    assert import_state(saved, source) == imported
    model, optimizer = wrapped(CPU, dtype, make, **options)
    if model_state is not None:
        model.load_state_dict(model_state)
    assert differs(masters_of(optimizer), masters_of(wrapped(CPU, dtype, make, **options)[1])) == (
        model_state is not None
    )
    assert imported.load_into(optimizer) == ([], [])
    return model, optimizer, imported


def refused(
    saved: Any,
    match: str,
    make: Factory = adamw,
    source: str = "auto",
    dtype: torch.dtype = torch.float16,
    **given: Any,
) -> None:
    """Assert that an import raises a ``CheckpointError`` and that nothing has changed."""
    model, optimizer = wrapped(CPU, dtype, make)
    train(model, optimizer, [4])
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=match) as caught:
        import_state(saved, source, **given).load_into(optimizer)
    assert "Nothing was loaded" in str(caught.value)
    assert_same(before, snapshot(model, optimizer))


# -- plain torch ----------------------------------------------------------------


class Net(nn.Module):
    """Two matrices and two biases, or matrices alone."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5, bias), nn.LayerNorm(5, bias=bias), nn.Linear(5, 3, bias)
        if not bias:
            self.norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)).tanh())


def halved(params: Sequence[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups, the second with a learning rate of its own."""
    params = list(params)
    return [{"params": params[:2]}, {"params": params[2:], "lr": 0.003}] if len(params) > 2 else [{"params": params}]


TORCH: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "SGD": lambda m: torch.optim.SGD(halved(m.parameters()), lr=0.1, momentum=0.9, nesterov=True),
    "SGD plain": lambda m: torch.optim.SGD(halved(m.parameters()), lr=0.1),
    "Adam": lambda m: torch.optim.Adam(halved(m.parameters()), lr=0.01, amsgrad=True, weight_decay=0.1),
    "AdamW": lambda m: torch.optim.AdamW(halved(m.parameters()), lr=0.01),
    "NAdam": lambda m: torch.optim.NAdam(halved(m.parameters()), lr=0.01),
    "RAdam": lambda m: torch.optim.RAdam(halved(m.parameters()), lr=0.01),
    "Adamax": lambda m: torch.optim.Adamax(halved(m.parameters()), lr=0.01),
    "Adadelta": lambda m: torch.optim.Adadelta(halved(m.parameters()), lr=1.0),
    "Adagrad": lambda m: torch.optim.Adagrad(halved(m.parameters()), lr=0.01, lr_decay=0.1),
    "RMSprop": lambda m: torch.optim.RMSprop(halved(m.parameters()), lr=0.01, momentum=0.9, centered=True),
    "Rprop": lambda m: torch.optim.Rprop(halved(m.parameters()), lr=0.01),
    "ASGD": lambda m: torch.optim.ASGD(halved(m.parameters()), lr=0.1, t0=1.0),
    "Adafactor": lambda m: torch.optim.Adafactor(halved(m.parameters()), lr=0.01),
    "Muon": lambda m: torch.optim.Muon(halved(m.parameters()), lr=0.01),
    "LBFGS": lambda m: torch.optim.LBFGS(list(m.parameters()), lr=0.1, max_iter=2),
}


def give_gradients(model: nn.Module, step: int, dtype: torch.dtype, scale: float, kept: torch.dtype | None) -> None:
    """Write gradients that the half format holds, times ``scale`` if the model is half."""
    generator = torch.Generator().manual_seed(step)
    for param in model.parameters():
        value = (torch.randn(param.shape, generator=generator) / 4).to(dtype).float()
        param.grad = (value * scale).to(param.dtype if kept is None else kept)


def move(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, dtype: torch.dtype) -> None:
    """Step a bare or a wrapped optimizer on the same half-rounded gradients."""
    is_wrapped = isinstance(optimizer, MixedPrecisionOptimizer)

    def closure() -> Tensor:
        optimizer.zero_grad()
        if is_wrapped:
            optimizer.scale(torch.zeros(()))
        give_gradients(model, step, dtype, optimizer.loss_scale if is_wrapped else 1.0, None)
        return torch.ones(())

    if isinstance(optimizer.inner if is_wrapped else optimizer, torch.optim.LBFGS):
        optimizer.step(closure)
    else:
        closure()
        optimizer.step()


@pytest.mark.parametrize("name", list(TORCH))
def test_every_torch_optimizer_moves_here_and_back(name: str, dtype: torch.dtype) -> None:
    """Masters and state are the fp32 run's, and so they are after more steps on the same gradients, here and back."""
    make, biased = TORCH[name], name != "Muon"

    def build() -> nn.Module:
        return seeded(lambda: Net(biased), CPU)

    plain = build()
    bare = make(plain)
    for step in range(3):
        move(plain, bare, step, dtype)
    saved = torch_file(plain, bare)

    model = build()
    optimizer = MixedPrecisionOptimizer(make(model), model, dtype=dtype, loss_scale=SMALL_SCALE)
    imported = import_state(saved)
    assert imported.source == "torch"
    assert differs(masters_of(optimizer), {n: p.detach() for n, p in plain.named_parameters()})
    imported.load_into(optimizer)
    for step in (3, 4):
        assert_same({n: p.detach() for n, p in plain.named_parameters()}, masters_of(optimizer))
        assert_same(bare.state_dict()["state"], optimizer.inner.state_dict()["state"])
        move(plain, bare, step, dtype)
        move(model, optimizer, step, dtype)
        assert name == "LBFGS" or optimizer.last_step.applied

    back = build()
    back.load_state_dict(optimizer.master_state_dict())
    again = make(back)
    again.load_state_dict(copy.deepcopy(optimizer.inner.state_dict()))
    for step in (5, 6):
        assert_same(dict(plain.named_parameters()), dict(back.named_parameters()))
        assert_same(bare.state_dict(), again.state_dict())
        move(plain, bare, step, dtype)
        move(back, again, step, dtype)


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_plain_run_with_groups_ties_and_islands_moves_here(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From a file, with a frozen layer, a tied head and a norm in fp32; hyperparameters and the count come along."""
    twin, bare = fp32_twin(CPU, MAKERS[name])
    for step in range(2):
        loss = nn.functional.cross_entropy(twin(torch.arange(6).view(2, 3)).flatten(0, 1), torch.arange(6) + step)
        bare.zero_grad()
        loss.backward()
        bare.step()
    bare.param_groups[1]["lr"] = 0.7
    torch.save(torch_file(twin, bare), tmp_path / "run.pt")
    model, optimizer, imported = resumed_from(tmp_path / "run.pt", MAKERS[name], dtype, "torch")
    weights = dict(twin.named_parameters())
    assert_same({n: weights[n].detach().clone() for n in masters_of(optimizer)}, masters_of(optimizer))
    assert_same(bare.state_dict(), optimizer.inner.state_dict())
    assert optimizer.param_groups[1]["lr"] == 0.7
    assert optimizer.applied_steps == (2 if name == "AdamW" else 0)
    assert optimizer.loss_scale == SMALL_SCALE.init_scale
    assert model.norm.weight.dtype == torch.float32
    assert imported.lost == ()


def test_a_bare_optimizer_dict_leaves_the_masters(dtype: torch.dtype) -> None:
    """There is no model in it: moments are loaded, weights are as they were, and the report says so."""
    model, optimizer = trained_pair(adamw, dtype)
    saved = copy.deepcopy(optimizer.inner.state_dict())
    imported = import_state(saved)
    fresh_model, fresh = wrapped(CPU, dtype)
    before = masters_of(fresh)
    imported.load_into(fresh)
    assert_same(before, masters_of(fresh))
    assert_same(saved, fresh.inner.state_dict())
    assert "the masters" in imported.lost[0]
    given = import_state(saved, weights={"module._orig_mod." + n: w for n, w in optimizer.master_state_dict().items()})
    given.load_into(fresh)
    continues((model, optimizer), (fresh_model, fresh), ())


def test_half_weights_are_said_to_be_rounded(dtype: torch.dtype) -> None:
    """The masters are then the half values, and the report says that low bits are lost."""
    model, optimizer = trained_pair(adamw, dtype)
    saved = {"state_dict": half_model(model), "optimizer_states": [copy.deepcopy(optimizer.inner.state_dict())]}
    imported = import_state(saved)
    _, fresh = wrapped(CPU, dtype)
    imported.load_into(fresh)
    expected = {name: dict(model.named_parameters())[name].detach().float() for name in masters_of(fresh)}
    assert_same(expected, masters_of(fresh))
    assert any("low bits" in text for text in imported.lost)


def test_parameters_are_matched_by_name_where_the_file_has_names(dtype: torch.dtype) -> None:
    """Names as ids, and in another order than ours."""
    reference = trained_pair(adamw, dtype)
    saved = torch_file(*reference) | {"optimizer": copy.deepcopy(reference[1].inner.state_dict())}
    saved["model"] = reference[1].master_state_dict()
    names = reference[1].state_dict()["mixedopt"]["names"]
    inner = saved["optimizer"]
    for group in inner["param_groups"]:
        group["params"] = [f"module.{names[i]}" for i in reversed(group["params"])]
    inner["state"] = {f"module.{names[i]}": entry for i, entry in inner["state"].items()}
    model, optimizer, _ = resumed_from(saved, adamw, dtype, "torch")
    continues(reference, (model, optimizer))
    inner["param_groups"][0]["params"][0] = "another"
    refused(saved, "differ in 'another'", dtype=dtype)


def test_an_optimizer_without_model_takes_what_needs_no_names(dtype: torch.dtype) -> None:
    """The half workflow has no names: its weights cannot be matched, unless the caller leaves them."""
    model = two_group_model(CPU).to(dtype)
    optimizer = MixedPrecisionOptimizer(adamw(two_groups(model)))
    reference = trained_pair(adamw, dtype)
    saved = {"model": reference[1].master_state_dict(), "optimizer": reference[1].inner.state_dict()}
    with pytest.raises(CheckpointError, match=r"weights=\{\}"):
        import_state(saved).load_into(optimizer)
    before = masters_of(optimizer)
    import_state(saved, weights={}).load_into(optimizer)
    assert_same(before, masters_of(optimizer))
    assert_same(reference[1].inner.state_dict()["state"], optimizer.inner.state_dict()["state"])
    keys = import_state(saved).load_into(optimizer, strict=False)
    assert len(keys.missing_keys) == len(before)


# -- torch.amp ------------------------------------------------------------------


@pytest.mark.parametrize("place", ["scaler", "grad_scaler", "scaler_state_dict", "MixedPrecision"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_a_grad_scaler_run_moves_here(name: str, place: str, dtype: torch.dtype) -> None:
    """S, its tracker and its rule come along; the masters are the fp32 model's."""
    reference = trained_pair(MAKERS[name], dtype)
    saved = {
        "model": reference[1].master_state_dict(),
        "optimizer": copy.deepcopy(reference[1].inner.state_dict()),
        place: dict(GRAD_SCALER),
    }
    model, optimizer, imported = resumed_from(saved, MAKERS[name], dtype, "torch.amp")
    held = scale_of(optimizer)
    assert held["state"] == {"scale": S, "growth_tracker": TRACKER, "hysteresis_left": 1, "floor_skips": 0}
    assert {key: held["config"][key] for key in ("growth_factor", "backoff_factor", "growth_interval")} == {
        key: GRAD_SCALER[key] for key in ("growth_factor", "backoff_factor", "growth_interval")
    }
    assert "growth tracker 5" in str(imported)
    continues(reference, (model, optimizer))


def test_a_grad_scaler_grows_at_the_same_step(dtype: torch.dtype) -> None:
    """Two more clean steps, as GradScaler itself does it."""
    scaler = torch.amp.GradScaler("cpu", init_scale=S, growth_factor=4.0, backoff_factor=0.25, growth_interval=7)
    scaler.load_state_dict(GRAD_SCALER)
    reference = trained_pair(adamw, dtype)
    saved = {"optimizer": copy.deepcopy(reference[1].inner.state_dict()), "scaler": scaler.state_dict()}
    model, optimizer, _ = resumed_from(saved, adamw, dtype, "torch.amp")
    weight = nn.Parameter(torch.ones(1))
    bare = torch.optim.SGD([weight], lr=0.0)
    for bad in (False, False, True, False):
        scaler.scale(weight.sum() * (math.inf if bad else 1.0)).backward()
        scaler.step(bare)
        scaler.update()
        bare.zero_grad()
        if bad:
            overflow(optimizer)
        else:
            train(model, optimizer, [0])
        assert optimizer.loss_scale == scaler.get_scale()


def test_a_grad_scaler_that_had_stopped_to_grow_grows_here() -> None:
    """It compares for equality; the report says that ours does not."""
    _, optimizer = trained_pair(adamw, torch.float16)
    saved = {"optimizer": optimizer.inner.state_dict(), "scaler": {**GRAD_SCALER, "_growth_tracker": 9}}
    assert any("never grows S again" in text for text in import_state(saved).lost)
    assert ours_after(saved, optimizer, [False]) == [S, 4 * S]


def test_a_disabled_grad_scaler_leaves_the_scale(dtype: torch.dtype) -> None:
    """It saves an empty dict."""
    reference = trained_pair(adamw, dtype)
    saved = {"optimizer": reference[1].inner.state_dict(), "scaler": {}}
    _, optimizer, imported = resumed_from(saved, adamw, dtype, "torch.amp")
    assert optimizer.loss_scale == SMALL_SCALE.init_scale
    assert any("disabled" in text for text in imported.found)


@pytest.mark.parametrize(
    ("scaler", "match"),
    [
        ({**GRAD_SCALER, "scale": 0.0}, "no valid loss scale"),
        ({**GRAD_SCALER, "scale": math.inf}, "'scale' is inf"),
        ({**GRAD_SCALER, "backoff_factor": -3.0}, "no valid loss scale"),
        ({**GRAD_SCALER, "growth_interval": "often"}, "'growth_interval' is 'often'"),
    ],
)
def test_a_broken_grad_scaler_is_refused(scaler: dict[str, Any], match: str) -> None:
    """Values that GradScaler accepts, and S never should have."""
    _, optimizer = trained_pair(adamw, torch.float16)
    refused({"optimizer": optimizer.inner.state_dict(), "scaler": scaler}, match)


def test_a_scale_outside_the_bounds_widens_them(dtype: torch.dtype) -> None:
    """GradScaler has none."""
    for value in (2.0**-20, 2.0**40):
        reference = trained_pair(adamw, dtype)
        saved = {"optimizer": reference[1].inner.state_dict(), "scaler": {**GRAD_SCALER, "scale": value}}
        _, optimizer, _ = resumed_from(saved, adamw, dtype, "torch.amp")
        assert optimizer.loss_scale == value
        bounds = scale_of(optimizer)["config"]
        assert bounds["min_scale"] <= value <= bounds["max_scale"]


def test_a_scale_of_the_other_kind_stays_and_warns(dtype: torch.dtype, caplog: pytest.LogCaptureFixture) -> None:
    """All else is loaded."""
    reference = trained_pair(adamw, dtype)
    saved = {"optimizer": copy.deepcopy(reference[1].inner.state_dict()), "scaler": dict(GRAD_SCALER)}
    _, optimizer = wrapped(CPU, dtype, loss_scale=StaticLossScale(16.0))
    with caplog.at_level(logging.WARNING, "mixedopt"):
        import_state(saved).load_into(optimizer)
    assert optimizer.loss_scale == 16.0
    assert_same(reference[1].inner.state_dict(), optimizer.inner.state_dict())
    assert [("static" in record.message, record.levelname) for record in caplog.records] == [(True, "WARNING")]


# -- Apex -----------------------------------------------------------------------


@pytest.mark.parametrize("zipped", [True, False], ids=["zip", "of its time"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_an_apex_fp16_optimizer_file_moves_here(name: str, zipped: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """With its scaler pickled: masters of the fp16 parameters from it, of the fp32 ones from the model."""
    reference = trained_pair(MAKERS[name], dtype)
    with foreign_class("apex.fp16_utils.loss_scaler", "DynamicLossScaler") as cls:
        saved = apex_fp16_file(*reference, with_attributes(cls, **APEX_DYNAMIC), dynamic=True)
        torch.save(saved, tmp_path / "apex.pt", _use_new_zipfile_serialization=zipped)
    assert "apex" not in sys.modules
    model, optimizer, imported = resumed_from(tmp_path / "apex.pt", MAKERS[name], dtype, "apex.fp16_optimizer")
    assert "apex" not in sys.modules
    held = scale_of(optimizer)
    assert held["state"] == {"scale": S, "growth_tracker": TRACKER, "hysteresis_left": 1, "floor_skips": 0}
    assert held["config"]["growth_interval"] == 7
    assert (held["config"]["min_scale"], held["config"]["max_scale"]) == (1.0, math.inf)
    assert imported.lost == ()
    continues(reference, (model, optimizer))


@pytest.mark.parametrize("name", list(MAKERS))
def test_a_later_apex_fp16_optimizer_file_moves_here(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """From 2019 on: masters stand in the places of their parameters, frozen ones too, and the scaler is amp's."""
    reference = trained_pair(MAKERS[name], dtype)
    model, source = reference
    saved = apex_fp16_file(model, source, None, dynamic=True)
    saved["optimizer"]["optimizer_state_dict"] = inner_dict(source, rows(source))
    halves = [[row for row in group if row.half and row.master is not None] for group in rows(source)]
    saved["optimizer"]["fp32_from_fp16"] = [[nn.Parameter(row.master) for row in group] for group in halves]
    attributes = {
        "dynamic": True, "_loss_scale": S, "_unskipped": TRACKER, "_scale_seq_len": 7, "_max_loss_scale": 2.0**24,
        "_min_loss_scale": None, "_has_overflow": False,
    }  # fmt: skip
    with foreign_class("apex.amp.scaler", "LossScaler") as cls:
        saved["optimizer"]["loss_scaler"] = with_attributes(cls, **attributes)
        torch.save(saved, tmp_path / "apex.pt")
    fresh, optimizer, imported = resumed_from(tmp_path / "apex.pt", MAKERS[name], dtype, "apex.fp16_optimizer")
    held = scale_of(optimizer)
    assert held["state"] == {"scale": S, "growth_tracker": TRACKER, "hysteresis_left": 1, "floor_skips": 0}
    assert (held["config"]["growth_interval"], held["config"]["max_scale"]) == (7, 2.0**24)
    assert imported.lost == ()
    continues(reference, (fresh, optimizer))


def test_apex_fp32_parameters_without_a_model_stay(dtype: torch.dtype) -> None:
    """The file has no masters of them; the report says so. The half workflow needs no names for the rest."""
    model, optimizer = trained_pair(adamw, dtype)
    saved = apex_fp16_file(model, optimizer, plain_scaler(**APEX_DYNAMIC), dynamic=True)["optimizer"]
    imported = import_state(saved)
    _, fresh = wrapped(CPU, dtype)
    before = masters_of(fresh)
    imported.load_into(fresh)
    after, ours = masters_of(fresh), masters_of(optimizer)
    halves = {row.name for group in rows(optimizer) for row in group if row.half}
    for name in after:
        assert_same((ours if name in halves else before)[name], after[name])
    assert any("fp32 parameters" in text for text in imported.lost)


def test_an_apex_static_scale_moves_here(dtype: torch.dtype) -> None:
    """To a static one; a dynamic one keeps its own."""
    reference = trained_pair(adamw, dtype)
    saved = apex_fp16_file(*reference, plain_scaler(cur_scale=64), dynamic=False)
    _, optimizer, _ = resumed_from(saved, adamw, dtype, "apex.fp16_optimizer", loss_scale=8.0)
    assert optimizer.loss_scale == 64.0
    _, optimizer, _ = resumed_from(saved, adamw, dtype, "apex.fp16_optimizer")
    assert optimizer.loss_scale == SMALL_SCALE.init_scale


def test_another_division_into_half_and_fp32_is_refused(dtype: torch.dtype) -> None:
    """A run whose norm was half has more masters than this one has half parameters."""
    reference = trained_pair(adamw, dtype)
    saved = apex_fp16_file(*reference, plain_scaler(**APEX_DYNAMIC), dynamic=True)
    masters = saved["optimizer"]["fp32_from_fp16"]
    masters[1] = masters[1][:-1]
    refused(saved, "masters of fp16 parameters", dtype=dtype)
    saved["optimizer"]["fp32_from_fp16"] = "masters"
    refused(saved, "'fp32_from_fp16' does not hold tensors", dtype=dtype)


def test_the_files_own_dtypes_tell_the_halves_if_ours_differ(dtype: torch.dtype) -> None:
    """The norm is half here, and was fp32 there."""
    reference = trained_pair(adamw, dtype)
    saved = apex_fp16_file(*reference, plain_scaler(**APEX_DYNAMIC), dynamic=True)
    model, optimizer = wrapped(CPU, dtype, policy=None)
    model = two_group_model(CPU)
    optimizer = MixedPrecisionOptimizer(adamw(two_groups(model)), model, dtype=dtype, policy=FP32)
    import_state(saved).load_into(optimizer)
    assert_same(masters_of(reference[1]), masters_of(optimizer))


def apex_rule(scaler: dict[str, Any], bad: bool) -> None:
    """Move Apex's dynamic scale by one iteration."""
    if bad:
        scaler["cur_scale"] = max(scaler["cur_scale"] / scaler["scale_factor"], 1)
        scaler["last_overflow_iter"] = scaler["cur_iter"]
    elif (scaler["cur_iter"] - scaler["last_overflow_iter"]) % scaler["scale_window"] == 0:
        scaler["cur_scale"] *= scaler["scale_factor"]
    scaler["cur_iter"] += 1


def deepspeed_rule(scaler: dict[str, Any], bad: bool) -> None:
    """Move DeepSpeed's dynamic scale by one iteration."""
    ahead = scaler["cur_iter"] - scaler["last_overflow_iter"] - 1
    if bad:
        scaler["cur_scale"] = max(scaler["cur_scale"] / scaler["scale_factor"], 1)
        scaler["last_overflow_iter"] = scaler["cur_iter"]
    elif ahead > 0 and ahead % scaler["scale_window"] == 0:
        scaler["cur_scale"] *= scaler["scale_factor"]
    scaler["cur_iter"] += 1


def ours_after(saved: Any, optimizer: MixedPrecisionOptimizer, script: Sequence[bool]) -> list[float]:
    """Return S before each step of a script, by our rule, from the imported state."""
    held = import_state(saved).state_dict(optimizer)["mixedopt"]["loss_scale"]
    config, state = state_from_dict(dict(held), DynamicLossScale(), CPU)
    seen = []
    for bad in script:
        seen.append(float(state.scale))
        state = update(config, state, torch.tensor(bad))
    return [*seen, float(state.scale)]


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_an_apex_scale_moves_as_there_whatever_comes(window: int) -> None:
    """After any history, for overflows and clean steps in any order, S is Apex's in every step."""
    reference = trained_pair(adamw, torch.float16)
    fresh = wrapped(CPU, torch.float16)[1]
    generator = torch.Generator().manual_seed(window)
    saved = apex_fp16_file(*reference, None, dynamic=True)
    for length in range(12):
        scaler = {
            "cur_scale": 8.0,
            "cur_iter": 0,
            "last_overflow_iter": -1,
            "scale_factor": 2.0,
            "scale_window": window,
        }
        for bad in (torch.rand(length, generator=generator) < 0.3).tolist():
            apex_rule(scaler, bad)
        saved["optimizer"]["loss_scaler"] = plain_scaler(**scaler)
        script = (torch.rand(20, generator=generator) < 0.3).tolist()
        ours, theirs = ours_after(saved, fresh, script), [float(scaler["cur_scale"])]
        for bad in script:
            apex_rule(scaler, bad)
            theirs.append(float(scaler["cur_scale"]))
        assert theirs == ours


@pytest.mark.parametrize("rounded", [True, False], ids=["O2", "O1"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_an_apex_amp_file_moves_here(name: str, rounded: bool, dtype: torch.dtype) -> None:
    """The scale counts on; O1 has the masters' bits, and of O2 the report says that they are lost."""
    reference = trained_pair(MAKERS[name], dtype)
    saved = apex_amp_file(reference[1], rounded=rounded)
    model, optimizer, imported = resumed_from(saved, MAKERS[name], dtype, "apex.amp")
    assert any("O2" in text for text in imported.lost) == rounded
    assert any("more losses" in text for text in imported.lost)
    held = scale_of(optimizer)
    assert held["state"] == {"scale": S, "growth_tracker": TRACKER, "hysteresis_left": 1, "floor_skips": 0}
    assert (held["config"]["growth_interval"], held["config"]["max_scale"]) == (2000, 2.0**24)
    if rounded:
        rounding = {name: value.half().float() for name, value in masters_of(reference[1]).items()}
        assert_same(rounding, masters_of(optimizer))
        assert_same(reference[1].inner.state_dict(), optimizer.inner.state_dict())
        given = import_state(saved, weights=reference[1].master_state_dict())
        assert not any("O2" in text for text in given.lost)
        given.load_into(optimizer)
        continues(reference, (model, optimizer))
    else:
        continues(reference, (model, optimizer))


def test_an_apex_amp_scale_follows_the_kind_that_is_here() -> None:
    """The file does not tell which it was, unless it has been clean for too long to be dynamic."""
    _, optimizer = trained_pair(adamw, torch.float16)
    saved = apex_amp_file(optimizer, rounded=False)
    assert resumed_from(saved, adamw, torch.float16, "apex.amp", loss_scale=2.0)[1].loss_scale == S
    high = DynamicLossScale(init_scale=2.0**30)  # above amp's ceiling, which comes along
    assert resumed_from(saved, adamw, torch.float16, "apex.amp", loss_scale=high)[1].loss_scale == S
    long = apex_amp_file(optimizer, rounded=False, unskipped=2000)
    assert resumed_from(long, adamw, torch.float16, "apex.amp", loss_scale=2.0)[1].loss_scale == S
    own = DynamicLossScale(init_scale=4.0)
    assert resumed_from(long, adamw, torch.float16, "apex.amp", loss_scale=own)[1].loss_scale == 4.0


def test_fused_adam_counts_once_for_a_group(dtype: torch.dtype) -> None:
    """Its count becomes that of every parameter with state; what else it has in its groups is left with a word."""
    reference = trained_pair(adamw, dtype)
    saved = apex_amp_file(reference[1], rounded=False)
    for entry in saved["optimizer"]["state"].values():
        assert entry.pop("step") == 2
    for group in saved["optimizer"]["param_groups"]:
        for key in ("amsgrad", "maximize", "decoupled_weight_decay"):
            del group[key]
        group |= {"step": 2, "bias_correction": True}
    model, optimizer, _ = resumed_from(saved, adamw, dtype, "apex.amp")
    assert optimizer.applied_steps == 2
    continues(reference, (model, optimizer))


# -- fairseq --------------------------------------------------------------------


@pytest.mark.parametrize("one_vector", [True, False], ids=["flat", "memory efficient"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_a_fairseq_file_moves_here(
    name: str, one_vector: bool, dtype: torch.dtype, caplog: pytest.LogCaptureFixture
) -> None:
    """Its parameters are in the model's order, ours in that of two groups; masters are the half weights."""
    reference = trained_pair(MAKERS[name], dtype)
    saved = fairseq_file(*reference, one_vector=one_vector)
    with caplog.at_level(logging.WARNING, "mixedopt"):
        _, optimizer, imported = resumed_from(saved, MAKERS[name], dtype, "fairseq")
    assert "hyperparameters were not taken" in caplog.text  # one group there, two here
    assert optimizer.loss_scale == S
    assert scale_of(optimizer)["state"]["growth_tracker"] == 0
    rounding = {name: value.to(dtype).float() for name, value in masters_of(reference[1]).items()}
    island = ("norm.weight", "norm.bias")
    assert_same(
        {n: v for n, v in rounding.items() if n not in island},
        {n: v for n, v in masters_of(optimizer).items() if n not in island},
    )
    ours, theirs = optimizer.inner.state_dict()["state"], reference[1].inner.state_dict()["state"]
    for position, entry in theirs.items():
        assert_same(dict(entry), dict(ours[position]))
    for position in set(ours) - set(theirs):  # a flat vector has moments of what had no gradient, too: zeros
        assert one_vector
        assert not any(value.any() for key, value in ours[position].items() if key != "step")
    assert any("growth tracker" in text for text in imported.lost)
    assert any("low bits" in text for text in imported.lost)


def test_a_fairseq_run_in_one_group_goes_on_as_there(dtype: torch.dtype) -> None:
    """With given fp32 weights nothing is lost, and the flat state is the run's own, bit for bit."""

    def one_group(params: Any) -> torch.optim.Optimizer:
        flat_list = [p for group in params for p in group["params"] if p.requires_grad]
        return torch.optim.AdamW(flat_list, lr=0.01, betas=(0.8, 0.9))

    model, optimizer = wrapped(CPU, dtype, one_group, policy=None)
    for step in range(2):
        optimizer.zero_grad()
        optimizer.backward(
            nn.functional.cross_entropy(model(torch.arange(6).view(2, 3), True).flatten(0, 1), torch.arange(6) + step)
        )
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.5
    saved = fairseq_file(model, optimizer, one_vector=True)
    fresh_model, fresh = wrapped(CPU, dtype, one_group, policy=None)
    bare = saved["last_optimizer_state"]
    weights = optimizer.master_state_dict()
    import_state(saved, weights=weights).load_into(fresh)
    assert fresh.param_groups[0]["lr"] == 0.5
    continues((model, optimizer), (fresh_model, fresh))
    assert import_state(bare).source == "fairseq"


def test_a_flat_vector_of_another_size_is_refused(dtype: torch.dtype) -> None:
    """The message has both numbers."""
    reference = trained_pair(adamw, dtype)
    saved = fairseq_file(*reference, one_vector=True)
    entry = saved["last_optimizer_state"]["state"][0]
    size = entry["exp_avg"].numel()
    entry["exp_avg"] = entry["exp_avg"][:-1]
    refused(saved, f"with {size - 1} values, and the .* have {size}", dtype=dtype)
    saved = fairseq_file(*reference, one_vector=False)
    saved["last_optimizer_state"]["param_groups"][0]["params"].pop()
    refused(saved, "has 7 parameters, here 8", dtype=dtype)
    saved["last_optimizer_state"] = None
    refused(saved, "expected 'last_optimizer_state'", source="fairseq")


def test_scaled_fp16_moments_of_fairseq_are_refused() -> None:
    """Without their factors they are other numbers."""
    saved = fairseq_file(*trained_pair(adamw, torch.float16), one_vector=True)
    entry = saved["last_optimizer_state"]["state"][0]
    entry |= {"exp_avg": entry["exp_avg"].half(), "exp_avg_scale": 3.0}
    refused(saved, "fp16-adam-stats")


# -- DeepSpeed ------------------------------------------------------------------


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@pytest.mark.parametrize("name", list(MAKERS))
def test_a_deepspeed_file_moves_here(name: str, fused: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    """Masters, moments, hyperparameters and S, bit for bit, and so are the next steps."""
    reference = trained_pair(MAKERS[name], dtype)
    torch.save(deepspeed_file(*reference, fused=fused), tmp_path / "mp_rank_00_model_states.pt")
    path = tmp_path / "mp_rank_00_model_states.pt"
    _, optimizer, imported = resumed_from(path, MAKERS[name], dtype, "deepspeed")
    assert_same(masters_of(reference[1]), masters_of(optimizer))
    assert [g["lr"] for g in optimizer.param_groups] == [g["lr"] for g in reference[1].param_groups]
    ours, theirs = optimizer.inner.state_dict()["state"], reference[1].inner.state_dict()["state"]
    for position, entry in theirs.items():
        assert_same(dict(entry), dict(ours[position]))
    assert set(ours) == set(theirs) or fused
    held = scale_of(optimizer)
    assert (held["state"]["scale"], held["state"]["growth_tracker"], held["config"]["growth_interval"]) == (S, 5, 8)
    assert any("max_grad_norm=1.0" in text for text in imported.lost) == fused


def test_a_deepspeed_run_without_idle_parameters_goes_on_as_there(dtype: torch.dtype) -> None:
    """Where every parameter has had a gradient, flat and shaped state are the same numbers."""

    def used(params: Any) -> torch.optim.Optimizer:
        groups = [{**g, "params": [p for p in g["params"] if p.requires_grad]} for g in params]
        return torch.optim.AdamW(groups, lr=0.01)

    model, optimizer = wrapped(CPU, dtype, used)
    for step in range(2):
        optimizer.zero_grad()
        logits = model(torch.arange(6).view(2, 3), True).flatten(0, 1)
        optimizer.backward(nn.functional.cross_entropy(logits, torch.arange(6) + step))
        optimizer.step()
    fresh = wrapped(CPU, dtype, used)
    imported = import_state(deepspeed_file(model, optimizer, fused=True))
    imported.load_into(fresh[1])
    continues((model, optimizer), fresh)


@pytest.mark.parametrize("window", [1, 2, 3, 5])
def test_a_deepspeed_scale_grows_at_the_same_step(window: int) -> None:
    """As long as no overflow comes; right after one it grows a step early, as the report says."""
    reference = trained_pair(adamw, torch.float16)
    fresh = wrapped(CPU, torch.float16)[1]
    generator = torch.Generator().manual_seed(window)
    saved = deepspeed_file(*reference, fused=True)
    for length in range(12):
        scaler = {
            "cur_scale": 8.0,
            "cur_iter": 0,
            "last_overflow_iter": -1,
            "scale_factor": 2.0,
            "scale_window": window,
        }
        for bad in (torch.rand(length, generator=generator) < 0.3).tolist():
            deepspeed_rule(scaler, bad)
        saved["optimizer"] |= scaler
        fresh_series = scaler["cur_iter"] - scaler["last_overflow_iter"] == 1
        lost = " ".join(import_state(saved).lost)
        assert ("here, now and" in lost) == fresh_series
        ours, theirs = ours_after(saved, fresh, [False] * 12), [float(scaler["cur_scale"])]
        for _ in range(12):
            deepspeed_rule(scaler, False)
            theirs.append(float(scaler["cur_scale"]))
        assert ours == ([*theirs[1:], ours[-1]] if fresh_series else theirs)


def test_deepspeed_hysteresis_that_is_left_is_kept() -> None:
    """Two more overflows are tolerated before S backs off, as there."""
    reference = trained_pair(adamw, torch.float16)
    saved = deepspeed_file(*reference, fused=True, cur_hysteresis=3)
    fresh = wrapped(CPU, torch.float16)[1]
    assert ours_after(saved, fresh, [True] * 4) == [S, S, S, S / 2, S / 4]


def test_a_static_or_absent_deepspeed_scale(dtype: torch.dtype) -> None:
    """A bf16 run has none."""
    reference = trained_pair(adamw, dtype)
    saved = deepspeed_file(*reference, fused=True, dynamic_loss_scale=False, cur_scale=32)
    assert resumed_from(saved, adamw, dtype, "deepspeed", loss_scale=4.0)[1].loss_scale == 32.0
    for key in ("cur_scale", "dynamic_loss_scale", "cur_iter"):
        del saved["optimizer"][key]
    assert resumed_from(saved, adamw, dtype, "deepspeed", loss_scale=4.0)[1].loss_scale == 4.0


def test_deepspeed_sizes_that_do_not_add_up_are_refused(dtype: torch.dtype) -> None:
    """Both numbers are named, of vectors and of lists."""
    reference = trained_pair(adamw, dtype)
    saved = deepspeed_file(*reference, fused=True)
    masters = saved["optimizer"]["fp32_groups_flat"]
    size = masters[0].numel()
    masters[0] = torch.cat([masters[0], torch.zeros(3)])
    refused(saved, f"with {size + 3} values, and the .* have {size}", dtype=dtype)
    saved = deepspeed_file(*reference, fused=False)
    saved["optimizer"]["fp32_groups"][1].pop()
    refused(saved, "has 4 masters in group 1, here 5", dtype=dtype)
    saved["optimizer"]["fp32_groups"].pop()
    refused(saved, "has 1 groups of masters, here 2", dtype=dtype)


# -- what is refused ------------------------------------------------------------


def plain_file() -> dict[str, Any]:
    _, optimizer = trained_pair(adamw, torch.float16)
    return {"model": optimizer.master_state_dict(), "optimizer": copy.deepcopy(optimizer.inner.state_dict())}


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("torch.amp", "a GradScaler's _growth_tracker"),
        ("apex.fp16_optimizer", "'fp32_from_fp16'"),
        ("apex.amp", "amp.state_dict"),
        ("fairseq", "'last_optimizer_state'"),
        ("deepspeed", "'fp32_groups_flat'"),
    ],
)
def test_a_wrong_source_says_what_it_expected_and_found(source: str, expected: str) -> None:
    """Both lists of keys are in the message."""
    refused(
        plain_file(), f"expected .*{expected}.*the keys are 'model', 'optimizer'; under 'opt.*'state'", source=source
    )
    refused({"weights": {}}, "expected .*the keys are 'weights'", source="torch")
    with pytest.raises(ValueError, match="source='megatron'"):
        import_state(plain_file(), "megatron")


@pytest.mark.parametrize(
    ("saved", "match"),
    [
        ({}, "the keys are none"),
        ([1, 2], "a list is no checkpoint"),
        (None, "a NoneType is no checkpoint"),
        (7, "a int is no checkpoint"),
        ({"state": 3, "param_groups": []}, "not one of torch's"),
        ({"state": {}, "param_groups": 3}, "'param_groups' is not a list"),
        ({"state": {}, "param_groups": [{"lr": 1}]}, "'param_groups' is not a list"),
        ({"state": {}, "param_groups": [{"params": [0, 0]}]}, "each once"),
        ({"state": {}, "param_groups": [{"params": [(0,)]}]}, "numbers or names"),
        ({"state": {0: 3}, "param_groups": [{"params": [0]}]}, "not a dict of dicts"),
        ({"state": {0: {"step": "two"}}, "param_groups": [{"params": [0]}]}, "'step' is 'two'"),
        ({"state": {}, "param_groups": []}, "0 parameter groups, here 2"),
        ({"fp32_from_fp16": [], "optimizer_state_dict": {}, "loss_scaler": 3}, "a int, no scaler"),
        ({"fp32_groups": [3], "optimizer_state_dict": {}}, "does not hold tensors"),
    ],
)
def test_garbage_is_refused(saved: Any, match: str) -> None:
    """As a ``CheckpointError``, with everything as it was."""
    refused(saved, match)


def damaged(change: Damage) -> dict[str, Any]:
    saved = plain_file()
    change(saved)
    return saved


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda s: s["optimizer"]["param_groups"][1]["params"].pop(), "5 parameters in group 1, here 6"),
        (lambda s: s["optimizer"]["param_groups"].pop(), "1 parameter groups, here 2"),
        (lambda s: s["optimizer"]["param_groups"][0].pop("betas"), "no 'betas', which AdamW needs"),
        (lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)), "'exp_avg' for 'embedding.weight'"),
        (lambda s: s["optimizer"]["state"][0].pop("exp_avg_sq"), "no 'exp_avg_sq'"),
        (lambda s: s["model"].pop("hidden.bias"), "have no 'hidden.bias'"),
        (lambda s: s["model"].update({"hidden.bias": torch.zeros(2)}), "'hidden.bias' is of .*shape"),
        (lambda s: s["model"].update({"hidden.bias": torch.zeros(8, dtype=torch.int)}), "torch.int32"),
        (lambda s: s["model"].update({"hidden.bias": torch.full((8,), 1e6)}), "not finite in torch.float16"),
        (lambda s: s.update(other=s["optimizer"]), "several optimizers, under 'optimizer', 'other'"),
    ],
)
def test_what_does_not_fit_is_refused(change: Damage, match: str) -> None:
    """Before the first write."""
    refused(damaged(change), match)


def test_another_kind_of_optimizer_is_refused() -> None:
    """SGD has no betas, and Adam no momentum."""
    for make, other in ((adamw, momentum), (momentum, adamw)):
        _, optimizer = trained_pair(make, torch.float16)
        refused(optimizer.inner.state_dict(), "another kind of optimizer", make=other)


@pytest.mark.parametrize(
    ("saved", "tool"),
    [
        ({"optimizer_state_dict": {"zero_stage": 2, "partition_count": [2]}, "ds_version": "0.9"}, "ZeRO"),
        ({"optimizer_state_dict": {"single_partition_of_fp32_groups": []}}, "ZeRO"),
        ({"zero_stage": 3, "fp32_flat_groups": []}, "ZeRO"),
        ({"module": {}, "optimizer": None, "ds_version": "0.9"}, "ZeRO"),
        ({"iteration": 5, "checkpoint_version": 3.0, "model": {}}, "Megatron"),
        ({"optimizer": {"optimizer": {"state": {}, "param_groups": []}, "fp32_from_fp16_params": []}}, "Megatron"),
        ({"model": {"decoder.flat_param_0": torch.zeros(3)}, "shard_metadata": {}}, "FSDP"),
        ({"optimizer": {"state": {"layer._flat_param": {}}, "param_groups": []}}, "FSDP"),
        ({"state": {0: {"exp_avg": type("ShardedTensor", (), {})()}}, "param_groups": []}, "FSDP"),
    ],
)
def test_partitioned_checkpoints_are_refused_by_name(saved: dict[str, Any], tool: str) -> None:
    """With what to do first."""
    refused(saved, f"{tool}.*Consolidate it")


def test_a_scaler_that_is_none_is_lost_aloud() -> None:
    """Its keys are not those of a GradScaler."""
    scaler = torch.amp.GradScaler("cpu").state_dict()
    del scaler["growth_factor"]
    bare = torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1)
    imported = import_state({"optimizer": bare.state_dict(), "scaler": scaler})
    assert any("'scaler'" in text for text in imported.lost)


@pytest.mark.parametrize("within", ["alone", "in a dict", "in a file"])
def test_our_own_state_dict_is_sent_home(within: str, tmp_path: Path) -> None:
    """It needs no import, which would lose the masters and S."""
    _, optimizer = trained_pair(adamw, torch.float16)
    given: Any = optimizer.state_dict()
    if within == "in a dict":
        given = {"model": {}, "optimizer": given}
    elif within == "in a file":
        save(tmp_path / "run.pt", optimizer=optimizer)
        given = tmp_path / "run.pt"
    with pytest.raises(CheckpointError, match=r"own checkpoint\. .* checkpoint\.load\(path\)"):
        import_state(given)


@pytest.mark.parametrize("kind", ["cut short", "empty", "text", "folder"])
def test_a_file_that_is_none_says_so(kind: str, tmp_path: Path) -> None:
    """Without advice to run its code."""
    path = tmp_path / "file"
    torch.save({"model": torch.zeros(5000)}, path)
    if kind == "folder":
        path.unlink()
        path.mkdir()
    else:
        content = path.read_bytes()
        path.write_bytes({"cut short": content[:9000], "empty": b"", "text": b"hello"}[kind])
    with pytest.raises(CheckpointError) as caught:
        import_state(path)
    assert "weights_only=False" not in str(caught.value)
    with pytest.raises(FileNotFoundError):
        import_state(tmp_path / "none")


def test_the_target_must_be_a_wrapper() -> None:
    """A plain optimizer loads a plain dict by itself."""
    saved = plain_file()
    _, bare = fp32_twin(CPU, adamw)
    with pytest.raises(TypeError, match="Wrap it first"):
        import_state(saved).load_into(bare)
    with pytest.raises(TypeError, match="weights=a list"):
        import_state(saved, weights=[])


def test_unknown_hyperparameters_are_named(caplog: pytest.LogCaptureFixture) -> None:
    """What a scheduler has put there is taken; how the step runs stays our own."""
    saved = plain_file()
    for group in saved["optimizer"]["param_groups"]:
        group |= {"adaptive_adam": True, "initial_lr": 0.5, "foreach": True}
    _, optimizer = wrapped(CPU, torch.float16)
    with caplog.at_level(logging.WARNING, "mixedopt"):
        import_state(saved).load_into(optimizer)
    assert [record.message for record in caplog.records] == [
        "import from torch: hyperparameters that AdamW does not know were not taken: 'adaptive_adam'"
    ]
    assert optimizer.param_groups[0]["initial_lr"] == 0.5
    assert optimizer.inner.param_groups[0]["foreach"] is None


def test_unknown_state_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """It may be a sign of another kind of optimizer with the same hyperparameters."""
    saved = plain_file()
    saved["optimizer"]["state"][0]["mu_product"] = torch.tensor(0.5)
    saved["optimizer"]["state"][0]["max_exp_avg_sq"] = torch.zeros(12, 8)
    with caplog.at_level(logging.WARNING, "mixedopt"):
        import_state(saved).load_into(wrapped(CPU, torch.float16)[1])
    assert [record.message for record in caplog.records] == [
        "import from torch: state that a step of AdamW does not make is kept: 'mu_product'"
    ]


def test_nothing_is_shared_with_the_file() -> None:
    """Stepping afterwards leaves the loaded objects alone, and reading leaves them, too."""
    model, optimizer = trained_pair(adamw, torch.float16)
    for saved in (
        plain_file(),
        deepspeed_file(model, optimizer, fused=True),
        fairseq_file(model, optimizer, one_vector=True),
    ):
        before = copy.deepcopy(saved)
        fresh_model, fresh = wrapped(CPU, torch.float16)
        import_state(saved).load_into(fresh)
        train(fresh_model, fresh, [5])
        assert_same(before, saved)


def test_the_state_dict_of_an_import_is_one_of_ours(dtype: torch.dtype, tmp_path: Path) -> None:
    """It goes through a file and into another optimizer, without the importer."""
    reference = trained_pair(adamw, dtype)
    imported = import_state(deepspeed_file(*reference, fused=False))
    _, fresh = wrapped(CPU, dtype)
    before = snapshot(None, fresh)
    torch.save(imported.state_dict(fresh), tmp_path / "ours.pt")
    assert_same(before, snapshot(None, fresh))
    model, optimizer = wrapped(CPU, dtype)
    optimizer.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    continues(reference, (model, optimizer))
    text = imported.state_dict(fresh)["param_groups"][0]["mixedopt"]
    assert json.loads(text)["applied_steps"] == 2


def test_pieces_of_a_flat_vector_are_not_views_of_it() -> None:
    """Else a saved state dict would hold the whole vector for every parameter."""
    reference = trained_pair(adamw, torch.float16)
    fresh = wrapped(CPU, torch.float16)[1]
    made = import_state(deepspeed_file(*reference, fused=True)).state_dict(fresh)
    for entry in made["state"].values():
        for value in entry.values():
            assert value.untyped_storage().nbytes() == value.numel() * value.element_size() or value is entry["master"]


class Counter(torch.optim.Optimizer):
    """Counts in ints, as optimizers of other authors do, and keeps something beside its parameters' state."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    entry = self.state[param]
                    entry["step"] = entry.get("step", 0) + 1
                    param.sub_(param.grad, alpha=group["lr"] / entry["step"])
        self.state["shared"] = {"seen": 3}


@pytest.mark.parametrize("stepped", [True, False])
def test_a_count_takes_the_form_that_the_optimizer_keeps(stepped: bool) -> None:
    """A tensor for torch's own, an int for another; what it shares between parameters comes along."""
    _, optimizer = trained_pair(adamw, torch.float16)
    saved = apex_amp_file(optimizer, rounded=False)
    model, fresh = wrapped(CPU, torch.float16)
    if stepped:
        train(model, fresh, [0])
    made = import_state(saved).state_dict(fresh)["state"][0]
    assert_same({"step": torch.tensor(2.0)}, {"step": made["step"]})

    reference, fresh = wrapped(CPU, torch.float16, Counter), wrapped(CPU, torch.float16, Counter)
    train(*reference, [0, 1])
    if stepped:
        train(*fresh, [0])
    saved = {"model": reference[1].master_state_dict(), "optimizer": copy.deepcopy(reference[1].inner.state_dict())}
    for key, entry in saved["optimizer"]["state"].items():
        if key != "shared":
            entry["step"] = torch.tensor(2.0)
    import_state(saved).load_into(fresh[1])
    continues(reference, fresh)
    assert type(fresh[1].inner.state_dict()["state"][0]["step"]) is int
    assert fresh[1].inner.state["shared"] == {"seen": 3}


def test_an_import_inside_a_window_is_refused() -> None:
    """It would lose the window's gradients."""
    imported = import_state(plain_file())
    model, optimizer = wrapped(CPU, torch.float16)
    optimizer.backward(loss_of(model, 0))
    before = snapshot(model, optimizer)
    with pytest.raises(StepOrderError, match="inside a window"):
        imported.load_into(optimizer)
    assert_same(before, snapshot(model, optimizer))


def test_the_report_is_short_and_readable() -> None:
    """A line for each thing found and each thing lost."""
    text = str(import_state({"optimizer": plain_file()["optimizer"], "scaler": dict(GRAD_SCALER)}))
    assert text.splitlines() == [
        "a checkpoint of torch.amp",
        "  found: 10 entries of state in 2 groups: exp_avg, exp_avg_sq, step",
        "  found: step 2: applied_steps are 2, skipped_steps 0",
        "  found: a dynamic loss scale of 128, growth tracker 5",
        "  lost: that S had no bounds: the optimizer's own min_scale and max_scale stay, widened to hold S",
        "  lost: the masters, as there are no model weights: they stay as the optimizer has them",
    ]


JUNK = (
    None,
    [],
    {},
    "x",
    3,
    -1,
    1.5,
    math.inf,
    torch.zeros(()),
    torch.zeros(3),
    torch.zeros(2, 2),
    object(),
    True,
    2**80,
)


def places_in(value: Any) -> list[tuple[Any, Any]]:
    """Return every container in a file with every key of it."""
    if isinstance(value, types.SimpleNamespace):
        value = vars(value)
    keys = list(value) if isinstance(value, dict) else list(range(len(value))) if isinstance(value, list) else []
    return [(value, key) for key in keys] + [place for key in keys for place in places_in(value[key])]


@pytest.mark.parametrize("tool", ["torch.amp", "apex.fp16_optimizer", "apex.amp", "fairseq", "deepspeed"])
def test_no_damage_to_a_file_gets_half_way(tool: str) -> None:
    """Anything anywhere in it is taken or refused; if refused, by our error, and nothing has changed."""
    reference = trained_pair(adamw, torch.float16)
    whole = {
        "torch.amp": lambda: plain_file() | {"scaler": dict(GRAD_SCALER)},
        "apex.fp16_optimizer": lambda: apex_fp16_file(*reference, plain_scaler(**APEX_DYNAMIC), dynamic=True),
        "apex.amp": lambda: apex_amp_file(reference[1], rounded=False),
        "fairseq": lambda: fairseq_file(*reference, one_vector=True),
        "deepspeed": lambda: deepspeed_file(*reference, fused=True),
    }[tool]()
    chance = random.Random(tool)
    model, optimizer = wrapped(CPU, torch.float16)
    before, refusals = snapshot(model, optimizer), 0
    for _ in range(60):
        saved = copy.deepcopy(whole)
        container, key = chance.choice(places_in(saved))
        container[key] = chance.choice(JUNK)
        try:
            import_state(saved).load_into(optimizer)
        except CheckpointError:
            refusals += 1
            assert_same(before, snapshot(model, optimizer), f"{key!r} = {container[key]!r}")
        else:
            model, optimizer = wrapped(CPU, torch.float16)
            before = snapshot(model, optimizer)
    assert 15 < refusals < 60


# -- files that would run code ---------------------------------------------------


class Canary:
    """Writes a file when it is unpickled by a trusting reader."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_no_code_of_a_file_runs(tmp_path: Path) -> None:
    """Neither from a zip file nor from a bare pickle, nor from a class with a scaler's name."""
    canary = tmp_path / "canary"
    torch.save({**plain_file(), "scaler": Canary(canary)}, tmp_path / "zip.pt")
    (tmp_path / "bare.pkl").write_bytes(pickle.dumps({**plain_file(), "scaler": Canary(canary)}))
    for name in ("zip.pt", "bare.pkl"):
        refused(tmp_path / name, "no code of its own is run")
        assert not canary.exists()
    pickle.loads(pickle.dumps(Canary(canary)))
    assert canary.exists()

    class Loud:
        def __init__(self) -> None:
            raise AssertionError("a foreign class was called")

        def __getattr__(self, name: str) -> Any:
            raise AssertionError(f"{name} of a foreign object was read")

        @property
        def cur_scale(self) -> float:
            raise AssertionError("a foreign property was read")

    scaler = object.__new__(Loud)
    object.__getattribute__(scaler, "__dict__").update(APEX_DYNAMIC)
    model, optimizer = trained_pair(adamw, torch.float16)
    saved = apex_fp16_file(model, optimizer, scaler, dynamic=True)
    assert any("128" in text for text in import_state(saved).found)


def test_an_unknown_class_in_a_file_is_named(tmp_path: Path) -> None:
    """The message says which, and how to go on if the file is trusted."""
    with foreign_class("someones.tool", "Config") as cls:
        torch.save({**plain_file(), "config": cls()}, tmp_path / "run.pt")
    refused(tmp_path / "run.pt", r"holds someones\.tool\.Config.*If you trust it")
    before = set(torch.serialization.get_safe_globals())
    with foreign_class("apex.fp16_utils.loss_scaler", "LossScaler") as cls:
        torch.save({**plain_file(), "scale": with_attributes(cls, cur_scale=4)}, tmp_path / "run.pt")
    assert import_state(tmp_path / "run.pt").source == "torch"
    assert set(torch.serialization.get_safe_globals()) == before


def test_paths_that_hold_no_file(tmp_path: Path) -> None:
    """A missing one is the system's own error."""
    with pytest.raises(FileNotFoundError):
        import_state(tmp_path / "missing.pt")
    with pytest.raises(CheckpointError, match="a folder, of shards"):
        import_state(str(tmp_path))
    (tmp_path / "text.pt").write_text("not a checkpoint")
    refused(tmp_path / "text.pt", "cannot be read")
