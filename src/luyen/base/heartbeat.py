"""A sign of life: a counter that everything which makes progress pushes on.

Engine passes, micro-batches, finished rollouts, tool calls and scores beat. Whoever watches only
asks whether the number has changed, so that a beat lost between two threads means nothing.
"""

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

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0
        """Beats so far."""

    def beat(self) -> None:
        """Something moved."""
        self.count += 1


HEART = Heartbeat()
"""The heart of this process."""
beat = HEART.beat
BETWEEN = "between"
"""Where a run is when it is in no phase: packing, crediting, writing files."""
PHASES = ("generate", "score", "log-probs", "update", "digest", "validate", BETWEEN)
"""Phases of a run that can be watched."""
