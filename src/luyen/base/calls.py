"""What became of a tool call that a policy wrote."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, final

from luyen.base.secrets import masked


class CallStatus(StrEnum):
    """How a call ended. The set is closed; every status but `OK` has a counter of its own."""

    OK = "ok"
    MALFORMED = "malformed"
    """It could not be read: broken JSON, an open tag."""
    UNKNOWN_TOOL = "unknown tool"
    INVALID_ARGUMENTS = "invalid arguments"
    """The arguments do not fit the tool's schema."""
    REFUSED = "refused"
    """It was one too many: of this turn, or of the rollout."""
    FAILED = "failed"
    """The tool raised, died, or returned something that is no text."""
    TIMED_OUT = "timed out"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolCall:
    """One call, with what came back.

    Example:
        >>> call = ToolCall(turn=0, name="calculator", arguments={"expression": "6*7"},
        ...                 status=CallStatus.OK, result="42")
        >>> call.is_valid, call.has_run
        (True, True)
    """

    turn: int
    """Assistant turn that wrote it."""
    name: str
    """The tool's name as written; empty when it could not be read."""
    arguments: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """What the policy passed."""
    status: CallStatus
    """How it ended."""
    result: str
    """What the policy read about it, after truncation."""
    error: str | None = None
    """What went wrong, if anything did."""
    reward: float | None = None
    """What the tool itself thought of the call; None when it has no opinion."""
    seconds: float = 0.0
    """How long it ran, waiting for a free place not counted."""
    attempts: int = 0
    """How often it was tried."""

    def __post_init__(self) -> None:
        if self.error is not None:
            object.__setattr__(self, "error", masked(self.error))

    @property
    def is_valid(self) -> bool:
        """Whether the policy called a tool that exists with arguments that fit."""
        return self.has_run or self.status == CallStatus.REFUSED

    @property
    def has_run(self) -> bool:
        """Whether the tool was started."""
        return self.status in (CallStatus.OK, CallStatus.FAILED, CallStatus.TIMED_OUT)
