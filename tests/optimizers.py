"""The inner optimizers that the suite wraps, and what each of them refuses bare."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn, optim

# Every kind of parameter, by name: a fresh fp32 tensor from a generator.
SHAPES: Mapping[str, Callable[[torch.Generator], Tensor]] = {
    "scalar": lambda g: torch.randn((), generator=g),
    "empty": lambda g: torch.randn(0, generator=g),
    "empty_matrix": lambda g: torch.randn(0, 3, generator=g),
    "one": lambda g: torch.randn(1, generator=g),
    "vector": lambda g: torch.randn(67, generator=g),
    "matrix": lambda g: torch.randn(4, 6, generator=g),
    "transposed": lambda g: torch.randn(5, 3, generator=g).t(),
    "strided": lambda g: torch.randn(4, 6, generator=g)[:, ::2],
    "channels_last": lambda g: torch.randn(2, 3, 4, 4, generator=g).contiguous(memory_format=torch.channels_last),
}
EMPTY = ("empty", "empty_matrix")
MATRICES = ("empty_matrix", "matrix", "transposed", "strided")


@dataclass(frozen=True)
class Inner:
    """One way to build an inner optimizer.

    Attributes:
        hyper: hyperparameters of all groups.
        second: what the second group sets differently.
        refused: kinds of ``SHAPES`` that the bare optimizer does not take.
        error: the error it raises for them.
        refuses_at: ``"construction"`` or ``"step"``, when it raises.
        refuses_late: True iff a parameter whose first gradient comes after another's is refused.
    """

    name: str
    cls: Callable[..., optim.Optimizer]
    hyper: Mapping[str, Any] = field(default_factory=dict)
    second: Mapping[str, Any] = field(default_factory=lambda: {"lr": 0.02, "weight_decay": 0.03})
    refused: tuple[str, ...] = ()
    error: type[Exception] | None = None
    refuses_at: str = ""
    refuses_late: bool = False

    def __call__(self, groups: Iterable[Iterable[nn.Parameter]]) -> optim.Optimizer:
        """Return a bare optimizer; every other group has hyperparameters of its own."""
        dicts = [{"params": list(group), **(self.second if i % 2 else {})} for i, group in enumerate(groups)]
        return self.cls(dicts, **self.hyper)

    @property
    def kinds(self) -> Sequence[str]:
        """The kinds of parameter that the bare optimizer takes."""
        return [kind for kind in SHAPES if kind not in self.refused]

    def accepts(self, tensor: Tensor) -> bool:
        """True iff the bare optimizer takes a parameter of this shape."""
        return tensor.dim() == 2 if "vector" in self.refused else tensor.numel() > 0 or not self.refused


ADAM = {"lr": 0.01}

INNERS: tuple[Inner, ...] = (
    Inner("sgd", optim.SGD, {"lr": 0.1}),
    Inner("sgd_momentum", optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1}),
    Inner("sgd_nesterov", optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    Inner("sgd_decay", optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1, "foreach": True}),
    Inner("sgd_fused", optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}, error=TypeError, refuses_late=True),
    Inner("adam", optim.Adam, {**ADAM, "weight_decay": 0.1}),
    Inner("adam_amsgrad", optim.Adam, {**ADAM, "amsgrad": True, "foreach": True}),
    Inner("adamw_loop", optim.AdamW, {**ADAM, "foreach": False}),
    Inner("adamw_foreach", optim.AdamW, {**ADAM, "foreach": True}),
    Inner("adamw_fused", optim.AdamW, {**ADAM, "fused": True}),
    Inner("nadam", optim.NAdam, ADAM),
    Inner("radam", optim.RAdam, ADAM),
    Inner("adamax", optim.Adamax, ADAM),
    Inner("adadelta", optim.Adadelta, {"lr": 1.0}),
    Inner("adagrad", optim.Adagrad, {"lr": 0.01, "lr_decay": 0.1}),
    Inner("rmsprop", optim.RMSprop, {"lr": 0.01, "momentum": 0.9, "centered": True}),
    Inner("rprop", optim.Rprop, {"lr": 0.01}, second={"lr": 0.02, "etas": (0.4, 1.3)}),
    Inner("asgd", optim.ASGD, {"lr": 0.1, "t0": 1.0}),
    Inner("adafactor", optim.Adafactor, {"lr": 0.01}, refused=EMPTY, error=ZeroDivisionError, refuses_at="step"),
    Inner(
        "muon",
        optim.Muon,
        {"lr": 0.01},
        refused=tuple(kind for kind in SHAPES if kind not in MATRICES),
        error=ValueError,
        refuses_at="construction",
    ),
)
# Cannot train dense parameters, or not without a closure.
SPARSE_ADAM = Inner(
    "sparse_adam", optim.SparseAdam, second={}, refused=tuple(SHAPES), error=RuntimeError, refuses_at="step"
)
LBFGS = Inner("lbfgs", optim.LBFGS, second={}, refused=tuple(SHAPES), error=TypeError, refuses_at="step")

IDS = [inner.name for inner in INNERS]
BY_NAME: Mapping[str, Inner] = {inner.name: inner for inner in INNERS}
