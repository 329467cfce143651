"""The orphan reaper: a process that outlives the controller to end what is left of a local cluster.

Ray's processes end with the process that started them, except two agents of a node, which stay for
a minute when everything is killed at once. Every process of a local cluster has a mark in its
environment; when the controller is gone, the reaper kills the processes of the cluster.

A process that sets its title may overwrite its environment, and the parent of an orphan is unknown.
So the reaper scans while the controller lives: a process belongs to the cluster if it carries the
mark or is a child of a process that belongs.

Finally it removes the session folder. It has inherited the folder's lock, so that no other run
removes the folder before.

It runs by path, without the package: only the standard library may be imported here.
"""

import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

MARK = "LUYEN_RAY_MARK"
_POLL_S = 1.0
"""Seconds between two scans while the controller lives."""
_GRACE_S = 0.5
"""Seconds for processes to end by themselves."""
_WATCH_S = 30.0
"""Seconds of scanning after the controller has ended: processes may still be starting."""
_QUIET_SCANS = 10


class ProcessInfo(NamedTuple):
    """Identity of a process: pids are reused, but not with the same start time."""

    pid: int
    started: int


def living() -> dict[ProcessInfo, int]:
    """Every process that has not ended, with the pid of its parent."""
    found: dict[ProcessInfo, int] = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            state, parent, *rest = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if state != "Z":
            found[ProcessInfo(int(entry.name), int(rest[17]))] = int(parent)
    return found


def carries(pid: int, mark: str) -> bool:
    """Whether the environment of a process has the mark."""
    try:
        shown = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
    return f"{MARK}={mark}".encode() in shown.split(b"\0")


def family(known: set[ProcessInfo], mark: str) -> set[ProcessInfo]:
    """Living processes of the cluster, given those known from earlier scans."""
    alive = living()
    found = {one for one in alive if one in known or carries(one.pid, mark)}
    fresh = found
    while fresh:
        parents = {one.pid for one in fresh}
        fresh = {one for one, parent in alive.items() if parent in parents} - found
        found = found | fresh
    return found


def end(pid: int) -> None:
    """Kill a process; one that has ended already is ignored."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def watch(mark: str) -> set[ProcessInfo]:
    """Scan until standard input is closed; the processes of the cluster."""
    known: set[ProcessInfo] = set()
    while True:
        heard, _, _ = select.select([sys.stdin], [], [], _POLL_S)
        if heard and not os.read(sys.stdin.fileno(), 1):
            return known
        known = family(known, mark)


def main(mark: str, folder: str) -> None:
    """Wait until standard input is closed, then kill the cluster and remove its folder."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    known = watch(mark)
    time.sleep(_GRACE_S)
    last, quiet = time.monotonic() + _WATCH_S, 0
    while quiet < _QUIET_SCANS and time.monotonic() < last:
        known = family(known, mark)
        for one in known:
            end(one.pid)
        quiet = 0 if known else quiet + 1
        time.sleep(_GRACE_S)
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
