"""Progress of what a run waits for: rollouts, groups to score, and slow phases explained.

The submitter of work calls `expect`, its executor calls `add` for each part, a display polls `now`.

    PROGRESS.expect("validation", 0, 1319)
    with PROGRESS.watching("validation", 0):
        ...                     # PROGRESS.add("validation", 0) with every answer
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Timer
from typing import TypeAlias, final

Key: TypeAlias = tuple[str, int]
"""What the work is for, and the step it belongs to."""
_KEPT = 64
"""Steps whose counts are remembered: rollouts may be generated ahead."""
_UNITS = {"score": "groups judged"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressState:
    """Progress of the work that the run waits for now.

    Example:
        >>> ProgressState(name="validation", done=120, total=1319, seconds=45.0).words()
        'validation: 120 of 1319 answers'
    """

    name: str
    """What the work is for."""
    done: int
    """Parts of it that are done."""
    total: int
    """All parts."""
    seconds: float
    """How long the run has waited for it."""

    def words(self) -> str:
        """As text."""
        return f"{self.name}: {self.done} of {self.total} {_UNITS.get(self.name, 'answers')}"


@final
class Progress:
    """Counts of work, by what it is for. Any thread may count.

    Example:
        >>> progress = Progress()
        >>> progress.expect("rollout", 1, 8)
        >>> progress.add("rollout", 1, 3)
        >>> with progress.watching("rollout", 1):
        ...     progress.now().done, progress.now().total
        (3, 8)
        >>> progress.now()
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[Key, list[int]] = {}
        self._watched: tuple[Key, float] | None = None

    def expect(self, name: str, step: int, count: int, *, restart: bool = False) -> None:
        """Add expected work; `restart` discards earlier counts of this key first."""
        with self._lock:
            if restart:
                self._counts.pop((name, step), None)
            self._counts.setdefault((name, step), [0, 0])[1] += count
            for old in list(self._counts)[:-_KEPT]:
                del self._counts[old]

    def add(self, name: str, step: int, count: int = 1) -> None:
        """Count finished work; work that was not expected is ignored."""
        with self._lock:
            if (name, step) in self._counts:
                self._counts[name, step][0] += count

    @contextmanager
    def watching(self, name: str, step: int) -> Iterator[None]:
        """Inside the block, `now` reports this work."""
        before, self._watched = self._watched, ((name, step), time.monotonic())
        try:
            yield
        finally:
            self._watched = before

    def now(self) -> ProgressState | None:
        """The work that the run waits for; None if there is none or its amount is unknown."""
        watched = self._watched
        if watched is None:
            return None
        key, since = watched
        with self._lock:
            done, total = self._counts.get(key, (0, 0))
        if not total:
            return None
        return ProgressState(name=key[0], done=done, total=total, seconds=time.monotonic() - since)


PROGRESS = Progress()
"""The progress of this process."""


# Messages for slow blocks.

EXPLAIN_AFTER_S = 2.0
"""Seconds after which a block counts as slow."""


@contextmanager
def explain_if_slow(
    say: Callable[[str], None], words: str, *, after_s: float = EXPLAIN_AFTER_S
) -> Iterator[None]:
    """Call `say` once, from another thread, if the block takes longer than `after_s`.

    It is not called after the block has ended.

    Example:
        >>> with explain_if_slow(print, "reading rows", after_s=60.0):
        ...     sum(range(10))
        45
    """
    timer = Timer(after_s, say, (words,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
