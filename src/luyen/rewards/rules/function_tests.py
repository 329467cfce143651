"""Tests that call a function of the program: arguments, and what it must return."""

import json
import keyword
from typing import Any

from luyen.rewards.outcome import Unscorable

_TEST = """
import json as _json
_owner = globals().get("Solution")
_function = getattr(_owner(), {name!r}) if hasattr(_owner, {name!r}) else globals()[{name!r}]
_found = _json.loads(_json.dumps(_function(*_json.loads({arguments!r}))))
_wanted = _json.loads({wanted!r})
assert any(_found == one for one in _wanted), f"{{_found!r:.200}} is not {{_wanted[0]!r:.200}}"
"""


def call_test(name: str, arguments: Any, wanted: Any) -> str:
    """Code that calls a function, or a method of `Solution`, and asserts what it returns.

    Arguments are a list, or text with one JSON value a line; tuples are lists. Where a result is
    written as a list of one, as some data sets do, its only entry is accepted too.

    Example:
        >>> names = {"add": lambda a, b: a + b}
        >>> exec(call_test("add", [1, 2], [3]), names)
        >>> exec(call_test("add", "1\\n2", "3"), names)
        >>> exec(call_test("add", [1, 2], 4), names)
        Traceback (most recent call last):
        ...
        AssertionError: 3 is not 4
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
    return _TEST.format(name=name, arguments=_written(given), wanted=_written(accepted))


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
