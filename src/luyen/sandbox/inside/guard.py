"""The guard of one program: it starts it behind walls, watches it, and leaves nothing alive.

Its arguments are the numbers of two open files, job and report, and the id of the process that
owns it. With namespaces there are three processes: the guard outside; the first process inside,
whose end is the end of all others there; and the program. Without, the guard is that first one.
"""

import json
import os
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from luyen.sandbox.inside import namespaces, program, walls
from luyen.sandbox.inside.kernel import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    control,
)

_LOOK_S = 0.02
"""Longest pause between two looks at the program."""


def main(job_number: str, report_number: str, owner: str) -> None:
    """Carry out the job and write the report."""
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(owner):
        os._exit(1)
    with open(int(job_number), "rb") as file:
        job: dict[str, Any] = json.load(file)
    os.environ.pop("PYTHONPATH", None)
    work, limits = job["work"], job["limits"]
    apart = namespaces.enter(network=limits["network"])
    measures: list[str] = []
    if apart:
        first = os.fork()
        if first != 0:
            os._exit(os.waitstatus_to_exitcode(os.waitpid(first, 0)[1]) & 0xFF)
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        measures += ["namespaces", *namespaces.furnish(work, size=limits["file_bytes"])]
    os.chdir(work)
    os.environ |= {"HOME": work, "TMPDIR": work}
    keep(job, int(report_number), measures, apart=apart)


def keep(job: dict[str, Any], report: int, measures: list[str], *, apart: bool) -> None:
    """Start the program, wait for its end or bring it about, end what it left, and report."""
    signal.signal(signal.SIGTERM, leave)
    control(PR_SET_CHILD_SUBREAPER, 1)
    control(PR_SET_DUMPABLE, 0)
    with tempfile.TemporaryFile() as said:
        ready, tell = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            os.close(report)
            begin(job, said.fileno(), tell, apart=apart)
            return
        os.close(tell)
        try:
            with os.fdopen(ready) as line:
                built = line.read()
            if not built:
                sys.exit(1)  # the child has said on standard error why it could not begin
            found = watch(pid, job["limits"])
        finally:
            end_all(pid, apart=apart)
        said.seek(0)
        words = said.read(8 * job["limits"]["output_bytes"] + 1000).decode(errors="replace")
        os.write(
            report,
            json.dumps({"measures": measures + json.loads(built), "said": words, **found}).encode(),
        )


def leave(_: int, __: object) -> None:
    """Unwind, so that the program is ended on the way out."""
    sys.exit(1)


def begin(job: dict[str, Any], said: int, tell: int, *, apart: bool) -> None:
    """In the child: settle in, put up the walls, say which, and become the program."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.setpgid(0, 0)
    program.settle_in(job)
    built = walls.build(job["limits"], work=os.getcwd(), apart=apart, socket_free=apart)
    os.write(tell, json.dumps(built).encode())
    os.close(tell)
    program.run(job, said)


def watch(pid: int, limits: dict[str, Any]) -> dict[str, Any]:
    """Wait until the program ends or must end: its exit code and the limit it ran into."""
    start = time.monotonic()
    while True:
        code = reap(pid)
        spent = time.monotonic() - start
        if code is not None:
            reason = "cpu" if code == -signal.SIGXCPU else None
            return {"exit_code": code, "killed_for": reason}
        if spent > limits["wall_s"]:
            return {"exit_code": -signal.SIGKILL, "killed_for": "time"}
        if len(descendants()) > limits["processes"]:
            return {"exit_code": -signal.SIGKILL, "killed_for": "processes"}
        time.sleep(min(_LOOK_S, max(0.001, spent / 10)))


def reap(pid: int) -> int | None:
    """Bury the dead; the exit code of this one if it is among them."""
    with suppress(ChildProcessError):
        while True:
            dead, status = os.waitpid(-1, os.WNOHANG)
            if dead == 0:
                return None
            if dead == pid:
                return os.waitstatus_to_exitcode(status)
    return None


def descendants() -> list[int]:
    """All processes that stem from this one, orphans included, by the names /proc has for them."""
    found: list[int] = []
    with suppress(OSError):
        todo = [int(os.readlink("/proc/self"))]
        while todo:
            children = _children(todo.pop())
            todo += children
            found += children
    return found


def _children(pid: int) -> list[int]:
    found: list[int] = []
    with suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split())
    return found


def end_all(pid: int, *, apart: bool) -> None:
    """Kill everything that stems from the program, however often it forks meanwhile."""
    while True:
        with suppress(ProcessLookupError, PermissionError):
            if apart:
                os.kill(-1, signal.SIGKILL)  # all of this namespace but its first process
            else:
                os.killpg(pid, signal.SIGKILL)
        for other in () if apart else descendants():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(other, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
