"""A reward in which the answers to a question often do not differ."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> dict[str, float]:
    """Whether there are many digits."""
    digits = sum(character.isdigit() for character in solution_str)
    return {"score": float(digits >= 3)}
