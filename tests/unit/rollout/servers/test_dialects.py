"""Requests and replies of SGLang and of OpenAI-compatible endpoints."""

import math
from pathlib import Path
from typing import Any

import pytest

from luyen.base.errors import UserError
from luyen.config.check import check
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.rollout.protocol import Sampling
from luyen.rollout.servers.dialect import ServerFault
from luyen.rollout.servers.openai import OpenAiDialect
from luyen.rollout.servers.sglang import SglangDialect, sglang_command

PLAIN = Sampling(max_new_tokens=4, temperature=0.7)


def body_of(dialect: Any, sampling: Sampling) -> dict[str, Any]:
    body = dialect.generate("luyen-1", (5, 6), sampling, seed=2**61 + 7, model="m").body
    assert body is not None
    return body


def test_sglang_is_asked_for_tokens_with_every_default_spelled_out():
    body = body_of(SglangDialect(), Sampling(max_new_tokens=4, stop_ids=frozenset({9, 3})))
    assert body["input_ids"] == [5, 6]
    assert body["return_logprob"] is True
    given = body["sampling_params"]
    assert (given["max_new_tokens"], given["temperature"]) == (4, 1.0)
    assert (given["stop_token_ids"], given["ignore_eos"]) == ([3, 9], False)
    assert given["sampling_seed"] == (2**61 + 7) % 2**31
    # Without stop tokens the model's own must not end the answer.
    assert body_of(SglangDialect(), PLAIN)["sampling_params"]["ignore_eos"] is True


def test_no_id_of_sglang_begins_with_another():
    calls = SglangDialect().abort(["luyen-1", "luyen-10"])
    first, second = (str((call.body or {})["rid"]) for call in calls)
    assert not second.startswith(first)


def sglang_reply(**changes: Any) -> dict[str, Any]:
    meta = {
        "finish_reason": {"type": "stop", "matched": 9},
        "weight_version": "3",
        "output_token_logprobs": [[-0.5, 8, None], [-0.25, 9, None]],
        **changes,
    }
    return {"output_ids": [8, 9], "meta_info": meta}


def test_a_reply_of_sglang_is_read():
    made = SglangDialect().generated(sglang_reply())
    assert (made.tokens, made.logps) == ((8, 9), (-0.5, -0.25))
    assert (made.reason, made.version) == ("stop", "3")
    aborted = sglang_reply(finish_reason={"type": "abort", "message": "Aborted"})
    assert SglangDialect().generated(aborted).reason == "aborted"


@pytest.mark.parametrize(
    "reply",
    [
        [],
        {},
        {"output_ids": [8, 9], "meta_info": {}},
        sglang_reply(output_token_logprobs=[[-0.5, 8, None]]),
        sglang_reply(output_token_logprobs=[[-0.5, 8, None], [-0.25, 7, None]]),
        sglang_reply(finish_reason={"type": "tired"}),
        sglang_reply(finish_reason="stop"),
    ],
    ids=str,
)
def test_a_reply_of_sglang_that_is_none_is_a_fault(reply: Any):
    with pytest.raises(ServerFault, match="shape"):
        SglangDialect().generated(reply)


def test_the_command_of_sglang():
    rollout = RolloutConfig(
        name="sglang",
        enforce_eager=True,
        engine_kwargs={"sglang": {"tp_size": 2, "enable_deterministic_inference": False}},
    )
    words = sglang_command(
        rollout, model=Path("m"), port=80, max_model_len=64, dtype="float32", device="cpu"
    )
    assert words[1:3] == ["-m", "sglang.launch_server"]
    text = " ".join(words)
    assert "--model-path m --host 127.0.0.1 --port 80" in text
    assert "--tp-size 2" in text
    assert "--disable-cuda-graph" in words
    assert "--enable-deterministic-inference" not in words


def llama_reply(**entry: Any) -> dict[str, Any]:
    """As llama.cpp answers: the id of each token stands with its score."""
    scored = {"id": 1603, "token": " non", "bytes": [32], "top_logprobs": [], **entry}
    choice = {"text": " non", "index": 0, "finish_reason": "length"}
    return {"model": "m.gguf", "choices": [{**choice, "logprobs": {"content": [scored]}}]}


def vllm_reply(**changes: Any) -> dict[str, Any]:
    scores = {"token_logprobs": [-0.5], "tokens": ["token_id:7"]}
    choice = {"index": 0, "finish_reason": "stop", "logprobs": scores, **changes}
    return {"model": "m", "choices": [choice]}


def test_an_endpoint_may_name_its_tokens_in_three_ways():
    read = OpenAiDialect().generated
    assert read(llama_reply(logprob=-3.5)).tokens == (1603,)
    assert read(llama_reply(logprob=-3.5)).logps == (-3.5,)
    assert read(llama_reply(prob=0.25)).logps == (math.log(0.25),)
    assert read(llama_reply(prob=0.0)).logps == (None,)
    assert read(vllm_reply()).tokens == (7,)
    assert read(vllm_reply(token_ids=[8])).tokens == (8,)
    assert read(vllm_reply()).model == "m"


@pytest.mark.parametrize(
    "reply",
    [
        {"choices": []},
        vllm_reply(logprobs=None),
        vllm_reply(logprobs={"token_logprobs": [-0.5], "tokens": [" non"]}),
        vllm_reply(finish_reason="tired"),
        {**llama_reply(logprob=-3.5), "usage": {"completion_tokens": 2}},
    ],
    ids=str,
)
def test_an_endpoint_without_token_ids_is_a_fault(reply: Any):
    with pytest.raises(ServerFault, match="shape"):
        OpenAiDialect().generated(reply)


def test_a_temperature_needs_a_convention():
    assert "before the temperature" in (OpenAiDialect().refusal(PLAIN) or "")
    assert OpenAiDialect("processed").refusal(PLAIN) is None
    assert "post_sampling_probs" not in body_of(OpenAiDialect("processed"), PLAIN)
    assert body_of(OpenAiDialect("llama_cpp"), PLAIN)["post_sampling_probs"] is True
    # At temperature 0 it would report certainty.
    greedy = Sampling(max_new_tokens=4, temperature=0.0)
    assert "post_sampling_probs" not in body_of(OpenAiDialect("llama_cpp"), greedy)


def problems_of(*words: str) -> dict[str, str]:
    """Findings of the check by rule, as text."""
    report = check([], ["actor_rollout_ref.rollout.n=4", *words])
    return {problem.id: str(problem) for problem in report.problems}


def test_training_on_a_fixed_model_is_refused():
    name = "actor_rollout_ref.rollout.name"
    found = problems_of(f"{name}=openai", "actor_rollout_ref.rollout.server_urls=[http://h]")
    assert "fixed model" in found["R27"]
    assert "luyen eval" in found["R27"]
    assert "R27" not in problems_of(f"{name}=native")


@pytest.mark.parametrize("name", ["trtllm", "lmdeploy"])
def test_an_engine_without_an_adapter_is_refused_with_the_way_out(name: str):
    found = problems_of(f"actor_rollout_ref.rollout.name={name}")
    assert "plugin" in found["R01"]
    assert "openai" in found["R01"]


def test_an_endpoint_has_an_address():
    from luyen.rollout.servers.openai import openai

    with pytest.raises(UserError, match="server_urls"):
        openai(
            None,  # pyright: ignore[reportArgumentType]
            RolloutConfig(name="openai"),
            longest=8,
            decode=lambda _: "",
            place=None,  # pyright: ignore[reportArgumentType]
        )
