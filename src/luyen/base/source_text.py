"""Python source text: whether an object was compiled from it, and whether it holds a secret.

Files change after they were imported, and objects are patched. A text that is kept in the place of
an object must be what the object is made of, so both are compared as compiled code.
"""

import __future__

import ast
import copy
import inspect
import io
import linecache
import os
import re
import symtable
import tokenize
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from types import CodeType, FunctionType, ModuleType
from typing import Any, TypeAlias, cast

from luyen.base.secrets import (
    ALL_BELOW,
    KEY_SHAPES,
    LEAST_LENGTH,
    SECRET_WORDS,
    is_secret_name,
    masked_known,
    masked_urls,
)

Definition: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_ABSENT = object()
"""A member that a class does not have, or no longer."""
_LITERALS = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict, set, frozenset)
_SAID = re.compile(
    rf"(?<![\w.-])[\w.-]*?(?:{SECRET_WORDS})[\"']?\s*[=:]\s*"
    r"(?:[\"'][^\"']{6,}[\"']|(?=[^\s,;)]*[0-9])(?=[^\s,;)]*[A-Za-z])[^\s,;)]{8,})",
    re.IGNORECASE,
)
"""A name and what looks like its value, in text for people."""


def is_source_of(value: FunctionType | type, node: Definition) -> bool:
    """Whether a function, or a class with its methods and values, is what a definition says."""
    if isinstance(value, FunctionType):
        inner = inspect.unwrap(cast(Callable[..., Any], value))
        return isinstance(inner, FunctionType) and has_code(node, inner.__code__)
    written = {target: part for part in node.body for target in _targets(part)}
    own = {name for name in vars(value) if not name.startswith("_")}
    now = {name: vars(value).get(_mangled(name, node.name), _ABSENT) for name in written}
    return own <= {*written} and all(
        _is_as_written(now[name], part, node.name) for name, part in written.items()
    )


def _targets(part: ast.stmt) -> list[str]:
    """Names that a statement of a class defines."""
    match part:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
            return [name]
        case ast.Assign(targets=targets):
            found = [name for target in targets for name in ast.walk(target)]
            return [name.id for name in found if isinstance(name, ast.Name)]
        case ast.AnnAssign(target=ast.Name(id=name)):
            return [name]
        case _:
            return []


def _mangled(name: str, of: str) -> str:
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{of.lstrip('_')}{name}" if is_private else name


def _is_as_written(value: Any, part: ast.stmt, of: str) -> bool:
    """Whether a member of a class is what its statement says; decorators may have made another."""
    if value is _ABSENT:  # `x: int`, or a field of a dataclass
        return isinstance(part, ast.AnnAssign)
    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
        inner: Any = value.fget if isinstance(value, property) else value
        is_bare = not isinstance(inner, staticmethod | classmethod)
        inner = inner if is_bare else cast(Any, inner).__func__
        if isinstance(inner, FunctionType):
            whole: Any = inspect.unwrap(cast(Callable[..., Any], inner))
            return isinstance(whole, FunctionType) and has_code(part, whole.__code__, of=of)
        return bool(part.decorator_list)
    if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None:
        if type(value) not in _LITERALS:
            return True
        is_constant = not any(isinstance(n, ast.Name | ast.Call) for n in ast.walk(part.value))
        is_one = isinstance(part, ast.AnnAssign) or isinstance(part.targets[0], ast.Name)
        return is_constant and is_one and repr(value) == repr(_evaluated(part.value))
    return True


def _evaluated(node: ast.expr) -> Any:
    """What an expression of constants gives."""
    return eval(compile(ast.Expression(body=node), "<source>", "eval"), {"__builtins__": {}})


def are_decorators_of(value: FunctionType, node: Definition, known: Mapping[str, Any]) -> bool:
    """Whether the wrappers around a function are those that its decorators make, outermost first.

    Each decorator is a function that has the code of its wrapper inside; what it is called with is
    written there.
    """
    wrapper = value
    for decorator in node.decorator_list:
        called = decorator.func if isinstance(decorator, ast.Call) else decorator
        given = decorator.args if isinstance(decorator, ast.Call) else []
        named = [one.value for one in decorator.keywords] if isinstance(decorator, ast.Call) else []
        maker = value_of(called, known)
        if not all(isinstance(one, ast.Constant) for one in (*given, *named)):
            return False
        if not isinstance(maker, FunctionType):
            return False
        below = _below(wrapper)
        if below is None or not _makes(maker.__code__, wrapper.__code__):
            return False
        wrapper = below
    return _below(wrapper) is None


