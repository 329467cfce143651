"""All processes that one has started, and those that these started: found, and ended together."""

import os
import signal
from contextlib import suppress
from pathlib import Path

_ROUNDS = 8
"""How often it is looked again for processes that were started meanwhile."""


def stemming_from(pid: int) -> list[int]:
    """All processes that a process started, and those that these started, as far as /proc tells."""
    found: list[int] = [pid]
    for parent in found:  # it grows while it is walked
        with suppress(OSError):  # it ended meanwhile, or there is no /proc
            for task in Path(f"/proc/{parent}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found[1:]


def end_with_group(leader: int) -> None:
    """Kill all that the leader of a process group started, wherever it is by now, and the group."""
    killed: set[int] = set()
    for _ in range(_ROUNDS):
        strays = set(stemming_from(leader)) - killed  # some may have left the group
        for stray in strays:
            with suppress(ProcessLookupError, PermissionError):
                os.kill(stray, signal.SIGKILL)
        killed |= strays
        if not strays:
            break
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)
