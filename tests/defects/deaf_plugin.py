"""A format of tool calls that never finds one."""

from luyen.rollout.parsers.protocol import Parsed, tool_parsers


@tool_parsers.register("deaf", stop_tokens=(), values="json")
def deaf(text: str) -> Parsed:
    """Takes every text as an answer."""
    return Parsed(content=text, calls=())
