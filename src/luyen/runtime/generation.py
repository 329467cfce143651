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
    """How the rollouts of a run are made. It holds no weights and no engine."""

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
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """Rollouts of every draw; those that the journal has are not made again.

        Whether their tokens are sound is not known before somebody asks for it (`compared`).
        """
        begun = self.begin(
            engine, draws, sampling, purpose=purpose, version=version, journal=journal
        )
        return begun()

    def begin(
        self,
        engine: RolloutEngine,
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> Callable[[], list[Group]]:
        """Ask the engine for what comes first; who asks the result gets what `play` gives.

        An engine that works elsewhere goes to work meanwhile.
        """
        if self.conversations is not None:
            return self.conversations.begin(
                engine,
                draws,
                sampling,
                seed=self.seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )
        return submit_requests(
            engine,
            self.renderer,
            draws,
            sampling,
            seed=self.seed,
            purpose=purpose,
            version=version,
            journal=journal,
        )

    async def converse(
        self,
        client: EngineClient,
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> list[Group]:
        """What `play` gives, beside other generations in the event loop of the caller."""
        if self.conversations is not None:
            return await self.conversations.converse(
                client,
                draws,
                sampling,
                seed=self.seed,
                purpose=purpose,
                version=version,
                journal=journal,
            )
        return await generate_groups(
            client,
            self.renderer,
            draws,
            sampling,
            seed=self.seed,
            purpose=purpose,
            version=version,
            journal=journal,
        )

    def compared(self, rollout: Rollout, prompt: Prompt) -> Rollout:
        """A rollout whose tokens are sound, or a UserError; its notes count what is odd in them."""
        talks = self.conversations
        return rollout if talks is None else talks.compared(rollout, prompt)

    def all_compared(self, groups: Sequence[Group]) -> list[Group]:
        """Groups of rollouts whose tokens are sound."""
        return [
            replace(g, rollouts=tuple(self.compared(r, g.prompt) for r in g.rollouts))
            for g in groups
        ]

    async def wind_down(self) -> None:
        """Let the tools go, in the event loop that `converse` ran in."""
        if self.conversations is not None:
            await self.conversations.wind_down()

    def broken(self, groups: Sequence[Group], *, purpose: str) -> list[Rollout]:
        """Rollouts that no reward should judge; a UserError when they are to stop the run."""
        if self.conversations is None:
            return []
        return self.conversations.faulty(groups, is_learned_from=purpose == "rollout")

    def close(self) -> None:
        """Let the tools go."""
        if self.conversations is not None:
            self.conversations.close()


# Generations that run while the caller does something else, each with its own weights.
#
# They share one event loop on a thread of its own, which is the only one that touches the
# engine and the tools. What a generation gives does not depend on when it runs, or beside which
# others.

T = TypeVar("T")
LoadWeights: TypeAlias = Callable[[int, Collection[int]], Coroutine[Any, Any, None]]
"""`(version, versions to keep)`: gives the engine the trainer's weights of this moment."""
_LAST_S = 10.0
"""How long what still runs may take to end."""


@final
class AsyncGeneration:
    """What is asked for begins at once; results are waited for when they are wanted."""

    def __init__(
        self,
        engine: RolloutEngine,
        generation: Generation,
        *,
        place: LoadWeights,
        is_swapping: bool = False,
    ) -> None:
        """`place` is run on the thread of the engine, while the caller waits for it.

        With `is_swapping` there is one version at a time: answers in progress go on with the next.
        """
        self._is_swapping = is_swapping
        self._generation = generation
        self._place = place
        self._client: EngineClient
        self._open = AsyncExitStack()
        self._begun: list[Future[list[Group]]] = []
        self._needed: tuple[int, ...] = ()
        self._held: set[int] = set()
        self._loop = with_daemon_threads(asyncio.new_event_loop())
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._run, args=(threads,), name="generation", daemon=True
        )
        self._thread.start()
        self._on_thread(self._enter(engine)).result()

    def begin(
        self,
        draws: Sequence[PromptRequest],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> "StartedGeneration":
        """Rollouts of every draw by a version of the weights that was published.

        Raises what stopped an earlier generation, if something did.
        """
        self.raise_first()
        assert version in self._held, f"version {version} of the weights was not published"
        asked = self._generation.converse(
            self._client, draws, sampling, purpose=purpose, version=version, journal=journal
        )
        found = self._on_thread(asked)
        self._begun.append(found)
        return StartedGeneration(self, found)

    def publish(self, version: int) -> "AsyncPublication":
        """Give the engine the trainer's weights of this moment, beside those that are kept.

        The trainer must not change them before the handle was waited for. Raises what stopped an
        earlier generation, if something did.
        """
        self.raise_first()
        kept = set[int]() if self._is_swapping else {v for v in self._held if v in self._needed}
        placing = self._place(version, kept)
        if self._is_swapping:
            placing = self._client.change_weights(version, placing)
        self._held = kept | {version}
        return AsyncPublication(self._on_thread(placing))

    def keep(self, versions: Collection[int]) -> None:
        """Only these versions will be asked for again, besides the trainer's own."""
        self._needed = tuple(versions)

    def forget(self) -> None:
        """The trainer's weights are others from now on: no version is what it was."""
        self._held, self._needed = set(), ()

    def wait_for(self, wanted: Future[list[Group]]) -> list[Group]:
        """The groups; raises the first error of any generation, without waiting for this one."""
        while not wanted.done():
            left = [one for one in self._begun if not one.done()]
            with waiting_for("rollout"):
                wait([wanted, *left], timeout=1.0, return_when=FIRST_COMPLETED)
            self.raise_first()
        return wanted.result()

    def on_engine(self, call: Callable[[], object]) -> None:
        """Call something that touches the engine, on the thread that may, and wait for it."""

        async def called() -> None:
            call()

        self._on_thread(called()).result()

    def close(self) -> None:
        """Stop what still runs, and let the tools go. Closing twice is allowed."""
        if not self._thread.is_alive():
            return
        ending = self._on_thread(self._leave())
        wait([ending], timeout=2 * _LAST_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_LAST_S)
        if not self._thread.is_alive():
            self._loop.close()

    def raise_first(self) -> None:
        """Raise what stopped a generation, if something did."""
        for found in self._begun:
            if found.done():
                found.result()
        if not self._thread.is_alive():
            raise RuntimeError("the thread that draws has ended, and nothing can be drawn")
        self._begun = [one for one in self._begun if not one.done()]

    def _on_thread(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _run(self, threads: int) -> None:
        # The number is each thread's own; another one could round sums otherwise.
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
        others = asyncio.all_tasks() - {asyncio.current_task()}
        playing = [task for task in others if task.get_name() != "rollout engine"]
        for task in playing:
            task.cancel()
        if playing:
            await asyncio.wait(playing, timeout=_LAST_S)
        await self._open.aclose()
        await self._generation.wind_down()


@final
class StartedGeneration:
    """A generation in progress; to wait for it is to hear of whatever breaks first."""

    def __init__(self, ahead: AsyncGeneration, future: Future[list[Group]]) -> None:
        self._ahead = ahead
        self._future = future

    def done(self) -> bool:
        """Whether nobody has to wait for it; raises the first error of any generation."""
        if not self._future.done():
            self._ahead.raise_first()
        return self._future.done()

    def result(self) -> list[Group]:
        """The groups; raises the first error of any generation."""
        return self._ahead.wait_for(self._future)


@final
class AsyncPublication:
    """Weights on their way to an engine that goes on generating."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the engine holds them; raises what kept them from it."""
        with waiting_for("rollout"):
            self._future.result()
