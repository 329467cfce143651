"""The thread that owns the engine: progress, refusals, aborts, swaps, its end; without HTTP."""

import queue
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from luyen.rollout.protocol import CacheStats, Request, Sampling
from luyen.serve.failures import ApiFailure
from luyen.serve.model import ServedModel, build_engine, open_model
from luyen.serve.serving_thread import (
    EngineEvent,
    Finished,
    Refused,
    SampleProgress,
    ServingThread,
)
from tests.serving import MODEL, SlowEngine


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return open_model(MODEL, name=None, overrides=(), is_trusted=False)


@pytest.fixture
def thread(model: ServedModel) -> Iterator[ServingThread]:
    found = ServingThread(model, lambda m: SlowEngine(build_engine(m), 0.005))
    found.start()
    yield found
    found.stop()
    assert not found.is_alive


def request(id: str = "a/0", *, n: int = 1, tokens: int = 12, prompt: tuple[int, ...] = (20, 21)):
    sampling = Sampling(max_new_tokens=tokens, ignore_stop=True)
    return Request(id=id, tokens=prompt, keys=tuple(range(n)), sampling=sampling)


class Inbox:
    """Collects the events of a listener."""

    def __init__(self) -> None:
        self.arrived: queue.SimpleQueue[EngineEvent] = queue.SimpleQueue()

    def __call__(self, events: Sequence[EngineEvent]) -> None:
        for event in events:
            self.arrived.put(event)

    def until(self, kind: type) -> list[EngineEvent]:
        found = [self.arrived.get(timeout=30)]
        while not isinstance(found[-1], kind):
            found.append(self.arrived.get(timeout=30))
        return found


def test_progress_comes_while_a_sample_runs_and_adds_up_to_its_beginning(thread: ServingThread):
    inbox = Inbox()
    thread.submit([request()], inbox, streams=True)
    *before, last = inbox.until(Finished)
    assert isinstance(last, Finished)
    pieces = [event for event in before if isinstance(event, SampleProgress)]
    assert len(pieces) >= 5
    tokens = [token for piece in pieces for token in piece.tokens]
    logps = [logp for piece in pieces for logp in piece.logps]
    assert tokens == list(last.completion.tokens[: len(tokens)])
    assert logps == list(last.completion.logps[: len(tokens)])
    assert {event.digest for event in (*pieces, last)} == {thread.model.digest}


def test_without_a_stream_only_the_end_is_reported(thread: ServingThread):
    inbox = Inbox()
    thread.submit([request(n=3)], inbox, streams=False)
    found = [inbox.arrived.get(timeout=30) for _ in range(3)]
    assert all(isinstance(event, Finished) for event in found)


def test_a_request_that_cannot_be_served_is_refused_alone(thread: ServingThread):
    bad, good = Inbox(), Inbox()
    thread.submit([request("bad/0", tokens=10_000)], bad, streams=False)
    thread.submit([request("good/0")], good, streams=False)
    [refusal] = bad.until(Refused)
    assert isinstance(refusal, Refused)
    assert refusal.failure.status == 400
    assert good.until(Finished)


def test_an_aborted_request_is_heard_of_no_more(thread: ServingThread):
    inbox = Inbox()
    thread.submit([request(tokens=400)], inbox, streams=True)
    inbox.arrived.get(timeout=30)
    thread.abort(["a/0"])
    assert thread.call(lambda found: found.name).result(30) == MODEL  # the abort is behind it
    while not inbox.arrived.empty():
        inbox.arrived.get()
    time.sleep(0.05)
    assert inbox.arrived.empty()


def test_a_swap_waits_for_what_runs_and_what_comes_waits_for_the_swap(
    thread: ServingThread, model: ServedModel
):
    before, after = Inbox(), Inbox()
    thread.submit([request("old/0", tokens=40)], before, streams=False)
    first = thread.swap(replace(model, digest="fp_new"))
    second = thread.swap(replace(model, digest="fp_newer"))
    thread.submit([request("new/0")], after, streams=False)
    with pytest.raises(ApiFailure) as refused:
        second.result(30)
    assert refused.value.status == 409
    first.result(30)
    [old], [new] = before.until(Finished), after.until(Finished)
    assert isinstance(old, Finished)
    assert isinstance(new, Finished)
    assert (old.digest, new.digest) == (model.digest, "fp_new")


def test_what_is_open_at_the_end_is_refused(model: ServedModel):
    thread = ServingThread(model, lambda m: SlowEngine(build_engine(m), 0.01))
    thread.start()
    inbox = Inbox()
    thread.submit([request(tokens=400)], inbox, streams=True)
    inbox.arrived.get(timeout=30)
    thread.stop()
    last = inbox.until(Refused)[-1]
    assert isinstance(last, Refused)
    assert last.failure.status == 503


def test_a_client_that_leaves_before_its_turn_harms_no_other_request(thread: ServingThread):
    inbox = Inbox()
    thread.submit([request(tokens=60)], inbox, streams=True)
    inbox.arrived.get(timeout=30)
    tasks: list[str] = []
    left = thread.call(lambda found: tasks.append(found.name))
    assert left.cancel()
    assert isinstance(inbox.until(Finished)[-1], Finished)
    assert tasks == []


def test_a_swap_that_was_given_up_changes_nothing(thread: ServingThread, model: ServedModel):
    inbox = Inbox()
    thread.submit([request(tokens=60)], inbox, streams=True)
    inbox.arrived.get(timeout=30)
    assert thread.swap(replace(model, digest="fp_new")).cancel()
    assert isinstance(inbox.until(Finished)[-1], Finished)
    thread.submit([request("later/0")], inbox, streams=False)
    later = inbox.until(Finished)[-1]
    assert isinstance(later, Finished)
    assert later.digest == model.digest


def test_what_comes_after_the_end_is_refused_at_once(model: ServedModel):
    thread = ServingThread(model, build_engine)
    thread.start()
    thread.stop()
    inbox = Inbox()
    thread.submit([request()], inbox, streams=False)
    [refusal] = inbox.until(Refused)
    assert isinstance(refusal, Refused)
    assert refusal.failure.status == 503
    for future in (thread.call(lambda found: found.name), thread.swap(model)):
        with pytest.raises(ApiFailure) as failure:
            future.result(5)
        assert failure.value.status == 503


def test_an_engine_that_cannot_be_built_is_an_error_of_the_start(model: ServedModel):
    def broken(_: ServedModel):
        raise ValueError("no memory")

    thread = ServingThread(model, broken)
    with pytest.raises(ValueError, match="no memory"):
        thread.start()
    thread.stop()


def test_counters_of_a_cache_are_read_where_the_engine_has_one(model: ServedModel):
    class Caching(SlowEngine):
        def drop_prefixes(self) -> None:
            """Nothing is kept."""

        def cache_stats(self) -> CacheStats:
            return CacheStats(tokens=7)

    thread = ServingThread(model, lambda m: Caching(build_engine(m), 0.0))
    thread.start()
    assert thread.cache_counts()["tokens"] == 7
    thread.stop()
