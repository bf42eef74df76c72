"""Bad input fails clearly, and nothing is changed by the attempt."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import (
    SMALL_SCALE,
    assert_same,
    force_grads,
    loss_of,
    masters_of,
    overflow,
    snapshot,
    train,
    two_group_model,
    two_groups,
    wrapped,
)
from models import adamw as make_adamw
from torch import nn

from mixedopt import (
    CastPolicy,
    CheckpointError,
    DynamicLossScale,
    LossScaleError,
    MixedPrecisionOptimizer,
    SharedLossScale,
    StaticLossScale,
    StepOrderError,
    convert,
)
from mixedopt.errors import in_one_line


def refuse(
    error: type[Exception],
    match: str,
    model: nn.Module | None,
    inner: Any,
    *,
    give_model: bool = True,
    **options: Any,
) -> None:
    """Assert that wrapping raises, and that model and optimizer are as they were."""
    before = snapshot(model, inner if isinstance(inner, torch.optim.Optimizer) else None)
    with pytest.raises(error, match=match):
        MixedPrecisionOptimizer(inner, model if give_model else None, **options)
    assert_same(before, snapshot(model, inner if isinstance(inner, torch.optim.Optimizer) else None))


# -- construction -------------------------------------------------------------


def test_a_parameter_outside_the_model_is_named(device: torch.device) -> None:
    """The message of the house: what is wrong, and how to build it instead."""
    model = two_group_model(device)
    stranger = nn.Parameter(torch.ones(2, device=device))
    inner = make_adamw([*two_groups(model), {"params": [stranger]}])
    match = (
        r"MixedPrecisionOptimizer: parameter 'group2.param0' is in the inner optimizer but not in the model\. "
        r"Build the optimizer from model.parameters\(\)\."
    )
    refuse(ValueError, match, model, inner)


def test_a_named_parameter_outside_the_model_keeps_its_name(device: torch.device) -> None:
    """Where the optimizer knows names, the message uses them."""
    model = two_group_model(device)
    inner = make_adamw([("lost.weight", nn.Parameter(torch.ones(2, device=device)))])
    refuse(ValueError, "parameter 'lost.weight' is in the inner optimizer but not in the model", model, inner)


@pytest.mark.parametrize("with_model", [True, False])
def test_a_parameter_in_two_groups_is_named(with_model: bool, device: torch.device) -> None:
    """A group edited by hand may not list a parameter twice: it would be stepped twice."""
    model = two_group_model(device)
    inner = make_adamw(two_groups(model))
    inner.param_groups[1]["params"].append(inner.param_groups[0]["params"][0])
    name = "'embedding.weight'" if with_model else r"'group1.param\d'"
    match = rf"parameter {name} is in two groups\. Leave it in one\."
    refuse(ValueError, match, model, inner, give_model=with_model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.complex64, "fp16", None, 16])
def test_an_unknown_dtype_is_refused(dtype: Any, device: torch.device) -> None:
    """Only fp16 and bf16 are half formats."""
    model = two_group_model(device)
    match = r"must be torch.float16 or torch.bfloat16\. For fp32 use CastPolicy.fp32\(\)\."
    refuse(ValueError, match, model, make_adamw(two_groups(model)), dtype=dtype)
    with pytest.raises(ValueError, match=match):
        convert(model, dtype)


@pytest.mark.parametrize(
    ("option", "value"),
    [("master", "half"), ("master", None), ("gradients", "fp16"), ("tier", "fast"), ("tier", "Eager"), ("tier", 1)],
)
def test_unknown_choices_list_what_is_allowed(option: str, value: Any, device: torch.device) -> None:
    """A choice that this version does not have is named with its value and the remedy."""
    model = two_group_model(device)
    match = rf"MixedPrecisionOptimizer\({option}={value!r}\): must be '.+' in this version\. Leave it out"
    refuse(ValueError, match, model, make_adamw(two_groups(model)), **{option: value})


@pytest.mark.parametrize("value", [0, 0.0, -1.0, math.nan, math.inf])
def test_max_grad_norm_must_be_positive_and_finite(value: float, device: torch.device) -> None:
    """A limit that would erase or flip every gradient is refused."""
    model = two_group_model(device)
    match = (
        rf"MixedPrecisionOptimizer\(max_grad_norm={value!r}\): must be positive and finite\. The usual value is 1\.0"
    )
    refuse(ValueError, match, model, make_adamw(two_groups(model)), max_grad_norm=value)


@pytest.mark.parametrize("value", [True, False, "1.0", torch.tensor(1.0)], ids=repr)
def test_max_grad_norm_must_be_a_number(value: Any, device: torch.device) -> None:
    """``True`` is a slip, not the number 1."""
    model = two_group_model(device)
    match = r"MixedPrecisionOptimizer\(max_grad_norm=.*\): must be a number or None"
    refuse(TypeError, match, model, make_adamw(two_groups(model)), max_grad_norm=value)


@pytest.mark.parametrize(
    ("build", "match"),
    [
        (lambda: DynamicLossScale(backoff_factor=1.5), r"\(backoff_factor=1.5\): must lie strictly between 0 and 1\. "),
        (lambda: DynamicLossScale(growth_factor=1.0), r"\(growth_factor=1.0\): must be finite and greater than 1"),
        (lambda: DynamicLossScale(init_scale=2.0**40), r"\(init_scale=\S+\): must lie between min_scale="),
        (lambda: DynamicLossScale(init_scale=2.0**-20), r"\(init_scale=\S+\): must lie between min_scale="),
        (lambda: DynamicLossScale(min_scale=0.0), r"\(min_scale=0.0\): must be positive and finite in fp32"),
        (lambda: DynamicLossScale(growth_interval=0), r"\(growth_interval=0\): must be at least 1"),
        (lambda: DynamicLossScale(hysteresis=0), r"\(hysteresis=0\): must be at least 1"),
        (lambda: StaticLossScale(-1.0), r"StaticLossScale\(scale=-1.0\): must be positive and finite"),
        (lambda: StaticLossScale(1e39), r"StaticLossScale\(scale=1e\+39\): must be positive and finite"),
        (lambda: StaticLossScale(math.nan), r"StaticLossScale\(scale=nan\): must be positive and finite"),
        (lambda: StaticLossScale(1.0, max_consecutive_skips=0), r"\(max_consecutive_skips=0\): must be at least 1"),
    ],
)
def test_a_scale_outside_its_bounds_is_refused(build: Callable[[], Any], match: str) -> None:
    """Each rule of a loss scale names the value, the rule and the remedy."""
    with pytest.raises(ValueError, match=match):
        build()


@pytest.mark.parametrize("value", [0, -2.0, math.inf, math.nan])
def test_a_static_number_obeys_the_same_rule(value: float, device: torch.device) -> None:
    """``loss_scale=0`` would erase every gradient: nothing is changed by the attempt."""
    model = two_group_model(device)
    match = r"StaticLossScale\(scale=.*\): must be positive and finite"
    refuse(ValueError, match, model, make_adamw(two_groups(model)), loss_scale=value)


@pytest.mark.parametrize("value", ["dynamic", True, [1.0], torch.tensor(2.0)], ids=repr)
def test_a_loss_scale_of_another_kind_is_refused(value: Any, device: torch.device) -> None:
    """The message lists what a loss scale may be."""
    model = two_group_model(device)
    match = r"MixedPrecisionOptimizer\(loss_scale=.*\): must be None, a number, a StaticLossScale or a Dynamic"
    refuse(TypeError, match, model, make_adamw(two_groups(model)), loss_scale=value)


def test_only_an_optimizer_can_be_wrapped(device: torch.device) -> None:
    """The class, or a list of parameters, is not an optimizer."""
    model = two_group_model(device)
    match = r"MixedPrecisionOptimizer\(optimizer=.*\): must be a torch.optim.Optimizer instance"
    for value in (torch.optim.AdamW, "AdamW", None):
        refuse(TypeError, match, model, value)


def test_a_wrapper_is_not_wrapped_again(device: torch.device, dtype: torch.dtype) -> None:
    """Two wrappers around one optimizer would divide by two scales."""
    model, optimizer = wrapped(device, dtype)
    before = snapshot(model, optimizer)
    with pytest.raises(TypeError, match=r"is wrapped already\. Wrap a bare one, once\."):
        MixedPrecisionOptimizer(optimizer)
    assert_same(before, snapshot(model, optimizer))


def test_an_optimizer_that_re_evaluates_has_no_clip_and_no_shared_scale(device: torch.device) -> None:
    """LBFGS searches along its gradients, and evaluates within its step: both are refused before any conversion."""
    model = two_group_model(device)
    inner = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])
    refuse(ValueError, r"max_grad_norm=1.0\): LBFGS searches along its gradients", model, inner, max_grad_norm=1.0)
    shared = SharedLossScale(2.0**4)
    refuse(ValueError, r"SharedLossScale\(...\)\): LBFGS evaluates the model", model, inner, loss_scale=shared)


def test_an_optimizer_that_re_evaluates_needs_its_closure(device: torch.device, dtype: torch.dtype) -> None:
    """``step()`` of LBFGS without a closure is refused before anything is gathered."""
    model = two_group_model(device)
    inner = torch.optim.LBFGS([p for p in model.parameters() if p.requires_grad])
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=SMALL_SCALE)
    optimizer.backward(loss_of(model, 0))
    before = snapshot(model, optimizer)
    with pytest.raises(TypeError, match=r"step\(\): LBFGS evaluates the model several times. Pass a closure that"):
        optimizer.step()
    assert_same(before, snapshot(model, optimizer))


def test_a_policy_needs_a_model(device: torch.device) -> None:
    """A policy without a model would do nothing, silently."""
    model = two_group_model(device)
    inner = make_adamw(two_groups(model))
    match = r"MixedPrecisionOptimizer\(policy=...\): needs a model to convert\. Pass model=, or leave policy out\."
    refuse(ValueError, match, model, inner, give_model=False, policy=CastPolicy.default())


def test_policy_and_model_must_be_what_they_are_called(device: torch.device) -> None:
    """Swapped or misspelt arguments are named."""
    model = two_group_model(device)
    inner = make_adamw(two_groups(model))
    refuse(TypeError, r"\(policy='default'\): must be a CastPolicy", model, inner, policy="default")
    with pytest.raises(TypeError, match=r"\(model='net'\): must be an nn.Module\. Pass the model the optimizer trains"):
        MixedPrecisionOptimizer(inner, "net")  # type: ignore[arg-type]


@pytest.mark.parametrize("argument", ["optimizer", "model"])
def test_a_message_is_one_line(argument: str, device: torch.device) -> None:
    """``model.parameters()`` in the place of an object gives one readable line."""
    model = two_group_model(device)
    params = list(model.parameters())
    with pytest.raises(TypeError) as caught:
        MixedPrecisionOptimizer(*((params,) if argument == "optimizer" else (make_adamw(two_groups(model)), params)))
    assert "\n" not in str(caught.value)


def test_a_model_is_not_converted_twice(device: torch.device, dtype: torch.dtype) -> None:
    """A second conversion would round twice: convert, convert and wrap, wrap and convert."""
    model = two_group_model(device)
    handle = convert(model, dtype)
    match = r"is converted already: converting it twice would round its weights again\. Undo the first"
    refuse(ValueError, match, model, make_adamw(two_groups(model)), dtype=dtype)
    with pytest.raises(ValueError, match=match):
        convert(model, dtype)
    with pytest.raises(ValueError, match=match):
        convert(nn.Sequential(model), dtype)
    handle.remove()
    MixedPrecisionOptimizer(make_adamw(two_groups(model)), model, dtype=dtype)
    with pytest.raises(ValueError, match=match):
        convert(model, dtype)


@pytest.mark.parametrize("with_model", [True, False])
def test_complex_parameters_are_refused(with_model: bool, device: torch.device) -> None:
    """A complex parameter has no half format."""
    model = nn.Sequential(nn.Linear(2, 2)).to(device)
    model.phase = nn.Parameter(torch.ones(2, dtype=torch.complex64, device=device))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    name = "'phase'" if with_model else r"'group0.param\d'"
    refuse(ValueError, rf"parameter {name} is complex: it has no half format\.", model, inner, give_model=with_model)


@pytest.mark.parametrize("with_model", [True, False])
def test_float64_parameters_are_refused(with_model: bool, device: torch.device) -> None:
    """A double parameter would lose precision to an fp32 master, silently."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, dtype=torch.float64)).to(device)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    match = (
        r"parameter '1.weight' is float64: masters are fp32\. Call model.float\(\) first\."
        if with_model
        else r"parameter 'group0.param2' is torch.float64: must be fp16, bf16 or fp32\."
    )
    refuse(ValueError, match, model, inner, give_model=with_model)


