"""Fields of a JSON body, each read by a function that refuses it by name.

A reader takes a value and the name it stands under, and returns what the server works with. What
is wrong is a UserError with that name, so that every refusal says which field it is about.
"""

import math
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeAlias, TypeVar, cast

from luyen.base.errors import did_you_mean
from luyen.rollout.parsers.protocol import read_json
from luyen.serve.failures import wrong

T = TypeVar("T")
Read: TypeAlias = Callable[[Any, str], T]
"""(value, name of the field) -> the value as the server uses it; raises UserError."""


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request body; a UserError for anything else.

    Example:
        >>> parse_body(b'{"n": 2}')
        {'n': 2}
    """
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        why = f"it is not UTF-8: byte {error.start} begins no character"
        raise wrong("body", raw[:40], why, "send JSON in UTF-8") from None
    read = read_json(text, 0)
    if read.fault is not None:
        raise wrong("body", text, f"it is not JSON: {read.fault}", "send one JSON object")
    if text[read.end :].strip(" \t\n\r"):
        raise wrong("body", text, "text follows the JSON object", "send one JSON object")
    if not isinstance(read.value, dict):
        raise wrong("body", text, "it is not an object", 'send {"field": value, ...}')
    return cast(dict[str, Any], read.value)


def read_fields(
    body: Mapping[str, Any],
    readers: Mapping[str, Read[Any]],
    *,
    ignored: Collection[str] = (),
    above: str = "",
) -> dict[str, Any]:
    """The fields that were given, each through its reader; null counts as not given.

    A field that has no reader and is not in `ignored` is refused. `above` is the path of the object
    inside of the body.
    """
    found: dict[str, Any] = {}
    for name, value in body.items():
        if name in ignored:
            continue
        if name not in readers:
            fix = did_you_mean(name, readers) if len(name) < 40 else "leave it out"
            raise wrong(f"{above}{name}" or "(empty)", value, "no such field", fix)
        if value is not None:
            found[name] = readers[name](value, f"{above}{name}")
    return found


def flag(value: Any, name: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise wrong(name, value, "it is true or false", "send one of them")
    return value


def text(value: Any, name: str) -> str:
    """Text."""
    if not isinstance(value, str):
        raise wrong(name, value, "it is text", "send a string")
    return value


def whole(low: int, high: int) -> Read[int]:
    """A whole number between two bounds, both included.

    Example:
        >>> whole(1, 8)(3, "n")
        3
    """

    def read(value: Any, name: str) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or not low <= value <= high:
            raise wrong(name, value, f"it is a whole number from {low} to {high}", "send one")
        return value

    return read


def number(low: float, high: float, *, is_open: bool = False) -> Read[float]:
    """A number between two bounds; with `is_open` the lower one is not included."""
    bounds = f"{'above ' if is_open else 'from '}{low:g} {'up ' if is_open else ''}to {high:g}"

    def read(value: Any, name: str) -> float:
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        is_fine = is_number and low <= value <= high and not (is_open and value == low)
        if not is_fine or not math.isfinite(value):
            raise wrong(name, value, f"it is a number {bounds}", "send one")
        return float(value)

    return read


def one_of(*names: str) -> Read[str]:
    """One of these words."""

    def read(value: Any, name: str) -> str:
        if not isinstance(value, str) or value not in names:
            raise wrong(name, value, "it is one of " + ", ".join(names), "send one of them")
        return value

    return read


def only(*values: Any, why: str) -> Read[None]:
    """A field whose neutral values are accepted, and no other: there is nothing behind it."""

    def read(value: Any, name: str) -> None:
        # 0 == False in Python, and means something else in JSON.
        if not any(type(value) is type(v) and value == v for v in values):
            raise wrong(name, value, why, "leave it out")

    return read


def object_of(value: Any, name: str) -> dict[str, Any]:
    """An object."""
    if not isinstance(value, dict):
        raise wrong(name, value, "it is an object", "send {...}")
    return cast(dict[str, Any], value)


def listed(read: Read[T], *, least: int = 0, most: int) -> Read[tuple[T, ...]]:
    """A list of so many values."""

    def read_all(value: Any, name: str) -> tuple[T, ...]:
        values = cast(list[Any], value)
        if not isinstance(value, list) or not least <= len(values) <= most:
            raise wrong(name, value, f"it is a list of {least} to {most} values", "send one")
        return tuple(read(one, f"{name}[{i}]") for i, one in enumerate(values))

    return read_all


def token_ids(vocabulary: int, *, most: int) -> Read[tuple[int, ...]]:
    """A list of token ids. Quick for long ones: types and bounds are looked at together."""

    def read(value: Any, name: str) -> tuple[int, ...]:
        ids = cast(list[Any], value)
        if not isinstance(value, list) or not 1 <= len(ids) <= most:
            raise wrong(name, value, f"it is a list of 1 to {most} token ids", "send one")
        if set(map(type, ids)) != {int} or min(ids) < 0 or max(ids) >= vocabulary:
            why = f"token ids are whole numbers from 0 to {vocabulary - 1}"
            raise wrong(name, value, why, "send ids of /tokenize")
        return tuple(ids)

    return read
