"""Qwen 3 Coder and Qwen 3.5: one tag for the function and one for each parameter.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    VALUE
    </parameter>
    </function>
    </tool_call>

Values are strings; see `luyen.rollout.parsers.tagged_values`.
"""

import re

from luyen.rollout.parsers.protocol import Parsed, tool_parsers
from luyen.rollout.parsers.scan import Piece, marks, scan
from luyen.rollout.parsers.tagged_values import STRAY_CLOSE, TagStyle, piece_of, read_arguments

_MARKS = marks(r"</?tool_call>|<function=")
_FUNCTION = re.compile(r"\s*<function=\s*([^\s<>]+)\s*>")
_STYLE = TagStyle(
    key=re.compile(r"\s*<parameter=([^<>\n]*)>"),
    next_key="<parameter=",
    close="</parameter>",
    end=re.compile(r"\s*</function>\s*</tool_call>"),
    expected="<parameter=KEY> or </function></tool_call>",
    own_lines=True,
)


@tool_parsers.register("qwen3_coder", stop_tokens=(), values="text")
def parse_qwen3_coder(text: str) -> Parsed:
    """Calls in the format of Qwen 3 Coder; the values are the strings as written.

    Example:
        >>> call = "<function=f>\\n<parameter=x>\\n12\\n</parameter>\\n</function>"
        >>> parse_qwen3_coder(f"<tool_call>\\n{call}\\n</tool_call>").calls[0].arguments
        {'x': '12'}
    """
    return scan(text, _MARKS, _read)


def _read(text: str, mark: re.Match[str]) -> Piece:
    if mark.group() == "</tool_call>":
        return Piece(end=mark.end(), attempts=(STRAY_CLOSE,))
    if mark.group() == "<function=":
        return piece_of(text, "<function=NAME> must stand inside of <tool_call>", mark.end())
    function = _FUNCTION.match(text, mark.end())
    if function is None:
        return piece_of(text, "<function=NAME> must follow <tool_call>", mark.end())
    return piece_of(text, *read_arguments(text, function.end(), function.group(1), _STYLE))
