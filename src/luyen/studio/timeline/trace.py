"""Spans as a trace that Perfetto and Chrome open."""

from collections.abc import Iterable, Sequence
from typing import Any

from luyen.studio.timeline.read import WAIT, Process, TimedSpan

_SLACK_S = 1e-5
"""Times are rounded: a span may end so much after the one that it lies in."""
_WAITS, _WORK = "waiting", "work"


def trace_of(processes: Sequence[Process]) -> dict[str, Any]:
    """All processes in one trace; its time begins with the first span."""
    begin = min((p.spans[0].start for p in processes if p.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes, 1):
        events += _process_events(number, process, begin)
    errors = [p.clock_error_s for p in processes if p.clock_error_s is not None]
    known = {"began": begin, "clock_error_s": max(errors, default=0.0)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": known}


def _process_events(number: int, process: Process, begin: float) -> list[dict[str, Any]]:
    def note(kind: str, row: int, **arguments: Any) -> dict[str, Any]:
        return {"ph": "M", "name": kind, "pid": number, "tid": row, "args": arguments}

    events = [
        note("process_name", 0, name=process.name),
        note("process_sort_index", 0, sort_index=number),
    ]
    row = 0
    for name, spans in _threads(process):
        for lane in lanes(spans):
            row += 1
            events.append(note("thread_name", row, name=name))
            events.append(note("thread_sort_index", row, sort_index=row))
            events += [_event(number, row, span, process, begin) for span in lane]
    return events


def _threads(process: Process) -> list[tuple[str, list[TimedSpan]]]:
    """Spans by thread; those of waiting go over the borders of others, and have rows of their own.

    The first thread that is seen is the one that a process begins with.
    """
    work = [span for span in process.spans if not span.name.startswith(WAIT)]
    waits = [span for span in process.spans if span.name.startswith(WAIT)]
    threads = list(dict.fromkeys(span.thread for span in work))
    found = [
        (_WORK if i == 0 else f"thread {thread}", [s for s in work if s.thread == thread])
        for i, thread in enumerate(threads)
    ]
    return [*found, (_WAITS, waits)] if waits else found


def lanes(spans: Iterable[TimedSpan]) -> list[list[TimedSpan]]:
    """Spans dealt out to as few rows as this takes: in a row they lie apart, or one in another."""
    rows: list[list[TimedSpan]] = []
    stacks: list[list[TimedSpan]] = []
    for span in sorted(spans, key=lambda s: (s.start, -s.end)):
        for row, stack in zip(rows, stacks, strict=True):
            while stack and stack[-1].end <= span.start + _SLACK_S:
                stack.pop()
            if not stack or span.end <= stack[-1].end + _SLACK_S:
                row.append(span)
                stack.append(span)
                break
        else:
            rows.append([span])
            stacks.append([span])
    return rows


def _event(
    number: int, row: int, span: TimedSpan, process: Process, begin: float
) -> dict[str, Any]:
    step = {} if span.step is None else {"step": span.step}
    return {
        "ph": "X",
        "name": span.name,
        "cat": process.role,
        "pid": number,
        "tid": row,
        "ts": round((span.start - begin) * 1e6, 1),
        "dur": round(span.seconds * 1e6, 1),
        "args": {**step, **span.facts},
    }
