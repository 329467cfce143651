"""Replies of every form: what is no answer is asked for again, and nothing of it is learned."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.rollout.protocol import Completion, generate
from luyen.rollout.servers.dialect import Generated, ServerFault, optional_count, read_reply
from luyen.rollout.servers.engine import ServerEngine
from luyen.rollout.servers.openai import OpenAiDialect
from luyen.rollout.servers.vllm import VllmDialect
from luyen.rollout.servers.weights import Probe
from tests.generation import request
from tests.peers.engines import served_engine
from tests.peers.http import Fault, JsonServer
from tests.tiny_models import tiny_policy

GENERATE = {"sglang": "/generate", "vllm": "/v1/completions", "openai": "/v1/completions"}
NAMES = tuple(GENERATE)
Change = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luyen.rollout.servers.engine._BACKOFF_S", 0.001)


def spoil(server: JsonServer, name: str, change: Change) -> None:
    """From now on, every generated answer is changed."""

    def changed(_fault: str, body: Any) -> Any:
        body = copy.deepcopy(body)
        made = change(body)
        return body if made is None else made

    server._server.spoil = changed
    server.faults.clear()
    server.faults.plan(Fault(name="nan", path=GENERATE[name], times=None))


def answer(engine: ServerEngine) -> list[Completion]:
    return list(generate(engine, [request(5, 6)]).values())


def put_logp(name: str, value: Any) -> Change:
    def change(body: Any) -> None:
        if name == "sglang":
            body["meta_info"]["output_token_logprobs"][2][0] = value
        else:
            body["choices"][0]["logprobs"]["token_logprobs"][2] = value

    return change


def put_reason(name: str, value: Any) -> Change:
    def change(body: Any) -> None:
        if name == "sglang":
            body["meta_info"]["finish_reason"] = {"type": value}
        else:
            body["choices"][0]["finish_reason"] = value

    return change


def drop_tokens(name: str) -> Change:
    def change(body: Any) -> None:
        if name == "sglang":
            body["output_ids"], body["meta_info"]["output_token_logprobs"] = [], []
        else:
            choice = body["choices"][0]
            choice["token_ids"] = []
            choice["logprobs"] |= {"token_logprobs": [], "tokens": []}
            body.pop("usage", None)

    return change


@pytest.mark.parametrize("name", NAMES)
def test_odd_answers_are_asked_for_again_and_end_with_a_reason(name: str, tmp_path: Path):
    changes: dict[str, Change] = {
        "a whole number beyond floats": put_logp(name, -(10**400)),
        "a list": put_logp(name, [-1.0]),
        "text": put_logp(name, "-1.0"),
        "an ending that is a list": put_reason(name, ["stop"]),
        "an ending that is an object": put_reason(name, {}),
        "no tokens": drop_tokens(name),
        "choices that are a number": lambda _: {"choices": 5},
        "an empty list": lambda _: [],
        "a word": lambda _: "no",
    }
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(name, policy, tmp_path, timeout_s=20.0) as (engine, server, _):
        right = answer(engine)
        for what, change in changes.items():
            spoil(server, name, change)
            with pytest.raises(UserError, match="failed 4 times"):
                answer(engine)
            server.faults.clear()
            engine._forget()
            assert answer(engine) == right, what


@pytest.mark.parametrize("name", ["sglang", "vllm"])
def test_an_answer_that_the_server_aborts_is_no_whole_answer(name: str, tmp_path: Path):
    """As when another client pauses the server: half an answer would be scored as a whole one."""
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine(name, policy, tmp_path, timeout_s=20.0) as (engine, server, driver):
        right = answer(engine)
        spoil(server, name, put_reason(name, "abort"))
        with pytest.raises(UserError, match="aborted the request by itself"):
            answer(engine)
        server.faults.clear()
        engine._forget()
        before = driver.requests
        assert answer(engine) == right
        assert driver.requests == before + 2  # the answer and the proof


def test_a_server_that_does_not_say_what_it_serves_is_asked_until_it_does(tmp_path: Path):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine("vllm", policy, tmp_path, timeout_s=20.0) as (engine, server, _):
        server._server.spoil = lambda _fault, _body: {"data": []}
        server.faults.plan(Fault(name="nan", path="/v1/models", times=2))
        answer(engine)
        assert engine._model == "policy"
        engine.close()
        server.faults.plan(Fault(name="nan", path="/v1/models", times=None))
        with pytest.raises(UserError, match="no data"):
            answer(engine)


def test_a_version_in_a_reply_is_compared_before_the_first_publication(tmp_path: Path):
    policy = tiny_policy("llama", initializer_range=0.15)
    with served_engine("sglang", policy, tmp_path, timeout_s=20.0) as (engine, server, _):
        answer(engine)
        spoil(server, "sglang", lambda body: body["meta_info"].update(weight_version="7"))
        with pytest.raises(UserError, match="version 7, not 0"):
            answer(engine)


NAMED = ["token_id:\u0663", "token_id:+3", "token_id: 3", "token_id:1_1", "token_id:x", "token_id:"]


@pytest.mark.parametrize("name", [*NAMED, "token_id:-1", "token_id:" + "9" * 5000])
def test_a_name_that_is_no_id_is_not_guessed(name: str):
    listed = {"tokens": [name], "token_logprobs": [-1.0]}
    scored = {"content": [{"token": name, "logprob": -1.0}]}
    for scores in (listed, scored):
        reply = {"choices": [{"logprobs": scores, "finish_reason": "stop"}], "model": "m"}
        with pytest.raises(ServerFault, match="names no token"):
            OpenAiDialect().generated(reply)


@pytest.mark.parametrize("content", [[3], [None], [[]], ["a"]])
def test_scored_tokens_of_another_form_are_a_fault(content: list[Any]):
    choice = {"logprobs": {"content": content}, "finish_reason": "stop"}
    with pytest.raises(ServerFault, match="shape"):
        read_reply(OpenAiDialect().generated, {"choices": [choice]})


@pytest.mark.parametrize("value", ["64", 64.5, -1, 0, True, [], {}])
def test_a_length_that_is_no_number_is_a_fault(value: Any):
    with pytest.raises(ServerFault, match="no number of tokens"):
        optional_count(value)


@pytest.mark.parametrize("results", [[], None, [3], [{"a": "1"}, None], [{"a": "1"}, {}]])
def test_digests_of_another_form_are_a_fault(results: Any):
    with pytest.raises(ServerFault, match="shape"):
        read_reply(VllmDialect(has_extension=True).read_digests, {"results": results})


@pytest.mark.parametrize(
    ("tokens", "logps"),
    [((), ()), ((1,) * 11, (-1.0,) * 11), ((64,) * 12, (-1.0,) * 12), ((1,) * 12, (None,) * 12)],
    ids=["none", "too few", "beyond the vocabulary", "without log-probabilities"],
)
def test_a_probe_is_compared_only_if_it_is_one(tokens: Any, logps: Any):
    probe = Probe.of(vocabulary=64, room=64)
    made = Generated(tokens=tokens, logps=logps, reason="length")
    assert probe.fault(made, vocabulary=64) is not None
