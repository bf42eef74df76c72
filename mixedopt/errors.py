"""The exceptions that a caller may want to catch.

Everything else that goes wrong is a ``ValueError`` or a ``TypeError`` whose
message holds the value, the rule and the remedy.
"""

from __future__ import annotations


class LossScaleError(FloatingPointError):
    """Too many steps in a row were skipped with no room left to lower S."""


class CheckpointError(ValueError):
    """A state dict does not fit; nothing was loaded."""


class StepOrderError(RuntimeError):
    """A method was called at a moment when its effect would be wrong."""


def shown(value: object) -> str:
    """Return ``value`` as a message shows it: on one line, by its type if it is long."""
    text = repr(value)
    return text if len(text) < 60 and "\n" not in text else f"a {type(value).__name__}"


def in_one_line(error: BaseException) -> str:
    """Return type and first line of an exception that is told of in another; it may have no text."""
    return ": ".join([type(error).__name__, *str(error).strip().splitlines()[:1]])
