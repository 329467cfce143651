"""Requests and replies without HTTP: records, prompts, texts, chunks."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.rollout.protocol import Completion
from luyen.serve.access import Keyring, is_loopback, read_keys
from luyen.serve.answer_text import AnswerText
from luyen.serve.calls import IGNORED, BodyLimits, read_chat, read_completion
from luyen.serve.failures import ApiFailure, refused
from luyen.serve.fields import parse_body
from luyen.serve.jobs import chat_job, completion_job
from luyen.serve.model import ServedModel, open_model, weight_digest, with_weights
from luyen.serve.replies import answer_of, reply

LIMITS = BodyLimits(vocabulary=128, max_model_len=512)
USER = {"role": "user", "content": "1+1="}


@pytest.fixture(scope="module")
def model() -> ServedModel:
    return open_model("builtin://arithmetic", name="sums", overrides=(), is_trusted=False)


def done(text: str, model: ServedModel, *, sample: int = 0, reason: str = "stop") -> Completion:
    tokens = (*model.tokenizer.encode(text), *((3,) if reason == "stop" else ()))
    logps = (-0.5,) * len(tokens)
    return Completion(request="x/0", sample=sample, tokens=tokens, logps=logps, reason=reason)


def test_defaults_are_those_of_openai():
    call = read_completion({"prompt": "a"}, LIMITS)
    assert (call.decoding.max_tokens, call.decoding.temperature, call.decoding.n) == (16, 1.0, 1)
    chat = read_chat({"messages": [USER], "max_completion_tokens": 9}, LIMITS)
    assert (chat.decoding.max_tokens, chat.decoding.top_logprobs) == (9, None)
    assert read_chat({"messages": [USER]}, LIMITS).decoding.max_tokens is None


def test_null_means_not_given_and_ignored_fields_change_nothing():
    plain = read_chat({"messages": [USER]}, LIMITS)
    nulls = dict.fromkeys(("temperature", "tools", "stop", "seed", "stream", "logit_bias"))
    ignored = {name: {"any": ["thing"]} for name in IGNORED}
    assert read_chat({"messages": [USER], **nulls, **ignored}, LIMITS) == plain


def test_parts_of_text_are_joined():
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1="}]
    call = read_chat({"messages": [{"role": "user", "content": parts}]}, LIMITS)
    assert call.messages[0]["content"] == "1+1="


def test_an_answer_gets_the_room_that_its_prompt_leaves(model: ServedModel):
    chat = read_chat({"messages": [USER]}, LIMITS)
    job = chat_job(chat, model, id="x", seed=1, at=0)
    [request] = job.requests
    assert len(request.tokens) + request.sampling.max_new_tokens == model.max_model_len
    assert request.sampling.stop_ids == model.tokenizer.stop_ids
    long = read_completion({"prompt": "1+1=", "max_tokens": 510}, LIMITS)
    with pytest.raises(ApiFailure, match="max_tokens is 510"):
        completion_job(long, model, id="x", seed=1, at=0)


def test_keys_depend_on_seed_and_sample_alone(model: ServedModel):
    def keys(prompt: object, seed: int, n: int) -> list[tuple[int, ...]]:
        call = read_completion({"prompt": prompt, "n": n}, LIMITS)
        job = completion_job(call, model, id=f"{seed}", seed=seed, at=0)
        return [request.keys for request in job.requests]

    assert keys(["a", "b"], 5, 2) == [keys("c", 5, 3)[0][:2]] * 2
    assert keys("a", 5, 1) != keys("a", 6, 1)


def test_a_reply_without_a_stop_token_keeps_every_character(model: ServedModel):
    job = chat_job(read_chat({"messages": [USER]}, LIMITS), model, id="x", seed=1, at=0)
    assert answer_of(done("42", model, reason="length"), job, model).reason == "length"
    assert answer_of(done("42", model, reason="aborted"), job, model).reason == "length"
    whole = reply(job, model, {0: done("42", model)}, "fp")
    assert whole["choices"][0]["message"]["content"] == "42"
    assert whole["usage"]["completion_tokens"] == 3
    json.dumps(whole)


def test_only_one_call_is_left_where_calls_are_not_parallel(model: ServedModel):
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {"messages": [USER], "tools": tools}
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    for is_parallel, count in ((True, 2), (False, 1)):
        call = read_chat({**body, "parallel_tool_calls": is_parallel}, LIMITS)
        job = chat_job(call, model, id="x", seed=1, at=0)
        answer = answer_of(done(text, model), job, model)
        assert (len(answer.calls), answer.text, answer.reason) == (count, "", "tool_calls")


def utf8(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


@given(st.text(max_size=40), st.lists(st.text(min_size=1, max_size=4), max_size=3), st.data())
def test_pieces_add_up_to_the_text_before_the_first_stop(text: str, stops: list[str], data):
    ids = list(text.encode(errors="ignore"))
    text = utf8(ids)
    answer = AnswerText(utf8, stops=stops)
    pieces: list[str] = []
    while ids:
        count = data.draw(st.integers(1, len(ids)))
        pieces.append(answer.add(ids[:count]))
        ids = ids[count:]
    pieces.append(answer.finish())
    ends = [text.find(stop) for stop in stops if stop in text]
    assert "".join(pieces) == answer.text == text[: min(ends, default=len(text))]
    assert not any("\N{REPLACEMENT CHARACTER}" in p for p in pieces) or "\ufffd" in text


def test_a_stop_string_before_the_least_tokens_does_not_end_the_text():
    answer = AnswerText(utf8, stops=("b",), min_tokens=3)
    assert answer.add(list(b"abcabc")) + answer.finish() == "abca"


def test_a_body_is_one_json_object():
    for raw in (b"[]", b"{} {}", b'{"a": NaN}', b"\xff"):
        with pytest.raises(UserError):
            parse_body(raw)


def test_an_error_quotes_little_of_what_was_sent():
    failure = refused(UserError("x" * 500, "y" * 50_000, "why", "fix"))
    assert len(json.dumps(failure.body())) < 1500


def test_keys_are_private_long_and_compared_whole(tmp_path, monkeypatch):
    file = tmp_path / "keys"
    file.write_text("a-key-of-sixteen-characters\n\nanother-key-of-sixteen-chars\n")
    file.chmod(0o644)
    with pytest.raises(UserError, match="other users"):
        read_keys("NO_SUCH_VARIABLE", file, option="--api-key-file")
    file.chmod(0o600)
    ring = read_keys("NO_SUCH_VARIABLE", file, option="--api-key-file")
    assert ring.has("another-key-of-sixteen-chars")
    assert not any(ring.has(key) for key in ("", "another-key", "a-key-of-sixteen-characters "))
    monkeypatch.setenv("SOME_KEY", "short")
    with pytest.raises(UserError, match="not shown"):
        read_keys("SOME_KEY", None, option="--api-key-file")
    assert Keyring().is_empty
    assert not Keyring().has("")


def test_names_of_this_machine():
    hosts = ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "10.0.0.1", "example.org")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 3


def test_weights_of_another_tokenizer_are_refused(model: ServedModel):
    with pytest.raises(UserError, match="its tokenizer"):
        with_weights(model, "builtin://tools", is_trusted=False)
    again = with_weights(model, "builtin://arithmetic", is_trusted=False)
    assert again.digest == model.digest == weight_digest(model.loaded.policy)
    assert again.name == "sums"
