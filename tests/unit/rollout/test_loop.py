"""The course of a conversation: worked cases by hand, and laws over random courses."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.records import StopReason
from luyen.rollout.conversation_state import (
    Act,
    ConversationPhase,
    ConversationState,
    Effect,
    End,
    Event,
    Generate,
    Observe,
    OpenEvent,
    ReplyEvent,
    StopEvent,
    TurnEvent,
    TurnLimits,
    advance,
)


def course(limits: TurnLimits, *events: Event) -> tuple[ConversationState, Effect]:
    state, effect = ConversationState(), None
    for event in events:
        state, effect = advance(state, event, limits)
    assert effect is not None
    return state, effect


def test_an_answer_without_calls_ends_the_conversation():
    state, effect = course(TurnLimits(), OpenEvent(room=9), TurnEvent())
    assert effect == End(stop=StopReason.ANSWERED)
    assert state == ConversationState(
        phase=ConversationPhase.ENDED, assistant_turns=1, stop=StopReason.ANSWERED
    )


def test_calls_are_run_and_answered():
    limits = TurnLimits(max_parallel_calls=2)
    state, effect = course(limits, OpenEvent(room=9), TurnEvent(calls=3))
    assert effect == Act(run=2)
    assert state.calls == 2
    state, effect = advance(state, ReplyEvent(room=4), limits)
    assert effect == Generate(max_new_tokens=4)
    assert (state.assistant_turns, state.user_turns) == (1, 1)


def test_a_world_sees_turns_without_calls_and_may_end():
    limits = TurnLimits(has_env=True)
    state, effect = course(limits, OpenEvent(room=9), TurnEvent())
    assert effect == Observe()
    assert advance(state, ReplyEvent(room=5), limits)[1] == Generate(max_new_tokens=5)
    done = advance(state, ReplyEvent(room=5, is_done=True), limits)[1]
    assert done == End(stop=StopReason.ENVIRONMENT_DONE)


def test_a_world_judges_the_last_turn_that_is_allowed():
    limits = TurnLimits(has_env=True, max_assistant_turns=1)
    state, effect = course(limits, OpenEvent(room=9), TurnEvent())
    assert effect == Observe()
    assert advance(state, ReplyEvent(room=5), limits)[1] == End(stop=StopReason.MAX_ASSISTANT_TURNS)


@pytest.mark.parametrize(
    ("limits", "events", "stop"),
    [
        (TurnLimits(), (OpenEvent(room=0),), StopReason.TOKEN_BUDGET),
        (
            TurnLimits(),
            (OpenEvent(room=1), TurnEvent(is_cut=True, calls=1)),
            StopReason.TOKEN_BUDGET,
        ),
        (
            TurnLimits(),
            (OpenEvent(room=9), TurnEvent(calls=1), ReplyEvent(room=0)),
            StopReason.TOKEN_BUDGET,
        ),
        (
            TurnLimits(max_assistant_turns=1),
            (OpenEvent(room=9), TurnEvent(calls=1)),
            StopReason.MAX_ASSISTANT_TURNS,
        ),
        (
            TurnLimits(max_user_turns=1),
            (OpenEvent(room=9), TurnEvent(calls=1), ReplyEvent(room=9), TurnEvent(calls=1)),
            StopReason.MAX_USER_TURNS,
        ),
        (
            TurnLimits(max_tool_calls=1),
            (OpenEvent(room=9), TurnEvent(calls=1), ReplyEvent(room=9), TurnEvent(calls=1)),
            StopReason.TOOL_BUDGET,
        ),
        (
            TurnLimits(on_parse_failure="stop"),
            (OpenEvent(room=9), TurnEvent(problems=1)),
            StopReason.PARSE_FAILURE,
        ),
        (
            TurnLimits(on_parse_failure="answer"),
            (OpenEvent(room=9), TurnEvent(problems=1)),
            StopReason.ANSWERED,
        ),
    ],
)
def test_every_limit_has_its_reason(
    limits: TurnLimits, events: tuple[Event, ...], stop: StopReason
):
    assert course(limits, *events)[1] == End(stop=stop)


def test_a_call_that_cannot_be_read_is_answered():
    assert course(TurnLimits(), OpenEvent(room=9), TurnEvent(problems=1))[1] == Act(run=0)


def test_the_tool_budget_cuts_the_calls_of_a_turn():
    limits = TurnLimits(max_tool_calls=3, max_parallel_calls=8)
    events = (OpenEvent(room=9), TurnEvent(calls=2), ReplyEvent(room=9), TurnEvent(calls=2))
    assert course(limits, *events)[1] == Act(run=1)


def test_reports_at_the_wrong_time_are_refused():
    with pytest.raises(AssertionError, match="while pending"):
        advance(ConversationState(), TurnEvent(), TurnLimits())
    ended = ConversationState(phase=ConversationPhase.ENDED, stop=StopReason.ANSWERED)
    with pytest.raises(AssertionError, match="over"):
        advance(ended, OpenEvent(room=1), TurnLimits())


LIMITS = st.builds(
    TurnLimits,
    max_assistant_turns=st.none() | st.integers(1, 4),
    max_user_turns=st.none() | st.integers(1, 4),
    max_tool_calls=st.none() | st.integers(1, 4),
    max_parallel_calls=st.integers(1, 3),
    on_parse_failure=st.sampled_from(["observe", "answer", "stop"]),
    has_env=st.booleans(),
)
SAID = st.builds(
    TurnEvent, calls=st.integers(0, 4), problems=st.integers(0, 2), is_cut=st.booleans()
)
REPLIED = st.builds(ReplyEvent, room=st.integers(-3, 40), is_done=st.booleans())


@given(LIMITS, st.data())
def test_laws_of_every_course(limits: TurnLimits, data: st.DataObject):
    """Limits hold at every moment, and a conversation ends once, for a reason."""
    state, effect = advance(
        ConversationState(), OpenEvent(room=data.draw(st.integers(0, 40))), limits
    )
    for _ in range(30):
        assert (
            (state.phase == ConversationPhase.ENDED)
            == isinstance(effect, End)
            == (state.stop is not None)
        )
        if isinstance(effect, End):
            assert effect.stop == state.stop
            return
        if isinstance(effect, Generate):
            assert effect.max_new_tokens >= 1
            assert (
                limits.max_assistant_turns is None
                or state.assistant_turns < limits.max_assistant_turns
            )
            assert limits.max_user_turns is None or state.user_turns <= limits.max_user_turns
            event: Event = data.draw(SAID)
        elif isinstance(effect, Act):
            assert effect.run <= limits.max_parallel_calls
            event = replace(data.draw(REPLIED), is_done=False)
        else:
            assert limits.has_env
            event = data.draw(REPLIED)
        assert limits.max_tool_calls is None or state.calls <= limits.max_tool_calls
        state, effect = advance(state, event, limits)


@given(LIMITS, st.sampled_from([StopReason.TIME_BUDGET, StopReason.ABORTED, StopReason.FAULT]))
def test_a_break_ends_any_phase(limits: TurnLimits, stop: StopReason):
    for phase in (
        ConversationPhase.PENDING,
        ConversationPhase.GENERATING,
        ConversationPhase.ACTING,
        ConversationPhase.OBSERVING,
    ):
        state, effect = advance(ConversationState(phase=phase), StopEvent(stop=stop), limits)
        assert (state.phase, effect) == (ConversationPhase.ENDED, End(stop=stop))
