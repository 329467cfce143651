"""What became of a call that was run beside others."""

import asyncio

from luyen.base.calls import CallStatus, ToolCall
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.rollout.tools.foreign import line_of

_NO_TIME_LEFT = "the time of the conversation was up (multi_turn.time_budget_s)"


def outcome_of(ran: "asyncio.Future[ToolCall]", written: WrittenCall, turn: int) -> ToolCall:
    """What became of a call that was run; one that was cancelled had no time left."""
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
