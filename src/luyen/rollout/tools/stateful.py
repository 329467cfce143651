"""A tool from a class: one object for every rollout, from its beginning to its end."""

import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, cast, final, overload

from luyen.base.errors import UserError
from luyen.base.foreign import boundary
from luyen.base.records import Prompt
from luyen.rollout.tools.limits import check_limits
from luyen.rollout.tools.marks import OneAtATime
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.reply import reply_of
from luyen.rollout.tools.signature import Signature
from luyen.rollout.tools.threads import Threads

_MOST_ENDINGS = 64
"""Scores and releases of a tool that may hang before the next ones are refused."""


@final
class ClassTool:
    """A tool whose class is made anew for every rollout; see `tool_class`."""

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
        self._threads = Threads(most_hanging=self._limits.concurrency)
        # Calls that hang must not keep other rollouts from their scores and releases.
        self._endings = Threads(most_hanging=max(_MOST_ENDINGS, self._limits.concurrency))

    @property
    def name(self) -> str:
        """How the policy calls it."""
        return self._name

    @property
    def schema(self) -> Mapping[str, Any]:
        """Made from the signature and the docstring of `call`."""
        return self._signature.schema

    @property
    def limits(self) -> ToolLimits:
        """How long and how often it may run."""
        return self._limits

    def limited(self, *, unless_own: Mapping[str, Any], above: Mapping[str, Any]) -> "ClassTool":
        """The same tool, with limits under its own ones and above them."""
        limits = {**unless_own, **self._own, **above}
        return ClassTool(self.cls, name=self._name, limits=limits, settings=self._settings)

    def configured(self, settings: Mapping[str, Any]) -> "ClassTool":
        """The same tool, whose objects are made with these keyword arguments."""
        try:
            inspect.signature(self.cls).bind(**settings)
        except TypeError as error:
            why = f"{self.cls.__name__} cannot be made with {dict(settings)!r}: {error}"
            raise UserError("tool", self._name, why, "mend `config`") from error
        return ClassTool(self.cls, name=self._name, limits=self._own, settings=settings)

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """A fresh object, after its `create`; one whose `create` fails is released at once."""
        made = self.cls(**self._settings)
        session = _Session(made, self._signature, self._threads, self._endings)
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
                    with boundary([]):  # what is told is why `create` failed
                        await session.release()
        return session

    async def close(self) -> None:
        """Nothing is held between rollouts."""


@final
class _Session(OneAtATime):
    def __init__(self, made: Any, signature: Signature, threads: Threads, endings: Threads) -> None:
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
    """What a row gives to a tool: `extra_info["tools_kwargs"][tool][kind]`, empty without it.

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
    under `tools_kwargs`; `score` returns the tool's opinion of the whole rollout; `release` frees
    what is held. Any of them may be a coroutine function; others run on a thread. Calls of one
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
