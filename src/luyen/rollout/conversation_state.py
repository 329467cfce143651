"""One conversation as a pure state machine: events go in, effects come out.

    pending -> generating -> acting (tools) ----> generating ... -> ended
                          -> observing (env) ---^

Nothing here waits, generates or calls tools. `Conversation` executes each effect and reports its
result as the next event. Every path ends with a `StopReason`.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal, TypeAlias, final

from luyen.base.records import StopReason

OnParseFailure: TypeAlias = Literal["observe", "answer", "stop"]
"""A malformed call: report it to the policy, take the text as its answer, or end the rollout."""


class ConversationPhase(StrEnum):
    """Phases of a conversation."""

    PENDING = "pending"
    GENERATING = "generating"
    ACTING = "acting"
    OBSERVING = "observing"
    ENDED = "ended"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnLimits:
    """Limits of a conversation.

    Example:
        >>> TurnLimits(max_assistant_turns=4).max_parallel_calls
        1
    """

    max_assistant_turns: int | None = None
    """Most turns of the policy; None: no limit."""
    max_user_turns: int | None = None
    """Most answers to the policy, by tools or the environment; None: no limit."""
    max_tool_calls: int | None = None
    """Most calls of the whole conversation; None: no limit."""
    max_parallel_calls: int = 1
    """Most calls of one turn that are run; the policy reads that the rest were refused."""
    on_parse_failure: OnParseFailure = "observe"
    """What happens on a malformed call."""
    has_env: bool = False
    """Whether an environment answers turns without calls; otherwise such a turn is the answer."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationState:
    """State of one conversation: its phase and the counters that limits apply to.

    Example:
        >>> ConversationState().phase
        <ConversationPhase.PENDING: 'pending'>
    """

    phase: ConversationPhase = ConversationPhase.PENDING
    """Current phase."""
    assistant_turns: int = 0
    """Turns that the policy has finished."""
    user_turns: int = 0
    """Answers that it got."""
    calls: int = 0
    """Calls that were run."""
    stop: StopReason | None = None
    """Why it ended; None while it runs."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenEvent:
    """The conversation begins.

    Example:
        >>> OpenEvent(room=0).room
        0
    """

    room: int
    """Tokens that may follow."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TurnEvent:
    """The policy finished a turn.

    Example:
        >>> TurnEvent(calls=1).is_cut
        False
    """

    calls: int = 0
    """Well-formed calls."""
    problems: int = 0
    """Malformed calls."""
    is_cut: bool = False
    """Whether it was cut off because no token was left."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyEvent:
    """The tools or the environment answered.

    Example:
        >>> ReplyEvent(room=12).is_done
        False
    """

    room: int
    """Tokens that may follow, were the answer appended."""
    is_done: bool = False
    """Whether the environment ends the conversation."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StopEvent:
    """Something ended the conversation from outside.

    Example:
        >>> StopEvent(stop=StopReason.TIME_BUDGET).stop.value
        'time budget'
    """

    stop: StopReason
    """The reason: a deadline, an abort, or a fault."""