def test_lazy_modules_are_refused(device: torch.device) -> None:
    """A parameter without a shape cannot have a master."""
    model = nn.Sequential(nn.LazyLinear(3, device=device))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"parameter '0.weight' is not initialised yet: run one forward pass before"):
        MixedPrecisionOptimizer(inner, model)
    model(torch.ones(1, 2, device=device))
    assert model[0].weight.dtype == torch.float32
    MixedPrecisionOptimizer(inner, model)


def test_a_weight_beyond_the_half_range_is_named(device: torch.device) -> None:
    """A weight of 1e5 would be inf in fp16: which one, and how to keep it."""
    model = two_group_model(device)
    with torch.no_grad():
        model.hidden.weight[1, 2] = 1e5
    match = (
        r"parameter 'hidden.weight' holds 100000, beyond the largest value of torch.float16, 65504\. "
        r"Keep it in fp32 with policy.keep\('hidden.weight'\), or use dtype=torch.bfloat16\."
    )
    refuse(ValueError, match, model, make_adamw(two_groups(model)))
    with pytest.raises(ValueError, match=match):
        convert(model)
    inner = make_adamw(two_groups(model))
    MixedPrecisionOptimizer(inner, model, policy=CastPolicy.default().keep("hidden.weight"))
    assert model.hidden.weight[1, 2] == 1e5


