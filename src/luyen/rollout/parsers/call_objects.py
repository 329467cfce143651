"""From decoded JSON to a call, or to a line that says why it is none."""

from collections.abc import Mapping
from typing import Any, TypeAlias, cast

from luyen.rollout.parsers.json_objects import quoted, read_json
from luyen.rollout.parsers.protocol import WrittenCall

Attempt: TypeAlias = WrittenCall | str
"""A call, or what is wrong with it."""

_BESIDE_ARGUMENTS = frozenset(("name", "id", "type"))


def call_from_object(value: Any, keys: tuple[str, ...] = ("arguments",)) -> Attempt:
    """A call from `{"name": ..., "arguments": {...}}`; `keys` may hold the arguments.

    An object with a name and nothing else calls without arguments.

    Example:
        >>> call_from_object({"name": "now"}).arguments
        {}
        >>> call_from_object({"name": "f", "args": {"x": 1}})
        'the call of "f" has no "arguments"; it has "args"'
    """
    if not isinstance(value, dict):
        return f"the call must be a JSON object, not {_kind(value)}"
    fields = cast(dict[str, Any], value)
    if "name" not in fields:
        return 'the call has no "name"'
    name: Any = fields["name"]
    if not isinstance(name, str) or not name:
        return 'the "name" of the call must be a string that is not empty'
    present = [key for key in keys if key in fields]
    if len(present) > 1:
        return f"the call of {quoted(name)} has {_listed(present)}, and only one can count"
    if present:
        return call_from_parts(name, fields[present[0]])
    others = [key for key in fields if key not in _BESIDE_ARGUMENTS]
    if others:
        return f'the call of {quoted(name)} has no "{keys[0]}"; it has {_listed(others[:4])}'
    return WrittenCall(name=name, arguments={})


def call_from_parts(name: str, arguments: Any) -> Attempt:
    """A call from its name and decoded arguments; arguments in a JSON string are decoded.

    Example:
        >>> call_from_parts("f", '{"x": 1}').arguments
        {'x': 1}
        >>> call_from_parts("f", [1])
        'the arguments of "f" must be a JSON object, not a list'
    """
    if not name:
        return "the call has no name"
    if isinstance(arguments, str):
        inner = read_json(arguments, 0)
        rest = arguments[inner.end :].strip()
        if inner.fault is not None or rest:
            why = inner.fault or f"{quoted(rest)} follows the object"
            return f"the arguments of {quoted(name)} are a string that is not valid JSON: {why}"
        arguments = inner.value
    if not isinstance(arguments, dict):
        return f"the arguments of {quoted(name)} must be a JSON object, not {_kind(arguments)}"
    return WrittenCall(name=name, arguments=cast(Mapping[str, Any], arguments))


def _listed(names: list[str]) -> str:
    return " and ".join(quoted(name) for name in names)


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true or false"
    words = {str: "a string", int: "a number", float: "a number", list: "a list"}
    return words[type(value)]
