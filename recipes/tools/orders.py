"""A tool of our own: the price list of the shop in `tools://orders`."""

from luyen.data.orders import price_of
from luyen.rollout.tools.function import tool


@tool
async def lookup(item: str) -> str:
    """Price of an item."""
    return str(price_of(item))
