"""Source text of functions and classes with all that they use: a module that stands on its own.

Denied by default. A part of an object is written only in a form of which it is known that another
process makes the same of it:

- a function: the code that its file compiles to, its defaults, the values around it, nothing else;
- a class of such functions and of literals (`luyen.base.class_source`);
- plain data that nothing changes;
- an import of what is installed (`luyen.base.source_modules`), or of a module of one's own whose
  definition is what its file says.

At the end the whole text is compiled, and has to have the code of every function that is in it.
"""

import __future__

import ast
import builtins
import copy
import inspect
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any, cast, final

from luyen.base.class_source import class_definition
from luyen.base.plain_values import (
    ATOMS,
    is_fixed,
    is_plain,
    literal_of,
    literal_text,
    refuse_secret_value,
    words_in,
    written_value,
)
from luyen.base.source_files import (
    MOST_CHARACTERS,
    Definition,
    NoSource,
    SourceFile,
    changed_names,
    codes_in,
    definition_of,
    have_same_names,
    is_only_read,
    names_around,
    parameters,
    source_file,
    text_of,
)
from luyen.base.source_modules import (
    demand_builtin,
    demand_known_parts,
    demand_member,
    demand_module,
    home_of,
    is_installed,
)

_STATE = (bool, int, float, str, list, dict, set)
"""Types of what a function may keep from call to call; in another process it begins empty."""
_WRAPPED = "__wrapped__"
_RESERVED = re.compile("_update_wrapper|_compile|_made_[0-9]+|_loaded_.*|float|set|frozenset")
"""Names that the text has itself."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _Around:
    """What a definition can refer to.

    Example:
        >>> _Around.__slots__[:2]
        ('name', 'node')
    """

    name: str
    """Its name, for messages."""
    node: ast.AST
    """The definition."""
    known: Mapping[str, Any]
    """Names around it, and what they stand for now."""
    home: dict[str, Any]
    """Names of its module."""
    file: SourceFile
    """The file that it is in."""
    is_imported: bool
    """Whether it is only compared, because its module is imported."""


def module_text(
    members: Mapping[str, Any],
    *,
    live: Mapping[str, Any] | None = None,
    taken: Collection[str] = (),
) -> str:
    """Source of a module with these names; NoSource where one of them has none.

    `live` are objects that other code of the file puts in the place of names, and `taken` are names
    that other code of the file has.

    Example:
        >>> import math
        >>> print(module_text({"root": math.sqrt, "LIMIT": 3}))
        from math import sqrt as root
        <BLANKLINE>
        LIMIT = 3
        <BLANKLINE>
    """
    writer = _Writer(live=live or {}, taken=taken, verified=set())
    try:
        for name, value in members.items():
            writer.add(name, value)
        return writer.text()
    except RecursionError as error:
        raise NoSource("it refers to too many objects, one inside of the other") from error


@final
class _Writer:
    """Collects imports and definitions, dependencies before what uses them."""

    def __init__(
        self, *, live: Mapping[str, Any], taken: Collection[str], verified: set[int]
    ) -> None:
        self._live, self._taken, self._verified = live, taken, verified
        self._imports: set[str] = set()
        self._bodies: list[str] = []
        self._names: dict[str, Any] = {}
        self._open: set[str] = set()
        self._codes: list[CodeType] = []
        self._parts: set[str] = set()
        self._made = 0

    def text(self) -> str:
        """All of it; NoSource if it does not compile to the code of the functions in it."""
        is_future = any(c.co_flags & _future() for c in self._codes)
        head = "from __future__ import annotations\n\n" if is_future else ""
        parts = (part for part in ("\n".join(sorted(self._imports)), *self._bodies) if part)
        text = head + "\n\n".join(parts) + "\n"
        if len(text) > MOST_CHARACTERS:
            raise NoSource(f"its source is longer than {MOST_CHARACTERS} characters")
        try:
            whole = compile(text, "<source>", "exec", 0, dont_inherit=True)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise NoSource(f"its source cannot stand alone: {type(error).__name__}") from error
        made: dict[str, list[CodeType]] = {}
        for code in codes_in(whole):
            made.setdefault(code.co_name, []).append(code)
        for code in self._codes:
            if not any(have_same_names(one, code) for one in made.get(code.co_name, ())):
                raise NoSource(f"`{code.co_name}` compiles to other code where it stands alone")
        return text

    def add(self, name: str, value: Any, around: _Around | None = None) -> None:
        """Write a name with its value, unless it is there; NoSource where that cannot be done."""
        if name in self._names:
            if not _is_one(self._names[name], value):
                raise NoSource(f"`{name}` stands for two different objects")
            return
        if around is not None and (name in self._taken or _RESERVED.fullmatch(name)):
            raise NoSource(f"`{name}` is a name that its file has already")
        self._names[name] = value
        self._open.add(name)
        if not self._add_import(name, value, around):
            self._add_written(name, value, around)
        self._open.discard(name)

    def _add_import(self, name: str, value: Any, around: _Around | None) -> bool:
        """Whether another process gets the object by an import, which is added."""
        if isinstance(value, ModuleType):
            demand_module(value)
            alias = "" if value.__name__ == name else f" as {name}"
            self._imports.add(f"import {value.__name__}{alias}")
            return True
        home = home_of(value) or _imported_from(name, value, around)
        if home is None:
            return False
        module, path = home
        if is_installed(module.__name__):
            demand_member(module, path)
        elif not self._is_as_in_file(value):
            return False
        alias = "" if path == name else f" as {name}"
        self._imports.add(f"from {module.__name__} import {path}{alias}")
        return True

    def _is_as_in_file(self, value: Any) -> bool:
        """Whether a definition of a module of one's own is what its file says, with all it uses."""
        if id(value) not in self._verified:
            self._verified.add(id(value))
            other = _Writer(live={}, taken=(), verified=self._verified)
            try:
                other._add_written(value.__name__, value, None, is_imported=True)
            except NoSource:
                self._verified.discard(id(value))
                return False
        return True

    def _add_written(
        self, name: str, value: Any, around: _Around | None, *, is_imported: bool = False
    ) -> None:
        if isinstance(value, re.Pattern):
            pattern = cast(re.Pattern[Any], value)
            self._imports.add("from re import compile as _compile")
            self._bodies.append(f"{name} = _compile({pattern.pattern!r}, {int(pattern.flags)})")
        elif isinstance(value, FunctionType):
            self._add_function(name, value, is_imported=is_imported)
        elif isinstance(value, type):
            self._add_class(name, value, around, is_imported=is_imported)
        elif is_plain(value):
            refuse_secret_value(value, name)
            if around is not None:
                _demand_constant(name, value, around)
            self._bodies.append(f"{name} = {literal_text(value)}")
        else:
            raise NoSource(f"`{name}` is an object of {type(value).__name__}, which has no source")

    def _add_function(self, name: str, value: FunctionType, *, is_imported: bool) -> None:
        node = copy.deepcopy(definition_of(value.__code__))
        cells = _cells_of(value)
        known = {**value.__globals__, **cells}
        if id(value.__builtins__) != id(vars(builtins)):
            raise NoSource(f"`{name}` has built-ins of its own")
        if not isinstance(node, ast.Lambda):
            node.decorator_list = []
        inner = _demand_as_defined(name, value, node, known)
        _set_defaults(name, value, node, known)
        file = source_file(value.__code__.co_filename)
        around = _Around(
            name=name,
            node=node,
            known=known,
            home=value.__globals__,
            file=file,
            is_imported=is_imported,
        )
        text = self._text_of(name, value, node, cells, around)
        self._add_used(text, around)
        if inner is not None:
            wrapped = self._part("_wrapped", inner, around)
            self._imports.add("from functools import update_wrapper as _update_wrapper")
            text = f"{text}\n\n_update_wrapper({name}, {wrapped})"
        elif value.__name__ != value.__code__.co_name:
            text = f"{text}\n\n{name}.__name__ = {value.__name__!r}"
        self._codes.append(value.__code__)
        self._bodies.append(text)

    def _text_of(
        self,
        name: str,
        value: FunctionType,
        node: Definition,
        cells: Mapping[str, Any],
        around: _Around,
    ) -> str:
        """The definition of a function, inside of another one if it has values around it."""
        own = "" if isinstance(node, ast.Lambda) else node.name
        if not cells and own == name:
            return text_of(node)
        if not cells and not own:
            return text_of(
                ast.Assign([ast.Name(name, ast.Store())], cast(ast.expr, node), lineno=1)
            )
        given = {cell: kept for cell, kept in cells.items() if cell != own or kept is not value}
        state = changed_names(node)
        for cell, kept in given.items():
            if cell in state and type(kept) in _STATE:
                given[cell] = type(kept)()
            elif is_plain(kept):
                refuse_secret_value(kept, cell)
                _demand_constant(cell, kept, around)
            elif cell in around.file.changed:
                raise NoSource(f"`{cell}` is changed by other functions")
        parts = {cell: self._part(cell, kept, around) for cell, kept in given.items()}
        self._made += 1
        maker = f"_made_{self._made}"
        handed = ", ".join(f"{cell}={part}" for cell, part in parts.items())
        tree = ast.parse(f"def {maker}({', '.join(parts)}): return {own or 0}\n")
        body = cast(ast.FunctionDef, tree.body[0]).body
        if isinstance(node, ast.Lambda):
            cast(ast.Return, body[0]).value = node
        else:
            body.insert(0, node)
        return f"{text_of(tree)}\n\n{name} = {maker}({handed})"

    def _part(self, word: str, value: Any, around: _Around) -> str:
        """A name of its own for what a function has around it; the one it has, if it is written."""
        for name, one in self._names.items():
            if one is value and not isinstance(value, ATOMS):
                self._demand_written(name)
                return name
        name = word
        while name in around.known or name in self._names:
            self._made += 1
            name = f"{word}_{self._made}"
        self._parts.add(name)
        if isinstance(value, FunctionType | type | ModuleType | re.Pattern) or is_plain(value):
            self.add(name, value)
            return name
        raise NoSource(f"`{word}` is an object of {type(value).__name__}, which has no source")

    def _demand_written(self, name: str) -> None:
        if name in self._open:
            raise NoSource(f"`{name}` is needed before it is defined")

    def _add_used(self, text: str, around: _Around) -> None:
        """All that a definition refers to."""
        free, early, local = names_around(text)
        used = sorted(free - self._parts)
        seen = {one: around.known[one] for one in used if one in around.known}
        for module, member in demand_known_parts(around.name, around.node, seen):
            self._add_taken(module, member)
        changed = changed_names(around.node)
        for one in used:
            if one in changed & local and one in around.known:
                raise NoSource(f"`{one}` in `{around.name}` is a name around it and one of its own")
            if one in seen and seen[one] is not self._live.get(one, _Writer):
                self._add_name(one, seen[one], around, is_changed=one in changed)
                if one in early:
                    self._demand_written(one)
            elif one not in seen and one in vars(builtins):
                demand_builtin(one)
            elif one not in seen:
                raise NoSource(f"`{around.name}` uses `{one}`, which is not defined")

    def _add_name(self, name: str, value: Any, around: _Around, *, is_changed: bool) -> None:
        if re.fullmatch("__.*__", name):
            raise NoSource(f"`{around.name}` uses `{name}`, which is of its module")
        if not is_changed:
            if is_plain(value):
                _demand_constant(name, value, around)
            self.add(name, value, around)
        elif type(value) not in _STATE:
            raise NoSource(f"`{around.name}` changes `{name}`, which has no source")
        elif name not in self._names:
            self._names[name] = value
            self._bodies.append(f"{name} = {type(value)()!r}")

    def _add_taken(self, module: str, member: str) -> None:
        """What a definition takes from a module: it must be loaded, and what its file says."""
        if not member:
            alias = f"_loaded_{module.replace('.', '_')}"
            self._imports.add(f"import {module} as {alias}")
        elif not is_installed(module):
            value = vars(sys.modules[module]).get(member)
            home = home_of(value)
            is_one = home is not None and home[0].__name__ == module and home[1] == member
            if not is_one or not self._is_as_in_file(value):
                raise NoSource(f"`{module}.{member}` is not known to be what its file says")

    def _add_class(
        self, name: str, value: type, user: _Around | None, *, is_imported: bool
    ) -> None:
        home = None if user is None else (user.home, user.file)
        node, known, file, codes = class_definition(name, value, home)
        around = _Around(
            name=name, node=node, known=known, home=known, file=file, is_imported=is_imported
        )
        text = text_of(node)
        if node.name != name:
            raise NoSource(f"the class `{node.name}` has another name here")
        self._add_used(text, around)
        self._codes += codes
        self._bodies.append(text)


