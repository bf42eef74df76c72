"""Small models, batches, snapshots and comparisons shared by the tests."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from mixedopt import CastPolicy, DynamicLossScale, MixedPrecisionOptimizer

VOCABULARY, WIDTH = 12, 8
# Low enough that no gradient of these models overflows: every step is applied.
SMALL_SCALE = DynamicLossScale(init_scale=2.0**7)

Factory = Callable[[Any], torch.optim.Optimizer]


class TwoGroupModel(nn.Module):
    """Half layers, an fp32 norm, a tied head, a frozen layer, an unused branch."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.hidden = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.branch = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.head.weight = self.embedding.weight
        self.frozen.requires_grad_(False)

    def forward(self, ids: Tensor, use_branch: bool = False) -> Tensor:
        x = self.norm(self.hidden(self.frozen(self.embedding(ids)).relu()))
        return self.head(self.branch(x) if use_branch else x)


def seeded(make: Callable[[], nn.Module], device: torch.device) -> nn.Module:
    """Return ``make()`` with the same weights at every call."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        return make().to(device)


def two_group_model(device: torch.device) -> nn.Module:
    """Return the shared model of the recipes, the same at every call."""
    return seeded(TwoGroupModel, device)


def two_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices and the rest as groups with other ``lr`` and decay."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.ndim > 1], "lr": 1e-2, "weight_decay": 0.1},
        {"params": [p for p in params if p.ndim <= 1], "lr": 3e-3, "weight_decay": 0.0},
    ]


def adamw(params: Any) -> torch.optim.Optimizer:
    """Return an AdamW whose state is three tensors per parameter."""
    return torch.optim.AdamW(params, lr=1e-2)


def momentum(params: Any) -> torch.optim.Optimizer:
    """Return an SGD with momentum, whose state is made by the first step."""
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9)


def wrapped(
    device: torch.device, dtype: torch.dtype, make: Factory = adamw, **options: Any
) -> tuple[nn.Module, MixedPrecisionOptimizer]:
    """Return the two-group model and its wrapper."""
    model = two_group_model(device)
    options.setdefault("loss_scale", SMALL_SCALE)
    return model, MixedPrecisionOptimizer(make(two_groups(model)), model, dtype=dtype, **options)


def vector(device: torch.device, dtype: torch.dtype, size: int = 2, value: float = 1.0) -> nn.Parameter:
    """Return a half parameter of equal values."""
    return nn.Parameter(torch.full((size,), value, dtype=dtype, device=device))


def tokens(step: int, device: torch.device) -> Tensor:
    """Return the batch of ids of one step."""
    return (torch.arange(6, device=device).view(2, 3) * 5 + step) % VOCABULARY


def loss_of(model: nn.Module, step: int, **options: Any) -> Tensor:
    """Return the model's loss over the batch of one step."""
    ids = tokens(step, next(model.parameters()).device)
    return F.cross_entropy(model(ids, **options).flatten(0, 1), (ids.flatten() + 1) % VOCABULARY)


def train(model: nn.Module, optimizer: MixedPrecisionOptimizer, steps: Sequence[int]) -> None:
    """Train over the batches of ``steps``."""
    for step in steps:
        optimizer.zero_grad()
        optimizer.backward(loss_of(model, step))
        optimizer.step()


def overflow(optimizer: MixedPrecisionOptimizer) -> None:
    """Make a step whose only inf is the last element of the last gradient."""
    force_grads(optimizer, 1.0)
    last = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad][-1]
    last.grad.view(-1)[-1] = float("inf")
    optimizer.step()


def force_grads(optimizer: MixedPrecisionOptimizer, value: float | None) -> None:
    """Write S * value, in each parameter's own dtype, into every ``.grad``."""
    params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    scaled = None if value is None else value * optimizer.loss_scale
    optimizer.scale(torch.zeros((), device=params[0].device))  # as a backward would: the loss was not forgotten
    for param in params:
        param.grad = None if scaled is None else torch.full_like(param, scaled)


def masters_of(optimizer: MixedPrecisionOptimizer) -> dict[str, Tensor]:
    """Return a copy of every master by name."""
    return {name: master.detach().clone() for name, master in optimizer.named_masters()}


def snapshot(model: nn.Module | None, optimizer: torch.optim.Optimizer | None = None) -> dict[str, Any]:
    """Return copies of everything that must not change: tensors, dtypes, groups, hooks, identity."""
    taken: dict[str, Any] = {}
    if model is not None:
        taken["weights"] = {name: value.detach().clone() for name, value in model.state_dict().items()}
        taken["identity"] = {name: id(param) for name, param in model.named_parameters()}
        taken["hooks"] = hook_counts(model)
        taken["grads"] = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
    if isinstance(optimizer, MixedPrecisionOptimizer):
        taken["masters"] = masters_of(optimizer)
        taken["inner"] = copy.deepcopy(optimizer.inner.state_dict())
        taken["scale"] = optimizer.loss_scale
        taken["counters"] = (optimizer.applied_steps, optimizer.skipped_steps)
        taken["groups"] = len(optimizer.param_groups)
    elif optimizer is not None:
        taken["inner"] = copy.deepcopy(optimizer.state_dict())
        taken["params"] = [[id(p) for p in group["params"]] for group in optimizer.param_groups]
        taken["values"] = [[p.detach().clone() for p in group["params"]] for group in optimizer.param_groups]
    return taken


def hook_counts(model: nn.Module) -> dict[str, int]:
    """Return how many hooks each module has."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_load_state_dict_pre_hooks", "_backward_hooks")
    return {name: sum(len(getattr(m, kind)) for kind in kinds) for name, m in model.named_modules()}


def assert_same(left: Any, right: Any, path: str = "") -> None:
    """Fail unless two nested values are equal, tensors bit for bit and in dtype."""
    if isinstance(left, Tensor) or isinstance(right, Tensor):
        assert isinstance(left, Tensor), path
        assert isinstance(right, Tensor), path
        assert left.dtype == right.dtype, f"{path}: {left.dtype} is not {right.dtype}"
        assert torch.equal(left, right), f"{path}: {left} is not {right}"
        assert left is not right or left.numel() == 0, f"{path}: compared with itself"
    elif isinstance(left, Mapping) and isinstance(right, Mapping):
        assert set(left) == set(right), f"{path}: {list(left)} is not {list(right)}"
        for key in left:
            assert_same(left[key], right[key], f"{path}.{key}")
    elif isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        assert len(left) == len(right), path
        for index, (one, other) in enumerate(zip(left, right, strict=True)):
            assert_same(one, other, f"{path}[{index}]")
    else:
        assert left == right, f"{path}: {left!r} is not {right!r}"


def differs(left: Any, right: Any) -> bool:
    """True iff two nested values are not the same."""
    try:
        assert_same(left, right)
    except AssertionError:
        return True
    return False


def through_file(value: Any) -> Any:
    """Return ``value`` after ``torch.save`` and a ``weights_only`` load."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def fp32_twin(device: torch.device, make: Factory) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the unwrapped two-group model with its bare optimizer."""
    model = two_group_model(device)
    return model, make(two_groups(model))


FP32 = CastPolicy.fp32()
