"""Which optimizer steps by which rule: those of torch.optim, and what users register."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from mixedopt.errors import shown
from mixedopt.rules.gradients import ASGD, MOMENTUM, RPROP, SGD
from mixedopt.rules.moments import ADAM, ADAMAX, AMSGRAD, NADAM, RADAM
from mixedopt.rules.rule import Rule
from mixedopt.rules.squares import (
    ADADELTA,
    ADAGRAD,
    RMSPROP,
    RMSPROP_CENTERED,
    RMSPROP_CENTERED_MOMENTUM,
    RMSPROP_MOMENTUM,
)

RULES: Mapping[type[torch.optim.Optimizer], tuple[Rule, ...]] = types.MappingProxyType(
    {
        torch.optim.Adam: (ADAM, AMSGRAD),
        torch.optim.AdamW: (ADAM, AMSGRAD),
        torch.optim.NAdam: (NADAM,),
        torch.optim.RAdam: (RADAM,),
        torch.optim.Adamax: (ADAMAX,),
        torch.optim.Adagrad: (ADAGRAD,),
        torch.optim.RMSprop: (RMSPROP, RMSPROP_MOMENTUM, RMSPROP_CENTERED, RMSPROP_CENTERED_MOMENTUM),
        torch.optim.Adadelta: (ADADELTA,),
        torch.optim.SGD: (MOMENTUM, SGD),
        torch.optim.ASGD: (ASGD,),
        torch.optim.Rprop: (RPROP,),
    }
)
# The one thing that the process shares: a rule belongs to a class, as a class does to the process.
_REGISTERED: dict[type[torch.optim.Optimizer], tuple[Rule, ...]] = {}


@dataclass(frozen=True, slots=True, eq=False)
class RuleHandle:
    """What ``register_rule`` returns."""

    optimizer_class: type[torch.optim.Optimizer]
    rules: tuple[Rule, ...]

    def remove(self) -> None:
        """Take the rules back, once; wrappers that were made with one keep it."""
        if _REGISTERED.get(self.optimizer_class) is self.rules:
            del _REGISTERED[self.optimizer_class]


def register_rule(optimizer_class: type[torch.optim.Optimizer], *rules: Rule) -> RuleHandle:
    """Let optimizers of exactly this class step by a rule in the compiled tier, from now on.

    Args:
        optimizer_class: its subclasses do not count: they may do anything.
        rules: the first one that serves all groups of an optimizer is taken.

    Returns:
        A handle; ``handle.remove()`` takes the rules back.

    Raises:
        TypeError: not a class of ``torch.optim.Optimizer``, no rule, or
            something else than a rule.
        ValueError: the class has rules already.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, torch.optim.Optimizer)):
        raise TypeError(
            f"register_rule({shown(optimizer_class)}): must be a class of torch.optim.Optimizer. "
            "Pass the class itself, not an instance."
        )
    name = optimizer_class.__name__
    others = [rule for rule in rules if not isinstance(rule, Rule)]
    if others or not rules:
        found = shown(others[0]) if others else "nothing"
        raise TypeError(f"register_rule({name}): got {found} where a Rule must be. Pass one or more mixedopt.Rule.")
    if optimizer_class in RULES or optimizer_class in _REGISTERED:
        raise ValueError(
            f"register_rule({name}): the class has rules already. Remove the handle of the first registration, "
            "or register a subclass."
        )
    handle = RuleHandle(optimizer_class, rules)
    _REGISTERED[optimizer_class] = handle.rules
    return handle


def rule_for(inner: torch.optim.Optimizer) -> Rule | None:
    """Return the rule that covers all groups of an optimizer of exactly this type, ``None`` without one."""
    kind = type(inner)
    for rule in RULES.get(kind, _REGISTERED.get(kind, ())):
        if all(rule.serves(group) for group in inner.param_groups):
            return rule
    return None
