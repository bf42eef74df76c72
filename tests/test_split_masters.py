"""Split masters: a run is the fp32-master run whose masters are rounded to (half, remainder) after each step."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import resume
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import (
    SMALL_SCALE,
    adamw,
    assert_same,
    differs,
    loss_of,
    momentum,
    overflow,
    through_file,
    train,
    two_group_model,
    two_groups,
    wrapped,
)
from resume import Run, Script
from torch import Tensor, nn

from mixedopt import DynamicLossScale, MixedPrecisionOptimizer, SharedLossScale, tiers
from mixedopt.bucket import Bucket
from mixedopt.masters import MasterWeights
from mixedopt.split import join, remainder_of


def fused_adamw(params: Any) -> torch.optim.Optimizer:
    """Return one that all tiers serve."""
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def buckets(optimizer: MixedPrecisionOptimizer) -> list[Bucket]:
    """Return the buckets of half parameters."""
    return [bucket for bucket in optimizer._roster.masters.buckets if bucket.is_half]


def is_closed(optimizer: MixedPrecisionOptimizer) -> bool:
    """True iff no fp32 copy of a half parameter is there."""
    assert buckets(optimizer)
    return all(not b.is_open and b.flat_master.untyped_storage().nbytes() == 4 for b in buckets(optimizer))


@torch.no_grad()
def round_(optimizer: MixedPrecisionOptimizer) -> None:
    """Round fp32 masters to what a split keeps of them."""
    for param, master in optimizer._roster.masters.of.items():
        if param.dtype != torch.float32:
            master.copy_(join(param.detach(), remainder_of(master.detach(), param.detach())))


def values(optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """Return copies of the masters, without opening them."""
    return {n: m.clone() for n, m in optimizer.master_state_dict().items()}


def pair(
    device: torch.device, dtype: torch.dtype, make: Any = adamw, **options: Any
) -> tuple[tuple[nn.Module, MixedPrecisionOptimizer], tuple[nn.Module, MixedPrecisionOptimizer]]:
    """Return a run with split masters and its reference."""
    ours = wrapped(device, dtype, make, master="split", **options)
    theirs = wrapped(device, dtype, make, **options)
    round_(theirs[1])
    return ours, theirs


# -- the contract -------------------------------------------------------------


@settings(max_examples=25)
@given(
    inner=st.sampled_from(resume.NAMES),
    scale=st.sampled_from(list(resume.SCALES)),
    gradients=st.sampled_from(resume.GRADIENTS),
    with_model=st.booleans(),
    clip=st.booleans(),
    events=st.lists(st.sampled_from(resume.EVENTS), min_size=1, max_size=6).map(tuple),
)
def test_a_run_is_the_reference_rounded_after_each_step(dtype: torch.dtype, **drawn: Any) -> None:
    """Weights, masters, state, scale, counters: bit for bit, for every optimizer of torch's."""
    name = next(name for name, known in resume.DTYPES.items() if known == dtype)
    script = Script(dtype=name, cut=0, **drawn)
    reference, ours = Run(script), Run(dataclasses.replace(script, master="split"))
    round_(reference.optimizer)
    for index in range(len(script.events)):
        assert is_closed(ours.optimizer)
        for run in (reference, ours):
            run.play(index, index + 1)
        round_(reference.optimizer)
        assert_same(reference.saved(), ours.saved(), str(script))


def test_the_low_bits_are_there(device: torch.device, dtype: torch.dtype) -> None:
    """Updates below what half can show add up, as they do with fp32 masters; the pairs show the masters."""
    model, optimizer = wrapped(device, dtype, momentum, master="split")
    train(model, optimizer, range(5))
    assert differs(values(optimizer)["hidden.weight"], model.hidden.weight.detach().float())
    for param in model.parameters():
        if param.requires_grad:
            assert torch.equal(optimizer._roster.masters.value(param).to(param.dtype), param)


