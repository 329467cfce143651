"""The boundary around user code: what it raises is a fault, its threads cannot block an exit."""

import asyncio
import copy
import dis
import re
import threading
from collections.abc import Callable, Coroutine, Generator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from traceback import extract_tb
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar, cast, final

from luyen.base.errors import UserError
from luyen.base.secrets import masked

T = TypeVar("T")
_PLAIN = frozenset({str, int, float, bool, bytes, complex, type(None)})
"""Immutable types."""
_MANY: tuple[type[Any], ...] = (list, tuple, set, frozenset)
_SIGNALLED = ("luyen.", "asyncio.")
"""Modules that raise a KeyboardInterrupt or GeneratorExit only on an external request to end."""


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
    task that runs here, and the end of a coroutine that is no longer awaited.

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
    """Whether the current task or coroutine was ended from outside."""
    if isinstance(fault, asyncio.CancelledError):
        return _is_being_cancelled()
    return isinstance(fault, GeneratorExit) and not _was_raised(fault)


def _is_being_cancelled() -> bool:
    """Whether cancellation of the current task was requested."""
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
        # Keep the value too: its id must not be reused while `memo` lives.
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
        members = {field.name: getattr(value, field.name) for field in fields(kind) if field.init}
        given = {name: _copied(item, memo) for name, item in members.items()}
        is_same = all(given[name] is members[name] for name in members)
        return value if is_same else replace(value, **given)
    try:
        return copy.deepcopy(value)
    except (TypeError, copy.Error):  # a lock, a connection: no data of ours
        return value


# Exceptions of foreign code, in one line.

_SHOWN = 200
_FOLDERS = re.compile(r"(?:/[^/\s'\"]+){2,}(?=/)")
"""Folders of a path; its last name says what is meant."""


def raised_by(fault: BaseException) -> BaseException:
    """What foreign code raised, without the exception that it may travel in.

    Example:
        >>> raised_by(ForeignExit(SystemExit(0)))
        SystemExit(0)
    """
    return fault.raised if isinstance(fault, ForeignExit) else fault


