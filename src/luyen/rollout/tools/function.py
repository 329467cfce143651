"""A tool from a typed Python function with a docstring."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, final, overload

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.rollout.tools.limits import check_limits
from luyen.rollout.tools.marks import OwnClock, Standing
from luyen.rollout.tools.processes import Processes
from luyen.rollout.tools.protocol import ToolLimits, ToolReply, ToolSession
from luyen.rollout.tools.reply import reply_of
from luyen.rollout.tools.signature import Signature
from luyen.rollout.tools.threads import Threads


@final
class FunctionTool(Standing):
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
        self._in_process = in_process
        self._signature = Signature(function, name=name or function.__name__)
        self._threads = Threads(most_hanging=self._limits.concurrency)
        self._processes = Processes(function, self._limits) if in_process else None
        self.session = (
            _Session(self._signature, self._run)
            if self._processes is None
            else _TimedSession(self._signature, self._processes.run)
        )

    @property
    def name(self) -> str:
        """How the policy calls it."""
        return self.schema["function"]["name"]

    @property
    def schema(self) -> Mapping[str, Any]:
        """Made from the signature and the docstring."""
        return self._signature.schema

    @property
    def limits(self) -> ToolLimits:
        """How long and how often it may run."""
        return self._limits

    def limited(self, *, unless_own: Mapping[str, Any], above: Mapping[str, Any]) -> "FunctionTool":
        """The same tool, with limits under its own ones and above them."""
        limits = {**unless_own, **self._own, **above}
        return FunctionTool(
            self.function, name=self.name, limits=limits, in_process=self._in_process
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


class _Session:
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
class _TimedSession(_Session, OwnClock):
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
