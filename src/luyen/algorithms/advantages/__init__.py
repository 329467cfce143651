"""Advantage estimators: rewards, groups and values in; one advantage per token out.

Importing this package registers every built-in estimator.
"""

from luyen.algorithms.advantages import group, online_dpo, returns, token_baseline
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators

__all__ = [
    "Credit",
    "CreditInputs",
    "adv_estimators",
    "group",
    "online_dpo",
    "returns",
    "token_baseline",
]
