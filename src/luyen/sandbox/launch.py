"""How the guard of a program is started: its command line, its environment, and its files.

The job and the report travel in files without a name, so no pipe can fill up and block anyone.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import IO, Any, final


@final
class SandboxFault(Exception):
    """The sandbox itself failed: nothing is known about the program."""


def job_file(job: dict[str, Any] | None) -> IO[bytes]:
    """A nameless file that holds a job, or nothing."""
    file = tempfile.TemporaryFile(prefix="luyen-")  # noqa: SIM115
    if job is not None:
        file.write(json.dumps(job).encode())
        file.seek(0)
    return file


def command(asked: IO[bytes], report: IO[bytes], channel: int) -> list[str]:
    """The command line of the guard, which reads packages but no directory of the user."""
    numbers = [str(asked.fileno()), str(report.fileno()), str(channel), str(os.getpid())]
    flags = ["-P", "-s", "-X", "utf8"]
    return [sys.executable, *flags, "-m", "luyen.sandbox.inside.guard", *numbers]


def environment() -> dict[str, str]:
    """All that a program sees of the environment: nothing of ours, no secret, no random hashes."""
    import luyen

    # One thread a library: each would otherwise take an address space per core.
    single = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return single | {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": str(Path(luyen.__file__).parents[1]),
    }


def read_report(file: IO[bytes]) -> dict[str, Any] | None:
    """What the guard wrote; None when it did not come to that."""
    file.seek(0)
    try:
        found: dict[str, Any] = json.loads(file.read())
    except ValueError:
        return None
    return found
