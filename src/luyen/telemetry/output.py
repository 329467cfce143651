"""Standard output and error that neither end nor block the process when their reader does.

A command whose product is its output ends when the reader is gone; a training run continues without
one, since its product is its files. `Output.go_on` selects the latter.
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

# Writing to a stream whose reader may block, without blocking the caller.

WRITE_TIMEOUT_S = 5.0
"""How long a write may take; a terminal paused with Ctrl-S, or a full pipe, blocks for ever."""


@final
class WriterThread:
    """Writes in a thread, and gives up waiting for it after a timeout.

    One caller at a time. While an earlier write still blocks, new data is refused.

    Example:
        >>> ours, theirs = os.pipe()
        >>> WriterThread(theirs).write(b"a line"), os.read(ours, 9)
        (True, b'a line')
    """

    def __init__(self, number: int, *, timeout_s: float = WRITE_TIMEOUT_S) -> None:
        self._number = number
        self._timeout_s = timeout_s
        self._todo: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._done = threading.Event()
        self._done.set()
        self._fault: OSError | None = None
        self._thread: threading.Thread | None = None
        self._process = 0

    def write(self, data: bytes) -> bool:
        """Whether the data was written in time; an OSError where the write failed."""
        self._begin()
        if not self._done.is_set():
            return False
        self._done.clear()
        self._todo.put(data)
        is_taken = self._done.wait(self._timeout_s)
        fault, self._fault = (self._fault, None) if is_taken else (None, self._fault)
        if fault is not None:
            raise fault
        return is_taken

    def _begin(self) -> None:
        """Start the thread, again after a fork: a child process does not inherit threads."""
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


# Terminal escapes: only text, line breaks and the codes for colours and redrawing pass.
#
# We print untrusted text from datasets, policies and run directories. Some control codes write to
# the clipboard, rename windows or inject input, and direction marks make a name look like another
# one. All of these are written as escapes.

_KEPT = r"\x1b\[(?:[0-9;]*m|[0-9]*[ABG]|[0-2]?[JK]|\?25[hl])"
"""Colours, lines up and down, the first column, erasing, the cursor on and off."""
_CONTROL = re.compile(
    rf"({_KEPT})|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]"
)


def escaped(text: str) -> str:
    r"""The text with control characters replaced by JSON escapes.

    Example:
        >>> escaped("\x1b[31mred\x1b[0m \x1b]0;a title\x07")
        '\x1b[31mred\x1b[0m \\u001b]0;a title\\u0007'
    """
    return _CONTROL.sub(lambda odd: odd[1] or f"\\u{ord(odd[0]):04x}", text)


class EscapedText(io.TextIOWrapper):
    """A text stream that escapes control characters."""

    def write(self, s: str, /) -> int:
        """Write the escaped text."""
        super().write(escaped(s))
        return len(s)


NAMES = {1: "standard output", 2: "standard error"}
_FOR_GOOD = {errno.EPIPE, errno.EIO, errno.EBADF, errno.ENXIO}
"""Errors after which a stream is closed for good; a full disk may have room later."""


@final
class Output:
    """State of the standard streams of this process."""

    def __init__(self) -> None:
        self.is_needed = True
        """Whether an error of standard output is raised; one of standard error never is."""
        self.fault: OSError | None = None
        """The error of standard output that was raised."""
        self._lost: dict[str, str] = {}
        self._tell: Callable[[str], None] | None = None
        self._lock = threading.Lock()

    def go_on(self) -> None:
        """From now on, drop output that cannot be written instead of raising."""
        self.is_needed = False

    def listen(self, tell: Callable[[str], None] | None) -> None:
        """Call `tell` once for each lost stream, immediately for those lost already."""
        with self._lock:
            self._tell, known = tell, list(self._lost.values())
        if tell is not None:
            for words in known:
                tell(words)

    def lose(self, name: str, why: str) -> None:
        """Report that output of a stream was dropped; only the first report counts."""
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
    """The raw file below a standard stream; output that the reader does not take is dropped."""

    def __init__(self, number: int, output: Output) -> None:
        super().__init__(number, "wb", closefd=False)
        self._number = number
        self._output = output
        self._writer = WriterThread(number)

    def write(self, data: Any, /) -> int:
        """Write the data; an error is raised only where the output is needed."""
        try:
            if not self._output.is_needed and _may_block(self._number):
                return self._write_in_thread(bytes(data))
            written = super().write(data)
        except OSError as error:
            return self._dropped(memoryview(data).nbytes, error)
        # None: the write would block, because another process made the stream non-blocking.
        return memoryview(data).nbytes if written is None else written

    def _write_in_thread(self, data: bytes) -> int:
        """Write in the thread, with its timeout."""
        if not self._writer.write(data):
            self._output.lose(NAMES[self._number], "its reader does not respond")
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
    """A display whose errors are reported to `Output` and never reach the training loop."""

    def __init__(self, display: Display, output: Output) -> None:
        self._display = display
        self._output = output

    def waiting(self, words: str) -> None:
        """Forwarded; errors are reported, not raised."""
        self._try(lambda: self._display.waiting(words))

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Forwarded; errors are reported, not raised."""
        self._try(lambda: self._display.start(total_steps, done=done))

    def phase(self, name: str) -> None:
        """Forwarded; errors are reported, not raised."""
        self._try(lambda: self._display.phase(name))

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Forwarded; errors are reported, not raised."""
        self._try(lambda: self._display.step(step, metrics))

    def close(self) -> None:
        """Forwarded; errors are reported, not raised."""
        self._try(self._display.close)

    def _try(self, show: Callable[[], None]) -> None:
        try:
            show()
        except (OSError, ValueError) as error:
            self._output.lose("the display", str(error))


def open_safe_display() -> Display:
    """The display on standard output; a silent one where there is no such stream."""
    stream: TextIO | None = sys.stdout
    return SilentDisplay() if stream is None else SafeDisplay(open_display(stream), OUTPUT)


def ensure_streams() -> None:
    """Give this process three standard streams, even if it was started without them.

    A free descriptor would be reused by the next opened file, and prints would end up in that file.
    A replaced `sys.stdout` or `sys.stderr` is left alone.
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
        errors="backslashreplace",  # an unencodable character must not end the process
        line_buffering=number == 2 or os.isatty(number),
    )


