"""Configuration of conversations, the prompt token cache, and the address of a rollout."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.base.records import GroupId, Prompt
from luyen.base.seeds import derive_key
from luyen.data.render import Renderer
from luyen.data.retokenization_check import Mode
from luyen.rollout.conversation_state import TurnLimits
from luyen.rollout.env.protocol import Env
from luyen.rollout.parsers.protocol import ToolParser
from luyen.rollout.tools.registry import ToolRegistry
from luyen.rollout.tools.rollout_tools import OnUnknown

_MAX_PROMPTS = 4096
"""Prompts of which the tokens are kept; the oldest go first."""


@final
class PromptTokenCache:
    """Prompts as tokens, rendered once for all samples of a group (without an environment)."""

    def __init__(self, renderer: Renderer) -> None:
        self._renderer = renderer
        # Keyed by `id`; the cached prompt is kept alive, so that its id is not reused.
        self._known: dict[int, tuple[Prompt, Sequence[int]]] = {}

    def tokens(self, prompt: Prompt) -> Sequence[int]:
        """Tokens of the rendered prompt."""
        found = self._known.get(id(prompt))
        if found is not None:
            return found[1]
        made = array("l", self._renderer.prompt_tokens(prompt.messages, prompt.tools))
        while len(self._known) >= _MAX_PROMPTS:
            del self._known[next(iter(self._known))]
        self._known[id(prompt)] = prompt, made
        return made


LONGEST_ENDING_S = 30.0


def ending_s(time_budget_s: float | None) -> float:
    """Most seconds for the scores at the end of a rollout, and again for its releases.

    Example:
        >>> ending_s(5.0), ending_s(600.0), ending_s(None)
        (5.0, 30.0, 30.0)
    """
    return min(LONGEST_ENDING_S, time_budget_s or LONGEST_ENDING_S)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationConfig:
    """Configuration that all conversations of a run share.

    Example:
        >>> sorted(ConversationConfig.__slots__)[:3]
        ['has_envs', 'limits', 'make_env']
    """

    renderer: Renderer
    """Chat template and tokenizer."""
    prompt_cache: PromptTokenCache
    """Tokens of prompts, cached."""
    parser: ToolParser
    """Parser of tool calls."""
    tools: ToolRegistry
    """Tools of the run."""
    make_env: Callable[[Prompt], Env | None]
    """A new environment for a conversation of the prompt; None: only tools answer."""
    has_envs: bool
    """Whether some conversations have an environment."""
    limits: TurnLimits
    """Limits of turns and calls."""
    max_prompt_length: int
    """Most tokens that a conversation may open with."""
    max_response_length: int
    """Most tokens after the prompt, tool results included."""
    time_budget_s: float | None = None
    """Most seconds of a conversation; None: no limit."""
    sanity: Mode = "strict"
    """How strictly the tokens are compared with a full re-render."""
    on_unknown: OnUnknown = "retry"
    """A tool call that a killed run may have made: make it again, or fail the rollout."""

    @property
    def end_s(self) -> float:
        """Most seconds for scoring a conversation, and again for closing its environment."""
        return ending_s(self.time_budget_s)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutAddress:
    """Identifies a rollout; all its random numbers derive from it.

    Example:
        >>> here = RolloutAddress(seed=0, purpose="rollout", group=GroupId(step=1, draw=0, uid="a"),
        ...                sample=2)
        >>> here.key(turn=0) != here.key(turn=1)
        True
    """

    seed: int
    """The run's seed."""
    purpose: str
    """What it is for, such as `rollout` or `validation`."""
    group: GroupId
    """Its group."""
    sample: int
    """Its index in the group."""

    def key(self, *, turn: int) -> int:
        """The random numbers of one turn."""
        group = self.group
        return derive_key(
            self.seed, self.purpose, group.step, group.draw, group.uid, self.sample, turn
        )

    def place(self, *, attempt: int) -> tuple[Any, ...]:
        """Identifies one attempt at it within the run."""
        group = self.group
        here = (self.purpose, group.step, group.draw, group.uid, self.sample)
        return (self.seed, *here, attempt)

    @property
    def env_key(self) -> int:
        """The random numbers of its environment and tools: all samples of a group meet the same."""
        group = self.group
        return derive_key(self.seed, f"{self.purpose}/world", group.step, group.draw, group.uid)
