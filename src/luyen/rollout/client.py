"""An engine shared by many coroutines: each awaits its completion, all are batched together.

The engine runs on the thread of the event loop, a pass at a time; between two passes everything
that became ready meanwhile (tools that returned, conversations that go on) gets its turn.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.base.seeds import derive_key
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling

# An answer that several versions of the weights draw, one after the other.
#
# When the weights change, the new ones read again what was drawn so far and go on from there.
# Each token keeps the log-probability and the version that it was drawn with.


@final
class PartialCompletion:
    """What there is of an answer, and how the rest of it is drawn."""

    __slots__ = ("kept_mass", "key", "logps", "sampling", "tokens", "versions")

    def __init__(self, key: int, sampling: Sampling) -> None:
        self.key = key
        """Random key of the rest."""
        self.sampling = sampling
        """How the rest is drawn."""
        self.tokens: tuple[int, ...] = ()
        self.logps: tuple[float, ...] = ()
        self.kept_mass: tuple[float, ...] = ()
        self.versions: tuple[int, ...] = ()

    def continue_after(self, stopped: Completion, version: int) -> None:
        """Keep what a version has drawn.

        An answer that a text may end begins anew: the text could stand across the seam.
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
        """The whole answer, of which the last part has come."""
        self._add(last, version)
        return replace(
            last,
            tokens=self.tokens,
            logps=self.logps,
            kept_mass=self.kept_mass,
            versions=self.versions,
        )

    def _add(self, part: Completion, version: int) -> None:
        self.tokens += part.tokens
        self.logps += part.logps
        # A part may rule nothing out any more, where those before it did.
        whole = (1.0,) * len(part.tokens) if self.kept_mass else ()
        self.kept_mass += part.kept_mass or whole
        self.versions += (version,) * len(part.tokens)


_YIELD_ROUNDS = 16
"""Turns of the event loop between two passes: what is ready runs until it waits for something."""
_MAX_WAIT_PASSES = 4
"""Passes that a lone newcomer waits for company: reading prompts one by one stops all the rest."""
_PAUSE_S = 0.002
"""Between two looks while weights change."""
_FULL_BATCH = 8
"""Newcomers that do not wait for more."""


@final
class _Ticket:
    """One answer that somebody waits for."""

    __slots__ = ("answer", "partial", "request", "sample", "tokens", "weights")

    def __init__(
        self, tokens: tuple[int, ...], key: int, sampling: Sampling, weights: int | None
    ) -> None:
        self.tokens = tokens
        self.partial = PartialCompletion(key, sampling)
        self.weights = weights
        self.answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self.request = ""
        """The engine's request that holds it; empty while it waits here."""
        self.sample = 0
        """Its index there."""


