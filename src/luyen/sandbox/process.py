"""One process that answers calls, seen from the side that asks."""

import multiprocessing
import os
import pickle
import subprocess
import sys
from time import monotonic, sleep
from typing import final

from luyen.sandbox.calls import Reply
from luyen.sandbox.descendants import end_with_group
from luyen.sandbox.worker import READY

START_S = 120.0
"""How long a process may take to start and to load a function; importing can be slow."""
_LOOK_S = 0.005
"""Pause between two looks at a process that is about to end."""
_ENVELOPE = 4096
"""What an error may add to a result of the allowed size."""


@final
class Worker:
    """One process and the pipe to it."""

    def __init__(self, *, result_bytes: int) -> None:
        self._most = result_bytes + _ENVELOPE
        self._pipe, theirs = multiprocessing.Pipe()
        path = os.pathsep.join(entry for entry in sys.path if entry)
        arguments = [str(theirs.fileno()), str(os.getpid()), str(result_bytes)]
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "luyen.sandbox.worker", *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=(theirs.fileno(),),
            env=os.environ | {"PYTHONPATH": path},
            start_new_session=True,  # an interrupt of the terminal is ours to handle
        )
        theirs.close()

    @property
    def pid(self) -> int:
        """Id of the process."""
        return self._process.pid

    def ask(self, request: bytes, *, timeout_s: float) -> Reply | None:
        """The reply to a call; None when the time is up. EOFError or OSError: the process died."""
        self._pipe.send_bytes(request)
        said = self._said(START_S)
        if said == READY:
            said = self._said(timeout_s)
        return None if said is None else _unpacked(said)

    def _said(self, timeout_s: float) -> bytes | None:
        return self._pipe.recv_bytes(self._most) if self._pipe.poll(timeout_s) else None

    def kill(self) -> None:
        """Kill the process and all it started; who waits for its answer sees the pipe close."""
        if self._process.returncode is not None:  # buried: its number may be another's by now
            return
        end_with_group(self.pid)

    def end(self, *, patience_s: float = 0.0) -> int:
        """Kill the process and what it left behind, when nobody waits for it; its exit code.

        One that has closed its pipe is about to end; with some patience its own exit code is seen.
        """
        deadline = monotonic() + patience_s
        while not self._has_ended() and monotonic() < deadline:
            sleep(_LOOK_S)
        self.kill()
        code = self._process.wait()
        self._pipe.close()
        return code

    def _has_ended(self) -> bool:
        """Whether it is dead; it stays unburied, so that its group keeps its number."""
        flags = os.WEXITED | os.WNOWAIT | os.WNOHANG
        return os.waitid(os.P_PID, self.pid, flags) is not None


def _unpacked(data: bytes) -> Reply:
    """A reply out of bytes; a value whose class is not importable here is an error."""
    try:
        reply: Reply = pickle.loads(data)
    except (pickle.UnpicklingError, AttributeError, ImportError, IndexError, TypeError) as fault:
        return Reply(error=f"the result cannot be read here: {fault}")
    return reply