def _future() -> int:
    return __future__.annotations.compiler_flag


def _is_one(one: Any, other: Any) -> bool:
    return one is other or (is_plain(one) and is_plain(other) and repr(one) == repr(other))


def _imported_from(name: str, value: Any, around: _Around | None) -> tuple[ModuleType, str] | None:
    """The installed module and name that the file of a definition imports a name from."""
    bound = around.file.bindings.get(name, []) if around is not None else []
    if len(bound) != 1 or not isinstance(bound[0], ast.ImportFrom) or bound[0].level:
        return None
    module = sys.modules.get(bound[0].module or "")
    names = [one.name for one in bound[0].names if (one.asname or one.name) == name]
    if module is None or not is_installed(module.__name__) or isinstance(value, FunctionType):
        return None
    return (module, names[0]) if vars(module).get(names[0]) is value else None


def _cells_of(value: FunctionType) -> dict[str, Any]:
    """Values of functions around a function, which none of them changes."""
    names = value.__code__.co_freevars
    try:
        return {
            name: cell.cell_contents
            for name, cell in zip(names, value.__closure__ or (), strict=True)
        }
    except ValueError as error:  # a cell that is still empty
        raise NoSource(f"`{value.__name__}` uses a name that has no value yet") from error


def _demand_as_defined(
    name: str, value: FunctionType, node: Definition, known: Mapping[str, Any]
) -> FunctionType | None:
    """NoSource for a function that was changed after its definition; what it is a wrapper of."""
    code = value.__code__
    state = changed_names(node) & {*code.co_freevars}
    if any(isinstance(one, ast.Nonlocal) and state & {*one.names} for one in ast.walk(node)):
        raise NoSource(f"`{name}` changes a variable of the function around it")
    kept = vars(value)
    inner = kept.get(_WRAPPED)
    if inner is not None and set(kept) == {_WRAPPED}:
        used = [known.get(one) for one in (*code.co_freevars, *code.co_names)]
        if isinstance(inner, FunctionType) and any(one is inner for one in used):
            _demand_same_documents(name, value, inner.__doc__, inner.__annotations__)
            if value.__name__ == inner.__name__:
                return inner
        raise NoSource(f"`{name}` is wrapped by what its source does not name")
    if kept:
        raise NoSource(f"`{name}` has attributes, which its source does not show")
    doc = None if isinstance(node, ast.Lambda) else ast.get_docstring(node, clean=False)
    written = {one.arg: one.annotation for one in parameters(node.args) if one.annotation}
    if not isinstance(node, ast.Lambda) and node.returns is not None:
        written["return"] = node.returns
    notes = value.__annotations__
    are_same = {*written} == {*notes} and all(
        not isinstance(note, ast.Name)
        or notes[one] in (note.id, known.get(note.id, vars(builtins).get(note.id)))
        for one, note in written.items()
    )
    _demand_same_documents(name, value, doc, notes if are_same else None)
    return None


