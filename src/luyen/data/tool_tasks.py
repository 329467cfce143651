"""Tasks that a policy solves by calling tools: `tools://calculator` and `tools://orders`."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import count, islice
from typing import Any

from luyen.base.seeds import derive_key, mix, uniform
from luyen.config.task_urls import TaskUrl, is_held_out, read_tool_task
from luyen.data.arithmetic_tasks import questions

# Synthetic messages with tools: calls with their results, and wrong guesses without a call.


def schema(name: str, description: str, parameter: str) -> dict[str, Any]:
    """The schema of a tool that takes one text.

    Example:
        >>> schema("lookup", "Find a price.", "item")["function"]["parameters"]["required"]
        ['item']
    """
    parameters = {
        "type": "object",
        "properties": {parameter: {"type": "string"}},
        "required": [parameter],
    }
    function = {"name": name, "description": description, "parameters": parameters}
    return {"type": "function", "function": function}


CALCULATOR = schema("calculator", "Evaluate arithmetic.", "expression")
"""Schema of the built-in calculator."""


def user_message(text: str) -> dict[str, Any]:
    """What the user says."""
    return {"role": "user", "content": text}


def tool_exchange(tool: Mapping[str, Any], argument: str, result: str) -> list[dict[str, Any]]:
    """A call of a tool that takes one text, what it gives, and the assistant saying that.

    Example:
        >>> [message["role"] for message in tool_exchange(CALCULATOR, "6*7", "42")]
        ['assistant', 'tool', 'assistant']
    """
    function: Mapping[str, Any] = tool["function"]
    (parameter,) = function["parameters"]["required"]
    call = {"name": function["name"], "arguments": {parameter: argument}}
    return [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"type": "function", "function": call}],
        },
        {"role": "tool", "content": result},
        assistant_answer(result),
    ]


def assistant_answer(text: str) -> dict[str, Any]:
    """What the assistant says."""
    return {"role": "assistant", "content": text}


def wrong_guess(truth: str, key: int) -> str:
    """Another number with as many digits.

    Example:
        >>> guess = wrong_guess("42", 1)
        >>> len(guess), guess == "42"
        (2, False)
    """
    if len(truth) == 1:
        return str((int(truth) + 1 + mix(key, 0) % 9) % 10)
    low = 10 ** (len(truth) - 1)
    shift = 1 + mix(key, 0) % (9 * low - 1)
    return str(low + (int(truth) - low + shift) % (9 * low))


def choices(key: int, calls: float, *address: int) -> Iterator[tuple[bool, int]]:
    """For one turn after the other: whether a tool is called, and a key for what is said instead.

    A share of `calls` of the turns call.
    """
    turn = 0
    while True:
        own = derive_key(key, "turn", *address, turn)
        yield uniform(own, 0) < calls, own
        turn += 1


# `tools://orders`: the user asks for a price, then for a total, then adds the postage.
#
# Prices are made from the item's number, so that no list of them has to be kept, and no policy
# can know them without looking.

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
    split, size = task.questions.split, task.questions.size
    key = derive_key(task.questions.seed, f"orders/{split}")
    rows = [_row(split, i, *order) for i, order in enumerate(islice(_orders(split, key), size))]
    if not task.traces:
        return rows
    return [_order_trace(row, t, key, task.calls) for row in rows for t in range(task.traces)]


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
        "prompt": [user_message(f"Price of {item}?")],
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


def _order_trace(row: dict[str, Any], trace: int, key: int, calls: float) -> dict[str, Any]:
    """The row as a conversation, in which each answer builds on the one before."""
    info = row["extra_info"]
    item, pieces, postage = info["order"]
    turns = choices(key, calls, info["index"], trace)
    messages = [*row["prompt"], *_exchange(LOOKUP, item, str(price_of(item)), next(turns))]
    for says, operation in zip(info["follow_ups"], (f"*{pieces}", f"+{postage}"), strict=True):
        before = str(messages[-1]["content"])
        result = int(before) * pieces if operation[0] == "*" else int(before) + postage
        messages.append(user_message(says))
        messages += _exchange(CALCULATOR, f"{before}{operation}", str(result), next(turns))
    return {
        "data_source": row["data_source"],
        "messages": messages,
        "tools": [LOOKUP, CALCULATOR],
        "extra_info": {**info, "trace": trace},
    }


def _exchange(
    tool: dict[str, Any], argument: str, result: str, choice: tuple[bool, int]
) -> list[dict[str, Any]]:
    does_call, key = choice
    return (
        tool_exchange(tool, argument, result)
        if does_call
        else [assistant_answer(wrong_guess(result, key))]
    )


def tool_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `tools://TASK?...`."""
    read_tool_task(url)
    return TASKS[url.name](url)


def calculator_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `tools://calculator?digits=3&seed=0&size=4096&split=train`: products to work out.

    Operands have exactly `digits` digits, and those held out are those of `arithmetic://`. The rows
    offer no tool: that is the run's to do.

    With `traces=N`, rows are conversations to learn from, N for each pair. In a share of `calls` of
    those that offer a calculator, the assistant calls it and repeats the result; in the rest it
    guesses, wrongly. A share of `bare` offers no calculator and guesses.
    """
    task = read_tool_task(url)
    question_rows, key = questions(task.questions, "product")
    rows = [{**row, "data_source": "tools/calculator"} for row in question_rows]
    if not task.traces:
        return rows
    return [_trace(row, t, key, task.calls, task.bare) for row in rows for t in range(task.traces)]


def both_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Conversations of `tools://both?size=N&seed=0&split=train`: a question, two orders, and so on.

    `calls` and `bare` are those of the calculator, `order_calls` is the `calls` of orders. A batch
    of such rows always holds both tasks, which are learned together far sooner than in turn.
    """
    task = read_tool_task(url)
    size = task.questions.size
    common = {key: url.query[key] for key in ("seed", "split") if key in url.query}
    own = {key: url.query[key] for key in ("calls", "bare") if key in url.query}
    order_calls = str(task.order_calls)
    question = {**common, **own, "traces": "1", "size": str(size)}
    order = {**common, "calls": order_calls, "traces": "1", "size": str(2 * size)}
    calculated = calculator_rows(replace(url, name="calculator", query=question))
    ordered = order_rows(replace(url, name="orders", query=order))
    return [row for i in range(size) for row in (calculated[i], *ordered[2 * i : 2 * i + 2])]


TASKS: dict[str, Callable[[TaskUrl], list[dict[str, Any]]]] = {
    "calculator": calculator_rows,
    "orders": order_rows,
    "both": both_rows,
}
"""Name -> the function that makes the rows."""


def _trace(row: dict[str, Any], trace: int, key: int, calls: float, bare: float) -> dict[str, Any]:
    """The row as a conversation."""
    (question,) = row["prompt"]
    truth: str = row["reward_model"]["ground_truth"]
    index: int = row["extra_info"]["index"]
    is_bare = uniform(derive_key(key, "bare", index, trace), 0) < bare
    does_call, own = next(choices(key, 0.0 if is_bare else calls, index, trace))
    expression = question["content"].removesuffix("=")
    messages = (
        tool_exchange(CALCULATOR, expression, truth)
        if does_call
        else [assistant_answer(wrong_guess(truth, own))]
    )
    return {
        "data_source": row["data_source"],
        "messages": [question, *messages],
        "tools": [] if is_bare else [CALCULATOR],
        "extra_info": {**row["extra_info"], "trace": trace},
    }
