"""Verifiable instructions by id: how one is declared, and how a row's settings reach its check."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias, cast

from luyen.base.suggest import did_you_mean
from luyen.rewards.outcome import Unscorable

Check: TypeAlias = Callable[..., bool]
"""`(text, *, settings) -> bool`: whether a text follows the instruction."""
Relation: TypeAlias = Literal["less than", "at least"]
CHECKS: dict[str, Check] = {}
"""Id of an instruction, as the data set writes it -> its check."""


def instruction(name: str) -> Callable[[Check], Check]:
    """Declare the check of an instruction."""

    def keep(check: Check) -> Check:
        assert name not in CHECKS, name
        CHECKS[name] = check
        return check

    return keep


def holds(found: int, relation: str, wanted: int) -> bool:
    """Whether a number is less than another, or at least it.

    Example:
        >>> holds(3, "at least", 3), holds(3, "less than", 3)
        (True, False)
    """
    if relation == "at least":
        return found >= wanted
    if relation == "less than":
        return found < wanted
    raise Unscorable(f"the row's relation {relation!r} is neither `at least` nor `less than`")


def divided(text: str, mark: str) -> list[str]:
    """The parts between marks; before the first and after the last there need be nothing.

    Example:
        >>> divided("*** one *** two", "***"), divided("one *** *** two", "***")
        (['one', 'two'], ['one', '', 'two'])
    """
    parts = [part.strip() for part in text.split(mark)]
    first = 0 if parts[0] else 1
    last = len(parts) if parts[-1] else len(parts) - 1
    return parts[first:last]


def check_of(name: str, settings: Mapping[str, Any]) -> Callable[[str], bool]:
    """The check of an instruction with the settings of a row, in which null means not given.

    Example:
        >>> check_of("keywords:existence", {"keywords": ["tea"], "num_words": None})("Green tea.")
        True
    """
    if name not in CHECKS:
        raise Unscorable(f"no check for the instruction {name!r}; {did_you_mean(name, CHECKS)}")
    check = CHECKS[name]
    given = {key: _plain(value) for key, value in settings.items() if value is not None}
    parameters = inspect.signature(check).parameters
    known = [key for key in parameters if parameters[key].kind is inspect.Parameter.KEYWORD_ONLY]
    lacking = [key for key in known if key not in given]
    strange = [key for key in given if key not in known]
    if lacking or strange:
        why = f"lacks {', '.join(lacking)}" if lacking else f"has no use for {', '.join(strange)}"
        raise Unscorable(f"the row's instruction {name!r} {why}")
    return lambda text: check(text, **given)


def _plain(value: Any) -> Any:
    """Tables read back from files hold whole numbers as floats."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return list(cast(tuple[Any, ...], value)) if isinstance(value, tuple) else value
