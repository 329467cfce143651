"""The source files that code of a user depends on, found by its imports and without importing."""

import ast
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

import luyen

OURS = Path(luyen.__file__).resolve().parent
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def source_files(start: Path, *, package: Path | None = None) -> set[Path]:
    """A file, the files of its package, and all that they import, as far as it is the user's.

    Imports are followed however deep and wherever they stand. What is installed counts as
    unchanging and is left out, unless it is `start` itself or lies in `package`.

    Example:
        >>> [path.name for path in source_files(Path(ast.__file__))]
        ['ast.py']
    """
    start = start.resolve()
    found: set[Path] = set()
    waiting = [start, *(package.rglob("*.py") if package is not None else ())]
    while waiting:
        path = waiting.pop().resolve()
        is_own = path == start or (package is not None and path.is_relative_to(package))
        is_library = path.is_relative_to(OURS) or any(map(path.is_relative_to, _LIBRARIES))
        if path not in found and (is_own or not is_library):
            found.add(path)
            waiting += _imported(path)
    return found


def _imported(path: Path) -> Iterator[Path]:
    """The files behind the imports of a file; none where it is no Python, which running it says."""
    try:
        tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    anywhere = [path.parent, *map(Path, sys.path)]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _located(alias.name, anywhere)
        elif isinstance(node, ast.ImportFrom):
            above = f"{node.module}." if node.module else ""
            roots = path.parents[node.level - 1 :][:1] if node.level else anywhere
            for alias in node.names:
                yield from _located(f"{above}{alias.name}", roots)


def _located(name: str, roots: Iterable[Path]) -> Iterator[Path]:
    """The file of each module on the way to a dotted name, in the first root that has it."""
    steps = name.split(".")
    for end in range(1, len(steps) + 1):
        for root in roots:
            place = root.joinpath(*steps[:end])
            here = [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()]
            if here:
                yield here[0]
                break