def test_a_weight_that_grows_beyond_the_range_is_named_and_can_be_mended(device: torch.device) -> None:
    """Training out of the fp16 range raises at a step that changes nothing; a checkpoint mends it."""
    model = nn.Linear(2, 1, bias=False).to(device)
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model, loss_scale=1.0)
    good = copy.deepcopy(optimizer.state_dict())
    for value in (-6e4, -6e4, math.inf):  # the third is what a forward with an inf weight gives
        force_grads(optimizer, value)
        optimizer.step()
    assert optimizer.last_step.skipped
    before = snapshot(model, optimizer)
    force_grads(optimizer, 1.0)
    with pytest.raises(
        ValueError, match=r"parameter 'weight' holds 1200\d\d, beyond the largest value of torch.float16"
    ):
        optimizer.step()
    assert_same(before, snapshot(model, optimizer))
    optimizer.load_state_dict(good)
    force_grads(optimizer, 1.0)
    optimizer.step()
    assert optimizer.last_step.applied
    assert bool(model.weight.isfinite().all())


def test_publishing_a_master_beyond_the_range_writes_nothing(device: torch.device) -> None:
    """An edited master that does not fit is named, and no other is published."""
    model, optimizer = wrapped(device, torch.float16)
    before = copy.deepcopy(model.state_dict())
    masters = dict(optimizer.named_masters())
    with torch.no_grad():
        masters["embedding.weight"].add_(1)
        masters["hidden.weight"][0, 0] = 1e6
    with pytest.raises(ValueError, match=r"parameter 'hidden.weight' holds 1e\+06"):
        optimizer.publish()
    assert_same(dict(before), dict(model.state_dict()))


