"""A sign of life: a counter that everything which makes progress pushes on.

Engine passes, micro-batches, finished rollouts, tool calls and scores beat. A watcher only checks
whether the number has changed, so that a beat lost between two threads does not matter.
"""

from threading import get_ident
from typing import final


@final
class Heartbeat:
    """Beats of one process.

    Example:
        >>> heart = Heartbeat()
        >>> heart.beat()
        >>> heart.count
        1
    """

    __slots__ = ("_ahead", "ahead", "count")

    def __init__(self) -> None:
        self.count = 0
        """Beats so far."""
        self.ahead = 0
        """Beats of threads that prefetch: they do not show that the training loop progresses."""
        self._ahead = frozenset[int]()

    def beat(self) -> None:
        """Something moved."""
        if get_ident() in self._ahead:
            self.ahead += 1
        else:
            self.count += 1

    def beat_of_loop(self) -> None:
        """Something moved that the loop waits for, whichever thread has heard of it."""
        self.count += 1

    def work_ahead(self) -> None:
        """From now on the calling thread works ahead of the loop."""
        self._ahead |= {get_ident()}

    def end_ahead(self) -> None:
        """The calling thread ends: another one may get its number."""
        self._ahead -= {get_ident()}


HEART = Heartbeat()
"""The heart of this process."""
beat = HEART.beat
BETWEEN = "between"
"""Where a run is when it is in no phase: packing, crediting, writing files."""
DRAWING = ("generate", "validate")
"""Phases in which the loop waits for rollouts."""
PHASES = ("generate", "score", "log-probs", "update", "digest", "validate", BETWEEN)
"""Phases of a run that can be watched."""
