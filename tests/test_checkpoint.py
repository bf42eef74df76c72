"""Checkpoints: a resumed run is the run that never stopped; a failed load changes nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    Factory,
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
    vector,
    wrapped,
)
from models import adamw as make_adamw
from models import momentum as make_momentum
from torch import nn

from mixedopt import (
    CastPolicy,
    CheckpointError,
    DynamicLossScale,
    MixedPrecisionOptimizer,
    StaticLossScale,
)
from mixedopt.checkpoint import export_state


def trainable(groups: Any) -> Any:
    """Leave out what is frozen: Adagrad makes its state at once, for everything it is given."""
    return [{**group, "params": [p for p in group["params"] if p.requires_grad]} for group in groups]


OPTIMIZERS: dict[str, Factory] = {
    "SGD": make_momentum,
    "AdamW": make_adamw,
    "Adagrad": lambda params: torch.optim.Adagrad(trainable(params), lr=1e-2),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=1e-2),
}
STEPS = 5
# Grows at every third clean step, so that a run of five steps sees S move.
MOVING = DynamicLossScale(init_scale=2.0**7, growth_interval=3, hysteresis=2)

Build = Callable[[], tuple[nn.Module, MixedPrecisionOptimizer]]
Event = Callable[[nn.Module, MixedPrecisionOptimizer], None]


def builder(make: Factory, device: torch.device, dtype: torch.dtype, with_model: bool, **options: Any) -> Build:
    """Return what makes a fresh run, converted by a policy or by ``model.half()``."""
    options.setdefault("loss_scale", MOVING)

    def build() -> tuple[nn.Module, MixedPrecisionOptimizer]:
        if with_model:
            return wrapped(device, dtype, make, **options)
        model = two_group_model(device).to(dtype)
        return model, MixedPrecisionOptimizer(make(two_groups(model)), **options)

    return build


def run(build: Build, script: list[Event], cut: int | None = None) -> dict[str, Any]:
    """Run a script, cut at ``cut`` through a file into fresh objects if not ``None``."""
    model, optimizer = build()
    for index, event in enumerate(script):
        if index == cut:
            saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
            model, optimizer = build()
            model.load_state_dict(saved["model"])
            keys = optimizer.load_state_dict(saved["optimizer"])
            assert keys == ([], [])
        event(model, optimizer)
    return {
        "state": copy.deepcopy(optimizer.state_dict()),
        "weights": copy.deepcopy(dict(model.state_dict())),
        "scale": optimizer.loss_scale,
        "counters": (optimizer.applied_steps, optimizer.skipped_steps),
    }


def good(step: int) -> Event:
    return lambda model, optimizer: train(model, optimizer, [step])


def bad(model: nn.Module, optimizer: MixedPrecisionOptimizer) -> None:
    overflow(optimizer)
    assert optimizer.last_step.skipped


@pytest.mark.parametrize("with_model", [True, False], ids=["policy", "half"])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_run_cut_at_any_step_equals_the_uncut_run(
    name: str, with_model: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Masters, weights, inner state, scale and counters are bit-equal wherever the run was cut."""
    build = builder(OPTIMIZERS[name], device, dtype, with_model)
    script = [good(step) for step in range(STEPS)]
    uncut = run(build, script)
    assert uncut["counters"] == (STEPS, 0)
    assert uncut["scale"] == 2.0**8
    start = run(build, [])
    assert differs(start["weights"], uncut["weights"])
    for cut in range(STEPS):
        assert_same(uncut, run(build, script, cut), f"cut at {cut}")


@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_run_cut_after_a_skipped_first_step_equals_the_uncut_run(
    name: str, device: torch.device, dtype: torch.dtype
) -> None:
    """No inner state exists then: loading nothing must leave the fresh state, and hysteresis half used."""
    build = builder(OPTIMIZERS[name], device, dtype, True)
    script = [bad, good(0), bad, bad, good(1)]
    uncut = run(build, script)
    assert uncut["counters"] == (2, 3)
    assert uncut["scale"] == 2.0**6  # XoXXo with hysteresis 2: only the third X backs off
    for cut in range(1, len(script)):
        assert_same(uncut, run(build, script, cut), f"cut at {cut}")