Event: TypeAlias = OpenEvent | TurnEvent | ReplyEvent | StopEvent


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Generate:
    """Append the pending reply, if any, and generate a turn.

    Example:
        >>> Generate(max_new_tokens=8).max_new_tokens
        8
    """

    max_new_tokens: int
    """Most tokens to generate."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Act:
    """Run the first calls of the turn concurrently; refuse the rest.

    Example:
        >>> Act(run=1).run
        1
    """

    run: int
    """How many calls to run; 0 when all calls are malformed."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observe:
    """Get the environment's reply.

    Example:
        >>> Observe() == Observe()
        True
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """The conversation is over; what was answered last is not appended.

    Example:
        >>> End(stop=StopReason.ANSWERED).stop.value
        'answered'
    """

    stop: StopReason
    """Why."""


Effect: TypeAlias = Generate | Act | Observe | End

_AWAITED: dict[ConversationPhase, type[Event] | tuple[type[Event], ...]] = {
    ConversationPhase.PENDING: OpenEvent,
    ConversationPhase.GENERATING: TurnEvent,
    ConversationPhase.ACTING: ReplyEvent,
    ConversationPhase.OBSERVING: ReplyEvent,
}


def advance(
    state: ConversationState, event: Event, limits: TurnLimits
) -> tuple[ConversationState, Effect]:
    """The next state and what to do there.

    Example:
        >>> state, effect = advance(ConversationState(), OpenEvent(room=8), TurnLimits())
        >>> effect
        Generate(max_new_tokens=8)
        >>> advance(state, TurnEvent(), TurnLimits())[1]
        End(stop=<StopReason.ANSWERED: 'answered'>)
    """
    assert state.phase != ConversationPhase.ENDED, "the conversation is over"
    if isinstance(event, StopEvent):
        return _end(state, event.stop)
    assert isinstance(event, _AWAITED[state.phase]), f"{event} while {state.phase.value}"
    match event:
        case OpenEvent(room=room):
            return _generate(state, room)
        case TurnEvent():
            return _after_turn(
                replace(state, assistant_turns=state.assistant_turns + 1), event, limits
            )
        case ReplyEvent():
            return _after_reply(state, event, limits)


def _after_turn(
    state: ConversationState, turn: TurnEvent, limits: TurnLimits
) -> tuple[ConversationState, Effect]:
    if turn.is_cut:
        return _end(state, StopReason.TOKEN_BUDGET)
    if turn.problems and limits.on_parse_failure == "stop":
        return _end(state, StopReason.PARSE_FAILURE)
    must_report = turn.problems > 0 and limits.on_parse_failure == "observe"
    if turn.calls or must_report:
        return _act(state, turn, limits)
    if limits.has_env:
        # The environment sees the last turn too: its reward would be lost otherwise.
        return replace(state, phase=ConversationPhase.OBSERVING), Observe()
    return _end(state, StopReason.ANSWERED)


def _act(
    state: ConversationState, turn: TurnEvent, limits: TurnLimits
) -> tuple[ConversationState, Effect]:
    """Run the calls only if the policy will have a turn to read their results."""
    stop = _limit_reached(state, limits)
    left = turn.calls if limits.max_tool_calls is None else limits.max_tool_calls - state.calls
    if stop is None and turn.calls and left <= 0:
        stop = StopReason.TOOL_BUDGET
    if stop is not None:
        return _end(state, stop)
    run = min(turn.calls, left, limits.max_parallel_calls)
    return replace(state, phase=ConversationPhase.ACTING, calls=state.calls + run), Act(run=run)


def _after_reply(
    state: ConversationState, reply: ReplyEvent, limits: TurnLimits
) -> tuple[ConversationState, Effect]:
    if reply.is_done:
        return _end(state, StopReason.ENVIRONMENT_DONE)
    stop = _limit_reached(state, limits)
    if stop is not None:
        return _end(state, stop)
    return _generate(replace(state, user_turns=state.user_turns + 1), reply.room)


def _limit_reached(state: ConversationState, limits: TurnLimits) -> StopReason | None:
    """The turn limit that was reached; None: the policy may have another turn."""
    if (
        limits.max_assistant_turns is not None
        and state.assistant_turns >= limits.max_assistant_turns
    ):
        return StopReason.MAX_ASSISTANT_TURNS
    if limits.max_user_turns is not None and state.user_turns >= limits.max_user_turns:
        return StopReason.MAX_USER_TURNS
    return None


def _generate(state: ConversationState, room: int) -> tuple[ConversationState, Effect]:
    if room < 1:
        return _end(state, StopReason.TOKEN_BUDGET)
    return replace(state, phase=ConversationPhase.GENERATING), Generate(max_new_tokens=room)


def _end(state: ConversationState, stop: StopReason) -> tuple[ConversationState, Effect]:
    return replace(state, phase=ConversationPhase.ENDED, stop=stop), End(stop=stop)
