"""DeepSeek V3, R1 and V3.1. The bars and blanks of its special tokens are not ASCII.

With `[...]` for the special tokens, V3.1 writes

    [tool calls begin][tool call begin]NAME[tool sep]{...}[tool call end][tool calls end]

and V3 and R1 write `function` for the name, and the name and fenced JSON behind the separator:

    [tool call begin]function[tool sep]NAME
    ```json
    {...}
    ```[tool call end]

Both are read. The tokens around all calls may be missing; those around a call may not.
"""

import re

from luyen.rollout.parsers.call_objects import call_from_parts
from luyen.rollout.parsers.json_objects import quoted, read_json
from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.scan import Piece, behind_failure, marks, scan


def _token(words: str) -> str:
    """The special token of these words, with the fullwidth bar and the block for a blank."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


CALLS_BEGIN, CALLS_END = _token("tool calls begin"), _token("tool calls end")
CALL_BEGIN, SEPARATOR, CALL_END = (
    _token("tool call begin"),
    _token("tool sep"),
    _token("tool call end"),
)

_MARKS = marks(f"(?:{CALLS_BEGIN}\\s*)?{CALL_BEGIN}|{CALLS_BEGIN}|{CALL_END}|{CALLS_END}")
_STOPS = re.compile(
    f"(?P<close>{CALL_END}(?:\\s*{CALLS_END})?|{CALLS_END})|{CALLS_BEGIN}|{CALL_BEGIN}|</?think>"
)
_HEAD = re.compile(f"\\s*([^\\s<]+)\\s*{SEPARATOR}")
_FENCED = re.compile(r"\s*([^\s{`]+)\s*```(?:json)?(?=\s)")
_CLOSE = re.compile(f"\\s*{CALL_END}(?:\\s*{CALLS_END})?")
_CLOSE_FENCED = re.compile(f"\\s*```\\s*{CALL_END}(?:\\s*{CALLS_END})?")


@tool_parsers.register("deepseek", stop_tokens=(), values="json")
def parse_deepseek(text: str) -> Parsed:
    """Calls in the formats of DeepSeek V3, R1 and V3.1.

    Example:
        >>> call = f'{CALL_BEGIN}f{SEPARATOR}{{"x": 1}}{CALL_END}'
        >>> parse_deepseek(CALLS_BEGIN + call + CALLS_END).calls[0].arguments
        {'x': 1}
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    if not mark.group().endswith(CALL_BEGIN):
        return Piece(end=mark.end(), attempts=(_out_of_place(mark.group()),))
    head = _HEAD.match(text, mark.end())
    if head is None:
        return _failed(text, mark.end(), "the call must begin with a name and the separator token")
    name, at, close_pattern = head.group(1), head.end(), _CLOSE
    if name == "function" and (fenced := _FENCED.match(text, at)) is not None:
        name, at, close_pattern = fenced.group(1), fenced.end(), _CLOSE_FENCED
    found = read_json(text, at)
    if found.fault is not None:
        why = f"the arguments of {quoted(name)} are not valid JSON: {found.fault}"
        return _failed(text, found.end, why)
    close = close_pattern.match(text, found.end)
    if close is None:
        return _failed(text, found.end, f"the call of {quoted(name)} is not closed")
    return Piece(end=close.end(), attempts=(call_from_parts(name, found.value),))


def _out_of_place(token: str) -> str:
    if token == CALLS_BEGIN:
        return "the tool calls are opened, but no call follows"
    return "a tool call is closed that was not opened"


def _failed(text: str, at: int, why: str) -> Piece:
    return Piece(end=behind_failure(text, at, _STOPS), attempts=(why,))
