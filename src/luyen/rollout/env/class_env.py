"""An environment from a Python class as in TRL: `reset`, methods as tools, `get_reward`."""

import asyncio
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Message, Prompt
from luyen.rollout.env.protocol import Observation, envs, number_or_none, text_or_none, with_text
from luyen.rollout.tools.executors import ThreadExecutor
from luyen.rollout.tools.protocol import (
    Stateful,
    Tool,
    ToolLimits,
    ToolReply,
    ToolSession,
    UsesRunLimits,
    reply_of,
)
from luyen.rollout.tools.signature import Signature
from luyen.rollout.tools.user_code import load_user_module


@final
class MethodTool(Stateful, UsesRunLimits):
    """One method of a conversation's environment object as a tool.

    Methods share the object's state, so one of them runs at a time.
    """

    def __init__(
        self,
        signature: Signature,
        bound: Callable[[], Callable[..., Any]],
        *,
        lock: asyncio.Lock,
        threads: ThreadExecutor,
    ) -> None:
        """`bound` returns the method once the environment is open; `lock` serialises the calls."""
        self._signature = signature
        self._bound = bound
        self._lock = lock
        self._threads = threads

    @property
    def name(self) -> str:
        """Name that the policy calls it by."""
        return self._signature.schema["function"]["name"]

    @property
    def schema(self) -> Mapping[str, Any]:
        """Made from the signature and the docstring."""
        return self._signature.schema

    @property
    def limits(self) -> ToolLimits:
        """The defaults; the run sets the timeout."""
        return ToolLimits()

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """The tool itself: the state is in the environment's object."""
        del prompt, key
        return self

    async def close(self) -> None:
        """There is nothing to release: the environment owns the object."""

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        """Run the method; one of the object's methods runs at a time."""
        values = self._signature.bind(arguments)
        async with self._lock:
            return reply_of(await self._threads.run(self._bound(), values))

    async def score(self) -> float | None:
        """None: the environment scores, not its tools."""
        return None

    async def release(self) -> None:
        """There is nothing to release."""


_FIELD = "actor_rollout_ref.rollout.multi_turn.environments"
_OURS = ("reset", "get_reward", "respond", "close")
"""Methods that the loop calls; every other public one is a tool."""
_MOST_HANGING = 64


@final
class Blueprint:
    """An environment class, inspected once: which methods are tools, and their signatures."""

    def __init__(self, cls: type[Any]) -> None:
        """A UserError when it has no `reset`, or a method that cannot be described to a policy."""
        self.cls = cls
        found = {n: inspect.getattr_static(cls, n) for n in dir(cls) if not n.startswith("_")}
        methods = {n: m for n, m in found.items() if inspect.isfunction(m)}
        if "reset" not in methods:
            why = f"class {cls.__name__} has no method `reset`"
            raise UserError(_FIELD, cls.__name__, why, "write `def reset(self, **row)`")
        self.own = frozenset(name for name in methods if name in _OURS)
        self.tools = {
            name: Signature(method, name=name, method=True)
            for name, method in methods.items()
            if name not in _OURS
        }
        self.threads = ThreadExecutor(most_hanging=_MOST_HANGING)


@final
class ClassEnv:
    """One object of the class for one conversation; it is made when the conversation opens.

    Methods that are no coroutine functions run on threads, and one method runs at a time.
    """

    def __init__(self, blueprint: Blueprint, settings: Mapping[str, Any]) -> None:
        """`settings` are the keyword arguments of the class."""
        self._blueprint = blueprint
        self._settings = dict(settings)
        self._made: Any = None
        self._lock = asyncio.Lock()
        self.tools: Sequence[Tool] = tuple(
            MethodTool(signature, self._method(name), lock=self._lock, threads=blueprint.threads)
            for name, signature in blueprint.tools.items()
        )
        """Every public method that the loop does not call itself."""

    async def open(self, prompt: Prompt, key: int) -> Sequence[Message]:
        """Make the object and reset it with the row; its text is appended to the user's message."""
        self._made = await self._blueprint.threads.run(self._blueprint.cls, self._settings)
        row = _row(self._made.reset, prompt, key)
        said = text_or_none(await self._run("reset", row), self._who("reset"))
        return with_text(prompt.messages, said) if said else prompt.messages

    async def act(self, messages: Sequence[Message]) -> Observation:
        """The next line of the user, where the class has `respond`; otherwise this was the end."""
        if "respond" not in self._blueprint.own:
            return Observation(is_done=True)
        given = {"messages": [dict(message) for message in messages]}
        said = text_or_none(await self._run("respond", given), self._who("respond"))
        if said is None:
            return Observation(is_done=True)
        return Observation(messages=({"role": "user", "content": said},))

    async def score(self) -> float | None:
        """The result of `get_reward`."""
        if self._made is None or "get_reward" not in self._blueprint.own:
            return None
        return number_or_none(await self._run("get_reward", {}), self._who("get_reward"))

    async def close(self) -> None:
        """Call the object's `close`, if it has one."""
        if self._made is not None and "close" in self._blueprint.own:
            await self._blueprint.threads.run(self._made.close, {})

    async def _run(self, name: str, arguments: Mapping[str, Any]) -> Any:
        async with self._lock:
            return await self._blueprint.threads.run(self._method(name)(), arguments)

    def _method(self, name: str) -> Callable[[], Callable[..., Any]]:
        return lambda: getattr(self._made, name)

    def _who(self, name: str) -> str:
        return f"{self._blueprint.cls.__name__}.{name}"


def _row(reset: Callable[..., Any], prompt: Prompt, key: int) -> dict[str, Any]:
    """Arguments of `reset` from the row: all, or those it names; `key` only if it is named."""
    row = {
        **prompt.extra_info,
        "ground_truth": prompt.ground_truth,
        "data_source": prompt.data_source,
    }
    takes = inspect.signature(reset).parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in takes.values()):
        row = {name: value for name, value in row.items() if name in takes}
    return {"key": key, **row} if "key" in takes else row


@cache
def blueprint_of(path: str, name: str) -> Blueprint:
    """The class in a file; a UserError if the file or the class is unusable."""
    members = vars(load_user_module(path, _FIELD))
    if inspect.isclass(members.get(name)):
        return Blueprint(members[name])
    classes = [known for known, value in members.items() if inspect.isclass(value)]
    raise UserError(_FIELD, name, f"{path} has no such class", did_you_mean(name, classes))


@envs.register("class")
def class_env(*, path: str, name: str, kwargs: Mapping[str, Any] | None = None) -> ClassEnv:
    """An environment from a class in a Python file."""
    blueprint = blueprint_of(path, name)
    settings = dict(kwargs or {})
    try:
        inspect.signature(blueprint.cls).bind(**settings)
    except TypeError as error:
        why = f"{name} cannot be made with these arguments: {error}"
        raise UserError(f"{_FIELD}: kwargs", settings, why, "change kwargs") from error
    return ClassEnv(blueprint, settings)