def flushed() -> OSError | None:
    """Flush both streams; returns the error of standard output, now or before."""
    streams: tuple[TextIO | None, ...] = (sys.stdout, sys.stderr)
    for stream in (one for one in streams if one is not None):
        try:
            stream.flush()
        except (OSError, ValueError) as error:
            OUTPUT.fault = OUTPUT.fault or (error if isinstance(error, OSError) else None)
    OUTPUT.go_on()  # the interpreter flushes once more when it ends, and must not raise then
    return OUTPUT.fault


def say(words: str) -> None:
    """Write a line to standard error; never raises."""
    try:
        sys.stderr.write(f"\n{words}\n")
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError) as error:
        OUTPUT.lose(NAMES[2], str(error))


def say_from_handler(words: str) -> None:
    """Write a line to standard error from a signal handler: neither blocks nor raises.

    It bypasses `sys.stderr`, whose buffer is not reentrant.
    """
    try:
        if select.select([], [2], [], 0)[1]:
            os.write(2, f"\n{words}\n".encode())
    except (OSError, ValueError):
        return


def _may_block(number: int) -> bool:
    """Whether a write may block: not for regular files, nor at exit, when threads are gone."""
    return not stat.S_ISREG(os.fstat(number).st_mode) and not sys.is_finalizing()


def _point_nowhere(number: int) -> None:
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere != number:
        os.dup2(nowhere, number)
        os.close(nowhere)
    os.set_inheritable(number, True)
