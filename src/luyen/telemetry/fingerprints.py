"""Fingerprints of files, and the source files that a user's code depends on.

A file is hashed whole up to `WHOLE` bytes. Of a larger one, which can only be weights or rows, the
size and `BLOCKS` blocks at equal distances are hashed: this detects different weights, but not
every flipped bit. The word before the colon says which of the two it was.
"""

import ast
import hashlib
import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

import luyen

WHOLE = 64 * 2**20
BLOCKS, BLOCK = 16, 256 * 2**10
MISSING = "missing"
"""Fingerprint of a file that does not exist or cannot be read."""


def fingerprint(path: Path) -> str:
    """`sha256:...` of the whole file, `sampled:...` of a large one, or `missing`.

    Example:
        >>> fingerprint(Path("/nowhere"))
        'missing'
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size <= WHOLE:
                return f"sha256:{hashlib.file_digest(file, 'sha256').hexdigest()}"
            return f"sampled:{_sampled(file, size)}"
    except OSError:
        return MISSING


def _sampled(file: BinaryIO, size: int) -> str:
    hasher = hashlib.sha256(str(size).encode())
    for number in range(BLOCKS):
        file.seek((size - BLOCK) * number // (BLOCKS - 1))
        hasher.update(file.read(BLOCK))
    return hasher.hexdigest()


def fingerprint_together(paths: Sequence[Path]) -> str:
    """One fingerprint of several files, by their names and content; `sampled` when one of them is.

    Example:
        >>> fingerprint_together([])
        'missing'
    """
    parts = [(path.name, fingerprint(path)) for path in sorted(paths, key=lambda p: p.name)]
    if len(parts) == 1:
        return parts[0][1]
    if not parts or all(found == MISSING for _, found in parts):
        return MISSING
    kind = "sampled" if any(found.startswith("sampled:") for _, found in parts) else "sha256"
    return f"{kind}:{hashlib.sha256(repr(parts).encode()).hexdigest()}"


def source_fingerprint(package: Path) -> str:
    """One hash over every source file of a package, uncommitted changes included."""
    hasher = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".yaml")):
        hasher.update(f"{path.relative_to(package).as_posix()}\n".encode())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{hasher.hexdigest()}"


# Source files that user code depends on, found by parsing its imports; nothing is imported.

OURS = Path(luyen.__file__).resolve().parent
_LIBRARIES = tuple(
    Path(sysconfig.get_path(name)).resolve()
    for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def source_files(start: Path, *, package: Path | None = None) -> set[Path]:
    """A file, the files of its package, and all user files that they import, recursively.

    Imports inside functions count too. Installed packages are left out, unless they are `start`
    itself or lie in `package`.

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
    """The files behind the imports of a file; none where it cannot be parsed."""
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
