"""The real `openai` client against a server of this process."""

import asyncio
from collections.abc import Iterator

import openai
import pytest
from openai import AsyncOpenAI, OpenAI

from tests.serving import MODEL, Running, running


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


@pytest.fixture
def client(server: Running) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0) as found:
        yield found


ASK = [{"role": "user", "content": "12+34="}]


def test_a_chat_has_text_counts_and_the_digest_of_the_weights(client: OpenAI, server: Running):
    reply = client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, seed=1)
    [choice] = reply.choices
    assert choice.message.role == "assistant"
    assert choice.message.content == "46"
    assert choice.finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + reply.usage.completion_tokens
    assert reply.system_fingerprint == server.engine.model.digest


def test_a_seed_fixes_the_answers_and_another_changes_them(client: OpenAI):
    def texts(seed: int) -> list[str | None]:
        reply = client.chat.completions.create(model=MODEL, messages=ASK, n=8, seed=seed)
        return [choice.message.content for choice in reply.choices]

    assert texts(3) == texts(3)
    assert len({*texts(3), *texts(4)}) > 2


def test_log_probabilities_name_the_likeliest_tokens(client: OpenAI):
    reply = client.chat.completions.create(
        model=MODEL, messages=ASK, temperature=0, logprobs=True, top_logprobs=3
    )
    scores = reply.choices[0].logprobs
    assert scores is not None
    assert scores.content is not None
    assert [entry.token for entry in scores.content] == ["4", "6", "<|im_end|>"]
    for entry in scores.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].logprob == entry.logprob
        assert entry.bytes == list(entry.token.encode())


def test_a_stream_says_what_the_whole_reply_says(client: OpenAI):
    fields = {"model": MODEL, "messages": ASK, "n": 3, "seed": 5, "logprobs": True}
    whole = client.chat.completions.create(**fields)
    texts, scores, reasons = ["", "", ""], [[], [], []], ["", "", ""]
    usage = None
    options = {"include_usage": True}
    for chunk in client.chat.completions.create(stream=True, stream_options=options, **fields):
        usage = chunk.usage or usage
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            scores[choice.index] += choice.logprobs.content if choice.logprobs else []
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    assert texts == [choice.message.content for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]
    assert scores == [choice.logprobs.content for choice in whole.choices]
    assert usage == whole.usage


def test_completions_take_batches_of_texts_and_of_ids(client: OpenAI, server: Running):
    ids = server.post("/tokenize", {"prompt": "12+34="}).body["tokens"]
    fields = {"model": MODEL, "temperature": 0, "max_tokens": 4}
    texts = client.completions.create(prompt=["12+34=", "1+1="], **fields)
    mixed = client.completions.create(prompt=[ids], **fields)
    assert [choice.index for choice in texts.choices] == [0, 1]
    assert mixed.choices[0].text == texts.choices[0].text
    alone = client.completions.create(prompt="1+1=", **fields)
    assert alone.choices[0].text == texts.choices[1].text


def test_a_streamed_completion_says_what_the_whole_one_says(client: OpenAI):
    fields = {"model": MODEL, "prompt": "12+34=", "seed": 2, "max_tokens": 8, "logprobs": 2}
    whole = client.completions.create(**fields).choices[0]
    pieces = [c.choices[0] for c in client.completions.create(stream=True, **fields)]
    assert "".join(piece.text for piece in pieces) == whole.text
    tokens = [t for piece in pieces if piece.logprobs for t in piece.logprobs.tokens]
    assert tokens == whole.logprobs.tokens


def test_stop_strings_are_left_out(client: OpenAI):
    fields = {"model": MODEL, "messages": ASK, "temperature": 0}
    reply = client.chat.completions.create(stop=["6"], **fields)
    assert (reply.choices[0].message.content, reply.choices[0].finish_reason) == ("4", "stop")
    chunks = client.chat.completions.create(stop=["6"], stream=True, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "4"


def test_a_short_answer_ended_by_its_length(client: OpenAI):
    reply = client.chat.completions.create(model=MODEL, messages=ASK, max_completion_tokens=1)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 1


def test_errors_are_those_of_the_client(client: OpenAI):
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-9", messages=ASK)
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=ASK, temperature=-1)
    assert wrong.value.param == "temperature"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt="1" * 600)
    assert long.value.code == "context_length_exceeded"


def test_models_are_listed(client: OpenAI):
    [card] = client.models.list().data
    assert card.id == MODEL
    assert client.models.retrieve(MODEL).id == MODEL


def test_many_clients_get_the_answers_that_each_gets_alone(server: Running, client: OpenAI):
    def fields(i: int) -> dict[str, object]:
        ask = [{"role": "user", "content": f"{10 + i}+{3 * i}="}]
        return {"model": MODEL, "messages": ask, "seed": i, "n": 1 + i % 3, "max_tokens": 8 + i}

    alone = [client.chat.completions.create(**fields(i)) for i in range(16)]

    async def together() -> list[object]:
        async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused") as many:
            calls = [many.chat.completions.create(**fields(i)) for i in range(16)]
            return await asyncio.gather(*calls)

    for one, other in zip(alone, asyncio.run(together()), strict=True):
        assert other.choices == one.choices
        assert other.usage == one.usage