def _below(wrapper: FunctionType) -> FunctionType | None:
    found: object = vars(wrapper).get("__wrapped__")
    return found if isinstance(found, FunctionType) else None


def value_of(node: ast.expr, known: Mapping[str, Any]) -> Any:
    """What a name, or an attribute of a module or class, is now; else the node, which is none."""
    match node:
        case ast.Name(id=name):
            return known.get(name, node)
        case ast.Attribute(value=ast.Name(id=name), attr=attribute):
            home = known.get(name)
            return (
                node if not isinstance(home, ModuleType | type) else vars(home).get(attribute, node)
            )
        case _:
            return node


def _makes(maker: CodeType, made: CodeType) -> bool:
    inner = [one for one in maker.co_consts if isinstance(one, CodeType)]
    return any(one is made or _makes(one, made) for one in inner)


def has_code(node: ast.stmt, code: CodeType, of: str | None = None) -> bool:
    """Whether a definition, inside a class `of` that name, compiles to this code."""
    node = copy.deepcopy(node)  # with its lines, which the compiler looks at
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        node.decorator_list = []
    name = of or code.co_name
    inside = [node] if of is None else ast.parse(f"class {of}: pass").body
    if isinstance(inside[0], ast.ClassDef):
        inside[0].body = [node]
    # Calls through names that the module imports are compiled in another way.
    head = "".join(f"import {name}\n" for name in _imported_names(code.co_filename))
    around = ast.parse(f"{head}def around({', '.join(code.co_freevars)}): pass")
    is_global = name.isidentifier() and name not in code.co_freevars  # it may call itself
    first = ast.parse(f"global {name}").body if is_global else []
    cast(ast.FunctionDef, around.body[-1]).body = [*first, *cast(list[ast.stmt], inside)]
    flags = code.co_flags & __future__.annotations.compiler_flag
    try:
        made = compile(ast.fix_missing_locations(around), "<source>", "exec", flags, True)
    except (SyntaxError, ValueError):
        return False
    waiting = [made]
    while waiting:
        inner = [c for c in waiting.pop().co_consts if isinstance(c, CodeType)]
        if any(one.co_name == code.co_name and _are_same(one, code) for one in inner):
            return True
        waiting += inner
    return False


def _imported_names(file: str) -> list[str]:
    """Names that the module in a file imports."""
    try:
        top = symtable.symtable("".join(linecache.getlines(file)), file, "exec")
    except (SyntaxError, ValueError):
        return []
    return [symbol.get_name() for symbol in top.get_symbols() if symbol.is_imported()]


def _are_same(one: CodeType, other: CodeType) -> bool:
    """Whether two code objects compute the same, wherever they were written."""
    facts = [
        (c.co_code, c.co_names, c.co_varnames, c.co_freevars, c.co_cellvars, c.co_argcount)
        for c in (one, other)
    ]
    if facts[0] != facts[1] or len(one.co_consts) != len(other.co_consts):
        return False
    for number, (mine, yours) in enumerate(zip(one.co_consts, other.co_consts, strict=True)):
        if isinstance(mine, CodeType) and isinstance(yours, CodeType):
            is_same = _are_same(mine, yours)
        elif isinstance(mine, frozenset):
            is_same = bool(mine == yours)
        elif number == 0 and isinstance(mine, str) and isinstance(yours, str):  # it may be the doc
            is_same = inspect.cleandoc(mine) == inspect.cleandoc(yours)
        else:
            is_same = type(mine) is type(yours) and repr(mine) == repr(yours)
        if not is_same:
            return False
    return True


# Secrets.


