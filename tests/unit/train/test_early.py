"""The next step is asked for early only where nothing comes between, and it is the same step."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from luyen.data.samplers import AdaptiveSampler
from luyen.runtime.generation import LazyRollouts
from luyen.train.loop import confirm_prefetch, prefetch_next_step
from luyen.train.rollouts import BatchSlot, OrderedScheduler, RolloutHandle
from luyen.train.run import weights_hash


class Held:
    """What the roles hold."""

    def weights(self) -> dict[str, str]:
        return {"actor/w": "float32 [1] 07"}

    def moments(self) -> dict[str, str]:
        raise AssertionError("nobody waits for moments")


class Adaptive:
    """A sampler that looks at what was learned."""

    state = (0,)

    def take(self, cursor: int, count: int) -> list[int]:
        return list(range(cursor, cursor + count))

    def record(self, cursor: int, success: float) -> None:
        del cursor, success


class Asking:
    """Asks for rows two at a time, and writes down when it does and when their work begins."""

    batch = 2

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.cursor = 0

    def next_rows(self, count: int) -> tuple[int, ...]:
        self.cursor += count
        return tuple(range(self.cursor - count, self.cursor))

    def open_journal(self, step: int, kind: str, origin: Any) -> Any:
        return {"step": step, "kind": kind, "origin": origin}

    def begin_journal(self, journal: Any, step: int, kind: str, origin: Any) -> None:
        assert journal == {"step": step, "kind": kind, "origin": None}
        self.log.append(("begun", step, origin))

    def submit(self, slot: BatchSlot, journal: Any) -> RolloutHandle:
        self.log.append(("asked", slot.step, slot.version, slot.rows, journal["origin"]))
        return RolloutHandle(
            slot=slot, sampled=LazyRollouts(lambda: []), greedy=None, journal=journal
        )


def run_of(**changes: Any) -> Any:
    """A run of ten steps that has done three and learns the fourth."""
    given = {
        "elsewhere": True,
        "staleness": 0,
        "interrupted": False,
        "due": 0,
        "step": 3,
        "sampler": None,
        "work": False,
    } | changes
    submitter: Any = Asking()
    scheduler = OrderedScheduler(submitter, staleness=given["staleness"])
    scheduler.restore(given["step"] + 1, ())
    return SimpleNamespace(
        step=given["step"],
        version=3,
        last_step=10,
        chain="c",
        log=submitter.log,
        config=SimpleNamespace(
            trainer=SimpleNamespace(max_staleness=given["staleness"], test_freq=5, save_freq=0)
        ),
        roles=SimpleNamespace(generates_remotely=given["elsewhere"]),
        interruption=SimpleNamespace(is_wanted=given["interrupted"]),
        data=SimpleNamespace(sampler=given["sampler"]),
        phase=nullcontext,
        recorder=SimpleNamespace(
            journals=SimpleNamespace(has=lambda step, kind: given["work"] and step == 5)
        ),
        is_due_after=lambda step, every: every > 0 and step == given["due"],
        scheduler=scheduler,
    )


def test_the_next_step_is_asked_for_with_the_weights_that_will_be_learned():
    run = run_of()
    prefetch_next_step(run)
    assert run.log == [("asked", 5, 4, (0, 1), None)]
    assert run.scheduler.has_unconfirmed
    confirm_prefetch(run, Held())
    origin = "c", weights_hash(Held())
    assert run.log[1:] == [("begun", 5, origin)]
    assert not run.scheduler.has_unconfirmed
    [handle] = run.scheduler.outstanding
    assert handle.slot.origin == origin
    run.scheduler.submit_up_to(5, version=4, origin=origin)
    assert len(run.log) == 2, "it was asked for"
    assert run.scheduler.take(5) is handle


def test_work_of_an_earlier_process_is_looked_at_before_anything_is_asked():
    run = run_of(work=True)
    prefetch_next_step(run)
    assert run.log == []
    confirm_prefetch(run, Held())
    origin = "c", weights_hash(Held())
    assert run.log == [("asked", 5, 4, (0, 1), origin)], "its journal has begun"
    [handle] = run.scheduler.outstanding
    assert handle.slot.origin == origin


def test_what_was_asked_for_gets_its_origin_although_somebody_interrupts():
    run = run_of()
    prefetch_next_step(run)
    run.interruption.is_wanted = True
    confirm_prefetch(run, Held())
    assert not run.scheduler.has_unconfirmed


@pytest.mark.parametrize(
    "change",
    [
        {"elsewhere": False},
        {"staleness": 1},
        {"interrupted": True},
        {"due": 4},
        {"step": 9},
        {"sampler": Adaptive()},
    ],
    ids=lambda change: next(iter(change)),
)
def test_it_is_not_asked_for_where_something_comes_between(change: dict[str, Any]):
    run = run_of(**change)
    prefetch_next_step(run)
    confirm_prefetch(run, Held())
    assert (run.log, run.scheduler.outstanding) == ([], ())


def test_what_is_in_progress_is_kept_as_rows_that_are_drawn_anew():
    slot = BatchSlot(step=5, first=0, rows=(1, 2), version=4, origin=("c", None))
    handle = RolloutHandle(slot=slot, sampled=LazyRollouts(lambda: []), greedy=None, journal=None)
    assert handle.snapshot() == {**slot.as_json(), "drawn": None}
    assert not handle.needs_other_weights(4), "the weights of the checkpoint draw the same"
    assert handle.needs_other_weights(5)
    handle.sampled.result()
    assert handle.snapshot() == handle.as_json()
    assert not handle.needs_other_weights(5)


def test_the_sampler_of_this_test_is_one_that_adapts():
    assert isinstance(Adaptive(), AdaptiveSampler)
