"""Inner optimizers of awkward kinds: each keeps something where a wrapper might not look."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_same, through_file, two_group_model
from torch import Tensor, nn, optim

from mixedopt import CastPolicy, MixedPrecisionOptimizer
from mixedopt.copies import copied, mapped
from mixedopt.testing import check_optimizer

SCALE = 2.0**4


class Momentum(optim.Optimizer):
    """Gradient descent with momentum, written plainly, to be varied."""

    def __init__(self, params: Any, lr: float = 0.1, **defaults: Any) -> None:
        super().__init__(params, {"lr": lr, **defaults})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.move(param, group)

    def move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        velocity = self.state[param].setdefault("velocity", torch.zeros_like(param))
        velocity.mul_(0.9).add_(param.grad)
        param.add_(velocity, alpha=-group["lr"])


class Contiguous(Momentum):
    """Moves its parameters to storage of their own, as some 8-bit optimizers do."""

    def move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        param.data = param.data.contiguous().clone()
        super().move(param, group)


class Quantised(Tensor):
    """A tensor made of two, that cannot be cloned or copied as a whole."""

    codes: Tensor
    size_of: Tensor

    @staticmethod
    def __new__(cls, codes: Tensor, size_of: Tensor) -> Quantised:
        return Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32, device=codes.device)

    def __init__(self, codes: Tensor, size_of: Tensor) -> None:
        self.codes, self.size_of = codes, size_of

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["codes", "size_of"], None

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: None, *shape: Any) -> Quantised:
        return Quantised(parts["codes"], parts["size_of"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return args[0]
        raise NotImplementedError(f"{func} of a quantised tensor")


class EightBit(Momentum):
    """Keeps its momentum in eight bits."""

    def move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        state = self.state[param]
        old = state["velocity"].codes * state["velocity"].size_of if state else torch.zeros_like(param)
        velocity = 0.9 * old + param.grad
        size = velocity.abs().max() / 127 + 1e-12
        state["velocity"] = Quantised((velocity / size).round().to(torch.int8), size)
        param.add_(velocity, alpha=-group["lr"])


class Outer(Momentum):
    """Steps through an optimizer of its own, which has its own state."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, lr)
        self.base = optim.AdamW(self.param_groups, lr=lr)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.base.step()
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "base": self.base.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})
        self.base.load_state_dict(state_dict["base"])
        self.param_groups = self.base.param_groups


