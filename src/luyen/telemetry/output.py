"""Standard output and error of a process that must not end or hang when their reader does.

A command whose product is what it prints ends when its reader is gone; a run goes on without one:
its files are what counts. Which of the two holds is said with `Output.go_on`.
"""

import errno
import io
import os
import queue
import re
import select
import stat
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, TextIO, final

from luyen.telemetry.display import Display, SilentDisplay, open_display

# Writing to a stream whose reader may stand still, without standing still with it.

WRITE_TIMEOUT_S = 5.0
"""How long a reader may take; a terminal that is held with Ctrl-S, or a full pipe, never ends."""


@final
class WriterThread:
    """A thread that writes, and is left alone when that takes too long.

    One caller at a time. While a write is under way that nobody waits for, nothing is taken.

    Example:
        >>> ours, theirs = os.pipe()
        >>> WriterThread(theirs).write(b"a line"), os.read(ours, 9)
        (True, b'a line')
    """

    def __init__(self, number: int, *, patience_s: float = WRITE_TIMEOUT_S) -> None:
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


# What may reach a terminal: text, line breaks, and the few codes that we colour and redraw
# with.
#
# Rows, policies and runs of strangers are printed. A terminal obeys what it is shown: some
# codes write to the clipboard, rename windows or answer as if the user had typed, and marks of
# direction make a name look like another one. All of these are written as escapes.

_KEPT = r"\x1b\[(?:[0-9;]*m|[0-9]*[ABG]|[0-2]?[JK]|\?25[hl])"
"""Colours, lines up and down, the first column, erasing, the cursor on and off."""
_CONTROL = re.compile(
    rf"({_KEPT})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def escaped(text: str) -> str:
    r"""The text with escapes, as JSON has them, for what a terminal would obey.

    Example:
        >>> escaped("\x1b[31mred\x1b[0m \x1b]0;a title\x07")
        '\x1b[31mred\x1b[0m \\u001b]0;a title\\u0007'
    """
    return _CONTROL.sub(lambda odd: odd[1] or f"\\u{ord(odd[0]):04x}", text)


class EscapedText(io.TextIOWrapper):
    """A stream that people read."""

    def write(self, s: str, /) -> int:
        """Write the text, harmless."""
        super().write(escaped(s))
        return len(s)


NAMES = {1: "standard output", 2: "standard error"}
_FOR_GOOD = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}
"""Faults after which a stream takes nothing any more; a full disk may have room later."""


@final
class Output:
    """What became of the standard streams of this process."""

    def __init__(self) -> None:
        self.is_needed = True
        """Whether a fault of standard output is raised; that of standard error never is."""
        self.fault: OSError | None = None
        """What was raised of standard output."""
        self._lost: dict[str, str] = {}
        self._tell: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    def go_on(self) -> None:
        """From now on, what cannot be written is dropped."""
        self.is_needed = False

    def listen(self, tell: Callable[[str], None] | None) -> None:
        """Give each lost stream to `tell` once, those that are lost already at once."""
        with self._lock:
            self._tell, known = tell, list(self._lost.values())
        if tell is not None:
            for words in known:
                tell(words)

    def lose(self, name: str, why: str) -> None:
        """A stream takes nothing more, or less than it was given."""
        with self._lock:
            if name in self._lost:
                return
            words = self._lost[name] = f"{name} is lost ({why}); what is shown there is dropped"
            tell = self._tell
        if tell is not None:
            tell(words)


OUTPUT = Output()
"""The streams of this process."""


