"""GLM 4.5 and later: a name, then a tag for each key and each value.

    <tool_call>NAME
    <arg_key>KEY</arg_key>
    <arg_value>VALUE</arg_value>
    </tool_call>

GLM 4.7 writes the same without line breaks. Values are strings; see
`luyen.rollout.parsers.tagged_values`.
"""

import re

from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.scan import Piece, marks, scan
from luyen.rollout.parsers.tagged_values import STRAY_CLOSE, TagStyle, piece_of, read_arguments

_MARKS = marks(r"</?tool_call>")
_NAME = re.compile(r"\s*([^\s<>]+)\s*(?=<|$)")
_STYLE = TagStyle(
    key=re.compile(r"\s*<arg_key>([^<>]*)</arg_key>\s*<arg_value>"),
    next_key="<arg_key>",
    close="</arg_value>",
    end=re.compile(r"\s*</tool_call>"),
    expected="<arg_key>KEY</arg_key><arg_value>VALUE</arg_value> or </tool_call>",
)


@tool_parsers.register("glm", stop_tokens=("<|observation|>", "<|user|>"), values="text")
def parse_glm(text: str) -> Parsed:
    """Calls in the format of GLM; the values are the strings as written.

    Example:
        >>> argument = "<arg_key>x</arg_key>\\n<arg_value>12</arg_value>"
        >>> parse_glm(f"<tool_call>f\\n{argument}\\n</tool_call>").calls[0].arguments
        {'x': '12'}
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    if mark.group() == "</tool_call>":
        return Piece(end=mark.end(), attempts=(STRAY_CLOSE,))
    name = _NAME.match(text, mark.end())
    if name is None:
        return piece_of(text, "one name must follow <tool_call>", mark.end())
    return piece_of(text, *read_arguments(text, name.end(), name.group(1), _STYLE))
