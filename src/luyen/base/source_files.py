"""Definitions in source files: the text that a function was compiled from, and proof that it is.

Files change after they were imported, and objects are patched. So a definition is the source of a
function only if the file, compiled again as a whole, has the code of the function at its place.
"""

import ast
import inspect
import linecache
import symtable
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType
from typing import Any, TypeAlias, cast, final

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
MOST_CHARACTERS = 2**20
"""Longest source text that is read or written for an object."""
_CHANGES = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "clear", "remove")


@final
class NoSource(Exception):
    """An object cannot be written as source text; the message says which, and why."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """A source file, read and compiled once.

    Example:
        >>> sorted(read_source("def f():\\n    global n\\n").changed)
        ['n']
    """

    tree: ast.Module
    """Its syntax."""
    codes: dict[tuple[str, int], list[CodeType]]
    """What it compiles to, by name and first line."""
    definitions: dict[tuple[str, int], list[Definition]]
    """Functions of it, by name and first line."""
    bindings: dict[str, list[ast.stmt]]
    """Statements outside of functions that give a name its value."""
    changed: frozenset[str]
    """Names outside of a function that functions of the file change."""


def source_file(path: str) -> SourceFile:
    """The file that a function was compiled from, or a cell of a notebook; NoSource without one."""
    lines = linecache.getlines(path)
    if sum(len(line) for line in lines) > MOST_CHARACTERS:
        raise NoSource(f"its file is larger than {MOST_CHARACTERS} characters")
    try:
        return read_source("".join(lines))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NoSource(f"its file cannot be read: {type(error).__name__}") from error


@lru_cache(maxsize=8)
def read_source(text: str) -> SourceFile:
    """A source text, parsed and compiled."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        tree = ast.parse(text)
        whole = compile(text, "<source>", "exec", 0, dont_inherit=True)
    codes: dict[tuple[str, int], list[CodeType]] = {}
    for code in codes_in(whole):
        codes.setdefault((code.co_name, code.co_firstlineno), []).append(code)
    definitions: dict[tuple[str, int], list[Definition]] = {}
    changed: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            line = min([node.lineno, *(one.lineno for one in node.decorator_list)])
            definitions.setdefault((node.name, line), []).append(node)
        elif isinstance(node, ast.Lambda):
            definitions.setdefault(("<lambda>", node.lineno), []).append(node)
    for one in definitions.values():
        for node in one:
            changed |= changed_names(node) - _own_names(node)
    return SourceFile(
        tree=tree,
        codes=codes,
        definitions=definitions,
        bindings=_bindings(tree),
        changed=frozenset(changed),
    )


def _own_names(node: Definition) -> set[str]:
    """Variables of a function itself, without those of functions in it."""
    own = {one.arg for one in parameters(node.args)}
    shared: set[str] = set()
    waiting: list[ast.AST] = [*ast.iter_child_nodes(node)]
    while waiting:
        part = waiting.pop()
        if isinstance(part, ast.Global | ast.Nonlocal):
            shared |= {*part.names}
        elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
            own.add(part.id)
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef):
            waiting += ast.iter_child_nodes(part)
    return own - shared


def codes_in(whole: CodeType) -> Iterator[CodeType]:
    """A code object and all inside of it."""
    waiting = [whole]
    while waiting:
        code = waiting.pop()
        yield code
        waiting += [one for one in code.co_consts if isinstance(one, CodeType)]


def definition_of(code: CodeType) -> Definition:
    """The definition that a code object was compiled from; NoSource if its file has none."""
    file = source_file(code.co_filename)
    key = (code.co_name, code.co_firstlineno)
    places = [*code.co_positions()]
    is_there = any(
        have_same_code(one, code) and [*one.co_positions()] == places
        for one in file.codes.get(key, ())
    )
    nodes = file.definitions.get(key, [])
    if code.co_name == "<lambda>":
        nodes = [one for one in nodes if isinstance(one, ast.Lambda) and _place(one.body) in places]
    if not is_there or len(nodes) != 1:
        name = "a lambda" if code.co_name == "<lambda>" else f"`{code.co_name}`"
        raise NoSource(f"the source of {name} is not known, or has changed since it was defined")
    return nodes[0]


def _place(node: ast.expr) -> tuple[int | None, ...]:
    return (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)


def changed_names(node: ast.AST) -> set[str]:
    """Names around a definition that it changes: state of a process, and no part of the code.

    Example:
        >>> changed_names(ast.parse("def f(x):\\n    seen.append(x)\\n    return limits[x]"))
        {'seen'}
    """
    found: set[str] = set()
    for part in ast.walk(node):
        match part:
            case ast.Global(names=names) | ast.Nonlocal(names=names):
                found |= set(names)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                found |= {name} if method in _CHANGES else set()
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                found.add(name)
            case _:
                pass
    return found


def _bindings(tree: ast.Module) -> dict[str, list[ast.stmt]]:
    """Statements of a module, outside of functions and classes, by the names they give a value."""
    found: dict[str, list[ast.stmt]] = {}
    waiting: list[ast.stmt] = list(tree.body)
    while waiting:
        part = waiting.pop()
        for name in _bound_names(part):
            found.setdefault(name, []).append(part)
        if not isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            for inner in ast.iter_child_nodes(part):
                below = [inner] if isinstance(inner, ast.stmt) else [*ast.iter_child_nodes(inner)]
                waiting += [one for one in below if isinstance(one, ast.stmt)]
    return found


