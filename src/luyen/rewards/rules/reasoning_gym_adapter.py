"""The verifiers of reasoning-gym, and the only file that imports it for scoring."""

from collections.abc import Callable
from functools import cache
from typing import Any

import reasoning_gym

from luyen.base.errors import did_you_mean
from luyen.rewards.outcome import Unscorable


@cache
def verifier(dataset: str) -> Callable[[str, Any], float]:
    """The scoring function of a task."""
    known = reasoning_gym.factory.DATASETS
    if dataset not in known:
        fix = did_you_mean(dataset, known)
        raise Unscorable(f"reasoning-gym has no task {dataset!r}; {fix}")
    found: Any = reasoning_gym.get_score_answer_fn(dataset)  # declared there without arguments
    return found
