"""Simulated users: one that follows a script, and interactions written for verl."""

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, cast, final

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.config.environments import FIELD
from luyen.rollout.env.protocol import Observation, envs, number_or_none, text_or_none
from luyen.rollout.tools.executors import ThreadExecutor
from luyen.rollout.tools.protocol import Tool
from luyen.rollout.tools.user_code import line_of, load_user_name, place_of


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
        """None: a user has no tools."""
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
        """A scripted user gives no reward."""
        return None

    async def close(self) -> None:
        """There is nothing to release."""


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


# verl's interactions: start_interaction, generate_response, calculate_score, finalize_interaction.

_METHODS = ("start_interaction", "generate_response")
_numbers = count()
"""Instance ids are never used twice in a process."""
_threads = ThreadExecutor(most_hanging=64)
"""For classes whose methods are no coroutine functions, though verl wants them so."""


@final
class Interaction:
    """One conversation with a user simulator written for verl."""

    def __init__(self, made: Any) -> None:
        """`made` is an object of the user's class; instance ids tell its conversations apart."""
        self._made = made
        self._instance = ""
        self._given: dict[str, Any] = {}

    @property
    def tools(self) -> Sequence[Tool]:
        """None: a user has no tools."""
        return ()

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """Start the interaction with the row's `interaction_kwargs`; the prompt is unchanged."""
        given: Any = prompt.extra_info.get("interaction_kwargs") or {}
        if not isinstance(given, Mapping):
            why = "what a row gives to a user is a mapping"
            raise UserError("extra_info.interaction_kwargs", given, why, "write {name: NAME}")
        self._given = dict(cast(Mapping[str, Any], given))
        wanted = f"talk-{key:x}-{next(_numbers)}"
        started = await self._run("start_interaction", wanted)
        self._instance = started if isinstance(started, str) else wanted
        return prompt.messages

    async def act(self, messages: Sequence[Message]) -> Observation:
        """The user's next message and the reward of the turn."""
        plain = [{"role": m["role"], "content": m.get("content") or ""} for m in messages]
        returned = await self._run("generate_response", self._instance, plain)
        if not isinstance(returned, tuple | list) or len(cast(Sequence[Any], returned)) < 3:
            said = type(returned).__name__
            raise TypeError(f"generate_response gives (is_done, text, score, notes), not {said}")
        is_done, text, score = cast(Sequence[Any], returned)[:3]
        reward = number_or_none(score, "generate_response")
        if is_done:
            return Observation(is_done=True, reward=reward)
        line = text_or_none(text, "generate_response")
        if line is None:
            raise TypeError("generate_response gave no text, and the conversation is not over")
        return Observation(messages=({"role": "user", "content": line},), reward=reward)

    async def score(self) -> float | None:
        """Nothing: `generate_response` gave the score of each turn, often by `calculate_score`."""
        return None

    async def close(self) -> None:
        """Finalize the interaction, if it was started."""
        if self._instance and "finalize_interaction" in dir(self._made):
            await _threads.run(partial(self._made.finalize_interaction, self._instance), {})

    async def _run(self, method: str, *arguments: Any) -> Any:
        return await _threads.run(partial(getattr(self._made, method), *arguments), self._given)


_made: dict[tuple[str, str], Any] = {}
"""One object for each class and configuration, as verl has it."""


@envs.register("interaction")
def interaction(*, class_name: str, config: Mapping[str, Any] | None = None) -> Interaction:
    """A user written for verl."""
    settings = dict(config or {})
    key = class_name, repr(sorted(settings.items()))
    if key not in _made:
        _made[key] = _new(class_name, settings)
    return Interaction(_made[key])


def _new(class_name: str, settings: dict[str, Any]) -> Any:
    cls = load_user_name(class_name, FIELD)
    lacking = [method for method in _METHODS if method not in dir(cls)]
    if lacking:
        why = f"it has no method `{lacking[0]}`"
        raise UserError(FIELD, class_name, why, "write it as verl's interactions have it")
    faults: list[BaseException] = []
    with boundary(faults):
        return cls(config=settings)
    why = f"making it failed: {line_of(faults[0])} ({place_of(faults[0])})"
    raise UserError(FIELD, class_name, why, "fix the class or its `config`") from faults[0]