def test_the_scale_grows_at_the_same_step_after_a_resume(device: torch.device, dtype: torch.dtype) -> None:
    """Seven clean steps, save, load, three more: S doubles at the tenth, neither before nor after."""
    scale = DynamicLossScale(init_scale=2.0**5, growth_interval=10)
    build = builder(make_adamw, device, dtype, True, loss_scale=scale)
    model, optimizer = build()
    train(model, optimizer, range(7))
    saved = through_file(optimizer.state_dict())
    _, resumed = build()
    resumed.load_state_dict(saved)
    seen = []
    for _ in range(3):
        force_grads(resumed, 1e-3)
        resumed.step()
        seen.append(resumed.loss_scale)
    assert seen == [2.0**5, 2.0**5, 2.0**6]


def test_half_used_hysteresis_is_restored(device: torch.device, dtype: torch.dtype) -> None:
    """With two of three overflows spent before the save, the next one backs off."""
    scale = DynamicLossScale(init_scale=16.0, hysteresis=3)
    _, optimizer = wrapped(device, dtype, loss_scale=scale)
    overflow(optimizer)
    overflow(optimizer)
    assert optimizer.loss_scale == 16.0
    _, resumed = wrapped(device, dtype, loss_scale=scale)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    overflow(resumed)
    assert (resumed.loss_scale, resumed.skipped_steps) == (8.0, 3)


@pytest.mark.parametrize(
    "config",
    [
        DynamicLossScale(2.0**9, 4.0, 0.25, 7, 3, 2.0**-3, 2.0**11, 5),
        StaticLossScale(32.0, max_consecutive_skips=4),
    ],
    ids=["dynamic", "static"],
)
def test_every_field_makes_the_round_trip(config: Any, device: torch.device, dtype: torch.dtype) -> None:
    """Each field of configuration, state and counters, all non-default, comes back from a file."""
    model, optimizer = wrapped(device, dtype, loss_scale=config)
    train(model, optimizer, [0, 1])
    overflow(optimizer)
    train(model, optimizer, [2])
    overflow(optimizer)
    saved = through_file(optimizer.state_dict())
    _, resumed = wrapped(device, dtype, loss_scale=type(config)())
    assert differs(saved["mixedopt"], resumed.state_dict()["mixedopt"])
    resumed.load_state_dict(saved)
    assert_same(optimizer.state_dict(), resumed.state_dict())
    assert (resumed.applied_steps, resumed.skipped_steps) == (3, 2)
    assert saved["mixedopt"]["loss_scale"]["config"] == {f: getattr(config, f) for f in config.__dataclass_fields__}
    for _ in range(2):  # the configuration acts, it is not only carried
        overflow(optimizer)
        overflow(resumed)
        assert resumed.loss_scale == optimizer.loss_scale


def test_moments_stay_fp32_bit_for_bit(device: torch.device, dtype: torch.dtype) -> None:
    """Second moments of 1e-10 survive: they are never cast to the half dtype of the weights."""

    def build() -> MixedPrecisionOptimizer:
        return MixedPrecisionOptimizer(torch.optim.Adam([vector(device, dtype, 8)], lr=1e-3), loss_scale=2.0**10)

    optimizer = build()
    for _ in range(3):
        force_grads(optimizer, 1e-5)
        optimizer.step()
    resumed = build()
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    [state], [expected] = resumed.inner.state.values(), optimizer.inner.state.values()
    assert_same(dict(expected), dict(state))
    assert {value.dtype for value in state.values()} == {torch.float32}
    assert 0 < float(state["exp_avg_sq"].max()) < 1e-11


