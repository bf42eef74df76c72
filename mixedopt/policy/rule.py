"""One rule of a cast policy: what it matches, which widths it gives, how it is written."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

Width = Literal["half", "fp32"]
Match = str | type[nn.Module] | nn.Module | nn.Parameter | Callable[[str, nn.Module], bool]

SHORT = {("half", "half", "half"): "half", ("fp32", "fp32", "half"): "fp32"}
LONG = {short: widths for widths, short in SHORT.items()}
# name or quoted name or <type>, then ?, then widths
RULE = re.compile(r'\s*(?:<(?P<type>[^<>]+)>|(?P<quoted>"(?:[^"\\]|\\.)*")|(?P<name>[^=;"<>\s?{}]+|\*))(?P<q>\??)=')


@dataclass(frozen=True, slots=True, eq=False)
class Rule:
    """What it matches, and three widths: ``"half"`` is the optimizer's ``dtype``.

    Args:
        match: a glob over dotted module and parameter names (``*``, ``?``,
            ``[...]``), a module type (its subclasses too), a module or
            parameter itself, or a function ``(name, module) -> bool``. A
            module is matched with all that is inside it.
        param: width of the parameters.
        compute: width of inputs and computation. Where it differs from
            ``param``, the parameters are cast in every forward.
        output: width of floating outputs.
        required: True iff a model without a match is an error.
    """

    match: Match
    param: Width = "half"
    compute: Width = "half"
    output: Width = "half"
    required: bool = True

    def __post_init__(self) -> None:
        """Check every field."""
        kinds = (nn.Module, nn.Parameter)
        named = isinstance(self.match, str) and self.match != ""
        typed = isinstance(self.match, type) and issubclass(self.match, nn.Module)
        asked = callable(self.match) and not isinstance(self.match, type)
        if not (named or typed or asked or isinstance(self.match, kinds)):
            raise TypeError(
                f"CastPolicy rule for {self.match!r}: must be a name such as 'head' or '*.router', a module type, a "
                "module, a parameter, or a function (name, module) -> bool."
            )
        for field in ("param", "compute", "output"):
            if getattr(self, field) not in ("half", "fp32"):
                raise ValueError(f"CastPolicy rule: {field}={getattr(self, field)!r}: must be 'half' or 'fp32'.")

    def matches(self, name: str, module: nn.Module) -> bool:
        """True iff the module of this dotted name is meant; the root's is ``""``."""
        if isinstance(self.match, str):
            return bool(name) and fnmatch.fnmatchcase(name, self.match)
        if isinstance(self.match, type):
            return isinstance(module, self.match)
        if isinstance(self.match, (nn.Module, nn.Parameter)):
            return module is self.match
        return bool(self.match(name, module))

    def matches_param(self, name: str, param: nn.Parameter) -> bool:
        """True iff the parameter of this dotted name is meant by itself."""
        if isinstance(self.match, str):
            return fnmatch.fnmatchcase(name, self.match)
        return param is self.match

    def named(self, names: Mapping[int, str]) -> Rule:
        """Return the rule with a module or parameter replaced by its name, of ``names`` by ``id``."""
        name = names.get(id(self.match))
        return self if name is None else replace(self, match=escaped(name))

    def _key(self) -> tuple[Any, ...]:
        by_identity = isinstance(self.match, (nn.Module, nn.Parameter)) or type(self.match).__hash__ is None
        match = id(self.match) if by_identity else self.match
        return (by_identity, match, self.param, self.compute, self.output, self.required)

    def __eq__(self, other: object) -> bool:
        return self._key() == other._key() if isinstance(other, Rule) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._key())

    def __str__(self) -> str:
        return rule_text(self)


def escaped(name: str) -> str:
    """Return a glob that matches exactly ``name``."""
    return re.sub(r"([*?\[])", r"[\1]", name)


def rule_text(rule: Rule) -> str:
    """Return one rule as text."""
    widths = (rule.param, rule.compute, rule.output)
    return f"{_match_text(rule)}{'' if rule.required else '?'}={SHORT.get(widths, '/'.join(widths))}"


def type_name(kind: type) -> str:
    """Return the name under which users know a type."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    return f"torch.nn.{kind.__name__}" if getattr(nn, kind.__name__, None) is kind else name


def _match_text(rule: Rule) -> str:
    match = rule.match
    if isinstance(match, str):
        plain = RULE.fullmatch(f"{match}=")
        return match if plain and plain["name"] == match else json.dumps(match)
    if isinstance(match, type):
        return f"<{type_name(match)}>"
    if isinstance(match, nn.Parameter):
        return f"{{parameter {tuple(match.shape)}}}"
    if isinstance(match, nn.Module):
        return f"{{module {type_name(type(match))}}}"
    return f"{{{getattr(match, '__module__', '?')}.{getattr(match, '__qualname__', type(match).__qualname__)}}}"
