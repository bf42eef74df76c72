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
