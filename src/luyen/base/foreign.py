"""Code of others: what it raises is a fault, whatever its class, and what it is given is a copy."""

import asyncio
import copy
import dis
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from types import MappingProxyType
from typing import Any, TypeVar, cast, final

T = TypeVar("T")
_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None)})
"""Types whose values nobody can change."""
_MANY: tuple[type[Any], ...] = (list, tuple, set, frozenset)
_SIGNALLED = ("luyen.", "asyncio.")
"""Modules that raise a KeyboardInterrupt or GeneratorExit only because they were told to end."""


@final
class ForeignExit(Exception):
    """Foreign code raised what would have ended more than itself, such as SystemExit.

    Example:
        >>> ForeignExit(SystemExit(0)).raised
        SystemExit(0)
    """

    def __init__(self, raised: BaseException) -> None:
        super().__init__(raised)
        self.raised = raised


@contextmanager
def boundary(faults: list[BaseException]) -> Generator[None]:
    """Put whatever foreign code raises into `faults`.

    What is no `Exception` (SystemExit, a KeyboardInterrupt or CancelledError of its own) is put
    there as a ForeignExit, which can be raised again without ending an event loop. Three things
    pass, because foreign code did not do them: an interrupt of the user, the cancellation of the
    task that runs here, and the end of a coroutine that nobody awaits any more.

    Example:
        >>> faults = []
        >>> with boundary(faults):
        ...     raise SystemExit(0)
        >>> faults
        [ForeignExit(SystemExit(0))]
    """
    try:
        yield
    except BaseException as fault:
        interrupt = _interrupt_behind(fault)
        if interrupt is not None and interrupt is not fault:
            raise interrupt from fault
        if interrupt is not None or _is_end(fault):
            raise
        faults.append(fault if isinstance(fault, Exception) else ForeignExit(fault))


def _interrupt_behind(fault: BaseException) -> BaseException | None:
    """The interrupt of the user that foreign code was ended by, whatever it made of it."""
    seen: list[BaseException] = []
    here: BaseException | None = fault
    while here is not None and all(here is not one for one in seen):
        if isinstance(here, KeyboardInterrupt) and not _was_raised(here):
            return here
        seen.append(here)
        here = here.__context__
    return None


def _is_end(fault: BaseException) -> bool:
    """Whether somebody outside has ended the task or the coroutine that runs here."""
    if isinstance(fault, asyncio.CancelledError):
        return _is_being_cancelled()
    return isinstance(fault, GeneratorExit) and not _was_raised(fault)


def _is_being_cancelled() -> bool:
    """Whether somebody has asked the task that runs here to end."""
    try:
        task = asyncio.current_task()
    except RuntimeError:  # no event loop runs on this thread
        return False
    return task is not None and task.cancelling() > 0


def _was_raised(fault: BaseException) -> bool:
    """Whether a `raise` of foreign code raised it; a signal arrives between two instructions."""
    last = fault.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    instruction = dis.opname[last.tb_frame.f_code.co_code[last.tb_lasti]]
    module = str(last.tb_frame.f_globals.get("__name__"))
    return instruction == "RAISE_VARARGS" and not module.startswith(_SIGNALLED)


def own_copy(value: T) -> T:
    """A copy for foreign code: whatever it does to it, however deep, changes nothing of ours.

    What cannot be changed is not copied. Mappings that are read-only become dicts.

    Example:
        >>> row = {"tests": [{"input": 1}], "tokens": (1, 2)}
        >>> given = own_copy(row)
        >>> given["tests"][0]["input"] = 2
        >>> row["tests"], given["tokens"] is row["tokens"]
        ([{'input': 1}], True)
    """
    return cast(T, _copied(value, {}))


def _copied(value: Any, memo: dict[int, Any]) -> Any:
    if type(value) in _PLAIN or isinstance(value, Enum):
        return value
    if id(value) not in memo:
        # The value, too: its number must not become another's meanwhile.
        memo[id(value)] = _made(value, memo), value
    return memo[id(value)][0]


def _made(value: Any, memo: dict[int, Any]) -> Any:
    kind = cast(Any, type(value))
    if kind in _MANY:
        is_plain = set(map(type, value)) <= _PLAIN  # tokens by the thousand
        if is_plain and kind in (tuple, frozenset):
            return value
        return kind(value if is_plain else [_copied(item, memo) for item in value])
    if kind in (dict, MappingProxyType):
        pairs = cast(Mapping[Any, Any], value).items()
        return {_copied(key, memo): _copied(item, memo) for key, item in pairs}
    if is_dataclass(kind) and kind.__module__.startswith("luyen."):
        held = {field.name: getattr(value, field.name) for field in fields(kind) if field.init}
        given = {name: _copied(item, memo) for name, item in held.items()}
        is_same = all(given[name] is held[name] for name in held)
        return value if is_same else replace(value, **given)
    try:
        return copy.deepcopy(value)
    except (TypeError, copy.Error):  # a lock, a connection: no data of ours
        return value
