"""What a log or a pipe shows of a run: a line a step, and how far a long wait is."""

import threading
from collections.abc import Mapping
from typing import TextIO, final

from luyen.telemetry.figures import FIGURES, HEADING, Clock, duration
from luyen.telemetry.progress import PROGRESS, Watched

_LOOK_S = 1.0
_LEAST_S = 10.0
"""Seconds between two lines about the same wait."""
_MOST_S = 30.0
"""Seconds after which there is a line even if less than a tenth was done meanwhile."""


@final
class PlainDisplay:
    """One line a step, for logs and pipes."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._clock = Clock()
        self._heading = HEADING.get()
        self._said: tuple[str, int, float] | None = None
        self._over = threading.Event()
        self._teller = threading.Thread(target=self._tell, daemon=True, name="progress")

    def waiting(self, words: str) -> None:
        """Write the line."""
        self._stream.write(f"{words}\n")
        self._stream.flush()

    def start(self, total_steps: int, *, done: int = 0) -> None:
        """Begin to count."""
        self._clock.start(total_steps, done)
        self._teller.start()

    def phase(self, name: str) -> None:
        """A log shows steps, not phases."""

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write the line of a step."""
        self._clock.done = step
        known = [(figure.label, figure.show(metrics)) for figure in FIGURES]
        words = [f"{label} {text}" for label, text in known if text is not None]
        place = f"step {step:>{len(str(self._clock.total))}}/{self._clock.total}"
        words = [self._heading, *words] if self._heading else words
        words += [
            f"{duration(self._clock.elapsed_s())} gone, {duration(self._clock.left_s())} left"
        ]
        self._stream.write("  ".join([place, *words]) + "\n")
        self._stream.flush()

    def close(self) -> None:
        """Nothing is told any more; the stream belongs to the caller."""
        self._over.set()
        if self._teller.is_alive():
            self._teller.join()

    def _tell(self) -> None:
        """Say how far a wait is, as long as there is a stream."""
        while not self._over.wait(_LOOK_S):
            watched = PROGRESS.now()
            if watched is None or not self._is_news(watched):
                continue
            place = f"step {self._clock.done}/{self._clock.total}"
            try:
                self._stream.write(f"{place}  {watched.words()}, {duration(watched.seconds)}\n")
                self._stream.flush()
            except (OSError, ValueError):
                return  # what cannot be shown is noted with the next step

    def _is_news(self, watched: Watched) -> bool:
        """Whether enough time and work has passed since the last line about it."""
        name, done, when = self._said or ("", 0, 0.0)
        if name != watched.name or watched.seconds < when:
            done, when = 0, 0.0
        passed = watched.seconds - when
        is_tenth = 10 * (watched.done - done) >= watched.total
        if passed < _LEAST_S or not (is_tenth or passed >= _MOST_S):
            return False
        self._said = watched.name, watched.done, watched.seconds
        return True
