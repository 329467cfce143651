"""The pace of requests, the pauses between retries, and the cache of scores."""

import asyncio
import sqlite3
import subprocess
import sys
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.base.rundir import DamagedRecord
from luyen.rewards.cache import CachedExecutor, ScoreCache, content_hash
from luyen.rewards.calls import ScoreCall, ScoreOutcome, ScoringCounters
from luyen.rewards.llm_judge.judge_reward import ConcurrencyLimit, RateLimit, wait_before
from luyen.rewards.rules.rule import rule_rewards
from tests.unit.rewards.builders import answer, prompt


@given(st.integers(1, 600), st.lists(st.floats(0, 30), min_size=1, max_size=60))
def test_no_minute_holds_more_starts_than_allowed(per_minute, gaps):
    now = [0.0]
    pace = RateLimit(per_minute=per_minute, now=lambda: now[0])
    starts: list[float] = []
    for gap in gaps:
        now[0] += gap
        wait = pace.reserve()
        assert wait >= 0
        starts.append(now[0] + wait)
    assert starts == sorted(starts)
    for first in starts:
        inside = [at for at in starts if first <= at < first + 60.0 - 1e-6]
        assert len(inside) <= per_minute


@given(st.integers(1, 100))
def test_whoever_comes_rarely_never_waits(per_minute):
    now = [0.0]
    pace = RateLimit(per_minute=per_minute, now=lambda: now[0])
    for _ in range(5):
        assert pace.reserve() == 0.0
        now[0] += 60.0 / per_minute + 1e-6


def test_a_pause_holds_everybody_and_no_longer():
    now = [100.0]
    pace = RateLimit(per_minute=None, now=lambda: now[0])
    pace.pause(5.0)
    pace.pause(2.0)
    assert (pace.reserve(), pace.reserve()) == (5.0, 5.0)
    now[0] = 106.0
    assert pace.reserve() == 0.0


def test_waits_grow_and_end_and_a_server_is_heard_up_to_a_limit():
    assert [wait_before(n) for n in range(1, 9)] == [0.5, 1, 2, 4, 8, 16, 30, 30]
    assert wait_before(4, 1.0) == 4.0
    assert wait_before(1, 3600.0) == 30.0


def test_a_room_has_a_place_for_every_event_loop():
    room = ConcurrencyLimit(2)

    async def here() -> int:
        async with room.here(), room.here():
            return room.here()._value  # type: ignore[attr-defined]

    assert [asyncio.run(here()) for _ in range(3)] == [0, 0, 0]


