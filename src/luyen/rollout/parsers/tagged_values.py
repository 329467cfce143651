"""Arguments as pairs of tags, with the value as plain text: what `qwen3_coder` and `glm` share.

A value stays a string: only the tool's schema tells whether `12` is a number or a text, and
decoding it here would lose how it was written. `values="text"` in the registration of a format says
so, and validation decodes later. A value cannot hold its own closing tag: what follows the tag is
then reported, never guessed at.
"""

import re
from dataclasses import dataclass
from typing import final

from luyen.rollout.parsers.call_objects import Attempt
from luyen.rollout.parsers.json_objects import quoted
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.parsers.scan import Piece, behind_failure

STRAY_CLOSE = "</tool_call> has no <tool_call> before it"
_STOPS = re.compile(r"(?P<close></tool_call>)|<tool_call>|</?think>")
_EXCERPT = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TagStyle:
    """How a format writes one argument and the end of a call.

    Example:
        >>> TagStyle(key=re.compile("<k=(.*?)>"), next_key="<k=", close="</k>",
        ...          end=re.compile("</f>"), expected="<k=KEY> or </f>").own_lines
        False
    """

    key: re.Pattern[str]
    """Everything from the end of the last value to the begin of the next; group 1 is its key."""
    next_key: str
    """How a key begins: a value that holds this was not closed."""
    close: str
    """What ends a value."""
    end: re.Pattern[str]
    """What ends the call."""
    expected: str
    """What may follow a value, for messages."""
    own_lines: bool = False
    """Whether a line break on either side of a value belongs to the format."""


def read_arguments(text: str, at: int, name: str, style: TagStyle) -> tuple[Attempt, int]:
    """The call of `name` whose arguments begin at a position, and how far reading came."""
    arguments: dict[str, str] = {}
    while (found := style.key.match(text, at)) is not None:
        key, begin = found.group(1).strip(), found.end()
        stop = text.find(style.close, begin)
        if stop < 0 or style.next_key in text[begin:stop]:
            return f"the value of {quoted(key)} in the call of {quoted(name)} is not closed", begin
        if not key or key in arguments:
            why = f"{quoted(key)} stands twice" if key else "an argument has no name"
            return f"{why} in the call of {quoted(name)}", stop
        value = text[begin:stop]
        arguments[key] = value.removeprefix("\n").removesuffix("\n") if style.own_lines else value
        at = stop + len(style.close)
    end = style.end.match(text, at)
    if end is not None:
        return WrittenCall(name=name, arguments=arguments), end.end()
    near = text[at : at + _EXCERPT]
    there = f"not {quoted(near)}" if near.strip() else "but the text ends there"
    return f"the call of {quoted(name)} must go on with {style.expected}, {there}", at


def piece_of(text: str, attempt: Attempt, end: int) -> Piece:
    """An attempt as a piece; one that failed reaches to the end of its `<tool_call>`."""
    if isinstance(attempt, str):
        end = behind_failure(text, end, _STOPS)
    return Piece(end=end, attempts=(attempt,))
