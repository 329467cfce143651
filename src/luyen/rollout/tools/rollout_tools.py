"""The tools of one rollout: calls are validated, retried, journaled, recorded."""

import asyncio
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias, final

from luyen.base.boundary import boundary, own_copy
from luyen.base.errors import near_names
from luyen.base.records import CallStatus, ToolCall
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.protocol import (
    OneAtATime,
    OwnTimeout,
    Side,
    ToolLimits,
    ToolReply,
    ToolSession,
    ToolTimeout,
    as_text,
    truncate_text,
)
from luyen.rollout.tools.user_code import (
    CallOutcome,
    InvalidArguments,
    ToolError,
    ToolFault,
    attempt,
    line_of,
    one_line,
    place_of,
)
from luyen.rollout.tools.validate import Validator
from luyen.telemetry.journal import CallRecord, WorkJournal


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class BoundTool:
    """A tool and its session in one rollout.

    Example:
        >>> BoundTool(name="add", validator=Validator("add", {}), limits=ToolLimits(),
        ...       free=asyncio.Semaphore(1), session=None, problem="no server").problem
        'no server'
    """

    name: str
    """Its name."""
    validator: Validator
    """Validates arguments against its schema."""
    limits: ToolLimits
    """Timeout, retries and concurrency."""
    free: AbstractAsyncContextManager[Any]
    """Semaphore that limits concurrent calls."""
    session: ToolSession | None
    """Its session; None when it could not be opened."""
    problem: str = ""
    """Why there is no session."""
    is_stateful: bool = False
    """Whether calls share a state, its own or the environment's, that dies with the process."""
    is_shared: bool = False
    """Whether all rollouts share the session: it scores nothing and is not released."""


async def call_with_retries(
    bound: BoundTool, session: ToolSession, arguments: Mapping[str, Any]
) -> tuple[CallOutcome, int, float]:
    """The last outcome of a call, how often it was tried, and how long it ran in all."""
    seconds = 0.0
    limit = None if isinstance(session, OwnTimeout) else bound.limits.timeout_s
    for number in range(bound.limits.retries + 1):
        if number > 0:
            await asyncio.sleep(bound.limits.backoff_s * 2 ** (number - 1))
        async with bound.free:
            outcome = await attempt(_call_session(session, arguments), seconds=limit)
        if isinstance(outcome.fault, ToolTimeout):
            outcome = CallOutcome(is_late=True, seconds=outcome.seconds)
        seconds += outcome.seconds
        is_final = isinstance(outcome.fault, InvalidArguments | ToolError)
        has_answered = outcome.fault is None and not outcome.is_late
        if has_answered or is_final or number == bound.limits.retries:
            return outcome, number + 1, seconds
    raise AssertionError("a call is tried at least once")


async def _call_session(session: ToolSession, arguments: Mapping[str, Any]) -> ToolReply:
    """Every attempt gets a copy of the arguments, which a tool may modify."""
    return await session.call(own_copy(arguments))


OnUnknown: TypeAlias = Literal["retry", "fault"]
"""A call with an unknown outcome: make it again, or fail the rollout."""
_key: ContextVar[str | None] = ContextVar("idempotency_key", default=None)


@final
class UnknownOutcome(Exception):
    """A tool was about to be called when the run was killed, and may have acted."""


def idempotency_key() -> str | None:
    """Inside a tool: the key of the call in progress, for services that take one; None: none.

    It is the same when a killed run makes the call again.
    """
    return _key.get()


@final
class CallJournal:
    """The journal of the tool calls of one attempt at a rollout.

    Before a call its intent is written under a key that identifies the call across restarts; after
    it, the result. A resumed run finds a result and does not call, or finds an intent without a
    result: the tool may or may not have acted.
    """

    def __init__(
        self, journal: WorkJournal, address: Sequence[Any], *, on_unknown: OnUnknown = "retry"
    ) -> None:
        """`address` names the attempt among all of the run."""
        self._journal = journal
        self._address = tuple(address)
        self._on_unknown = on_unknown

    def begin(
        self, written: WrittenCall, *, turn: int, index: int, is_stateful: bool
    ) -> tuple[str, CallRecord | None]:
        """The key of a call, and what came of it if it need not be made.

        A session that `is_stateful` earlier calls lost them with its process: they are made again.
        UnknownOutcome where that is the policy.
        """
        name, arguments = written.name, written.arguments
        key = self._journal.call_key((*self._address, turn, index), name, arguments)
        known = self._journal.call(key)
        if known.call is not None and not is_stateful:
            return key, known
        if known.is_unknown and self._on_unknown == "fault":
            raise UnknownOutcome(
                f"{name}: the run was killed during this call, and it is unknown whether it acted "
                "(multi_turn.on_unknown)"
            )
        self._journal.intend(key, name, arguments)
        _key.set(key)
        return key, None

    def end(self, key: str, call: ToolCall | None, metrics: Mapping[str, Any]) -> None:
        """Write down how a call ended; None when it broke or was cut off."""
        self._journal.keep_call(key, call, metrics)