def secret_in_source(text: str) -> str | None:
    """Where a Python source text holds a secret; None: no place that a name or a shape shows.

    Text under a name that says nothing, and of no known shape, is found only if a variable of the
    environment with a secret name has it.

    Example:
        >>> secret_in_source("def f(x, api_key='abcdef'): return x")
        '`api_key`'
        >>> secret_in_source("api_key = os.environ['API_KEY']")
    """
    values = {v for n, v in os.environ.items() if is_secret_name(n) and len(v) >= LEAST_LENGTH}
    if any(value in text for value in values) or masked_known(text) != text:
        return "a value of the environment or of the configuration"
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in ast.walk(tree):
        for name, value in _named_values(node):
            if is_secret_name(name) and _has_text(value):
                return f"`{name}`"
        if isinstance(node, ast.Constant) and isinstance(node.value, str | bytes):
            piece = node.value if isinstance(node.value, str) else node.value.decode("latin-1")
            if _looks_secret(piece):
                return f"a text in line {node.lineno}"
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and _looks_secret(token.string):
            return f"the comment in line {token.start[0]}"
    return None


def _looks_secret(text: str) -> bool:
    is_shaped = KEY_SHAPES.search(text) is not None or masked_urls(text) != text
    return is_shaped or any("${" not in found[0] for found in _SAID.finditer(text))


def _named_values(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Values that a piece of source gives a name, with the name."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _assigned_values(target, value)
        case ast.AnnAssign(target=target, value=value) | ast.NamedExpr(target=target, value=value):
            if value is not None:
                yield from _assigned_values(target, value)
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.arguments():
            plain = [*node.posonlyargs, *node.args]
            pairs = [*zip(reversed(plain), reversed(node.defaults), strict=False)]
            pairs += [(a, d) for a, d in zip(node.kwonlyargs, node.kw_defaults, strict=True) if d]
            yield from ((argument.arg, default) for argument, default in pairs)
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant):
                    is_block = key.value in ALL_BELOW and isinstance(value, ast.Dict)
                    below = value.values if is_block and isinstance(value, ast.Dict) else [value]
                    yield from (("secret" if is_block else str(key.value), one) for one in below)
        case ast.Tuple(elts=values) | ast.Call(args=values):
            for one, value in pairwise(values):
                if isinstance(one, ast.Constant) and isinstance(one.value, str):
                    yield one.value, value
        case ast.AugAssign(target=target, value=value):
            yield from _assigned_values(target, value)
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            returned = (one.value for one in ast.walk(node) if isinstance(one, ast.Return))
            yield from ((name, value) for value in returned if value is not None)
        case _:
            pass


def _assigned_values(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    match target, value:
        case ast.Name(id=name) | ast.Attribute(attr=name), _:
            yield name, value
        case ast.Subscript(slice=ast.Constant(value=str(name))), _:
            yield name, value
        case ast.Tuple(elts=names), ast.Tuple(elts=values) if len(names) == len(values):
            for one, inner in zip(names, values, strict=True):
                yield from _assigned_values(one, inner)
        case _:
            pass


def _has_text(value: ast.expr) -> bool:
    """Whether a value is made of text that is written there, and not of calls and names."""
    match value:
        case ast.Constant(value=str() | bytes() as text):
            return len(text) >= LEAST_LENGTH and "${" not in str(text)
        case ast.Lambda(body=body):
            return _has_text(body)
        case ast.IfExp(body=one, orelse=other):
            return _has_text(one) or _has_text(other)
        case ast.Call(func=ast.Name(id="str" | "bytes"), args=values):
            return any(_has_text(one) for one in values)
        case ast.Call(func=ast.Attribute(value=whole, attr=method), args=values):
            is_given = method == "join" and any(_has_text(one) for one in values)
            return is_given or _has_text(whole) or any(_has_text(one) for one in values[1:])
        case ast.BinOp() | ast.BoolOp() | ast.JoinedStr() | ast.Tuple() | ast.List() | ast.Set():
            inner = ast.iter_child_nodes(value)
            return any(_has_text(one) for one in inner if isinstance(one, ast.expr))
        case ast.Dict(values=values):
            return any(_has_text(one) for one in values)
        case ast.Subscript(value=whole):
            return _has_text(whole)
        case _:
            return False
