"""The repository as the architecture tests see it: files, their text, their syntax trees."""

import ast
import importlib
import importlib.util
import pkgutil
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import luyen

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "src/luyen"


def sources(*folders: str) -> Iterator[tuple[str, str]]:
    """(path from the root, text) of every Python file below the folders; all of src by default."""
    for folder in folders or (PACKAGE,):
        yield from _read(folder)


@cache
def _read(folder: str) -> tuple[tuple[str, str], ...]:
    """The files of a folder, read once for all tests."""
    files = sorted((ROOT / folder).rglob("*.py"))
    return tuple((path.relative_to(ROOT).as_posix(), path.read_text()) for path in files)


@cache
def parsed(text: str) -> ast.Module:
    """The syntax tree of a file, which several tests look at and none changes."""
    return ast.parse(text)


@cache
def nodes(text: str) -> tuple[ast.AST, ...]:
    """Every node of a file's syntax tree, walked once for all tests."""
    return tuple(ast.walk(parsed(text)))


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """The node and every one below it that is no part of an expression: a fifth of them all."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.expr):
            yield from statements(node)


def functions(tree: ast.AST, above: str = "") -> Iterator[tuple[str, ast.AST]]:
    """(dotted name, node) of every function, methods and nested functions included."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # holds no function but a lambda
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{above}{node.name}"
            if not isinstance(node, ast.ClassDef):
                yield name, node
            yield from functions(node, f"{name}.")
        else:
            yield from functions(node, above)


def imported(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, full dotted name) of every import, those inside functions included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


@cache
def modules() -> tuple[ModuleType, ...]:
    """Every module of the package, imported; kernels only where their compiler is installed."""
    has_triton = importlib.util.find_spec("triton") is not None
    names = [found.name for found in pkgutil.walk_packages(luyen.__path__, "luyen.")]
    wanted = [name for name in names if has_triton or not name.startswith("luyen.models.cuda.")]
    return luyen, *map(importlib.import_module, wanted)