def test_the_low_bits_of_a_master_survive(device: torch.device, dtype: torch.dtype) -> None:
    """1.0003 is no half number: the master comes back unrounded, in either order of loading."""
    for optimizer_first in (True, False):
        model = nn.Linear(1, 1, bias=False).to(device)
        torch.nn.init.constant_(model.weight, 1.0003)
        optimizer = MixedPrecisionOptimizer(make_momentum(model.parameters()), model, dtype=dtype)
        saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        twin = nn.Linear(1, 1, bias=False).to(device)
        resumed = MixedPrecisionOptimizer(make_momentum(twin.parameters()), twin, dtype=dtype)
        if optimizer_first:
            resumed.load_state_dict(saved["optimizer"])
        twin.load_state_dict(saved["model"])
        if not optimizer_first:
            resumed.load_state_dict(saved["optimizer"])
        resumed.refresh_masters()
        [master] = masters_of(resumed).values()
        assert float(master) == float(torch.tensor(1.0003))
        assert float(twin.weight.detach()) == float(torch.tensor(1.0003).to(dtype)) != float(master)


def test_loading_copies(device: torch.device, dtype: torch.dtype) -> None:
    """Afterwards the two optimizers share no tensor: stepping one leaves the other."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0, 1])
    twin, resumed = wrapped(device, dtype)
    saved = optimizer.state_dict()  # on purpose neither copied nor saved
    resumed.load_state_dict(saved)
    before = snapshot(model, optimizer)
    train(twin, resumed, [2, 3])
    assert_same(before, snapshot(model, optimizer))
    assert differs(before["masters"], masters_of(resumed))


# -- a failed load ------------------------------------------------------------


def refuse(match: str, damage: Callable[[dict[str, Any]], Any], device: torch.device, dtype: torch.dtype) -> None:
    """Assert that a damaged dict is refused, by a ``CheckpointError``, with nothing changed."""
    source, saving = wrapped(device, dtype)
    train(source, saving, [0, 1])
    saved = copy.deepcopy(saving.state_dict())
    for group in saved["param_groups"]:
        group["lr"] = 0.75
    damaged = damage(saved)
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [3])
    before = snapshot(model, optimizer)
    report = optimizer.last_step
    with pytest.raises(CheckpointError, match=match) as caught:
        optimizer.load_state_dict(saved if damaged is None else damaged)
    assert "Nothing was loaded." in str(caught.value)
    assert_same(before, snapshot(model, optimizer))
    assert optimizer.last_step is report
    train(model, optimizer, [4])
    assert optimizer.last_step.applied


def entry(saved: dict[str, Any], name: str) -> dict[str, Any]:
    return saved["state"][saved["mixedopt"]["names"].index(name)]


def put(*path: Any, value: Any) -> Callable[[dict[str, Any]], None]:
    """Return what writes ``value`` at a path of keys."""

    def damage(saved: dict[str, Any]) -> None:
        at: Any = saved
        for key in path[:-1]:
            at = at[key]
        at[path[-1]] = value

    return damage


DAMAGE: dict[str, tuple[str, Callable[[dict[str, Any]], Any]]] = {
    "missing master": (
        r"^state_dict has no master weight for 'head.bias' \(if it was frozen then, load with strict=False\)\. ",
        lambda s: entry(s, "head.bias").pop("master") is None,
    ),
    "wrong shape": (
        r"a master weight for 'head.bias' of shape \(3,\), here \(12,\)",
        lambda s: entry(s, "head.bias").update(master=torch.zeros(3)),
    ),
    "wrong dtype": (
        r"a master weight for 'head.bias' of torch.float16, not fp32",
        lambda s: entry(s, "head.bias").update(master=torch.zeros(12, dtype=torch.float16)),
    ),
    "not a tensor": (
        r"a master weight for 'head.bias' of list, not fp32",
        lambda s: entry(s, "head.bias").update(master=[0.0] * 12),
    ),
    "other groups": (r"state_dict has 1 parameter groups, here 2", lambda s: drop_last(s, group=True)),
    "one name less": (
        r"no parameter 'head.bias'; state for number 9, which no group has",
        lambda s: drop_last(s, group=False),
    ),
    "names and numbers": (r"10 names for 9 parameters", lambda s: s["param_groups"][1]["params"].pop() and None),
    "other names": (r"no parameter 'hidden.bias'; an unexpected parameter 'other'", lambda s: rename(s, "hidden.bias")),
    "unknown format": (r"state_dict has format 99, this version reads 1", put("mixedopt", "format", value=99)),
    "no dict": (r"not an optimizer state_dict: it has no 'state' and 'param_groups'", lambda s: [1, 2]),
    "a model's": (r"not an optimizer state_dict", lambda s: {"hidden.weight": torch.ones(2)}),
    "no groups": (r"not an optimizer state_dict", lambda s: {"state": s["state"]}),
    "text scale": (
        r"state_dict holds no valid loss scale \(",
        put("mixedopt", "loss_scale", "state", "scale", value="many"),
    ),
    "no tracker": (
        r"state_dict holds no valid loss scale \(",
        lambda s: s["mixedopt"]["loss_scale"]["state"].pop("growth_tracker") and None,
    ),
    "bad config": (
        r"state_dict holds no valid loss scale \(DynamicLossScale\(backoff_factor=2.0\): must lie strictly",
        put("mixedopt", "loss_scale", "config", "backoff_factor", value=2.0),
    ),
    "unknown kind": (r"state_dict holds no valid loss scale", put("mixedopt", "loss_scale", "kind", value="shared")),
}


def drop_last(saved: dict[str, Any], *, group: bool) -> None:
    """Leave out the last group or the last parameter, as a model without it would."""
    groups = saved["param_groups"]
    count = len(groups.pop()["params"]) if group else len([groups[-1]["params"].pop()])
    del saved["mixedopt"]["names"][-count:]


def rename(saved: dict[str, Any], name: str) -> None:
    names = saved["mixedopt"]["names"]
    names[names.index(name)] = "other"


def quiet(damage: Callable[[dict[str, Any]], Any]) -> Callable[[dict[str, Any]], Any]:
    """Keep only a replacement dict or list of what ``damage`` returned."""
    return lambda saved: result if isinstance(result := damage(saved), (dict, list)) else None


@pytest.mark.parametrize("kind", list(DAMAGE))
def test_a_failed_load_changes_nothing(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Everything is checked before the first write; the message says what is wrong."""
    match, damage = DAMAGE[kind]
    refuse(match, quiet(damage), device, dtype)


