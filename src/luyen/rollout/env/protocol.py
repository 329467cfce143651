"""What an environment is: it opens, answers what the policy says, and closes. It is used once."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, final

from luyen.base.records import Message, Prompt
from luyen.base.registry import Registry
from luyen.rollout.tools.protocol import Tool


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What the environment answers to a turn of the policy.

    Example:
        >>> Observation(messages=({"role": "user", "content": "Go on."},)).is_done
        False
    """

    messages: tuple[Message, ...] = ()
    """What is said to the policy; at least one unless the environment is done."""
    reward: float | None = None
    """What the turn earned; None: nothing is said about it."""
    is_done: bool = False
    """Whether the conversation is over."""

    def __post_init__(self) -> None:
        if not self.is_done and not self.messages:
            raise ValueError("a world that is not done says something: messages are missing")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"the reward of a turn is {self.reward}; it must be a finite number")


class Env(Protocol):
    """The world of one conversation. It lives as long as its rollout and is never used again.

    The loop calls `open` once, `act` after each turn in which the policy calls no tool, `score`
    once at the end, and `close` exactly once, also after a fault, when `score` was not called.
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools that come with the world, besides those of the run; known before `open`."""
        ...

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """The conversation that the policy starts from; often the prompt's own messages.

        `key` seeds whatever is random in the world; the samples of a group have the same one.
        """
        ...

    async def act(self, messages: Sequence[Message]) -> Observation:
        """Answer the conversation, whose last message is the policy's."""
        ...

    async def score(self) -> float | None:
        """The reward of the whole conversation, if the world gives one."""
        ...

    async def close(self) -> None:
        """Free what is held."""
        ...


envs: Registry[Callable[..., Env]] = Registry(
    "environment", "actor_rollout_ref.rollout.multi_turn.environments"
)
"""Makes one environment; keyword arguments come from the configuration."""
