"""The guard of one program: it starts it isolated, watches it, and leaves nothing alive.

Its arguments are the numbers of three open files, job, report and channel, and the id of the
process that owns it. With namespaces there are three processes: the guard outside; the first
process inside, whose end is the end of every process there; and the program. Without namespaces,
the guard is that first process.
The report says how the program ended, and nothing that the program said.
"""

import json
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from luyen.base.system import reset_signals
from luyen.sandbox.child import isolation, program, usage
from luyen.sandbox.child.isolation import readable
from luyen.sandbox.child.syscalls import (
    PR_SET_CHILD_SUBREAPER,
    PR_SET_DUMPABLE,
    PR_SET_PDEATHSIG,
    control,
    leave_keyrings,
)
from luyen.sandbox.child.usage import descendants, files_of, memory_of, threads_of

_LOOK_S = 0.02
"""Longest pause between two looks at the program."""
_BATCH = 64
"""How many processes are looked for before they are killed."""
_AWAITED = (signal.SIGTERM, signal.SIGCHLD)
"""The owner wants the end, or it is gone; a process ended."""


def main(job_number: str, report_number: str, channel: str, owner: str) -> None:
    """Carry out the job and write the report."""
    reset_signals()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the program's, too, where it was ignored
    # Signals are taken where the guard waits for them: none interrupts it while it cleans up.
    signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    control(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != int(owner):
        os._exit(1)
    with open(int(job_number), "rb") as file:
        job: dict[str, Any] = json.load(file)
    os.environ.pop("PYTHONPATH", None)
    with suppress(OSError):  # when memory runs out, these processes go first
        Path("/proc/self/oom_score_adj").write_text("1000")
    leave_keyrings()
    limits = job["limits"]
    limits["file_bytes"] += program.input_bytes(job)  # what it is given is not its own
    memory = limits["memory_bytes"] + 2 * limits["file_bytes"]  # files of its own are memory too
    group = usage.make_cgroup(
        memory_bytes=memory, processes=limits["processes"] + isolation.THREADS
    )
    own = os.getpid()
    try:
        run_isolated(job, int(report_number), int(channel), group)
    finally:
        if group is not None and os.getpid() == own:
            group.remove()


def run_isolated(
    job: dict[str, Any], report: int, channel: int, group: usage.ControlGroup | None
) -> None:
    """Go into namespaces where there are any, and keep the program there."""
    work, limits = job["work"], job["limits"]
    measures = ["cgroup"] if group is not None else []
    if isolation.enter_namespaces(network=limits["network"]):
        first = os.fork()
        if first != 0:
            wait_for(first)
        control(PR_SET_PDEATHSIG, signal.SIGKILL)
        measures.append("namespaces")
        visible = readable(own_processes=True)
        if isolation.mount_root(work, readable=visible, size=limits["file_bytes"]):
            measures.append("root")
    os.chdir(work)
    os.environ |= {"HOME": work, "TMPDIR": work}
    keep(job, report, channel, measures, group)


def wait_for(first: int) -> NoReturn:
    """In the outer guard: exit as the first process inside does; forward a signal to end it."""
    while True:
        dead, status = os.waitpid(first, os.WNOHANG)
        if dead:
            sys.exit(os.waitstatus_to_exitcode(status) & 0xFF)
        if signal.sigwait(_AWAITED) == signal.SIGTERM:
            os.kill(first, signal.SIGKILL)


def keep(
    job: dict[str, Any],
    report: int,
    channel: int,
    measures: list[str],
    group: usage.ControlGroup | None,
) -> None:
    """Start the program, wait for its end or bring it about, end what it left, and report."""
    apart = "namespaces" in measures
    control(PR_SET_CHILD_SUBREAPER, 1)
    control(PR_SET_DUMPABLE, 0)
    ready, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        begin(job, channel, tell, measures, group)
        return
    os.close(tell)
    try:
        with os.fdopen(ready) as line:
            built = line.read()
        if not built:
            sys.exit(1)  # the child has said on standard error why it could not begin
        found = watch(pid, job["limits"], measures)
    finally:
        end_all(pid, apart=apart)
    if found is None:
        sys.exit(1)
    if group is not None and found["exit_code"] != 0 and group.is_exhausted():
        found["killed_for"] = "memory"
    os.write(report, json.dumps({"measures": json.loads(built), **found}).encode())


def begin(
    job: dict[str, Any],
    channel: int,
    tell: int,
    measures: list[str],
    group: usage.ControlGroup | None,
) -> None:
    """In the child: set up the isolation layers, report which ones hold, and exec the program."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _AWAITED)
    control(PR_SET_DUMPABLE, 1)  # or a guard that is not root could not see what it has open
    os.setpgid(0, 0)
    if group is not None:
        group.join()
    program.write_inputs(job)
    built = isolation.confine(job["limits"], work=os.getcwd(), measures=measures)
    os.write(tell, json.dumps(built).encode())
    os.close(tell)
    os.dup2(channel, program.CHANNEL)
    close_beyond(program.CHANNEL)
    program.run(job)


def close_beyond(last: int) -> None:
    """Close every descriptor above this one: what the guard has open is not the program's."""
    try:
        found = [int(name) for name in os.listdir("/proc/self/fd")]
    except OSError:
        found = list(range(isolation.OPEN_FILES))
    for number in found:
        if number > last:
            with suppress(OSError):
                os.close(number)


def watch(pid: int, limits: dict[str, Any], measures: list[str]) -> dict[str, Any] | None:
    """Wait until the program ends or must end: its exit code and the limit it ran into.

    None if this guard was signalled to end it.
    With a cgroup the kernel counts memory, with a root of its own files: then nothing is added up.
    """
    start = time.monotonic()
    work = "." if "root" not in measures else None
    memory = limits["memory_bytes"] if "cgroup" not in measures else None
    most, most_threads = limits["file_bytes"], limits["processes"] + isolation.THREADS
    while True:
        code = reap(pid)
        spent = time.monotonic() - start
        if code is not None:
            reason = "cpu" if code == -signal.SIGXCPU else None
            return {"exit_code": code, "killed_for": reason}
        alive = descendants(limits["processes"])
        reason = None
        if spent > limits["wall_s"]:
            reason = "time"
        elif len(alive) > limits["processes"] or threads_of(alive) > most_threads:
            reason = "processes"
        elif memory is not None and memory_of(alive, memory) > memory:
            reason = "memory"
        elif work is not None and files_of(work, alive, most) > most:
            reason = "files"
        if reason is not None:
            return {"exit_code": -signal.SIGKILL, "killed_for": reason}
        taken = signal.sigtimedwait(_AWAITED, min(_LOOK_S, max(0.001, spent / 10)))
        if taken is not None and taken.si_signo == signal.SIGTERM:
            return None


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


def end_all(pid: int, *, apart: bool) -> None:
    """Kill everything that stems from the program, even if it keeps forking.

    Orphans become children of this process, so nothing is left when it has no child.
    """
    while True:
        with suppress(ProcessLookupError, PermissionError):
            if apart:
                os.kill(-1, signal.SIGKILL)  # all of this namespace but its first process
            else:
                os.killpg(pid, signal.SIGKILL)  # at once: one by one, children could outrun it
        # What left that group is stopped before it is killed, some at a time: the list of a tree
        # that grows would have no end.
        escaped = [] if apart else descendants(_BATCH)
        for number in (signal.SIGSTOP, signal.SIGKILL):
            for other in escaped:
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(other, number)
        try:
            while os.waitpid(-1, os.WNOHANG)[0] != 0:
                pass
        except ChildProcessError:
            return
        time.sleep(0.001)


if __name__ == "__main__":
    main(*sys.argv[1:])
