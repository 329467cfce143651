"""Waits are summed by role for the thread that waits, and close ones are one span."""

import threading
from pathlib import Path

from luyen.base.files import read_lines
from luyen.telemetry.spans import SpanLog, Waits
from tests.unit.telemetry.test_own_work import Hands


def wait(waits: Waits, hands: Hands, role: str, seconds: float) -> None:
    with waits.waiting_for(role):
        hands.now += seconds


def test_waits_are_summed_by_role_and_told_once():
    hands = Hands()
    waits = Waits(SpanLog(), clock=hands)
    for role, seconds in (("actor", 1.0), ("rollout", 2.0), ("actor", 4.0)):
        wait(waits, hands, role, seconds)
    assert waits.drain() == {"actor": 5.0, "rollout": 2.0}
    assert waits.drain() == {}


def test_another_thread_does_not_hold_the_loop_up():
    hands = Hands()
    waits = Waits(SpanLog(), clock=hands)
    beside = threading.Thread(target=wait, args=(waits, hands, "rollout", 3.0))
    beside.start()
    beside.join()
    assert waits.drain() == {}


def test_close_waits_of_a_step_are_one_span_that_is_in_no_sum(tmp_path: Path):
    hands, spans = Hands(), SpanLog()
    waits = Waits(spans, clock=hands)
    path = spans.open(tmp_path, process="controller")
    with spans.span("generate", step=2):
        for _ in range(3):
            wait(waits, hands, "rollout", 0.5)
            hands.now += 0.01
        hands.now += 1.0
        wait(waits, hands, "rollout", 0.25)
    waits.drain()
    spans.close()
    found = [line for line in read_lines(path) if line.get("span") == "wait for rollout"]
    assert [(one["start"], one["duration_s"], one["waited_s"]) for one in found] == [
        (1000.0, 1.52, 1.5),
        (1002.53, 0.25, 0.25),
    ]
    assert {one["step"] for one in found} == {2}
    assert spans.drain(2).keys() == {"time/generate"}
