"""An engine shared by many coroutines: each awaits its completion, all are batched together.

The engine runs on the thread of the event loop, one pass at a time. Between two passes the event
loop runs every coroutine that is ready, such as conversations whose tools have returned.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.base.records import ExpertRoutes, join_routes
from luyen.base.seeds import derive_key
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling, TopLogps


@final
class PartialCompletion:
    """A completion in progress that several versions of the weights may generate in turn.

    After a weight update, the new version prefills the tokens so far and continues from there.
    Each token keeps the log-probability and the version that it was sampled with.
    """

    __slots__ = (
        "kept_mass",
        "key",
        "logps",
        "routes",
        "sampling",
        "tokens",
        "top_logps",
        "versions",
    )

    def __init__(self, key: int, sampling: Sampling) -> None:
        self.key = key
        """Random key of the rest."""
        self.sampling = sampling
        """Sampling parameters of the rest."""
        self.tokens: tuple[int, ...] = ()
        self.logps: tuple[float, ...] = ()
        self.kept_mass: tuple[float, ...] = ()
        self.versions: tuple[int, ...] = ()
        self.top_logps: tuple[TopLogps, ...] = ()
        self.routes: ExpertRoutes | None = None

    def continue_after(self, stopped: Completion, version: int) -> None:
        """Keep the tokens that a version has generated.

        A completion with stop strings is restarted: a string could span two weight versions.
        """
        if not stopped.tokens or self.sampling.stop_strings:
            return
        self._add(stopped, version)
        sampling, count = self.sampling, len(stopped.tokens)
        self.sampling = replace(
            sampling,
            max_new_tokens=sampling.max_new_tokens - count,
            min_new_tokens=max(0, sampling.min_new_tokens - count),
        )
        self.key = derive_key(self.key, "rest", len(self.tokens))

    def finish(self, last: Completion, version: int) -> Completion:
        """The whole completion; `last` is its final part."""
        self._add(last, version)
        return replace(
            last,
            tokens=self.tokens,
            logps=self.logps,
            kept_mass=self.kept_mass,
            versions=self.versions,
            top_logps=self.top_logps,
            routes=self.routes,
        )

    def _add(self, part: Completion, version: int) -> None:
        self.tokens += part.tokens
        self.logps += part.logps
        # A part may rule nothing out any more, where those before it did.
        whole = (1.0,) * len(part.tokens) if self.kept_mass else ()
        self.kept_mass += part.kept_mass or whole
        self.versions += (version,) * len(part.tokens)
        self.top_logps += part.top_logps
        # A part reads again what there is: those that sampled its tokens have chosen for them.
        self.routes = join_routes(self.routes, part.routes)


_YIELD_ROUNDS = 16
"""Iterations of the event loop between two passes, so that coroutines that are ready can run."""
_MAX_WAIT_PASSES = 4
"""Passes for which few requests wait for more: every prefill pauses the running sequences."""
_POLL_S = 0.002
"""Polling interval while the weights change."""
_FULL_BATCH = 8
"""Waiting requests that are submitted at once."""


@final
class _Ticket:
    """One completion that a coroutine awaits."""

    __slots__ = ("future", "partial", "request", "sample", "tokens", "weights")

    def __init__(
        self, tokens: tuple[int, ...], key: int, sampling: Sampling, weights: int | None
    ) -> None:
        self.tokens = tokens
        self.partial = PartialCompletion(key, sampling)
        self.weights = weights
        self.future: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.request = ""
        """Id of its engine request; empty while it is not submitted."""
        self.sample = 0
        """Its sample index in that request."""


@final
class EngineClient:
    """Awaitable access to an engine that many coroutines share.

    Equal prompts that are submitted together, such as the samples of a group at their first turn,
    become one request, so that the engine prefills them once.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._is_paused = False
        self.version: int | None = None
        """Version that serves all requests; None: the version that each request names."""
        self._waiting: list[_Ticket] = []
        self._submitted: dict[str, dict[int, _Ticket]] = {}
        self._arrived = asyncio.Event()
        self._count = 0
        self._waited_passes = 0
        self.failure: BaseException | None = None
        """The error that the engine failed with; every later call raises it."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a completion does not depend on the other sequences in the batch."""
        return self._engine.is_batch_invariant

    async def generate(
        self,
        tokens: tuple[int, ...],
        *,
        key: int,
        sampling: Sampling,
        deadline: float | None = None,
        weights: int | None = None,
    ) -> Completion:
        """Generate a continuation of `tokens` with a random key and a version of the weights.

        At the deadline (of the loop's clock) it returns the partial completion with the reason
        `aborted`. Cancelling the caller aborts the request.
        """
        if self.failure is not None:
            raise self.failure
        ticket = _Ticket(tokens, key, sampling, weights)
        self._waiting.append(ticket)
        self._arrived.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(ticket.future)
        except TimeoutError:
            return self._abort(ticket)
        except asyncio.CancelledError:
            self._abort(ticket)
            raise

    async def change_weights(self, version: int, load: Awaitable[None]) -> None:
        """Pause the engine while `load` loads new weights; running requests continue with them."""
        self._is_paused = True
        try:
            self._interrupt()
            await load
        finally:
            self._is_paused = False
        self.version = version
        self._arrived.set()

    def _interrupt(self) -> None:
        """Abort all submitted requests and queue them again with their partial completions."""
        assert self.version is not None or not self._submitted, (
            "requests were submitted before weights were loaded"
        )
        for name in list(self._submitted):
            for completion in self._engine.abort(name):
                ticket = self._submitted.get(completion.request, {}).get(completion.sample)
                if completion.reason != "aborted" or ticket is None:
                    self._deliver(completion)
                else:
                    self._requeue(ticket, completion)
        # Aborting may finish other requests, which the engine has not reported yet.
        while not self._engine.is_idle:
            for completion in self._engine.advance():
                self._deliver(completion)

    def _requeue(self, ticket: _Ticket, stopped: Completion) -> None:
        tickets = self._submitted[stopped.request]
        del tickets[stopped.sample]
        if not tickets:
            del self._submitted[stopped.request]
        assert self.version is not None
        ticket.partial.continue_after(stopped, self.version)
        ticket.request = ""
        self._waiting.append(ticket)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Run the engine inside the block; leaving it aborts all pending requests."""
        pump = asyncio.create_task(self._pump(), name="rollout engine")
        try:
            yield
        finally:
            pump.cancel()
            # Not awaited itself: an interrupt that ended it was raised already.
            await asyncio.wait({pump})
            if not pump.cancelled():
                pump.exception()
            self.abort_all()

    def abort_all(self) -> None:
        """Abort and drop all requests of this client."""
        for request, tickets in list(self._submitted.items()):
            self._engine.abort(request)
            for ticket in tickets.values():
                ticket.request = ""
        self._submitted.clear()
        self._waiting.clear()

    async def _pump(self) -> None:
        faults: list[BaseException] = []
        with boundary(faults):
            while True:
                await self._pass()
        self._fail(faults[0])  # all waiting callers raise it

    async def submit_ready(self) -> None:
        """Run the coroutines that are ready, and submit their requests."""
        for _ in range(_YIELD_ROUNDS):
            await asyncio.sleep(0)
        self._submit()

    async def _pass(self) -> None:
        await self.submit_ready()
        if self._is_paused:
            await asyncio.sleep(_POLL_S)
        elif not self._engine.is_idle:
            for completion in self._engine.advance():
                self._deliver(completion)
            beat()
        elif not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()

    def _submit(self) -> None:
        """Submit waiting requests, equal prompts together, once they are many or waited long."""
        if not self._waiting or self._is_paused:
            return
        self._waited_passes += 1
        is_alone = len(self._waiting) < _FULL_BATCH and self._waited_passes <= _MAX_WAIT_PASSES
        if is_alone and not self._engine.is_idle:
            return
        self._waited_passes = 0
        batches: dict[tuple[tuple[int, ...], Sampling, int | None], list[_Ticket]] = {}
        for ticket in self._waiting:
            tokens = ticket.tokens + ticket.partial.tokens
            weights = ticket.weights if self.version is None else None
            batches.setdefault((tokens, ticket.partial.sampling, weights), []).append(ticket)
        self._waiting = []
        for (tokens, sampling, weights), tickets in batches.items():
            self._count += 1
            name = f"ask-{self._count}"
            keys = tuple(ticket.partial.key for ticket in tickets)
            request = Request(id=name, tokens=tokens, keys=keys, sampling=sampling, weights=weights)
            try:
                self._engine.submit(request)
            except UserError as refusal:
                for ticket in tickets:
                    if not ticket.future.done():
                        ticket.future.set_exception(refusal)
                continue
            for sample, ticket in enumerate(tickets):
                ticket.request, ticket.sample = name, sample
            self._submitted[name] = dict(enumerate(tickets))

    def _deliver(self, completion: Completion) -> None:
        tickets = self._submitted.get(completion.request, {})
        ticket = tickets.pop(completion.sample, None)
        if not tickets:
            self._submitted.pop(completion.request, None)
        if ticket is not None and not ticket.future.done():
            ticket.future.set_result(self._merged(ticket, completion))

    def _merged(self, ticket: _Ticket, last: Completion) -> Completion:
        return last if self.version is None else ticket.partial.finish(last, self.version)

    def _abort(self, ticket: _Ticket) -> Completion:
        """Abort one request; its partial completion."""
        if ticket.future.done() and not ticket.future.cancelled():
            return ticket.future.result()
        empty = Completion(
            request=ticket.request, sample=ticket.sample, tokens=(), logps=(), reason="aborted"
        )
        if not ticket.request:
            self._waiting = [other for other in self._waiting if other is not ticket]
            return self._merged(ticket, empty)
        faults: list[BaseException] = []
        with boundary(faults):
            # An engine with rounds in flight may finish other requests while it aborts this one.
            for completion in self._engine.abort(ticket.request, ticket.sample):
                self._deliver(completion)
        if faults:
            ticket.future.cancel()  # its caller gets the failure instead
            raise self._fail(faults[0])  # not a fault of this conversation
        return ticket.future.result() if ticket.future.done() else self._merged(ticket, empty)

    def _fail(self, failure: BaseException) -> BaseException:
        """Raise a failure in all waiting callers; the first failure."""
        self.failure = failure = self.failure or failure
        tickets = [ticket for some in self._submitted.values() for ticket in some.values()]
        for ticket in (*tickets, *self._waiting):
            if not ticket.future.done():
                ticket.future.set_exception(failure)
        return failure
