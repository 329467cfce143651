"""Signs of life: who may be silent for how long, and who may look."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from luyen.base.heartbeat import HEART
from luyen.config.schema.trainer import TimeoutsConfig

pytest.importorskip("ray", reason="the extra `ray` is not installed")
FACE_TO_FACE_S = 0.3


class Answers:
    """In place of Ray: every question is answered at once, unless nobody is there."""

    def __init__(self) -> None:
        self.are_there = True
        self.meeting = threading.Barrier(2)

    def wait(self, asked: Sequence[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        """Two that look at the same time meet here, if they can."""
        try:
            self.meeting.wait(FACE_TO_FACE_S)
        except threading.BrokenBarrierError:
            self.meeting.reset()
        return (list(asked), []) if self.are_there else ([], list(asked))

    def get(self, asked: Any) -> int:
        del asked
        return 1


class Clock:
    """Goes on when it is told to."""

    now = 1000.0


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Answers:
    given = Answers()
    monkeypatch.setattr("luyen.runtime.ray.health.ray", given)
    return given


@pytest.fixture
def clock(answers: Answers, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """One thread looks, and time stands still between its looks."""
    answers.meeting = threading.Barrier(1)
    given = Clock()
    monkeypatch.setattr("luyen.runtime.ray.health.time.monotonic", lambda: given.now)
    return given


def test_two_threads_may_look_at_the_same_time(answers: Answers):
    from luyen.runtime.ray.health import HealthCheck

    del answers
    pulse = HealthCheck([object, object], TimeoutsConfig(start_s=60, silence_s=60))
    with ThreadPoolExecutor(2) as threads:
        looks = [threads.submit(pulse.loss) for _ in range(2)]
        assert [look.result() for look in looks] == [None, None]


def test_silence_counts_only_while_somebody_looks(answers: Answers, clock: Clock):
    from luyen.runtime.ray.health import HealthCheck

    pulse = HealthCheck([object], TimeoutsConfig(start_s=60, silence_s=20))
    assert pulse.loss() is None
    answers.are_there = False
    clock.now += 500
    assert pulse.loss() is None, "nobody looked all the while"
    for _ in range(3):
        clock.now += 7
        lost = pulse.loss()
    assert "no sign of life for 21 s" in str(lost)


def test_whoever_was_not_asked_is_not_silent(answers: Answers, clock: Clock):
    from luyen.runtime.ray.health import HealthCheck

    pulse = HealthCheck([object], TimeoutsConfig(start_s=60, silence_s=5))
    assert pulse.loss() is None
    answers.are_there = False
    clock.now += 9
    assert pulse.loss() is None, "it was asked this moment"
    clock.now += 6
    assert "no sign of life for 6 s" in str(pulse.loss())


def test_what_ranks_do_is_a_beat_of_the_loop_whoever_hears_of_it(answers: Answers):
    from luyen.runtime.ray.health import HealthCheck

    def look() -> None:
        HEART.work_ahead()
        pulse.loss()
        HEART.end_ahead()

    answers.meeting = threading.Barrier(1)
    pulse = HealthCheck([object], TimeoutsConfig(start_s=60, silence_s=60))
    before = HEART.count
    with ThreadPoolExecutor(1) as thread:
        thread.submit(look).result()
    assert HEART.count == before + 1
