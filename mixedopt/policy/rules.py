"""The cast policy as a value: rules in order, functions, names of arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.loss import _Loss

from mixedopt.functions import LOSS_FUNCTIONS, function_name
from mixedopt.policy.rule import Match, Rule, Width
from mixedopt.policy.spelling import fields_of_json, fields_of_text, json_text, policy_text

NORMS: tuple[type[nn.Module], ...] = (nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, _NormBase)
SOFTMAX: tuple[type[nn.Module], ...] = (nn.Softmax, nn.Softmax2d, nn.Softmin)
# What comes out of these is a loss or goes into one: it stays fp32.
LOSSES: tuple[type[nn.Module], ...] = (_Loss, nn.LogSoftmax, nn.AdaptiveLogSoftmaxWithLoss)


def _fp32_rules() -> tuple[Rule, ...]:
    islands = (Rule(kind, "fp32", "fp32", "half", required=False) for kind in (*NORMS, *SOFTMAX))
    losses = (Rule(kind, "fp32", "fp32", "fp32", required=False) for kind in LOSSES)
    return (*islands, *losses)


@dataclass(frozen=True, slots=True)
class CastPolicy:
    """Which parts of a model stay in fp32; everything else becomes half.

    Rules stand in order and the first match wins, for a module and for all
    inside it; what a later call adds stands before, so what is said last wins.
    Buffers keep their dtype everywhere. A module that computes in fp32 is an
    *island*: its floating inputs are cast in and its outputs cast out.

    Args:
        rules: in order of precedence.
        functions: names of torch functions that run in fp32 when the code of a
            module calls them; their results stay fp32. Empty costs nothing.
        leave: names of arguments (and of keys and fields inside arguments)
            that no input cast touches.
        output: width of the floating outputs of the whole model.

    Example:
        >>> print(CastPolicy.default().keep("head", "*.router").half(nn.GroupNorm))
        <torch.nn.GroupNorm>=half; head=fp32; *.router=fp32; default
    """

    rules: tuple[Rule, ...] = ()
    functions: tuple[str, ...] = ()
    leave: tuple[str, ...] = ()
    output: Width = "fp32"

    def __post_init__(self) -> None:
        """Check every field."""
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"CastPolicy(rules={self.rules!r}): must hold Rules. Use keep(), half() or rule().")
        object.__setattr__(self, "rules", tuple(self.rules))
        object.__setattr__(self, "functions", tuple(sorted({function_name(f) for f in self.functions})))
        object.__setattr__(self, "leave", tuple(self.leave))
        for name in self.leave:
            if not isinstance(name, str) or not name.isidentifier():
                raise TypeError(f"CastPolicy.leave({name!r}): must be the name of an argument, such as 'timesteps'.")
        if self.output not in ("half", "fp32"):
            raise ValueError(f"CastPolicy(output={self.output!r}): must be 'half' or 'fp32'.")

    @classmethod
    def default(cls) -> CastPolicy:
        """Norm, softmax and loss modules and loss functions in fp32, the rest half."""
        return cls(_fp32_rules(), LOSS_FUNCTIONS)

    @classmethod
    def none(cls) -> CastPolicy:
        """All weights half, and nothing on functions, so that nothing is installed for them.

        Buffers keep their dtype, other than under ``model.half()``: norm layers
        with running statistics and parametrized modules compute with theirs, so
        they stay fp32, and code that multiplies half values by an fp32 buffer
        raises torch's error. ``default()`` does such products in half.
        """
        return cls()

    @classmethod
    def fp32(cls) -> CastPolicy:
        """All fp32: the wrapper then does what the inner optimizer does."""
        return cls((Rule(nn.Module, "fp32", "fp32", "fp32", required=False),))

    def keep(self, *matches: Match) -> CastPolicy:
        """Return a policy that also keeps these in fp32, casting their outputs to half.

        Args:
            matches: as ``Rule.match``. One that matches nothing raises when
                the policy meets a model.
        """
        return self.rule(*matches, param="fp32", compute="fp32")

    def half(self, *matches: Match) -> CastPolicy:
        """Return a policy that makes these half, whatever the rules so far say."""
        return self.rule(*matches)

    def rule(
        self, *matches: Match, param: Width = "half", compute: Width = "half", output: Width = "half"
    ) -> CastPolicy:
        """Return a policy with one more rule for each of ``matches``, before the present ones."""
        return replace(self, rules=(*(Rule(match, param, compute, output) for match in matches), *self.rules))

    def keep_functions(self, *functions: str | Callable[..., Any]) -> CastPolicy:
        """Return a policy under which these torch functions run in fp32, too.

        Args:
            functions: names such as ``"softmax"``, or the functions. Function,
                ``torch.nn.functional`` and tensor method of a name are one.

        Raises:
            ValueError: if torch has no function of that name.
        """
        return replace(self, functions=(*self.functions, *(function_name(f) for f in functions)))

    def leaving(self, *names: str) -> CastPolicy:
        """Return a policy that leaves arguments of these names as they are."""
        return replace(self, leave=(*self.leave, *names))

    def returning(self, output: Width) -> CastPolicy:
        """Return a policy under which the whole model returns this width."""
        return replace(self, output=output)

    def __str__(self) -> str:
        return policy_text(self, _presets())

    def to_json(self) -> str:
        """Return the policy as JSON.

        Raises:
            TypeError: if a rule holds a function or an object, which no text can bring back.
        """
        return json_text(self)

    @classmethod
    def from_json(cls, text: str) -> CastPolicy:
        """Return the policy that ``to_json`` gave ``text`` for.

        Raises:
            ValueError: if it is not one, or names a type that is not imported.
        """
        return cls(**fields_of_json(text))

    @classmethod
    def from_string(cls, text: str) -> CastPolicy:
        """Return the policy that prints as ``text``.

        Raises:
            ValueError: as ``from_json``.
        """
        return cls(**fields_of_text(text, _presets()))


def _presets() -> dict[str, CastPolicy]:
    return {"default": CastPolicy.default(), "fp32": CastPolicy.fp32(), "none": CastPolicy.none()}
