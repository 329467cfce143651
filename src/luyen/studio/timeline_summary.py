"""Summary of a timeline: busy and waiting roles, gaps, and a Perfetto trace."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from luyen.studio.timeline import (
    CONTROLLER,
    WAIT,
    Interval,
    ProcessSpans,
    TimedSpan,
    overlap,
    seconds,
    union,
    without,
)

_GAPS = 5
"""Number of longest gaps that are reported."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RoleWork:
    """How a role spent the time, mean over its processes.

    Example:
        >>> RoleWork(role="actor", processes=2, busy=0.6, idle_s=4.0,
        ...          waited_s={"rollout": 3.0}).waited_s["rollout"]
        3.0
    """

    role: str
    """The role."""
    processes: int
    """Number of its processes."""
    busy: float
    """Busy share of the time."""
    idle_s: float
    """Idle seconds."""
    waited_s: Mapping[str, float]
    """Of those, seconds in which other processes worked, by their role (its own role included);
    seconds in which no worker was busy count for the controller."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """An interval in which no process but the controller worked.

    Example:
        >>> Gap(start_s=1.5, seconds=0.2, during="score", step=3).during
        'score'
    """

    start_s: float
    """When it began, counted from the beginning of the timeline."""
    seconds: float
    """How long it was."""
    during: str
    """The phase that covers most of it, or `between phases`."""
    step: int | None
    """The step of that phase."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TimelineSummary:
    """The time of a run, or of some of its steps.

    Example:
        >>> TimelineSummary(seconds=1.0, steps=(1, 2), roles=(), phases={"generate": 0.7}, gaps=(),
        ...         clock_error_s=None).phases["generate"]
        0.7
    """

    seconds: float
    """How long it was."""
    steps: tuple[int, int]
    """First and last step."""
    roles: tuple[RoleWork, ...]
    """Work by role; the controller first."""
    phases: Mapping[str, float]
    """Seconds of the controller by phase."""
    gaps: tuple[Gap, ...]
    """The longest, in the order of time."""
    clock_error_s: float | None
    """By how much times of other processes can be wrong; None: there are none."""

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def summarise(processes: Sequence[ProcessSpans], times: Sequence[Interval]) -> TimelineSummary:
    """Summary of the spans in these times, which must be a union."""
    phases = [s for p in processes if p.role == CONTROLLER for s in _phases(p)]
    workers = [process for process in processes if process.role != CONTROLLER]
    spent: dict[str, float] = {}
    for span in phases:
        spent[span.name] = spent.get(span.name, 0.0) + seconds(overlap([span.interval], times))
    steps = [span.step for span in phases if span.step]  # 0 is the validation before the first
    errors = [p.clock_error_s for p in workers if p.clock_error_s is not None]
    roles = [_controller(processes, times), *_roles(workers, times)]
    return TimelineSummary(
        seconds=seconds(times),
        steps=(min(steps, default=0), max(steps, default=0)),
        roles=tuple(roles),
        phases=dict(sorted(spent.items(), key=lambda pair: -pair[1])),
        gaps=tuple(_gaps(workers, phases, times)),
        clock_error_s=max(errors, default=None),
    )


def _phases(process: ProcessSpans) -> list[TimedSpan]:
    """The outermost spans of the training loop; nested spans are left out."""
    found: list[TimedSpan] = []
    for span in process.spans:
        is_within = found and span.end <= found[-1].end + 1e-6
        if span.step is not None and not span.name.startswith(WAIT) and not is_within:
            found.append(span)
    return found


def _controller(processes: Sequence[ProcessSpans], times: Sequence[Interval]) -> RoleWork:
    """The controller: it counts as busy, also between phases, except in its wait spans."""
    by_role: dict[str, list[Interval]] = {}
    for process in processes:
        waits = [span for span in process.spans if span.name.startswith(WAIT)]
        for span in waits if process.role == CONTROLLER else ():
            by_role.setdefault(span.name.removeprefix(WAIT), []).append(span.interval)
    waited = {role: seconds(overlap(union(mine), times)) for role, mine in by_role.items()}
    everything = union(one for mine in by_role.values() for one in mine)
    whole, idle = seconds(times), seconds(overlap(everything, times))
    return RoleWork(
        role=CONTROLLER,
        processes=1,
        busy=1 - idle / whole if whole > 0 else 0.0,
        idle_s=idle,
        waited_s=dict(sorted(waited.items())),
    )


