"""Tasks that a policy solves by calling tools: `tools://calculator` and `tools://orders`."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from luyen.base.seeds import derive_key, uniform
from luyen.config.task_sources import read_tool_task
from luyen.config.task_url import TaskUrl
from luyen.data.arithmetic import questions
from luyen.data.orders import order_rows
from luyen.data.tool_talk import CALCULATOR, answered, called, choices, wrong_guess


def tool_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `tools://TASK?...`."""
    read_tool_task(url)
    return TASKS[url.name](url)


def calculator_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Rows of `tools://calculator?digits=3&seed=0&size=4096&split=train`: products to work out.

    Operands have exactly `digits` digits, and those held out are those of `arithmetic://`. The rows
    offer no tool: that is the run's to do.

    With `traces=N`, rows are conversations to learn from, N for each pair. In a share of `calls` of
    those that offer a calculator, the assistant calls it and says what it gave; in the others it
    guesses, wrongly. A share of `bare` offers no calculator and guesses.
    """
    task = read_tool_task(url)
    asked, key = questions(task.asked, "product")
    rows = [{**row, "data_source": "tools/calculator"} for row in asked]
    if not task.traces:
        return rows
    return [_trace(row, t, key, task.calls, task.bare) for row in rows for t in range(task.traces)]


def both_rows(url: TaskUrl) -> list[dict[str, Any]]:
    """Conversations of `tools://both?size=N&seed=0&split=train`: a question, two orders, and so on.

    `calls` and `bare` are those of the calculator, `order_calls` is the `calls` of orders. A batch
    of such rows always holds both tasks, which are learned together far sooner than in turn.
    """
    task = read_tool_task(url)
    size = task.asked.size
    common = {key: url.query[key] for key in ("seed", "split") if key in url.query}
    own = {key: url.query[key] for key in ("calls", "bare") if key in url.query}
    order_calls = str(task.order_calls)
    question = {**common, **own, "traces": "1", "size": str(size)}
    order = {**common, "calls": order_calls, "traces": "1", "size": str(2 * size)}
    asked = calculator_rows(replace(url, name="calculator", query=question))
    ordered = order_rows(replace(url, name="orders", query=order))
    return [row for i in range(size) for row in (asked[i], *ordered[2 * i : 2 * i + 2])]


TASKS: dict[str, Callable[[TaskUrl], list[dict[str, Any]]]] = {
    "calculator": calculator_rows,
    "orders": order_rows,
    "both": both_rows,
}
"""Name -> who makes the rows."""


def _trace(row: dict[str, Any], trace: int, key: int, calls: float, bare: float) -> dict[str, Any]:
    """The row as a conversation."""
    (question,) = row["prompt"]
    truth: str = row["reward_model"]["ground_truth"]
    index: int = row["extra_info"]["index"]
    is_bare = uniform(derive_key(key, "bare", index, trace), 0) < bare
    does_call, own = next(choices(key, 0.0 if is_bare else calls, index, trace))
    expression = question["content"].removesuffix("=")
    told = (
        called(CALCULATOR, expression, truth) if does_call else [answered(wrong_guess(truth, own))]
    )
    return {
        "data_source": row["data_source"],
        "messages": [question, *told],
        "tools": [] if is_bare else [CALCULATOR],
        "extra_info": {**row["extra_info"], "trace": trace},
    }
