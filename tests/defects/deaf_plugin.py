"""A format of tool calls that never finds one."""

from luyen.rollout.parsers.protocol import ParsedTurn, tool_parsers


@tool_parsers.register("deaf", stop_tokens=(), values="json")
def deaf(text: str) -> ParsedTurn:
    """Takes every text as an answer."""
    return ParsedTurn(content=text, calls=())
