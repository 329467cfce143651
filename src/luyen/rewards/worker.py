"""The process that makes calls for a pool: one at a time, on its main thread.

Its arguments are the number of an open pipe and the id of the process that owns it.
"""

import os
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

from luyen.rewards.calls import READY, Call, function_of, perform
from luyen.rewards.outcome import Outcome, boundary


def serve(pipe: Any) -> None:
    """Answer calls until the other side hangs up."""
    while True:
        try:
            call: Call = pipe.recv()
        except (EOFError, OSError):
            return
        faults: list[str] = []
        with boundary(faults):
            function_of(call.name, call.source, call.rule)
        if faults:
            pipe.send(Outcome(error=faults[0]))
        else:
            pipe.send(READY)
            pipe.send(perform(call))


def leave_with(owner: int) -> None:
    """End this process soon after its owner, even in the middle of a call."""
    while os.getppid() == owner:
        time.sleep(1.0)
    os._exit(1)


def main(number: str, owner: str) -> None:
    """Serve the pipe of this number."""
    threading.Thread(target=leave_with, args=(int(owner),), daemon=True).start()
    serve(Connection(int(number)))


if __name__ == "__main__":
    main(*sys.argv[1:])
