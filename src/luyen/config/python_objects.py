"""Python objects as files of a run: functions that were given to `luyen.train` as objects.

A configuration names files, and a run directory keeps what it was made of. So a function becomes a
file under `RUN/inputs`, named by the digest of its content: the function itself, with all that it
uses, as source text. Every process of the run, and every later one, imports that file; the process
that has the object calls the object itself.

A function that has no source text as a whole (it uses a loaded model, an open file, a secret)
exists in its process only. So does one whose file no longer says what it was compiled from: what
is written is compared with the code of the object. Its file says so when it is imported, and
`check` refuses what needs it elsewhere.
"""

import ast
import builtins
import hashlib
import inspect
import linecache
import math
import re
import symtable
import sys
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Never, cast, final

from luyen.base.errors import UserError
from luyen.base.files import write_whole
from luyen.base.input_files import expanded
from luyen.base.secrets import is_from_environment, masked_tree
from luyen.base.source_text import (
    are_decorators_of,
    has_code,
    is_source_of,
    secret_in_source,
    value_of,
)
from luyen.base.user_modules import hold_objects, loaded_module
from luyen.config.plugins import read_python

ABSENT = "object_of_another_process"
"""Called by the file of an object that has no source: the import of such a file fails."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectFile:
    """A Python file that stands for objects of this process.

    Example:
        >>> ObjectFile(path=Path("runs/a/b/inputs/reward-ab12.py"), absent=None).path.name
        'reward-ab12.py'
    """

    path: Path
    """The file."""
    absent: str | None
    """Why no other process can have the objects; None: the file has their source."""


def object_of_another_process(name: str, why: str) -> Never:
    """The error of a process that needs an object which only another process had."""
    fix = f"give it again: luyen.train(resume=RUN, ...) with `{name}`, or write it into a file"
    raise UserError("Python object", name, f"the run was given it as an object, and {why}", fix)


def write_objects(
    folder: Path, stem: str, members: Mapping[str, Any], *, end: str = "", live: Mapping[str, Any]
) -> ObjectFile:
    """Write a file `STEM-DIGEST.py` that defines `members`, and `end` after them.

    `live` are the names that the file has in this process, where nothing is imported.
    """
    absent = None
    try:
        text = module_text(members) + end
        _refuse_secret(text)
    except NoSource as error:
        absent = str(error)
        text = _absent_text(members, live, absent)
    head = '"""Written by luyen.train from objects of a Python process; not to be edited."""\n\n'
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    path = (folder / f"{stem}-{digest}.py").absolute()
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, head + text, is_private=True)
    hold_objects(path, live)
    return ObjectFile(path=path, absent=absent)


def _refuse_secret(text: str) -> None:
    if (place := secret_in_source(text)) is not None:
        raise NoSource(f"{place} is a secret, and a run directory holds none")


def _absent_text(members: Mapping[str, Any], live: Mapping[str, Any], why: str) -> str:
    """A module without the objects: their signatures for the check, and their source to read."""
    name = next(iter(members))
    parts = [f"from {__name__} import {ABSENT}", f"{ABSENT}({name!r}, {why!r})"]
    parts += [_signature(one, value) for one, value in live.items() if callable(value)]
    for one, value in members.items():
        written = source_of(value) or f"an object of {type(value).__name__}"
        if secret_in_source(written) is not None:
            written = "its source holds a secret"
        parts.append("\n".join(f"# {line}" for line in (f"{one}:", *written.splitlines())))
    return "\n\n\n".join(parts) + "\n"


def _signature(name: str, function: Callable[..., Any]) -> str:
    """A definition with the names of a function's arguments and nothing in it."""
    try:
        given = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        given = ()
    plain = [p.name for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in given if p.kind is p.VAR_POSITIONAL), "")
    keyword = [f"{p.name}=None" for p in given if p.kind is p.KEYWORD_ONLY]
    more = [f"**{p.name}" for p in given if p.kind is p.VAR_KEYWORD]
    star = [f"*{rest}"] if rest or keyword else []
    return f"def {name}({', '.join([*plain, *star, *keyword, *more])}): ..."


def is_held(path: str) -> bool:
    """Whether this process has the objects of a file, or has imported it."""
    return loaded_module(expanded(path)) is not None


