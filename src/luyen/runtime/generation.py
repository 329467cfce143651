"""Rollouts of a run: single-turn or conversations, synchronous or on the engine's own thread."""

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, final

import torch

from luyen.base.boundary import with_daemon_threads
from luyen.base.heartbeat import HEART
from luyen.base.records import Prompt, Rollout
from luyen.data.render import Renderer
from luyen.rollout.client import EngineClient
from luyen.rollout.multi_turn import Conversations
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.single_turn import Group, PromptRequest, generate_groups, submit_requests
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.spans import waiting_for


@final
class Generation:
    """Turns prompt requests into groups of rollouts. It holds no weights and no engine."""

    def __init__(
        self, *, renderer: Renderer, seed: int, conversations: Conversations | None = None
    ) -> None:
        """`conversations` plays several turns; without it every rollout is one answer."""
        self.renderer = renderer
        self.seed = seed
        self.conversations = conversations

    def play(
        self,
        engine: RolloutEngine,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """Rollouts of every request; those that the journal has are not generated again.

        Their tokens are not validated yet: `compared` does that.
        """
        begun = self.begin(
            engine, requests, sampling, purpose=purpose, version=version, journal=journal
        )
        return begun()

    def begin(
        self,
        engine: RolloutEngine,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Callable[[], list[Group]]:
        """Submit the first requests without blocking; the returned function gives the groups.

        A remote engine starts to generate at once.
        """
        if self.conversations is not None:
            return self.conversations.begin(
                engine,
                requests,
                sampling,
                seed=self.seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )
        return submit_requests(
            engine,
            self.renderer,
            requests,
            sampling,
            seed=self.seed,
            purpose=purpose,
            version=version,
            journal=journal,
        )

    async def converse(
        self,
        client: EngineClient,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """`play` as a coroutine, for several generations in the event loop of the caller."""
        if self.conversations is not None:
            return await self.conversations.converse(
                client,
                requests,
                sampling,
                seed=self.seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )
        return await generate_groups(
            client,
            self.renderer,
            requests,
            sampling,
            seed=self.seed,
            purpose=purpose,
            version=version,
            journal=journal,
        )

    def compared(self, rollout: Rollout, prompt: Prompt) -> Rollout:
        """The rollout after the retokenization check; a UserError if its tokens are invalid.

        Its notes count the differences that are allowed.
        """
        talks = self.conversations
        return rollout if talks is None else talks.compared(rollout, prompt)

    def all_compared(self, groups: Sequence[Group]) -> list[Group]:
        """The groups with every rollout checked by `compared`."""
        return [
            replace(g, rollouts=tuple(self.compared(r, g.prompt) for r in g.rollouts))
            for g in groups
        ]

    async def wind_down(self) -> None:
        """Close the tools, in the event loop that `converse` ran in."""
        if self.conversations is not None:
            await self.conversations.wind_down()

    def broken(self, groups: Sequence[Group], *, purpose: str) -> list[Rollout]:
        """Failed rollouts, which must not be scored; a UserError if the policy is to stop."""
        if self.conversations is None:
            return []
        return self.conversations.faulty(groups, is_learned_from=purpose == "rollout")

    def close(self) -> None:
        """Close the tools."""
        if self.conversations is not None:
            self.conversations.close()


# Asynchronous generation.

T = TypeVar("T")
LoadWeights: TypeAlias = Callable[[int, Collection[int]], Coroutine[Any, Any, None]]
"""`(version, versions to keep)`: loads the trainer's current weights into the engine."""
_LAST_S = 10.0
"""Seconds that running generations get to end on close."""


@final
class AsyncGeneration:
    """Generations that run while the caller trains, each with its own version of the weights.

    They share one event loop on a thread, which alone touches the engine and the tools. The
    rollouts of a generation do not depend on when it runs or on which generations run with it.
    """

    generates_remotely = True
    alternates = False

    def __init__(
        self,
        engine: RolloutEngine,
        generation: Generation,
        *,
        load_weights: LoadWeights,
        partial_rollouts: bool = False,
    ) -> None:
        """`load_weights` runs on the thread of the engine.

        With `partial_rollouts` the engine has one version at a time: unfinished responses
        continue with the next one.
        """
        self._partial_rollouts = partial_rollouts
        self._generation = generation
        self._load_weights = load_weights
        self._client: EngineClient
        self._open = AsyncExitStack()
        self._started: list[Future[list[Group]]] = []
        self._needed: tuple[int, ...] = ()
        self._versions: set[int] = set()
        self._loop = with_daemon_threads(asyncio.new_event_loop())
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._run, args=(threads,), name="generation", daemon=True
        )
        self._thread.start()
        self._on_thread(self._enter(engine)).result()

    def submit(
        self,
        requests: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> "StartedGeneration":
        """Start to generate rollouts of every request with a published version of the weights.

        Raises the error of an earlier generation that failed.
        """
        self.raise_failure()
        assert version in self._versions, f"version {version} of the weights was not published"
        coroutine = self._generation.converse(
            self._client, requests, sampling, purpose=purpose, version=version, journal=journal
        )
        future = self._on_thread(coroutine)
        self._started.append(future)
        return StartedGeneration(self, future)

    def publish(self, version: int) -> "AsyncPublication":
        """Load the trainer's current weights into the engine, in addition to the kept versions.

        The trainer must not change them before `wait` of the handle has returned. Raises the
        error of an earlier generation that failed.
        """
        self.raise_failure()
        kept = (
            set[int]()
            if self._partial_rollouts
            else {v for v in self._versions if v in self._needed}
        )
        loading = self._load_weights(version, kept)
        if self._partial_rollouts:
            loading = self._client.change_weights(version, loading)
        self._versions = kept | {version}
        return AsyncPublication(self._on_thread(loading))

    def keep_weights(self, versions: Collection[int]) -> None:
        """Only these versions will be submitted again, besides those published later."""
        self._needed = tuple(versions)

    def forget(self) -> None:
        """Drop every version: the trainer has loaded other weights."""
        self._versions, self._needed = set(), ()

    def wait_for(self, wanted: Future[list[Group]]) -> list[Group]:
        """The groups; raises the first error of any generation, without waiting for this one."""
        while not wanted.done():
            running = [one for one in self._started if not one.done()]
            with waiting_for("rollout"):
                wait([wanted, *running], timeout=1.0, return_when=FIRST_COMPLETED)
            self.raise_failure()
        return wanted.result()

    def on_engine(self, call: Callable[[], object]) -> None:
        """Run a call on the thread of the engine, and wait for it."""

        async def called() -> None:
            call()

        self._on_thread(called()).result()

    def close(self) -> None:
        """Cancel running generations and close the tools. Closing twice is allowed."""
        if not self._thread.is_alive():
            return
        ending = self._on_thread(self._leave())
        wait([ending], timeout=2 * _LAST_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LAST_S)
        if not self._thread.is_alive():
            self._loop.close()

    def raise_failure(self) -> None:
        """Raise the error of a generation that failed, if there is one."""
        for future in self._started:
            if future.done():
                future.result()
        if not self._thread.is_alive():
            raise RuntimeError("the generation thread has ended, and nothing can be generated")
        self._started = [one for one in self._started if not one.done()]

    def _on_thread(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, threads: int) -> None:
        # PyTorch keeps this number per thread, and another one could change how sums round.
        torch.set_num_threads(threads)
        asyncio.set_event_loop(self._loop)
        HEART.work_ahead()
        try:
            self._loop.run_forever()
        finally:
            HEART.end_ahead()

    async def _enter(self, engine: RolloutEngine) -> None:
        self._client = EngineClient(engine)
        await self._open.enter_async_context(self._client.running())

    async def _leave(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        running = [task for task in tasks if task.get_name() != "rollout engine"]
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=_LAST_S)
        await self._open.aclose()
        await self._generation.wind_down()


@final
class StartedGeneration:
    """A generation in progress; waiting for it raises the first error of any generation."""

    def __init__(self, ahead: AsyncGeneration, future: Future[list[Group]]) -> None:
        self._ahead = ahead
        self._future = future

    def done(self) -> bool:
        """Whether the groups are there; raises the first error of any generation."""
        if not self._future.done():
            self._ahead.raise_failure()
        return self._future.done()

    def result(self) -> list[Group]:
        """The groups; raises the first error of any generation."""
        return self._ahead.wait_for(self._future)


@final
class AsyncPublication:
    """A weight sync into an engine that keeps generating."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the engine has the weights; raises the error of the sync."""
        with waiting_for("rollout"):
            self._future.result()
