"""Entries of a tool file that name MCP servers: ours, and verl's."""

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.config.mcp_file import listed_servers
from luyen.config.tool_file import ToolEntry
from luyen.rollout.tools.protocol import Tool, ToolLimits


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
    """verl's form: a class of verl that only passes calls on, and servers beside it."""
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