def test_threads_count_together():
    counts = ScoringCounters()
    threads = [
        threading.Thread(target=lambda: [counts.add("x") for _ in range(1000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counts.take() == {"x": 4000.0}


class Once:
    """An executor that notes what it was asked."""

    def __init__(self, *outcomes: ScoreOutcome) -> None:
        self.outcomes, self.asked = list(outcomes), list[ScoreCall]()

    async def run(self, calls):
        self.asked += calls
        return [self.outcomes.pop(0) for _ in calls]


def call(rule: str, text: str, **hparams) -> ScoreCall:
    arguments = {"prompt": prompt("1/2", extra=[1, {"a": 2}]), "answer": answer(text), **hparams}
    return ScoreCall(name=rule, source=None, rule=True, arguments=arguments)


def test_a_deterministic_rule_is_asked_once_for_the_same_thing(tmp_path):
    counts = ScoringCounters()
    cache = ScoreCache(tmp_path / "new" / "scores.sqlite", counts=counts)
    found = [ScoreOutcome(numbers={"score": x}, seconds=1.0) for x in (0.25, 0.5, 0.75, 1.0)]
    inner = Once(*found, ScoreOutcome(error="late"), ScoreOutcome(error="late"))
    remembering = CachedExecutor(inner, cache)

    def run(*calls: ScoreCall) -> list[float | None]:
        outcomes = asyncio.run(remembering.run(calls))
        return [o.numbers["score"] if o.numbers else None for o in outcomes]

    assert rule_rewards.facts("math").get("deterministic")
    assert run(call("math", "a"), call("math", "b")) == [0.25, 0.5]
    assert run(call("math", "b"), call("math", "c"), call("math", "a")) == [0.5, 0.75, 0.25]
    assert run(call("math", "a", float_rounding=2)) == [1.0]
    assert run(call("math", "d")) == [None]
    assert run(call("math", "d")) == [None]
    assert len(inner.asked) == 6
    assert counts.take() == {"judging/cache_hits": 2.0, "judging/cache_misses": 6.0}


def test_other_rules_are_asked_each_time():
    inner = Once(*[ScoreOutcome(numbers={"score": 1.0})] * 2)
    counts = ScoringCounters()
    remembering = CachedExecutor(inner, ScoreCache(None, counts=counts))
    for _ in range(2):
        asyncio.run(remembering.run([call("tool_cost", "a")]))
    assert len(inner.asked) == 2
    assert counts.take() == {}


def test_what_a_killed_process_kept_is_there(tmp_path):
    path = tmp_path / "scores.sqlite"
    code = f"""
import os, pathlib
from luyen.rewards.cache import ScoreCache
from luyen.rewards.calls import ScoringCounters
cache = ScoreCache(pathlib.Path({str(path)!r}), counts=ScoringCounters())
cache.keep("a", {{"value": 0.5}})
os.kill(os.getpid(), 9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    cache = ScoreCache(path, counts=ScoringCounters())
    assert cache.find("a") == {"value": 0.5}
    cache.close()


def test_two_runs_share_a_file_at_the_same_time(tmp_path):
    path = tmp_path / "scores.sqlite"
    one, two = (ScoreCache(path, counts=ScoringCounters()) for _ in range(2))
    one.keep("a", {"value": 1.0})
    two.keep("a", {"value": 0.0})
    two.keep("b", {"value": 2.0})
    assert [cache.find(key) for cache in (one, two) for key in "ab"] == [
        {"value": 1.0},
        {"value": 2.0},
    ] * 2
    one.close()
    two.close()
    two.close()


def test_a_file_that_is_no_cache_is_refused_and_left_alone(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "1+1"}\n' * 100)
    with pytest.raises(UserError, match="cannot be used: file is not a database"):
        ScoreCache(path, counts=ScoringCounters())
    assert path.read_text() == '{"prompt": "1+1"}\n' * 100


@given(st.recursive(st.none() | st.integers() | st.text(), lambda x: st.lists(x, max_size=3)))
def test_equal_content_has_equal_hashes_and_other_content_another(value):
    assert content_hash(value, {"a": 1, "b": value}) == content_hash(value, {"b": value, "a": 1})
    assert content_hash(value) != content_hash([value])
    assert content_hash(value, 1) != content_hash(value, 2)


DAMAGES = {
    "another value": "UPDATE sealed SET body = replace(body, '0.5', '7.0') WHERE key = 'a'",
    "another key": "UPDATE sealed SET key = 'a' WHERE key = 'b'",
    "no JSON": "UPDATE sealed SET body = 'x' WHERE key = 'a'",
    "nothing": "UPDATE sealed SET body = NULL WHERE key = 'a'",
    "a number": "UPDATE sealed SET body = 7 WHERE key = 'a'",
    "no text": "UPDATE sealed SET body = CAST(x'ff00fe' AS TEXT) WHERE key = 'a'",
    "no seal": "UPDATE sealed SET seal = NULL WHERE key = 'a'",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_changed_entry_is_computed_anew_and_noted(tmp_path, damage):
    path, counts = tmp_path / "scores.sqlite", ScoringCounters()
    cache = ScoreCache(path, counts=counts)
    if damage != "another key":
        cache.keep("a", {"value": 0.5})
    cache.keep("b", {"value": 0.25})
    cache.close()
    with sqlite3.connect(path) as table:
        assert table.execute(DAMAGES[damage]).rowcount == 1
    table.close()
    cache = ScoreCache(path, counts=counts)
    with pytest.warns(DamagedRecord, match="the entry a is not as it was written"):
        assert cache.find("a") is None
    cache.keep("a", {"value": 1.0})
    assert cache.find("a") == {"value": 1.0}
    assert counts.take()["judging/cache_damaged"] == 1.0
    cache.close()


def test_a_score_that_stands_for_an_answer_nobody_could_judge_is_not_kept(tmp_path):
    cache = ScoreCache(tmp_path / "scores.sqlite", counts=ScoringCounters())
    inner = Once(*[ScoreOutcome(numbers={"score": 0.0}, is_stand_in=True)] * 2)
    for _ in range(2):
        asyncio.run(CachedExecutor(inner, cache).run([call("math", "a")]))
    assert len(inner.asked) == 2
    cache.close()
