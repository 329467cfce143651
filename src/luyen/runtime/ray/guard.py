"""A process that outlives the controller by seconds, to end what Ray leaves behind.

Ray ties its own processes to the one that started them, but for two agents of a node, which stay
for a minute when everything dies at once. Every process of a local cluster carries a mark in its
environment; when the controller is gone, the guard ends whoever carries the mark.

It runs by path, without the package: only the standard library may be imported here.
"""

import os
import signal
import sys
import time
from pathlib import Path

MARK = "LUYEN_RAY_MARK"
_GRACE_S = 0.5
"""Time for what ends by itself to do so."""
_WATCH_S = 30.0
"""How long new processes are looked for: a starting one may not have been there at first."""
_QUIET_SCANS = 10


def marked(mark: str) -> list[int]:
    """Processes that carry the mark."""
    wanted = f"{MARK}={mark}".encode()
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            is_marked = wanted in (entry / "environ").read_bytes().split(b"\0")
        except OSError:  # it has ended, or is another user's
            continue
        if is_marked:
            found.append(int(entry.name))
    return found


def end(pid: int) -> None:
    """End a process; one that has ended already is fine."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def main(mark: str) -> None:
    """Wait for the other end of standard input to close, then end what carries the mark."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.stdin.buffer.read()
    time.sleep(_GRACE_S)
    last, quiet = time.monotonic() + _WATCH_S, 0
    while quiet < _QUIET_SCANS and time.monotonic() < last:
        left = marked(mark)
        for pid in left:
            end(pid)
        quiet = 0 if left else quiet + 1
        time.sleep(_GRACE_S)


if __name__ == "__main__":
    main(sys.argv[1])