def _roles(workers: Sequence[ProcessSpans], times: Sequence[Interval]) -> list[RoleWork]:
    """Every role but the controller; incarnations of a restarted process are joined."""
    members: dict[tuple[str, int | None], list[Interval]] = {}
    for process in workers:
        mine = members.setdefault((process.role, process.index), [])
        mine += [span.interval for span in process.spans]
    busy = {who: overlap(union(mine), times) for who, mine in members.items()}
    return [_role(role, busy, list(times)) for role in sorted({role for role, _ in members})]


def _role(
    role: str, busy: Mapping[tuple[str, int | None], list[Interval]], times: list[Interval]
) -> RoleWork:
    mine = [who for who in busy if who[0] == role]
    waited: dict[str, float] = {}
    for who in mine:
        idle = without(times, busy[who])
        rest = {other: spans for other, spans in busy.items() if other != who}
        for name in sorted({other for other, _ in rest}):
            theirs = union(one for o, spans in rest.items() if o[0] == name for one in spans)
            waited[name] = waited.get(name, 0.0) + seconds(overlap(idle, theirs)) / len(mine)
        anyone = union(one for spans in rest.values() for one in spans)
        alone = seconds(without(idle, anyone)) / len(mine)
        waited[CONTROLLER] = waited.get(CONTROLLER, 0.0) + alone
    whole = seconds(times)
    spent = sum(seconds(busy[who]) for who in mine) / len(mine)
    return RoleWork(
        role=role,
        processes=len(mine),
        busy=spent / whole if whole > 0 else 0.0,
        idle_s=whole - spent,
        waited_s=waited,
    )


def _gaps(
    workers: Sequence[ProcessSpans], phases: Sequence[TimedSpan], times: Sequence[Interval]
) -> list[Gap]:
    """The longest intervals without a busy worker; in a single process, outside of all phases."""
    spans = [span for process in workers for span in process.spans] or list(phases)
    idle = without(times, union(span.interval for span in spans))
    longest = sorted(idle, key=lambda one: one[0] - one[1])[:_GAPS]
    begin = times[0][0]
    return [_gap((start, end), phases, begin) for start, end in sorted(longest)]


def _gap(idle: Interval, phases: Sequence[TimedSpan], begin: float) -> Gap:
    """A gap, with the phase that covers the most of it."""
    start, end = idle
    shares = [(seconds(overlap([span.interval], [idle])), span) for span in phases]
    share, most = max(shares, key=lambda pair: pair[0], default=(0.0, None))
    if most is None or share < (end - start) / 2:
        during, step = "between phases", None
    else:
        during, step = most.name, most.step
    return Gap(start_s=start - begin, seconds=end - start, during=during, step=step)


# Export as a Chrome trace, for Perfetto.

_SLACK_S = 1e-5
"""Rounding: a nested span may end so much after the enclosing one."""
_WAITS, _WORK = "waiting", "work"


def trace_of(processes: Sequence[ProcessSpans]) -> dict[str, Any]:
    """All processes in one trace; its time begins with the first span."""
    begin = min((p.spans[0].start for p in processes if p.spans), default=0.0)
    events: list[dict[str, Any]] = []
    for number, process in enumerate(processes, 1):
        events += _process_events(number, process, begin)
    errors = [p.clock_error_s for p in processes if p.clock_error_s is not None]
    known = {"began": begin, "clock_error_s": max(errors, default=0.0)}
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": known}


def _process_events(number: int, process: ProcessSpans, begin: float) -> list[dict[str, Any]]:
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


def _threads(process: ProcessSpans) -> list[tuple[str, list[TimedSpan]]]:
    """Spans by thread; waits may overlap other spans and get rows of their own.

    The first thread that occurs is the main thread.
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
    """Assign spans to few rows, so that spans in a row are disjoint or nested."""
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
    number: int, row: int, span: TimedSpan, process: ProcessSpans, begin: float
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
