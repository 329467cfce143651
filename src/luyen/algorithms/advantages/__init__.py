"""Advantage estimators: rewards, groups and values in; one advantage per token out.

Importing this package registers every built-in estimator.
"""

from luyen.algorithms.advantages import gdpo, group, online_dpo, returns, token_baseline, turns
from luyen.algorithms.advantages.inputs import Credit, CreditInputs, adv_estimators

__all__ = [
    "Credit",
    "CreditInputs",
    "adv_estimators",
    "gdpo",
    "group",
    "online_dpo",
    "returns",
    "token_baseline",
    "turns",
]
