"""Hermes, Qwen 2.5 and Qwen 3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

import re

from luyen.rollout.parsers.call_objects import Attempt, call_from_object
from luyen.rollout.parsers.json_objects import read_json
from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.scan import Piece, behind_failure, marks, scan

_MARKS = marks(r"</?tool_call>")
_STOPS = re.compile(r"(?P<close></tool_call>)|<tool_call>|</?think>")
_CLOSE = re.compile(r"\s*</tool_call>")


@tool_parsers.register("hermes", stop_tokens=(), values="json")
def parse_hermes(text: str) -> Parsed:
    """Calls in the format of Hermes.

    The JSON is read from the opening tag on, so a closing tag inside a string ends nothing.

    Example:
        >>> text = 'Yes.\\n<tool_call>\\n{"name": "f", "arguments": {"x": 1}}\\n</tool_call>'
        >>> parsed = parse_hermes(text)
        >>> parsed.content, parsed.calls[0].name, parsed.calls[0].arguments
        ('Yes.', 'f', {'x': 1})
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    if mark.group().startswith("</"):
        return Piece(end=mark.end(), attempts=("</tool_call> has no <tool_call> before it",))
    found = read_json(text, mark.end())
    close = _CLOSE.match(text, found.end)
    attempt: Attempt
    if found.fault is not None:
        attempt = f"the call is not valid JSON: {found.fault}"
    elif close is None:
        attempt = "the call is not closed: </tool_call> must follow the JSON object"
    else:
        return Piece(end=close.end(), attempts=(call_from_object(found.value),))
    return Piece(end=behind_failure(text, found.end, _STOPS), attempts=(attempt,))
