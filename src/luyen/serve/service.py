"""What each endpoint does, without HTTP: JSON bodies in, JSON bodies out."""

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias, TypeVar, final

from luyen.rollout.prompt_scores import PromptScores
from luyen.serve.calls import read_chat, read_completion
from luyen.serve.dispatch import Dispatcher, ServeLimits
from luyen.serve.failures import ApiFailure, stopping, unknown_model, wrong
from luyen.serve.fields import Read, flag, only, read_fields, text, token_ids
from luyen.serve.jobs import Job, chat_job, completion_job
from luyen.serve.metrics import ServerMetrics
from luyen.serve.model import ServedModel, with_weights
from luyen.serve.replies import reply
from luyen.serve.serving_thread import EngineEvent, Finished, ServingThread
from luyen.serve.streams import event_stream

T = TypeVar("T")
Body: TypeAlias = dict[str, Any]
_LONGEST_TEXT = 1_000_000
"""Characters, or ids, of a text for /tokenize and /detokenize."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyPlan:
    """A job that is ready to run, with the two ways of answering it.

    Example:
        >>> sorted(ReplyPlan.__slots__)
        ['is_streaming', 'reply', 'stream']
    """

    is_streaming: bool
    """Which of the two the client wants."""
    reply: Callable[[], Coroutine[Any, Any, Body]]
    """The whole reply."""
    stream: Callable[[], AsyncGenerator[bytes]]
    """The reply as server-sent events."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoints:
    """Functions of a service by path.

    Example:
        >>> Endpoints(posts={}, gets={}).jobs
        {}
    """

    posts: Mapping[str, Callable[[Body], Awaitable[Body]]]
    """A body for a body."""
    gets: Mapping[str, Callable[[], Awaitable[Body]]]
    """Read without a body."""
    jobs: Mapping[str, Callable[[Body], Awaitable[ReplyPlan]]] = field(default_factory=dict)
    """A body becomes a job, whose answer may be streamed."""


async def wrong_kind(path: str, fix: str, body: Body) -> Body:
    """Refuse an endpoint that the served model has nothing for."""
    del body
    message = f"{path}: the model of this server has no such endpoint. Fix: {fix}"
    raise ApiFailure(404, message, param="url", code="wrong_model_kind")


