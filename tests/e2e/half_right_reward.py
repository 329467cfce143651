"""A reward for which every other answer is right, whatever it says."""

from typing import Any


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """1 or 0 by the length of the answer."""
    return float(len(solution_str) % 2)
