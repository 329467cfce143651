"""The process of a replica: one engine on its own thread behind asynchronous, timed calls.

Calls may arrive in another order than they were made, so those whose order matters are numbered.
"""

import asyncio
import os
import queue
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.rollout.engines import VersionedEngines
from luyen.rollout.protocol import Completion, Request, RolloutEngine
from luyen.runtime.monitoring import (
    CallResult,
    ProcessTrace,
    TraceSpec,
    device_bytes,
    release_device_memory,
)
from luyen.runtime.ray.messages import PollResult, RemoteError, ReplicaFacts, ReplicaWeights
from luyen.runtime.weights import WeightPart, digests_of, load_part, version_digests
from luyen.telemetry.worker_spans import WORK

# An engine on a thread of its own: whoever asks it something waits, nobody stops it.


@final
class EngineThread:
    """Makes an engine, lets it work while there is work, and does things to it between passes.

    Everything that touches the engine happens on the thread, so no engine need know of threads.
    """

    def __init__(
        self, make: Callable[[], RolloutEngine], *, name: str, changed: Callable[[], object]
    ) -> None:
        """`changed` is called on the thread when there is something new to say."""
        self._make = make
        self._name = name
        self._changed = changed
        self._asked: queue.SimpleQueue[tuple[Callable[[RolloutEngine], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self.finished: list[Completion] = []
        """Every answer that was not dropped, in order; it only grows at its end here."""
        self.passes = 0
        """Passes so far."""
        self.failure: Exception | None = None
        """What the engine broke with, or refused first."""
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def ask(self, work: Callable[[RolloutEngine], Any]) -> Future[Any]:
        """Do something to the engine, between two passes and after what was asked before."""
        future: Future[Any] = Future()
        self._asked.put((work, future))
        return future

    def _work(self) -> None:
        faults: list[BaseException] = []
        with boundary(faults):
            engine = self._make()
            while True:
                self._do_what_is_asked(engine)
                self._advance(engine)
        self.failure = self.failure or self.as_error(faults[0])
        self._changed()
        while True:
            _, future = self._asked.get()
            future.set_exception(self.failure)

    def _do_what_is_asked(self, engine: RolloutEngine) -> None:
        """All that is asked by now; an idle engine waits for something."""
        must_wait = engine.is_idle
        while must_wait or not self._asked.empty():
            work, future = self._asked.get()
            faults: list[BaseException] = []
            with boundary(faults):
                future.set_result(work(engine))
            if faults:
                future.set_exception(self.as_error(faults[0]))
            must_wait = False

    def _advance(self, engine: RolloutEngine) -> None:
        if engine.is_idle:
            WORK.end_stretch()
            return
        WORK.begin_pass()
        done = engine.advance()
        WORK.end_pass(answers=len(done), is_idle=engine.is_idle)
        self.passes += 1
        if done:
            self.finished += done
            self._changed()

    def as_error(self, fault: BaseException) -> Exception:
        """A fault as it can be sent: what the user can mend stays what it is."""
        text = "".join(traceback.format_exception(fault)).rstrip()
        if isinstance(fault, UserError):
            fault.add_note(f"In {self._name}:\n{text}")
            return fault
        return fault if isinstance(fault, RemoteError) else RemoteError(self._name, text)


_REMEMBERED = 64
"""Publications of which it is known what came of them."""


def _resident(engine: RolloutEngine) -> VersionedEngines:
    """An engine as a place for one version of the weights, unless it has room for more."""
    if isinstance(engine, VersionedEngines):
        return engine
    return VersionedEngines(lambda: engine, versions=1)


@final
class _Arrived:
    """What came of a publication."""

    def __init__(self) -> None:
        self.parts = 0
        self.names: set[str] = set()
        self.held: dict[str, str] | None = None
        """What the engine was found to hold when the last part was written; None: look now."""
        self.fault: BaseException | None = None


@final
class Replica:
    """An engine that was made here, and what became of the requests it was given."""

    def __init__(
        self,
        make: Callable[[int], RolloutEngine],
        index: int,
        *,
        folder: str,
        node: Callable[[], str],
    ) -> None:
        """`folder` is the controller's, so that relative paths mean the same here."""
        if Path(folder).is_dir():
            os.chdir(folder)
        self._node = node()
        self._trace = ProcessTrace()
        self._index = index
        self._dropped = 0
        """Answers that the controller is known to have."""
        self._turn = 0
        self._arrived: dict[int, _Arrived] = {}
        self._newest = 0
        """The newest publication of which a part has come."""
        self._kept: Collection[int | None] = ()
        """Versions that are needed beside it."""
        self._numbers: dict[int | None, int] = {}
        """The newest publication of each version."""
        self._confirmed = {0}
        """Publications that were found to be what they should; 0: the engine as it was made."""
        self._early: dict[int, dict[str, Request]] = {}
        """Requests by the publication that they wait for, and by their id."""
        self._unwanted: set[tuple[str, int]] = set()
        """Answers of such requests that nobody waits for any more."""
        self._moved = asyncio.Condition()
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._thread = EngineThread(
            lambda: _resident(make(index)),
            name=f"replica {index} (pid {os.getpid()} on node {self._node[:8]})",
            changed=lambda: loop.call_soon_threadsafe(self._stir),
        )

    async def facts(self) -> ReplicaFacts:
        """Who this is, once the engine is made."""
        is_batch_invariant = await self._ask(lambda engine: engine.is_batch_invariant)
        return ReplicaFacts(pid=os.getpid(), node=self._node, is_batch_invariant=is_batch_invariant)

    async def submit(self, number: int, requests: Sequence[Request], publication: int = 0) -> None:
        """Queue requests, once the weights of a publication were found to be what they should.

        One that can never be served is told with the next news.
        """
        await self._take_turn(number)
        if publication in self._confirmed:
            self._hand_in(requests)
        else:
            early = self._early.setdefault(publication, {})
            early.update((request.id, request) for request in requests)

    def _hand_in(self, requests: Iterable[Request]) -> None:
        for request in requests:
            # Not awaited: the engine takes them between two passes, in this order.
            self._thread.ask(lambda engine, r=request: self._submit(engine, r))

    def _submit(self, engine: RolloutEngine, request: Request) -> None:
        faults: list[BaseException] = []
        with boundary(faults):
            engine.submit(request)
            for sample in range(len(request.keys)):
                if (request.id, sample) in self._unwanted:
                    self._unwanted.discard((request.id, sample))
                    engine.abort(request.id, sample)
        if faults:  # nobody waits for this call: it is told with the news
            self._thread.failure = self._thread.failure or self._thread.as_error(faults[0])
            self._loop.call_soon_threadsafe(self._stir)

    async def collect(self, after: int, wait_s: float) -> PollResult:
        """Answers beyond the first `after`, as soon as there are any, or at the end of the wait."""
        self._drop(after)
        thread = self._thread

        def has_news() -> bool:
            return bool(thread.finished) or thread.failure is not None

        try:
            async with asyncio.timeout(wait_s), self._moved:
                await self._moved.wait_for(has_news)
        except TimeoutError:
            pass
        return self._news()

    async def abort(self, number: int, request: str, sample: int | None, after: int) -> PollResult:
        """Stop a request or a sample of it: its unfinished answers, and all that `collect` has."""
        await self._take_turn(number)
        self._drop(after)
        for early in self._early.values():
            if request in early and sample is not None:
                self._unwanted.add((request, sample))
            elif request in early:
                del early[request]
                self._unwanted = {one for one in self._unwanted if one[0] != request}
        stopped: list[Completion] = await self._ask(lambda engine: engine.abort(request, sample))
        news = self._news()
        return replace(news, completions=(*news.completions, *stopped), failure=None)

    async def load(
        self,
        number: int,
        version: int | None,
        keep: Collection[int | None],
        part: WeightPart,
        parts: int | None = None,
    ) -> None:
        """Write some weights of a publication into the engine; parts may come in any order.

        Versions that are not to be kept are let go, and a part of one that a newer publication
        has ended, or has published anew, comes too late. Where this is the last of so many parts,
        the engine is looked at as well, while it is its turn.
        """
        if number >= self._newest:
            self._newest, self._kept = number, keep
            self._numbers = {v: n for v, n in self._numbers.items() if v in keep}
        keep, newest = self._kept, max(number, self._numbers.get(version, number))
        self._numbers[version] = newest
        is_late = number < newest or (number < self._newest and version not in keep)
        arrived = self._arrived.setdefault(number, _Arrived())
        self._arrived = {n: one for n, one in self._arrived.items() if n > number - _REMEMBERED}
        try:
            if not is_late:
                is_last = arrived.parts + 1 == parts
                names, held = await self._ask(lambda e: load_part(e, version, keep, part, is_last))
                arrived.names |= names
                arrived.held = held
        except UserError as error:
            arrived.fault = arrived.fault or error
            raise
        finally:
            arrived.parts += 1
            await self._stir_now()

    async def load_last(
        self,
        number: int,
        version: int | None,
        keep: Collection[int | None],
        part: WeightPart,
        parts: int,
        expected: Mapping[str, str],
    ) -> ReplicaWeights:
        """`load`, then `confirm`, in one message."""
        await self.load(number, version, keep, part, parts)
        return await self.confirm(number, version, parts, expected)

    async def confirm(
        self, number: int, version: int | None, parts: int, expected: Mapping[str, str]
    ) -> ReplicaWeights:
        """What the engine holds, once all parts of a publication are there.

        Only if that is what was expected are requests drawn with it. Of a version that a newer
        publication has ended, or has published anew, nothing.
        """
        arrived = self._arrived.setdefault(number, _Arrived())
        async with self._moved:
            await self._moved.wait_for(lambda: arrived.parts >= parts)
        if arrived.fault is not None:
            raise arrived.fault
        if number < self._numbers.get(version, number):
            return ReplicaWeights(version=number, digests={})
        held, arrived.held = arrived.held, None
        if held is None:
            held = await self._ask(lambda engine: version_digests(engine, version)) or {}
        missing = [name for name in held if name not in arrived.names]
        if missing:
            why = f"version {version} came without it, and {len(missing) - 1} more are missing"
            fix = "publish every parameter that learns"
            raise UserError("actor_rollout_ref.rollout.name", missing[0], why, fix)
        if held == expected:
            self._confirmed = {n for n in self._confirmed if n > number - _REMEMBERED} | {number}
            self._hand_in(self._early.pop(number, {}).values())
        return ReplicaWeights(version=number, digests=held)

    async def fingerprint(self) -> dict[str, str] | None:
        """Digests of the weights that came last; None: the engine cannot say."""
        return await self._ask(digests_of)

    async def rest(self) -> None:
        """Free what the engine holds."""
        self._early.clear()
        self._unwanted.clear()
        await self._ask(lambda engine: engine.close())
        release_device_memory()
        self._dropped += len(self._thread.finished)
        self._thread.finished.clear()

    async def start_trace(self, trace: TraceSpec) -> None:
        """Record what the engine computes from now on."""
        await self._ask(lambda _: self._trace.start(trace.of(f"rollout_{self._index}")))

    async def stop_trace(self) -> None:
        """Write down what was recorded."""
        await self._ask(lambda _: self._trace.stop())

    async def _ask(self, work: Callable[[Any], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.ask(work))

    async def _take_turn(self, number: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._turn == number)
            self._turn += 1
            self._moved.notify_all()

    def _drop(self, after: int) -> None:
        """Forget what the controller has."""
        fresh = max(0, after - self._dropped)
        del self._thread.finished[:fresh]
        self._dropped += fresh

    def _news(self) -> PollResult:
        thread = self._thread
        found = tuple(thread.finished)
        return PollResult(
            completions=found,
            end=self._dropped + len(found),
            passes=thread.passes,
            failure=thread.failure,
        )

    def _stir(self) -> None:
        self._stirring = self._loop.create_task(self._stir_now())

    async def _stir_now(self) -> None:
        async with self._moved:
            self._moved.notify_all()


# The process of a replica: its calls are timed, and what it did travels with the answers.

_SPANS = {
    "load": "load weights",
    "load_last": "load weights",
    "confirm": "confirm weights",
}
"""Calls that are work of their own; drawing is timed where it is done, in the engine's thread."""


@final
class ReplicaProcess:
    """A replica behind one method."""

    def __init__(
        self,
        make: Callable[[int], RolloutEngine],
        index: int,
        *,
        folder: str,
        node: Callable[[], str],
    ) -> None:
        WORK.device_bytes = device_bytes
        self._node = node()
        self._replica = Replica(make, index, folder=folder, node=node)

    async def carry_out(self, is_heard: bool, method: str, *arguments: Any) -> CallResult:
        """Call a method of the replica; where nobody hears the answer, spans wait for another."""
        came, name = time.time(), _SPANS.get(method)
        with nullcontext() if name is None else WORK.span(name):
            value = await getattr(self._replica, method)(*arguments)
        report = WORK.report(node=self._node, came=came) if is_heard else None
        return CallResult(value=value, report=report)
