"""Rewards with a defect each."""

from typing import Any


def constant(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The same for everyone."""
    return 0.0


def by_prompt(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """The same for every answer to a prompt."""
    return float(int(ground_truth) % 2)


def often_broken(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Fails for every answer with a certain last digit."""
    if solution_str.strip().endswith(("1", "3", "5", "7", "9")):
        raise ValueError("no judge could be reached")
    return float(solution_str.strip() == str(ground_truth))


def seldom_different(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> float:
    """Looks at the answer for one prompt in ten only."""
    return float(len(solution_str + solution_str[-1:]) % 2) if int(ground_truth) % 10 == 0 else 0.0