def last_line(fault: BaseException) -> str:
    """The last line of a traceback, with the place it points at; any file can hold it.

    Half of a surrogate pair, as in a file name that is no UTF-8, becomes a question mark. A line
    that is too long loses the folders of its paths first, and then its end.

    Example:
        >>> last_line(ValueError("no such key"))
        'ValueError: no such key'
        >>> last_line(OSError("\\udcff is missing"))
        'OSError: ? is missing'
        >>> last_line(OSError(f"/home{'/folder' * 40}/file.txt is missing"))
        'OSError: .../file.txt is missing'
        >>> last_line(ForeignExit(SystemExit(0)))
        'SystemExit: 0'
    """
    fault = raised_by(fault)
    said = "it cannot be printed"
    with boundary([]):  # its own __str__ may raise
        said = plain_text(str(fault))
    text = f"{type(fault).__name__}: {said}" if said else type(fault).__name__
    text = masked(text.partition("\n")[0])
    text = text if len(text) <= _SHOWN else _FOLDERS.sub("...", text)
    frames = extract_tb(fault.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return text[:_SHOWN] + where


def plain_text(text: str) -> str:
    """The text as an ordinary string that any file can hold.

    A subclass of `str` may raise later, wherever it is compared or cut.

    Example:
        >>> plain_text("half a pair: \\ud800")
        'half a pair: ?'
    """
    return "".join([text]).encode(errors="replace").decode()


@contextmanager
def library_faults(what: str, *, field: str, path: str, fix: str) -> Generator[None]:
    """Turn whatever a library raises over the files of a model into a UserError.

    Files of strangers make it raise anything, panics of compiled code among it, which are no
    Exception.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise UserError(field, path, f"{what}: {_first_sentence(error)}", fix) from error


def _first_sentence(error: BaseException) -> str:
    """The first line of an error, joined with the next one if it ends in a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = " ".join(lines[: 2 if lines and lines[0].endswith(":") else 1]).rstrip(".")[:300]
    if isinstance(error, OSError | ValueError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


# Event loops for foreign code: one of its threads that hangs does not keep the process alive.

P = ParamSpec("P")
R = TypeVar("R")


@final
class DaemonThreads(ThreadPoolExecutor):
    """One daemon thread per call: neither the event loop nor the process joins it at the end.

    `asyncio.to_thread` uses the executor of its loop. Python's own waits for all its threads.

    Example:
        >>> DaemonThreads().submit(len, "abc").result()
        3
    """

    def submit(self, fn: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> "Future[R]":
        """Call the function on a thread of its own."""
        future: Future[R] = Future()

        def work() -> None:
            if not future.set_running_or_notify_cancel():
                return
            faults: list[BaseException] = []
            with boundary(faults):
                future.set_result(fn(*args, **kwargs))
            if faults:
                future.set_exception(faults[0])

        threading.Thread(target=work, name="loose", daemon=True).start()
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Nothing is waited for."""
        del wait, cancel_futures


def with_daemon_threads(loop: asyncio.AbstractEventLoop) -> asyncio.AbstractEventLoop:
    """The loop, which from now on waits for no thread of `asyncio.to_thread` when it closes."""
    loop.set_default_executor(DaemonThreads())
    return loop


@contextmanager
def aside_of_running_loop() -> Generator[None]:
    """Inside, event loops can be run although one runs on this thread: that of a notebook.

    The loop outside stands still anyway while the code of a cell runs.

    Example:
        >>> async def cell() -> int:
        ...     with aside_of_running_loop():
        ...         return asyncio.run(asyncio.sleep(0, 42))
        >>> asyncio.run(cell())
        42
    """
    outer = asyncio._get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(outer)
        if outer is not None:
            asyncio.set_event_loop(outer)


def run_with_daemon_threads(coroutine: Coroutine[Any, Any, R]) -> R:
    """`asyncio.run`, without waiting for threads or tasks that foreign code has left behind.

    Example:
        >>> async def answer() -> int:
        ...     return await asyncio.to_thread(lambda: 42)
        >>> run_with_daemon_threads(answer())
        42
    """
    with asyncio.Runner() as runner:
        with_daemon_threads(runner.get_loop())
        try:
            return runner.run(coroutine)
        except RuntimeError as error:
            if "Event loop stopped before Future completed" not in str(error):
                raise
            why = "code of a reward or plugin stopped the event loop that it ran in"
            raise UserError("event loop", "stop()", why, "do not stop it there") from error
        finally:
            end_tasks(runner)


_GRACE_S = 1.0
"""Most seconds for cancelled tasks to end; then they are abandoned."""
MOST_ABANDONED = 64
"""Tasks that may be abandoned in one process: each keeps its memory until the process ends."""
_abandoned: list[asyncio.Task[Any]] = []
"""Kept, so that no message about a pending task is printed when it is collected."""


def abandoned_count() -> int:
    """How many tasks of foreign code have not ended although they were cancelled."""
    _abandoned[:] = [task for task in _abandoned if not task.done()]
    return len(_abandoned)


def end_tasks(runner: asyncio.Runner) -> None:
    """Cancel the tasks of a loop that is about to close; those that go on are abandoned.

    A runner's own `close` waits for them without a limit.
    """
    loop = runner.get_loop()
    if loop.is_closed() or not asyncio.all_tasks(loop):
        return
    runner.run(_cancel_and_wait())
    # The documented way to take a task out of `all_tasks`, which `close` waits for.
    forget: Callable[[asyncio.Task[Any]], None] = vars(asyncio.tasks)["_unregister_task"]
    for task in asyncio.all_tasks(loop):
        forget(task)
        _abandoned.append(task)


async def _cancel_and_wait() -> None:
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks, timeout=_GRACE_S)
