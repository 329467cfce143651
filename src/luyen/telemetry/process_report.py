"""What a process of a cluster tells the controller of itself, beside what it was asked for."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PastSpan:
    """A stretch of work that has ended.

    Example:
        >>> PastSpan(name="update_actor", start=1.0, duration_s=0.5, facts={}).duration_s
        0.5
    """

    name: str
    """What was done."""
    start: float
    """When it began, by the clock of its process, in seconds since 1970."""
    duration_s: float
    """How long it took."""
    facts: Mapping[str, Any]
    """What else is known of it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessReport:
    """Who a process is, how it stands, and what it did since it was asked last.

    Example:
        >>> ProcessReport(pid=7, node="ab12", came=1.0, answered=1.1, spans=(), lost=0,
        ...               busy_s=0.1, memory_bytes=1 << 30, device_bytes=None).pid
        7
    """

    pid: int
    """Its process."""
    node: str
    """Where it runs."""
    came: float
    """When the question came, by its clock."""
    answered: float
    """When the answer left, by its clock."""
    spans: tuple[PastSpan, ...]
    """What it did since the last report."""
    lost: int
    """Spans so far that nobody asked for in time."""
    busy_s: float
    """Seconds so far in which it did something, up to `answered`."""
    memory_bytes: int
    """Most main memory so far."""
    device_bytes: int | None
    """Most memory of its GPU so far; None: it has none."""
