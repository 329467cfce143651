"""A canary: callers are split, scores decide at a stated error rate, and every decision is kept."""

import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.cli.serve import canary_options
from luyen.serve.access import Keyring
from luyen.serve.canary_decision import CanaryLimits, CanaryState, arm_of, caller_key
from luyen.serve.canary_log import CanaryLog
from luyen.serve.canary_service import CanaryOptions, CanaryService, open_canary
from luyen.serve.dispatch import ServeLimits
from luyen.serve.opening import Opening
from luyen.serve.server import Access
from tests.e2e.tiny import random_model
from tests.serving import MODEL, Reply, post_json, send, serving

ADMIN = "an-admin-key-of-24-chars"


def simulate(
    stable: float, candidate: float, source: random.Random, *, most: int, share: float = 0.2
) -> CanaryState:
    """Callers whose scores are coin tosses, a share of them with the candidate."""
    state = CanaryState.begin(CanaryLimits(share=share, max_pairs=most))
    while state.decision is None:
        arm = arm_of(f"user {source.random()}", state.share)
        chance = candidate if arm == "candidate" else stable
        state = state.observe(arm, float(source.random() < chance))
    return state


def outcomes(stable: float, candidate: float, *, runs: int, most: int = 300) -> list[str]:
    source = random.Random(0)
    ends = (simulate(stable, candidate, source, most=most).decision for _ in range(runs))
    return [end.outcome for end in ends if end is not None]


def test_a_better_candidate_is_promoted_and_a_worse_one_rolled_back():
    assert outcomes(0.5, 0.8, runs=40).count("promoted") >= 38
    source = random.Random(1)
    worse = [simulate(0.8, 0.5, source, most=300).decision for _ in range(40)]
    assert all(end is not None and end.outcome == "rolled_back" for end in worse)
    assert sum("it is worse" in end.why for end in worse if end is not None) >= 38


def test_equal_models_are_told_apart_no_more_often_than_stated():
    assert outcomes(0.6, 0.6, runs=60, most=80).count("promoted") <= 3
    source = random.Random(2)
    for share in (0.2, 0.8):
        ends = [simulate(0.6, 0.6, source, most=80, share=share).decision for _ in range(60)]
        assert sum("it is worse" in end.why for end in ends if end is not None) <= 3


@pytest.mark.parametrize(("better", "scores"), [(0.9, 18), (0.7, 55)])
def test_a_promotion_costs_as_many_scores_as_the_docs_say(better: float, scores: int):
    source = random.Random(3)
    ends = [simulate(0.5, better, source, most=10_000, share=0.1) for _ in range(60)]
    found = median(end.scores["candidate"].count for end in ends)
    assert 0.75 * scores <= found <= 1.35 * scores


@given(st.lists(st.tuples(st.booleans(), st.floats(0, 1)), max_size=60))
def test_a_decision_stays_and_every_score_is_counted_until_then(scores: list[tuple[bool, float]]):
    state = CanaryState.begin(CanaryLimits(share=0.5, max_pairs=10))
    for is_candidate, score in scores:
        before = state
        state = state.observe("candidate" if is_candidate else "stable", score)
        if before.decision is not None:
            assert state is before
    counted = sum(arm.count for arm in state.scores.values())
    assert counted == len(scores) or state.decision is not None
    assert state.pairs <= min(arm.count for arm in state.scores.values())
    assert state.decision is not None or min(arm.count for arm in state.recent.values()) == 0
    assert state.share == (
        0.5 if state.decision is None else float(state.decision.outcome[0] == "p")
    )


def test_the_same_caller_gets_the_same_model_and_shares_are_kept():
    keys = [caller_key({"user": str(i)}) for i in range(4000)]
    small = {key for key in keys if arm_of(key, 0.1) == "candidate"}
    large = {key for key in keys if arm_of(key, 0.3) == "candidate"}
    assert small < large
    assert 320 <= len(small) <= 480
    first = {"messages": [{"role": "user", "content": "hi"}]}
    later = {"messages": [*first["messages"], {"role": "assistant", "content": "yes?"}]}
    assert caller_key(first) == caller_key(later)
    # A user that is empty or no text names no caller.
    for user in ("", 7, None, ["a"]):
        assert caller_key({**first, "user": user}) == caller_key(first)


