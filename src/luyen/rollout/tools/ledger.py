"""The journal as the tool calls of one attempt at a rollout see it.

Before a tool is called, the intent is written down under a key that names the call for ever; after
it, the result. A process that goes on after another was killed finds a result and need not call, or
finds an intent without one: the tool may or may not have acted, and nobody can know.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, Literal, TypeAlias, final

from luyen.base.calls import ToolCall
from luyen.rollout.parsers.protocol import WrittenCall
from luyen.telemetry.journal import CallRecord, WorkJournal

OnUnknown: TypeAlias = Literal["retry", "fault"]
"""A call whose outcome nobody knows: make it again, or break the rollout."""
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
class CallLedger:
    """Where the calls of one attempt are looked up and written down."""

    def __init__(
        self, journal: WorkJournal, place: Sequence[Any], *, on_unknown: OnUnknown = "retry"
    ) -> None:
        """`place` names the attempt among all of the run."""
        self._journal = journal
        self._place = tuple(place)
        self._on_unknown = on_unknown

    def begin(
        self, written: WrittenCall, *, turn: int, index: int, remembers: bool
    ) -> tuple[str, CallRecord | None]:
        """The key of a call, and what came of it if it need not be made.

        A session that `remembers` earlier calls lost them with its process: they are made again.
        UnknownOutcome where that is the policy.
        """
        name, arguments = written.name, written.arguments
        key = self._journal.call_key((*self._place, turn, index), name, arguments)
        known = self._journal.call(key)
        if known.call is not None and not remembers:
            return key, known
        if known.is_unknown and self._on_unknown == "fault":
            raise UnknownOutcome(
                f"{name}: the run was killed during this call, and nobody knows whether it acted "
                "(multi_turn.on_unknown)"
            )
        self._journal.intend(key, name, arguments)
        _key.set(key)
        return key, None

    def end(self, key: str, call: ToolCall | None, metrics: Mapping[str, Any]) -> None:
        """Write down how a call ended; None when it broke or was cut off."""
        self._journal.keep_call(key, call, metrics)
