"""Replies as server-sent events: one chunk for each piece of text that is certain."""

import json
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any, final

from luyen.rollout.protocol import Completion, TopLogps
from luyen.serve.answer_text import answer_text
from luyen.serve.calls import ChatCall
from luyen.serve.failures import ApiFailure
from luyen.serve.jobs import Job
from luyen.serve.model import ServedModel
from luyen.serve.replies import (
    Scored,
    answer_of,
    chat_logprobs,
    envelope,
    said_tokens,
    text_logprobs,
    tool_calls,
    usage,
)
from luyen.serve.serving_thread import EngineEvent, Finished, SampleProgress

END = b"data: [DONE]\n\n"


def sse(body: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False).encode() + b"\n\n"


@final
class _ChoiceStream:
    """The pieces of one choice."""

    def __init__(self, job: Job, model: ServedModel, index: int) -> None:
        self._job = job
        self._model = model
        self._index = index
        self._text = answer_text(job, model)
        self._count = 0
        """Tokens that were seen."""
        self._unsent = Scored()
        self._offset = 0
        call = job.call
        # A parser reads whole turns, so an answer that may hold calls is sent when it is complete.
        self._is_whole = isinstance(call, ChatCall) and call.tool_choice.mode != "none"

    def begin(self) -> dict[str, Any] | None:
        """The first chunk of a chat says whose turn it is."""
        is_chat = isinstance(self._job.call, ChatCall)
        return self._choice({"role": "assistant", "content": ""}, Scored()) if is_chat else None

    def progress(self, event: SampleProgress) -> dict[str, Any] | None:
        """The piece that new tokens make certain; None: there is none yet."""
        self._see(event.tokens, event.logps, event.top_logps)
        piece = self._text.add(event.tokens)
        return self._piece(piece) if piece and not self._is_whole else None

    def finish(self, completion: Completion) -> list[dict[str, Any]]:
        """The rest of the answer, and why it ended."""
        answer = answer_of(completion, self._job, self._model)
        said = said_tokens(completion, self._job, self._model)
        rest, tops = completion.tokens[self._count :], Scored.of(completion).tops[self._count :]
        piece = self._text.add(said[self._count :]) + self._text.finish()
        self._see(rest, completion.logps[self._count :], tops)
        chunks: list[dict[str, Any]] = []
        text = answer.text if self._is_whole else piece
        if text or self._unsent.tokens:
            chunks.append(self._piece(text))
        if answer.calls:
            key = self._job.requests[0].keys[self._index]
            calls = [{"index": i, **c} for i, c in enumerate(tool_calls(answer, key))]
            chunks.append(self._choice({"tool_calls": calls}, Scored()))
        last = self._choice({}, Scored(), reason=answer.reason)
        if self._job.reply.return_token_ids:
            last["token_ids"] = completion.tokens
        return [*chunks, last]

    def _see(
        self,
        tokens: tuple[int, ...],
        logps: tuple[float, ...],
        tops: tuple[TopLogps | None, ...],
    ) -> None:
        self._count += len(tokens)
        self._unsent = self._unsent.followed_by(Scored(tokens=tokens, logps=logps, tops=tops))

    def _piece(self, text: str) -> dict[str, Any]:
        scored, self._unsent = self._unsent, Scored()
        return self._choice({"content": text}, scored)

    def _choice(
        self, delta: dict[str, Any], scored: Scored, *, reason: str | None = None
    ) -> dict[str, Any]:
        job, tokenizer = self._job, self._model.tokenizer
        head = {"index": self._index}
        if isinstance(job.call, ChatCall):
            logprobs = chat_logprobs(scored, job, tokenizer) if scored.tokens else None
            return {**head, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        text = delta.get("content", "")
        start, self._offset = self._offset, self._offset + len(text)
        logprobs = text_logprobs(scored, job, tokenizer, start=start) if scored.tokens else None
        return {**head, "text": text, "logprobs": logprobs, "finish_reason": reason}


async def event_stream(
    job: Job, model: ServedModel, events: AsyncIterator[EngineEvent]
) -> AsyncGenerator[bytes]:
    """Server-sent events of a job; a failure after the first one is an event too."""
    count = job.decoding.n * len(job.prompts)
    choices = [_ChoiceStream(job, model, index) for index in range(count)]
    begun: set[int] = set()
    done: list[Completion] = []
    digest = model.digest
    kind = "chat.completion.chunk" if isinstance(job.call, ChatCall) else job.object
    counts = {"usage": None} if job.reply.include_usage else {}

    def chunk(choice: dict[str, Any]) -> bytes:
        return sse({**envelope(job, model, digest, object=kind), "choices": [choice], **counts})

    try:
        async for event in events:
            if not isinstance(event, Finished | SampleProgress):
                continue
            digest = event.digest
            named = event.completion if isinstance(event, Finished) else event
            index = job.choice(named.request, named.sample)
            if index not in begun and (first := choices[index].begin()) is not None:
                yield chunk(first)
            begun.add(index)
            if isinstance(event, SampleProgress):
                if (piece := choices[index].progress(event)) is not None:
                    yield chunk(piece)
                continue
            done.append(event.completion)
            for piece in choices[index].finish(event.completion):
                yield chunk(piece)
    except ApiFailure as failure:
        yield sse(failure.body())
        return
    if job.reply.include_usage:
        head = envelope(job, model, digest, object=kind)
        yield sse({**head, "choices": [], "usage": usage(job, done)})
    yield END


def whole_reply(pieces: Sequence[bytes]) -> dict[str, Any] | None:
    """Id, texts and ends of a reply that was sent as server-sent events; None: it failed.

    Example:
        >>> part = b'data: {"id": "c", "choices": [{"index": 0, "text": "4"}]}\\n\\n'
        >>> whole_reply([part, part, END])
        {'id': 'c', 'choices': [{'text': '44', 'finish_reason': None}]}
        >>> whole_reply([part]) is None
        True
    """
    if not pieces or pieces[-1] != END:
        return None
    id, found = "", dict[int, dict[str, Any]]()
    for piece in pieces[:-1]:
        event = json.loads(piece.removeprefix(b"data: "))
        id = event["id"]
        for choice in event["choices"]:
            one = found.setdefault(choice["index"], {"text": "", "finish_reason": None})
            one["text"] += choice.get("text") or choice.get("delta", {}).get("content") or ""
            one["finish_reason"] = choice.get("finish_reason") or one["finish_reason"]
    return {"id": id, "choices": [found[index] for index in sorted(found)]}
