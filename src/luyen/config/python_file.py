"""Python files that a configuration names, read as syntax trees and never run.

What a file does when it is imported cannot be seen here: it may raise, or define names by other
means. That a file is there, and is Python, can.
"""

import ast
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.paths import expanded
from luyen.base.reading import read_text


def _is_importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def read_python(path: Path) -> ast.Module:
    """The syntax tree of a file; an OSError says why there is none.

    Example:
        >>> read_python(Path("no/such/file.py"))
        Traceback (most recent call last):
        OSError: cannot be read: [Errno 2] No such file or directory: 'no/such/file.py'
    """
    try:
        text = read_text(path)
    except OSError as error:
        raise OSError(f"cannot be read: {error}") from error
    try:
        return ast.parse(text)
    except SyntaxError as error:
        raise OSError(f"is not valid Python: line {error.lineno}: {error.msg}") from error
    except (ValueError, RecursionError, MemoryError) as error:  # a NUL, or nested too deep
        why = str(error) or "it is nested too deep"
        raise OSError(f"is not valid Python: {why}") from error


def import_fault(tree: ast.Module, installed: Callable[[str], bool] = _is_importable) -> str | None:
    """Why importing a file certainly fails; None: nothing that always runs shows it.

    Example:
        >>> import_fault(ast.parse("import no_such_package"))
        'line 1 imports no_such_package, which is not installed here'
    """
    for node in tree.body:
        match node:
            case ast.Raise():
                return f"line {node.lineno} raises whenever the file is imported"
            case ast.Import(names=names):
                modules = [alias.name for alias in names]
            case ast.ImportFrom(module=str(module), level=0):
                modules = [module]
            case _:
                modules = []
        for module in modules:
            root = module.partition(".")[0]
            if not installed(root):
                return f"line {node.lineno} imports {root}, which is not installed here"
    return None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Arguments:
    """What a function can be called with.

    Example:
        >>> Arguments(names=("a",), has_more=False).takes("b")
        False
    """

    names: tuple[str, ...]
    """Arguments that have a name."""
    has_more: bool
    """Whether it takes any others by name."""

    def takes(self, name: str) -> bool:
        """Whether an argument of this name can be given."""
        return self.has_more or name in self.names


def arguments_of(path: str, function: str) -> Arguments | None:
    """The arguments of a function at the top of a file; None where there is none to be found."""
    try:
        body = read_python(expanded(path)).body
    except OSError:
        return None
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == function:
            named = (*node.args.args, *node.args.kwonlyargs)
            names = tuple(argument.arg for argument in named)
            return Arguments(names=names, has_more=node.args.kwarg is not None)
    return None
