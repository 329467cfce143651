"""Fingerprints of files: equal content gives equal words, whatever a file is called or where it is.

A file is hashed whole up to `WHOLE` bytes. Of a larger one, which can only be weights or rows, the
size and `BLOCKS` blocks at equal distances are hashed: other weights are found, one flipped bit in
them need not be. The word before the colon says which it was.
"""

import hashlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

WHOLE = 64 * 2**20
BLOCKS, BLOCK = 16, 256 * 2**10
MISSING = "missing"
"""Stands for a file that is not there or cannot be read."""


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
    """One hash over every source file of a package: changes that are not committed count too."""
    hasher = hashlib.sha256()
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".py", ".yaml")):
        hasher.update(f"{path.relative_to(package).as_posix()}\n".encode())
        hasher.update(hashlib.sha256(path.read_bytes()).digest())
    return f"sha256:{hasher.hexdigest()}"
