"""Writing to a stream whose reader may stand still, without standing still with it."""

import os
import queue
import threading
from typing import final

PATIENCE_S = 5.0
"""How long a reader may take; a terminal that is held with Ctrl-S, or a full pipe, never ends."""


@final
class Pump:
    """A thread that writes, and is left alone when that takes too long.

    One caller at a time. While a write is under way that nobody waits for, nothing is taken.

    Example:
        >>> ours, theirs = os.pipe()
        >>> Pump(theirs).write(b"a line"), os.read(ours, 9)
        (True, b'a line')
    """

    def __init__(self, number: int, *, patience_s: float = PATIENCE_S) -> None:
        self._number = number
        self._patience_s = patience_s
        self._todo: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._fault: OSError | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    def write(self, data: bytes) -> bool:
        """Whether the data was taken; an OSError where the stream refuses it."""
        self._begin()
        if not self._done.is_set():
            return False
        self._done.clear()
        self._todo.put(data)
        is_taken = self._done.wait(self._patience_s)
        fault, self._fault = (self._fault, None) if is_taken else (None, self._fault)
        if fault is not None:
            raise fault
        return is_taken

    def _begin(self) -> None:
        """Have a thread: a process that was forked has none of its parent's."""
        if self._thread is not None and self._process == os.getpid():
            return
        self._process = os.getpid()
        self._todo, self._done = queue.SimpleQueue(), threading.Event()
        self._done.set()
        self._thread = threading.Thread(target=self._work, name="stream", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while True:
            left = self._todo.get()
            try:
                while left:
                    left = left[os.write(self._number, left) :]
            except OSError as fault:
                self._fault = fault
            self._done.set()
