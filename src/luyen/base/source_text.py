"""Python source text: whether an object was compiled from it, and whether it holds a secret.

Files change after they were imported, and objects are patched. A text that is kept in the place of
an object must be what the object is made of, so both are compared as compiled code.
"""

import __future__

import ast
import inspect
import io
import linecache
import os
import re
import symtable
import tokenize
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
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
_PLAIN = (bool, int, float, str, bytes, type(None))
_SAID = re.compile(
    rf"(?<![\w.-])[\w.-]*?(?:{SECRET_WORDS})[\"']?\s*[=:]\s*"
    r"(?:[\"'][^\"']{6,}[\"']|(?=[^\s,;)]*[0-9])(?=[^\s,;)]*[A-Za-z])[^\s,;)]{8,})",
    re.IGNORECASE,
)
"""A name and what looks like its value, in text for people."""


def is_source_of(value: FunctionType | type, node: Definition) -> bool:
    """Whether a function, or a class with its methods, is what a definition says."""
    if isinstance(value, FunctionType):
        inner = inspect.unwrap(cast(Callable[..., Any], value))
        return isinstance(inner, FunctionType) and has_code(node, inner.__code__)
    for part in node.body:
        match part:
            case ast.FunctionDef(name=own) | ast.AsyncFunctionDef(name=own):
                method: Any = vars(value).get(own)
                if isinstance(method, staticmethod | classmethod):
                    method = vars(method)["__wrapped__"]
                is_plain = isinstance(method, FunctionType) and not vars(method)
                if is_plain and not has_code(part, method.__code__, of=node.name):
                    return False
                if not is_plain and not part.decorator_list:
                    return False
            case ast.Assign(targets=[ast.Name(id=own)], value=ast.Constant(value=written)):
                now = vars(value).get(own)
                if type(now) in _PLAIN and repr(now) != repr(written):
                    return False
            case _:
                pass
    return True


def has_code(node: ast.stmt, code: CodeType, of: str | None = None) -> bool:
    """Whether a definition, inside a class `of` that name, compiles to this code."""
    node = ast.parse(ast.unparse(node)).body[0]
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
        >>> secret_in_source("def f(x, api_key='abc'): return x")
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
        case ast.Tuple(elts=[ast.Constant(value=str(name)), value]):
            yield name, value
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
            return bool(text) and "${" not in str(text)
        case ast.BinOp() | ast.BoolOp() | ast.JoinedStr() | ast.Tuple() | ast.List() | ast.Set():
            inner = ast.iter_child_nodes(value)
            return any(_has_text(one) for one in inner if isinstance(one, ast.expr))
        case ast.Dict(values=values):
            return any(_has_text(one) for one in values)
        case ast.Subscript(value=whole):
            return _has_text(whole)
        case _:
            return False
