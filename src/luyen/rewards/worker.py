"""What a process of the pool is asked to do: load the judging function, then judge."""

from luyen.rewards.calls import Call, function_of, perform
from luyen.rewards.outcome import Outcome


def load(call: Call) -> None:
    """Import what a call needs; whatever that raises is the fault of the call."""
    function_of(call.name, call.source, call.rule)


def judge(call: Call) -> Outcome:
    """Make the call; it never raises."""
    return perform(call)
