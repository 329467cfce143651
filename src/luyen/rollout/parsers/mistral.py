"""Mistral, in both of its forms.

Tokenizers before version 11 list the calls: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]`.
Later ones repeat the token: `[TOOL_CALLS]NAME[ARGS]{...}`, some with `[CALL_ID]ID` before
`[ARGS]`, and the first of them without `[ARGS]`. Thinking stands in `[THINK]...[/THINK]` or in
`<think>...</think>`.
"""

import re
from typing import Any, cast

from luyen.rollout.parsers.call_objects import call_from_object, call_from_parts
from luyen.rollout.parsers.json_objects import quoted, read_json
from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.scan import Piece, behind_failure, marks, scan

_MARKS = marks(r"\[TOOL_CALLS\]", r"<think>|\[THINK\]", r"</think>|\[/THINK\]")
_STOPS = re.compile(r"\[TOOL_CALLS\]|</?think>|\[/?THINK\]")
_LIST = re.compile(r"\s*\[(?!ARGS\]|CALL_ID\]|TOOL_CALLS\])")
_NAME = re.compile(r"\s*([^\s\[\]{}]+)\s*(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\]|(?=\{))")


@tool_parsers.register("mistral", stop_tokens=(), values="json")
def parse_mistral(text: str) -> Parsed:
    """Calls in the formats of Mistral.

    Example:
        >>> parse_mistral('[TOOL_CALLS]f[ARGS]{"x": 1}').calls[0].arguments
        {'x': 1}
        >>> parse_mistral('[TOOL_CALLS][{"name": "f", "arguments": {}}]').calls[0].name
        'f'
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    if _LIST.match(text, mark.end()):
        return _list(text, mark.end())
    name = _NAME.match(text, mark.end())
    if name is None:
        return _failed(
            text, mark.end(), "a list of calls, or NAME[ARGS]{...}, must follow [TOOL_CALLS]"
        )
    found = read_json(text, name.end())
    if found.fault is not None:
        why = f"the arguments of {quoted(name.group(1))} are not valid JSON: {found.fault}"
        return _failed(text, found.end, why)
    return Piece(end=found.end, attempts=(call_from_parts(name.group(1), found.value),))


def _list(text: str, at: int) -> Piece:
    found = read_json(text, at)
    if found.fault is not None:
        return _failed(text, found.end, f"the list of calls is not valid JSON: {found.fault}")
    items = cast(list[Any], found.value)
    if not items:
        return Piece(end=found.end, attempts=("the list of calls is empty",))
    return Piece(end=found.end, attempts=tuple(call_from_object(item) for item in items))


def _failed(text: str, at: int, why: str) -> Piece:
    # JSON takes the bracket that a token begins with for a list and fails one behind it.
    return Piece(end=behind_failure(text, at - 1, _STOPS), attempts=(why,))