class Overlapping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        storage = torch.ones(6)
        self.norm = nn.BatchNorm1d(4)
        self.one = nn.Parameter(storage[:4])
        self.two = nn.Parameter(storage[2:])


def test_overlapping_parameters_are_refused(device: torch.device) -> None:
    """Two parameters that share values are named, and nothing is changed."""
    model = Overlapping().to("cpu")
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    refuse(ValueError, r"parameters 'one' and 'two' overlap in memory: each must have its own values", model, inner)


# -- the loop -----------------------------------------------------------------


@pytest.mark.parametrize("call", ["scale", "backward"])
@pytest.mark.parametrize(
    ("loss", "error", "match"),
    [
        (lambda m: 1.5, TypeError, r"backward\(loss=1.5\): must be a tensor\. Pass the loss before .item\(\)\."),
        (lambda m: None, TypeError, r"backward\(loss=None\): must be a tensor"),
        (lambda m: torch.tensor(3), ValueError, r"backward\(loss of torch.int64\): must be floating"),
        (lambda m: torch.tensor(True), ValueError, r"backward\(loss of torch.bool\): must be floating"),
        (lambda m: m.hidden.bias * 1, ValueError, r"backward\(loss of shape \(8,\)\): must be a scalar\. Call .mean"),
        (lambda m: m.hidden.bias[:0], ValueError, r"backward\(loss of shape \(0,\)\): must be a scalar"),
    ],
    ids=["float", "None", "integer", "bool", "vector", "empty"],
)
def test_a_bad_loss_changes_nothing(
    loss: Callable[[Any], Any], error: type[Exception], match: str, call: str, device: torch.device, dtype: torch.dtype
) -> None:
    """A loss must be one floating number; the window stays as it was."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=match):
        getattr(optimizer, call)(loss(model))
    with pytest.raises(error, match=match):
        getattr(optimizer, call)([loss_of(model, 0), loss(model)])
    assert_same(before, snapshot(model, optimizer))
    optimizer.step()
    assert optimizer.last_step.applied


def test_unscale_twice_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    """Gradients are divided once; after the refusal the step still goes on."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    optimizer.unscale_()
    grads = {name: None if m.grad is None else m.grad.clone() for name, m in optimizer.named_masters()}
    before = snapshot(model, optimizer)
    with pytest.raises(StepOrderError, match=r"unscale_\(\) after unscale_\(\): the window's gradients are unscaled\."):
        optimizer.unscale_()
    assert_same(before, snapshot(model, optimizer))
    assert_same(grads, {n: None if m.grad is None else m.grad.clone() for n, m in optimizer.named_masters()})
    optimizer.step()
    assert optimizer.last_step.applied


