"""The cast policy: which module and which parameter keeps which dtype.

``rules`` says what a policy is, ``plan`` what it means for a model, ``handle``
does it and undoes it,
``explain`` shows it.
"""

from mixedopt.policy.explain import Explanation, explain
from mixedopt.policy.handle import PolicyHandle, check_model_and_policy, convert, handle_of, remove_casts_, unwrap
from mixedopt.policy.plan import CastPlan, check_dtype, check_fits, plan_casts
from mixedopt.policy.rule import Rule
from mixedopt.policy.rules import CastPolicy

__all__ = [
    "CastPlan",
    "CastPolicy",
    "Explanation",
    "PolicyHandle",
    "Rule",
    "check_dtype",
    "check_fits",
    "check_model_and_policy",
    "convert",
    "explain",
    "handle_of",
    "plan_casts",
    "remove_casts_",
    "unwrap",
]