SCALE = ("mixedopt", "loss_scale", "state", "scale")
CORRUPTED: dict[str, Callable[[dict[str, Any]], Any]] = {
    "scale NaN": put(*SCALE, value=float("nan")),
    "scale zero": put(*SCALE, value=0.0),
    "scale negative": put(*SCALE, value=-2.0),
    "scale infinite": put(*SCALE, value=float("inf")),
    "tracker negative": put("mixedopt", "loss_scale", "state", "growth_tracker", value=-5),
    "counter of text": put("mixedopt", "applied_steps", value="many"),
    "moment of another shape": lambda s: entry(s, "hidden.weight").update(exp_avg=torch.zeros(7)),
    "master beyond the half range": lambda s: entry(s, "hidden.weight")["master"].fill_(3.4e38),
    "master NaN": lambda s: entry(s, "hidden.weight")["master"].fill_(float("nan")),
    "no applied_steps": lambda s: s["mixedopt"].pop("applied_steps") and None,
    "no names": lambda s: s["mixedopt"].pop("names") and None,
    "no loss scale": lambda s: s["mixedopt"].pop("loss_scale") and None,
    "our key is a list": put("mixedopt", value=[1]),
    "entry is a number": put("state", 0, value=3),
    "groups are a number": put("param_groups", value=3),
    "group without params": lambda s: s["param_groups"][0].pop("params") and None,
}


