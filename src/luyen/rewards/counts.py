"""What happened while judging, counted: requests, retries, faults by name, hits of the cache."""

import threading
from collections import Counter
from typing import final

from luyen.telemetry.catalog import metric

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
    doc="Entries of the cache that are not as they were written: computed anew.",
)


@final
class Counts:
    """Numbers by metric name since they were last taken; any thread may add.

    Example:
        >>> counts = Counts()
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
