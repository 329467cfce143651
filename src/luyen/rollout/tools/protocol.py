"""What a tool is: a schema, limits, and a session for every rollout that may call it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, final

from luyen.base.records import Prompt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolLimits:
    """How long and how often a tool may run.

    Example:
        >>> ToolLimits(timeout_s=5.0).retries
        0
    """

    timeout_s: float = 30.0
    """Most seconds of one attempt."""
    retries: int = 0
    """Further attempts after one that failed or timed out."""
    backoff_s: float = 0.5
    """Wait before the first retry; it doubles with each."""
    concurrency: int = 64
    """Most calls of this tool that run at once, over all rollouts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReply:
    """What a tool gives back.

    Example:
        >>> ToolReply(text="42").reward is None
        True
    """

    text: str
    """What the policy reads."""
    reward: float | None = None
    """What the tool thinks of the call; None when it has no opinion."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Numbers to log, by name."""


class ToolSession(Protocol):
    """A tool for the length of one rollout. State lives here and is never shared."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Run the tool; whatever it raises is reported to the policy."""
        ...

    async def score(self) -> float | None:
        """What the tool thinks of the rollout as a whole, at its end; None: nothing."""
        ...

    async def release(self) -> None:
        """Free what is held; called exactly once, also after a fault."""
        ...


class Tool(Protocol):
    """A tool of the run."""

    @property
    def name(self) -> str:
        """How the policy calls it."""
        ...

    @property
    def schema(self) -> Mapping[str, Any]:
        """`{"type": "function", "function": {"name", "description", "parameters"}}`."""
        ...

    @property
    def limits(self) -> ToolLimits:
        """How long and how often it may run."""
        ...

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """A session for one rollout of a prompt.

        `key` seeds what is random in it; the samples of a group have the same one.
        """
        ...

    async def close(self) -> None:
        """Free what the run holds: servers, processes."""
        ...
