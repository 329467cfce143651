"""The tools of a run from a tool file (verl's layout and classes, MCP servers) and Python files."""

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, cast, final

from pydantic import BaseModel, ConfigDict

from luyen.base.boundary import boundary
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.records import Prompt
from luyen.config.tool_file import ToolEntry, listed_servers, read_tool_file
from luyen.rollout.tools.builtin_tools import builtin_tools
from luyen.rollout.tools.protocol import (
    OneAtATime,
    Tool,
    ToolLimits,
    ToolReply,
    ToolSession,
    as_text,
    check_limits,
)
from luyen.rollout.tools.python_tools import ClassTool, FunctionTool, row_settings
from luyen.rollout.tools.user_code import line_of, load_user_module, load_user_name, place_of

# MCP server entries of a tool file, in our form and in verl's.


def server_tools(
    server: Mapping[str, Any], entry: ToolEntry, folder: Path, default: Mapping[str, Any]
) -> list[Tool]:
    """The tools of one MCP server."""
    if "mcp_servers_config_path" in server:
        return _listed_servers(server, entry, folder, default)
    try:
        mcp: Any = importlib.import_module("luyen.rollout.tools.mcp")
    except ModuleNotFoundError as error:
        why = "the package `mcp` is not installed"
        raise UserError("mcp", dict(server), why, "pip install 'luyen[tools]'") from error
    command = server.get("command") or ()
    words = [command] if isinstance(command, str) else list(cast(Sequence[str], command))
    target = mcp.McpTarget(
        command=tuple(str(word) for word in (*words, *(server.get("args") or ()))),
        env=_texts(server.get("env")),
        cwd=str(folder / expanded(str(server.get("cwd") or "."))),
        url=server.get("url"),
        headers=_texts(server.get("headers")),
        start_s=float(server.get("start_s", 30.0)),
    )
    return mcp.mcp_tools(
        target,
        select=server.get("select") or server.get("tool_selected_list"),
        prefix=str(server.get("prefix", "")),
        limits=ToolLimits(**{**default, **entry.limits}),
    )


def verl_server_tools(entry: ToolEntry, folder: Path, default: Mapping[str, Any]) -> list[Tool]:
    """verl's form: a class that only forwards calls, and the servers that its entry lists."""
    if not str(entry.target).startswith("verl.tools."):
        why = "a class of one's own between the policy and an MCP server is not supported"
        raise UserError("class_name", entry.target, why, "write `- mcp: {command: [...]}`")
    assert entry.mcp is not None
    return server_tools(entry.mcp, entry, folder, default)


def _listed_servers(
    block: Mapping[str, Any], entry: ToolEntry, folder: Path, default: Mapping[str, Any]
) -> list[Tool]:
    """All servers of a JSON file with `mcpServers`, as verl and desktop programs write it."""
    path = folder / expanded(str(block["mcp_servers_config_path"]))
    try:
        servers = listed_servers(path)
    except OSError as error:
        why = f"it lists no servers: {error}"
        fix = 'write {"mcpServers": {NAME: {"url": ...}}}'
        raise UserError("mcp.mcp_servers_config_path", str(path), why, fix) from error
    wanted = block.get("select") or block.get("tool_selected_list")
    made: list[Tool] = []
    for server in servers.values():
        given = {key: value for key, value in server.items() if key != "auth_token"}
        if "auth_token" in server:
            bearer = {"Authorization": f"Bearer {server['auth_token']}"}
            given["headers"] = {**bearer, **(server.get("headers") or {})}
        made += server_tools({**given, "prefix": block.get("prefix", "")}, entry, folder, default)
    return [tool for tool in made if wanted is None or tool.name in wanted]


def _texts(block: Any) -> dict[str, str]:
    given = cast(Mapping[Any, Any], block or {})
    return {str(key): str(value) for key, value in given.items()}


# verl's tool classes: create, execute, calc_reward, release, by instance id.

_numbers = count()
"""Instance ids are never used twice in a process."""


class _Open(BaseModel):
    model_config = ConfigDict(extra="allow")


class _Parameters(_Open):
    type: str = "object"
    properties: dict[str, Any] = {}
    required: list[str] = []


class _Function(_Open):
    name: str
    description: str = ""
    parameters: _Parameters = _Parameters()


class VerlSchema(_Open):
    """A schema as such classes read it: `schema.function.name`, `schema.model_dump()`."""

    type: str = "function"
    function: _Function


def is_verl_class(found: Any) -> bool:
    """Whether a class has the methods that verl calls."""
    return inspect.isclass(found) and {"create", "execute", "release"} <= set(dir(found))


