"""Formats with one tag per argument, values as plain text: Qwen 3 Coder and GLM.

A value stays a string: only the tool's schema tells whether `12` is a number or a text, and
decoding it here would lose how it was written. `values="text"` in the registration of a format says
so, and validation decodes later. A value cannot hold its own closing tag: what follows the tag is
then reported, never guessed at.
"""

import re
from dataclasses import dataclass
from typing import final

from luyen.rollout.parsers.protocol import (
    Attempt,
    ParsedTurn,
    Piece,
    WrittenCall,
    behind_failure,
    marks,
    quoted,
    scan,
    tool_parsers,
)

STRAY_CLOSE = "</tool_call> has no <tool_call> before it"
_TAG_STOPS = re.compile(r"(?P<close></tool_call>)|<tool_call>|</?think>")
_TAG_EXCERPT = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TagStyle:
    """Syntax of one argument and of the end of a call.

    Example:
        >>> TagStyle(key=re.compile("<k=(.*?)>"), next_key="<k=", close="</k>",
        ...          end=re.compile("</f>"), expected="<k=KEY> or </f>").own_lines
        False
    """

    key: re.Pattern[str]
    """Everything from the end of the last value to the begin of the next; group 1 is its key."""
    next_key: str
    """Start of a key: a value that contains it was not closed."""
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
    near = text[at : at + _TAG_EXCERPT]
    there = f"not {quoted(near)}" if near.strip() else "but the text ends there"
    return f"the call of {quoted(name)} must go on with {style.expected}, {there}", at


def piece_of(text: str, attempt: Attempt, end: int) -> Piece:
    """An attempt as a piece; one that failed reaches to the end of its `<tool_call>`."""
    if isinstance(attempt, str):
        end = behind_failure(text, end, _TAG_STOPS)
    return Piece(end=end, attempts=(attempt,))


# Qwen 3 Coder and Qwen 3.5: one tag for the function and one for each parameter.
#
#     <tool_call>
#     <function=NAME>
#     <parameter=KEY>
#     VALUE
#     </parameter>
#     </function>
#     </tool_call>
#
# Values are strings; see the module docstring.

_QWEN3_MARKS = marks(r"</?tool_call>|<function=")
_QWEN3_FUNCTION = re.compile(r"\s*<function=\s*([^\s<>]+)\s*>")
_QWEN3_STYLE = TagStyle(
    key=re.compile(r"\s*<parameter=([^<>\n]*)>"),
    next_key="<parameter=",
    close="</parameter>",
    end=re.compile(r"\s*</function>\s*</tool_call>"),
    expected="<parameter=KEY> or </function></tool_call>",
    own_lines=True,
)


@tool_parsers.register("qwen3_coder", stop_tokens=(), values="text")
def parse_qwen3_coder(text: str) -> ParsedTurn:
    """Calls in the format of Qwen 3 Coder; the values are the strings as written.

    Example:
        >>> call = "<function=f>\\n<parameter=x>\\n12\\n</parameter>\\n</function>"
        >>> parse_qwen3_coder(f"<tool_call>\\n{call}\\n</tool_call>").calls[0].arguments
        {'x': '12'}
    """
    return scan(text, _QWEN3_MARKS, _read_qwen3)


def _read_qwen3(text: str, mark: re.Match[str]) -> Piece:
    if mark.group() == "</tool_call>":
        return Piece(end=mark.end(), attempts=(STRAY_CLOSE,))
    if mark.group() == "<function=":
        return piece_of(text, "<function=NAME> must stand inside of <tool_call>", mark.end())
    function = _QWEN3_FUNCTION.match(text, mark.end())
    if function is None:
        return piece_of(text, "<function=NAME> must follow <tool_call>", mark.end())
    return piece_of(text, *read_arguments(text, function.end(), function.group(1), _QWEN3_STYLE))


# GLM 4.5 and later: a name, then a tag for each key and each value.
#
#     <tool_call>NAME
#     <arg_key>KEY</arg_key>
#     <arg_value>VALUE</arg_value>
#     </tool_call>
#
# GLM 4.7 writes the same without line breaks. Values are strings; see the module docstring.

_GLM_MARKS = marks(r"</?tool_call>")
_GLM_NAME = re.compile(r"\s*([^\s<>]+)\s*(?=<|$)")
_GLM_STYLE = TagStyle(
    key=re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    next_key="<arg_key>",
    close="</arg_value>",
    end=re.compile(r"\s*</tool_call>"),
    expected="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> or </tool_call>",
)


@tool_parsers.register("glm", stop_tokens=("<|observation|>", "<|user|>"), values="text")
def parse_glm(text: str) -> ParsedTurn:
    """Calls in the format of GLM; the values are the strings as written.

    Example:
        >>> argument = "<arg_key>x</arg_key>\\n<arg_value>12</arg_value>"
        >>> parse_glm(f"<tool_call>f\\n{argument}\\n</tool_call>").calls[0].arguments
        {'x': '12'}
    """
    return scan(text, _GLM_MARKS, _read_glm)


def _read_glm(text: str, mark: re.Match[str]) -> Piece:
    if mark.group() == "</tool_call>":
        return Piece(end=mark.end(), attempts=(STRAY_CLOSE,))
    name = _GLM_NAME.match(text, mark.end())
    if name is None:
        return piece_of(text, "one name must follow <tool_call>", mark.end())
    return piece_of(text, *read_arguments(text, name.end(), name.group(1), _GLM_STYLE))