def test_a_skip_changes_no_remainder(device: torch.device, dtype: torch.dtype) -> None:
    """Bit for bit, and masters stay closed; so does an inner optimizer that raises in its first step."""
    (model, optimizer), _ = pair(device, dtype)
    train(model, optimizer, range(2))
    before = [b.flat_remainder.clone() for b in buckets(optimizer)]
    places = [b.flat_remainder.data_ptr() for b in buckets(optimizer)]
    overflow(optimizer)
    assert optimizer.last_step.skipped
    assert is_closed(optimizer)
    assert_same(before, [b.flat_remainder.clone() for b in buckets(optimizer)])
    assert places == [b.flat_remainder.data_ptr() for b in buckets(optimizer)]


class Failing(torch.optim.SGD):
    """Moves every parameter, then raises."""

    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        raise RuntimeError("half-way")


def test_a_step_that_raises_changes_nothing(device: torch.device, dtype: torch.dtype) -> None:
    """Weights and remainders are as before, and the masters closed."""
    model, optimizer = wrapped(device, dtype, lambda params: Failing(params, lr=0.1), master="split")
    before = copy.deepcopy(model.state_dict()), [b.flat_remainder.clone() for b in buckets(optimizer)]
    with pytest.raises(RuntimeError, match="half-way"):
        train(model, optimizer, [0])
    assert is_closed(optimizer)
    assert_same(before, (copy.deepcopy(model.state_dict()), [b.flat_remainder.clone() for b in buckets(optimizer)]))


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_closures_see_published_weights(search: str | None, device: torch.device, dtype: torch.dtype) -> None:
    """LBFGS, with skips among the steps: the reference, rounded after each."""

    def lbfgs(groups: Any) -> torch.optim.Optimizer:
        return torch.optim.LBFGS([p for g in groups for p in g["params"]], lr=0.5, max_iter=4, line_search_fn=search)

    runs = pair(device, dtype, lbfgs)
    for step in range(4):
        for model, optimizer in runs:

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step) * (float("inf") if step == 1 else 1.0)
                optimizer.backward(loss)
                return loss

            optimizer.step(closure)
        round_(runs[1][1])
        (model, optimizer), (other, reference) = runs
        assert is_closed(optimizer)
        assert_same(reference.state_dict()["state"], optimizer.state_dict()["state"])
        assert_same(other.state_dict(), copy.deepcopy(model.state_dict()))
    assert optimizer.applied_steps > 0


def test_a_shared_scale_steps_split_and_fp32_masters(device: torch.device) -> None:
    """Two optimizers on one model, one of each kind, are the reference; one overflow skips both."""
    runs = []
    for kind in ("split", "fp32"):
        model = two_group_model(device)
        shared = SharedLossScale(DynamicLossScale(init_scale=2.0**7))
        groups = two_groups(model)
        both = [
            MixedPrecisionOptimizer(adamw([groups[0]]), model, loss_scale=shared, master=kind),
            MixedPrecisionOptimizer(momentum([groups[1]]), model, loss_scale=shared),
        ]
        if kind == "fp32":
            round_(both[0])
        for step in range(4):
            both[0].backward(loss_of(model, step) * (float("inf") if step == 2 else 1.0))
            shared.step(*both)
            if kind == "fp32":
                round_(both[0])
        assert both[0].applied_steps == 3
        runs.append((copy.deepcopy(model.state_dict()), [each.state_dict()["state"] for each in both]))
    assert_same(runs[0], runs[1])


def test_late_parameters_are_split_too(device: torch.device, dtype: torch.dtype) -> None:
    """``add_param_group`` and a thawed layer: the reference, rounded after each step."""
    runs = pair(device, dtype)
    for model, optimizer in runs:
        train(model, optimizer, [0])
        extra = nn.Linear(3, 3).to(device, dtype)
        with torch.no_grad():
            extra.weight.copy_(torch.arange(9.0).view(3, 3) / 7)
            extra.bias.zero_()
        model.add_module("extra", extra)
        model.frozen.requires_grad_(True)
        if optimizer is runs[1][1]:
            round_(optimizer)
        optimizer.add_param_group({"params": list(extra.parameters())})
        for step in (1, 2):
            optimizer.backward(loss_of(model, step) + model.extra(torch.ones(1, 3, device=device, dtype=dtype)).sum())
            optimizer.step()
            if optimizer is runs[1][1]:
                round_(optimizer)
    assert is_closed(runs[0][1])
    assert len(buckets(runs[0][1])) > 1
    assert_same(values(runs[1][1]), values(runs[0][1]))


