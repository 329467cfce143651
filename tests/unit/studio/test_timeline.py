"""One timeline over all processes: spans merged, waits found, gaps named."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from luyen.base.errors import UserError
from luyen.base.files import json_line
from luyen.base.rundir import RunDirectory
from luyen.cli.main import app
from luyen.studio.timeline import (
    SpanLines,
    TimedSpan,
    inside,
    overlap,
    parse_steps,
    read_processes,
    seconds,
    union,
    windows,
    without,
)
from luyen.studio.timeline_summary import lanes, summarise, trace_of

Line = tuple[str, float, float, int | None]
CONTROLLER: Sequence[Line] = (
    ("generate", 100.0, 4.0, 1),
    ("publish", 100.0, 1.0, 1),
    ("wait for actor", 100.0, 1.0, 1),
    ("wait for rollout", 101.0, 3.0, 1),
    ("score", 104.0, 2.0, 1),
    ("update", 106.0, 4.0, 1),
    ("wait for actor", 106.5, 3.5, 1),
    ("generate", 111.0, 9.0, 2),
)


def write(root: Path, name: str, head: dict[str, Any], spans: Sequence[Line]) -> None:
    lines = [{"span": n, "start": s, "duration_s": d, "step": step} for n, s, d, step in spans]
    (root / "events" / name).write_text("".join(map(json_line, [{"schema": 1, **head}, *lines])))


def member(role: str, index: int) -> dict[str, Any]:
    return {
        "process": role,
        "index": index,
        "pid": 7,
        "node": "ab12cd34",
        "clock_error_s": 0.001 * (index + 1),
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Two ranks and two replicas, of which the second one is the slower."""
    root = tmp_path / "run"
    RunDirectory.create(root, config="{}", provenance={}, manifest={})
    write(root, "controller-5.jsonl", {"process": "controller", "pid": 5}, CONTROLLER)
    for rank in (0, 1):
        spans = [("publish", 100.0, 1.0, 1), ("update_actor", 106.5, 3.5, 1)]
        write(root, f"actor-{rank}.jsonl", member("actor", rank), spans)
    write(root, "rollout-0.jsonl", member("rollout", 0), [("draw", 101.0, 1.0, None)])
    late = [("draw", 101.0, 3.0, None), ("draw", 111.0, 5.0, None)]
    write(root, "rollout-1.jsonl", member("rollout", 1), late)
    return root


def test_processes_have_names_and_the_controller_is_first(run: Path):
    assert [process.name for process in read_processes(run)] == [
        "controller (pid 5)",
        "actor rank 0 (node ab12)",
        "actor rank 1 (node ab12)",
        "rollout replica 0 (node ab12)",
        "rollout replica 1 (node ab12)",
    ]


def test_steps_cut_by_time_so_that_spans_without_a_step_belong_to_one(run: Path):
    processes = read_processes(run)
    times = windows(processes, (1, 1))
    assert times == [(100.0, 110.0)]
    shown = {process.name: len(process.spans) for process in inside(processes, times)}
    assert shown["rollout replica 1 (node ab12)"] == 1
    assert shown["controller (pid 5)"] == len(CONTROLLER) - 1
    with pytest.raises(UserError, match="no spans of steps 8 to 9"):
        windows(processes, (8, 9))


def test_who_worked_and_who_waited_for_whom(run: Path):
    processes = read_processes(run)
    times = windows(processes, (1, 1))
    found = summarise(inside(processes, times), times)
    controller, actor, rollout = found.roles
    assert controller.waited_s == {"actor": 4.5, "rollout": 3.0}
    assert controller.busy == pytest.approx(0.25)
    assert (actor.processes, actor.busy) == (2, pytest.approx(0.45))
    assert actor.waited_s == {"actor": 0.0, "rollout": 3.0, "controller": 2.5}
    assert (rollout.processes, rollout.busy) == (2, pytest.approx(0.2))
    # The first replica is done after 1 s, and the second one draws for 2 s more.
    assert rollout.waited_s == {"actor": 4.5, "rollout": 1.0, "controller": 2.5}
    assert found.phases == {"generate": 4.0, "update": 4.0, "score": 2.0}
    [gap] = found.gaps
    assert (gap.start_s, gap.seconds, gap.during, gap.step) == (4.0, 2.5, "score", 1)
    assert found.clock_error_s == 0.002


def test_a_run_of_one_process_has_phases_and_no_waits(tmp_path: Path):
    RunDirectory.create(tmp_path / "run", config="{}", provenance={}, manifest={})
    spans = [("generate", 10.0, 2.0, 1), ("update", 13.0, 1.0, 1)]
    write(tmp_path / "run", "controller-5.jsonl", {"process": "controller", "pid": 5}, spans)
    processes = read_processes(tmp_path / "run")
    found = summarise(processes, windows(processes, None))
    assert [(role.role, role.busy) for role in found.roles] == [("controller", 1.0)]
    assert [(gap.seconds, gap.during) for gap in found.gaps] == [(1.0, "between phases")]
    assert found.clock_error_s is None


