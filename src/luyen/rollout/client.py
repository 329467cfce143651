"""Many coroutines, one engine: each awaits its own answer, and all of them are drawn together.

The engine runs on the thread of the event loop, a pass at a time; between two passes everything
that became ready meanwhile (tools that returned, conversations that go on) gets its turn.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import final

from luyen.base.errors import UserError
from luyen.rollout.protocol import Completion, Request, RolloutEngine, Sampling

_SETTLING_ROUNDS = 6
"""Turns of the event loop between two passes: what is ready runs until it waits for something."""
_LINGER_PASSES = 4
"""Passes that a lone newcomer waits for company: reading prompts one by one stops all the rest."""
_CROWD = 8
"""Newcomers that do not wait for more."""


@final
@dataclass(slots=True, eq=False)
class _Ticket:
    """One answer that somebody waits for."""

    tokens: tuple[int, ...]
    key: int
    sampling: Sampling
    answer: "asyncio.Future[Completion]"
    request: str = ""
    """The engine's request that holds it; empty while it waits here."""
    sample: int = 0
    """Its index there."""


@final
@dataclass(slots=True, eq=False)
class _Held:
    """Tickets that were submitted as one request, by sample."""

    tickets: dict[int, _Ticket] = field(default_factory=dict[int, _Ticket])


@final
class EngineClient:
    """The engine as an awaitable. Answers do not depend on who else asks.

    Prompts that are equal and asked for together, as the samples of a group at their first turn,
    become one request, so that the engine reads them once.
    """

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine
        self._waiting: list[_Ticket] = []
        self._held: dict[str, _Held] = {}
        self._arrived = asyncio.Event()
        self._count = 0
        self._lingered = 0
        self._failure: BaseException | None = None

    async def draw(
        self,
        tokens: tuple[int, ...],
        *,
        key: int,
        sampling: Sampling,
        deadline: float | None = None,
    ) -> Completion:
        """The continuation of `tokens` under a random key.

        At the deadline (of the loop's clock) it gives what there is, with the reason `aborted`; a
        cancelled caller leaves nothing running.
        """
        if self._failure is not None:
            raise self._failure
        loop = asyncio.get_running_loop()
        ticket = _Ticket(tokens=tokens, key=key, sampling=sampling, answer=loop.create_future())
        self._waiting.append(ticket)
        self._arrived.set()
        try:
            async with asyncio.timeout_at(deadline):
                return await asyncio.shield(ticket.answer)
        except TimeoutError:
            return self._withdraw(ticket)
        except asyncio.CancelledError:
            self._withdraw(ticket)
            raise

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Keep the engine going inside the block; leaving it stops what is still asked for."""
        pump = asyncio.create_task(self._pump(), name="rollout engine")
        try:
            yield
        finally:
            pump.cancel()
            with suppress(asyncio.CancelledError):
                await pump
            for request in list(self._held):
                self._engine.abort(request)
            self._held.clear()
            self._waiting.clear()

    async def _pump(self) -> None:
        try:
            while True:
                for _ in range(_SETTLING_ROUNDS):
                    await asyncio.sleep(0)
                self._submit()
                if self._engine.is_idle:
                    self._arrived.clear()
                    if not self._waiting:
                        await self._arrived.wait()
                    continue
                for completion in self._engine.advance():
                    self._deliver(completion)
        except Exception as failure:  # noqa: BLE001
            self._fail(failure)  # it belongs to everyone who waits

    def _submit(self) -> None:
        """Hand over what waits, equal prompts together, once it is many or has waited enough."""
        if not self._waiting:
            return
        self._lingered += 1
        is_alone = len(self._waiting) < _CROWD and self._lingered <= _LINGER_PASSES
        if is_alone and not self._engine.is_idle:
            return
        self._lingered = 0
        alike: dict[tuple[tuple[int, ...], Sampling], list[_Ticket]] = {}
        for ticket in self._waiting:
            alike.setdefault((ticket.tokens, ticket.sampling), []).append(ticket)
        self._waiting = []
        for (tokens, sampling), tickets in alike.items():
            self._count += 1
            name = f"ask-{self._count}"
            keys = tuple(ticket.key for ticket in tickets)
            try:
                self._engine.submit(Request(id=name, tokens=tokens, keys=keys, sampling=sampling))
            except UserError as refusal:
                for ticket in tickets:
                    if not ticket.answer.done():
                        ticket.answer.set_exception(refusal)
                continue
            for sample, ticket in enumerate(tickets):
                ticket.request, ticket.sample = name, sample
            self._held[name] = _Held(dict(enumerate(tickets)))

    def _deliver(self, completion: Completion) -> None:
        held = self._held.get(completion.request)
        ticket = held.tickets.pop(completion.sample, None) if held is not None else None
        if held is not None and not held.tickets:
            del self._held[completion.request]
        if ticket is not None and not ticket.answer.done():
            ticket.answer.set_result(completion)

    def _withdraw(self, ticket: _Ticket) -> Completion:
        """Stop one answer; what there is of it."""
        if ticket.answer.done() and not ticket.answer.cancelled():
            return ticket.answer.result()
        nothing = Completion(
            request=ticket.request, sample=ticket.sample, tokens=(), logps=(), reason="aborted"
        )
        if not ticket.request:
            self._waiting = [other for other in self._waiting if other is not ticket]
            return nothing
        # An engine that works ahead may finish other answers while it stops this one.
        for completion in self._engine.abort(ticket.request, ticket.sample):
            self._deliver(completion)
        return ticket.answer.result() if ticket.answer.done() else nothing

    def _fail(self, failure: BaseException) -> None:
        self._failure = failure
        held = [ticket for some in self._held.values() for ticket in some.tickets.values()]
        for ticket in (*held, *self._waiting):
            if not ticket.answer.done():
                ticket.answer.set_exception(failure)
