"""Generations that run while the caller does something else, each with its own weights.

They share one event loop on a thread of its own, which is the only one that touches the engine and
the tools. What a generation gives does not depend on when it runs, or beside which others.
"""

import asyncio
import threading
from collections.abc import Callable, Collection, Coroutine, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import AsyncExitStack
from typing import Any, TypeAlias, TypeVar, final

import torch

from luyen.base.heartbeat import HEART
from luyen.base.loops import loosened
from luyen.rollout.client import EngineClient
from luyen.rollout.protocol import RolloutEngine, Sampling
from luyen.rollout.single_turn import Draw, Group
from luyen.runtime.generation import Generation
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.waits import waiting_for

T = TypeVar("T")
GiveWeights: TypeAlias = Callable[[int, Collection[int]], Coroutine[Any, Any, None]]
"""`(version, versions to keep)`: gives the engine the trainer's weights of this moment."""
_LAST_S = 10.0
"""How long what still runs may take to end."""


@final
class AheadGeneration:
    """What is asked for begins at once; results are waited for when they are wanted."""

    def __init__(
        self,
        engine: RolloutEngine,
        generation: Generation,
        *,
        place: GiveWeights,
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
        self._loop = loosened(asyncio.new_event_loop())
        threads = torch.get_num_threads()
        self._thread = threading.Thread(
            target=self._run, args=(threads,), name="generation", daemon=True
        )
        self._thread.start()
        self._on_thread(self._enter(engine)).result()

    def begin(
        self,
        draws: Sequence[Draw],
        sampling: Sampling,
        *,
        purpose: str,
        version: int,
        journal: WorkJournal | None = None,
    ) -> "Begun":
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
        return Begun(self, found)

    def publish(self, version: int) -> "Placing":
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
        return Placing(self._on_thread(placing))

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
class Begun:
    """A generation in progress; to wait for it is to hear of whatever breaks first."""

    def __init__(self, ahead: AheadGeneration, future: Future[list[Group]]) -> None:
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
class Placing:
    """Weights on their way to an engine that goes on generating."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def wait(self) -> None:
        """Return when the engine holds them; raises what kept them from it."""
        with waiting_for("rollout"):
            self._future.result()
