"""A canary: callers are split, scores decide at a stated error rate, and every decision is kept."""

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.serve.access import Keyring
from luyen.serve.canary import CanaryLimits, CanaryState, arm_of, caller_key
from luyen.serve.canary_log import CanaryLog
from luyen.serve.canary_service import CanaryOptions, CanaryService, open_canary
from luyen.serve.dispatch import ServeLimits
from luyen.serve.opening import Opening
from luyen.serve.server import Access
from tests.e2e.tiny import random_model
from tests.serving import MODEL, Reply, post_json, serving

ADMIN = "an-admin-key-of-24-chars"


def simulate(stable: float, candidate: float, source: random.Random, *, most: int) -> CanaryState:
    """Callers whose scores are coin tosses, a fifth of them with the candidate."""
    state = CanaryState.begin(CanaryLimits(share=0.2, max_pairs=most))
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
    assert state.pairs + len(state.waiting) == state.scores["candidate"].count
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
        told = found.post("/admin/canary", {"action": "roll_back"}, **key)
        assert told.body["decision"]["outcome"] == "rolled_back"
        assert found.post("/admin/canary", {"action": "promote"}, **key).status == 409
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
    log = CanaryLog(path, stable="a", candidate="b", limits=limits)
    log.resume()
    log.score("1", "stable", 0.5, "vote")
    log.score("2", "candidate", 1.0, "vote")
    path.write_text(path.read_text()[:-9])
    assert log.resume().scores["candidate"].count == 0
    assert log.resume().scores["stable"].count == 1
    other = CanaryLog(path, stable="a", candidate="c", limits=limits)
    assert other.resume().scores["stable"].count == 0
    path.write_text('{"event": "score", "model": 3}\n')
    with pytest.raises(UserError, match="line 1"):
        log.resume()