@final
class NonblockingFile(io.FileIO):
    """The file below a standard stream; it takes everything, and drops what nobody reads."""

    def __init__(self, number: int, output: Output) -> None:
        super().__init__(number, "wb", closefd=False)
        self._number = number
        self._output = output
        self._pump = WriterThread(number)

    def write(self, data: Any, /) -> int:
        """Write what is taken; a fault is raised only where the output is needed."""
        try:
            if not self._output.is_needed and _may_stand_still(self._number):
                return self._pumped(bytes(data))
            written = super().write(data)
        except OSError as error:
            return self._dropped(memoryview(data).nbytes, error)
        # None: it would block, since another process has made the stream so.
        return memoryview(data).nbytes if written is None else written

    def _pumped(self, data: bytes) -> int:
        """Let a thread write it: a run does not wait for its reader for ever."""
        if not self._pump.write(data):
            self._output.lose(NAMES[self._number], "nobody reads it")
        return len(data)

    def _dropped(self, size: int, error: OSError) -> int:
        if self._number == 1 and self._output.is_needed:
            self._output.fault = error
            raise error
        if error.errno in _FOR_GOOD:
            _point_nowhere(self._number)
        self._output.lose(NAMES[self._number], error.strerror or str(error))
        return size


@final
class SafeDisplay:
    """A display whose faults are noted and never reach the loop."""

    def __init__(self, display: Display, output: Output) -> None:
        self._display = display
        self._output = output

    def waiting(self, words: str) -> None:
        """Show it, if that is possible."""
        self._try(lambda: self._display.waiting(words))

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Show it, if that is possible."""
        self._try(lambda: self._display.start(total_steps, done=done))

    def phase(self, name: str) -> None:
        """Show it, if that is possible."""
        self._try(lambda: self._display.phase(name))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show it, if that is possible."""
        self._try(lambda: self._display.step(step, metrics))

    def close(self) -> None:
        """Close it, if that is possible."""
        self._try(self._display.close)

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (OSError, ValueError) as error:
            self._output.lose("the display", str(error))


def open_safe_display() -> Display:
    """The display on standard output; none where there is no such stream."""
    stream: TextIO | None = sys.stdout
    return SilentDisplay() if stream is None else SafeDisplay(open_display(stream), OUTPUT)


def ensure_streams() -> None:
    """Let this process have three standard streams, whatever it was started with.

    A number that is free would be given to the next file, and whoever prints would print into it.
    A stream that a caller has put in the place of the process's own stays.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _point_nowhere(number)
            if number in NAMES:
                OUTPUT.lose(NAMES[number], "it was closed at the start")
    if sys.stdin is None:
        sys.stdin = open(0, encoding="utf-8", closefd=False)  # noqa: SIM115 - for good
    if sys.stdout is sys.__stdout__:
        sys.stdout = _stream(1, sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _stream(2, sys.stderr)


def _stream(number: int, before: TextIO | None) -> TextIO:
    below = io.BufferedWriter(NonblockingFile(number, OUTPUT))
    return EscapedText(
        below,
        encoding=before.encoding if before is not None else "utf-8",
        errors="backslashreplace",  # no name of a file and no sign of a panel is worth an end
        line_buffering=number == 2 or os.isatty(number),
    )


def flushed() -> OSError | None:
    """Write what is still kept back; what stood in the way of standard output, now or before."""
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    for stream in (one for one in streams if one is not None):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            OUTPUT.fault = OUTPUT.fault or (error if isinstance(error, OSError) else None)
    OUTPUT.go_on()  # what is kept back still goes nowhere when the interpreter ends
    return OUTPUT.fault


def say(words: str) -> None:
    """A line on standard error, if it can be written."""
    try:
        sys.stderr.write(f"\n{words}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError) as error:
        OUTPUT.lose(NAMES[2], str(error))


def say_from_handler(words: str) -> None:
    """A line on standard error from a handler of signals: it neither waits nor raises.

    The stream of the interpreter may be in the middle of a line, so it is passed by.
    """
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"\n{words}\n".encode())
    except (OSError, ValueError):
        return


def _may_stand_still(number: int) -> bool:
    """Whether somebody reads along; not while the interpreter ends, which ends threads first."""
    return not stat.S_ISREG(os.fstat(number).st_mode) and not sys.is_finalizing()


def _point_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)
