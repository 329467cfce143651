"""A tool of our own: the price list of the shop in `tools://orders`."""

from luyen.data.tool_tasks import price_of
from luyen.rollout.tools.python_tools import tool


@tool
async def lookup(item: str) -> str:
    """Price of an item."""
    return str(price_of(item))
