"""Update rules: the step of an optimizer, written once as pure functions of tensors.

A rule runs as it stands, as the reference, or compiled, over flat buffers. Its
numbers are worked out in double precision, on any device, and rounded once, so
that 1 - beta is not a difference of two fp32 numbers. ``rule`` says what a rule
is; ``moments``, ``squares`` and ``gradients`` hold those of torch.optim;
``registry`` says which optimizer has which.
"""

from mixedopt.rules.registry import RULES, RuleHandle, register_rule, rule_for
from mixedopt.rules.rule import Rule, fault_of

__all__ = ["RULES", "Rule", "RuleHandle", "fault_of", "register_rule", "rule_for"]
