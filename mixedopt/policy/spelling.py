"""A cast policy as text and as JSON, and back.

The text lists the rules in their order, then a preset's name, then what else
differs from the preset::

    <torch.nn.GroupNorm>=half; head=fp32; lm=half/half/fp32; default; leave=timesteps

``functions+=softmax`` adds to the preset's list, ``functions=softmax`` replaces
it. ``<...>`` is a type, ``half`` and ``fp32`` stand for the three widths that
``half()`` and ``keep()`` give, a trailing ``?`` says that no match is needed.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from typing import Any, Protocol

from torch import nn

from mixedopt.policy.rule import LONG, RULE, Rule, rule_text, type_name

LISTS = ("functions", "leave")
SEGMENT = re.compile(r'(?:"(?:[^"\\]|\\.)*"|[^;"])+')


class Policy(Protocol):
    """The fields of a cast policy."""

    @property
    def rules(self) -> tuple[Rule, ...]:
        """In order."""

    @property
    def functions(self) -> tuple[str, ...]:
        """Names."""

    @property
    def leave(self) -> tuple[str, ...]:
        """Names."""

    @property
    def output(self) -> str:
        """A width."""


def policy_text(policy: Policy, presets: Mapping[str, Policy]) -> str:
    """Return a policy as text; ``presets`` may shorten it."""

    # the longest tail of rules that is a preset's; among equals, the one with the same functions
    def fits(item: tuple[str, Policy]) -> tuple[bool, int, bool]:
        rules = item[1].rules
        tail = not rules or policy.rules[-len(rules) :] == rules
        return tail, len(rules), item[1].functions == policy.functions

    name, preset = max(presets.items(), key=fits)
    own = policy.rules[: len(policy.rules) - len(preset.rules)]
    parts = [*map(rule_text, own), name]
    for key in LISTS:
        names, usual = getattr(policy, key), getattr(preset, key)
        if usual and set(names) > set(usual):
            parts.append(f"{key}+={','.join(name for name in names if name not in usual)}")
        elif names != usual:
            parts.append(f"{key}={','.join(names)}")
    return "; ".join(parts + ([f"output={policy.output}"] if policy.output != preset.output else []))


def fields_of_text(text: str, presets: Mapping[str, Policy]) -> dict[str, Any]:
    """Return the fields of the policy that prints as ``text``."""
    segments = [part.strip() for part in SEGMENT.findall(text)]
    at = next((i for i, part in enumerate(segments) if part in presets), None)
    if at is None:
        raise ValueError(f"CastPolicy.from_string({text!r}): must name one of the presets {sorted(presets)}.")
    preset = presets[segments[at]]
    fields: dict[str, Any] = {"functions": preset.functions, "leave": preset.leave, "output": preset.output}
    for part in segments[at + 1 :]:
        key, found, value = part.partition("=")
        key, more = key.removesuffix("+"), key.endswith("+")
        if not found or key not in fields:
            raise ValueError(f"CastPolicy.from_string(...): {part!r} after the preset is none of {sorted(fields)}.")
        names = tuple(filter(None, value.split(",")))
        fields[key] = (*(fields[key] if more else ()), *names) if key in LISTS else value
    return {**fields, "rules": (*(_rule(part) for part in segments[:at]), *preset.rules)}


def json_text(policy: Policy) -> str:
    """Return a policy as JSON; ``TypeError`` if it holds what no text brings back."""
    rules = [
        {**_match_json(r), "param": r.param, "compute": r.compute, "output": r.output, "required": r.required}
        for r in policy.rules
    ]
    lists = {key: list(getattr(policy, key)) for key in LISTS}
    return json.dumps({"rules": rules, **lists, "output": policy.output})


def fields_of_json(text: str) -> dict[str, Any]:
    """Return the fields of the policy that ``json_text`` gave ``text`` for."""
    try:
        data = dict(json.loads(text))
        rules = tuple(_rule_of_json(dict(rule)) for rule in data.pop("rules"))
        lists = {key: _names(data.pop(key)) for key in LISTS}
        fields = {"rules": rules, **lists, "output": data.pop("output")}
        if data:
            raise KeyError(*data)
        return fields
    except (KeyError, TypeError, ValueError) as e:
        raise ValueError(f"CastPolicy.from_json({text[:80]!r}): is not the JSON of a policy ({e}).") from e


def _match_json(rule: Rule) -> dict[str, str]:
    if isinstance(rule.match, str):
        return {"name": rule.match}
    if isinstance(rule.match, type):
        return {"type": type_name(rule.match)}
    raise TypeError(
        f"CastPolicy.to_json(): the rule {rule_text(rule)} holds a function or an object, which no text can bring "
        "back. Name the modules instead."
    )


def _rule(part: str) -> Rule:
    head = RULE.match(part)
    widths: tuple[Any, ...] = ()
    if head:
        widths = LONG.get(part[head.end() :], tuple(part[head.end() :].split("/")))
    if head is None or len(widths) != 3:
        raise ValueError(
            f"CastPolicy.from_string(...): {part!r} is not a rule. Rules look like 'head=fp32', "
            "'<torch.nn.GroupNorm>=half' or 'lm=half/half/fp32'; functions in braces cannot be read back."
        )
    named = json.loads(head["quoted"]) if head["quoted"] else head["name"]
    return Rule(_type(head["type"]) if head["type"] else named, *widths, required=not head["q"])


def _names(items: object) -> tuple[str, ...]:
    if not isinstance(items, list) or not all(isinstance(item, str) and item.isidentifier() for item in items):
        raise TypeError(items)
    return tuple(items)


def _rule_of_json(rule: dict[str, Any]) -> Rule:
    if not isinstance(rule.get("required", True), bool) or not isinstance(rule.get("type", ""), str):
        raise TypeError(rule)
    kind = rule.pop("type", None)
    return Rule(match=_type(kind) if kind is not None else rule.pop("name"), **rule)


def _type(name: str) -> type[nn.Module]:
    """Return an imported module type by name. Nothing is imported for it."""
    parts = name.split(".")
    for cut in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:cut]))
        for part in parts[cut:] if found is not None else ():
            found = vars(found).get(part) if hasattr(found, "__dict__") else None
        if isinstance(found, type) and issubclass(found, nn.Module):
            return found
    raise ValueError(f"CastPolicy: the type {name!r} is not known here. Import its module first.")
