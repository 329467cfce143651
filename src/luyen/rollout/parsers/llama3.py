"""Llama 3.1 and later.

A call is `{"name": ..., "parameters": {...}}`, behind `<|python_tag|>` or as the whole message;
several are parted by `;`. Llama 3.2 also writes `[f(x=1), g(y="a")]`, and the tools it knows from
its training are called as `<|python_tag|>name.call(query="...")`.

Without the tag, a message that is JSON may as well be an answer. It counts as a call when it is an
object with `parameters` or `arguments`, or breaks off after a key that calls begin with.
"""

import re
from typing import Any, cast

from luyen.rollout.parsers.call_objects import Attempt, call_from_object
from luyen.rollout.parsers.json_objects import JsonRead, read_json
from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.pythonic import read_pythonic
from luyen.rollout.parsers.scan import Piece, behind_failure, marks, scan

_TAG = "<|python_tag|>"
_MARKS = marks(r"<\|python_tag\|>|(?:\A|(?<=</think>))\s*[{\[]")
_STOPS = re.compile(r"<\|python_tag\|>|</?think>")
_CALL_KEYS = ("parameters", "arguments")
_BEGUN = re.compile(r'[\[\s]*\{\s*"(?:name|parameters|arguments|type|function)"\s*:')
_LISTED = re.compile(r"\s*\[\s*[A-Za-z_][\w.-]*\(")
_WRITTEN = re.compile(r"\s*[A-Za-z_][\w.-]*\(")
_JSON = re.compile(r"\s*[{\[]")
_NEXT = re.compile(r"[\s;]*(?=\{)")


@tool_parsers.register("llama3", stop_tokens=("<|eot_id|>", "<|eom_id|>"), values="json")
def parse_llama3(text: str) -> Parsed:
    """Calls in the formats of Llama 3.

    Example:
        >>> parse_llama3('<|python_tag|>{"name": "f", "parameters": {"x": 1}}').calls[0].arguments
        {'x': 1}
        >>> parse_llama3("[f(x=1)]").calls[0].name
        'f'
        >>> parse_llama3('{"answer": 42}').calls
        ()
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    tagged = mark.group() == _TAG
    at = mark.end() if tagged else mark.end() - 1
    if _LISTED.match(text, at) or (tagged and _WRITTEN.match(text, at)):
        return _pythonic(text, at)
    if not _JSON.match(text, at):
        return _failed(text, at, f"neither JSON nor a call follows {_TAG}")
    found = read_json(text, at)
    if not tagged and not _is_attempt(text, at, found):
        return Piece(end=mark.end())
    return _objects(text, found)


def _pythonic(text: str, at: int) -> Piece:
    found = read_pythonic(text, at)
    if found.fault is not None:
        return _failed(text, found.end, f"the call cannot be read: {found.fault}")
    return Piece(end=found.end, attempts=found.calls)


def _is_attempt(text: str, at: int, found: JsonRead) -> bool:
    """Whether JSON without the tag is meant as a call."""
    if found.fault is not None:
        return _BEGUN.match(text, at) is not None
    items = cast(list[Any], found.value if isinstance(found.value, list) else [found.value])
    return any(isinstance(item, dict) and any(key in item for key in _CALL_KEYS) for item in items)


def _objects(text: str, found: JsonRead) -> Piece:
    """The calls from a first JSON value on; a value that cannot be read is the last."""
    attempts: list[Attempt] = []
    end = found.end
    while found.fault is None:
        items = cast(list[Any], found.value if isinstance(found.value, list) else [found.value])
        attempts += [call_from_object(item, _CALL_KEYS) for item in items]
        further = _NEXT.match(text, found.end)
        if further is None:
            return Piece(end=found.end, attempts=tuple(attempts) or ("the list is empty",))
        end, found = found.end, read_json(text, further.end())
    attempts.append(f"the call is not valid JSON: {found.fault}")
    # What was read is cut out of the content; what could not be read must stay in it.
    return Piece(end=end, attempts=tuple(attempts))


def _failed(text: str, at: int, why: str) -> Piece:
    return Piece(end=behind_failure(text, at, _STOPS), attempts=(why,))
