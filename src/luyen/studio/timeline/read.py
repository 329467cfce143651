"""The spans of a run, read from the files of its processes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.parsing import parse_json
from luyen.base.reading import read_bytes
from luyen.base.rundir import RunDirectory
from luyen.studio.timeline.intervals import Interval
from luyen.telemetry.spans import SCHEMA

CONTROLLER = "controller"
"""Role of the process that runs the loop."""
WAIT = "wait for "
"""How a span is called in which the controller waits, before the role that it waits for."""
_MEMBERS = {"actor": "rank", "rollout": "replica"}
_OWN = {"span", "start", "duration_s", "step", "thread"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimedSpan:
    """A stretch of work, in the controller's time.

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
class Process:
    """One process of a run, in one of its lives.

    Example:
        >>> Process(role="actor", index=0, pid=7, node="ab12cd", clock_error_s=0.001,
        ...         spans=()).name
        'actor rank 0 (node ab12)'
    """

    role: str
    """What it is for."""
    index: int | None
    """Which of its role it is; None: the only one."""
    pid: int
    """Its process."""
    node: str | None
    """Where it ran; None: with the controller."""
    clock_error_s: float | None
    """By how much its times can be wrong; None: they are the controller's own."""
    spans: tuple[TimedSpan, ...]
    """What it did, in the order in which it began."""

    @property
    def name(self) -> str:
        """A name for people."""
        if self.index is None:
            return f"{self.role} (pid {self.pid})"
        place = "" if self.node is None else f" (node {self.node[:4]})"
        return f"{self.role} {_MEMBERS.get(self.role, 'process')} {self.index}{place}"


def read_processes(root: Path | str) -> list[Process]:
    """Every process that left spans, the controller first; a UserError where it left none.

    A line that is damaged is passed over: spans tell where time went, and nothing depends on them.
    """
    directory = RunDirectory.open(root)
    files = sorted(directory.events.glob("*.jsonl"))
    found = [process for file in files for process in _of_file(file)]
    if not any(process.role == CONTROLLER and process.spans for process in found):
        why = "the controller left no spans there"
        raise UserError("RUN", str(root), why, "name a run that has begun its first step")
    order = {CONTROLLER: 0}
    return sorted(found, key=lambda p: (order.get(p.role, 1), p.role, p.index or 0))


def _of_file(path: Path) -> Iterator[Process]:
    head: dict[str, Any] | None = None
    spans: list[TimedSpan] = []
    for line in _lines(path):
        if "schema" in line:
            if head is not None:
                yield _process(head, spans)
            _refuse_later(path, line["schema"])
            head, spans = line, []
        elif head is not None and (span := _span(line)) is not None:
            spans.append(span)
    if head is not None:
        yield _process(head, spans)


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        texts = read_bytes(path).split(b"\n")
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise UserError("file", str(path), why, "restore it from a copy, or remove it") from error
    for text in texts:
        try:
            line = parse_json(text)
        except ValueError:
            continue
        if isinstance(line, dict):
            yield cast(dict[str, Any], line)


def _process(head: Mapping[str, Any], spans: list[TimedSpan]) -> Process:
    return Process(
        role=str(head.get("process")),
        index=head.get("index"),
        pid=int(head.get("pid") or 0),
        node=head.get("node"),
        clock_error_s=head.get("clock_error_s"),
        spans=tuple(sorted(spans, key=lambda span: (span.start, -span.end))),
    )


def _span(line: Mapping[str, Any]) -> TimedSpan | None:
    try:
        start, took = float(line["start"]), float(line["duration_s"])
        return TimedSpan(
            name=str(line["span"]),
            start=start,
            end=start + took,
            step=line.get("step"),
            thread=int(line.get("thread") or 0),
            facts={name: value for name, value in line.items() if name not in _OWN},
        )
    except (KeyError, TypeError, ValueError):
        return None


def _refuse_later(path: Path, schema: Any) -> None:
    if not isinstance(schema, int) or schema > SCHEMA:
        why = f"its lines are of version {schema}, and this is version {SCHEMA}"
        raise UserError("file", str(path), why, "read it with the version that wrote it")
