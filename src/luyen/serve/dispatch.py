"""Jobs of the event loop on the engine thread: admission, waiting, time limits, aborting."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar, final

from luyen.rollout.prompt_scores import PromptScores, prompt_logps
from luyen.rollout.protocol import Completion
from luyen.serve.failures import queue_full, too_slow, wrong
from luyen.serve.jobs import Job
from luyen.serve.model import ServedModel
from luyen.serve.serving_thread import EngineEvent, Finished, Refused, ServingThread

T = TypeVar("T")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ServeLimits:
    """What one server takes on.

    Example:
        >>> ServeLimits(max_queue=64).timeout_s
        600.0
    """

    max_queue: int = 1024
    """Most answers that are open at once, running or waiting; further requests get 429."""
    timeout_s: float = 600.0
    """Most seconds of a request, its waiting included; then 504."""
    body_timeout_s: float = 30.0
    """Most seconds until the body of a request has arrived; then 408."""
    max_body_bytes: int = 8 * 1024 * 1024
    """Most bytes of a body; larger ones get 413."""


@final
class Dispatcher:
    """Runs jobs of many clients on one engine; lives on the event loop."""

    def __init__(self, engine: ServingThread, limits: ServeLimits) -> None:
        self._engine = engine
        self._limits = limits
        self._sequences = 0

    @property
    def open_sequences(self) -> int:
        """Answers that are not finished."""
        return self._sequences

    @property
    def model(self) -> ServedModel:
        """The model that is served now."""
        return self._engine.model

    @property
    def is_healthy(self) -> bool:
        """Whether the engine runs."""
        return self._engine.is_alive

    async def run(self, job: Job) -> tuple[dict[int, Completion], str]:
        """All answers of a job by choice, and the digest of the weights that gave them."""
        found: dict[int, Completion] = {}
        digest = self.model.digest
        async with aclosing(self.events(job, streams=False)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    done = event.completion
                    found[job.choice(done.request, done.sample)] = done
                    digest = event.digest
        return found, digest

    async def events(self, job: Job, *, streams: bool) -> AsyncGenerator[EngineEvent]:
        """Events of a job until all its answers are there; leaving early aborts it."""
        arrived: asyncio.Queue[Sequence[EngineEvent]] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def listen(events: Sequence[EngineEvent]) -> None:
            # The loop may have ended while the engine was still at work.
            if not loop.is_closed():
                loop.call_soon_threadsafe(arrived.put_nowait, events)

        async with self._admitted(job.sequences):
            left = job.sequences
            if left:
                self._engine.submit(job.requests, listen, streams=streams)
            end = loop.time() + self._limits.timeout_s
            try:
                while left:
                    for event in await self._before(end, arrived.get()):
                        if isinstance(event, Refused):
                            raise event.failure
                        left -= isinstance(event, Finished)
                        yield event
            finally:
                if left:
                    self._engine.abort([request.id for request in job.requests])

    async def score_prompts(self, job: Job) -> tuple[list[PromptScores], str]:
        """Log-probabilities of a job's prompts, and the digest of the weights that gave them."""
        top = job.decoding.top_logprobs or 0

        def score(model: ServedModel) -> tuple[list[PromptScores], str]:
            return prompt_logps(model.loaded.policy, job.prompts, top=top), model.digest

        end = asyncio.get_running_loop().time() + self._limits.timeout_s
        async with self._admitted(len(job.prompts)):
            return await self._before(end, asyncio.wrap_future(self._engine.call(score)))

    async def swap(self, model: ServedModel) -> None:
        """Serve other weights once what runs is finished."""
        await asyncio.wrap_future(self._engine.swap(model))

    async def _before(self, end: float, work: Awaitable[T]) -> T:
        """What the work gives, if it does so by `end` of the loop's clock."""
        # Around each wait alone: a limit that spans a yield would end the task that reads events.
        try:
            async with asyncio.timeout_at(end):
                return await work
        except TimeoutError:
            raise too_slow(self._limits.timeout_s) from None

    @asynccontextmanager
    async def _admitted(self, sequences: int) -> AsyncIterator[None]:
        """Count answers as open; a failure where there would be too many."""
        most = self._limits.max_queue
        if sequences > most:
            why = f"the request wants {sequences} answers, and the server takes {most} at once"
            raise wrong("n", sequences, why, "send fewer prompts, or a smaller n")
        if self._sequences + sequences > most:
            raise queue_full(self._sequences, most)
        self._sequences += sequences
        try:
            yield
        finally:
            self._sequences -= sequences
