"""Thresholds as users write them: one number, or two joined by an underscore ("0.5_2.0")."""

import math
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError

LOG_LIMIT = 20.0
"""Log-ratios are cut at ±20 before `exp`, so no weight overflows (verl's safety bound)."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Two positive numbers, the lower one first.

    Example:
        >>> read_threshold("rollout_is_threshold", "0.5_2.0")
        Band(low=0.5, high=2.0)
    """

    low: float
    """Smallest value inside."""
    high: float
    """Largest value inside."""


def read_threshold(field: str, value: float | str) -> float | Band:
    """A number as it is, "lo_hi" as a band; anything else is refused under `field`.

    The text is split before it is read as a number: Python takes "1_2" for twelve.
    """
    if isinstance(value, str) and "_" in value:
        parts = value.split("_")
        if len(parts) != 2:
            why = 'a band is written as two numbers, "lo_hi"'
            raise UserError(field, value, why, 'write it as "0.5_2.0"')
        return ordered_band(
            field, value, read_number(field, parts[0]), read_number(field, parts[1])
        )
    return read_number(field, value)


def read_number(field: str, value: float | str) -> float:
    """A positive finite number, from a number or from its text; a bool is not a number here."""
    why = "a threshold is a positive, finite number"
    fix = 'pass a number such as 2.0, or a band such as "0.5_2.0"'
    if isinstance(value, bool):
        raise UserError(field, value, why, fix)
    try:
        number = float(value)
    except ValueError:
        raise UserError(field, value, why, fix) from None
    if not math.isfinite(number) or number <= 0.0:
        raise UserError(field, value, why, fix)
    return number


def ordered_band(field: str, value: float | str, low: float, high: float) -> Band:
    """The band from low to high, refused when it is upside down."""
    if low > high:
        why = f"its lower bound {low} is above its upper bound {high}"
        raise UserError(field, value, why, "write the smaller number first")
    return Band(low=low, high=high)