def absent_object(path: str) -> str | None:
    """Name of the object that a file stands for without having its source; None: it is another."""
    try:
        body = read_python(expanded(path)).body
    except OSError:
        return None
    for node in body:
        match node:
            case ast.Expr(
                value=ast.Call(func=ast.Name(id=name), args=[ast.Constant(value=one), _])
            ):
                if name == ABSENT:
                    return str(one)
            case _:
                pass
    return None


# Source text of functions and of all that they use: a module that stands on its own.

_HERE = ("__main__", "builtins")
"""Modules that another process cannot import by name, or need not."""
_PLAIN = (bool, int, float, str, bytes, type(None), list, tuple, dict, set)
_STATE = (bool, int, float, str, list, dict, set)
"""Types of what a function may keep from call to call; in another process it begins empty."""
_UNSEEN = ("eval", "exec", "globals")
"""What reaches names that a source text does not show."""
_CHANGES = ("append", "extend", "insert", "add", "update", "setdefault", "pop", "clear", "remove")


@final
class NoSource(Exception):
    """An object cannot be written as source text; the message says which, and why."""


def module_text(members: Mapping[str, Any]) -> str:
    """Source of a module with these names; NoSource where one of them has none.

    Example:
        >>> import math
        >>> print(module_text({"root": math.sqrt, "LIMIT": 3}))
        from math import sqrt as root
        <BLANKLINE>
        LIMIT = 3
        <BLANKLINE>
    """
    writer = _Writer()
    for name, value in members.items():
        writer.add(name, value)
    imports = "\n".join(sorted(writer.imports))
    return "\n\n".join(part for part in (imports, *writer.bodies) if part) + "\n"


def source_of(function: Any) -> str | None:
    """Source text of a function as its author wrote it; None where there is none."""
    try:
        return textwrap.dedent(inspect.getsource(function))
    except (OSError, TypeError):
        return None


def is_decorated(value: FunctionType | type, *, by: Collection[object]) -> bool:
    """Whether the source of a definition has a decorator that is one of these objects."""
    text = source_of(value)
    found = ast.parse(text).body[0] if text is not None else None
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return False
    known = _names_around(value)
    plain = [d.func if isinstance(d, ast.Call) else d for d in found.decorator_list]
    return any(value_of(one, known) in by for one in plain)


