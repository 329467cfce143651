"""MCP servers as tool files and verl's JSON files name them, read before any is started."""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from luyen.base.paths import expanded
from luyen.base.reading import read_text
from luyen.base.suggest import did_you_mean
from luyen.config.builtin_tools import Wrong

LISTED = "mcp_servers_config_path"
_SELECTED = "tool_selected_list"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_words(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in cast(list[Any], value))


def _is_command(value: Any) -> bool:
    return _is_text(value) or (_is_words(value) and bool(value))


def _is_arguments(value: Any) -> bool:
    plain = (str, int, float)
    return isinstance(value, list) and all(isinstance(v, plain) for v in cast(list[Any], value))


def _is_mapping(value: Any) -> bool:
    return isinstance(value, dict)


def _is_seconds(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and value > 0


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "command": (_is_command, "a program, or a list of it and its arguments"),
    "args": (_is_arguments, "a list of words"),
    "env": (_is_mapping, "a mapping"),
    "cwd": (_is_text, "a folder"),
    "url": (_is_text, "an address"),
    "headers": (_is_mapping, "a mapping"),
    "select": (_is_words, "a list of names"),
    "prefix": (lambda value: isinstance(value, str), "text"),
    "start_s": (_is_seconds, "a number above 0"),
    LISTED: (_is_text, "the path of a JSON file"),
    _SELECTED: (_is_words, "a list of names"),
}
"""Key of a server -> what it must be. The last two are verl's."""


def wrong_server(server: Any, folder: Path) -> Iterator[Wrong]:
    """What is wrong with the block `mcp` of an entry, files that it names included."""
    if not isinstance(server, dict):
        yield ".mcp", server, "expected a mapping", "write `mcp: {command: [...]}`"
        return
    block = cast(dict[str, Any], server)
    yield from (
        (f".mcp.{below}", value, why, fix) for below, value, why, fix in _wrong_keys(block, _KINDS)
    )
    ways = [way for way in ("command", "url", LISTED) if block.get(way)]
    if len(ways) != 1:
        why = "a server is reached in exactly one way"
        yield ".mcp", sorted(map(str, block)), why, f"set `command`, or `url`, or `{LISTED}`"
    if _is_text(block.get(LISTED)):
        try:
            listed_servers(folder / expanded(block[LISTED]))
        except OSError as error:
            fix = 'write {"mcpServers": {NAME: {"url": ...}}}'
            yield f".mcp.{LISTED}", block[LISTED], f"it lists no servers: {error}", fix


def _wrong_keys(block: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[Wrong]:
    for key, value in block.items():
        if key not in known:
            yield key, value, "no such key here", did_you_mean(str(key), known)
        elif value is not None and not _KINDS[key][0](value):
            yield key, value, f"expected {_KINDS[key][1]}", "mend the value"


def listed_servers(path: Path) -> dict[str, dict[str, Any]]:
    """The servers of a JSON file with `mcpServers`, by name; an OSError says why there are none."""
    text = read_text(path)
    try:
        page: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise OSError(f"not valid JSON: {error}") from error
    servers: Any = cast(dict[str, Any], page).get("mcpServers") if isinstance(page, dict) else None
    if not isinstance(servers, dict) or not servers:
        raise OSError("there are no `mcpServers`")
    for name, server in cast(dict[str, Any], servers).items():
        _require_server(name, server)
    return cast(dict[str, dict[str, Any]], servers)


def _require_server(name: str, server: Any) -> None:
    if not isinstance(server, dict):
        raise OSError(f"`{name}`: expected an object")
    block = cast(dict[str, Any], server)
    for key, (is_fit, what) in _KINDS.items():
        value = block.get(key)
        if value is not None and not is_fit(value):
            raise OSError(f"`{name}`.{key}: expected {what}")
    if not block.get("command") and not block.get("url"):
        raise OSError(f"`{name}` has neither `command` nor `url`")
