"""A simulated user who follows a script: the simplest world with several turns."""

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.rollout.env.protocol import Observation, envs
from luyen.rollout.tools.protocol import Tool


@final
class ScriptedUser:
    """Says one line after each turn of the policy, and leaves when there are no more.

    Example:
        >>> import asyncio
        >>> from luyen.base.records import make_prompt
        >>> prompt = make_prompt([{"role": "user", "content": "Hi"}], extra_info={"more": ["Why?"]})
        >>> user = ScriptedUser(replies_key="more")
        >>> async def talk():
        ...     said = list(await user.open(prompt, key=0))
        ...     return [await user.act(said), await user.act(said)]
        >>> first, second = asyncio.run(talk())
        >>> first.messages[0]["content"], second.is_done
        ('Why?', True)
    """

    def __init__(self, *, replies: Sequence[str] = (), replies_key: str = "follow_ups") -> None:
        """Lines come from the row's `replies_key`; rows without it get `replies`."""
        self._replies = list(replies)
        self._key = replies_key

    @property
    def tools(self) -> Sequence[Tool]:
        """A user brings none."""
        return ()

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:  # noqa: ARG002
        """The prompt as it is."""
        own: Any = prompt.extra_info.get(self._key)
        if own is not None:
            self._replies = _lines(own, self._key)
        return prompt.messages

    async def act(self, messages: Sequence[Message]) -> Observation:  # noqa: ARG002
        """The next line of the script."""
        if not self._replies:
            return Observation(is_done=True)
        line = self._replies.pop(0)
        return Observation(messages=({"role": "user", "content": line},))

    async def score(self) -> float | None:
        """A user has no opinion."""
        return None

    async def close(self) -> None:
        """Nothing is held."""


def _lines(value: Any, name: str) -> list[str]:
    if isinstance(value, Sequence) and not isinstance(value, str | Mapping):
        lines = list(cast(Sequence[Any], value))
        if all(isinstance(line, str) for line in lines):
            return lines
    why = "what a simulated user says is a list of texts"
    raise UserError(f"extra_info.{name}", value, why, 'write ["...", "..."]')


@envs.register("user")
def user(*, replies: Sequence[str] = (), replies_key: str = "follow_ups") -> ScriptedUser:
    """A user who follows a script."""
    return ScriptedUser(replies=replies, replies_key=replies_key)
