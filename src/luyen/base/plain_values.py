"""Plain data in the source text of objects: what has a text, what cannot change, what is secret."""

import ast
import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from luyen.base.secrets import is_from_environment, masked_tree
from luyen.base.source_files import NoSource

ATOMS = (bool, int, float, str, bytes, type(None))
"""Types of single values that cannot change."""


def written_value(part: ast.stmt, name: str) -> ast.expr | None:
    """The expression whose value a statement gives a name."""
    match part:
        case ast.Assign(targets=[ast.Name()], value=value) | ast.AnnAssign(value=value):
            return value
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            if len(names) == len(values):
                pairs = zip(names, values, strict=True)
                return next((v for n, v in pairs if isinstance(n, ast.Name) and n.id == name), None)
            return None
        case _:
            return None


def literal_of(node: ast.expr | None) -> str | None:
    """The value of a literal, as text; None for any other expression."""
    try:
        return None if node is None else repr(ast.literal_eval(node))
    except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
        return None


def words_in(node: ast.expr) -> Iterator[str]:
    """Names in an expression: variables, attributes and texts such as keys of a mapping."""
    for part in ast.walk(node):
        match part:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.Constant(value=str(word)):
                yield word
            case _:
                pass


def refuse_secret_value(value: Any, *names: str) -> None:
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


def literal_text(value: Any) -> str:
    """A literal as source text; NaN and infinities have none of their own."""
    is_odd = isinstance(value, float) and not math.isfinite(value)
    return f"float({str(value)!r})" if is_odd else repr(value)


def is_fixed(value: Any) -> bool:
    """Whether plain data cannot change."""
    if type(value) in (tuple, frozenset):
        return all(is_fixed(one) for one in cast(tuple[Any, ...], value))
    return type(value) in ATOMS


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is made of exact built-in types, so that its text says all of it."""
    if depth > 50 or (depth and isinstance(value, float) and not math.isfinite(value)):
        return False
    if isinstance(value, int):
        return type(value) in ATOMS and abs(value) < 10**4000
    if type(value) is dict:
        pairs = cast(dict[Any, Any], value).items()
        return all(is_plain(one, depth + 1) for pair in pairs for one in pair)
    if depth and type(value) in (frozenset, set) and (type(value) is frozenset or value == set()):
        return False
    if type(value) in (list, tuple, set, frozenset):
        return all(is_plain(one, depth + 1) for one in cast(Collection[Any], value))
    return type(value) in ATOMS
