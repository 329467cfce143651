"""The spans of a run's processes, read and cut to some steps; interval arithmetic."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeAlias, cast, final

from luyen.base.errors import UserError
from luyen.base.input_files import parse_json, read_bytes
from luyen.base.rundir import RunDirectory
from luyen.telemetry.spans import SCHEMA

# Interval arithmetic: union, intersection and difference.

Interval: TypeAlias = tuple[float, float]
"""Start and end."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The union as disjoint intervals, in order.

    Example:
        >>> union([(4, 5), (1, 3), (2, 3.5), (6, 6)])
        [(1, 3.5), (4, 5)]
    """
    found: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[1] > one[0]):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def overlap(one: Sequence[Interval], other: Sequence[Interval]) -> list[Interval]:
    """The intersection; each argument must be a union.

    Example:
        >>> overlap([(1, 4), (6, 9)], [(2, 3), (3.5, 7)])
        [(2, 3), (3.5, 4), (6, 7)]
    """
    found: list[Interval] = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def without(whole: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The difference; each argument must be a union.

    Example:
        >>> without([(0, 10)], [(2, 3), (5, 12)])
        [(0, 2), (3, 5)]
    """
    edges = [(float("-inf"), float("-inf")), *taken, (float("inf"), float("inf"))]
    free = [(before[1], after[0]) for before, after in pairwise(edges)]
    return overlap(whole, free)


def seconds(intervals: Iterable[Interval]) -> float:
    """Total length.

    Example:
        >>> seconds([(1, 3), (4, 4.5)])
        2.5
    """
    return sum(end - start for start, end in intervals)


