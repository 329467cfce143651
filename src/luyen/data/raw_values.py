"""Raw values of rows checked by type: objects, lists, JSON text."""

import json
from collections.abc import Iterable
from typing import Any, TypeGuard, cast

DEEPEST = 100
"""Levels of nesting of a row."""


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Whether the value has named fields."""
    return isinstance(value, dict)


def is_list(value: Any) -> TypeGuard[list[Any]]:
    """Whether the value is a list."""
    return isinstance(value, list)


def without_none(value: Any) -> Any:
    """The value without fields that are null: columnar files fill absent fields with null.

    Example:
        >>> without_none({"role": "user", "tool_calls": None})
        {'role': 'user'}
    """
    if is_object(value):
        return {k: without_none(v) for k, v in value.items() if v is not None}
    return [without_none(v) for v in value] if is_list(value) else value


def canonical(value: Any) -> Any:
    """The value with text for keys and a fixed order everywhere, ready to be hashed as JSON."""
    if is_object(value):
        return {str(k): canonical(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [canonical(v) for v in cast(list[Any], value)]
    if isinstance(value, set | frozenset):
        return sorted(str(canonical(v)) for v in cast(set[Any], value))
    return value if isinstance(value, str | int | float | bool | None) else str(value)


def parsed_json(text: str) -> Any:
    """The value that a text of JSON holds; a ValueError says why it holds none of ours."""
    value = raw_json(text)
    require_plain(value)
    return value


def raw_json(text: str) -> Any:
    """The value as it is written; the caller checks each row with `require_plain`.

    Example:
        >>> raw_json('{"a": 1, "a": 2}')
        Traceback (most recent call last):
        ValueError: `a` stands in it twice
    """
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except RecursionError as error:
        raise ValueError(f"it is nested more than {DEEPEST} levels deep") from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:
        if "digits" not in str(error):
            raise
        raise ValueError("a number in it has more digits than are read, some thousands") from error


def require_plain(value: Any) -> None:
    """A ValueError where no file of ours could hold the value: too deep, or no text."""
    level: list[Any] = [value]
    for _ in range(DEEPEST + 1):
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                _require_text(one)
            elif is_object(one):
                below += one.keys()
                below += one.values()
            elif isinstance(one, list | tuple):
                below += cast(list[Any], one)
        if not below:
            return
        level = below
    raise ValueError(f"it is nested more than {DEEPEST} levels deep")


def _require_text(text: str) -> None:
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError as error:
            where = ascii(text[max(error.start - 10, 0) : error.start + 10])
            why = "half of a character stands in it, which no encoding can hold"
            raise ValueError(f"{why}: {where}") from error


def _without_repeats(pairs: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    listed = list(pairs)
    found = dict(listed)
    if len(found) != len(listed):
        seen: set[str] = set()
        twice = next(name for name, _ in listed if name in seen or seen.add(name))
        raise ValueError(f"`{twice}` stands in it twice")
    return found