def test_our_backward_after_unscale_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    """Scaled gradients cannot join unscaled ones; the refusal comes before autograd runs."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    optimizer.unscale_()
    before = snapshot(model, optimizer)
    for call in (optimizer.backward, optimizer.scale):
        with pytest.raises(StepOrderError, match=r"backward\(\) after unscale_\(\): .* Call step\(\) first\."):
            call(loss_of(model, 1))
    assert_same(before, snapshot(model, optimizer))


def test_a_plain_backward_after_unscale_is_seen_at_step(device: torch.device, dtype: torch.dtype) -> None:
    """A ``loss.backward()`` past us is found when the step begins, and nothing moves."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    optimizer.unscale_()
    loss_of(model, 1).backward()
    before = snapshot(model, optimizer)
    with pytest.raises(StepOrderError, match=r"backward\(\) after unscale_\(\): the new gradients have another unit"):
        optimizer.step()
    assert_same(before, snapshot(model, optimizer))
    optimizer.zero_grad()
    train(model, optimizer, [2])
    assert optimizer.last_step.applied


def test_assign_true_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    """Replacing the Parameter objects would orphan the masters: refused before anything is loaded."""
    model, optimizer = wrapped(device, dtype)
    weights = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
    before = snapshot(model, optimizer)
    match = r"load_state_dict\(assign=True\): would replace the parameters .* Load without assign"
    with pytest.raises(ValueError, match=match):
        model.load_state_dict(weights, assign=True)
    assert_same(before, snapshot(model, optimizer))
    model.load_state_dict(weights)
    assert not model.hidden.weight.any()


def test_assign_true_into_a_submodule_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    """The same through a submodule: silently, that layer would never train again."""
    model, optimizer = wrapped(device, dtype)
    weights = {name: torch.zeros_like(value) for name, value in model.hidden.state_dict().items()}
    try:
        model.hidden.load_state_dict(weights, assign=True)
        train(model, optimizer, [0])
    except ValueError:
        return
    masters = dict(optimizer.named_masters())
    assert torch.equal(model.hidden.weight, masters["hidden.weight"].to(dtype))


def test_a_parameter_moved_out_of_its_storage_is_named(device: torch.device, dtype: torch.dtype) -> None:
    """``p.data = ...`` behind our back raises at the next step."""
    model, optimizer = wrapped(device, dtype)
    optimizer.backward(loss_of(model, 0))
    model.hidden.weight.data = model.hidden.weight.data.clone()
    before = snapshot(model, optimizer)
    with pytest.raises(ValueError, match=r"parameter 'hidden.weight' was moved out of the optimizer's flat storage"):
        optimizer.step()
    assert_same(before, snapshot(model, optimizer))


