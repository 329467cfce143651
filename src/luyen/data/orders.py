"""Orders in a shop: a user who asks for a price, then for a total, then adds the postage.

Prices are made from the item's number, so that no list of them has to be kept, and no policy can
know them without looking.
"""

from collections.abc import Iterator
from itertools import count, islice
from typing import Any

from luyen.base.seeds import derive_key, mix
from luyen.config.arithmetic_task import is_held_out
from luyen.config.task_sources import read_tool_task
from luyen.config.task_url import TaskUrl
from luyen.data.tool_talk import CALCULATOR, answered, asked, called, choices, schema, wrong_guess

LOOKUP = schema("lookup", "Price of an item.", "item")
"""Schema of the tool that knows the prices."""
_ITEMS = range(1000, 10000)


def price_of(item: str) -> int:
    """The price of an item, from 100 to 999: always the same for the same item.

    Example:
        >>> 100 <= price_of("4821") <= 999
        True
    """
    return 100 + derive_key(0, "orders/price", item) % 900


def order_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `tools://orders?seed=0&size=4096&split=train`.

    A row asks the price of an item; what the user says afterwards stands in
    `extra_info.follow_ups`, and the ground truth is the answer to the last of it. Whether an item
    is held out depends on the item alone.

    With `traces=N`, rows are conversations to learn from, N for each order. At each turn of the
    user the assistant calls the right tool with probability `calls`, and otherwise guesses; a guess
    is what later turns go on from.
    """
    task = read_tool_task(url)
    split, size = task.asked.split, task.asked.size
    key = derive_key(task.asked.seed, f"orders/{split}")
    rows = [_row(split, i, *order) for i, order in enumerate(islice(_orders(split, key), size))]
    if not task.traces:
        return rows
    return [_trace(row, t, key, task.calls) for row in rows for t in range(task.traces)]


def _orders(split: str, key: int) -> Iterator[tuple[str, int, int]]:
    """Item, number of pieces and postage, without end."""
    for position in count():
        own = mix(key, position)
        item = _ITEMS[own % len(_ITEMS)]
        # A pair of equal operands stands for the item, so that one rule says what is held out.
        if is_held_out(item, item) == (split == "held-out"):
            yield str(item), 11 + mix(own, 0) % 89, 11 + mix(own, 1) % 89


def _row(split: str, index: int, item: str, pieces: int, postage: int) -> dict[str, Any]:
    return {
        "data_source": "tools/orders",
        "prompt": [asked(f"Price of {item}?")],
        "reward_model": {
            "style": "rule",
            "ground_truth": str(price_of(item) * pieces + postage),
        },
        "extra_info": {
            "split": split,
            "index": index,
            "follow_ups": [f"Total of {pieces}?", f"Plus {postage}?"],
            "order": [item, pieces, postage],
        },
    }


def _trace(row: dict[str, Any], trace: int, key: int, calls: float) -> dict[str, Any]:
    """The row as a conversation, in which each answer builds on the one before."""
    info = row["extra_info"]
    item, pieces, postage = info["order"]
    turns = choices(key, calls, info["index"], trace)
    told = [*row["prompt"], *_told(LOOKUP, item, str(price_of(item)), next(turns))]
    for says, operation in zip(info["follow_ups"], (f"*{pieces}", f"+{postage}"), strict=True):
        before = str(told[-1]["content"])
        result = int(before) * pieces if operation[0] == "*" else int(before) + postage
        told.append(asked(says))
        told += _told(CALCULATOR, f"{before}{operation}", str(result), next(turns))
    return {
        "data_source": row["data_source"],
        "messages": told,
        "tools": [LOOKUP, CALCULATOR],
        "extra_info": {**info, "trace": trace},
    }


def _told(
    tool: dict[str, Any], argument: str, result: str, choice: tuple[bool, int]
) -> list[dict[str, Any]]:
    does_call, key = choice
    return called(tool, argument, result) if does_call else [answered(wrong_guess(result, key))]
