"""Addresses of rows that nobody has to download first: what each may say.

`check` reads an address here, and so does whoever makes its rows: what one refuses, both do, in the
same words.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

from luyen.base.suggest import did_you_mean
from luyen.config.arithmetic_task import (
    DEFAULT_SIZE,
    MOST_TRACES,
    QUESTION_KEYS,
    SPLITS,
    Asked,
    read_arithmetic,
    read_asked,
    require_rows,
)
from luyen.config.task_url import TaskUrl, parse_task_url

TOOL_TASKS = ("calculator", "orders", "both")
HUB_KEYS = ("split", "config", "revision")
_GYM_SIZE = 1000
_MOST_TASKS = 10_000_000
_SEEDS = 2**63 - 1


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolTask:
    """Which rows an address of `tools://` asks for.

    Example:
        >>> read_tool_task(parse_task_url("tools://orders?size=8")).asked.size
        8
    """

    asked: Asked
    """The questions."""
    traces: int
    """Conversations to learn from for each question; 0: the questions alone."""
    calls: float
    """Share of turns at which the assistant calls the right tool."""
    bare: float = 0.0
    """Share of conversations without tools."""
    order_calls: float = 1.0
    """`both`: the share for orders."""


def require_task(address: str) -> None:
    """A UserError where the rows of an address could not be made; its scheme is known.

    Example:
        >>> from luyen.base.errors import UserError
        >>> try:
        ...     require_task("arithmetic://sum?digits=3&size=0")
        ... except UserError as error:
        ...     error.why
        '`size=0` is no whole number from 1 to 218968'
    """
    url = parse_task_url(address)
    _READERS[url.scheme](url)


def read_tool_task(url: TaskUrl) -> ToolTask:
    """What the address says; a UserError where it makes no sense."""
    if url.name not in TOOL_TASKS:
        raise url.error(f"no task `{url.name}`", did_you_mean(url.name, TOOL_TASKS))
    return {"calculator": _calculator, "orders": _orders, "both": _both}[url.name](url)


def _calculator(url: TaskUrl) -> ToolTask:
    url.refuse_unknown((*QUESTION_KEYS, "traces", "calls", "bare"))
    traces = url.integer("traces", 0, least=0, most=MOST_TRACES)
    asked = read_asked(url, digits=3, is_exact=True, factor=max(traces, 1))
    calls, bare = url.share("calls", 1.0), url.share("bare", 0.0)
    return ToolTask(asked=asked, traces=traces, calls=calls, bare=bare)


def _orders(url: TaskUrl) -> ToolTask:
    url.refuse_unknown(("seed", "size", "split", "traces", "calls"))
    traces = url.integer("traces", 0, least=0, most=MOST_TRACES)
    split = url.choice("split", "train", SPLITS)
    size = url.integer("size", DEFAULT_SIZE[split], least=1, most=1_000_000)
    require_rows(url, size, max(traces, 1))
    return ToolTask(asked=_plainly(url, split, size), traces=traces, calls=url.share("calls", 1.0))


def _both(url: TaskUrl) -> ToolTask:
    url.refuse_unknown(("seed", "size", "split", "calls", "bare", "order_calls"))
    size = url.integer("size", 1024, least=1, most=100_000)
    split = url.choice("split", "train", SPLITS)
    return ToolTask(
        asked=_plainly(url, split, size),
        traces=1,
        calls=url.share("calls", 1.0),
        bare=url.share("bare", 0.0),
        order_calls=url.share("order_calls", 1.0),
    )


def _plainly(url: TaskUrl, split: str, size: int) -> Asked:
    """Questions without operands."""
    seed = url.integer("seed", 0, least=0, most=_SEEDS)
    return Asked(digits=0, least=0, seed=seed, split=split, size=size)


def read_gym(url: TaskUrl) -> tuple[int, int]:
    """Size and seed; the task's own keys are known only where its package is."""
    if not url.name:
        raise url.error("no task is named", "write reasoning_gym://TASK")
    size = url.integer("size", _GYM_SIZE, least=1, most=_MOST_TASKS)
    return size, url.integer("seed", 0, least=0, most=_SEEDS)


def read_hub(url: TaskUrl) -> Mapping[str, str]:
    """Split, config and revision, where they are given."""
    url.refuse_unknown(HUB_KEYS)
    if not url.name:
        raise url.error("no dataset is named", "write hf://OWNER/NAME")
    return url.query


_READERS: dict[str, Callable[[TaskUrl], Any]] = {
    "arithmetic": read_arithmetic,
    "tools": read_tool_task,
    "reasoning_gym": read_gym,
    "hf": read_hub,
}
"""Scheme -> who reads its addresses."""
