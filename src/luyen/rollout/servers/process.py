"""Servers: those that a run starts and supervises, and those that run already."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol, final
from urllib.parse import urlsplit

from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.rollout.servers.guard import guarded

_FIELD = "actor_rollout_ref.rollout.name"
_POLL_S = 0.1
_GRACE_S = 10.0
"""Seconds for a server to end by itself before it is killed."""
_TAIL = 2000
"""Characters of a log that an error shows."""


class Server(Protocol):
    """Where an engine sends its calls."""

    @property
    def url(self) -> str:
        """Its present address."""
        ...

    @property
    def can_restart(self) -> bool:
        """Whether `start` can replace a server that is gone."""
        ...

    def start(self) -> bool:
        """Make it run and answer; True if it was started, so that it has its initial weights."""
        ...

    def stop(self) -> None:
        """End it, if the run started it; it can be started again."""
        ...

    def last_words(self) -> str:
        """The end of its log; empty: the run has none."""
        ...


@final
class AttachedServer:
    """A server that is run by other means.

    Example:
        >>> AttachedServer("http://127.0.0.1:8000").can_restart
        False
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._is_new = True

    @property
    def can_restart(self) -> bool:
        """No."""
        return False

    def start(self) -> bool:
        """True at the first call: nothing is known of its weights yet."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def stop(self) -> None:
        """It goes on without the run, whose weights it keeps."""
        self._is_new = True

    def last_words(self) -> str:
        """Its log is not ours."""
        return ""


@final
class ServerProcess:
    """A server in a process group of its own, which ends with this process."""

    def __init__(
        self,
        command: Callable[[int], Sequence[str]],
        *,
        prepare: Callable[[], Mapping[str, str]],
        log: Path,
        is_ready: Callable[[], bool],
        start_timeout_s: float,
    ) -> None:
        """`command` takes the port to listen on; `is_ready` asks the server at `url`.

        `prepare` makes the server's files before the first start; its environment besides ours.
        """
        self._command = command
        self._prepare = prepare
        self._environment: Mapping[str, str] | None = None
        self._log = log
        self._is_ready = is_ready
        self._start_timeout_s = start_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    @property
    def url(self) -> str:
        """Its present address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int | None:
        """Its process, which leads its group; None: it does not run."""
        return None if self._process is None else self._process.pid

    @property
    def can_restart(self) -> bool:
        """Yes."""
        return True

    def start(self) -> bool:
        """Start it unless it runs, and wait until it answers; whether it was started."""
        if self._process is not None and self._process.poll() is None:
            return False
        self.stop()
        if self._environment is None:
            self._environment = self._prepare()
        self._port = free_port()
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded(self._command(self._port)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **self._environment},
                process_group=0,
            )
        self._await_ready(self._process)
        return True

    def stop(self) -> None:
        """End the server and every process of its group."""
        process, self._process = self._process, None
        if process is None:
            return
        _signal_group(process.pid, signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdin is not None:
            process.stdin.close()

    def last_words(self) -> str:
        """The end of its log."""
        if not self._log.is_file():
            return ""
        with self._log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL))
            return log.read().decode(errors="replace")

    def _await_ready(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + self._start_timeout_s
        while not self._is_ready():
            code = process.poll()
            if code is not None:
                self.stop()
                why = f"the server ended with code {code} before it answered:\n{self.last_words()}"
                raise UserError(_FIELD, str(self._log), why, "read the log of the server")
            if time.monotonic() > deadline:
                self.stop()
                why = f"the server gave no answer in {self._start_timeout_s:g} s"
                fix = "read its log, or raise rollout.server.start_timeout_s"
                raise UserError(_FIELD, str(self._log), why, fix)
            beat()
            time.sleep(_POLL_S)


def local_address(url: str) -> str:
    """The address of this machine that a server at a URL reaches it by.

    Example:
        >>> local_address("http://127.0.0.1:8000")
        '127.0.0.1'
    """
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((parts.hostname or "", parts.port or 80))  # sends nothing
        except OSError as error:
            why = f"this machine knows no way to it: {error}"
            field = "actor_rollout_ref.rollout.server_urls"
            raise UserError(field, url, why, "correct the address") from error
        return str(probe.getsockname()[0])


def free_port() -> int:
    """A port of this machine that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _signal_group(pid: int, number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, number)
