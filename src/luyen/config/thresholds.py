"""Thresholds of the rollout correction as users write them: 2.0, or a band "0.5_2.0".

The check and the mathematics read them with the same functions, so that what passes the one is
accepted by the other.
"""

import math
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.config.catalog import REJECTION_CRITERIA


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


def read_limits(
    rollout_is_threshold: float | str, rollout_is_floor: float | None
) -> tuple[float | Band, float | None]:
    """Threshold and floor as numbers, refused when they contradict each other."""
    threshold = read_threshold("rollout_is_threshold", rollout_is_threshold)
    if rollout_is_floor is None:
        return threshold, None
    floor = read_number("rollout_is_floor", rollout_is_floor)
    if isinstance(threshold, Band):
        why = f"the band {rollout_is_threshold!r} sets weights below it to 0, so no floor can act"
        fix = "drop rollout_is_floor, or give rollout_is_threshold as one number"
        raise UserError("rollout_is_floor", rollout_is_floor, why, fix)
    if floor > threshold:
        why = f"it is above rollout_is_threshold {threshold}"
        raise UserError("rollout_is_floor", rollout_is_floor, why, "choose a smaller floor")
    return threshold, floor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """One option with its bounds on the statistic.

    Example:
        >>> rejection_rules("seq_mean_k3", 0.01)
        (RejectionRule(option='seq_mean_k3', low=None, high=0.01),)
    """

    option: str
    """One of the catalogue's `REJECTION_CRITERIA`: how a measure is gathered, and which measure."""
    low: float | None
    """Smallest statistic kept; None where the statistic cannot be too small (k2, k3)."""
    high: float
    """Largest statistic kept."""

    @property
    def per_token(self) -> bool:
        """Whether it judges tokens one by one instead of whole sequences."""
        return self.option.startswith("token")


def rejection_rules(
    rollout_rs: str, rollout_rs_threshold: float | str | None
) -> tuple[RejectionRule, ...]:
    """The rules a comma list names, with one threshold for all of them or one for each."""
    options = [option.strip() for option in rollout_rs.split(",") if option.strip()]
    if not options:
        raise UserError(
            "rollout_rs",
            rollout_rs,
            "it names no option",
            "known: " + ", ".join(REJECTION_CRITERIA),
        )
    for option in options:
        if option not in REJECTION_CRITERIA:
            why = f"no rejection option is called {option!r}"
            raise UserError("rollout_rs", rollout_rs, why, did_you_mean(option, REJECTION_CRITERIA))
    if len(set(options)) < len(options):
        raise UserError("rollout_rs", rollout_rs, "an option is named twice", "name it once")
    thresholds = threshold_list(rollout_rs_threshold, len(options))
    return tuple(make_rule(o, t) for o, t in zip(options, thresholds, strict=True))


def threshold_list(value: float | str | None, count: int) -> list[float | str]:
    """One threshold per option: a single one is repeated, a comma list must have `count` parts."""
    field = "rollout_rs_threshold"
    if value is None:
        fix = 'pass a number, or "lo_hi" for k1 options'
        raise UserError(field, None, "rollout_rs rejects nothing without a threshold", fix)
    if not isinstance(value, str):
        return [value] * count
    parts: list[float | str] = [part.strip() for part in value.split(",")]
    if len(parts) == 1:
        return parts * count
    if len(parts) != count:
        why = f"it lists {len(parts)} thresholds for {count} options"
        raise UserError(field, value, why, "pass one threshold, or one for each option")
    return parts


def make_rule(option: str, value: float | str) -> RejectionRule:
    """The rule of one option; k1 takes a band of ratios, k2 and k3 one upper bound."""
    field = "rollout_rs_threshold"
    threshold = read_threshold(field, value)
    if option.endswith("k1"):
        band = threshold
        if not isinstance(band, Band):
            band = ordered_band(field, value, 1.0 / band, band)
        return RejectionRule(option=option, low=math.log(band.low), high=math.log(band.high))
    if isinstance(threshold, Band):
        why = f"{option} is never negative: it takes one upper bound, not a band"
        raise UserError(field, value, why, "pass one number for it")
    return RejectionRule(option=option, low=None, high=threshold)