@pytest.mark.parametrize("kind", list(CORRUPTED))
def test_a_corrupted_state_dict_is_refused(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """A value that could not have been saved is a ``CheckpointError``, at load and not at a later step."""
    refuse("Nothing was loaded", quiet(CORRUPTED[kind]), device, dtype)


@pytest.mark.parametrize("dynamic_saved", [True, False])
def test_the_other_kind_of_scale_is_refused_by_name(
    dynamic_saved: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """A static state into a dynamic scale, or the reverse, names both classes and the remedy."""
    static, dynamic = StaticLossScale(8.0), SMALL_SCALE
    saved_as, here = (dynamic, static) if dynamic_saved else (static, dynamic)
    source, saving = wrapped(device, dtype, loss_scale=saved_as)
    train(source, saving, [0])
    model, optimizer = wrapped(device, dtype, loss_scale=here)
    before = snapshot(model, optimizer)
    match = (
        rf"holds the state of a {type(saved_as).__name__}, this optimizer has a {type(here).__name__}\. "
        rf"Nothing was loaded\. Build the optimizer with loss_scale={type(saved_as).__name__}\("
    )
    with pytest.raises(CheckpointError, match=match):
        optimizer.load_state_dict(copy.deepcopy(saving.state_dict()))
    assert_same(before, snapshot(model, optimizer))


class Picky(torch.optim.SGD):
    """Refuses a state when half of it is loaded."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        raise RuntimeError("not this one")


def test_a_refusal_of_the_inner_optimizer_changes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    """When the inner optimizer itself refuses, its words are kept and nothing is loaded."""
    model, optimizer = wrapped(device, dtype, lambda params: Picky(params, momentum=0.9))
    train(model, optimizer, [0])
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.75
    train(model, optimizer, [1])
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError, match=r"Picky refused the state: not this one\. Nothing was loaded\."):
        optimizer.load_state_dict(saved)
    assert_same(before, snapshot(model, optimizer))
    train(model, optimizer, [2])
    assert optimizer.applied_steps == 3


# -- other formats ------------------------------------------------------------


def test_string_ids_are_accepted(device: torch.device, dtype: torch.dtype) -> None:
    """Names as ids, in any order of the state, are what torch.distributed.checkpoint hands over."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0, 1])
    saved = copy.deepcopy(optimizer.state_dict())
    names = saved["mixedopt"]["names"]
    by_name = {
        **saved,
        "state": {names[i]: value for i, value in reversed(saved["state"].items())},
        "param_groups": [{**g, "params": [names[i] for i in g["params"]]} for g in saved["param_groups"]],
    }
    plain = {key: value for key, value in by_name.items() if key != "mixedopt"}
    for given in (by_name, plain):
        _, resumed = wrapped(device, dtype)
        resumed.load_state_dict(copy.deepcopy(given))
        assert_same(masters_of(optimizer), masters_of(resumed))
        assert_same(optimizer.inner.state_dict()["state"], resumed.inner.state_dict()["state"])


def test_a_plain_torch_state_leaves_masters_and_scale(device: torch.device, dtype: torch.dtype) -> None:
    """A plain fp32 run's moments and hyperparameters are taken, bit for bit; masters stay."""
    plain, bare = fp32_twin(device, make_adamw)
    for step in range(3):
        bare.zero_grad()
        loss_of(plain, step).backward()
        bare.step()
    for group in bare.param_groups:
        group["lr"] = 0.5
    _, optimizer = wrapped(device, dtype)
    masters = masters_of(optimizer)
    keys = optimizer.load_state_dict(through_file(bare.state_dict()))
    assert keys == ([], [])
    assert_same(bare.state_dict(), optimizer.inner.state_dict())
    assert_same(masters, masters_of(optimizer))
    assert (optimizer.loss_scale, optimizer.applied_steps) == (2.0**7, 0)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]


def test_half_moments_are_widened(device: torch.device, dtype: torch.dtype) -> None:
    """A state whose moments are half loads as fp32."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    saved = copy.deepcopy(optimizer.inner.state_dict())
    for state in saved["state"].values():
        state["exp_avg"] = state["exp_avg"].to(dtype)
    _, resumed = wrapped(device, dtype)
    resumed.load_state_dict(saved)
    for index, state in resumed.inner.state_dict()["state"].items():
        assert state["exp_avg"].dtype == torch.float32
        assert torch.equal(state["exp_avg"], saved["state"][index]["exp_avg"].float())


def test_our_state_loads_into_a_plain_optimizer(device: torch.device, dtype: torch.dtype) -> None:
    """Without our keys and the masters it is torch's own format: a plain fp32 run goes on from it."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0, 1])
    saved = through_file(export_state(optimizer))
    plain, bare = fp32_twin(device, make_adamw)
    plain.load_state_dict(optimizer.master_state_dict(), strict=True)
    bare.load_state_dict(saved)
    loaded = {i: dict(state) for i, state in bare.state_dict()["state"].items() if state}
    assert_same(optimizer.inner.state_dict()["state"], loaded)
    assert_same(optimizer.inner.state_dict()["param_groups"], bare.state_dict()["param_groups"])
    before = copy.deepcopy(dict(plain.state_dict()))
    loss_of(plain, 2).backward()
    bare.step()
    assert differs(before, dict(plain.state_dict()))


def test_a_load_that_is_not_strict_returns_the_names(device: torch.device, dtype: torch.dtype) -> None:
    """What matches by name is loaded, wherever it stands; the rest is told and left alone."""
    old = seeded(lambda: nn.ModuleDict({k: nn.Linear(4, 4) for k in "abc"}), device)
    new = seeded(lambda: nn.ModuleDict({k: nn.Linear(4, 4) for k in "cbd"}), device)
    source = MixedPrecisionOptimizer(make_adamw(old.parameters()), old, dtype=dtype, loss_scale=4.0)
    force_grads(source, 0.5)
    source.step()
    target = MixedPrecisionOptimizer(make_adamw(new.parameters()), new, dtype=dtype, loss_scale=4.0)
    before = masters_of(target)
    saved = through_file(source.state_dict())
    with pytest.raises(CheckpointError, match=r"no parameter 'd.weight'; no parameter 'd.bias'; an unexpected"):
        target.load_state_dict(saved)
    keys = target.load_state_dict(saved, strict=False)
    assert keys.missing_keys == ["d.weight", "d.bias"]
    assert keys.unexpected_keys == ["a.weight", "a.bias"]
    masters, expected = masters_of(target), masters_of(source)
    for name, value in masters.items():
        assert_same(before[name] if name.startswith("d") else expected[name], value)
    assert differs(before["c.weight"], masters["c.weight"])
    assert torch.equal(new["b"].weight, masters["b.weight"].to(dtype))
    states = {name: target.state.get(param) for name, param in new.named_parameters()}
    assert states["d.weight"] is None
    assert_same(dict(source.state[old["b"].weight]), dict(states["b.weight"]))


def test_a_layer_unfrozen_before_the_resume_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """Frozen at the build, thawed in mid-run (case 26): resumed with that layer trainable, it is exact."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    model.frozen.requires_grad_(True)
    train(model, optimizer, [1, 2])
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin = two_group_model(device)
    twin.frozen.requires_grad_(True)
    resumed = MixedPrecisionOptimizer(make_adamw(two_groups(twin)), twin, dtype=dtype, loss_scale=SMALL_SCALE)
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    train(model, optimizer, [3])
    train(twin, resumed, [3])
    assert_same(masters_of(optimizer), masters_of(resumed))
    assert_same(dict(model.state_dict()), dict(twin.state_dict()))


def test_the_state_of_a_frozen_parameter_stays_fp32(device: torch.device, dtype: torch.dtype) -> None:
    """Adagrad has state for a frozen parameter too: a resume does not round it."""
    make: Factory = lambda params: torch.optim.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1)  # noqa: E731
    _, optimizer = wrapped(device, dtype, make)
    _, resumed = wrapped(device, dtype, make)
    resumed.load_state_dict(through_file(optimizer.state_dict()))
    assert_same(optimizer.state_dict(), resumed.state_dict())


def test_a_layer_unfrozen_after_the_resume_is_exact(device: torch.device, dtype: torch.dtype) -> None:
    """The same when the resumed script builds with the layer frozen and thaws it afterwards, as the first did."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    model.frozen.requires_grad_(True)
    train(model, optimizer, [1, 2])
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    twin, resumed = wrapped(device, dtype)
    twin.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    twin.frozen.requires_grad_(True)
    train(model, optimizer, [3])
    train(twin, resumed, [3])
    assert_same(masters_of(optimizer), masters_of(resumed))


# -- exports ------------------------------------------------------------------


class Exported(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.body[0].weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("ids", torch.arange(5000))
        self.register_buffer("phase", torch.polar(torch.ones(3), torch.arange(3.0)))
        self.register_buffer("scratch", torch.ones(2), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(self.body(ids)))


@pytest.mark.parametrize("compiled", [False, True], ids=["bare", "compiled"])
def test_the_masters_load_into_the_fp32_model(compiled: bool, device: torch.device, dtype: torch.dtype) -> None:
    """The export has every name of the fp32 model, canonical, and is a copy; buffers are untouched."""
    model = seeded(Exported, device)
    given = torch.compile(model, backend="eager") if compiled else model
    inner = make_adamw(given.parameters())
    optimizer = MixedPrecisionOptimizer(inner, given, dtype=dtype, loss_scale=SMALL_SCALE)
    ids = torch.arange(5, device=device)
    for _ in range(2):
        optimizer.backward(model(ids).square().mean())
        optimizer.step()
    exported = optimizer.master_state_dict()
    plain = seeded(Exported, device)
    fresh = copy.deepcopy(dict(plain.state_dict()))
    plain.load_state_dict(exported, strict=True)

    assert list(exported) == list(fresh)
    assert {name: value.dtype for name, value in exported.items()} == {n: v.dtype for n, v in fresh.items()}
    for name, master in masters_of(optimizer).items():
        assert_same(master, exported[name])
        assert differs(fresh[name], exported[name])
    assert torch.equal(exported["frozen.weight"], fresh["frozen.weight"].to(dtype).float())
    assert_same(model.body[2].running_var, exported["body.2.running_var"])
    assert_same(fresh["phase"], exported["phase"])
    assert_same(fresh["ids"], exported["ids"])
    own = {t.data_ptr() for t in (*model.parameters(), *model.buffers(), *(m for _, m in optimizer.named_masters()))}
    assert not own & {value.data_ptr() for value in exported.values()}
    assert_same(exported, through_file(exported))


def test_the_masters_of_the_half_workflow_have_names_by_position(device: torch.device, dtype: torch.dtype) -> None:
    """Without a model the export is the masters, as copies."""
    optimizer = MixedPrecisionOptimizer(make_momentum([vector(device, dtype, 3)]), loss_scale=1.0)
    exported = optimizer.master_state_dict()
    assert_same(exported, {"group0.param0": torch.ones(3, device=device)})
    force_grads(optimizer, 1.0)
    optimizer.step()
    assert float(exported["group0.param0"][0]) == 1.0
    assert float(masters_of(optimizer)["group0.param0"][0]) < 1.0


def test_a_state_moves_between_wrapped_and_compiled_models(device: torch.device, dtype: torch.dtype) -> None:
    """Names in a state dict are canonical: what a bare model saved loads under another wrapper, and back."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    inside = two_group_model(device)
    outside = torch.compile(inside, backend="eager")
    inner = make_adamw(two_groups(outside))
    resumed = MixedPrecisionOptimizer(inner, outside, dtype=dtype, loss_scale=SMALL_SCALE)
    assert resumed.load_state_dict(through_file(optimizer.state_dict())) == ([], [])
    assert_same(masters_of(optimizer), masters_of(resumed))
    train(model, optimizer, [1])
    train(inside, resumed, [1])
    assert_same(optimizer.state_dict(), resumed.state_dict())
    assert optimizer.load_state_dict(through_file(resumed.state_dict())) == ([], [])


def test_weights_loaded_after_wrapping_reach_the_masters(device: torch.device, dtype: torch.dtype) -> None:
    """Case 2: ``model.load_state_dict`` is not overwritten by stale masters; moments and counters stay."""
    model, optimizer = wrapped(device, dtype, lambda params: torch.optim.SGD([{**g, "lr": 0.0} for g in params]))
    weights = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    model.load_state_dict(weights)
    train(model, optimizer, [0])
    assert optimizer.last_step.applied
    assert_same(weights, dict(model.state_dict()))
    assert all(bool((value == 0.25).all()) for value in masters_of(optimizer).values())


def test_an_fp32_policy_saves_no_second_copy(device: torch.device, dtype: torch.dtype) -> None:
    """With an all-fp32 policy the master entry is the weight itself."""
    model, optimizer = wrapped(device, dtype, policy=CastPolicy.fp32(), loss_scale=1.0)
    names = optimizer.state_dict()["mixedopt"]["names"]
    saved = {names[i]: value["master"] for i, value in optimizer.state_dict()["state"].items()}
    for name, param in model.named_parameters():
        if param.requires_grad:
            assert saved[name].data_ptr() == param.data_ptr()


# -- fp32 weights into a wrapped model -----------------------------------------


@pytest.mark.parametrize("whole", [True, False], ids=["model", "submodule"])
def test_an_fp32_checkpoint_reaches_the_masters_unrounded(
    whole: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """Loading fp32 weights into the half model keeps the bits that the half weights cannot hold."""
    weights = {k: v + 1e-4 for k, v in two_group_model(device).state_dict().items()}
    model, optimizer = wrapped(device, dtype)
    before = masters_of(optimizer)
    if whole:
        model.load_state_dict(weights)
    else:
        model.hidden.load_state_dict({k.removeprefix("hidden."): v for k, v in weights.items() if "hidden." in k})
    touched = [name for name in before if whole or name.startswith("hidden.")]
    for name, master in masters_of(optimizer).items():
        assert torch.equal(weights[name] if name in touched else before[name], master), name
    assert differs(before, masters_of(optimizer))
    optimizer.zero_grad()
    force_grads(optimizer, 0.0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert all(torch.equal(weights[name], masters_of(optimizer)[name]) for name in touched)


def test_an_exported_model_makes_the_round_trip(device: torch.device, dtype: torch.dtype) -> None:
    """``master_state_dict`` into another wrapped model: the same masters, bit for bit."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0, 1])
    twin, other = wrapped(device, dtype)
    twin.load_state_dict(optimizer.master_state_dict())
    assert_same(masters_of(optimizer), masters_of(other))


def test_a_loaded_weight_beyond_the_half_range_is_named(device: torch.device) -> None:
    """It would become inf in the model: refused before its module is written."""
    model, optimizer = wrapped(device, torch.float16)
    weights = {k: v.clone() for k, v in two_group_model(device).state_dict().items()}
    weights["hidden.weight"][0, 0] = 1e6
    before = model.hidden.weight.detach().clone()
    with pytest.raises(ValueError, match=r"parameter 'hidden.weight' holds 1e\+06, beyond"):
        model.load_state_dict(weights)
    assert torch.equal(before, model.hidden.weight)
    assert optimizer.applied_steps == 0


@pytest.mark.parametrize("call", ["load a plain state", "load without strict", "publish"])
def test_weights_loaded_just_before_are_not_overwritten(call: str, device: torch.device, dtype: torch.dtype) -> None:
    """What was written into the model before the call is in the masters after it, not the other way round."""
    plain = two_group_model(device)
    inner = make_adamw(two_groups(plain))
    loss_of(plain, 0).backward()
    inner.step()
    model, optimizer = wrapped(device, dtype)
    with torch.no_grad():
        model.hidden.weight.fill_(0.25)
    if call == "publish":
        optimizer.publish()
    else:
        optimizer.load_state_dict(copy.deepcopy(inner.state_dict()), strict=call == "load a plain state")
    assert (model.hidden.weight == 0.25).all()
    assert (masters_of(optimizer)["hidden.weight"] == 0.25).all()
    assert torch.equal(masters_of(optimizer)["branch.weight"], two_group_model(device).branch.weight)
