"""User code imported and called: its exceptions and its time limits stay with one rollout."""

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from traceback import extract_tb
from types import ModuleType
from typing import Any, final

from luyen.base.boundary import boundary, plain_text, raised_by
from luyen.base.errors import UserError, did_you_mean
from luyen.base.heartbeat import beat
from luyen.base.input_files import expanded
from luyen.sandbox.worker import module_of

_SHOWN = 300
_GRACE_S = 1.0
"""Most seconds for a cancelled coroutine to end; then it is abandoned."""
_left: set[asyncio.Task[Any]] = set()
"""Tasks that did not end when cancelled; asyncio itself would forget them while they run."""


@final
class InvalidArguments(Exception):
    """The policy passed arguments that do not fit; the message is what it reads."""


@final
class ToolError(Exception):
    """A call that the tool, though it works, cannot carry out; the policy reads the message.

    It is never tried again and never a fault of the rollout: a division by zero, a missing page.
    """


@final
class ToolFault(Exception):
    """A tool is broken, and the run is configured to fail the rollout."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallOutcome:
    """Outcome of a call of user code.

    Example:
        >>> async def answer() -> int:
        ...     return 42
        >>> asyncio.run(attempt(answer(), seconds=1.0)).value
        42
    """

    value: Any = None
    """What it returned, if it did."""
    fault: BaseException | None = None
    """What it raised."""
    is_late: bool = False
    """Whether it was cut off when its time was up."""
    seconds: float = 0.0
    """How long it ran."""


async def attempt(coroutine: Coroutine[Any, Any, Any], *, seconds: float | None) -> CallOutcome:
    """Run a coroutine for at most so long; only a cancellation from outside is raised."""
    faults: list[BaseException] = []

    async def guarded() -> Any:
        with boundary(faults):
            return await coroutine

    start = perf_counter()
    task = asyncio.create_task(guarded())
    is_late = True
    try:
        await asyncio.wait({task}, timeout=seconds)
        is_late = not task.done()
    finally:
        await _end(task)
    passed = perf_counter() - start
    beat()
    if is_late:
        return CallOutcome(is_late=True, seconds=passed)
    if task.cancelled():
        # Raised again as it is, it would pass for a cancellation from outside.
        faults.append(RuntimeError("it cancelled itself"))
    if faults:
        return CallOutcome(fault=faults[0], seconds=passed)
    return CallOutcome(value=task.result(), seconds=passed)


async def _end(task: asyncio.Task[Any]) -> None:
    """Cancel a task and wait a moment for it; one that will not end is left alone."""
    if task.done():
        return
    _left.add(task)
    task.add_done_callback(_left.discard)
    task.cancel()
    await asyncio.wait({task}, timeout=_GRACE_S)


def line_of(fault: BaseException) -> str:
    """An exception as one short line."""
    fault = raised_by(fault)
    said: list[str] = []
    with boundary([]):  # its own __str__ may raise
        said.append(plain_text(str(fault)))
    text = one_line(said[0] if said else "")
    if isinstance(fault, InvalidArguments | ToolError):
        return text
    return one_line(f"{type(fault).__name__}: {text}" if text else type(fault).__name__)


def place_of(fault: BaseException) -> str:
    """Where an exception was raised, as `file.py:12`; empty when nothing is known."""
    frames = extract_tb(raised_by(fault).__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else ""


def one_line(text: str) -> str:
    """The text without line breaks, cut to what a message can hold.

    Example:
        >>> one_line("no such file:\\n   a.txt")
        'no such file: a.txt'
    """
    line = " ".join(text[: 4 * _SHOWN].split())
    return line if len(line) <= _SHOWN else f"{line[:_SHOWN]}..."


# Import of user modules and names; errors say where they were raised.


def load_user_module(place: str, field: str) -> ModuleType:
    """A module by its dotted name, or by the path of its file; a UserError when that fails.

    Example:
        >>> load_user_module("json", "demo").__name__
        'json'
    """
    faults: list[BaseException] = []
    with boundary(faults):
        return module_of(str(expanded(place).resolve()) if place.endswith(".py") else place)
    fault = faults[0]
    if isinstance(fault, ModuleNotFoundError) and str(fault.name).partition(".")[0] == "verl":
        why = f"it imports `{fault.name}`, and verl is not installed"
        fix = "drop the import and the base class, which is not needed here, or install verl"
        raise UserError(field, place, why, fix) from fault
    why = f"importing it failed: {line_of(fault)} ({place_of(fault)})"
    raise UserError(field, place, why, "fix the name or the file") from fault


def load_user_name(target: str, field: str) -> Any:
    """What `FILE.py:NAME` or `PACKAGE.MODULE.NAME` stands for.

    Example:
        >>> load_user_name("json.JSONDecoder", "demo").__name__
        'JSONDecoder'
    """
    place, _, name = target.rpartition(":" if ".py:" in target else ".")
    if not place:
        raise UserError(field, target, "it names no module", "write PACKAGE.MODULE.NAME")
    members = vars(load_user_module(place, field))
    if name not in members:
        raise UserError(field, target, f"{place} has no `{name}`", did_you_mean(name, members))
    return members[name]