@final
class _Writer:
    """Collects imports and definitions, dependencies before what uses them."""

    def __init__(self) -> None:
        self.imports: set[str] = set()
        self.bodies: list[str] = []
        self._names: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Write a name with its value, unless it is there; NoSource where that cannot be done."""
        if name in self._names:
            if self._names[name] is not value:
                raise NoSource(f"`{name}` stands for two different objects")
            return
        self._names[name] = value
        if isinstance(value, ModuleType):
            self._add_module(name, value)
        elif (line := _import_line(name, value)) is not None:
            self.imports.add(line)
        elif isinstance(value, re.Pattern):
            pattern = cast(re.Pattern[Any], value)
            self.imports.add("import re")
            self.bodies.append(f"{name} = re.compile({pattern.pattern!r}, {int(pattern.flags)})")
        elif isinstance(value, FunctionType) and value.__name__ == "<lambda>":
            self._add_definition(name, value, _lambda_as_function(name, value))
        elif isinstance(value, FunctionType | type):
            self._add_definition(name, value, _text_of(name, value))
        elif _is_literal(value):
            _refuse_secret_value(value, name)
            self.bodies.append(f"{name} = {_literal_text(value)}")
        else:
            raise NoSource(f"`{name}` is an object of {type(value).__name__}, which has no source")

    def _add_module(self, name: str, module: ModuleType) -> None:
        if module.__spec__ is None or module.__name__ in _HERE:
            raise NoSource(f"the module `{module.__name__}` cannot be imported by its name")
        alias = "" if module.__name__ == name else f" as {name}"
        self.imports.add(f"import {module.__name__}{alias}")

    def _add_definition(self, name: str, value: FunctionType | type, text: str) -> None:
        known = _names_around(value)
        if isinstance(value, FunctionType):
            text = _with_defaults(name, value, _undecorated(name, value, text, known), known)
        changed = _changed_names(text)
        free, local = _names_of(name, text)
        for used in sorted(free):
            if used in _UNSEEN and known.get(used, builtins) is builtins:
                raise NoSource(f"`{name}` calls `{used}`, which can reach any name")
            if used in changed & local and used in known:
                raise NoSource(f"`{used}` in `{name}` is a name around it and one of its own")
            if used in changed and type(known.get(used)) in _STATE and used not in self._names:
                self._names[used] = known[used]
                self.bodies.append(f"{used} = {type(known[used])()!r}")
            elif used in known and used != name:
                self.add(used, known[used])
            elif used != name and used not in vars(builtins):
                raise NoSource(f"`{name}` uses `{used}`, which is not defined")
        self.bodies.append(text.strip())


def _import_line(name: str, value: Any) -> str | None:
    """How another process imports an object; None: it is defined here, or is no definition."""
    if not (inspect.isroutine(value) or inspect.isclass(value)):
        return None
    module, path = str(value.__module__), str(value.__qualname__)  # of C it may have no module
    if "." in path or module in _HERE:
        return None
    home = sys.modules.get(module)
    if home is None or home.__spec__ is None or vars(home).get(path) is not value:
        return None
    return f"from {module} import {path}" + ("" if path == name else f" as {name}")


def _text_of(name: str, value: FunctionType | type) -> str:
    text = source_of(value)
    if text is None:
        raise NoSource(f"the source of `{name}` is not known")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise NoSource(f"the source of `{name}` cannot be read: {error.msg}") from error
    found = tree.body[0]
    if not isinstance(found, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        raise NoSource(f"`{name}` is not defined by `def` or `class`")
    if not is_source_of(value, found):
        why = "has changed since it was defined, or is not all of it"
        raise NoSource(f"the source of `{name}` {why}")
    if found.name != name:
        return f"{text}\n\n{name} = {found.name}"
    return text


def _lambda_as_function(name: str, value: FunctionType) -> str:
    """A `def` with the arguments and the value of a lambda."""
    lines = "".join(linecache.getlines(value.__code__.co_filename))
    try:
        tree = ast.parse(lines)
    except SyntaxError as error:
        raise NoSource(f"the source of `{name}` cannot be read: {error.msg}") from error
    first = value.__code__.co_firstlineno
    found = {
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Lambda)
        and node.lineno == first
        and has_code(ast.Expr(value=node), value.__code__)
    }
    if len(found) != 1:
        raise NoSource("the source of a lambda is not known: write it as a function with `def`")
    [text] = found
    node = cast(ast.Lambda, ast.parse(text, mode="eval").body)
    return f"def {name}({ast.unparse(node.args)}):\n    return {ast.unparse(node.body)}"


def _with_defaults(name: str, value: FunctionType, text: str, known: Mapping[str, Any]) -> str:
    """The text, with defaults as they were when the function was defined.

    `w=w` in a loop is another number for each function, and `w` is the last one now.
    """
    inner = cast(FunctionType, inspect.unwrap(cast(Callable[..., Any], value)))
    tree = ast.parse(text)
    given = cast(ast.FunctionDef, tree.body[0]).args
    own = inner.__defaults__ or ()
    if len(own) != len(given.defaults):
        raise NoSource(f"the defaults of `{name}` are not those of its source")
    arguments = [one.arg for one in (*given.posonlyargs, *given.args)][-len(own) :]
    rows = zip(arguments, given.defaults, own, strict=False)  # none of them without defaults
    given.defaults = [_default(name, *row, known) for row in rows]
    named = inner.__kwdefaults__ or {}
    written = [
        one.arg for one, node in zip(given.kwonlyargs, given.kw_defaults, strict=True) if node
    ]
    if sorted(written) != sorted(named):
        raise NoSource(f"the defaults of `{name}` are not those of its source")
    given.kw_defaults = [
        node if node is None else _default(name, one.arg, node, named.get(one.arg), known)
        for one, node in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]
    made = ast.unparse(tree)
    return text if made == ast.unparse(ast.parse(text)) else made


def _default(
    name: str, argument: str, node: ast.expr, value: Any, known: Mapping[str, Any]
) -> ast.expr:
    """A default as it is written, if that is what it is now; else its value as a literal."""
    if _is_literal(value):
        written = ast.parse(_literal_text(value), mode="eval").body
        if ast.unparse(written) == ast.unparse(node) or value_of(node, known) is value:
            return node
        _refuse_secret_value(value, argument, *_words(node))
        return written
    if value_of(node, known) is not value:
        raise NoSource(f"the default `{ast.unparse(node)}` of `{name}` has no source")
    return node


# Whether a text is what an object was compiled from: files change, and objects are patched.


def _words(node: ast.expr) -> Iterator[str]:
    """Names in an expression: variables, attributes and texts such as keys of a mapping."""
    for part in ast.walk(node):
        match part:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                yield word
            case _:
                pass


def _refuse_secret_value(value: Any, *names: str) -> None:
    """NoSource for what its names, or the environment, say to be a secret."""
    is_named = any(repr(masked_tree(value, name)) != repr(value) for name in names)
    if is_named or any(is_from_environment(text) for text in _texts(value)):
        raise NoSource(f"`{names[0]}` is a secret, and a run directory holds none")


def _texts(value: Any) -> Iterator[str]:
    """Texts in plain data."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for pair in cast(Mapping[Any, Any], value).items():
            yield from _texts(pair)
    elif isinstance(value, list | tuple | set | frozenset):
        for one in cast(Collection[Any], value):
            yield from _texts(one)


