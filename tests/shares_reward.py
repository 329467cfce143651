"""A reward that random answers already differ in: which characters they are made of."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any
) -> dict[str, float]:
    """The share of digits, and half the share of letters, with both as parts."""
    length = max(1, len(solution_str))
    digits = sum(character.isdigit() for character in solution_str) / length
    letters = sum(character.isalpha() for character in solution_str) / length
    return {"score": digits + 0.5 * letters, "digits": digits, "letters": letters}
