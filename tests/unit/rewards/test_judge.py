"""Judges over HTTP: a real server that answers well, badly, late and not at all."""

import asyncio
import socket
from collections.abc import Iterator
from time import monotonic
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.base.records import Score
from luyen.config.schema.reward import JudgeConfig
from luyen.rewards.cache import ScoreCache
from luyen.rewards.calls import InlineExecutor, ScoringCounters
from luyen.rewards.llm_judge import judge_reward
from luyen.rewards.llm_judge.judge_reward import JudgeFactory
from luyen.rewards.pool import ScoringPool
from tests.unit.rewards.builders import prompt, rollout
from tests.unit.rewards.judge_server import JudgeServer, judge_server


@pytest.fixture(scope="module")
def shared() -> Iterator[JudgeServer]:
    with judge_server() as server:
        yield server


@pytest.fixture
def server(shared: JudgeServer) -> JudgeServer:
    shared.asked.clear()
    return shared


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(judge_reward, "FIRST_WAIT_S", 0.001)


def judge(url: str, **keys: Any) -> JudgeConfig:
    given = {"prompt": "{answer}", "scale": [0, 10], "timeout_s": 5.0, "retries": 0} | keys
    return JudgeConfig.model_validate({"base_url": url, **given})


def ask(
    block: JudgeConfig,
    *texts: str,
    counts: ScoringCounters | None = None,
    cache: ScoreCache | None = None,
    own: Any = None,
) -> list[Score]:
    executor = InlineExecutor(timeout_s=1.0)
    judges = JudgeFactory(
        own=own, executor=executor, cache=cache, counts=counts or ScoringCounters()
    )
    rollouts = [rollout(text, sample=i) for i, text in enumerate(texts)]
    return asyncio.run(judges.judge(block)(prompt(), rollouts))


def test_a_judge_is_asked_about_every_answer_as_the_block_says(server, monkeypatch):
    monkeypatch.setenv("JUDGE_KEY", "secret-1")
    block = judge(
        server.url("good"),
        model="wise",
        system="Be fair.",
        prompt="Q: {question} T: {ground_truth} A: {answer} {other}",
        api_key_env="JUDGE_KEY",
        temperature=0.5,
        max_tokens=9,
    )
    found = ask(block, "good good good", "bad {ground_truth}")
    assert [score.value for score in found] == [0.3, 0.0]
    assert all(score.seconds is not None and score.seconds > 0 for score in found)
    bodies = sorted((body for *_, body in server.asked), key=str)
    assert bodies[0] == {
        "model": "wise",
        "temperature": 0.5,
        "max_tokens": 9,
        "messages": [
            {"role": "system", "content": "Be fair."},
            {"role": "user", "content": "Q: ? T: 12 A: bad {ground_truth} {other}"},
        ],
    }
    assert {path for _, path, *_ in server.asked} == {"/good/v1/chat/completions"}
    assert {headers["Authorization"] for _, _, headers, _ in server.asked} == {"Bearer secret-1"}


def test_a_score_keeps_the_reply_it_was_read_from_also_where_it_has_none(server, tmp_path):
    cache = ScoreCache(tmp_path / "scores.sqlite", counts=ScoringCounters())
    for _ in range(2):  # the second time out of the cache
        [found] = ask(judge(server.url("good")), "good good", cache=cache)
        assert (found.value, found.reply) == (0.2, "Score: 2")
    cache.close()
    [unclear] = ask(judge(server.url("nonsense")), "x")
    assert (unclear.value, unclear.reply) == (None, "The weather is fine.")
    assert ask(judge(server.url("hangup")), "x")[0].reply is None


@pytest.mark.parametrize("way", ["chunked", "unmeasured"])
def test_bodies_in_chunks_and_without_a_length_are_read(server, way):
    assert ask(judge(server.url(way)), "x")[0].value == 0.7


