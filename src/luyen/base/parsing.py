"""JSON and YAML of a file that somebody else may have written: read, or a ValueError.

A parser that calls itself for every bracket ends with the stack, and that of YAML in C takes the
process along. What is nested deeper than any file of ours is therefore refused.
"""

import json
from collections.abc import Iterable, Iterator
from typing import Any, cast

import yaml

DEEPEST = 200
"""Levels of nesting that are read; the records of a run have less than twenty."""
_DEEP = "it is nested too deeply"


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; a ValueError when it is none, or is nested too deeply.

    Example:
        >>> parse_json('{"a": [1]}')
        {'a': [1]}
    """
    try:
        found: Any = json.loads(text)
    except RecursionError as error:
        raise ValueError(_DEEP) from error
    if _brackets(text) > DEEPEST and _is_deep(found):
        raise ValueError(_DEEP)
    return found


def parse_yaml(text: str) -> Any:
    """The value of a YAML text as a run writes it; a ValueError when it is none.

    Aliases are refused: a few of them stand for more than any machine can hold.

    Example:
        >>> parse_yaml("trainer: {seed: 1}")
        {'trainer': {'seed': 1}}
    """
    try:
        fault = _fault_of(text)
        if fault is None:
            return yaml.load(text, Loader=yaml.CSafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(f"it is no YAML: {error}") from error
    raise ValueError(fault)


def _fault_of(text: str) -> str | None:
    """Why a YAML text is not to be loaded, found without building anything of it."""
    depth = 0
    events: Iterator[object] = cast(Any, yaml).parse(text, Loader=yaml.CSafeLoader)
    for event in events:
        if isinstance(event, yaml.AliasEvent):
            return "it holds an alias, which no run writes"
        depth += isinstance(event, yaml.CollectionStartEvent)
        depth -= isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            return _DEEP
    return None


def _brackets(text: bytes | str) -> int:
    """At least as many as there are levels."""
    if isinstance(text, bytes):
        return text.count(b"[") + text.count(b"{")
    return text.count("[") + text.count("{")


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(DEEPEST):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast(dict[str, Any], value).values()
    return cast(list[Any], value) if isinstance(value, list) else ()