# -- what users see -----------------------------------------------------------


def test_named_masters_lends_until_the_next_publish(device: torch.device, dtype: torch.dtype) -> None:
    """Values while lent, skips and state dicts included; edits reach the model; NaN afterwards, whoever looks."""
    model, optimizer = wrapped(device, dtype, master="split")
    shown = dict(optimizer.named_masters())
    kept = shown["hidden.weight"].detach()
    assert torch.equal(shown["hidden.weight"].to(dtype), model.hidden.weight)
    assert_same(values(optimizer)["hidden.weight"], kept.clone())
    with torch.no_grad():
        shown["hidden.weight"].fill_(1 / 3)
    overflow(optimizer)
    saved = [entry["master"] for entry in through_file(optimizer.state_dict())["state"].values()]
    assert sum(bool((master == torch.tensor(1 / 3)).all()) for master in saved) == 1
    optimizer.publish()
    assert is_closed(optimizer)
    assert (model.hidden.weight == torch.tensor(1 / 3, dtype=dtype)).all()
    assert (values(optimizer)["hidden.weight"] == torch.tensor(1 / 3, device=device)).all()
    assert kept.isnan().all()
    assert shown["hidden.weight"].isnan().all()
    assert dict(optimizer.named_masters())["hidden.weight"] is shown["hidden.weight"]
    assert not shown["hidden.weight"].isnan().any()
    train(model, optimizer, [0])
    assert is_closed(optimizer)


@pytest.mark.parametrize("tier", ["eager", "fused", "compiled"])
def test_a_step_ends_the_loan_in_every_tier(
    tier: str, monkeypatch: pytest.MonkeyPatch, device: torch.device, dtype: torch.dtype
) -> None:
    """Edits that were not published count; afterwards the masters are closed, and the step is that of fp32 masters."""
    monkeypatch.setattr(tiers, "_rule_on_host", lambda request: None)  # which split masters have no kernels of
    runs = pair(device, dtype, fused_adamw, tier=tier)
    for steps in (range(1), range(1, 2)):
        for model, optimizer in runs:
            shown = dict(optimizer.named_masters())
            with torch.no_grad():
                shown["hidden.weight"].mul_(0.5)
            train(model, optimizer, steps)
        round_(runs[1][1])
        assert is_closed(runs[0][1])
    assert_same(values(runs[0][1]), values(runs[1][1]))


def test_a_replay_finds_the_masters_closed(device: torch.device, dtype: torch.dtype) -> None:
    """A graph works on the halves: what was lent since the last call counts, and is closed before."""
    model, optimizer = wrapped(device, dtype, fused_adamw, tier="fused", master="split")
    train(model, optimizer, [0])
    shown = dict(optimizer.named_masters())
    with torch.no_grad():
        shown["hidden.weight"].fill_(0.5)
    optimizer._tier.before_replay_()
    assert is_closed(optimizer)
    assert (model.hidden.weight == 0.5).all()


def test_the_inner_optimizers_parameters_are_nan_between_steps(device: torch.device, dtype: torch.dtype) -> None:
    """Neither read nor written in silence; shapes, identity and gradients are those of the masters."""
    model, optimizer = wrapped(device, dtype, master="split")
    train(model, optimizer, [0])
    mine = [p for group in optimizer.inner.param_groups for p in group["params"]]
    master = next(p for p in mine if p is optimizer._roster.masters.of[model.hidden.weight])
    assert master.shape == model.hidden.weight.shape
    assert master.isnan().all()
    with torch.no_grad(), pytest.raises(RuntimeError, match="single memory location"):
        master.add_(1)
    single = nn.Parameter(torch.ones(1, device=device, dtype=dtype))
    other = MixedPrecisionOptimizer(momentum([single]), master="split", loss_scale=1.0)
    with torch.no_grad():
        other.inner.param_groups[0]["params"][0].fill_(2.0)
    with pytest.raises(ValueError, match="were written while they were split"):
        dict(other.named_masters())
    assert dict(other.named_masters())
    assert single.item() == 1.0
    with torch.no_grad():
        master.zero_()  # this one torch allows
    with pytest.raises(ValueError, match="were written while they were split"):
        train(model, optimizer, [1])
    assert master.isnan().all()
    optimizer.zero_grad()
    train(model, optimizer, [1])
    assert optimizer.last_step.applied