def _undecorated(name: str, value: FunctionType, text: str, known: Mapping[str, Any]) -> str:
    """The text, without decorators that are not around this object; NoSource if others are."""
    tree = ast.parse(text)
    found = cast(ast.FunctionDef, tree.body[0])
    is_wrapped = "__wrapped__" in vars(value)
    if is_wrapped and not are_decorators_of(value, found, known):
        raise NoSource(f"`{name}` is wrapped by what its source does not name")
    if not found.decorator_list and vars(value):
        raise NoSource(f"`{name}` has attributes, which its source does not show")
    if is_wrapped or not found.decorator_list or known.get(found.name) is value:
        return text
    found.decorator_list = []
    return ast.unparse(tree)


def _names_of(name: str, text: str) -> tuple[set[str], set[str]]:
    """Names that a definition takes from around it, and those of variables inside of it."""
    try:
        top = symtable.symtable(text, "<source>", "exec")
    except SyntaxError as error:  # `nonlocal`
        raise NoSource(f"`{name}` changes a variable of the function around it") from error
    tables = list(_tables(top))
    own = {symbol.get_name() for symbol in top.get_symbols() if symbol.is_assigned()}
    local = {s.get_name() for t in tables[1:] for s in t.get_symbols() if s.is_local()}
    return {one for table in tables for one in _global_names(table)} - own, local


def _changed_names(text: str) -> set[str]:
    """Names around a definition that it changes: state of a process, and no part of the code.

    Example:
        >>> _changed_names("def f(x):\\n    seen.append(x)\\n    return limits[x]")
        {'seen'}
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(text)):
        match node:
            case ast.Global(names=names):
                found |= set(names)
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=method)):
                found |= {name} if method in _CHANGES else set()
            case ast.Subscript(value=ast.Name(id=name), ctx=ast.Store() | ast.Del()):
                found.add(name)
            case _:
                pass
    return found


def _tables(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    yield table
    for child in table.get_children():
        yield from _tables(child)


def _global_names(table: symtable.SymbolTable) -> Iterator[str]:
    is_top = table.get_type() == "module"
    for symbol in table.get_symbols():
        if symbol.is_referenced() and (symbol.is_global() or is_top):
            yield symbol.get_name()


def _names_around(value: FunctionType | type) -> dict[str, Any]:
    """What a definition can refer to: the names of its module, and of functions around it."""
    if isinstance(value, type):
        home = sys.modules.get(value.__module__)
        return dict(vars(home)) if home is not None else {}
    inner = cast(FunctionType, inspect.unwrap(cast(Callable[..., Any], value)))
    closed = zip(inner.__code__.co_freevars, inner.__closure__ or (), strict=True)
    try:
        return {**inner.__globals__, **{name: cell.cell_contents for name, cell in closed}}
    except ValueError as error:  # a cell that is still empty
        raise NoSource(f"`{inner.__name__}` uses a name that has no value yet") from error


def _literal_text(value: Any) -> str:
    """A literal as source text; NaN and infinities have none of their own."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return f"float({str(value)!r})" if is_odd else repr(value)


def _is_literal(value: Any) -> bool:
    if type(value) not in _PLAIN:
        return False
    if isinstance(value, float):
        return True
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return False