def _demand_same_documents(name: str, value: FunctionType, doc: str | None, notes: Any) -> None:
    is_documented = inspect.cleandoc(value.__doc__ or "") == inspect.cleandoc(doc or "")
    if not is_documented or value.__annotations__ != notes:
        raise NoSource(f"`{name}` has attributes, which its source does not show")


def _set_defaults(
    name: str, value: FunctionType, node: Definition, known: Mapping[str, Any]
) -> None:
    """Write defaults as they were when the function was defined.

    `w=w` in a loop is another number for each function, and `w` is the last one now.
    """
    given = node.args
    own, named = value.__defaults__ or (), value.__kwdefaults__ or {}
    written = [
        one.arg for one, node in zip(given.kwonlyargs, given.kw_defaults, strict=True) if node
    ]
    if len(own) != len(given.defaults) or sorted(written) != sorted(named):
        raise NoSource(f"the defaults of `{name}` are not those of its source")
    arguments = [one.arg for one in (*given.posonlyargs, *given.args)][-len(own) :]
    rows = zip(arguments, given.defaults, own, strict=False)  # none of them without defaults
    given.defaults = [_default(name, *row, known) for row in rows]
    given.kw_defaults = [
        node if node is None else _default(name, one.arg, node, named.get(one.arg), known)
        for one, node in zip(given.kwonlyargs, given.kw_defaults, strict=True)
    ]