class Counts(Momentum):
    """Counts outside state, in the group and under a name in state; all of it is in the file."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, decay=1.0)
        self.total = 0
        self.state["shared"] = torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.total += 1
        self.state["shared"] += 1
        for group in self.param_groups:
            group["lr"] = 0.1 / (self.total + float(self.state["shared"]))
            group["decay"] *= 0.5
            group["seen"] = self.total
        super().step()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "total": self.total}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.total = state_dict["total"]
        super().load_state_dict({key: value for key, value in state_dict.items() if key != "total"})


class OwnFormat(Momentum):
    """Writes a state dict that is not torch-shaped."""

    def state_dict(self) -> dict[str, Any]:
        return {"mine": [super().state_dict()]}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict["mine"][0])


class Lists(Momentum):
    """Keeps lists of tensors."""

    def move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        history = self.state[param].setdefault("history", [])
        history.append(param.grad.clone())
        history[0].mul_(0.5)
        param.add_(sum(history), alpha=-group["lr"])


KINDS = [Momentum, Contiguous, EightBit, Outer, Counts, OwnFormat, Lists]


@pytest.mark.parametrize("cls", KINDS)
def test_an_awkward_optimizer_conforms(cls: type[Momentum]) -> None:
    """Equality, rollback, resume, missing gradients, schedulers: all hold, whatever it keeps where."""
    report = check_optimizer(cls)
    assert report.holds, str(report)
    expected = {"equality", "rollback", "resume", "none gradients"}
    assert expected <= {outcome.law for outcome in report.outcomes if outcome.status == "passed"}, str(report)


def grads(params: list[nn.Parameter], step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(param.shape, generator=generator).to(torch.bfloat16).to(param.device) for param in params]


@pytest.mark.parametrize("cls", KINDS)
def test_an_awkward_optimizer_keeps_its_state_when_it_is_wrapped_and_unwrapped(
    cls: type[Momentum], device: torch.device
) -> None:
    """Two bare steps, two wrapped ones, two bare ones after ``remove()`` equal six bare ones, bit for bit."""
    ours, theirs = (nn.Linear(5, 4).to(device) for _ in range(2))
    theirs.load_state_dict(ours.state_dict())
    inner, bare = cls(ours.parameters()), cls(theirs.parameters())
    params, others = list(ours.parameters()), list(theirs.parameters())

    def step(optimizer: optim.Optimizer, params: list[nn.Parameter], number: int, scale: float = 1.0) -> None:
        for param, grad in zip(params, grads(params, number), strict=True):
            param.grad = (grad * scale).to(param.dtype)
        optimizer.step()

    for number in range(6):
        step(bare, others, number)
    for number in range(2):
        step(inner, params, number)
    wrapper = MixedPrecisionOptimizer(inner, ours, dtype=torch.bfloat16, loss_scale=SCALE)
    wrapper.scale(torch.zeros((), device=device))
    for number in range(2, 4):
        step(wrapper, params, number, SCALE)
        assert wrapper.last_step.applied
    wrapper.policy_handle.remove()
    for number in range(4, 6):
        step(inner, params, number)
    assert_same([p.detach() for p in others], [p.detach() for p in params])


def test_a_master_that_was_moved_is_brought_back(device: torch.device, dtype: torch.dtype) -> None:
    """After ``p.data = ...`` inside the inner step the model follows, and the master is a view again."""
    param = nn.Parameter(torch.randn(6, 3, device=device).to(dtype).t())
    optimizer = MixedPrecisionOptimizer(Contiguous([param]), loss_scale=SCALE)
    master = next(master for _, master in optimizer.named_masters())
    where, strides, before = master.data_ptr(), master.stride(), param.detach().clone()
    for _ in range(3):
        optimizer.scale(torch.zeros((), device=device))
        param.grad = torch.full_like(param, SCALE)
        optimizer.step()
    assert (where, strides) == (master.data_ptr(), master.stride())
    assert torch.equal(param.detach(), master.detach().to(dtype))
    assert not torch.equal(before, param.detach())


class Fails(Counts):
    """Raises in the middle of a step, when told to."""

    fail = False

    def move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
        super().move(param, group)
        if self.fail:
            raise RuntimeError("no")


def test_a_first_step_that_fails_leaves_no_trace(device: torch.device, dtype: torch.dtype) -> None:
    """Masters, state, hyperparameters and counters are as before; the same tensor learning rate stays in place."""
    model = two_group_model(device)
    inner = Fails([param for param in model.parameters() if param.requires_grad])
    rate = inner.param_groups[0]["lr"] = torch.tensor(0.1)
    optimizer = MixedPrecisionOptimizer(inner, model, dtype=dtype, loss_scale=SCALE)

    def take() -> Any:
        masters = {name: master.detach().clone() for name, master in optimizer.named_masters()}
        hyper = [{k: v for k, v in group.items() if k != "params"} for group in inner.param_groups]
        return copied([masters, hyper, inner.total, dict(inner.state)])

    before = take()
    for fail in (True, False):
        inner.fail = fail
        optimizer.backward(sum(p.float().square().sum() for p in model.parameters() if p.requires_grad))
        if fail:
            with pytest.raises(RuntimeError, match="no"):
                optimizer.step()
            assert_same(before, take())
            inner.param_groups[0]["lr"] = rate
    optimizer.step()
    assert optimizer.last_step.applied
    assert 1 == inner.total


def test_state_kept_in_half_on_purpose_stays_half(device: torch.device) -> None:
    """An optimizer that stores bf16 for an fp32 parameter gets it back; state of a half parameter is widened."""

    class Frugal(Momentum):
        def move(self, param: nn.Parameter, group: dict[str, Any]) -> None:
            old = self.state[param].get("velocity", torch.zeros_like(param))
            velocity = old.to(param.dtype) * 0.9 + param.grad
            self.state[param]["velocity"] = velocity.to(torch.bfloat16)
            self.state[param]["parts"] = [velocity.clone()]
            param.add_(velocity, alpha=-group["lr"])

    for kept, expected in ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32)):
        param = nn.Parameter(torch.ones(3, dtype=kept, device=device))
        inner = Frugal([param])
        param.grad = torch.ones_like(param)
        inner.step()
        model = nn.ParameterList([param]) if kept == torch.float32 else None
        options = {"policy": CastPolicy.none(), "dtype": torch.bfloat16} if model is not None else {}
        optimizer = MixedPrecisionOptimizer(inner, model, loss_scale=1.0, **options)
        state = next(iter(optimizer.state.values()))
        assert expected == state["velocity"].dtype
        assert torch.float32 == state["parts"][0].dtype


def test_loading_copies_nested_tensors(device: torch.device, dtype: torch.dtype) -> None:
    """Steps after a load leave the caller's dict alone, however deep its tensors lie."""
    param = nn.Parameter(torch.ones(4, dtype=dtype, device=device))
    optimizer = MixedPrecisionOptimizer(Lists([param]), loss_scale=SCALE)

    def step() -> None:
        optimizer.scale(torch.zeros((), device=device))
        param.grad = torch.full_like(param, SCALE)
        optimizer.step()

    step()
    saved = through_file(optimizer.state_dict())
    before = copy.deepcopy(saved)
    optimizer.load_state_dict(saved)
    step()
    assert_same(before, saved)


@pytest.mark.parametrize("make", [copied, lambda value: mapped(value, torch.clone)])
def test_a_copy_shares_what_the_original_shares(make: Callable[[Any], Any]) -> None:
    """One tensor at two places stays one; nothing is shared with the original."""
    tensor = torch.ones(2)
    quantised = Quantised(torch.ones(2, dtype=torch.int8), torch.tensor(0.5))
    new = make({"a": [tensor, 1], "b": (tensor, "x"), "q": quantised, "n": None})
    assert new["a"][0] is new["b"][0]
    assert new["a"][0] is not tensor
    assert new["q"].codes is not quantised.codes
    assert torch.equal(new["q"].codes, quantised.codes)
    assert [1, "x", None] == [new["a"][1], new["b"][1], new["n"]]


def test_an_optimizer_without_hooks_is_refused_by_name(device: torch.device) -> None:
    """A class that never calls ``Optimizer.__init__`` cannot be guarded: a TypeError says so."""

    class Hollow(optim.Optimizer):
        def __init__(self, params: Any) -> None:
            self.param_groups = [{"params": list(params)}]
            self.state = {}

        def step(self, closure: Any = None) -> None: ...

    with pytest.raises(TypeError, match=r"Hollow\(\.\.\.\)\): has no step hooks, since its class does not call"):
        MixedPrecisionOptimizer(Hollow([nn.Parameter(torch.ones(2, device=device))]))


def test_quantised_tensors_really_cannot_be_cloned() -> None:
    """Else the tests above would show nothing."""
    with pytest.raises(NotImplementedError, match="clone"):
        Quantised(torch.ones(2, dtype=torch.int8), torch.tensor(0.5)).clone()