FAULTS = {
    "hang": ("timeout", "no reply within 0.5 s"),
    "drip": ("timeout", "no reply within 0.5 s"),
    "hangup": ("connection", "IncompleteReadError"),
    "halfway": ("connection", "IncompleteReadError"),
    "noise": ("connection", "does not speak HTTP"),
    "page": ("not_json", "<html>"),
    "half": ("not_json", "Score: 7"),
    "shape": ("shape", "no choices[0].message"),
    "parts": ("shape", "no text"),
    "empty": ("empty", "the reply is empty"),
    "null": ("empty", "the reply is empty"),
    "cut": ("cut_off", "max_tokens ended the reply"),
    "nonsense": ("unparsable", "no numbers in 'The weather is fine.'"),
    "nan": ("not_finite", "the score is nan"),
    "infinite": ("not_finite", "the score is inf"),
    "beyond": ("out_of_range", "11 does not lie between 0 and 10"),
    "huge": ("too_long", "1048576 are read"),
    "endless": ("too_long", "1048576 are read"),
    "refused": ("http_401", "no such key"),
    "broken": ("http_500", "Internal Server Error"),
    "busy": ("http_429", "slow down"),
    "moved": ("http_302", ""),
}


@pytest.mark.parametrize("way", FAULTS)
def test_each_way_to_fail_is_a_fault_with_a_name_and_no_score(server, way):
    kind, detail = FAULTS[way]
    counts = ScoringCounters()
    start = monotonic()
    [found] = ask(judge(server.url(way), timeout_s=0.5), "x", counts=counts)
    assert found.value is None
    assert (found.error or "").startswith(f"judge {kind}: ")
    assert detail in (found.error or "")
    assert counts.take() == {"judging/requests": 1.0, f"judging/faults/{kind}": 1.0}
    assert monotonic() - start < 5


def test_a_port_where_nobody_listens_and_a_name_that_nobody_has_are_faults():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}/v1"
        assert "judge connection: ConnectionRefusedError" in (
            ask(judge(address), "x")[0].error or ""
        )
    error = ask(judge("http://nobody.invalid/v1"), "x")[0].error or ""
    assert error.startswith("judge connection: ")


def test_a_server_without_the_encryption_that_was_asked_for_is_a_fault(server):
    [found] = ask(judge(server.url("good").replace("http:", "https:")), "x")
    assert (found.error or "").startswith("judge connection: SSLError")


def test_one_bad_answer_costs_its_own_score_and_no_other(server):
    texts = ["good", "x", "good good"]
    block = judge(server.url("good"), parse="choice", choices={"1": 1, "2": 2}, scale=None)
    assert [score.value for score in ask(block, *texts)] == [1.0, None, 2.0]


def test_what_may_pass_is_tried_again(server):
    counts = ScoringCounters()
    [found] = ask(judge(server.url("later"), retries=2), "x", counts=counts)
    assert found.value == 0.7
    assert counts.take() == {"judging/requests": 3.0, "judging/retries": 2.0}


@pytest.mark.parametrize(
    ("way", "keys", "requests"),
    [
        ("broken", {"retries": 2}, 3),
        ("page", {"retries": 2}, 3),
        ("refused", {"retries": 2}, 1),
        ("nonsense", {"retries": 2}, 1),
        ("nonsense", {"retries": 2, "temperature": 0.7}, 3),
    ],
)
def test_retries_end_and_what_would_stay_is_not_retried(server, way, keys, requests):
    [found] = ask(judge(server.url(way), **keys), "x")
    assert found.value is None
    assert len(server.asked) == requests


def test_a_reply_without_a_score_is_drawn_again_at_a_temperature(server):
    assert ask(judge(server.url("fickle"), temperature=0.7, retries=1), "x")[0].value == 0.7


def test_a_server_that_asks_for_patience_gets_it(server):
    assert ask(judge(server.url("patient"), retries=1), "x")[0].value == 0.7
    first, second = (at for at, *_ in server.asked)
    assert 0.9 < second - first < 5


def test_a_server_that_asks_for_no_pause_stops_nobody_else(server, monkeypatch):
    monkeypatch.setattr(judge_reward, "FIRST_WAIT_S", 1.0)
    judges = JudgeFactory(
        own=None, executor=InlineExecutor(timeout_s=1.0), cache=None, counts=ScoringCounters()
    )
    busy = judges.judge(judge(server.url("busy"), retries=1))

    async def wait_of_another() -> float:
        late = asyncio.ensure_future(busy(prompt(), [rollout("x")]))
        while not server.asked:
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)
        wait = busy._line.pace.reserve()
        await late
        return wait

    assert asyncio.run(wait_of_another()) == 0.0


def test_no_more_requests_at_once_than_allowed_and_not_fewer():
    running, most = [0], [0]

    async def own(messages: Any, settings: Any) -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.01)
        running[0] -= 1
        return "Score: 1"

    found = ask(judge("engine://", concurrency=3), *["x"] * 12, own=own)
    assert [score.value for score in found] == [0.1] * 12
    assert most == [3]


