"""What the conversations of a run have in common, and what tells them apart."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from luyen.base.records import GroupId, Prompt
from luyen.base.seeds import derive_key
from luyen.data.render import Renderer
from luyen.data.sanity import Mode
from luyen.rollout.env.protocol import Env
from luyen.rollout.loop import TurnLimits
from luyen.rollout.openings import Openings
from luyen.rollout.parsers.protocol import ToolParser
from luyen.rollout.tools.box import ToolBox
from luyen.rollout.tools.ledger import OnUnknown

LONGEST_ENDING_S = 30.0


def ending_s(time_budget_s: float | None) -> float:
    """Most seconds for scores at the end of a rollout, and again for letting go: as long again.

    Example:
        >>> ending_s(5.0), ending_s(600.0), ending_s(None)
        (5.0, 30.0, 30.0)
    """
    return min(LONGEST_ENDING_S, time_budget_s or LONGEST_ENDING_S)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What all conversations of a run have in common.

    Example:
        >>> sorted(Setting.__slots__)[:3]
        ['has_worlds', 'limits', 'make_env']
    """

    renderer: Renderer
    """How messages become tokens."""
    openings: Openings
    """The same, of prompts as they are."""
    parser: ToolParser
    """How calls are read."""
    tools: ToolBox
    """What may be called."""
    make_env: Callable[[Prompt], Env | None]
    """The world of a prompt's conversations, made anew for each; None: only tools answer."""
    has_worlds: bool
    """Whether some of them have one."""
    limits: TurnLimits
    """How far a conversation may go."""
    max_prompt_length: int
    """Most tokens that a conversation may open with."""
    max_response_length: int
    """Most tokens after the prompt, tool results included."""
    time_budget_s: float | None = None
    """Most seconds of a conversation; None: no limit."""
    sanity: Mode = "strict"
    """How strictly the tokens are compared with a full re-render."""
    on_unknown: OnUnknown = "retry"
    """A tool call that a killed run may or may not have made: make it, or break the rollout."""

    @property
    def end_s(self) -> float:
        """Most seconds for judging a conversation, and again for closing its world."""
        return ending_s(self.time_budget_s)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Which rollout this is; every random number in it derives from here.

    Example:
        >>> here = Address(seed=0, purpose="rollout", group=GroupId(step=1, draw=0, uid="a"),
        ...                sample=2)
        >>> here.key(turn=0) != here.key(turn=1)
        True
    """

    seed: int
    """The run's seed."""
    purpose: str
    """What it is drawn for."""
    group: GroupId
    """The draw it belongs to."""
    sample: int
    """Its index there."""

    def key(self, *, turn: int) -> int:
        """The random numbers of one turn."""
        group = self.group
        return derive_key(
            self.seed, self.purpose, group.step, group.draw, group.uid, self.sample, turn
        )

    def place(self, *, attempt: int) -> tuple[Any, ...]:
        """Names one attempt at it among all of the run."""
        group = self.group
        here = (self.purpose, group.step, group.draw, group.uid, self.sample)
        return (self.seed, *here, attempt)

    @property
    def world_key(self) -> int:
        """The random numbers of its environment and tools: all samples of a group meet the same."""
        group = self.group
        return derive_key(self.seed, f"{self.purpose}/world", group.step, group.draw, group.uid)