@final
class VerlTool:
    """One object of a verl tool class; instance ids distinguish rollouts."""

    def __init__(
        self,
        cls: type[Any],
        *,
        config: Mapping[str, Any],
        schema: Mapping[str, Any] | None,
        limits: ToolLimits | None = None,
    ) -> None:
        given = None if schema is None else VerlSchema.model_validate(schema)
        self._made = cls(dict(config), given)
        self._schema = _schema_of(self._made, schema, cls.__name__)
        self._limits = limits or ToolLimits()

    @property
    def name(self) -> str:
        """Name that the policy calls it by."""
        return self._schema["function"]["name"]

    @property
    def schema(self) -> Mapping[str, Any]:
        """The schema of the entry, or of the class."""
        return self._schema

    @property
    def limits(self) -> ToolLimits:
        """Timeout, retries and concurrency."""
        return self._limits

    async def open(self, prompt: Prompt, key: int) -> ToolSession:
        """A new instance, created with the row's `create_kwargs`."""
        wanted = f"{self.name}-{key:x}-{next(_numbers)}"
        given = row_settings(prompt, self.name, "create_kwargs")
        if given and _takes(self._made.create, "create_kwargs"):
            given = {**given, "create_kwargs": dict(given)}  # where newer classes look for them
        created = await _awaited(self._made.create(wanted, **given))
        first = cast(tuple[Any, ...], created)[0] if isinstance(created, tuple) else created
        settings = {
            kind: row_settings(prompt, self.name, kind)
            for kind in ("execute_kwargs", "calc_reward_kwargs", "release_kwargs")
        }
        return _VerlSession(self._made, first if isinstance(first, str) else wanted, settings)

    async def close(self) -> None:
        """verl's tool classes have no method to close them."""


@final
class _VerlSession(OneAtATime):
    def __init__(self, made: Any, instance: str, settings: Mapping[str, Mapping[str, Any]]) -> None:
        self._made = made
        self._instance = instance
        self._settings = settings

    async def call(self, arguments: Mapping[str, Any]) -> ToolReply:
        given = self._settings["execute_kwargs"]
        returned = await _awaited(self._made.execute(self._instance, dict(arguments), **given))
        if not isinstance(returned, tuple):
            return ToolReply(text=_text(returned))
        response, reward, metrics = (*cast(tuple[Any, ...], returned), None, None)[:3]
        return ToolReply(text=_text(response), reward=reward, metrics=_numbers_in(metrics))

    async def score(self) -> float | None:
        if "calc_reward" not in dir(self._made):
            return None
        given = self._settings["calc_reward_kwargs"]
        return await _awaited(self._made.calc_reward(self._instance, **given))

    async def release(self) -> None:
        given = self._settings["release_kwargs"]
        await _awaited(self._made.release(self._instance, **given))


async def _awaited(value: Any) -> Any:
    return await value if inspect.isawaitable(value) else value


def _takes(function: Any, name: str) -> bool:
    parameters = inspect.signature(function).parameters
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _schema_of(made: Any, schema: Mapping[str, Any] | None, name: str) -> Mapping[str, Any]:
    if schema is not None:
        return schema
    said = made.get_openai_tool_schema() if "get_openai_tool_schema" in dir(made) else None
    if isinstance(said, BaseModel):
        said = said.model_dump(exclude_unset=True, exclude_none=True)
    if not isinstance(said, Mapping):
        why = f"class {name} says nothing about its arguments"
        raise UserError("tool", name, why, "add `tool_schema` to the entry of `class_name`")
    return cast(Mapping[str, Any], said)


def _text(response: Any) -> str:
    """The text of a response: a string, `{"text": ...}`, or an object with `.text`."""
    if isinstance(response, Mapping):
        fields = cast(Mapping[str, Any], response)
        return as_text((fields["text"] or "") if "text" in fields else fields)
    if not isinstance(response, str | bytes) and "text" in dir(response):
        return as_text(response.text or "")
    return as_text(response)


def _numbers_in(metrics: Any) -> dict[str, float]:
    if not isinstance(metrics, Mapping):
        return {}
    given = cast(Mapping[Any, Any], metrics)
    return {str(k): float(v) for k, v in given.items() if isinstance(v, int | float)}


_FILE_KEY = "actor_rollout_ref.rollout.multi_turn.function_tool_path"


