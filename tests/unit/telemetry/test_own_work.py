"""What a process keeps of its work until it is asked, and how busy it says it was."""

import threading
import time

import pytest

from luyen.telemetry.worker_spans import WorkerSpans


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def work(hands: Hands) -> WorkerSpans:
    return WorkerSpans(most=3, clock=hands, counter=hands)


def test_spans_are_told_once(work: WorkerSpans, hands: Hands):
    with work.span("update_actor", share=1) as facts:
        hands.now += 2.0
        facts["cpu_s"] = 1.5
    first, second = (work.report(node="a", came=hands.now) for _ in range(2))
    [span] = first.spans
    assert (span.name, span.start, span.duration_s) == ("update_actor", 1000.0, 2.0)
    assert span.facts == {"share": 1, "cpu_s": 1.5}
    assert second.spans == ()
    assert first.busy_s == second.busy_s == 2.0


def test_what_nobody_asks_for_goes_the_oldest_first(work: WorkerSpans):
    for number in range(5):
        with work.span(str(number)):
            pass
    report = work.report(node="a", came=0.0)
    assert [span.name for span in report.spans] == ["2", "3", "4"]
    assert report.lost == 2


def test_overlapping_work_is_counted_once_and_work_in_progress_too(work: WorkerSpans, hands: Hands):
    with work.span("load weights"):
        hands.now += 1.0
        with work.span("confirm weights"):
            hands.now += 2.0
        hands.now += 4.0
        assert work.report(node="a", came=0.0).busy_s == 7.0
    hands.now += 100.0
    assert work.report(node="a", came=0.0).busy_s == 7.0


def test_a_stretch_of_passes_ends_when_nothing_is_left(work: WorkerSpans, hands: Hands):
    for answers, is_idle in ((0, False), (2, False), (1, True)):
        work.begin_pass()
        hands.now += 0.5
        work.end_pass(answers=answers, is_idle=is_idle)
    hands.now += 9.0
    work.end_stretch()
    [span] = work.report(node="a", came=0.0).spans
    assert (span.name, span.duration_s) == ("draw", 1.5)
    assert span.facts == {"passes": 3, "answers": 3}


def test_a_stretch_that_was_aborted_ends_and_a_long_one_is_cut(work: WorkerSpans, hands: Hands):
    work.begin_pass()
    work.end_pass(answers=0, is_idle=False)
    hands.now += 1.0
    work.end_stretch()
    for _ in range(2):
        work.begin_pass()
        hands.now += 3.0
        work.end_pass(answers=0, is_idle=False)
    spans = work.report(node="a", came=0.0).spans
    assert [span.duration_s for span in spans] == [1.0, 6.0]


def test_a_span_that_fails_is_kept(work: WorkerSpans, hands: Hands):
    def fail() -> None:
        with work.span("join"):
            hands.now += 1.0
            raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        fail()
    report = work.report(node="a", came=0.0)
    assert [span.name for span in report.spans] == ["join"]
    assert report.busy_s == 1.0


def test_threads_lose_nothing():
    work = WorkerSpans(most=10_000)

    def many() -> None:
        for _ in range(500):
            with work.span("x"):
                pass

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(work.report(node="a", came=0.0).spans) == 2000


def test_a_kept_span_costs_less_than_a_twentieth_of_a_millisecond():
    """In the best of some rounds: a machine that does other things makes any of them slow."""
    work, count, rounds = WorkerSpans(), 500, list[float]()
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(count):
            with work.span("x"):
                pass
        rounds.append((time.perf_counter() - start) / count)
    assert min(rounds) < 5e-5
