"""Prove that an optimizer works wrapped, and test code that uses this library.

``check_optimizer`` needs torch alone. ``mixedopt.testing.strategies`` holds
hypothesis strategies: scale configurations, overflow sequences, layouts and
gradient scripts; it needs hypothesis.
"""

from mixedopt.testing.conformance import Conformance, Outcome, check_optimizer

__all__ = ["Conformance", "Outcome", "check_optimizer"]
