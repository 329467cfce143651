"""The file that lists the tools of a run, read without importing any of them.

It has verl's layout, with short forms of our own beside `class_name`: `function`, `builtin`, `mcp`.
"""

import ast
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeAlias, cast, final

from luyen.base.paths import expanded
from luyen.base.reading import read_text
from luyen.base.suggest import did_you_mean
from luyen.config.builtin_tools import SETTINGS, Wrong, wrong_settings
from luyen.config.mcp_file import wrong_server
from luyen.config.problem import Origin, Problem
from luyen.config.python_file import read_python
from luyen.config.yaml_tree import read_tree

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
    """What stands under that key: a class, `FILE:NAME`, a built-in's name, or a server."""
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the tool."""
    schema: Mapping[str, Any] | None = None
    """Its schema, where the entry gives one."""
    mcp: Mapping[str, Any] | None = None
    """verl's block of servers beside `class_name`."""
    limits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Limits that replace the tool's own."""

    @property
    def where(self) -> str:
        """How messages name it."""
        return f"tools[{self.number}]"


def tool_file_problems(path: str) -> tuple[Problem, ...]:
    """What is wrong with a tool file, as far as can be told without importing anything."""
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


def _wrong(written: Any, folder: Path) -> Iterator[Wrong]:
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
        yield from wrong_settings(entry[kind], entry.get("config") or {}, folder)
    if "tool_schema" in entry:
        yield from _wrong_schema(entry["tool_schema"])
    if "mcp" in entry:
        yield from wrong_server(entry["mcp"], folder)


def _kind(entry: Mapping[str, Any]) -> Kind | None:
    """The key that names the tool; verl writes its servers beside `class_name`."""
    named: list[Kind] = [kind for kind in KINDS if kind in entry]
    if named == ["class_name", "mcp"]:
        return "class_name"
    return named[0] if len(named) == 1 else None


def _wrong_target(kind: Kind, target: Any, folder: Path) -> Iterator[Wrong]:
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


def _wrong_file(kind: Kind, target: str, folder: Path) -> Iterator[Wrong]:
    """A `FILE.py:NAME` whose file is not there, is no Python, or defines no such name."""
    file, _, name = target.rpartition(":")
    if not file.endswith(".py") or not name.isidentifier():
        yield f".{kind}", target, "it names no function of a file", "write FILE.py:NAME"
        return
    try:
        tree = read_python(folder / expanded(file))
    except OSError as error:
        yield f".{kind}", target, f"the file {error}", "mend the path or the file"
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


def _wrong_limits(limits: Mapping[str, Any]) -> Iterator[Wrong]:
    for name, value in limits.items():
        if name not in LIMITS:
            yield f".limits.{name}", value, "no such limit", did_you_mean(str(name), LIMITS)
            continue
        what, kind = ("a whole number", int) if name in _WHOLE else ("a number", int | float)
        is_number = isinstance(value, kind) and not isinstance(value, bool)
        if not is_number or not math.isfinite(value) or value < 0 or not (value or name in _ZERO):
            least = "0 or more" if name in _ZERO else "above 0"
            yield f".limits.{name}", value, f"expected {what}", f"set it {least}"


def _wrong_schema(schema: Mapping[str, Any]) -> Iterator[Wrong]:
    function = schema.get("function")
    fix = "write `type: function` and `function: {name, description, parameters}`"
    if not isinstance(function, dict):
        yield ".tool_schema", schema, "a schema holds `function`", fix
        return
    held = cast(dict[str, Any], function)
    if not isinstance(held.get("name"), str):
        yield ".tool_schema.function.name", held.get("name"), "a tool has a name", fix
    if not isinstance(held.get("parameters", {}), dict):
        yield ".tool_schema.function.parameters", held["parameters"], "expected a mapping", fix


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