def test_unscaled_gradients_are_on_closed_masters(device: torch.device, dtype: torch.dtype) -> None:
    """``unscale_()`` and edits of ``grad`` work as with fp32 masters."""
    runs = pair(device, dtype)
    for model, optimizer in runs:
        optimizer.backward(loss_of(model, 0))
        optimizer.unscale_()
        mine = [p for group in optimizer.inner.param_groups for p in group["params"]]
        torch.nn.utils.clip_grad_norm_([p for p in mine if p.grad is not None], 0.01)
        optimizer.step()
    round_(runs[1][1])
    assert_same(values(runs[1][1]), values(runs[0][1]))


def test_edited_weights_keep_their_remainders(device: torch.device, dtype: torch.dtype) -> None:
    """Whatever is written into the model stays there; values that were not written keep every low bit."""
    model, optimizer = wrapped(device, dtype, master="split")
    train(model, optimizer, range(2))
    before = values(optimizer)["hidden.weight"]
    with torch.no_grad():
        model.hidden.weight[0] = 0.25
        model.hidden.weight[1] = 0
        model.hidden.weight[2].mul_(0.5)
        model.hidden.bias.mul_(1)
    weight = model.hidden.weight.detach().clone()
    after = values(optimizer)["hidden.weight"]
    assert torch.equal(after[3:], before[3:])
    assert torch.equal(after.to(dtype), weight)
    assert (after[0] - 0.25).abs().max() <= torch.finfo(dtype).eps * 0.25 / 2
    optimizer.refresh_masters()
    optimizer.publish()
    assert torch.equal(model.hidden.weight, weight)
    assert_same(values(optimizer)["hidden.weight"], after)


