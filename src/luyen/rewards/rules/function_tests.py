"""Tests that call a function of the program: arguments, and what it must return."""

import json
import keyword
from typing import Any

from luyen.rewards.outcome import Unscorable
from luyen.sandbox.verify import CallCase


def call_test(name: str, arguments: Any, wanted: Any) -> CallCase:
    """A call of a function, or of a method of `Solution`, and what it must return.

    Arguments are a list, or text with one JSON value a line; tuples are lists. Where a result is
    written as a list of one, as some data sets do, its only entry is accepted too.

    Example:
        >>> call_test("add", [1, 2], [3]).accepted
        ([3], 3)
        >>> call_test("add", "1\\n2", "3").arguments
        '[1, 2]'
    """
    if not name.isidentifier() or keyword.iskeyword(name):
        raise Unscorable(f"the row's fn_name {name[:100]!r} is no name of a function")
    given = _lines(arguments) if isinstance(arguments, str) else arguments
    if not isinstance(given, list | tuple):
        raise Unscorable(f"the row's arguments {str(arguments)[:100]!r} are no list")
    one = _value(wanted) if isinstance(wanted, str) else wanted
    accepted = [one, one[0]] if isinstance(one, list | tuple) and len(one) == 1 else [one]
    if isinstance(wanted, str) and one != wanted:  # text that happens to look like JSON
        accepted.append(wanted)
    known = tuple(json.loads(_written(accepted)))
    return CallCase(function=name, arguments=_written(given), accepted=known)


def _written(value: Any) -> str:
    try:
        return json.dumps(value)
    except (TypeError, ValueError, RecursionError) as error:
        raise Unscorable(f"the row's test is no JSON: {error}") from error


def _lines(text: str) -> list[Any]:
    return [_value(line) for line in text.split("\n") if line.strip()]


def _value(text: str) -> Any:
    """A value written as JSON; text that is no JSON stands for itself."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
