"""Limits of a tool as users write them."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean
from luyen.rollout.tools.protocol import ToolLimits

_NAMES = tuple(field.name for field in fields(ToolLimits))
_WHOLE = ("retries", "concurrency")
_MAY_BE_ZERO = ("retries", "backoff_s")


def check_limits(limits: Mapping[str, Any]) -> None:
    """Raise a UserError unless every entry is a field of `ToolLimits` with a value that it takes.

    Example:
        >>> check_limits({"timeout_s": 5, "retries": 0})
        >>> check_limits({"retires": 5})
        Traceback (most recent call last):
        ...
        luyen.base.errors.UserError: limits = 'retires': no such limit. Fix: did you mean `retries`?
    """
    for name, value in limits.items():
        if name not in _NAMES:
            raise UserError("limits", name, "no such limit", did_you_mean(name, _NAMES))
        kind = int if name in _WHOLE else int | float
        least = "0 or more" if name in _MAY_BE_ZERO else "above 0"
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
            what = "a whole number" if name in _WHOLE else "a number"
            raise UserError(f"limits.{name}", value, f"expected {what}", f"set it {least}")
