"""Replies out of what ordinary Python code returns."""

from typing import Any

from luyen.rollout.tools.protocol import ToolReply
from luyen.rollout.tools.text import as_text


def reply_of(returned: Any) -> ToolReply:
    """What a function returned, as a reply: a reply itself, or anything that has a text.

    Example:
        >>> reply_of([1, 2]).text
        '[1, 2]'
    """
    if isinstance(returned, ToolReply):
        return returned
    return ToolReply(text=as_text(returned))