CONTROLLER = "controller"
"""Role of the process that runs the loop."""
WAIT = "wait for "
"""Prefix of the names of spans in which the controller waits for a role."""
_MEMBERS = {"actor": "rank", "rollout": "replica"}
_OWN = {"span", "start", "duration_s", "step", "thread"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpan:
    """A span of work, in the controller's time.

    Example:
        >>> TimedSpan(name="generate", start=10.0, end=12.5, step=3, thread=7, facts={}).seconds
        2.5
    """

    name: str
    """What was done."""
    start: float
    """When it began, in seconds since 1970."""
    end: float
    """When it ended."""
    step: int | None
    """The step it belongs to, where that is known."""
    thread: int
    """The thread, where a process tells it; else 0."""
    facts: Mapping[str, Any]
    """What else was written of it."""

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start

    @property
    def interval(self) -> Interval:
        """Beginning and end."""
        return self.start, self.end


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpans:
    """The spans of one incarnation of a process.

    Example:
        >>> ProcessSpans(role="actor", index=0, pid=7, node="ab12cd", clock_error_s=0.001,
        ...         spans=()).name
        'actor rank 0 (node ab12)'
    """

    role: str
    """Its role."""
    index: int | None
    """Index in its role; None: the only one."""
    pid: int
    """Its process id."""
    node: str | None
    """Its node; None: that of the controller."""
    clock_error_s: float | None
    """By how much its times can be wrong; None: they are the controller's own."""
    spans: tuple[TimedSpan, ...]
    """Its spans by start time."""

    @property
    def name(self) -> str:
        """Display name."""
        if self.index is None:
            return f"{self.role} (pid {self.pid})"
        place = "" if self.node is None else f" (node {self.node[:4]})"
        return f"{self.role} {_MEMBERS.get(self.role, 'process')} {self.index}{place}"


def read_processes(root: Path | str) -> list[ProcessSpans]:
    """Every process that left spans, the controller first; a UserError where it left none.

    Damaged lines are skipped: spans are diagnostics only.
    """
    directory = RunDirectory.open(root)
    files = sorted(directory.events.glob("*.jsonl"))
    return in_order(root, [process for file in files for process in _of_file(file)])


def in_order(root: Path | str, found: list[ProcessSpans]) -> list[ProcessSpans]:
    """Processes of a run, the controller first; a UserError where it left no spans."""
    if not any(process.role == CONTROLLER and process.spans for process in found):
        why = "the controller left no spans there"
        raise UserError("RUN", str(root), why, "name a run that has begun its first step")
    order = {CONTROLLER: 0}
    return sorted(found, key=lambda p: (order.get(p.role, 1), p.role, p.index or 0))


def _of_file(path: Path) -> list[ProcessSpans]:
    try:
        data = read_bytes(path)
    except OSError as error:
        raise unreadable(path, error) from error
    lines = SpanLines(path)
    lines.add(data)
    return lines.processes()


def unreadable(path: Path, error: OSError) -> UserError:
    """That a file of spans cannot be read."""
    why = f"it cannot be read: {error.strerror or error}"
    return UserError("file", str(path), why, "restore it from a copy, or remove it")


@final
class SpanLines:
    """Spans from the lines of one file, which may come in several parts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._of_processes: list[tuple[dict[str, Any], list[TimedSpan]]] = []

    @property
    def count(self) -> int:
        """Spans so far."""
        return sum(len(spans) for _, spans in self._of_processes)

    def add(self, data: bytes) -> None:
        """Whole lines that follow those before."""
        for text in data.split(b"\n"):
            try:
                line = parse_json(text)
            except ValueError:
                continue
            if isinstance(line, dict):
                self._add(cast(dict[str, Any], line))

    def _add(self, line: dict[str, Any]) -> None:
        if "schema" in line:
            _refuse_later(self._path, line["schema"])
            self._of_processes.append((line, []))
        elif self._of_processes and (span := _span(line)) is not None:
            self._of_processes[-1][1].append(span)

    def processes(self) -> list[ProcessSpans]:
        """Every process that wrote to the file."""
        return [_process(head, spans) for head, spans in self._of_processes]


def _process(head: Mapping[str, Any], spans: list[TimedSpan]) -> ProcessSpans:
    error, node = head.get("clock_error_s"), head.get("node")
    return ProcessSpans(
        role=str(head.get("process")),
        index=_whole(head.get("index")),
        pid=_whole(head.get("pid")) or 0,
        node=node if isinstance(node, str) else None,
        clock_error_s=error if isinstance(error, int | float) else None,
        spans=tuple(sorted(spans, key=lambda span: (span.start, -span.end))),
    )


def _span(line: Mapping[str, Any]) -> TimedSpan | None:
    try:
        start, took = float(line["start"]), float(line["duration_s"])
        return TimedSpan(
            name=str(line["span"]),
            start=start,
            end=start + took,
            step=_whole(line.get("step")),
            thread=_whole(line.get("thread")) or 0,
            facts={name: value for name, value in line.items() if name not in _OWN},
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _whole(value: Any) -> int | None:
    """A number as we write it; None for what stands there in a damaged or foreign file."""
    return value if isinstance(value, int) and abs(value) < 2**63 else None


def _refuse_later(path: Path, schema: Any) -> None:
    if _whole(schema) is None or schema > SCHEMA:
        why = f"its lines are of version {schema}, and this is version {SCHEMA}"
        raise UserError("file", str(path), why, "read it with the version that wrote it")


# Time windows of steps, and the spans inside them.

Steps: TypeAlias = tuple[int, int]
"""First and last."""
_STEPS = re.compile(r"\s*([0-9]+)\s*(?:-\s*([0-9]+)\s*)?")


def parse_steps(words: str) -> Steps:
    """First and last step of `3-5`, or of `3`.

    Example:
        >>> parse_steps("3-5"), parse_steps("3")
        ((3, 5), (3, 3))
    """
    found = _STEPS.fullmatch(words)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 0 < first <= last:
        why = "it is a step, or a first and a last one"
        raise UserError("--steps", words, why, "give numbers from 1 on, such as 3-5")
    return first, last


def windows(processes: Sequence[ProcessSpans], steps: Steps | None) -> list[Interval]:
    """From the beginning of the first of the steps to the end of the last, in each session.

    A resumed run has one controller per session.
    """
    first, last = steps or (1, 1 << 62)
    found: list[Interval] = []
    for process in processes:
        if process.role == CONTROLLER:
            mine = [s for s in process.spans if s.step is not None and first <= s.step <= last]
            if mine:
                found.append((min(s.start for s in mine), max(s.end for s in mine)))
    if not found:
        wanted = "any step" if steps is None else f"steps {first} to {last}"
        why = f"the run has no spans of {wanted}"
        raise UserError("--steps", None if steps is None else wanted, why, "name steps it has done")
    return union(found)


def inside(processes: Sequence[ProcessSpans], times: Sequence[Interval]) -> list[ProcessSpans]:
    """Every process with the spans that lie in these times, at least in part."""

    def is_inside(span: TimedSpan) -> bool:
        return any(span.start < end and span.end > start for start, end in times)

    kept = [replace(p, spans=tuple(filter(is_inside, p.spans))) for p in processes]
    return [process for process in kept if process.spans]