def test_too_many_skips_raise_and_name_the_culprit(device: torch.device, dtype: torch.dtype) -> None:
    """At the floor the run ends with the first bad parameter and the remedies; nothing has moved."""
    config = DynamicLossScale(init_scale=2.0**-14, max_consecutive_skips=3)
    model, optimizer = wrapped(device, dtype, loss_scale=config)
    last = [n for n, p in model.named_parameters() if any(p is q for q in optimizer.param_groups[-1]["params"])][-1]
    before = {key: value for key, value in snapshot(model, optimizer).items() if key != "counters"}
    overflow(optimizer)
    overflow(optimizer)
    match = (
        rf"found_inf with loss_scale at min_scale=6\.1e-05 \(3 skips in a row\)\. First bad parameter: '{last}'\. "
        r"Lower the learning rate, set max_grad_norm, or keep that module in fp32\."
    )
    with pytest.raises(LossScaleError, match=match) as caught:
        overflow(optimizer)
    assert isinstance(caught.value, FloatingPointError)
    assert optimizer.skipped_steps == 3
    assert_same(before, {key: value for key, value in snapshot(model, optimizer).items() if key != "counters"})


def test_too_many_skips_at_a_static_scale_raise(device: torch.device, dtype: torch.dtype) -> None:
    """A static scale has no room at all: its value is in the message."""
    _, optimizer = wrapped(device, dtype, loss_scale=StaticLossScale(8.0, max_consecutive_skips=1))
    with pytest.raises(LossScaleError, match=r"found_inf with loss_scale static at 8 \(1 skips in a row\)"):
        overflow(optimizer)


# -- state, groups and the end -------------------------------------------------


