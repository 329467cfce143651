"""The orphan reaper: a process that outlives the controller briefly to end what Ray leaves.

Ray ties its own processes to the one that started them, but for two agents of a node, which stay
for a minute when everything dies at once. Every process of a local cluster is started with a mark
in its environment; when the controller is gone, the guard ends whoever belongs to the cluster.

A process that gives itself a title may write over its environment, and one whose parent has died
belongs to nobody. So the guard looks while the controller lives, and remembers: a process belongs
to the cluster if it carries the mark or is the child of one that belongs.

When nobody is left, the folder of the cluster goes too. The guard has inherited its lock, so that
no other run takes it for abandoned before.

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
_LOOK_S = 1.0
"""Between two looks while the controller lives."""
_GRACE_S = 0.5
"""Time for what ends by itself to do so."""
_WATCH_S = 30.0
"""How long new processes are looked for: a starting one may not have been there at first."""
_QUIET_SCANS = 10


class ProcessInfo(NamedTuple):
    """A process; a number is given again, but not with the same start."""

    pid: int
    started: int


def living() -> dict[ProcessInfo, int]:
    """Every process that has not ended, with the number of its parent."""
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
    """Whether a process still shows the mark."""
    try:
        shown = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:  # it has ended, or is another user's
        return False
    return f"{MARK}={mark}".encode() in shown.split(b"\0")


def family(known: set[ProcessInfo], mark: str) -> set[ProcessInfo]:
    """Those living that belong to the cluster, given who was known to before."""
    alive = living()
    found = {one for one in alive if one in known or carries(one.pid, mark)}
    fresh = found
    while fresh:
        parents = {one.pid for one in fresh}
        fresh = {one for one, parent in alive.items() if parent in parents} - found
        found = found | fresh
    return found


def end(pid: int) -> None:
    """End a process; one that has ended already is fine."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def watch(mark: str) -> set[ProcessInfo]:
    """Who belongs to the cluster, once the other end of standard input is closed."""
    known: set[ProcessInfo] = set()
    while True:
        heard, _, _ = select.select([sys.stdin], [], [], _LOOK_S)
        if heard and not os.read(sys.stdin.fileno(), 1):
            return known
        known = family(known, mark)


def main(mark: str, folder: str) -> None:
    """Wait for the other end of standard input to close, then end what belongs to the cluster."""
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
