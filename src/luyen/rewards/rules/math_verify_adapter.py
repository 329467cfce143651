"""math-verify, the only file that imports it. Its own time limits are off.

With them on, a call from another thread fails inside, and everything is scored wrong. The limit
that holds is that of the process this runs in.
"""

import logging
from functools import lru_cache
from typing import Any

import math_verify

from luyen.rewards.rules.rule import Unscorable

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its limits are off


def equivalent(truth: str, text: str, *, float_rounding: int) -> bool:
    """Whether the last mathematical object of a text equals the truth."""
    gold = _truth(truth)
    found = math_verify.parse(text, parsing_timeout=None)  # type: ignore[arg-type]
    if not found:
        return False
    return math_verify.verify(
        gold, found, float_rounding=float_rounding, timeout_seconds=None, raise_on_error=True
    )


@lru_cache(maxsize=4096)
def _truth(truth: str) -> Any:
    marked = truth if "\\boxed" in truth or "$" in truth else f"\\boxed{{{truth}}}"
    gold = math_verify.parse(marked, parsing_timeout=None)  # type: ignore[arg-type]
    if not gold:
        raise Unscorable(f"the row's ground truth {truth!r} is no mathematical expression")
    return gold