@final
class Service:
    """The endpoints of one served model; lives on the event loop."""

    def __init__(
        self,
        engine: ServingThread,
        limits: ServeLimits,
        *,
        is_trusted: bool,
        metrics: ServerMetrics | None = None,
    ) -> None:
        """`is_trusted`: new weights may be those of another user's run (`--trust`).

        With `metrics` it counts into those of another service of the same server.
        """
        self.limits = limits
        self.metrics = metrics or ServerMetrics()
        self._engine = engine
        self.dispatcher = Dispatcher(engine, limits)
        self._is_trusted = is_trusted
        self._started = int(time.time())
        # One thread: templates and tokenizers are not made for several, and one cannot starve
        # the event loop.
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="request reader")
        self._loader = ThreadPoolExecutor(1, thread_name_prefix="weight loader")
        self.metrics.watch(
            "luyen_open_sequences",
            "Answers that are running or waiting.",
            lambda: self.dispatcher.open_sequences,
        )

        cache = {
            "tokens": "Tokens of prompts that were read.",
            "reused_tokens": "Tokens of prompts that were in the prefix cache.",
            "evictions": "Blocks of the prefix cache that made room for newer ones.",
        }
        for name, help in cache.items():
            read = partial(_counter, engine, name)
            self.metrics.watch(f"luyen_prefix_cache_{name}", help, read)

    def endpoints(self) -> Endpoints:
        """What is answered at which path."""
        return Endpoints(
            jobs={
                "/v1/completions": self.complete,
                "/v1/chat/completions": self.chat,
            },
            posts={
                "/tokenize": self.tokenize,
                "/detokenize": self.detokenize,
                "/v1/score": partial(wrong_kind, "/v1/score", "serve a reward model"),
                "/admin/weights": self.load_weights,
            },
            gets={"/v1/models": self.models, "/health": self.health},
        )

    @property
    def model(self) -> ServedModel:
        """The model that is served now."""
        return self.dispatcher.model

    async def close(self) -> None:
        """End the engine and the threads."""
        await asyncio.to_thread(self._engine.stop)
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._loader.shutdown(wait=False, cancel_futures=True)

    async def complete(self, body: Body) -> ReplyPlan:
        """Answer a body of /v1/completions."""
        return self.generation(await self.completion_job(body))

    async def chat(self, body: Body) -> ReplyPlan:
        """Answer a body of /v1/chat/completions."""
        return self.generation(await self.chat_job(body))

    def generation(self, job: Job) -> ReplyPlan:
        """Both ways of answering a job."""
        return ReplyPlan(
            is_streaming=job.reply.stream,
            reply=partial(self.reply, job),
            stream=partial(self.stream, job),
        )

    async def completion_job(self, body: Body) -> Job:
        """The job of a body of /v1/completions."""
        model = self.model
        call = read_completion(body, model.limits)
        self._demand(call.model)
        id, seed, at = f"cmpl-{secrets.token_hex(12)}", _seed(call.decoding.seed), int(time.time())
        return await self._read(lambda: completion_job(call, model, id=id, seed=seed, at=at))

    async def chat_job(self, body: Body) -> Job:
        """The job of a body of /v1/chat/completions."""
        model = self.model
        call = read_chat(body, model.limits)
        self._demand(call.model)
        id, at = f"chatcmpl-{secrets.token_hex(12)}", int(time.time())
        seed = _seed(call.decoding.seed)
        return await self._read(lambda: chat_job(call, model, id=id, seed=seed, at=at))

    async def reply(self, job: Job) -> Body:
        """The whole reply to a job."""
        found, digest = await self.dispatcher.run(job)
        scores: list[PromptScores] = []
        if job.scores_prompts:
            scores, scored_by = await self.dispatcher.score_prompts(job)
            if scored_by != digest and job.requests:
                # New weights came in between, and no reply mixes two versions.
                return await self.reply(job)
            digest = scored_by
        self._count(job, sum(len(one.tokens) for one in found.values()))
        return reply(job, self.model, found, digest, scores)

    async def stream(self, job: Job) -> AsyncGenerator[bytes]:
        """The reply to a job as server-sent events."""
        start = time.monotonic()
        is_first = True

        async def counted() -> AsyncGenerator[EngineEvent]:
            written = 0
            async with aclosing(self.dispatcher.events(job, streams=True)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        written += len(event.completion.tokens)
                    yield event
            self._count(job, written)

        async with aclosing(counted()) as events:
            first = await anext(events, None)
            async with aclosing(event_stream(job, self.model, _chained(first, events))) as pieces:
                async for piece in pieces:
                    if is_first:
                        self.metrics.first_token_seconds.observe(time.monotonic() - start)
                        is_first = False
                    yield piece

    async def tokenize(self, body: Body) -> Body:
        """Token ids of a text or of a conversation."""
        model = self.model
        readers: dict[str, Read[Any]] = {
            "model": text,
            "prompt": text,
            "messages": lambda value, _: value,
            "tools": lambda value, _: value,
            "add_special_tokens": only(False, why="nothing is ever added to a text"),
            "return_token_strs": flag,
        }
        found = read_fields(body, readers)
        self._demand(found.get("model"))
        if ("prompt" in found) == ("messages" in found):
            why = "a text or a conversation is tokenised, and only one of them"
            field = "messages" if "prompt" in found else "prompt"
            raise wrong(field, found.get(field), why, "send prompt or messages")
        if "messages" in found:
            chat = {name: found[name] for name in ("messages", "tools") if name in found}
            tokens = list((await self.chat_job({**chat, "max_tokens": 1})).prompts[0])
        else:
            prompt: str = found["prompt"]
            if len(prompt) > _LONGEST_TEXT:
                why = f"it has {len(prompt)} characters, and {_LONGEST_TEXT} are taken"
                raise wrong("prompt", prompt, why, "send less at once")
            tokens = await self._read(lambda: model.tokenizer.encode(prompt))
        reply: dict[str, Any] = {"tokens": tokens, "count": len(tokens)}
        if found.get("return_token_strs"):
            decode = model.tokenizer.decode
            reply["token_strs"] = [decode([token], skip_special=False) for token in tokens]
        return {**reply, "max_model_len": model.max_model_len}

    async def detokenize(self, body: Body) -> Body:
        """The text of token ids."""
        model = self.model
        readers: dict[str, Read[Any]] = {
            "model": text,
            "tokens": token_ids(model.limits.vocabulary, most=_LONGEST_TEXT),
            "skip_special_tokens": flag,
        }
        found = read_fields(body, readers)
        self._demand(found.get("model"))
        if "tokens" not in found:
            raise wrong("tokens", None, "they are what is decoded", "send a list of ids")
        skip = found.get("skip_special_tokens", False)
        decode = model.tokenizer.decode
        return {"prompt": await self._read(lambda: decode(found["tokens"], skip_special=skip))}

    async def models(self) -> Body:
        """The list of models: this one."""
        return {"object": "list", "data": [self._card()]}

    async def one_model(self, name: str) -> Body:
        """The card of the model."""
        self._demand(name)
        return self._card()

    async def health(self) -> Body:
        """Whether the engine runs."""
        if not self.dispatcher.is_healthy:
            raise stopping()
        return {"status": "ok"}

    async def load_weights(self, body: Body) -> Body:
        """Replace the weights: load, let running answers finish, then go on with the new ones."""
        found = read_fields(body, {"path": text})
        if "path" not in found:
            raise wrong("path", None, "it names the checkpoint", "send a path")
        model, loop = self.model, asyncio.get_running_loop()
        loaded = await loop.run_in_executor(
            self._loader, lambda: with_weights(model, found["path"], is_trusted=self._is_trusted)
        )
        await self.dispatcher.swap(loaded)
        self.metrics.swaps.inc()
        return {"path": found["path"], "system_fingerprint": loaded.digest}

    def _card(self) -> Body:
        model = self.model
        return {
            "id": model.name,
            "object": "model",
            "created": self._started,
            "owned_by": "luyen",
            "max_model_len": model.max_model_len,
            "system_fingerprint": model.digest,
        }

    def _demand(self, name: str | None) -> None:
        if name is not None and name != self.model.name:
            raise unknown_model(name, self.model.name)

    def _count(self, job: Job, written: int) -> None:
        self.metrics.prompt_tokens.inc(sum(map(len, job.prompts)))
        self.metrics.generated_tokens.inc(written)

    async def _read(self, task: Callable[[], T]) -> T:
        """Run something slow on the thread of the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._reader, task)


async def _chained(
    first: EngineEvent | None, rest: AsyncGenerator[EngineEvent]
) -> AsyncGenerator[EngineEvent]:
    if first is not None:
        yield first
        async for event in rest:
            yield event


def _seed(given: int | None) -> int:
    return secrets.randbits(63) if given is None else given


def _counter(engine: ServingThread, name: str) -> float:
    return float(engine.cache_counts().get(name, 0))
