"""What processes report becomes numbers of a step and lines in the controller's time."""

from pathlib import Path

import pytest

from luyen.base.files import read_lines
from luyen.runtime.monitoring import GIB, RoleMonitor
from luyen.telemetry.spans import SpanLog, Waits
from luyen.telemetry.worker_spans import FinishedSpan, ProcessReport
from tests.unit.telemetry.test_own_work import Hands


def report(
    *spans: tuple[str, float, float],
    pid: int = 1,
    busy_s: float = 0.0,
    memory_gb: float = 1.0,
    came: float = 0.0,
    device_gb: float | None = None,
) -> ProcessReport:
    """A report of a process whose clock is as far ahead as `came` says."""
    return ProcessReport(
        pid=pid,
        node="ab12cd",
        came=came,
        answered=came,
        spans=tuple(FinishedSpan(name=n, start=s, duration_s=d, facts={}) for n, s, d in spans),
        lost=0,
        busy_s=busy_s,
        memory_bytes=int(memory_gb * GIB),
        device_bytes=None if device_gb is None else int(device_gb * GIB),
    )


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def spans() -> SpanLog:
    return SpanLog()


@pytest.fixture
def watch(spans: SpanLog, hands: Hands) -> RoleMonitor:
    return RoleMonitor(spans=spans, waits=Waits(spans, clock=hands), counter=hands)


def test_busy_and_idle_are_means_over_the_processes_of_a_role(watch: RoleMonitor, hands: Hands):
    watch.heard("actor", 0, report(busy_s=5.0), sent=0.0, back=0.0)
    watch.restart()
    hands.now += 10.0
    watch.heard("actor", 0, report(busy_s=13.0, memory_gb=2.0), sent=0.0, back=0.0)
    watch.heard("actor", 1, report(pid=2, busy_s=4.0, device_gb=3.0), sent=0.0, back=0.0)
    assert watch.numbers() == {
        "role/actor/busy": 0.6,
        "role/actor/memory_gb": 2.0,
        "role/actor/device_gb": 3.0,
        "wait/actor_idle": 4.0,
        "wait/controller_on_actor": 0.0,
    }
    hands.now += 10.0
    assert watch.numbers()["role/actor/busy"] == 0.0, "a step is counted once"


def test_a_process_that_was_begun_again_counts_once(watch: RoleMonitor, hands: Hands):
    hands.now += 10.0
    watch.heard("rollout", 0, report(pid=1, busy_s=3.0, memory_gb=4.0), sent=0.0, back=0.0)
    watch.heard("rollout", 0, report(pid=2, busy_s=2.0), sent=0.0, back=0.0)
    found = watch.numbers()
    assert (found["role/rollout/busy"], found["role/rollout/memory_gb"]) == (0.5, 4.0)
    assert watch.numbers()["role/rollout/memory_gb"] == 1.0, "the first life is over"


def test_publications_are_told_with_their_time_and_bytes(watch: RoleMonitor):
    assert "time/publish" not in watch.numbers()
    watch.published(version=1, size=100, parameters=7, seconds=0.5)
    watch.published(version=2, size=100, parameters=7, seconds=0.25)
    found = watch.numbers()
    assert (found["time/publish"], found["publish/bytes"]) == (0.75, 200.0)
    assert found["publish/parameters"] == 7.0
    assert "publish/bytes" not in watch.numbers()


def test_lines_are_in_the_controllers_time_with_the_bound_of_their_error(
    watch: RoleMonitor, spans: SpanLog, tmp_path: Path
):
    spans.open(tmp_path, process="controller")
    # Its clock is 500 s ahead; the ways took 0.2 s together.
    sent = report(("update_actor", 600.0, 2.0), came=603.1)
    watch.heard("actor", 1, sent, sent=103.0, back=103.2)
    watch.numbers()
    watch.heard("actor", 1, report(("write", 610.0, 1.0), came=611.1), sent=111.0, back=111.2)
    watch.heard("actor", 1, report(("join", 700.0, 1.0), pid=9, came=701.1), sent=201.0, back=201.2)
    watch.write()
    spans.close()
    lines = read_lines(tmp_path / "actor-1.jsonl")
    heads = [line for line in lines if "schema" in line]
    assert [(one["pid"], one["process"], one["index"]) for one in heads] == [
        (1, "actor", 1),
        (9, "actor", 1),
    ]
    assert heads[0]["clock_error_s"] == pytest.approx(0.1, abs=2e-6)
    found = [(one["span"], one["start"]) for one in lines if "span" in one]
    assert found == [("update_actor", 100.0), ("write", 110.0), ("join", 200.0)]


def test_a_disk_that_takes_no_spans_ends_their_writing_and_nothing_else(
    watch: RoleMonitor, spans: SpanLog, tmp_path: Path
):
    spans.open(tmp_path, process="controller")
    (tmp_path / "actor-0.jsonl").mkdir()
    watch.heard("actor", 0, report(("join", 1.0, 1.0)), sent=0.0, back=0.0)
    with pytest.warns(UserWarning, match="no more spans"):
        assert "role/actor/busy" in watch.numbers()
    watch.heard("actor", 0, report(("load", 2.0, 1.0)), sent=0.0, back=0.0)
    assert "role/actor/busy" in watch.numbers()
    spans.close()


def test_without_a_folder_nothing_is_kept(watch: RoleMonitor, spans: SpanLog, tmp_path: Path):
    watch.heard("actor", 0, report(("join", 1.0, 1.0)), sent=0.0, back=0.0)
    watch.write()
    spans.open(tmp_path, process="controller")
    watch.write()
    spans.close()
    assert not (tmp_path / "actor-0.jsonl").exists()