OnError: TypeAlias = Literal["observe", "fault"]
"""Whether a tool that is broken is shown to the policy, or ends the rollout as a fault."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallOptions:
    """How calls are validated and results are shown.

    Example:
        >>> CallOptions().side
        'middle'
    """

    most: int = 256
    """Most characters of a result."""
    side: Side = "middle"
    """Which part of a longer one is kept."""
    from_text: bool = False
    """Whether the call format writes every argument as text."""
    on_error: OnError = "observe"
    """Whether a broken tool is shown to the policy or ends the rollout."""
    end_s: float = 30.0
    """Most seconds for all scores of a rollout, and again for all releases."""


@final
class RolloutTools:
    """The sessions of one rollout. Release them at the end, whatever happened."""

    def __init__(
        self,
        bound_tools: Sequence[BoundTool],
        options: CallOptions,
        ledger: CallJournal | None = None,
    ) -> None:
        """`ledger` journals the calls, in a run with a journal."""
        self._ledger = ledger
        self._bound = {bound.name: bound for bound in bound_tools}
        self._options = options
        self._locks = {
            bound.name: asyncio.Lock() if isinstance(bound.session, OneAtATime) else nullcontext()
            for bound in bound_tools
        }
        self._is_released = False
        self.metrics: dict[str, float] = {}
        """Sums of what tools measured, as `tool/metric`."""
        self.problems: list[str] = []
        """Errors of `release`, which neither the policy nor the rollout reports."""

    async def call(self, written: WrittenCall, turn: int, index: int = 0) -> ToolCall:
        """Make a call, the turn's `index`th; one that the ledger knows is not made again.

        Only a cancellation is raised, and a ToolFault or UnknownOutcome where that is the policy.
        """
        arguments, mistake = self._check(written, turn)
        if mistake is not None:
            return mistake
        bound = self._bound[written.name]
        if bound.session is None:
            if self._options.on_error == "fault":
                raise ToolFault(f"{bound.name}: {bound.problem}")
            return self._failed_call(written, turn, CallStatus.FAILED, bound.problem)
        if self._ledger is None:
            return (await self._run(written, turn, bound, arguments))[0]
        key, known = self._ledger.begin(
            written, turn=turn, index=index, is_stateful=bound.is_stateful
        )
        if known is not None and known.call is not None:
            self._count(known.metrics or {})
            return known.call
        call, metrics = None, dict[str, float]()
        try:
            call, metrics = await self._run(written, turn, bound, arguments)
            return call
        finally:
            self._ledger.end(key, call, metrics)

    async def _run(
        self, written: WrittenCall, turn: int, bound: BoundTool, arguments: Mapping[str, Any]
    ) -> tuple[ToolCall, dict[str, float]]:
        """Make a call; its record and the tool's metrics."""
        assert bound.session is not None
        async with self._locks[bound.name]:
            outcome, attempts, seconds = await call_with_retries(bound, bound.session, arguments)
        call, metrics = self._to_call(written, turn, bound, outcome)
        self._count(metrics)
        return replace(call, attempts=attempts, seconds=seconds), metrics

    def _count(self, metrics: Mapping[str, float]) -> None:
        for path, value in metrics.items():
            self.metrics[path] = self.metrics.get(path, 0.0) + float(value)

    def malformed(self, problem: str, turn: int) -> ToolCall:
        """The record of a malformed call, as the policy reads it."""
        nameless = WrittenCall(name="", arguments={})
        return self._failed_call(nameless, turn, CallStatus.MALFORMED, problem)

    def refused(self, written: WrittenCall, why: str, turn: int) -> ToolCall:
        """The record of a call that is not made, as the policy reads it.

        An invalid call is recorded as invalid, not as refused.
        """
        mistake = self._check(written, turn)[1]
        return mistake or self._failed_call(written, turn, CallStatus.REFUSED, why)

    async def score(self) -> dict[str, float]:
        """Rewards of the whole rollout, by tool, from the tools that give one.

        A ToolFault when one cannot say: a missing reward must not read as 0.
        """
        own = self._own_sessions()
        outcomes = await self._attempt_all([session.score() for _, session in own])
        found: dict[str, float] = {}
        for (bound, _), outcome in zip(own, outcomes, strict=True):
            problem = _problem(outcome, bound.name, "score")
            if problem is None and not _is_reward(outcome.value):
                problem = f"{bound.name}: its score is {one_line(repr(outcome.value))}, no number"
            if problem is not None:
                raise ToolFault(problem)
            if outcome.value is not None:
                found[bound.name] = float(outcome.value)
        return found

    async def release(self) -> None:
        """Release every session once; what goes wrong is noted in `problems`. Twice is allowed."""
        if self._is_released:
            return
        self._is_released = True
        own = self._own_sessions()
        outcomes = await self._attempt_all([session.release() for _, session in own])
        for (bound, _), outcome in zip(own, outcomes, strict=True):
            problem = _problem(outcome, bound.name, "release")
            if problem is not None:
                self.problems.append(problem)

    def _own_sessions(self) -> list[tuple[BoundTool, ToolSession]]:
        """Sessions that were opened for this rollout."""
        return [
            (bound, bound.session)
            for bound in self._bound.values()
            if bound.session is not None and not bound.is_shared
        ]

    async def _attempt_all(self, waiting: Sequence[Any]) -> list[CallOutcome]:
        if not waiting:
            return []
        limit = self._options.end_s
        return await asyncio.gather(*(attempt(one, seconds=limit) for one in waiting))

    def _check(self, written: WrittenCall, turn: int) -> tuple[dict[str, Any], ToolCall | None]:
        """The arguments as the tool gets them, or what is wrong with the call."""
        bound = self._bound.get(written.name)
        if bound is None:
            why = self._unknown_tool(written.name)
            return {}, self._failed_call(written, turn, CallStatus.UNKNOWN_TOOL, why)
        faults: list[BaseException] = []
        with boundary(faults):
            fitted = bound.validator.fit(written.arguments, from_text=self._options.from_text)
            return own_copy(fitted), None
        # Also what is nested too deeply, or a number with too many digits, is the policy's mistake.
        why = line_of(faults[0])
        return {}, self._failed_call(written, turn, CallStatus.INVALID_ARGUMENTS, why)

    def _to_call(
        self, written: WrittenCall, turn: int, bound: BoundTool, outcome: CallOutcome
    ) -> tuple[ToolCall, dict[str, float]]:
        faults: list[BaseException] = []
        if outcome.fault is not None:
            faults.append(outcome.fault)
        elif not outcome.is_late:
            with boundary(faults):
                return self._succeeded(written, turn, outcome.value)
        if outcome.is_late:
            status, said = CallStatus.TIMED_OUT, f"no answer within {bound.limits.timeout_s:g} s"
        elif isinstance(faults[0], InvalidArguments):
            return self._failed_call(
                written, turn, CallStatus.INVALID_ARGUMENTS, line_of(faults[0])
            ), {}
        else:
            status, said = CallStatus.FAILED, line_of(faults[0])
        where = place_of(faults[0]) if faults else ""
        error = f"{said} ({where})" if where else said
        if self._options.on_error == "fault" and not isinstance(outcome.fault, ToolError):
            raise ToolFault(f"{bound.name}: {error}")
        return replace(self._failed_call(written, turn, status, said), error=error), {}

    def _succeeded(
        self, written: WrittenCall, turn: int, reply: Any
    ) -> tuple[ToolCall, dict[str, float]]:
        if not isinstance(reply, ToolReply):
            raise TypeError(f"it returned a {type(reply).__name__} where a reply is due")
        if not _is_reward(reply.reward):
            raise TypeError(f"its reward is {reply.reward!r}, no number")
        text = truncate_text(as_text(reply.text), most=self._options.most, side=self._options.side)
        metrics = {f"{written.name}/{name}": float(v) for name, v in reply.metrics.items()}
        call = ToolCall(
            turn=turn,
            name=written.name,
            arguments=written.arguments,
            status=CallStatus.OK,
            result=text,
            reward=None if reply.reward is None else float(reply.reward),
        )
        return call, metrics

    def _failed_call(
        self, written: WrittenCall, turn: int, status: CallStatus, why: str
    ) -> ToolCall:
        """The record of a call without a result; the policy reads one line of error."""
        line = one_line(why)
        said = truncate_text(f"Error: {line}", most=max(self._options.most, 64), side="left")
        return ToolCall(
            turn=turn,
            name=written.name,
            arguments=written.arguments,
            status=status,
            result=said,
            error=line,
        )

    def _unknown_tool(self, name: str) -> str:
        near = near_names(name, self._bound, most=1)
        listed = ", ".join(f"`{known}`" for known in self._bound) or "none"
        offered = f"did you mean `{near[0]}`?" if near else f"the tools are: {listed}"
        return f"there is no tool `{one_line(name)}`; {offered}"


def _is_reward(value: Any) -> bool:
    if value is None:
        return True
    return isinstance(value, int | float) and math.isfinite(value)


def _problem(outcome: CallOutcome, name: str, what: str) -> str | None:
    if outcome.is_late:
        return f"{name}: {what} took too long"
    if outcome.fault is None:
        return None
    return f"{name}: {what}: {line_of(outcome.fault)} ({place_of(outcome.fault)})"


_NO_TIME_LEFT = "the time of the conversation was up (multi_turn.time_budget_s)"


def finished_call(ran: "asyncio.Future[ToolCall]", written: WrittenCall, turn: int) -> ToolCall:
    """The record of a call that was started; a cancelled one ran out of time."""
    is_late = not ran.done() or ran.cancelled()
    fault = None if is_late else ran.exception()
    if not is_late and fault is None:
        return ran.result()
    return ToolCall(
        turn=turn,
        name=written.name,
        arguments=written.arguments,
        status=CallStatus.TIMED_OUT if fault is None else CallStatus.FAILED,
        result="",
        error=_NO_TIME_LEFT if fault is None else line_of(fault),
        attempts=1,
    )
