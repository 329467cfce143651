"""Secrets in Python source text, which a name, a shape or the environment shows."""

import ast
import io
import os
import re
import tokenize
from collections.abc import Iterator
from itertools import pairwise

from luyen.base.secrets import (
    ALL_BELOW,
    KEY_SHAPES,
    LEAST_LENGTH,
    SECRET_WORDS,
    is_secret_name,
    masked_known,
    masked_urls,
)

_SAID = re.compile(
    rf"(?<![\w.-])[\w.-]*?(?:{SECRET_WORDS})[\"']?\s*[=:]\s*"
    r"(?:[\"'][^\"']{6,}[\"']|(?=[^\s,;)]*[0-9])(?=[^\s,;)]*[A-Za-z])[^\s,;)]{8,})",
    re.IGNORECASE,
)
"""A name and what looks like its value, in text for people."""


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
