"""Counters of a step's scoring (requests, retries, faults, cache hits) and time per rollout."""

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import final

from luyen.base.records import Rollout
from luyen.telemetry.metrics import metric

metric("judging/requests", doc="Requests to judges, retries included.")
metric("judging/retries", doc="Requests to judges that were made again after one that failed.")
metric("judging/faults/<kind>", doc="Scores that no judge gave, by the name of the last fault.")
metric("judging/cache_hits", doc="Scores found in the cache, and not computed.")
metric("judging/cache_misses", doc="Scores looked up in the cache, and not found.")
metric(
    "judging/unjudgeable/<rule>",
    doc="Answers that a rule ran out of time, memory or stack on, or broke: counted as wrong.",
)
metric(
    "judging/cache_damaged",
    doc="Entries of the cache that are not as they were written; they are recomputed.",
)


@final
class ScoringCounters:
    """Numbers by metric name since they were last taken; any thread may add.

    Example:
        >>> counts = ScoringCounters()
        >>> counts.add("judging/requests")
        >>> counts.add("judging/requests")
        >>> counts.take(), counts.take()
        ({'judging/requests': 2.0}, {})
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: Counter[str] = Counter()

    def add(self, name: str) -> None:
        """Count one more."""
        with self._lock:
            self._found[name] += 1

    def take(self) -> dict[str, float]:
        """What was counted since the last time."""
        with self._lock:
            found, self._found = self._found, Counter()
        return {name: float(count) for name, count in sorted(found.items())}


# Scoring time of each rollout, collected from every place that scores.

Key = tuple[int, int, str, int]
_spent: ContextVar[dict[Key, float] | None] = ContextVar("spent", default=None)


@contextmanager
def measuring() -> Iterator[dict[Key, float]]:
    """Seconds by the key of a rollout, for all scoring started inside."""
    seconds: dict[Key, float] = {}
    token = _spent.set(seconds)
    try:
        yield seconds
    finally:
        _spent.reset(token)


def add_time(rollout: Rollout, seconds: float) -> None:
    """Count seconds towards a rollout, if anybody measures."""
    spent = _spent.get()
    if spent is not None:
        spent[rollout.key] = spent.get(rollout.key, 0.0) + seconds
