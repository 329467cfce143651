"""The tools file, its MCP servers and built-in tools, read without importing any of them.

It has verl's layout, plus Luyen's short forms for `class_name`: `function`, `builtin`, `mcp`.
"""

import ast
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, final
from urllib.parse import urlsplit

from luyen.base.errors import did_you_mean
from luyen.base.input_files import expanded, read_text, require_file
from luyen.config.loader.yaml_tree import read_tree
from luyen.config.plugins import read_python
from luyen.config.problem import Origin, Problem
from luyen.config.reward_components import nodes, read_components, read_routes
from luyen.config.schema.run import RunConfig

# Settings of built-in tools, without importing the tools.
#
# The sandbox checks the limits of `python`; here only its name is checked.

SettingFault: TypeAlias = tuple[str, Any, str, str]
"""Key below an entry, value, reason, fix."""
MODES = ("words", "key")


def _is_word(value: Any) -> bool:
    return isinstance(value, str) and value != ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


_Kind: TypeAlias = tuple[Callable[[Any], bool], str]
_NAME: dict[str, _Kind] = {"name": (_is_word, "a name")}
SETTINGS: dict[str, dict[str, _Kind] | None] = {
    "calculator": _NAME,
    "python": None,
    "search": {
        "path": (_is_word, "the path of a JSONL file"),
        "documents": (lambda value: isinstance(value, dict), "a mapping of keys to texts"),
        "key_field": (_is_word, "a name"),
        "text_field": (_is_word, "a name"),
        "mode": (lambda value: value in MODES, "`words` or `key`"),
        "top_k": (_is_count, "a whole number from 1"),
        **_NAME,
        "description": (lambda value: isinstance(value, str), "text"),
    },
}
"""Tool -> its settings and what each must be; None: only the tool knows."""


def setting_faults(tool: str, config: Mapping[str, Any], folder: Path) -> Iterator[SettingFault]:
    """What is wrong with the `config` of a built-in tool; paths begin at `folder`."""
    known = SETTINGS[tool]
    for key, value in config.items():
        kinds = _NAME if known is None else known
        if key in kinds:
            is_fit, what = kinds[key]
            if not is_fit(value) and not (value is None and key in ("path", "documents")):
                yield f".config.{key}", value, f"expected {what}", f"give {what}"
        elif known is not None:
            yield (
                f".config.{key}",
                value,
                "the tool has no such setting",
                did_you_mean(str(key), known),
            )
    if tool == "search":
        yield from _wrong_search(config, folder)


def _wrong_search(config: Mapping[str, Any], folder: Path) -> Iterator[SettingFault]:
    path = config.get("path")
    if (path is None) == (config.get("documents") is None):
        why = "a search needs either a file or documents"
        yield ".config.path", path, why, "set `path`, or `documents: {KEY: TEXT}`"
    elif isinstance(path, str):
        try:
            require_file(folder / expanded(path))
        except OSError as error:
            why = f"cannot be read: {error}"
            yield ".config.path", path, why, "give a readable JSONL file"


# MCP servers in tool files and in verl's JSON files, checked before any is started.

LISTED = "mcp_servers_config_path"
_SELECTED = "tool_selected_list"


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value != "" and "\0" not in value


def _is_words(value: Any) -> bool:
    """Whether it is a list of texts that a process can be given."""
    listed = cast(list[Any], value)
    return isinstance(value, list) and all(isinstance(v, str) and "\0" not in v for v in listed)


def _is_address(value: Any) -> bool:
    if not _is_text(value) or "${" in value:  # which is read when the server is reached
        return _is_text(value)
    try:
        parts = urlsplit(cast(str, value))
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def _is_environment(value: Any) -> bool:
    """Whether it is a mapping that a process can be given as its variables."""
    if not isinstance(value, dict):
        return False
    pairs = cast(dict[Any, Any], value).items()
    return all(
        isinstance(name, str) and name and "=" not in name and "\0" not in f"{name}{one}"
        for name, one in pairs
    )


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
    "env": (_is_environment, "a mapping of names of variables"),
    "cwd": (_is_text, "a folder"),
    "url": (_is_address, "an address that begins with http:// or https://"),
    "headers": (_is_mapping, "a mapping"),
    "select": (_is_words, "a list of names"),
    "prefix": (lambda value: isinstance(value, str), "text"),
    "start_s": (_is_seconds, "a number above 0"),
    LISTED: (_is_text, "the path of a JSON file"),
    _SELECTED: (_is_words, "a list of names"),
}
"""Key of a server -> what it must be. The last two are verl's."""


def server_faults(server: Any, folder: Path) -> Iterator[SettingFault]:
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


