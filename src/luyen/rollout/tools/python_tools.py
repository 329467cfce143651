"""Tools from Python code: a typed function, or a class with one object per rollout."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, cast, final, overload

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.rollout.tools.executors import ProcessExecutor, ThreadExecutor
from luyen.rollout.tools.protocol import (
    OneAtATime,
    OwnTimeout,
    SharedSession,
    ToolLimits,
    ToolReply,
    ToolSession,
    check_limits,
    reply_of,
)
from luyen.rollout.tools.signature import Signature


@final
class FunctionTool(SharedSession):
    """A function that a policy may call; it can still be called from Python. See `tool`."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        limits: Mapping[str, Any] | None = None,
        in_process: bool = False,
    ) -> None:
        """`limits` are those fields of `ToolLimits` that differ from the defaults of a run."""
        self.function = function
        self._own = dict(limits or {})
        self._limits = ToolLimits(**self._own)
        self.in_process = in_process
        """Whether calls are made in processes of their own."""
        self._signature = Signature(function, name=name or function.__name__)
        self._threads = ThreadExecutor(most_hanging=self._limits.concurrency)
        self._processes = ProcessExecutor(function, self._limits) if in_process else None
        self.session = (
            _FunctionSession(self._signature, self._run)
            if self._processes is None
            else _TimedFunctionSession(self._signature, self._processes.run)
        )

    @property
    def name(self) -> str:
        """Name that the policy calls it by."""
        return self.schema["function"]["name"]

    @property
    def schema(self) -> Mapping[str, Any]:
        """Made from the signature and the docstring."""
        return self._signature.schema

    @property
    def limits(self) -> ToolLimits:
        """Timeout, retries and concurrency."""
        return self._limits

    def options(self) -> dict[str, Any]:
        """Arguments of `tool` that make it of its function again."""
        return {"name": self.name, "in_process": self.in_process, **self._own}

    def with_limits(
        self, *, unless_own: Mapping[str, Any], above: Mapping[str, Any]
    ) -> "FunctionTool":
        """A copy with defaults for limits it does not set, and with overrides."""
        limits = {**unless_own, **self._own, **above}
        return FunctionTool(
            self.function, name=self.name, limits=limits, in_process=self.in_process
        )

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Call the function itself."""
        return self.function(*arguments, **named)

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """The tool itself: a function keeps nothing between calls."""
        del prompt, key
        return self.session

    async def close(self) -> None:
        """End its processes, if it has any."""
        if self._processes is not None:
            await self._processes.close()

    async def _run(self, values: Mapping[str, Any]) -> Any:
        return await self._threads.run(self.function, values)


class _FunctionSession:
    def __init__(self, signature: Signature, run: Callable[..., Any]) -> None:
        self._signature = signature
        self._run = run

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        return reply_of(await self._run(self._signature.bind(arguments)))

    async def score(self) -> float | None:
        return None

    async def release(self) -> None:
        return None


@final
class _TimedFunctionSession(_FunctionSession, OwnTimeout):
    """Calls wait for a process, and only then their time runs."""


@overload
def tool(target: Callable[..., Any], /) -> FunctionTool: ...
@overload
def tool(
    *, name: str | None = None, in_process: bool = False, **limits: float
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def tool(
    target: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    in_process: bool = False,
    **limits: float,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a tool of a function; the schema comes from its types, the rest from its docstring.

    A coroutine function runs on the event loop and must not compute for long; any other runs on a
    thread, or with `in_process` in a process of its own, where it uses another core and is killed
    when its time is up. `limits` are `timeout_s`, `retries`, `backoff_s` and `concurrency` of
    `luyen.rollout.tools.protocol.ToolLimits`.

    Example:
        >>> @tool(timeout_s=2.0)
        ... def repeat(text: str, times: int = 2) -> str:
        ...     '''Say a text several times.
        ...
        ...     Args:
        ...         text: What to say.
        ...         times: How often.
        ...     '''
        ...     return text * times
        >>> repeat("ha"), repeat.limits.timeout_s
        ('haha', 2.0)
        >>> repeat.schema["function"]["parameters"]["properties"]["times"]
        {'type': 'integer', 'description': 'How often.', 'default': 2}
    """
    check_limits(limits)

    def make(function: Callable[..., Any]) -> FunctionTool:
        if inspect.isclass(function):
            why = "it is a class, and this decorator is for functions"
            raise UserError("tool", function.__name__, why, "decorate it with `tool_class`")
        return FunctionTool(function, name=name, limits=limits, in_process=in_process)

    return make if target is None else make(target)


_MOST_ENDINGS = 64
"""Scores and releases of a tool that may hang before the next ones are refused."""


