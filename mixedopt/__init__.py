"""Mixed precision training for PyTorch: any torch optimizer, a half model."""

from mixedopt.errors import CheckpointError, LossScaleError, StepOrderError
from mixedopt.graphs import graphed
from mixedopt.loss_scale import DynamicLossScale, StaticLossScale
from mixedopt.optimizer import MixedPrecisionOptimizer
from mixedopt.policy import CastPolicy, Explanation, PolicyHandle, convert, explain
from mixedopt.report import StepReport
from mixedopt.rules import Rule, register_rule
from mixedopt.scaler import SharedLossScale

__version__ = "0.1.0"

__all__ = [
    "CastPolicy",
    "CheckpointError",
    "DynamicLossScale",
    "Explanation",
    "LossScaleError",
    "MixedPrecisionOptimizer",
    "PolicyHandle",
    "Rule",
    "SharedLossScale",
    "StaticLossScale",
    "StepOrderError",
    "StepReport",
    "convert",
    "explain",
    "graphed",
    "register_rule",
]