def _wrong_keys(block: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[SettingFault]:
    for key, value in block.items():
        if key not in known:
            yield key, value, "no such key here", did_you_mean(str(key), known)
        elif value is not None and not _KINDS[key][0](value):
            what = _KINDS[key][1]
            yield key, value, f"expected {what}", f"give {what}"


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


Kind: TypeAlias = Literal["class_name", "function", "builtin", "mcp"]
KINDS: tuple[Kind, ...] = ("class_name", "function", "builtin", "mcp")
BUILTIN_TOOLS = tuple(SETTINGS)
LIMITS = ("timeout_s", "retries", "backoff_s", "concurrency")
_WHOLE, _ZERO = ("retries", "concurrency"), ("retries", "backoff_s")
"""Limits that are whole numbers, and those that may be 0."""
_BESIDES: dict[Kind, tuple[str, ...]] = {
    "class_name": ("config", "tool_schema", "mcp", "limits"),
    "function": ("limits",),
    "builtin": ("config", "limits"),
    "mcp": ("limits",),
}
_RULE = "T20"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ToolEntry:
    """One entry of the list.

    Example:
        >>> ToolEntry(number=1, kind="builtin", target="calculator").where
        'tools[1]'
    """

    number: int
    """Its place in the list, from 1."""
    kind: Kind
    """How the tool is named."""
    target: Any
    """The value of that key: a class, `FILE:NAME`, a built-in's name, or a server."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the tool."""
    schema: Mapping[str, Any] | None = None
    """Its schema, where the entry gives one."""
    mcp: Mapping[str, Any] | None = None
    """verl's block of servers next to `class_name`."""
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Limits that replace the tool's own."""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"tools[{self.number}]"


def tool_file_problems(path: str) -> tuple[Problem, ...]:
    """What is wrong with a tool file, as far as it shows without importing anything."""
    return read_tool_file(path)[1]


def read_tool_file(path: str) -> tuple[tuple[ToolEntry, ...], tuple[Problem, ...]]:
    """The entries of a tool file, and what is wrong with it; entries only when nothing is."""
    try:
        text = read_text(expanded(path))
    except OSError as error:
        why = f"the tool file cannot be read: {error}"
        return (), (_problem(path, "tools", path, why, "give a readable YAML file"),)
    tree = read_tree(text, path)
    if tree.problems:
        return (), tree.problems
    listed = tree.values.get("tools")
    fix = "write `tools:` and below it a list of entries"
    for stray in tree.values:
        if stray != "tools":
            why = f"a tool file has no key `{stray}`"
            return (), (_problem(path, stray, tree.values[stray], why, fix),)
    if not isinstance(listed, list):
        return (), (_problem(path, "tools", listed, "the file lists no tools", fix),)
    problems: list[Problem] = []
    entries: list[ToolEntry] = []
    folder = expanded(path).parent
    for number, written in enumerate(cast(list[Any], listed), 1):
        found = [
            _problem(path, f"tools[{number}]{below}", value, why, fix)
            for below, value, why, fix in _wrong(written, folder)
        ]
        problems += found
        if not found:
            entries.append(_entry(number, written))
    problems += _repeated(path, entries)
    return ((), tuple(problems)) if problems else (tuple(entries), ())


def _wrong(written: Any, folder: Path) -> Iterator[SettingFault]:
    if not isinstance(written, dict):
        yield "", written, "an entry is a mapping", "write e.g. `- builtin: calculator`"
        return
    entry = cast(dict[str, Any], written)
    kind = _kind(entry)
    if kind is None:
        why = "an entry names its tool by exactly one of " + ", ".join(KINDS)
        yield "", sorted(entry), why, "write e.g. `- builtin: calculator`"
        return
    known = (kind, *_BESIDES[kind])
    for key in entry:
        if key not in known:
            yield f".{key}", entry[key], "no such key here", did_you_mean(str(key), known)
    for key in ("config", "tool_schema", "limits"):
        if key in known and not isinstance(entry.get(key) or {}, dict):
            yield f".{key}", entry[key], "expected a mapping", "write keys and values below it"
            return
    yield from _wrong_target(kind, entry[kind], folder)
    yield from _wrong_limits(entry.get("limits") or {})
    if kind == "builtin" and entry[kind] in BUILTIN_TOOLS:
        yield from setting_faults(entry[kind], entry.get("config") or {}, folder)
    if "tool_schema" in entry:
        yield from _wrong_schema(entry["tool_schema"])
    if "mcp" in entry:
        yield from server_faults(entry["mcp"], folder)


def _kind(entry: Mapping[str, Any]) -> Kind | None:
    """The key that names the tool; verl writes its servers next to `class_name`."""
    named: list[Kind] = [kind for kind in KINDS if kind in entry]
    if named == ["class_name", "mcp"]:
        return "class_name"
    return named[0] if len(named) == 1 else None


def _wrong_target(kind: Kind, target: Any, folder: Path) -> Iterator[SettingFault]:
    if kind == "mcp":
        return
    if not isinstance(target, str) or not target:
        yield f".{kind}", target, "expected a name", "write it as text"
    elif kind == "builtin":
        if target not in BUILTIN_TOOLS:
            fix = did_you_mean(target, BUILTIN_TOOLS)
            yield f".{kind}", target, "no built-in tool has this name", fix
    elif ".py" in target:
        yield from _wrong_file(kind, target, folder)
    elif kind == "function" or "." not in target:
        form = "FILE.py:NAME" if kind == "function" else "PACKAGE.MODULE.CLASS or FILE.py:CLASS"
        yield f".{kind}", target, "it does not say where to look", f"write {form}"


def _wrong_file(kind: Kind, target: str, folder: Path) -> Iterator[SettingFault]:
    """A `FILE.py:NAME` whose file is not there, is no Python, or defines no such name."""
    file, _, name = target.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        yield f".{kind}", target, "it names no function of a file", "write FILE.py:NAME"
        return
    try:
        tree = read_python(folder / expanded(file))
    except OSError as error:
        yield f".{kind}", target, f"the file {error}", "correct the path or the file"
        return
    defined = _defined(tree)
    if name not in defined:
        yield f".{kind}", target, f"{file} defines no `{name}`", did_you_mean(name, defined)


def _defined(tree: ast.Module) -> list[str]:
    names: list[str] = []
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.append(name)
            case ast.ClassDef(name=name) | ast.Name(id=name, ctx=ast.Store()):
                names.append(name)
            case ast.alias(name=name, asname=other):
                names.append(other or name)
            case _:
                pass
    return names


def _wrong_limits(limits: Mapping[str, Any]) -> Iterator[SettingFault]:
    for name, value in limits.items():
        if name not in LIMITS:
            yield f".limits.{name}", value, "no such limit", did_you_mean(str(name), LIMITS)
            continue
        what, kind = ("a whole number", int) if name in _WHOLE else ("a number", int | float)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or not (value or name in _ZERO):
            least = "0 or more" if name in _ZERO else "above 0"
            yield f".limits.{name}", value, f"expected {what}", f"set it {least}"


def _wrong_schema(schema: Mapping[str, Any]) -> Iterator[SettingFault]:
    function = schema.get("function")
    fix = "write `type: function` and `function: {name, description, parameters}`"
    if not isinstance(function, dict):
        yield ".tool_schema", schema, "a schema holds `function`", fix
        return
    function_schema = cast(dict[str, Any], function)
    if not isinstance(function_schema.get("name"), str):
        yield ".tool_schema.function.name", function_schema.get("name"), "a tool has a name", fix
    if not isinstance(function_schema.get("parameters", {}), dict):
        yield (
            ".tool_schema.function.parameters",
            function_schema["parameters"],
            "expected a mapping",
            fix,
        )


def _entry(number: int, written: dict[str, Any]) -> ToolEntry:
    kind = _kind(written)
    assert kind is not None, "an entry without a kind was refused before"
    return ToolEntry(
        number=number,
        kind=kind,
        target=written[kind],
        config=written.get("config") or {},
        schema=written.get("tool_schema"),
        mcp=written.get("mcp"),
        limits=written.get("limits") or {},
    )


def _repeated(path: str, entries: list[ToolEntry]) -> Iterator[Problem]:
    """Entries whose names are the same, where the file says them."""
    seen: dict[str, str] = {}
    for entry in entries:
        name = _name(entry)
        if name is None:
            continue
        if name in seen:
            why = f"{seen[name]} has this name already"
            yield _problem(path, entry.where, name, why, "rename one of the two tools")
        seen.setdefault(name, entry.where)


def _name(entry: ToolEntry) -> str | None:
    if entry.schema is not None:
        return str(entry.schema["function"]["name"])
    if entry.kind == "builtin":
        return str(entry.config.get("name", entry.target))
    return None


def _problem(path: str, below: str, value: Any, why: str, fix: str) -> Problem:
    origin = Origin(source=path)
    return Problem(
        id=_RULE, severity="error", field=below, value=value, why=why, fix=fix, origin=origin
    )


# Whether a run executes programs written by its policy.

_CODE_RULE = "code"
_CODE_TOOL = "python"


def runs_policy_code(config: RunConfig) -> bool:
    """Whether programs of the policy are run, by a reward or by a tool."""
    return reward_runs_code(config) or tools_run_code(config)


def reward_runs_code(config: RunConfig) -> bool:
    """Whether a component of the reward, or a route, is the rule that runs programs."""
    components = read_components(config.reward)[0]
    named = {one.rule for _, one in nodes(components)}
    routed = {name for names in read_routes(config.reward).values() for name in names}
    return _CODE_RULE in named | routed


def tools_run_code(config: RunConfig) -> bool:
    """Whether the policy may call the tool that runs programs."""
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    path = multi_turn.tool_config_path
    if not multi_turn.enable or path is None:
        return False
    return any(
        one.kind == "builtin" and one.target == _CODE_TOOL for one in read_tool_file(path)[0]
    )