def test_requests_keep_the_pace_over_all_groups_and_components(server):
    judges = JudgeFactory(
        own=None, executor=InlineExecutor(timeout_s=1.0), cache=None, counts=ScoringCounters()
    )
    block = judge(server.url("good"), requests_per_minute=1200)
    first, second = judges.judge(block), judges.judge(block.model_copy(update={"model": "b"}))

    async def both() -> None:
        await asyncio.gather(*(one(prompt(), [rollout("x")] * 3) for one in (first, second)))

    asyncio.run(both())
    asyncio.run(both())
    times = [at for at, *_ in server.asked]
    assert len(times) == 12
    assert times[-1] - times[0] >= 11 * 0.05 - 0.04


def test_a_known_reply_is_not_asked_for_again_and_faults_are_not_known(server, tmp_path):
    counts = ScoringCounters()
    cache = ScoreCache(tmp_path / "scores.sqlite", counts=counts)
    block = judge(server.url("good"))
    first = ask(block, "good", "good good", counts=counts, cache=cache)
    assert counts.take() == {"judging/requests": 2.0, "judging/cache_misses": 2.0}
    cache.close()
    cache = ScoreCache(tmp_path / "scores.sqlite", counts=counts)
    again = ask(block, "good", "good good", "x", counts=counts, cache=cache)
    assert [s.value for s in again] == [*(s.value for s in first), 0.0]
    assert counts.take() == {
        "judging/requests": 1.0,
        "judging/cache_hits": 2.0,
        "judging/cache_misses": 1.0,
    }
    for _ in range(2):
        ask(judge(server.url("nonsense")), "x", cache=cache)
    assert sum(path.startswith("/nonsense") for _, path, *_ in server.asked) == 2
    counts.take()
    ask(judge(server.url("good"), model="other"), "good", counts=counts, cache=cache)
    assert counts.take() == {"judging/requests": 1.0, "judging/cache_misses": 1.0}
    cache.close()


def test_a_pattern_that_backtracks_for_ever_is_a_fault(server):
    pool = ScoringPool(size=1, timeout_s=0.5)
    judges = JudgeFactory(own=None, executor=pool, cache=None, counts=ScoringCounters())
    bad = judge(server.url("nonsense"), parse="regex", pattern=r"((.|\w|\s)+)+\d")
    good = judge(server.url("good"), parse="regex", pattern=r"Score: (\d+)")
    late = asyncio.run(judges.judge(bad)(prompt(), [rollout("x")]))[0]
    fine = asyncio.run(judges.judge(good)(prompt(), [rollout("good")]))[0]
    pool.close()
    assert late.error == "judge unparsable: pattern: no score within 0.5 s (reward.timeout_s)"
    assert fine.value == 0.1


def test_the_engine_of_the_run_can_judge_and_its_errors_are_faults():
    async def own(messages: Any, settings: Any) -> str:
        if messages[-1]["content"] == "break":
            raise RuntimeError("no room")
        return f"Score: {settings['max_tokens']}"

    found = ask(judge("engine://", max_tokens=4), "x", "break", own=own)
    assert found[0].value == 0.4
    assert (found[1].error or "").startswith("judge engine: RuntimeError: no room")
    with pytest.raises(UserError, match="no rollout engine here"):
        ask(judge("engine://"), "x")


def test_a_key_that_is_not_there_is_said_before_anything_is_asked(monkeypatch):
    monkeypatch.delenv("NO_SUCH_KEY", raising=False)
    with pytest.raises(UserError, match="the environment variable is not set"):
        ask(judge("http://localhost:1/v1", api_key_env="NO_SUCH_KEY"), "x")


def test_what_the_policy_says_is_never_kept(tmp_path):
    says = iter((2, 7))

    async def own(messages: Any, settings: Any) -> str:
        return f"Score: {next(says)}"

    counts = ScoringCounters()
    cache = ScoreCache(tmp_path / "scores.sqlite", counts=counts)
    found = [ask(judge("engine://"), "x", own=own, cache=cache, counts=counts) for _ in range(2)]
    cache.close()
    assert [score.value for [score] in found] == [0.2, 0.7]
    assert counts.take() == {"judging/requests": 2.0}
