"""Waiting prompts are collected while many rows run: for how long at most, and never for ever."""

import pytest

from luyen.rollout.native.paged.kv_cache import PagePool
from luyen.rollout.native.paged.scheduler import PagedScheduler, RunningSequence
from luyen.rollout.native.sequences import Row
from luyen.rollout.protocol import Request, Sampling


def rows(name: str, count: int) -> list[Row]:
    sampling = Sampling(max_new_tokens=64)
    keys = tuple(range(count))
    asked = Request(id=name, tokens=(1, 2, 3), keys=keys, sampling=sampling)
    return [Row(asked, i) for i in range(count)]


def busy(running: int, *, most: int = 512) -> PagedScheduler:
    """A scheduler with so many running rows, and none that waits."""
    scheduler = PagedScheduler(PagePool(4096), rows=most, tokens=4096)
    scheduler.running = [RunningSequence(row, [], 4) for row in rows("first", running)]
    return scheduler


def rounds_until_due(scheduler: PagedScheduler) -> int:
    for count in range(100):
        if scheduler.is_admission_due(is_captured=False):
            return count
        scheduler.count_round()
    raise AssertionError("a prompt waits for ever")


@pytest.mark.parametrize(
    ("running", "rounds"), [(0, 0), (31, 0), (32, 1), (255, 7), (256, 8), (511, 8)]
)
def test_a_prompt_waits_for_a_round_for_32_running_rows_and_8_at_most(running: int, rounds: int):
    scheduler = busy(running)
    scheduler.waiting += rows("second", 1)
    assert rounds_until_due(scheduler) == rounds
    [group] = scheduler.admit()
    assert group.rows[0].request.id == "second"


def test_prompts_that_come_later_do_not_hold_back_the_first():
    scheduler = busy(256)
    scheduler.waiting += rows("second", 1)
    for number in range(8):
        assert not scheduler.is_admission_due(is_captured=False)
        scheduler.count_round()
        scheduler.waiting += rows(f"later {number}", 1)
    assert scheduler.is_admission_due(is_captured=False)
    first, *_ = scheduler.admit()
    assert first.rows[0].request.id == "second"
    assert not scheduler.waiting, "those that came meanwhile are read with it"
    scheduler.waiting += rows("last", 1)
    assert rounds_until_due(scheduler) == 8, "and the next is collected anew"


def test_rounds_without_room_do_not_count():
    scheduler = busy(256, most=256)
    scheduler.waiting += rows("second", 1)
    for _ in range(20):
        scheduler.count_round()
    assert not scheduler.is_admission_due(is_captured=False)
    for sequence in scheduler.running[:64]:
        scheduler.end(sequence)
    assert rounds_until_due(scheduler) == 192 // 32


def test_a_request_that_was_given_up_leaves_no_rounds_to_the_next():
    scheduler = busy(64)
    scheduler.waiting += rows("second", 1)
    scheduler.count_round()
    scheduler.waiting.clear()
    scheduler.count_round()
    scheduler.waiting += rows("third", 1)
    assert rounds_until_due(scheduler) == 2


def test_pages_that_are_missing_do_not_begin_the_wait_again():
    scheduler = busy(64)
    scheduler.pool = PagePool(0)
    scheduler.waiting += rows("second", 1)
    assert rounds_until_due(scheduler) == 2
    assert scheduler.admit() == []
    assert scheduler.is_admission_due(is_captured=False), "it is read as soon as there are pages"


def captured_rounds(running: int, prompt: int, waiting: int = 1) -> int:
    """Rounds that prompts of so many tokens wait where passes are captured."""
    scheduler = busy(running)
    for number in range(waiting):
        asked = Request(
            id=f"{number}", tokens=(1,) * prompt, keys=(1, 2), sampling=Sampling(max_new_tokens=4)
        )
        scheduler.waiting += [Row(asked, 0), Row(asked, 1)]
    for count in range(100):
        if scheduler.is_admission_due(is_captured=True):
            return count
        scheduler.count_round()
    raise AssertionError("a prompt waits for ever")


@pytest.mark.parametrize(("running", "rounds"), [(63, 0), (64, 1), (191, 2), (256, 3), (500, 3)])
def test_short_prompts_wait_three_rounds_at_most_where_passes_are_captured(running, rounds):
    assert captured_rounds(running, 100) == rounds


def test_prompts_that_fill_a_captured_pass_do_not_wait():
    assert captured_rounds(256, 1024) == 0
    assert captured_rounds(256, 1023) == 3
    assert captured_rounds(256, 512, waiting=2) == 0
    assert captured_rounds(256, 511, waiting=2) == 3, "samples of a prompt read it once"
