"""A world behind a guard: what it hands over is checked, and it cannot hold up the others."""

from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, cast, final

from luyen.base.foreign import own_copy
from luyen.base.records import Message, Prompt
from luyen.rollout.env.given import number_or_none
from luyen.rollout.env.protocol import Env, Observation
from luyen.rollout.tools.foreign import attempt
from luyen.rollout.tools.protocol import Tool

END_S = 30.0
"""Most seconds for judging a conversation, and again for closing its world."""


@final
class GuardedEnv:
    """An environment whose every answer has the right type or is a fault that says what it was.

    It is given copies of what is ours, and what it gives is copied. Judging and closing have a time
    limit; what ignores a cancellation is left to itself.
    """

    def __init__(self, env: Env, *, end_s: float = END_S) -> None:
        self._env = env
        self._end_s = end_s
        self._name = type(env).__name__

    @property
    def tools(self) -> tuple[Tool, ...]:
        """Tools of the world."""
        return tuple(self._env.tools)

    async def open(self, prompt: Prompt, key: int) -> list[Message]:
        """The conversation that the policy starts from."""
        given: Any = await self._outcome(self._open(prompt, key), None, "open")
        messages = list(cast(Sequence[Any], given)) if isinstance(given, Sequence) else []
        if not messages or not all(map(_is_message, messages)):
            raise TypeError(f"{self._name}.open gave {_kind(given)}; it must give messages")
        return own_copy(messages)  # the world may keep its own, and change them later

    async def act(self, messages: Sequence[Message]) -> Observation:
        """What the world answers."""
        given: Any = await self._outcome(self._act(messages), None, "act")
        if not isinstance(given, Observation):
            raise TypeError(f"{self._name}.act gave {_kind(given)}; it must give an Observation")
        if not all(map(_is_message, given.messages)):
            raise TypeError(f"{self._name}.act gave a message without a role or a text")
        if any(message.get("role") == "assistant" for message in given.messages):
            raise TypeError(f"{self._name}.act spoke as the assistant; that is the policy's part")
        return own_copy(given)

    async def score(self) -> float | None:
        """What the world thinks of the conversation."""
        given = await self._outcome(self._env.score(), self._end_s, "score")
        return number_or_none(given, f"{self._name}.score")

    async def close(self) -> None:
        """Let it go."""
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