def test_a_pair_is_the_means_of_both_since_the_last_one():
    state = CanaryState.begin(CanaryLimits(share=0.9))
    for score in (1.0, 0.0, 0.5, 0.5):
        state = state.observe("candidate", score)
    assert state.pairs == 0
    state = state.observe("stable", 0.5)
    assert state.pairs == 1
    assert state.better == state.worse, "the means are equal"


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Two models behind a server. Example: see `comparing`."""

    port: int
    """Its port."""
    service: CanaryService
    """What it serves."""

    def post(self, path: str, body: object, **headers: str) -> Reply:
        return post_json(self.port, path, body, **headers)

    def ask(self, user: int, sum: tuple[int, int], **fields: object) -> Reply:
        content = f"{sum[0]}+{sum[1]}="
        messages = [{"role": "user", "content": content}]
        body = {"messages": messages, "user": str(user), "max_tokens": 6, "temperature": 0}
        return self.post("/v1/chat/completions", {**body, **fields})


@contextmanager
def comparing(
    stable: str, candidate: str, log: Path, *, reward_range: tuple[float, float] | None = None
) -> Iterator[Comparison]:
    limits = CanaryLimits(share=0.5, max_pairs=200)
    canary = CanaryOptions(path=candidate, limits=limits, log=log, reward_range=reward_range)
    service = open_canary(stable, Opening(name="sums"), ServeLimits(), canary)
    access = Access(host="127.0.0.1", port=0, admin_keys=Keyring.of((ADMIN,)))
    with serving(service, access) as port:
        yield Comparison(port=port, service=service)


@pytest.fixture(scope="module")
def untrained(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(random_model(tmp_path_factory.mktemp("untrained") / "model"))


def converse(found: Comparison, *, most: int = 120, **fields: object) -> None:
    """Callers ask and vote until there is a decision."""
    for user in range(most):
        a, b = 10 + user % 40, 30 + user % 7
        reply = found.ask(user, (a, b), **fields)
        assert reply.status == 200, reply.raw
        text = reply.body["choices"][0]["message"]["content"] or ""
        vote = {"id": reply.body["id"], "score": float(text.strip() == str(a + b))}
        if "metadata" not in fields:
            assert found.post("/v1/feedback", vote).body["counted"]
        if found.service.state.decision is not None:
            return


@pytest.mark.parametrize("is_better", [True, False], ids=["better", "worse"])
def test_votes_of_callers_decide(untrained: str, is_better: bool, tmp_path: Path):
    pair = (untrained, MODEL) if is_better else (MODEL, untrained)
    log = tmp_path / "canary.jsonl"
    with comparing(*pair, log) as found:
        converse(found)
        decision = found.service.state.decision
        assert decision is not None
        assert decision.outcome == ("promoted" if is_better else "rolled_back")
        # From now on every caller gets the model that is left.
        left = found.service._arms["candidate" if is_better else "stable"].model.digest
        digests = {found.ask(user, (1, 2)).body["system_fingerprint"] for user in range(8)}
        assert digests == {left}
        metrics = found.service.metrics.page().decode()
        assert f"luyen_canary_decision {1.0 if is_better else -1.0}" in metrics
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    assert [line["event"] for line in lines if line["event"] != "score"] == ["begin", "decision"]
    assert lines[-1]["why"] == decision.why


def test_votes_are_counted_once_and_administrators_decide(untrained: str, tmp_path: Path):
    log = tmp_path / "canary.jsonl"
    with comparing(MODEL, untrained, log) as found:
        id = found.ask(0, (1, 2)).body["id"]
        for wrong in ({"id": id}, {"score": 1}, {"id": id, "score": 2}, {"id": 3, "score": 1}):
            assert found.post("/v1/feedback", wrong).status == 400
        assert found.post("/v1/feedback", {"id": "cmpl-x", "score": 1}).status == 404
        assert found.post("/v1/feedback", {"id": id, "score": 1}).status == 200
        assert found.post("/v1/feedback", {"id": id, "score": 1}).status == 404
        assert found.post("/admin/canary", {"action": "promote"}).status == 401
        key = {"Authorization": f"Bearer {ADMIN}"}
        assert found.post("/admin/weights", {"path": MODEL}, **key).status == 409
        assert found.post("/admin/canary", {"action": "sideways"}, **key).status == 400
        late = found.ask(1, (1, 2)).body["id"]
        reply = found.post("/admin/canary", {"action": "roll_back"}, **key)
        assert reply.body["decision"]["outcome"] == "rolled_back"
        assert found.post("/admin/canary", {"action": "promote"}, **key).status == 409
        size = log.stat().st_size
        assert not found.post("/v1/feedback", {"id": late, "score": 1}).body["counted"]
        assert found.post("/v1/feedback", {"id": late, "score": 1}).status == 404
        assert log.stat().st_size == size
    # A server that starts again goes on from its file.
    with comparing(MODEL, untrained, log) as found:
        assert found.service.state.share == 0.0
        assert sum(arm.count for arm in found.service.state.scores.values()) == 1


def test_the_reward_of_the_run_scores_whole_and_streamed_answers(untrained: str, tmp_path: Path):
    with comparing(untrained, MODEL, tmp_path / "c.jsonl", reward_range=(0.0, 1.0)) as found:
        for user in range(120):
            a, b = 10 + user % 40, 30
            metadata = {"data_source": "arithmetic/sum", "ground_truth": str(a + b)}
            reply = found.ask(user, (a, b), metadata=metadata, stream=user % 2 == 0)
            assert reply.status == 200
            if found.service.state.decision is not None:
                break
        decision = found.service.state.decision
        assert decision is not None
        assert decision.outcome == "promoted"
        vote = {"id": "chatcmpl-1", "score": 1.0}
        assert found.post("/v1/feedback", vote).status == 409


def test_a_file_that_is_torn_or_strange(tmp_path: Path):
    path = tmp_path / "canary.jsonl"
    limits = CanaryLimits(share=0.1)
    log = CanaryLog(path, stable="a", candidate="b", limits=limits, source="votes")
    log.resume()
    log.score("1", "stable", 0.5, "vote")
    log.score("2", "candidate", 1.0, "vote")
    path.write_text(path.read_text()[:-9])
    assert log.resume().scores["candidate"].count == 0
    assert log.resume().scores["stable"].count == 1
    for change in ({"candidate": "c"}, {"source": "reward from 0 to 1"}):
        named = {"stable": "a", "candidate": "b", "source": "votes", **change}
        assert CanaryLog(path, limits=limits, **named).resume().scores["stable"].count == 0
    path.write_text('{"event": "beg')
    assert log.resume().pairs == 0
    for line in (
        '{"event": "score", "model": 3}',
        '{"event": "score", "model": "third", "score": 1}',
        '{"event": "score", "model": "stable", "score": NaN}',
        '{"event": "decision", "outcome": "sideways", "why": ""}',
    ):
        path.write_text(line + "\n")
        with pytest.raises(UserError, match="line 1"):
            log.resume()


@pytest.mark.parametrize("text", ["notes of mine", "first\nsecond"])
def test_a_file_of_another_kind_is_left_as_it_is(tmp_path: Path, text: str):
    path = tmp_path / "notes.txt"
    path.write_text(text)
    log = CanaryLog(path, stable="a", candidate="b", limits=CanaryLimits(share=0.1), source="votes")
    with pytest.raises(UserError, match="--canary-log"):
        log.resume()
    assert path.read_text() == text


def test_a_file_that_cannot_be_written_is_an_error_of_the_server(untrained: str, tmp_path: Path):
    log = tmp_path / "canary.jsonl"
    key = {"Authorization": f"Bearer {ADMIN}"}
    with comparing(MODEL, untrained, log) as found:
        id = found.ask(0, (1, 2)).body["id"]
        kept = log.read_text()
        log.unlink()
        log.mkdir()
        for path, body in (
            ("/v1/feedback", {"id": id, "score": 1}),
            ("/admin/canary", {"action": "promote"}),
        ):
            reply = found.post(path, body, **key)
            assert (reply.status, reply.error["code"]) == (500, "canary_log")
            assert str(tmp_path) not in reply.error["message"]
        assert found.service.state == CanaryState.begin(CanaryLimits(share=0.5, max_pairs=200))
        log.rmdir()
        log.write_text(kept)
        assert found.post("/v1/feedback", {"id": id, "score": 1}).body["counted"]


def test_a_candidate_whose_engine_ended_is_rolled_back_at_the_next_request(
    untrained: str, tmp_path: Path
):
    with comparing(MODEL, untrained, tmp_path / "canary.jsonl") as found:
        found.service._arms["candidate"]._engine.stop()
        replies = [found.ask(user, (1, 2)) for user in range(6)]
        stable = found.service._arms["stable"].model.digest
        assert {reply.body["system_fingerprint"] for reply in replies} == {stable}
        assert found.service.state.decision is not None


def test_a_promoted_candidate_is_the_model_of_the_server(untrained: str, tmp_path: Path):
    with comparing(untrained, MODEL, tmp_path / "canary.jsonl") as found:
        found.post("/admin/canary", {"action": "promote"}, Authorization=f"Bearer {ADMIN}")
        card = send(found.port, "GET", "/v1/models", None, {}).body["data"][0]
        assert card["system_fingerprint"] == found.service._arms["candidate"].model.digest
        before = found.service.metrics.page().decode()
        assert found.ask(3, (1, 2)).status == 200
        after = found.service.metrics.page().decode()
        name = "luyen_generated_tokens_total"
        assert counter(after, name) > counter(before, name)


def counter(page: str, name: str) -> float:
    return float(next(line for line in page.splitlines() if line.startswith(f"{name} ")).split()[1])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_share_that_compares_nothing_is_refused(share: float, tmp_path: Path):
    canary = CanaryOptions(path=MODEL, limits=CanaryLimits(share=share), log=tmp_path / "c.jsonl")
    with pytest.raises(UserError, match="--share"):
        open_canary(MODEL, Opening(), ServeLimits(), canary)


@pytest.mark.parametrize("bounds", [(1.0, 0.0), (0.0, float("inf")), (float("nan"), 1.0)])
def test_a_range_that_maps_no_reward_is_refused(bounds: tuple[float, float], tmp_path: Path):
    limits = CanaryLimits(share=0.5)
    log = tmp_path / "c.jsonl"
    canary = CanaryOptions(path=MODEL, limits=limits, log=log, reward_range=bounds)
    with pytest.raises(UserError, match="--reward-range"):
        open_canary(MODEL, Opening(), ServeLimits(), canary)


def test_options_of_a_comparison_without_a_second_model_are_refused():
    log = Path("canary.jsonl")
    assert canary_options(None, CanaryLimits(share=0.1), log, None) is None
    with pytest.raises(UserError, match="--canary"):
        canary_options(None, CanaryLimits(share=0.2), log, None)
    with pytest.raises(UserError, match="--canary"):
        canary_options(None, CanaryLimits(share=0.1), log, (0.0, 1.0))


def test_what_cannot_be_scored_decides_nothing(untrained: str, tmp_path: Path):
    truth = {"data_source": "arithmetic/sum", "ground_truth": "3"}
    with comparing(MODEL, untrained, tmp_path / "c.jsonl", reward_range=(0.0, 1.0)) as found:
        bodies = [
            {"prompt": "1+2=", "metadata": "3"},
            {"prompt": "1+2=", "metadata": {"data_source": "arithmetic/sum"}},
            {"prompt": "1+2=", "metadata": truth, "echo": True},
            {"prompt": ["1+2=", "2+2="], "metadata": truth},
        ]
        for body in bodies:
            assert found.post("/v1/completions", body).status == 200
        wait_for(lambda: found.service._unscored == len(bodies))
        assert found.service.state.scores["stable"].count == 0
        assert found.service.state.scores["candidate"].count == 0
        assert found.post("/v1/completions", {"prompt": "1+2=", "metadata": truth}).status == 200
        wait_for(lambda: sum(arm.count for arm in found.service.state.scores.values()) == 1)


def test_a_scorer_that_fails_ends_no_server_and_gives_no_score(untrained: str, tmp_path: Path):
    class Broken:
        async def __call__(self, body: object, reply: object) -> float | None:
            raise RuntimeError("no judge")

        def close(self) -> None:
            pass

    with comparing(MODEL, untrained, tmp_path / "c.jsonl") as found:
        found.service._scorer = Broken()
        assert found.ask(0, (1, 2)).status == 200
        wait_for(lambda: found.service._unscored == 1)
        assert found.service.state.pairs == 0


def wait_for(is_done: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not is_done():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)
