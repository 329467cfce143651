"""JSON as a policy wrote it: read strictly, from a position, with a reason where it fails."""

import json
import math
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any, final

NESTING_LIMIT = 64
"""Deeper values are refused: what handles them later may recurse, and no tool needs them."""

_BLANK = re.compile(r"[ \t\n\r]*")
_HALF_CHARACTER = re.compile("[\ud800-\udfff]")
_EXCERPT = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JsonRead:
    """What was read at a position.

    Example:
        >>> JsonRead(value=1, end=3).fault is None
        True
    """

    value: Any
    """The value; means nothing when there is a fault."""
    end: int
    """The position behind the value, or where reading failed."""
    fault: str | None = None
    """Why it is not JSON that can be used, in one line; None when it is."""


def quoted(text: str, most: int = 60) -> str:
    """Text for a message: in quotes, on one line, shortened, nothing but ASCII.

    Example:
        >>> quoted("a\\nb")
        '"a\\\\nb"'
    """
    return json.dumps(text if len(text) <= most else text[:most] + "...")


def read_json(text: str, at: int) -> JsonRead:
    """The JSON value that begins at a position, blanks before it allowed. Never raises.

    NaN, Infinity, a key that stands twice in an object, numbers that do not fit, half of a
    surrogate pair, and values nested beyond `NESTING_LIMIT` are faults. Their end is known all
    the same, so tags inside their strings are not taken for the end of a call.

    Example:
        >>> read_json('see {"a": "}"} there', 4)
        JsonRead(value={'a': '}'}, end=14, fault=None)
        >>> read_json('{"a": NaN}', 0).fault
        'NaN is not JSON'
    """
    start = _skip_blanks(text, at)
    faults: list[str] = []
    try:
        value, end = _decoder(faults).raw_decode(text, start)
    except json.JSONDecodeError as error:
        return JsonRead(value=None, end=max(error.pos, start), fault=_reason(error, start))
    except RecursionError:
        return JsonRead(value=None, end=start, fault=_too_deep())
    fault = faults[0] if faults else flaw(value)
    return JsonRead(value=value, end=end, fault=fault)


def flaw(value: Any) -> str | None:
    """Why a decoded value cannot be passed on; None when it can."""
    waiting: list[tuple[Any, int]] = [(value, 0)]
    while waiting:
        item, depth = waiting.pop()
        if depth > NESTING_LIMIT:
            return _too_deep()
        if isinstance(item, str) and _HALF_CHARACTER.search(item):
            return "a string holds half of a surrogate pair"
        if isinstance(item, float) and not math.isfinite(item):
            return "a number is too large"
        if isinstance(item, dict):
            waiting += [(part, depth + 1) for pair in item.items() for part in pair]
        elif isinstance(item, list):
            waiting += [(part, depth + 1) for part in item]
    return None


def _skip_blanks(text: str, at: int) -> int:
    blank = _BLANK.match(text, at)
    return blank.end() if blank else at


def _too_deep() -> str:
    return f"it is nested more than {NESTING_LIMIT} levels deep"


def _reason(error: json.JSONDecodeError, start: int) -> str:
    if error.pos >= len(error.doc):
        return f"{error.msg}, but the text ends there"
    near = quoted(error.doc[error.pos : error.pos + _EXCERPT])
    return f"{error.msg} at character {max(error.pos - start, 0)}, near {near}"


def _decoder(faults: list[str]) -> json.JSONDecoder:
    """A decoder that reads on past what it must refuse and notes it in `faults`."""

    def constant(name: str) -> None:
        faults.append(f"{name} is not JSON")

    def integer(digits: str) -> int:
        try:
            return int(digits)
        except ValueError:
            faults.append(f"a number has {len(digits)} digits, which is too long")
            return 0

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(items)
        if len(made) < len(items):
            twice = next(name for name, times in Counter(n for n, _ in items).items() if times > 1)
            faults.append(f"the key {quoted(twice)} stands twice in one object")
        return made

    return json.JSONDecoder(parse_constant=constant, parse_int=integer, object_pairs_hook=pairs)