def _default(
    name: str, argument: str, node: ast.expr, value: Any, known: Mapping[str, Any]
) -> ast.expr:
    """A default as it is written, if that is what it is now; else its value as a literal."""
    is_named = isinstance(node, ast.Name) and known.get(node.id, node) is value
    if is_plain(value):
        written = ast.parse(literal_text(value), mode="eval").body
        if ast.unparse(written) == ast.unparse(node) or (is_named and not is_fixed(value)):
            return node
        refuse_secret_value(value, argument, *words_in(node))
        if not is_fixed(value):
            raise NoSource(f"the default `{ast.unparse(node)}` of `{name}` may have been changed")
        return written
    if not is_named:
        raise NoSource(f"the default `{ast.unparse(node)}` of `{name}` has no source")
    return node


def _demand_constant(name: str, value: Any, around: _Around) -> None:
    """NoSource for plain data that other code changes, or that a module does not get by itself."""
    if name in around.file.changed:
        raise NoSource(f"`{name}` is changed by other functions")
    bound = around.file.bindings.get(name, [])
    if len(bound) == 1 and literal_of(written_value(bound[0], name)) == repr(value):
        return
    if around.is_imported:
        raise NoSource(f"`{name}` is no constant of its file")
    if not is_fixed(value):
        items = cast(Any, value.values() if isinstance(value, dict) else value)
        is_flat = all(is_fixed(one) for one in items)
        if not is_only_read(name, around.node, is_flat):
            raise NoSource(f"`{name}` may be changed, and is no constant of its file")