def test_edits_beside_lent_masters_are_exact(device: torch.device, dtype: torch.dtype) -> None:
    """While masters are lent, an edited weight is its master, and nothing else moves: as with fp32 masters."""
    runs = pair(device, dtype)
    for model, optimizer in runs:
        train(model, optimizer, [0])
        round_(optimizer) if optimizer is runs[1][1] else None
        dict(optimizer.named_masters())
        with torch.no_grad():
            model.hidden.weight[0] = 0.25
        optimizer.publish()
    assert (values(runs[0][1])["hidden.weight"][0] == 0.25).all()
    assert_same(values(runs[1][1]), values(runs[0][1]))


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_model_and_optimizer_load_in_either_order(
    optimizer_first: bool, device: torch.device, dtype: torch.dtype
) -> None:
    """The values that are written over tell which weights are new: no low bit is lost; fp32 values arrive whole."""
    model, optimizer = wrapped(device, dtype, master="split")
    train(model, optimizer, range(3))
    saved = through_file({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    fresh, other = wrapped(device, dtype, master="split")
    for part in ("optimizer", "model") if optimizer_first else ("model", "optimizer"):
        (other if part == "optimizer" else fresh).load_state_dict(saved[part])
    assert_same(values(optimizer), values(other))
    wide = two_group_model(device).state_dict()
    fresh.load_state_dict(wide)
    round_(reference := wrapped(device, dtype)[1])
    other.publish()
    assert_same(values(reference)["hidden.weight"], values(other)["hidden.weight"])


def test_weights_beyond_the_half_range_are_named(device: torch.device) -> None:
    """A master that has outgrown fp16 keeps its size, to eight bits, and is an error as with fp32 masters."""
    large = nn.Parameter(torch.full((2,), 50000.0, device=device, dtype=torch.float16))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([large], lr=2.0), loss_scale=1.0, master="split")
    large.grad = torch.full_like(large, -40000.0)
    optimizer.step()
    assert is_closed(optimizer)
    assert large.isinf().all()
    large.grad = torch.full_like(large, float("inf"))
    optimizer.step()
    large.grad = torch.ones_like(large)
    with pytest.raises(ValueError, match=r"parameter .* holds 129536, beyond the largest value of torch.float16"):
        optimizer.step()
    with torch.no_grad():
        for _, master in optimizer.named_masters():
            master.fill_(1e5)
    with pytest.raises(ValueError, match="holds 100000, beyond"):
        optimizer.publish()


# -- checkpoints and ways out -------------------------------------------------


@pytest.mark.parametrize("kinds", [("split", "split"), ("split", "fp32"), ("fp32", "split")])
def test_checkpoints_interchange(kinds: tuple[str, str], device: torch.device, dtype: torch.dtype) -> None:
    """A state dict has fp32 masters and loads into either kind; the run goes on as the reference does."""
    model, optimizer = wrapped(device, dtype, master=kinds[0])
    train(model, optimizer, range(3))
    saved = through_file(optimizer.state_dict())
    assert_same(saved["state"][0]["master"], values(optimizer)["embedding.weight"])
    ends = []
    for kind in (kinds[1], "fp32"):
        fresh, other = wrapped(device, dtype, master=kind)
        other.load_state_dict(saved)
        expected = {name: v.clone() for name, v in values(optimizer).items()}
        if kinds[1] == "split" and kind == "fp32":
            round_(other)
        elif kinds != ("fp32", "split"):
            assert_same(expected, values(other))
        for step in (3, 4):
            train(fresh, other, [step])
            if kinds[1] == "split" and kind == "fp32":
                round_(other)
        ends.append((copy.deepcopy(fresh.state_dict()), through_file(other.state_dict())["state"]))
    assert_same(ends[0], ends[1])


def test_removing_the_conversion_gives_the_masters_back(device: torch.device, dtype: torch.dtype) -> None:
    """The model is fp32 with the joined values, and the inner optimizer steps on."""
    model, optimizer = wrapped(device, dtype, master="split")
    train(model, optimizer, range(3))
    expected = values(optimizer)
    optimizer.policy_handle.remove()
    assert_same(expected, {n: p.detach().clone() for n, p in model.state_dict().items()})
    loss_of(model, 3).backward()
    optimizer.inner.step()
    assert differs(expected["hidden.weight"], model.hidden.weight.detach().clone())


def test_the_master_model_shows_the_masters_of_now(device: torch.device, dtype: torch.dtype) -> None:
    """It shares their storage until the next step, and shows NaN then: ask anew."""
    model, optimizer = wrapped(device, dtype, master="split")
    train(model, optimizer, [0])
    twin = optimizer.master_model()
    assert_same(values(optimizer), {n: v.clone() for n, v in twin.state_dict().items()})
    train(model, optimizer, [1])
    assert twin.hidden.weight.isnan().all()
    assert is_closed(optimizer)
    assert_same(values(optimizer)["hidden.weight"], optimizer.master_model().hidden.weight.detach())


def test_a_second_optimizer_takes_the_unrounded_weights(device: torch.device, dtype: torch.dtype) -> None:
    """The remainders come from the fp32 weights that the first conversion has seen."""
    model = two_group_model(device)
    before = {n: v.clone() for n, v in model.state_dict().items()}
    shared = SharedLossScale(SMALL_SCALE)
    first, second = two_groups(model)
    options = {"dtype": dtype, "loss_scale": shared, "master": "split"}
    kept = MixedPrecisionOptimizer(adamw([first]), model, **options)
    optimizer = MixedPrecisionOptimizer(adamw([second]), model, **options)
    assert kept.policy_handle is optimizer.policy_handle
    half = model.hidden.bias.detach()
    assert_same(
        join(half, remainder_of(before["hidden.bias"], half)), optimizer._roster.masters.value(model.hidden.bias)
    )


def test_what_others_write_is_taken_over(device: torch.device, dtype: torch.dtype) -> None:
    """Who writes half weights and remainders itself says so; the masters are then the pairs."""
    params = [("a", nn.Parameter(torch.randn(3, 2, device=device))), ("b", nn.Parameter(torch.randn(5, device=device)))]
    masters = MasterWeights(split=True)
    masters.extend(params, [dtype, dtype])
    (bucket,) = masters.buckets
    moved = torch.randn(bucket.layout.size, device=device)
    with torch.no_grad():
        bucket.flat_model.copy_(moved)
        bucket.flat_remainder.copy_(remainder_of(moved, bucket.flat_model))
    versions = [param._version for _, param in params]
    bucket.note_published_()
    assert [v + 1 for v in versions] == [param._version for _, param in params]
    with masters.opened():
        assert torch.equal(bucket.flat_master, join(bucket.flat_model, bucket.flat_remainder))
        assert torch.equal(bucket.masters[1].detach(), bucket.layout.slots[1].view(bucket.flat_master))
    assert not bucket.is_open


def test_opening_mends_what_others_wrote(device: torch.device, dtype: torch.dtype) -> None:
    """A tie belongs to an even weight; at an odd one written over it, nothing that rounds elsewhere is read."""
    above = 1 + torch.finfo(dtype).eps
    # Halfway between 1 and the next half value, and the fp32 value below: the former rounds down, to 1.
    tie = torch.tensor([1 + 1.5 * torch.finfo(dtype).eps, (1 + above) / 2], device=device)
    for read in ("value", "open"):
        param = nn.Parameter(tie.clone())
        masters = MasterWeights(split=True)
        masters.extend([("a", param)], [dtype])
        (bucket,) = masters.buckets
        with torch.no_grad():
            param.fill_(above)
        if read == "value":
            seen = masters.value(param)
        else:
            masters.lend_()
            with masters.opened():
                pass
            assert bucket.is_open
            seen = bucket.masters[0].detach()
        assert torch.equal(seen.to(dtype), param)


def test_a_checksum_tells_overwritten_weights(device: torch.device, dtype: torch.dtype) -> None:
    """Between wrapping and the first step, as DistributedDataParallel does it: remainders do not fit then."""
    param = nn.Parameter(torch.randn(5, device=device))
    bucket = Bucket([("a", param)], dtype, split=True)
    with torch.no_grad():
        param.mul_(1)
        assert bucket.shows_masters()
        param.mul_(2)
    assert not bucket.shows_masters()
    bucket.open_()
    bucket.publish_()
    bucket.close_()
    assert bucket.shows_masters()


# Values of the memory tests, as in test_gpu.py.
VALUES, SLACK = 2**25, 0.25


@pytest.mark.gpu
def test_wrapping_leaves_four_bytes_a_value(dtype: torch.dtype) -> None:
    """Two of the weight, two of the remainder; eight and one tensor at the peak. AdamW adds eight."""
    tensors = [torch.randn(2**10, 2**10, device="cuda") / 32 for _ in range(VALUES // 2**20)]
    model = nn.ParameterList([nn.Parameter(tensor) for tensor in tensors])
    del tensors
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated() - 4 * VALUES
    torch.cuda.reset_peak_memory_stats()
    inner = torch.optim.AdamW(model.parameters(), fused=True)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, master="split")
    peak, after = torch.cuda.max_memory_allocated() - start, torch.cuda.memory_allocated() - start
    # Parts of 2**24 values pass through the split; the temporaries of one are five fp32 tensors at most.
    assert (peak - 5 * 4 * 2**24) / VALUES < 8 + SLACK
    assert after / VALUES < 4 + SLACK
    optimizer.scale(torch.ones((), device="cuda"))
    for param in model.parameters():
        param.grad = torch.full_like(param, 1e-3)
    optimizer.step()
    assert optimizer.last_step.applied
    between = torch.cuda.memory_allocated() - start
    assert between / VALUES < 4 + 8 + 4 + SLACK  # the gradient buffer stays for the next step, if it may
