"""A calculator that is broken."""

from luyen.rollout.tools import ToolError, tool


@tool
def calculator(expression: str) -> str:
    """Evaluate an expression."""
    raise ToolError("not today")
