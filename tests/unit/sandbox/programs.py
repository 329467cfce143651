"""Programs for these tests, and the processes they may leave."""

import asyncio
import os
from pathlib import Path

from luyen.sandbox.launch import Limits
from luyen.sandbox.python import ProgramResult, run_python


def run(
    code: str, *, stdin: str = "", files: dict[str, str | bytes] | None = None, **limits
) -> ProgramResult:
    return asyncio.run(run_python(code, stdin=stdin, files=files, limits=Limits(**limits)))


def children(owner: int = 0) -> set[int]:
    """Processes of this machine whose command line names the guard and its owner."""
    last = f"\0{owner or os.getpid()}\0".encode()
    found: set[int] = set()
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                line = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if b"luyen.sandbox.child.guard" in line and line.endswith(last):
                found.add(int(entry.name))
    return found
