"""A sink that fails, hangs or is slow costs one warning and nothing else."""

import threading
import time
import warnings
from collections.abc import Mapping

import pytest

from luyen.telemetry.rollout_tables import RolloutTable
from luyen.telemetry.sinks import BackgroundSink, SinkFailure


class Kept:
    """Keeps what it is given; fails at one step; waits for leave before the first call."""

    def __init__(self, *, fails_at: int = -1, leave: threading.Event | None = None) -> None:
        self.steps: list[int] = []
        self.tables: list[str] = []
        self.closed = False
        self.threads: set[str] = set()
        self._fails_at = fails_at
        self._leave = leave

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        if self._leave is not None:
            self._leave.wait(5)
        self.threads.add(threading.current_thread().name)
        if step == self._fails_at:
            raise ConnectionError("server away")
        self.steps.append(step)

    def rollouts(self, table: RolloutTable) -> None:
        self.tables.append(table.name)

    def close(self) -> None:
        self.closed = True


def write_and_close(sink: BackgroundSink, steps: int) -> None:
    for step in range(steps):
        sink.write(step, {})
    sink.close()


def test_everything_arrives_in_order_in_another_thread():
    kept = Kept()
    sink = BackgroundSink("demo", lambda: kept)
    for step in range(50):
        sink.write(step, {"a": 1.0})
    sink.rollouts(RolloutTable(name="rollouts/train", step=50, rows=()))
    sink.close()
    assert (kept.steps, kept.tables, kept.closed) == ([*range(50)], ["rollouts/train"], True)
    assert kept.threads == {"sink-demo"}


def test_a_failing_call_warns_once_and_later_calls_arrive():
    kept = Kept(fails_at=1)
    sink = BackgroundSink("demo", lambda: kept)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        write_and_close(sink, 4)
    assert [str(w.message) for w in said] == [
        "sink demo: ConnectionError: server away; training goes on without it"
    ]
    assert kept.steps == [0, 2, 3]


def test_a_sink_that_cannot_be_made_warns_once():
    def make() -> Kept:
        raise PermissionError("no key")

    sink = BackgroundSink("demo", make)
    with pytest.warns(SinkFailure, match="PermissionError: no key") as said:
        write_and_close(sink, 4)
    assert len(said) == 1


def test_a_sink_that_hangs_never_holds_a_step_up():
    leave = threading.Event()
    kept = Kept(leave=leave)
    sink = BackgroundSink("demo", lambda: kept, capacity=3, timeout_s=0.05)
    start = time.perf_counter()
    with pytest.warns(SinkFailure, match="too slow: calls were dropped") as said:
        write_and_close(sink, 100)
    assert time.perf_counter() - start < 1
    assert len(said) == 1
    leave.set()


def test_closing_waits_only_until_the_timeout():
    leave = threading.Event()
    sink = BackgroundSink("demo", lambda: Kept(leave=leave), timeout_s=0.05)
    sink.write(0, {})
    with pytest.warns(SinkFailure, match=r"did not finish within 0\.05 s"):
        sink.close()
    leave.set()
