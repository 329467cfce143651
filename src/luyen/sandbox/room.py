"""Room on the disk that programs and the files of their guards use.

A program that fails because the disk was full is not wrong. So where the disk is short of what a
program may use, nothing is known about it, and the sandbox says that instead of a verdict.
"""

import os
import tempfile
from typing import Any

from luyen.sandbox.launch import SandboxFault


def room() -> float:
    """Bytes that are left where programs work; infinite where the file system does not say."""
    try:
        found = os.statvfs(tempfile.gettempdir())
    except OSError:
        return 0.0
    if found.f_files and not found.f_favail:
        return 0.0
    return float(found.f_bavail * found.f_frsize) if found.f_blocks else float("inf")


def need_room(found: dict[str, Any] | None, before: float, *, file_bytes: int) -> None:
    """Raise a SandboxFault where the disk was short, before a program or after it.

    With a root of its own the files of a program are memory, and only a missing report counts.
    """
    left = min(before, room())
    if left >= file_bytes or (found is not None and "root" in found["measures"]):
        return
    raise SandboxFault(
        f"{tempfile.gettempdir()} has {left / 2**20:.1f} MiB left, and a program may need"
        f" {file_bytes / 2**20:.1f} MiB; make room there, or set TMPDIR to another disk"
    )


def no_files(error: OSError) -> SandboxFault:
    """Why the files of a guard could not be made."""
    return SandboxFault(
        f"no file could be written in {tempfile.gettempdir()}: {error.strerror or error}; make room"
        " there, set TMPDIR to another disk, or raise the limits of this process (ulimit -f, -n)"
    )