def test_a_session_that_goes_on_has_its_own_time_and_damage_is_passed_over(run: Path):
    second = [("generate", 500.0, 1.0, 2)]
    write(run, "controller-6.jsonl", {"process": "controller", "pid": 6}, second)
    with (run / "events" / "rollout-0.jsonl").open("a") as file:
        file.write('{"span": "draw", "sta\n' + json_line({"schema": 1, **member("rollout", 0)}))
        file.write(json_line({"span": "draw", "start": 500.0, "duration_s": 1.0}))
    processes = read_processes(run)
    assert windows(processes, (2, 2)) == [(111.0, 120.0), (500.0, 501.0)]
    lives = [process for process in processes if process.name.startswith("rollout replica 0")]
    assert [len(process.spans) for process in lives] == [1, 1]
    found = summarise(processes, windows(processes, None))
    assert [role.processes for role in found.roles] == [1, 2, 2]


def test_a_run_without_spans_and_lines_of_later_versions_are_refused(run: Path, tmp_path: Path):
    RunDirectory.create(tmp_path / "empty", config="{}", provenance={}, manifest={})
    with pytest.raises(UserError, match="left no spans"):
        read_processes(tmp_path / "empty")
    write(run, "actor-0.jsonl", {**member("actor", 0), "schema": 99}, [])
    with pytest.raises(UserError, match="version 99"):
        read_processes(run)


def test_the_trace_holds_every_span_once_under_its_process(run: Path):
    processes = read_processes(run)
    trace = json.loads(json.dumps(trace_of(processes)))
    events = trace["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [process.name for process in processes]
    spans = [e for e in events if e["ph"] == "X"]
    assert len(spans) == sum(len(process.spans) for process in processes)
    [update] = [e for e in spans if names[e["pid"]].startswith("actor rank 1") and e["ts"] > 0]
    assert (update["name"], update["ts"], update["dur"]) == ("update_actor", 6.5e6, 3.5e6)
    rows = {(e["pid"], e["tid"]) for e in spans}
    assert rows == {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(1, 10)), max_size=12))
def test_in_a_row_spans_lie_apart_or_one_in_another(pairs: list[tuple[int, int]]):
    spans = [
        TimedSpan(name="x", start=s, end=s + d, step=None, thread=0, facts={}) for s, d in pairs
    ]
    dealt = lanes(spans)
    assert sum(map(len, dealt)) == len(spans)
    for row in dealt:
        for i, one in enumerate(row):
            for other in row[i + 1 :]:
                is_apart = other.start >= one.end or other.end <= one.start
                is_within = one.start <= other.start and other.end <= one.end
                assert is_apart or is_within


INTERVALS = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 9)).map(lambda p: (float(p[0]), float(sum(p)))),
    max_size=8,
)


@given(INTERVALS, INTERVALS)
def test_intervals_are_sets_of_moments(one: list[Any], other: list[Any]):
    def moments(intervals: list[Any]) -> set[int]:
        return {m for start, end in intervals for m in range(int(start), int(end))}

    a, b = union(one), union(other)
    assert (moments(a), seconds(a)) == (moments(one), len(moments(one)))
    assert moments(overlap(a, b)) == moments(one) & moments(other)
    assert moments(without(a, b)) == moments(one) - moments(other)


@pytest.mark.parametrize("words", ["", "0", "5-3", "a-b", "3-", "-3"])
def test_steps_are_a_number_or_two(words: str):
    with pytest.raises(UserError, match="--steps"):
        parse_steps(words)


def test_the_command_writes_a_trace_and_prints_figures(run: Path, tmp_path: Path):
    out = tmp_path / "trace.json"
    said = CliRunner().invoke(app, ["timeline", str(run), "--steps", "1", "-o", str(out)])
    assert said.exit_code == 0, said.output
    assert "step 1, 10 s" in said.output
    assert "rollout              2     20%        8 s   actor 4.5 s, rollout 1 s" in said.output
    assert json.loads(out.read_text())["traceEvents"]
    told = CliRunner().invoke(app, ["timeline", str(run), "--json"])
    page = json.loads(told.output)
    assert (page["steps"], page["trace"]) == ([1, 2], str(run / "timeline.json"))
    assert (run / "timeline.json").is_file()


@pytest.mark.parametrize("odd", [None, "x", [], {}, 1.5, "9" * 5000, 10**400])
def test_odd_values_in_a_file_of_spans_are_left_out(odd: Any, tmp_path: Path):
    lines = SpanLines(tmp_path / "a.jsonl")
    head = {"process": odd, "index": odd, "pid": odd, "node": odd, "clock_error_s": odd}
    span = {"span": odd, "start": 1.0, "duration_s": 1.0, "step": odd, "thread": odd}
    for line in ({"schema": 1, **head}, span, {**span, "start": odd}, {**span, "step": 3}):
        lines.add(json.dumps(line).encode())
    [process] = lines.processes()
    assert str(process)
    assert {type(one.step) for one in process.spans} <= {int, type(None)}
    assert 3 in {one.step for one in process.spans}
