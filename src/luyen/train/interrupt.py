"""Ctrl-C, SIGTERM and SIGHUP: a run ends soon, with a checkpoint of what is done.

During generation, scoring and validation a signal abandons the step: no weight has changed yet, and
finished work is in the journal. An update runs to its end. Before the run begins there is nothing
to save, and a signal ends the command at once.
"""

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, Self, TypeAlias, final

from luyen.base.system import signals
from luyen.telemetry.output import say_from_handler
from luyen.telemetry.summary import interrupted_code

Handler: TypeAlias = Callable[[int, FrameType | None], None]
SIGNALS = signals("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that end a run. SIGHUP is sent when a terminal closes; `nohup` ignores it."""


@final
class Stopped(KeyboardInterrupt):
    """A signal ends the command at once.

    Example:
        >>> Stopped(15).exit_code, str(Stopped(15))
        (143, 'SIGTERM')
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.exit_code = interrupted_code(number)


_SOON_S = 0.05
"""Until a signal is sent again, so that the code that ignored it has ended."""
STOPPABLE = ("generate", "score", "validate")
"""Phases that a signal ends at once: no weight changes in them."""


@final
class Interrupted(KeyboardInterrupt):
    """A signal ends the phase in progress; the last finished step is saved."""


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Inside, a signal raises `Stopped`, unless an `Interruption` is entered.

    Python ignores what a `__del__` raises, and a signal may come while one runs: then it is sent
    once more.
    """

    def stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - a handler's form
        raise Stopped(number)

    def send_again(ignored: Any) -> None:
        if isinstance(ignored.exc_value, Stopped):
            again = (threading.main_thread().ident, ignored.exc_value.number)
            threading.Timer(_SOON_S, signal.pthread_kill, again).start()
        else:
            hook(ignored)

    hook, sys.unraisablehook = sys.unraisablehook, send_again
    before = _handled_by(stop)
    try:
        yield
    finally:
        _restore(before)
        sys.unraisablehook = hook


@final
class Interruption:
    """While entered, the first signal requests an end and the second stops at once."""

    def __init__(self) -> None:
        self.is_wanted = False
        self.number: int | None = None
        """The first signal; None: none came."""
        self._before: dict[int, Any] = {}
        self._is_stoppable = False

    def stop_if_wanted(self) -> None:
        """Raises `Interrupted` where a signal has come."""
        if self.is_wanted:
            raise Interrupted

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Inside, the first signal raises `Interrupted` wherever the main thread is."""
        before, self._is_stoppable = self._is_stoppable, True
        try:
            self.stop_if_wanted()
            yield
        finally:
            self._is_stoppable = before

    def __enter__(self) -> Self:
        self._before = _handled_by(self._on_signal)
        return self

    def __exit__(self, *_: object) -> None:
        before, self._before = self._before, {}
        _restore(before)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's form
        if self.is_wanted:
            self.__exit__()
            say_from_handler("stopped at once; steps after the newest checkpoint are lost")
            raise Stopped(number)
        self.is_wanted, self.number = True, number
        if self._is_stoppable:
            say_from_handler("ending; what is done is saved; once more to stop at once")
            raise Interrupted
        say_from_handler("ending after this step with a checkpoint; once more to stop at once")


def _handled_by(handler: Handler) -> dict[int, Any]:
    """Install a handler for the signals; returns the previous handlers.

    Does nothing outside the main thread. A SIGHUP that the parent process ignored stays ignored.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    wanted = [n for n in SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in wanted}


def _restore(handlers: dict[int, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
