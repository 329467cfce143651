"""Ctrl-C and SIGTERM end a run after the step in progress, with a checkpoint."""

import signal
import sys
import threading
from types import FrameType
from typing import Any, Self, final


@final
class Interruption:
    """While entered, the first signal asks for an end and the second one means it."""

    def __init__(self) -> None:
        self.is_wanted = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        # Only the main thread may install handlers; elsewhere the signals keep their meaning.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._ask)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def _ask(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a handler's form
        if self.is_wanted:
            self.__exit__()
            sys.stderr.write("\nstopped at once; steps after the newest checkpoint are lost\n")
            raise KeyboardInterrupt
        self.is_wanted = True
        sys.stderr.write("\nending after this step with a checkpoint; once more to stop at once\n")