def load_tools(
    *,
    tool_config_path: str | None = None,
    function_tool_path: str | None = None,
    timeout_s: float = 30.0,
) -> tuple[Tool, ...]:
    """All tools of a tool file and of a Python file; MCP servers are started.

    `timeout_s` is for tools that say nothing. A UserError names the file and the entry that is
    wrong; two tools of one name are among the reasons.
    """
    tools: list[Tool] = []
    origins: dict[str, str] = {}
    default = {"timeout_s": timeout_s}
    if tool_config_path is not None:
        for entry in _entries(tool_config_path):
            where = f"{tool_config_path}: {entry.where}"
            made = _with_place(where, lambda entry=entry: _made(entry, tool_config_path, default))
            tools += [_claim_name(tool, where, origins) for tool in made]
    if function_tool_path is not None:
        made = [t.with_limits(unless_own=default, above={}) for t in file_tools(function_tool_path)]
        tools += [_claim_name(tool, function_tool_path, origins) for tool in made]
    return tuple(tools)


def file_tools(path: str) -> list[FunctionTool | ClassTool]:
    """Every `@tool` and `@tool_class` of a Python file, in order; a UserError without any."""
    values = vars(load_user_module(path, _FILE_KEY)).values()
    found = [value for value in values if isinstance(value, FunctionTool | ClassTool)]
    if not found:
        why = "the file defines no tools"
        raise UserError(_FILE_KEY, path, why, "decorate its functions with `tool`")
    return list({id(tool): tool for tool in found}.values())


def _entries(path: str) -> Sequence[ToolEntry]:
    entries, problems = read_tool_file(path)
    if problems:
        first = problems[0]
        raise UserError(f"{first.origin}: {first.field}", first.value, first.why, first.fix)
    return entries


def _claim_name(tool: Tool, where: str, origins: dict[str, str]) -> Tool:
    """The tool, its name now taken."""
    if tool.name in origins:
        why = f"two tools have this name; the other is from {origins[tool.name]}"
        raise UserError(where, tool.name, why, "rename one of the two tools")
    origins[tool.name] = where
    return tool


def _with_place(where: str, make: Callable[[], list[Tool]]) -> list[Tool]:
    """The result of `make`; errors name the entry."""
    faults: list[BaseException] = []
    with boundary(faults):
        return make()
    fault = faults[0]
    if isinstance(fault, UserError):
        raise UserError(f"{where}: {fault.field}", fault.value, fault.why, fault.fix) from fault
    why = f"making the tool failed: {line_of(fault)} ({place_of(fault)})"
    raise UserError(where, None, why, "fix the tool or its `config`") from fault


def _made(entry: ToolEntry, path: str, default: Mapping[str, Any]) -> list[Tool]:
    check_limits(entry.limits)
    folder = expanded(path).parent
    if entry.kind == "builtin":
        return [_builtin(entry, folder, default)]
    if entry.kind == "mcp":
        return server_tools(cast(Mapping[str, Any], entry.target), entry, folder, default)
    if entry.mcp is not None:
        return verl_server_tools(entry, folder, default)
    found = _found(str(entry.target), folder)
    if isinstance(found, ClassTool) and entry.kind == "class_name":
        settings = {key: value for key, value in entry.config.items() if key != "type"}
        return [found.with_config(settings).with_limits(unless_own=default, above=entry.limits)]
    if isinstance(found, FunctionTool | ClassTool):
        return [found.with_limits(unless_own=default, above=entry.limits)]
    if entry.kind == "class_name" and is_verl_class(found):
        limits = ToolLimits(**{**default, **entry.limits})
        return [VerlTool(found, config=entry.config, schema=entry.schema, limits=limits)]
    if entry.kind == "function":
        why, fix = "it is no tool", "decorate it with `tool`"
    else:
        why = "it is no tool: it lacks `create`, `execute` or `release`"
        fix = "write those methods as verl's tools have them, or decorate a class with `tool_class`"
    raise UserError(entry.kind, entry.target, why, fix)


def _builtin(entry: ToolEntry, folder: Path, default: Mapping[str, Any]) -> Tool:
    settings = dict(entry.config)
    if isinstance(settings.get("path"), str):
        settings["path"] = str(folder / expanded(settings["path"]))
    made = builtin_tools.get(str(entry.target))(**settings)
    assert isinstance(made, FunctionTool), "built-in tools are functions"
    return made.with_limits(unless_own=default, above=entry.limits)


def _found(target: str, folder: Path) -> Any:
    """What `FILE.py:NAME`, relative to the folder, or `PACKAGE.MODULE.NAME` stands for."""
    if ".py:" in target:
        file, _, name = target.rpartition(":")
        target = f"{folder / expanded(file)}:{name}"
    return load_user_name(target, "class_name")
