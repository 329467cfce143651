"""What the controller and a replica say to each other, and how the controller reaches one.

Nothing here knows Ray: a link may as well lead to an engine in this process.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, final

from luyen.base.secrets import masked
from luyen.rollout.protocol import Completion

Reply: TypeAlias = Callable[[Any, BaseException | None], None]
"""Hears what a call returned, or what it failed with; from any thread."""


@final
class RemoteError(Exception):
    """Something broke in another process; its traceback is the message."""

    def __init__(self, where: str, text: str) -> None:
        text = masked(text)
        super().__init__(where, text)
        self.where = where
        self.text = text

    def __str__(self) -> str:
        return f"{self.where} broke:\n{self.text}"


@final
class Died(Exception):
    """The process at the other end is gone."""


@final
class RanksLost(Exception):
    """Ranks are gone, or cannot reach each other, through no fault of what they were to do.

    The same work done again from the newest checkpoint may well succeed.
    """


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFacts:
    """Who a replica is.

    Example:
        >>> ReplicaFacts(pid=1, node="a", is_steady=True).pid
        1
    """

    pid: int
    """Its process."""
    node: str
    """Where it runs."""
    is_steady: bool
    """Whether an answer does not depend on what else is drawn at the same time."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class News:
    """What a replica finished since it was asked last.

    Example:
        >>> News(completions=(), end=0, passes=3).passes
        3
    """

    completions: tuple[Completion, ...]
    """Finished answers, in the order in which they finished."""
    end: int
    """How many there were up to these, which the next question says."""
    passes: int
    """Engine passes so far: it grows as long as the engine is alive."""
    failure: Exception | None = None
    """What the engine refused or broke with first; later answers are not to be waited for."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The weights that a replica holds.

    Example:
        >>> Held(version=2, digests={"w": "float32 [1] 00"}).version
        2
    """

    version: int
    """Number of the publication."""
    digests: Mapping[str, str]
    """Type, shape and digest of every parameter that learns."""


class Link(Protocol):
    """The controller's end of the way to one replica."""

    def call(self, method: str, *arguments: Any, reply: Reply | None = None) -> None:
        """Call a method of the replica and return at once; a lost replica replies with `Died`."""
        ...

    def kill(self) -> None:
        """End the replica, whatever it is doing."""
        ...