@final
class ClassTool:
    """A tool with one object of its class per rollout; see `tool_class`."""

    def __init__(
        self,
        cls: type[Any],
        *,
        name: str | None = None,
        limits: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        """`limits` are those fields of `ToolLimits` that differ from the defaults of a run."""
        self.cls = cls
        self._name = name or _snake(cls.__name__)
        self._own = dict(limits or {})
        self._limits = ToolLimits(**self._own)
        self._settings = dict(settings or {})
        call = vars(cls).get("call")
        if not inspect.isfunction(call):
            why = f"its class {cls.__name__} has no method `call`"
            raise UserError("tool", self._name, why, "define `call` with typed arguments")
        doc = inspect.getdoc(call) or inspect.getdoc(cls)
        self._signature = Signature(call, name=self._name, doc=doc, method=True)
        self._threads = ThreadExecutor(most_hanging=self._limits.concurrency)
        # Calls that hang must not keep other rollouts from their scores and releases.
        self._endings = ThreadExecutor(most_hanging=max(_MOST_ENDINGS, self._limits.concurrency))

    @property
    def name(self) -> str:
        """Name that the policy calls it by."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """Made from the signature and the docstring of `call`."""
        return self._signature.schema

    @property
    def limits(self) -> ToolLimits:
        """Timeout, retries and concurrency."""
        return self._limits

    def options(self) -> dict[str, Any]:
        """Arguments of `tool_class` that make it of its class again."""
        return {"name": self._name, **self._own}

    def with_limits(
        self, *, unless_own: Mapping[str, Any], above: Mapping[str, Any]
    ) -> "ClassTool":
        """A copy with defaults for limits it does not set, and with overrides."""
        limits = {**unless_own, **self._own, **above}
        return ClassTool(self.cls, name=self._name, limits=limits, settings=self._settings)

    def with_config(self, settings: Mapping[str, Any]) -> "ClassTool":
        """A copy whose objects are constructed with these keyword arguments."""
        try:
            inspect.signature(self.cls).bind(**settings)
        except TypeError as error:
            why = f"{self.cls.__name__} cannot be made with {dict(settings)!r}: {error}"
            raise UserError("tool", self._name, why, "change `config`") from error
        return ClassTool(self.cls, name=self._name, limits=self._own, settings=settings)

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """A fresh object, after its `create`; one whose `create` fails is released at once."""
        made = self.cls(**self._settings)
        session = _ObjectSession(made, self._signature, self._threads, self._endings)
        create = _method(made, "create")
        if create is not None:
            given = {"prompt": prompt, "key": key}
            takes = inspect.signature(create).parameters
            offered = {name: value for name, value in given.items() if name in takes}
            row = row_settings(prompt, self._name, "create_kwargs")
            is_created = False
            try:
                await self._threads.run(create, {**offered, **row})
                is_created = True
            finally:
                if not is_created:
                    with boundary([]):  # the error of `create` is raised, not that of `release`
                        await session.release()
        return session

    async def close(self) -> None:
        """There is nothing to release between rollouts."""


@final
class _ObjectSession(OneAtATime):
    def __init__(
        self, made: Any, signature: Signature, threads: ThreadExecutor, endings: ThreadExecutor
    ) -> None:
        self._made = made
        self._signature = signature
        self._threads = threads
        self._endings = endings

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        values = self._signature.bind(arguments)
        return reply_of(await self._threads.run(self._made.call, values))

    async def score(self) -> float | None:
        score = _method(self._made, "score")
        return None if score is None else await self._endings.run(score, {})

    async def release(self) -> None:
        release = _method(self._made, "release")
        if release is not None:
            await self._endings.run(release, {})


def _method(made: Any, name: str) -> Callable[..., Any] | None:
    """A method that a class may leave out."""
    return getattr(made, name) if name in dir(made) else None


def row_settings(prompt: Prompt, tool: str, kind: str) -> dict[str, Any]:
    """A row's settings for a tool: `extra_info["tools_kwargs"][tool][kind]`, empty without it.

    Example:
        >>> from luyen.base.records import make_prompt
        >>> row = {"tools_kwargs": {"judge": {"create_kwargs": {"ground_truth": "4"}}}}
        >>> row_settings(make_prompt([], extra_info=row), "judge", "create_kwargs")
        {'ground_truth': '4'}
    """
    found: Any = prompt.extra_info
    for step in ("tools_kwargs", tool, kind):
        found = cast(Mapping[str, Any], found).get(step) if isinstance(found, Mapping) else None
    return dict(cast(Mapping[str, Any], found)) if isinstance(found, Mapping) else {}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@overload
def tool_class(target: type[Any], /) -> ClassTool: ...
@overload
def tool_class(*, name: str | None = None, **limits: float) -> Callable[[type[Any]], ClassTool]: ...
def tool_class(
    target: type[Any] | None = None, /, *, name: str | None = None, **limits: float
) -> ClassTool | Callable[[type[Any]], ClassTool]:
    """Make a tool of a class with a typed method `call`; `create`, `score`, `release` if wanted.

    An object is made for every rollout. `create` may take `prompt`, `key` and what the row gives
    under `tools_kwargs`; `score` returns the reward of the whole rollout; `release` frees
    resources. Coroutine functions run on the event loop, other methods on a thread. Calls of one
    rollout are made one after the other. `limits` are those of `tool`.

    Example:
        >>> @tool_class
        ... class Counter:
        ...     def __init__(self) -> None:
        ...         self.total = 0
        ...     def call(self, by: int = 1) -> int:
        ...         '''Count up.'''
        ...         self.total += by
        ...         return self.total
        >>> Counter.name
        'counter'
    """
    check_limits(limits)

    def make(cls: type[Any]) -> ClassTool:
        return ClassTool(cls, name=name, limits=limits)

    return make if target is None else make(target)
