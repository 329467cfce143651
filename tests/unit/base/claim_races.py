"""Processes that want the same run directory at the same instant.

`python -m tests.unit.base.claim_races FOLDER PAIRS` lets pairs begin new runs and prints how each
process ended. It is a process of its own since one with torch in it takes long to fork.
"""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

from luyen.base import files
from luyen.base.errors import UserError
from luyen.base.run_lock import claim
from luyen.base.rundir import RunDirectory

AT_ONCE = 20


def begin(root: Path, seed: int) -> None:
    """What a new run does first."""
    claim(root)
    RunDirectory.create(root, config=f"seed: {seed}\n", provenance={}, manifest={"seed": seed})


def forked(work: Callable[[], None], start: int, go: int) -> int:
    """A child that does the work once `go` is closed everywhere, and then waits; its id."""
    pid = os.fork()
    if pid:
        return pid
    status = 3
    try:
        os.close(go)
        os.read(start, 1)
        work()
        signal.pause()
    except UserError as error:
        status = 1 if "another process is training it (process" in error.why else 2
    finally:
        os._exit(status)


def race(
    works: list[Callable[[], None]],
    *,
    winners: int = 1,
    are_done: Callable[[], bool] = lambda: True,
) -> list[int]:
    """How processes end that do their work at the same instant: -15 if one could, 1 if refused.

    Those that could have it until so many as are to be are left, and done.
    """
    start, go = os.pipe()
    left = {forked(work, start, go) for work in works}
    os.close(go)
    codes: list[int] = []
    deadline = time.monotonic() + 30
    while len(left) > winners and time.monotonic() < deadline:
        for pid in list(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                codes.append(os.waitstatus_to_exitcode(status))
        time.sleep(0.001)
    os.close(start)
    wait_for(are_done)
    for pid in left:
        os.kill(pid, signal.SIGTERM)
    return sorted(codes + [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in left])


def wait_for(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def main() -> None:
    """Pair after pair, some of them at once."""
    files.sync = lambda path: None  # the disk is not in question
    folder, pairs = Path(sys.argv[1]), int(sys.argv[2])
    codes: list[int] = []
    for number in range(0, pairs, AT_ONCE):
        roots = [folder / f"run{number + i}" for i in range(AT_ONCE)]
        codes += race(
            [lambda root=r, seed=seed: begin(root, seed) for r in roots for seed in (1, 2)],
            winners=AT_ONCE,
            are_done=lambda roots=roots: all(RunDirectory(root).exists for root in roots),
        )
    sys.stdout.write(" ".join(map(str, sorted(codes))))


if __name__ == "__main__":
    main()
