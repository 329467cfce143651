"""The process of a replica: one engine on its own thread behind asynchronous calls.

Calls may arrive out of order, so those whose order matters are numbered.
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
from luyen.runtime.gpu_memory import MappedWeights, MemoryProbe, can_read
from luyen.runtime.monitoring import (
    CallResult,
    ProcessTrace,
    TraceSpec,
    device_bytes,
    release_device_memory,
)
from luyen.runtime.ray.messages import PollResult, RemoteError, ReplicaFacts, ReplicaWeights
from luyen.runtime.weights import (
    PackedWeights,
    digests_of,
    free_memory,
    load_part,
    version_digests,
)
from luyen.telemetry.worker_spans import WORK


@final
class EngineThread:
    """Runs an engine on its own thread: passes while it has requests, and calls between passes.

    Only this thread touches the engine, so engines need not be thread-safe.
    """

    def __init__(
        self, make: Callable[[], RolloutEngine], *, name: str, changed: Callable[[], object]
    ) -> None:
        """`changed` is called on the thread after new completions or an error."""
        self._make = make
        self._name = name
        self._changed = changed
        self._calls: queue.SimpleQueue[tuple[Callable[[RolloutEngine], Any], Future[Any]]] = (
            queue.SimpleQueue()
        )
        self.finished: list[Completion] = []
        """Completions that were not dropped, in order; the thread only appends."""
        self.passes = 0
        """Passes so far."""
        self.failure: Exception | None = None
        """The first error of the engine."""
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, work: Callable[[RolloutEngine], Any]) -> Future[Any]:
        """Run a function on the engine between two passes, after earlier calls."""
        future: Future[Any] = Future()
        self._calls.put((work, future))
        return future

    def _work(self) -> None:
        faults: list[BaseException] = []
        with boundary(faults):
            engine = self._make()
            while True:
                self._run_calls(engine)
                self._advance(engine)
        self.failure = self.failure or self.as_error(faults[0])
        self._changed()
        while True:
            _, future = self._calls.get()
            future.set_exception(self.failure)

    def _run_calls(self, engine: RolloutEngine) -> None:
        """Run all queued calls; an idle engine waits for one."""
        must_wait = engine.is_idle
        while must_wait or not self._calls.empty():
            work, future = self._calls.get()
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
        """The error as it can be sent: a UserError stays one, the rest become `RemoteError`."""
        text = "".join(traceback.format_exception(fault)).rstrip()
        if isinstance(fault, UserError):
            fault.add_note(f"In {self._name}:\n{text}")
            return fault
        return fault if isinstance(fault, RemoteError) else RemoteError(self._name, text)


_REMEMBERED = 64
"""Publications whose state is kept."""


def _as_versioned(engine: RolloutEngine) -> VersionedEngines:
    """The engine as `VersionedEngines`, of one version unless it has more."""
    if isinstance(engine, VersionedEngines):
        return engine
    return VersionedEngines(lambda: engine, versions=1)


@final
class _PublicationState:
    """Progress of a publication on this replica."""

    def __init__(self) -> None:
        self.parts = 0
        self.names: set[str] = set()
        self.digests: dict[str, str] | None = None
        """Digests of the engine after the last part was loaded; None: not computed yet."""
        self.fault: BaseException | None = None


@final
class Replica:
    """The methods that the controller calls on a replica."""

    def __init__(
        self,
        make: Callable[[int], RolloutEngine],
        index: int,
        *,
        folder: str,
        node: Callable[[], str],
    ) -> None:
        """`folder` is the controller's working directory, so that relative paths are valid here."""
        if Path(folder).is_dir():
            os.chdir(folder)
        self._node = node()
        self._trace = ProcessTrace()
        self._index = index
        self._dropped = 0
        """Completions that the controller has received."""
        self._turn = 0
        self._publications: dict[int, _PublicationState] = {}
        self._newest = 0
        """The newest publication of which a part has arrived."""
        self._kept: Collection[int | None] = ()
        """Versions that are needed in addition to it."""
        self._numbers: dict[int | None, int] = {}
        """The newest publication of each version."""
        self._confirmed = {0}
        """Publications whose digests matched; 0: the engine's initial weights."""
        self._waiting: dict[int, dict[str, Request]] = {}
        """Requests by the publication that they wait for, and by id."""
        self._aborted: set[tuple[str, int]] = set()
        """Samples of waiting requests that were aborted."""
        self._moved = asyncio.Condition()
        loop = asyncio.get_running_loop()
        self._loop = loop
        self._thread = EngineThread(
            lambda: _as_versioned(make(index)),
            name=f"replica {index} (pid {os.getpid()} on node {self._node[:8]})",
            changed=lambda: loop.call_soon_threadsafe(self._notify_soon),
        )

    async def facts(self, probe: MemoryProbe | None = None) -> ReplicaFacts:
        """Identity of this process, once the engine is built, and whether it can read a probe."""
        is_batch_invariant, reads_ranks = await self._call_engine(
            lambda engine: (engine.is_batch_invariant, probe is not None and can_read(probe))
        )
        return ReplicaFacts(
            pid=os.getpid(),
            node=self._node,
            is_batch_invariant=is_batch_invariant,
            reads_ranks=reads_ranks,
        )

    async def submit(self, number: int, requests: Sequence[Request], publication: int = 0) -> None:
        """Queue requests, once the weights of a publication are confirmed.

        A request that can never be served is an error in the next poll result.
        """
        await self._take_turn(number)
        if publication in self._confirmed:
            self._enqueue(requests)
        else:
            waiting = self._waiting.setdefault(publication, {})
            waiting.update((request.id, request) for request in requests)

    def _enqueue(self, requests: Iterable[Request]) -> None:
        for request in requests:
            # Not awaited: the engine takes them between two passes, in this order.
            self._thread.call(lambda engine, r=request: self._submit(engine, r))

    def _submit(self, engine: RolloutEngine, request: Request) -> None:
        faults: list[BaseException] = []
        with boundary(faults):
            engine.submit(request)
            for sample in range(len(request.keys)):
                if (request.id, sample) in self._aborted:
                    self._aborted.discard((request.id, sample))
                    engine.abort(request.id, sample)
        if faults:  # no caller waits for this call: the next poll result carries the error
            self._thread.failure = self._thread.failure or self._thread.as_error(faults[0])
            self._loop.call_soon_threadsafe(self._notify_soon)

    async def collect(self, after: int, wait_s: float) -> PollResult:
        """Completions beyond the first `after`, as soon as there are any, or after `wait_s`."""
        self._drop(after)
        thread = self._thread

        def has_result() -> bool:
            return bool(thread.finished) or thread.failure is not None

        try:
            async with asyncio.timeout(wait_s), self._moved:
                await self._moved.wait_for(has_result)
        except TimeoutError:
            pass
        return self._poll_result()

    async def abort(self, number: int, request: str, sample: int | None, after: int) -> PollResult:
        """Stop a request or a sample of it: its partial completions, and those of `collect`."""
        await self._take_turn(number)
        self._drop(after)
        for waiting in self._waiting.values():
            if request in waiting and sample is not None:
                self._aborted.add((request, sample))
            elif request in waiting:
                del waiting[request]
                self._aborted = {one for one in self._aborted if one[0] != request}
        stopped: list[Completion] = await self._call_engine(
            lambda engine: engine.abort(request, sample)
        )
        result = self._poll_result()
        return replace(result, completions=(*result.completions, *stopped), failure=None)

    async def load(
        self,
        number: int,
        version: int | None,
        keep: Collection[int | None],
        part: PackedWeights | MappedWeights,
        parts: int | None = None,
    ) -> None:
        """Load a part of a publication into the engine; parts may arrive in any order.

        Versions not in `keep` are dropped. A part is ignored if a newer publication has dropped
        or replaced its version. After the last of `parts` parts the weights are digested.
        """
        if number >= self._newest:
            self._newest, self._kept = number, keep
            self._numbers = {v: n for v, n in self._numbers.items() if v in keep}
        keep, newest = self._kept, max(number, self._numbers.get(version, number))
        self._numbers[version] = newest
        is_late = number < newest or (number < self._newest and version not in keep)
        state = self._publications.setdefault(number, _PublicationState())
        self._publications = {
            n: one for n, one in self._publications.items() if n > number - _REMEMBERED
        }
        try:
            if not is_late:
                is_last = state.parts + 1 == parts
                names, digests = await self._call_engine(
                    lambda e: load_part(e, version, keep, part, is_last)
                )
                state.names |= names
                state.digests = digests
        except UserError as error:
            state.fault = state.fault or error
            raise
        finally:
            state.parts += 1
            await self._notify()

    async def load_last(
        self,
        number: int,
        version: int | None,
        keep: Collection[int | None],
        part: PackedWeights | MappedWeights,
        parts: int,
        expected: Mapping[str, str],
    ) -> ReplicaWeights:
        """`load`, then `confirm`, in one message."""
        await self.load(number, version, keep, part, parts)
        return await self.confirm(number, version, parts, expected)

    async def confirm(
        self, number: int, version: int | None, parts: int, expected: Mapping[str, str]
    ) -> ReplicaWeights:
        """Digests of the engine's weights, once all parts of a publication have arrived.

        Requests wait for this publication until its digests match `expected`. Empty if a newer
        publication has replaced the version.
        """
        state = self._publications.setdefault(number, _PublicationState())
        async with self._moved:
            await self._moved.wait_for(lambda: state.parts >= parts)
        if state.fault is not None:
            raise state.fault
        if number < self._numbers.get(version, number):
            return ReplicaWeights(version=number, digests={})
        digests, state.digests = state.digests, None
        if digests is None:
            digests = await self._call_engine(lambda engine: version_digests(engine, version)) or {}
        missing = [name for name in digests if name not in state.names]
        if missing:
            why = f"version {version} came without it, and {len(missing) - 1} more are missing"
            fix = "publish every trained parameter"
            raise UserError("actor_rollout_ref.rollout.name", missing[0], why, fix)
        if digests == expected:
            self._confirmed = {n for n in self._confirmed if n > number - _REMEMBERED} | {number}
            self._enqueue(self._waiting.pop(number, {}).values())
        return ReplicaWeights(version=number, digests=digests)

    async def fingerprint(self) -> dict[str, str] | None:
        """Digests of the newest weights; None: the engine has none."""
        return await self._call_engine(digests_of)

    async def rest(self) -> None:
        """Drop waiting requests and completions, and free the engine's memory."""
        self._waiting.clear()
        self._aborted.clear()
        await self._call_engine(free_memory)
        release_device_memory()
        self._dropped += len(self._thread.finished)
        self._thread.finished.clear()

    async def start_trace(self, trace: TraceSpec) -> None:
        """Start a trace of the engine's thread."""
        await self._call_engine(lambda _: self._trace.start(trace.of(f"rollout_{self._index}")))

    async def stop_trace(self) -> None:
        """End the trace and write its files."""
        await self._call_engine(lambda _: self._trace.stop())

    async def _call_engine(self, work: Callable[[Any], Any]) -> Any:
        return await asyncio.wrap_future(self._thread.call(work))

    async def _take_turn(self, number: int) -> None:
        async with self._moved:
            await self._moved.wait_for(lambda: self._turn == number)
            self._turn += 1
            self._moved.notify_all()

    def _drop(self, after: int) -> None:
        """Drop completions that the controller has received."""
        fresh = max(0, after - self._dropped)
        del self._thread.finished[:fresh]
        self._dropped += fresh

    def _poll_result(self) -> PollResult:
        thread = self._thread
        found = tuple(thread.finished)
        return PollResult(
            completions=found,
            end=self._dropped + len(found),
            passes=thread.passes,
            failure=thread.failure,
        )

    def _notify_soon(self) -> None:
        self._notifying = self._loop.create_task(self._notify())

    async def _notify(self) -> None:
        async with self._moved:
            self._moved.notify_all()


_SPANS = {Replica.load.__name__: "load weights", Replica.load_last.__name__: "load weights"}
"""Calls that are recorded as spans; generation is recorded on the engine's thread."""


@final
class ReplicaProcess:
    """The Ray actor of a replica: times its calls, and adds a report to their results."""

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
        """Call a method of the replica; without `is_heard` the spans wait for the next report."""
        came, name = time.time(), _SPANS.get(method)
        with nullcontext() if name is None else WORK.span(name):
            value = await getattr(self._replica, method)(*arguments)
        report = WORK.report(node=self._node, came=came) if is_heard else None
        return CallResult(value=value, report=report)
