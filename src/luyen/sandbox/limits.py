"""What a program in the sandbox may use, and what holds it to that on this machine."""

import shutil
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, final

from luyen.base.errors import UserError
from luyen.sandbox.launch import SandboxFault, command, environment, job_file, read_report


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one run of a program may use. Memory, CPU time and files are counted per process.

    Example:
        >>> Limits(wall_s=2.0).network
        False
    """

    memory_bytes: int = 2**30
    """Address space of a process; more is a MemoryError."""
    cpu_s: int = 5
    """Seconds of CPU time of a process; then it is killed."""
    wall_s: float = 10.0
    """Seconds from start to end; then everything is killed."""
    file_bytes: int = 16 * 2**20
    """Size of a file; with namespaces, of all files of the run together."""
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


@cache
def available() -> tuple[str, ...]:
    """What holds programs to their limits here, found by running one; see docs/sandbox.md.

    Example:
        >>> "rlimits" in available()
        True
    """
    work = tempfile.mkdtemp(prefix="luyen-")
    job: dict[str, Any] = {"code": "", "work": work, "limits": asdict(Limits())}
    with job_file(job) as asked, job_file(None) as report:
        done = subprocess.run(
            command(asked, report),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=environment(),
            pass_fds=(asked.fileno(), report.fileno()),
            check=False,
        )
        found = read_report(report, most=2**20)
    shutil.rmtree(work)
    if found is None:
        raise SandboxFault(done.stderr.decode(errors="replace")[-500:])
    return tuple(found["measures"])
