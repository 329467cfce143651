"""How a sandboxed program is started: limits, command line, and the isolation available here.

The job and the report travel in files without a name, so no pipe can fill up and block anyone.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any, final

from luyen.base.errors import UserError


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


def command(request: IO[bytes], report: IO[bytes], channel: int) -> list[str]:
    """The command line of the guard, which reads packages but no directory of the user."""
    numbers = [str(request.fileno()), str(report.fileno()), str(channel), str(os.getpid())]
    flags = ["-P", "-s", "-X", "utf8"]
    return [sys.executable, *flags, "-m", "luyen.sandbox.child.guard", *numbers]


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


# Limits of a program in the sandbox, and the isolation layers available on this machine.

ISOLATION: dict[str, tuple[tuple[str, ...], ...]] = {
    "files": (("root",), ("landlock", "seccomp")),
    "network": (("namespaces",), ("seccomp",)),
    "processes": (("namespaces",), ("landlock", "seccomp")),
    "memory": (("cgroup",), ("seccomp", "rlimits")),
}
"""Promise -> the sets of isolation layers, any one of which keeps it."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run of a program may use. CPU time is counted per process, memory of all together.

    Example:
        >>> Limits(wall_s=2.0).network
        False
    """

    memory_bytes: int = 2**30
    """Memory of all processes together, and address space of each; more is a MemoryError or the
    end."""
    cpu_s: int = 5
    """Seconds of CPU time of a process; then it is killed."""
    wall_s: float = 10.0
    """Seconds from start to end; then everything is killed."""
    file_bytes: int = 16 * 2**20
    """Size of all files of the run together; more is an OSError or the end."""
    processes: int = 16
    """Processes that may live at once; then everything is killed."""
    output_bytes: int = 2**18
    """Bytes kept of standard output, of standard error and of the value, each."""
    network: bool = False
    """Whether sockets may be made."""

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0 and name != "network":
                raise UserError(f"limits.{name}", value, "nothing could run", "set it above 0")


def available() -> tuple[str, ...]:
    """The isolation layers on this machine, found by running a program; see docs/sandbox.md.

    Example:
        >>> "rlimits" in available()
        True
    """
    layers = probe()
    if layers is None:
        raise SandboxFault("the guard of an empty program failed")
    return layers


@cache
def probe() -> tuple[str, ...] | None:
    """The isolation layers around an empty program; None if it cannot be run."""
    work = tempfile.mkdtemp(prefix="luyen-")
    job: dict[str, Any] = {"code": "", "work": work, "limits": asdict(Limits())}
    with job_file(job) as request, job_file(None) as report:
        channel = os.open(os.devnull, os.O_WRONLY)
        subprocess.run(
            command(request, report, channel),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            pass_fds=(request.fileno(), report.fileno(), channel),
            check=False,
        )
        os.close(channel)
        found = read_report(report)
    shutil.rmtree(work)
    return None if found is None or found["exit_code"] != 0 else tuple(found["measures"])


def demand(promises: Sequence[str]) -> None:
    """A UserError when one of these promises is not kept on this machine."""
    lost = missing(tuple(promises))
    if lost:
        why = f"nothing on this machine keeps {', '.join(lost)} out of a program's reach"
        fix = "see `luyen selftest --sandbox`; run where these isolation layers exist, or drop it"
        raise UserError("sandbox.require", list(promises), why, fix)


def missing(promises: tuple[str, ...] = tuple(ISOLATION)) -> tuple[str, ...]:
    """Those of these promises that nothing on this machine keeps.

    Example:
        >>> set(missing()) <= {"files", "network", "processes", "memory"}
        True
    """
    layers = set(available())
    return tuple(
        promise
        for promise in promises
        if promise in ISOLATION
        and not any(layers.issuperset(layer) for layer in ISOLATION[promise])
    )
