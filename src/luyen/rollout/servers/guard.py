"""The guard of a server: it runs a command, and ends it when the process that started it is gone.

The guard leads the process group of the server. Its standard input is a pipe of the run: when the
run ends, in whatever way, the pipe closes, and the guard kills the group.

It runs by path, without the package: only the standard library may be imported here.
"""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def guarded(command: Sequence[str]) -> list[str]:
    """The command under a guard.

    Example:
        >>> guarded(["sleep", "1"])[-2:]
        ['sleep', '1']
    """
    return [sys.executable, "-S", __file__, *command]


def _end_with_the_run() -> None:
    while os.read(0, 1):
        pass
    os.killpg(os.getpgid(0), signal.SIGKILL)


def main() -> None:
    """Run the command in `sys.argv`, and exit as it does."""
    server = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
    signal.signal(signal.SIGTERM, lambda *_: None)  # the group gets it; the server decides
    threading.Thread(target=_end_with_the_run, daemon=True).start()
    sys.exit(server.wait() & 0xFF)


if __name__ == "__main__":
    main()
