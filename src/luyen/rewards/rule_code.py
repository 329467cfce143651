"""What stands for the code of a rule: every source file that its score can depend on."""

import ast
import inspect
import sys
import sysconfig
from collections.abc import Callable, Iterator
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import luyen

_OURS = Path(luyen.__file__).resolve().parent
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def code_of(rule: Callable[..., Any]) -> list[str] | None:
    """Our version, a hash of our rewards and, for a rule of yours, one of each of its files.

    Its files are its own, those of its package, and those that they import, however deep and
    wherever the import stands. What is installed beside them counts as unchanging. None where the
    rule has no source file.
    """
    file = inspect.getsourcefile(rule)
    if file is None:
        return None
    start = Path(file).resolve()
    found = [luyen.__version__, _rewards_hash()]
    if start.is_relative_to(_OURS):
        return found
    files = _files(start, _package_of(rule))
    return found + sorted(f"{f.name}: {sha256(f.read_bytes()).hexdigest()}" for f in files)


@cache
def _rewards_hash() -> str:
    """One hash of everything in this package; it cannot change under a running process."""
    whole = sha256()
    for path in sorted((_OURS / "rewards").rglob("*.py")):
        whole.update(sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _package_of(rule: Callable[..., Any]) -> Path | None:
    """The folder of the outermost package that a rule is defined in."""
    outermost = vars(sys.modules[rule.__module__.partition(".")[0]])
    file = outermost.get("__file__")
    return Path(file).resolve().parent if file and "__path__" in outermost else None


def _files(start: Path, package: Path | None) -> set[Path]:
    """A file with its package and what they import, as far as it is the user's."""
    found: set[Path] = set()
    waiting = [start, *(package.rglob("*.py") if package is not None else ())]
    while waiting:
        path = waiting.pop().resolve()
        is_own = path == start or (package is not None and path.is_relative_to(package))
        is_library = path.is_relative_to(_OURS) or any(map(path.is_relative_to, _LIBRARIES))
        if path not in found and (is_own or not is_library):
            found.add(path)
            waiting += _imported(path)
    return found


def _imported(path: Path) -> Iterator[Path]:
    """The source files behind the imports of a file, without importing anything."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _located(alias.name, [path.parent, *map(Path, sys.path)])
        elif isinstance(node, ast.ImportFrom):
            above = f"{node.module}." if node.module else ""
            near = path.parents[node.level - 1 :][:1]
            roots = near if node.level else [path.parent, *map(Path, sys.path)]
            for alias in node.names:
                yield from _located(f"{above}{alias.name}", list(roots))


def _located(name: str, roots: list[Path]) -> Iterator[Path]:
    """The file of each module on the way to a dotted name, in the first root that has it."""
    steps = name.split(".")
    for end in range(1, len(steps) + 1):
        for root in roots:
            place = root.joinpath(*steps[:end])
            here = [p for p in (place.with_suffix(".py"), place / "__init__.py") if p.is_file()]
            if here:
                yield here[0]
                break