def _bound_names(part: ast.stmt) -> set[str]:
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {part.name}
    if isinstance(part, ast.Import | ast.ImportFrom):
        return {one.asname or one.name.partition(".")[0] for one in part.names}
    own = [one for one in ast.iter_child_nodes(part) if not isinstance(one, ast.stmt)]
    named = [node for one in own for node in ast.walk(one) if isinstance(node, ast.Name)]
    return {node.id for node in named if not isinstance(node.ctx, ast.Load)}


def have_same_code(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects consist of the same instructions on the same values."""
    return _are_same(one, other, is_whole=True)


def have_same_names(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects have the same names, each of the same kind, and the same constants.

    Of one syntax tree this makes them equal: their instructions depend on the layout of the lines.
    """
    return _are_same(one, other, is_whole=False)


def _facts(code: CodeType, is_whole: bool) -> list[Any]:
    found: list[Any] = [code.co_name, code.co_names, code.co_varnames, code.co_freevars]
    found += [code.co_cellvars, code.co_argcount, code.co_posonlyargcount]
    found += [code.co_kwonlyargcount, code.co_flags & ~inspect.CO_NESTED]
    return [*found, code.co_code, code.co_exceptiontable] if is_whole else found


def _are_same(one: Any, other: Any, *, is_whole: bool) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, CodeType):
        return _facts(one, is_whole) == _facts(other, is_whole) and _are_same(
            one.co_consts, other.co_consts, is_whole=is_whole
        )
    if isinstance(one, tuple):
        mine, yours = cast(tuple[Any, ...], one), cast(tuple[Any, ...], other)
        pairs = zip(mine, yours, strict=False)
        is_one = len(mine) == len(yours)
        return is_one and all(_are_same(a, b, is_whole=is_whole) for a, b in pairs)
    if isinstance(one, frozenset):
        return sorted(map(repr, cast(frozenset[Any], one))) == sorted(map(repr, other))
    return repr(one) == repr(other)


def names_around(text: str) -> tuple[set[str], set[str], set[str]]:
    """Names that a source text takes from around it: all, those it needs at once, and its own.

    Example:
        >>> sorted(names_around("def f(x, by=k):\\n    y = x\\n    return y + z")[0])
        ['k', 'z']
    """
    try:
        top = symtable.symtable(text, "<source>", "exec")
    except SyntaxError as error:
        raise NoSource(f"its source cannot stand alone: {error.msg}") from error
    tables = [*_tables(top)]
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    local = {s.get_name() for t in tables[1:] for s in t.get_symbols() if s.is_local()}
    early = [table for table in tables if table.get_type() in ("module", "class")]
    found = [{n for table in some for n in _global_names(table)} - own for some in (tables, early)]
    return found[0], found[1], local


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    is_top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or is_top):
            yield symbol.get_name()


_READERS = (
    *("get", "items", "keys", "values", "index", "count", "union", "intersection"),
    *("difference", "issubset", "issuperset", "isdisjoint", "copy"),
)
_TAKERS = (
    *("len", "sum", "min", "max", "any", "all", "sorted", "set", "frozenset", "list", "tuple"),
    *("dict", "enumerate", "zip", "range", "str", "repr"),
)


def is_only_read(name: str, node: ast.AST, flat: bool) -> bool:
    """Whether a definition uses the collection under a name without being able to change it.

    What a nested collection holds could be changed where it is taken out; a `flat` one has no such.

    Example:
        >>> is_only_read("w", ast.parse("x in w and w[0] and len(w)"), flat=True)
        True
        >>> is_only_read("w", ast.parse("g(w)"), flat=True)
        False
    """
    above = {id(child): part for part in ast.walk(node) for child in ast.iter_child_nodes(part)}
    used = [part for part in ast.walk(node) if isinstance(part, ast.Name) and part.id == name]
    return all(isinstance(one.ctx, ast.Load) and _is_read(one, above, flat) for one in used)


def _is_read(node: ast.expr, above: dict[int, ast.AST], flat: bool) -> bool:
    parent = above.get(id(node))
    match parent:
        case ast.Compare():
            return True
        case ast.Subscript(value=value, ctx=ast.Load()) if value is node:
            return flat or _is_read(parent, above, flat)
        case ast.For(iter=source) | ast.comprehension(iter=source) if source is node:
            return flat
        case ast.Call(func=ast.Name(id=taker), args=given):
            is_text = taker in ("len", "str", "repr")
            return taker in _TAKERS and node in given and (flat or is_text)
        case ast.Attribute(attr=method):
            call = above.get(id(parent))
            return flat and isinstance(call, ast.Call) and method in _READERS
        case _:
            return False


def text_of(tree: ast.AST) -> str:
    """Source text of a syntax tree, which is read as that tree again."""
    text = ast.unparse(tree)
    again = ast.parse(text)
    whole = tree if isinstance(tree, ast.Module) else ast.Module([cast(ast.stmt, tree)], [])
    if ast.dump(again) != ast.dump(whole):
        raise NoSource("its source has a form that cannot be written again")
    return text


def parameters(given: ast.arguments) -> Collection[ast.arg]:
    """All parameters of a definition that have a name and may have an annotation."""
    rest = [one for one in (given.vararg, given.kwarg) if one is not None]
    return [*given.posonlyargs, *given.args, *given.kwonlyargs, *rest]