def test_a_state_dict_inside_a_window_is_refused(device: torch.device, dtype: torch.dtype) -> None:
    """Saving or loading would lose the window's gradients, before and after ``unscale_``."""
    model, optimizer = wrapped(device, dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.backward(loss_of(model, 0))
    for unscaled in (False, True):
        if unscaled:
            optimizer.unscale_()
        before = snapshot(model, None)
        with pytest.raises(
            StepOrderError, match=r"^state_dict\(\) inside a window would lose its gradients\. Call it after step"
        ):
            optimizer.state_dict()
        with pytest.raises(StepOrderError, match=r"load_state_dict\(\) inside a window would lose its gradients"):
            optimizer.load_state_dict(saved)
        assert_same(before, snapshot(model, None))
    optimizer.step()
    assert optimizer.last_step.applied
    optimizer.state_dict()


def test_a_missing_master_has_the_message_of_the_house(device: torch.device, dtype: torch.dtype) -> None:
    """``CheckpointError`` names the parameter, and says that nothing was loaded."""
    model, optimizer = wrapped(device, dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][saved["mixedopt"]["names"].index("head.bias")]
    before = snapshot(model, optimizer)
    with pytest.raises(CheckpointError) as caught:
        optimizer.load_state_dict(saved)
    assert str(caught.value) == (
        "state_dict has no master weight for 'head.bias' (if it was frozen then, load with strict=False). "
        "Nothing was loaded."
    )
    assert isinstance(caught.value, ValueError)
    assert_same(before, snapshot(model, optimizer))


def test_nothing_works_after_the_conversion_was_removed(device: torch.device, dtype: torch.dtype) -> None:
    """A wrapper that has ended says so, and where to go on."""
    model, optimizer = wrapped(device, dtype)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.policy_handle.remove()
    before = snapshot(model, optimizer.inner)
    match = r"the conversion was removed: the model is fp32 again\. Continue with optimizer.inner\."
    fresh = {"params": [nn.Parameter(torch.ones(2, device=device))]}
    for call in (
        optimizer.step,
        optimizer.unscale_,
        lambda: optimizer.load_state_dict(saved),
        lambda: optimizer.add_param_group(fresh),
    ):
        with pytest.raises(StepOrderError, match=match):
            call()
    assert_same(before, snapshot(model, optimizer.inner))


def test_an_ended_wrapper_does_not_scale(device: torch.device, dtype: torch.dtype) -> None:
    """After ``remove`` a forgotten ``optimizer.backward`` is refused, not S times too large."""
    model, optimizer = wrapped(device, dtype)
    optimizer.policy_handle.remove()
    with pytest.raises(StepOrderError, match="the conversion was removed"):
        optimizer.backward(loss_of(model, 0))


@pytest.mark.parametrize(
    ("group", "error", "match"),
    [
        (lambda m, s: {"params": [m.hidden.bias]}, ValueError, r"parameter 'hidden.bias' is in two groups"),
        (lambda m, s: {"params": [s, s]}, ValueError, r"is in the inner optimizer but not in the model"),
        (lambda m, s: {"params": s, "lr": 0.1}, ValueError, r"parameter 'group2.param0' is in the inner optimizer but"),
    ],
    ids=["known", "stranger twice", "stranger"],
)
def test_a_bad_group_changes_nothing(
    group: Callable[[Any, Any], dict[str, Any]],
    error: type[Exception],
    match: str,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """A group that cannot be trained here leaves both optimizers as they were."""
    model, optimizer = wrapped(device, dtype)
    train(model, optimizer, [0])
    before = snapshot(model, optimizer)
    with pytest.raises(error, match=match):
        optimizer.add_param_group(group(model, nn.Parameter(torch.ones(2, device=device))))
    assert_same(before, snapshot(model, optimizer))
    train(model, optimizer, [1])
    assert optimizer.last_step.applied


def test_a_group_without_a_required_value_changes_nothing(device: torch.device) -> None:
    """What torch's own ``add_param_group`` refuses, is refused with its words."""
    first, second = (nn.Parameter(torch.ones(2, dtype=torch.float16, device=device)) for _ in range(2))
    optimizer = MixedPrecisionOptimizer(torch.optim.SGD([first], lr=0.1))
    before = snapshot(None, optimizer)
    with pytest.raises(ValueError, match="can't optimize a non-leaf Tensor"):
        optimizer.add_param_group({"params": [(second * 1)]})
    assert_same(before, snapshot(None, optimizer))


def test_params_of_a_view_cannot_be_written(device: torch.device, dtype: torch.dtype) -> None:
    """The list of parameters is not a hyperparameter."""
    _, optimizer = wrapped(device, dtype)
    with pytest.raises(ValueError, match=r"\['params'\] cannot be assigned\. Use add_param_group\(\)\."):
        optimizer.param_groups[0]["params"] = []
    with pytest.raises(ValueError, match=r"\['params'\] cannot be deleted"):
        del optimizer.param_groups[0]["params"]
    assert optimizer.param_groups[0]["params"]


def test_an_optimizer_has_one_wrapper(device: torch.device, dtype: torch.dtype) -> None:
    """The second one would own masters of masters, and the model would stand still."""
    _, optimizer = wrapped(device, dtype)
    with pytest.raises(TypeError, match=r"\(optimizer=AdamW\(...\)\): is wrapped already\. Wrap a bare one, once\."):
        MixedPrecisionOptimizer(optimizer.inner)


def test_the_inner_optimizer_steps_only_through_its_wrapper(device: torch.device, dtype: torch.dtype) -> None:
    """Called directly it would leave the model behind: refused, until ``remove`` gives it back."""
    model, optimizer = wrapped(device, dtype)
    force_grads(optimizer, 1.0)
    optimizer.unscale_()
    before = snapshot(model, optimizer)
    with pytest.raises(StepOrderError, match=r"AdamW.step\(\) was called directly, but it is wrapped"):
        optimizer.inner.step()
    assert_same(before, snapshot(model, optimizer))
    optimizer.step()
    assert optimizer.last_step.applied
    optimizer.policy_handle.remove()
    optimizer.inner.step()


def test_a_copy_of_the_model_is_watched_by_nobody(device: torch.device, dtype: torch.dtype) -> None:
    """Loading into a deep copy, or training it, leaves the original's masters alone; the optimizer can die."""
    model, optimizer = wrapped(device, dtype)
    before = masters_of(optimizer)
    twin = copy.deepcopy(model)
    twin.load_state_dict({k: torch.zeros_like(v) for k, v in two_group_model(device).state_dict().items()})
    assert_same(before, masters_of(optimizer))
    assert (twin.hidden.weight == 0).all()
    alive = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert alive() is None
    finally:
        gc.enable()
    model.load_state_dict(twin.state_dict())
    assert (model.hidden.weight == 0).all()


def test_a_parameter_of_another_optimizer_is_not_added(device: torch.device, dtype: torch.dtype) -> None:
    """Two optimizers of one model: neither takes what the other has, and nothing is changed."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)).to(device)
    shared = SharedLossScale(2.0**4)
    first, second = (
        MixedPrecisionOptimizer(make_adamw(part.parameters()), model, dtype=dtype, loss_scale=shared) for part in model
    )
    before = snapshot(model, second)
    with pytest.raises(ValueError, match=r"parameter '0.weight' is in another optimizer of this model. Leave it in"):
        second.add_param_group({"params": [model[0].weight]})
    assert_same(before, snapshot(model, second))
    first.backward(model(torch.ones(1, 4, device=device)).sum())
    shared.step(first, second)
    assert first.last_step.applied


@pytest.mark.parametrize("call", ["remove", "refresh_masters"])
def test_a_moved_parameter_is_refused_before_anything_is_undone(
    call: str, device: torch.device, dtype: torch.dtype
) -> None:
    """``remove()`` and ``refresh_masters()`` name it; once it is back in its place, all goes on."""
    model, optimizer = wrapped(device, dtype)
    data = model.hidden.weight.data
    before = snapshot(model, optimizer)
    model.hidden.weight.data = data.clone()
    with pytest.raises(ValueError, match=r"parameter 'hidden.weight' was moved"):
        optimizer.policy_handle.remove() if call == "remove" else optimizer.refresh_masters()
    model.hidden.weight.data = data
    assert_same(before, snapshot(model, optimizer))
    assert optimizer.policy_handle.active
    train(model, optimizer, [0])
    optimizer.policy_handle.remove()
    assert all(param.dtype == torch.float32 for param in model.parameters())


def test_a_loss_that_was_scaled_is_not_scaled_again(device: torch.device, dtype: torch.dtype) -> None:
    """Our own product is known at any time, GradScaler's until the first step; ordinary products are not."""
    model, optimizer = wrapped(device, dtype, loss_scale=2.0**10)
    loss = loss_of(model, 0)
    with pytest.raises(StepOrderError, match=r"scaled twice: it comes from scale\(\)"):
        optimizer.backward(optimizer.scale(loss))
    with pytest.raises(StepOrderError, match=r"multiplied by 65536, as torch.amp.GradScaler does"):
        optimizer.backward(loss * torch.tensor(2.0**16, device=device))
    for factor in (1024, 1024.0, torch.tensor(1000.0, device=device), torch.tensor(2.0, device=device)):
        optimizer.scale(loss * factor)
    optimizer.scale(loss * torch.tensor(2.0**16, device=device, requires_grad=True))


def test_a_plain_dict_with_names_is_matched_by_name(device: torch.device, dtype: torch.dtype) -> None:
    """State follows its name, though the parameters stand in another order; shapes alone could not tell."""
    model = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)}).to(device)
    bare = torch.optim.SGD(model.named_parameters(), lr=0.1, momentum=0.9)
    for value, param in enumerate(model.parameters()):
        param.grad = torch.full_like(param, float(value))
    bare.step()
    saved = copy.deepcopy(bare.state_dict())
    inner = torch.optim.SGD(reversed(list(model.named_parameters())), lr=0.1, momentum=0.9)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype)
    optimizer.load_state_dict(saved)
    state = {name: optimizer.inner.state[master] for name, master in optimizer.named_masters()}
    assert [0.0, 1.0] == [float(state[name]["momentum_buffer"][0, 0]) for name in ("a.weight", "b.weight")]


def test_an_exception_without_text_is_told_by_its_type() -> None:
    """A bare ``assert`` of somebody's, where another error quotes it."""
    assert in_one_line(AssertionError()) == "AssertionError"
    assert in_one_line(ValueError("\n one\ntwo")) == "ValueError: one"
