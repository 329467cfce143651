"""The tools of a run: schemas for prompts, sessions for rollouts, limits over all of them."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

from luyen.base.boundary import own_copy
from luyen.base.errors import UserError, did_you_mean
from luyen.base.records import Prompt
from luyen.rollout.tools.protocol import (
    SharedSession,
    Side,
    Stateful,
    Tool,
    ToolLimits,
    ToolSession,
    UsesRunLimits,
)
from luyen.rollout.tools.rollout_tools import (
    BoundTool,
    CallJournal,
    CallOptions,
    OnError,
    RolloutTools,
)
from luyen.rollout.tools.user_code import ToolFault, attempt, line_of
from luyen.rollout.tools.validate import Validator

_Semaphores: TypeAlias = dict[tuple[str, int], asyncio.Semaphore]
_NAMES = "tools"


@final
class ToolRegistry:
    """All tools of a run.

    Example:
        >>> from luyen.rollout.tools.python_tools import tool
        >>> @tool
        ... def shout(text: str) -> str:
        ...     '''Say it louder.'''
        ...     return text.upper()
        >>> ToolRegistry([shout]).names
        ('shout',)
    """

    def __init__(
        self,
        tools: Sequence[Tool],
        *,
        max_tool_response_length: int = 256,
        tool_response_truncate_side: Side = "middle",
        arguments_are_text: bool = False,
        on_error: OnError = "observe",
        timeout_s: float = 30.0,
        end_s: float = 30.0,
    ) -> None:
        """A UserError when two tools share a name or a schema is no schema.

        `arguments_are_text` is for call formats that know no other type; `timeout_s` is for tools
        of environments, which set none; `end_s` limits a rollout's scores, and again its releases.
        """
        self._tools = _by_name(tools)
        self._timeout_s = timeout_s
        self._validators = {name: _validator(tool) for name, tool in self._tools.items()}
        self._options = CallOptions(
            most=max_tool_response_length,
            side=tool_response_truncate_side,
            from_text=arguments_are_text,
            on_error=on_error,
            end_s=end_s,
        )
        # A semaphore belongs to the loop it first waited in, and a run may use several loops.
        self._semaphores: WeakKeyDictionary[asyncio.AbstractEventLoop, _Semaphores] = (
            WeakKeyDictionary()
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the tools, in order."""
        return tuple(self._tools)

    @property
    def is_shared(self) -> bool:
        """Whether no tool is opened for a rollout."""
        return all(isinstance(tool, SharedSession) for tool in self._tools.values())

    def schemas(
        self, names: Sequence[str] | None = None, *, extra: Sequence[Tool] = ()
    ) -> tuple[Mapping[str, Any], ...]:
        """Schemas of these tools (None: of all), and of `extra` tools."""
        return tuple(tool.schema for tool in self._select(names, extra).values())

    async def open(
        self,
        prompt: Prompt,
        key: int,
        names: Sequence[str] | None = None,
        *,
        extra: Sequence[Tool] = (),
        ledger: CallJournal | None = None,
    ) -> RolloutTools:
        """Sessions of these tools (None: of all) and of `extra` tools, for one rollout.

        A tool that cannot be opened fails when it is called; where broken tools are faults, a
        ToolFault is raised. Whatever is raised, also a cancellation, what was opened is released.
        """
        env_tools = {tool.name for tool in extra}
        selected = self._select(names, extra)
        ready = [t for t in selected.values() if isinstance(t, SharedSession)]
        shared = [self._bind(t, t.session, is_from_env=t.name in env_tools) for t in ready]
        opening = [
            asyncio.ensure_future(self._open_bound(t, prompt, key, is_from_env=name in env_tools))
            for name, t in selected.items()
            if not isinstance(t, SharedSession)
        ]
        opened: RolloutTools | None = None
        try:
            opened_tools = [*shared, *(await asyncio.gather(*opening) if opening else ())]
            by_name = {bound.name: bound for bound in opened_tools}
            bound_tools = [by_name[name] for name in selected]
            self._refuse_broken(bound_tools)
            opened = RolloutTools(bound_tools, self._options, ledger)
            return opened
        finally:
            if opened is None:
                await self._release_opened(opening)

    def _refuse_broken(self, bound_tools: Sequence[BoundTool]) -> None:
        broken = [bound for bound in bound_tools if bound.session is None]
        if broken and self._options.on_error == "fault":
            raise ToolFault(f"{broken[0].name}: {broken[0].problem}")

    async def _release_opened(self, opening: "Sequence[asyncio.Task[BoundTool]]") -> None:
        """Release the sessions that were opened before something went wrong."""
        for one in opening:
            one.cancel()
        found = await asyncio.gather(*opening, return_exceptions=True)
        await RolloutTools([p for p in found if isinstance(p, BoundTool)], self._options).release()

    async def close(self) -> list[str]:
        """Close every tool; what went wrong, one line for each that would not close."""
        limit = self._options.end_s
        tools = list(self._tools.values())
        outcomes = await asyncio.gather(*(attempt(tool.close(), seconds=limit) for tool in tools))
        said: list[str] = []
        for tool, outcome in zip(tools, outcomes, strict=True):
            if outcome.is_late:
                said.append(f"{tool.name}: close took too long")
            elif outcome.fault is not None:
                said.append(f"{tool.name}: close: {line_of(outcome.fault)}")
        return said

    def _select(self, names: Sequence[str] | None, extra: Sequence[Tool]) -> dict[str, Tool]:
        for name in names or ():
            if name not in self._tools:
                why = "the run has no tool of this name"
                raise UserError(_NAMES, name, why, did_you_mean(name, self._tools))
        wanted = [t for n, t in self._tools.items() if names is None or n in names]
        return _by_name([*wanted, *extra])

    async def _open_bound(
        self, tool: Tool, prompt: Prompt, key: int, *, is_from_env: bool
    ) -> BoundTool:
        limits = self._limits(tool)
        outcome = await attempt(_opening(tool, prompt, key), seconds=limits.timeout_s)
        session: ToolSession | None = outcome.value
        problem = ""
        if outcome.is_late:
            problem = f"it did not start within {limits.timeout_s:g} s"
        elif outcome.fault is not None:
            problem = f"it could not be started: {line_of(outcome.fault)}"
        return self._bind(tool, session, is_from_env=is_from_env, problem=problem)

    def _bind(
        self, tool: Tool, session: ToolSession | None, *, is_from_env: bool, problem: str = ""
    ) -> BoundTool:
        validator = self._validators[tool.name] if self._tools.get(tool.name) is tool else None
        return BoundTool(
            name=tool.name,
            validator=validator or _validator(tool),
            limits=self._limits(tool),
            free=self._semaphore(tool),
            session=session,
            problem=problem,
            is_stateful=is_from_env or isinstance(session, Stateful),
            is_shared=isinstance(tool, SharedSession),
        )

    def _limits(self, tool: Tool) -> ToolLimits:
        is_silent = isinstance(tool, UsesRunLimits)
        return replace(tool.limits, timeout_s=self._timeout_s) if is_silent else tool.limits

    def _semaphore(self, tool: Tool) -> asyncio.Semaphore:
        free = self._semaphores.setdefault(asyncio.get_running_loop(), {})
        most = tool.limits.concurrency
        return free.setdefault((tool.name, most), asyncio.Semaphore(most))


async def _opening(tool: Tool, prompt: Prompt, key: int) -> ToolSession:
    return await tool.open(own_copy(prompt), key)


def _validator(tool: Tool) -> Validator:
    return Validator(tool.name, tool.schema["function"].get("parameters") or {})


def _by_name(tools: Sequence[Tool]) -> dict[str, Tool]:
    found: dict[str, Tool] = {}
    for tool in tools:
        if tool.name in found:
            why = "two tools have this name"
            raise UserError(_NAMES, tool.name, why, "rename one of them")
        found[tool.name] = tool
    return found
