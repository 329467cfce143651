"""The tools of a run, from a tool file (verl's layout and our short forms) and Python files."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.foreign import boundary
from luyen.base.paths import expanded
from luyen.config.tool_file import ToolEntry, read_tool_file
from luyen.rollout.tools.all import builtin_tools
from luyen.rollout.tools.foreign import line_of, place_of
from luyen.rollout.tools.function import FunctionTool
from luyen.rollout.tools.imported import imported_module, imported_name
from luyen.rollout.tools.limits import check_limits
from luyen.rollout.tools.mcp_entry import server_tools, verl_server_tools
from luyen.rollout.tools.protocol import Tool, ToolLimits
from luyen.rollout.tools.stateful import ClassTool
from luyen.rollout.tools.verl_class import VerlTool, is_verl_class

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
            tools += [_noted(tool, where, origins) for tool in made]
    if function_tool_path is not None:
        made = [t.limited(unless_own=default, above={}) for t in file_tools(function_tool_path)]
        tools += [_noted(tool, function_tool_path, origins) for tool in made]
    return tuple(tools)


def file_tools(path: str) -> list[FunctionTool | ClassTool]:
    """Every `@tool` and `@tool_class` of a Python file, in order; a UserError without any."""
    values = vars(imported_module(path, _FILE_KEY)).values()
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


def _noted(tool: Tool, where: str, origins: dict[str, str]) -> Tool:
    """The tool, its name now taken."""
    if tool.name in origins:
        why = f"two tools have this name; the other is from {origins[tool.name]}"
        raise UserError(where, tool.name, why, "rename one of the two tools")
    origins[tool.name] = where
    return tool


def _with_place(where: str, make: Callable[[], list[Tool]]) -> list[Tool]:
    """What `make` makes; whatever it raises names the entry."""
    faults: list[BaseException] = []
    with boundary(faults):
        return make()
    fault = faults[0]
    if isinstance(fault, UserError):
        raise UserError(f"{where}: {fault.field}", fault.value, fault.why, fault.fix) from fault
    why = f"making the tool failed: {line_of(fault)} ({place_of(fault)})"
    raise UserError(where, None, why, "mend the tool or its `config`") from fault


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
        return [found.configured(settings).limited(unless_own=default, above=entry.limits)]
    if isinstance(found, FunctionTool | ClassTool):
        return [found.limited(unless_own=default, above=entry.limits)]
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
    return made.limited(unless_own=default, above=entry.limits)


def _found(target: str, folder: Path) -> Any:
    """What `FILE.py:NAME`, relative to the folder, or `PACKAGE.MODULE.NAME` stands for."""
    if ".py:" in target:
        file, _, name = target.rpartition(":")
        target = f"{folder / expanded(file)}:{name}"
    return imported_name(target, "class_name")