@final
class EngineClient:
    """The engine as an awaitable. Answers do not depend on who else asks.

    Prompts that are equal and asked for together, as the samples of a group at their first turn,
    become one request, so that the engine reads them once.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._is_paused = False
        self.version: int | None = None
        """Version that everything is drawn with, whatever was asked for; None: as asked."""
        self._waiting: list[_Ticket] = []
        self._submitted: dict[str, dict[int, _Ticket]] = {}
        self._arrived = asyncio.Event()
        self._count = 0
        self._waited_passes = 0
        self.failure: BaseException | None = None
        """What the engine broke with; nothing can be drawn any more."""

    @property
    def is_batch_invariant(self) -> bool:
        """Whether an answer does not depend on what else is drawn at the same time."""
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
        """The continuation of `tokens` under a random key, drawn with this version of the weights.

        At the deadline (of the loop's clock) it gives what there is, with the reason `aborted`; a
        cancelled caller leaves nothing running.
        """
        if self.failure is not None:
            raise self.failure
        ticket = _Ticket(tokens, key, sampling, weights)
        self._waiting.append(ticket)
        self._arrived.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(ticket.answer)
        except TimeoutError:
            return self._abort(ticket)
        except asyncio.CancelledError:
            self._abort(ticket)
            raise

    async def change_weights(self, version: int, place: Awaitable[None]) -> None:
        """Let the engine have other weights in the middle of answers, which go on with them."""
        self._is_paused = True
        try:
            self._interrupt()
            await place
        finally:
            self._is_paused = False
        self.version = version
        self._arrived.set()

    def _interrupt(self) -> None:
        """Take back what is being drawn; it waits here, with what there is of it."""
        assert self.version is not None or not self._submitted, "drawn before there were weights"
        for name in list(self._submitted):
            for completion in self._engine.abort(name):
                ticket = self._submitted.get(completion.request, {}).get(completion.sample)
                if completion.reason != "aborted" or ticket is None:
                    self._deliver(completion)
                else:
                    self._requeue(ticket, completion)
        # While one was stopped others may have ended, of which the engine has still to tell.
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
        """Keep the engine going inside the block; leaving it stops what is still asked for."""
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
        """Ask for nothing any more; what the engine is drawing for this client is dropped."""
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
        self._fail(faults[0])  # it belongs to everyone who waits

    async def submit_ready(self) -> None:
        """Let everything run that is ready, and hand over what it asks for."""
        for _ in range(_YIELD_ROUNDS):
            await asyncio.sleep(0)
        self._submit()

    async def _pass(self) -> None:
        await self.submit_ready()
        if self._is_paused:
            await asyncio.sleep(_PAUSE_S)
        elif not self._engine.is_idle:
            for completion in self._engine.advance():
                self._deliver(completion)
            beat()
        elif not self._waiting:
            self._arrived.clear()
            await self._arrived.wait()

    def _submit(self) -> None:
        """Hand over what waits, equal prompts together, once it is many or has waited enough."""
        if not self._waiting or self._is_paused:
            return
        self._waited_passes += 1
        is_alone = len(self._waiting) < _FULL_BATCH and self._waited_passes <= _MAX_WAIT_PASSES
        if is_alone and not self._engine.is_idle:
            return
        self._waited_passes = 0
        alike: dict[tuple[tuple[int, ...], Sampling, int | None], list[_Ticket]] = {}
        for ticket in self._waiting:
            tokens = ticket.tokens + ticket.partial.tokens
            weights = ticket.weights if self.version is None else None
            alike.setdefault((tokens, ticket.partial.sampling, weights), []).append(ticket)
        self._waiting = []
        for (tokens, sampling, weights), tickets in alike.items():
            self._count += 1
            name = f"ask-{self._count}"
            keys = tuple(ticket.partial.key for ticket in tickets)
            request = Request(id=name, tokens=tokens, keys=keys, sampling=sampling, weights=weights)
            try:
                self._engine.submit(request)
            except UserError as refusal:
                for ticket in tickets:
                    if not ticket.answer.done():
                        ticket.answer.set_exception(refusal)
                continue
            for sample, ticket in enumerate(tickets):
                ticket.request, ticket.sample = name, sample
            self._submitted[name] = dict(enumerate(tickets))

    def _deliver(self, completion: Completion) -> None:
        tickets = self._submitted.get(completion.request, {})
        ticket = tickets.pop(completion.sample, None)
        if not tickets:
            self._submitted.pop(completion.request, None)
        if ticket is not None and not ticket.answer.done():
            ticket.answer.set_result(self._whole(ticket, completion))

    def _whole(self, ticket: _Ticket, last: Completion) -> Completion:
        return last if self.version is None else ticket.partial.finish(last, self.version)

    def _abort(self, ticket: _Ticket) -> Completion:
        """Stop one answer; what there is of it."""
        if ticket.answer.done() and not ticket.answer.cancelled():
            return ticket.answer.result()
        nothing = Completion(
            request=ticket.request, sample=ticket.sample, tokens=(), logps=(), reason="aborted"
        )
        if not ticket.request:
            self._waiting = [other for other in self._waiting if other is not ticket]
            return self._whole(ticket, nothing)
        faults: list[BaseException] = []
        with boundary(faults):
            # An engine that works ahead may finish other answers while it stops this one.
            for completion in self._engine.abort(ticket.request, ticket.sample):
                self._deliver(completion)
        if faults:
            ticket.answer.cancel()  # nobody waits for it any more
            raise self._fail(faults[0])  # it is no fault of this conversation
        return ticket.answer.result() if ticket.answer.done() else self._whole(ticket, nothing)

    def _fail(self, failure: BaseException) -> BaseException:
        """Tell everyone who waits; the failure that was first."""
        self.failure = failure = self.failure or failure
        tickets = [ticket for some in self._submitted.values() for ticket in some.values()]
        for ticket in (*tickets, *self._waiting):
            if not ticket.answer.done():
                ticket.answer.set_exception(failure)
        return failure
