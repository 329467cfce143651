"""The environment protocol, and a wrapper that checks and time-limits environments."""

import math
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast, final

from luyen.base.boundary import own_copy
from luyen.base.records import Message, Prompt
from luyen.base.registry import Registry
from luyen.rollout.tools.protocol import Tool
from luyen.rollout.tools.user_code import attempt


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Reply of the environment to a turn of the policy.

    Example:
        >>> Observation(messages=({"role": "user", "content": "Go on."},)).is_done
        False
    """

    messages: tuple[Message, ...] = ()
    """Messages to the policy; at least one unless the environment is done."""
    reward: float | None = None
    """Reward of the turn; None: it has none."""
    is_done: bool = False
    """Whether the conversation is over."""

    def __post_init__(self) -> None:
        if not self.is_done and not self.messages:
            raise ValueError("an environment that is not done must return messages")
        if self.reward is not None and not math.isfinite(self.reward):
            raise ValueError(f"the reward of a turn is {self.reward}; it must be a finite number")


class Env(Protocol):
    """The environment of one conversation; every rollout has its own.

    The loop calls `open` once, `act` after each turn in which the policy calls no tool, `score`
    once at the end, and `close` exactly once, also after a fault, when `score` was not called.
    """

    @property
    def tools(self) -> Sequence[Tool]:
        """Tools of the environment, in addition to those of the run; known before `open`."""
        ...

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """The conversation that the policy starts from; often the prompt's own messages.

        `key` seeds the environment's random numbers; the samples of a group have the same one.
        """
        ...

    async def act(self, messages: Sequence[Message]) -> Observation:
        """Answer the conversation, whose last message is the policy's."""
        ...

    async def score(self) -> float | None:
        """The reward of the whole conversation, if the environment gives one."""
        ...

    async def close(self) -> None:
        """Release its resources."""
        ...


envs: Registry[Callable[..., Env]] = Registry(
    "environment", "actor_rollout_ref.rollout.multi_turn.environments"
)
"""Makes one environment; keyword arguments come from the configuration."""


# Checks of values that user code returns; the TypeError names the method.


def text_or_none(value: Any, who: str) -> str | None:
    """A text, or None; TypeError for anything else.

    Example:
        >>> text_or_none("Go on.", "Clerk.respond")
        'Go on.'
    """
    if value is None or isinstance(value, str):
        return value
    raise TypeError(f"{who} gave a {type(value).__name__}; it must give a text, or None")


def number_or_none(value: Any, who: str) -> float | None:
    """A finite number, or None; TypeError for anything else: what is no reward never reads as 0.

    Example:
        >>> number_or_none(1, "Clerk.get_reward")
        1.0
    """
    if value is None:
        return None
    # Numbers of numpy and torch are no `int` or `float`, but they know their value.
    if not isinstance(value, str | bytes) and "__float__" in dir(value):
        number = float(value)
        if math.isfinite(number):
            return number
    raise TypeError(f"{who} gave {str(value)[:80]!r}; a reward is a finite number, or None")


def with_text(messages: Sequence[Message], text: str) -> tuple[Message, ...]:
    """The conversation with more said by the user: in the last message if that is theirs.

    Two messages of a user in a row are refused by many chat templates.

    Example:
        >>> with_text([{"role": "user", "content": "Play."}], "You see a door.")
        ({'role': 'user', 'content': 'Play.\\n\\nYou see a door.'},)
    """
    if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
        last = messages[-1]
        joined = "\n\n".join(part for part in (last["content"], text) if part)
        return *messages[:-1], {**last, "content": joined}
    return *messages, {"role": "user", "content": text}


END_S = 30.0
"""Most seconds for `score`, and again for `close`."""


@final
class GuardedEnv:
    """Wraps an environment; a result of the wrong type is a fault that names the method.

    Arguments and results are copied. `score` and `close` have a time limit; a coroutine that
    ignores its cancellation is abandoned.
    """

    def __init__(self, env: Env, *, end_s: float = END_S) -> None:
        self._env = env
        self._end_s = end_s
        self._name = type(env).__name__

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools of the environment."""
        return tuple(self._env.tools)

    async def open(self, prompt: Prompt, key: int) -> list[Message]:
        """The conversation that the policy starts from."""
        given: Any = await self._outcome(self._open(prompt, key), None, "open")
        messages = list(cast(Sequence[Any], given)) if isinstance(given, Sequence) else []
        if not messages or not all(map(_is_message, messages)):
            raise TypeError(f"{self._name}.open gave {_kind(given)}; it must give messages")
        return own_copy(messages)  # the environment may change its own list later

    async def act(self, messages: Sequence[Message]) -> Observation:
        """The environment's reply."""
        given: Any = await self._outcome(self._act(messages), None, "act")
        if not isinstance(given, Observation):
            raise TypeError(f"{self._name}.act gave {_kind(given)}; it must give an Observation")
        if not all(map(_is_message, given.messages)):
            raise TypeError(f"{self._name}.act gave a message without a role or a text")
        if any(message.get("role") == "assistant" for message in given.messages):
            raise TypeError(f"{self._name}.act spoke as the assistant; that is the policy's part")
        return own_copy(given)

    async def score(self) -> float | None:
        """The environment's reward for the conversation."""
        given = await self._outcome(self._env.score(), self._end_s, "score")
        return number_or_none(given, f"{self._name}.score")

    async def close(self) -> None:
        """Close it."""
        await self._outcome(self._env.close(), self._end_s, "close")

    async def _open(self, prompt: Prompt, key: int) -> Any:
        return await self._env.open(own_copy(prompt), key)

    async def _act(self, messages: Sequence[Message]) -> Any:
        return await self._env.act(own_copy(messages))

    async def _outcome(
        self, work: Coroutine[Any, Any, Any], seconds: float | None, what: str
    ) -> Any:
        outcome = await attempt(work, seconds=seconds)
        if outcome.is_late:
            raise TimeoutError(f"{self._name}.{what} took more than {seconds:g} s")
        if outcome.fault is not None:
            raise outcome.fault
        return outcome.value


def _kind(value: Any) -> str:
    return "None" if value is None else f"a {type(value).__name__}"


def _is_message(value: Any) -> bool:
    """Whether a chat template can be given it; what one refuses would end the run."""
    if not isinstance(value, Mapping):
        return False
    message = cast(Mapping[str, Any], value)
    content = message.get("content")
    is_content = content is None or isinstance(content, str | list | tuple)
    return isinstance(message.get("role"), str) and is_content
