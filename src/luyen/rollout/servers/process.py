"""Servers: those that a run starts and supervises, and those that run already."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, Protocol, final
from urllib.parse import urlsplit

from luyen.base.errors import UserError
from luyen.base.heartbeat import beat
from luyen.rollout.servers.guard import guarded
from luyen.rollout.servers.temporary import bound_log

_FIELD = "actor_rollout_ref.rollout.name"
_POLL_S = 0.1
_GRACE_S = 10.0
"""Seconds for a server to end by itself before it is killed."""
_LOG_EVERY_S = 60.0
"""Seconds between two looks at the length of a log."""
_PORTS = 3
"""Ports to try where other processes take those that were free."""
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

    def is_listening(self) -> bool:
        """Whether it is the process at `url`; True where that cannot be known."""
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

    def is_listening(self) -> bool:
        """True: whose process it is cannot be known here."""
        return True

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
        self._log_seen_at = 0.0
        self._sockets: frozenset[str] = frozenset()
        """Sockets of the present server that listen on its port."""

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
            self._bound_log()
            return False
        self.stop()
        if self._environment is None:
            self._environment = self._prepare()
        for _ in range(_PORTS):
            self._port = free_port()
            if self._has_started():
                return True
        why = f"on {_PORTS} ports in turn another process listened where the server was to listen"
        fix = "find out which process of this machine takes free ports, and end it"
        raise UserError(_FIELD, self._port, why, fix)

    def is_listening(self) -> bool:
        """Whether its sockets, and no other ones, listen on its port."""
        found = listening_sockets(self._port)
        return found is None or (bool(found) and found <= self._sockets)

    def _has_started(self) -> bool:
        """Start it and wait until it answers; False if another process has its port."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                guarded(self._command(self._port)),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Otherwise `-m` looks for modules in the current folder first.
                env={**os.environ, "PYTHONSAFEPATH": "1", **(self._environment or {})},
                process_group=0,
            )
        return self._await_ready(self._process)

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

    def _bound_log(self) -> None:
        """Look at the length of the log now and then: a server may print for weeks."""
        if time.monotonic() > self._log_seen_at + _LOG_EVERY_S:
            self._log_seen_at = time.monotonic()
            bound_log(self._log)

    def last_words(self) -> str:
        """The end of its log."""
        if not self._log.is_file():
            return ""
        with self._log.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - _TAIL))
            return log.read().decode(errors="replace")

    def _await_ready(self, process: subprocess.Popen[bytes]) -> bool:
        """True once it answers; False, and it is ended, if another process has its port."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            whose = self._whose_port(process.pid)
            if whose == "other":
                self.stop()
                return False
            if whose == "ours" and self._is_ready():
                return True
            self._refuse_dead_or_late(process, deadline)
            beat()
            time.sleep(_POLL_S)

    def _whose_port(self, group: int) -> Literal["ours", "other", "free"]:
        """Whose socket listens on the port; `ours` where the system does not say."""
        found = listening_sockets(self._port)
        if found is None:
            return "ours"
        if not found:
            return "free"
        self._sockets = found & sockets_of_group(group)
        return "ours" if self._sockets == found else "other"

    def _refuse_dead_or_late(self, process: subprocess.Popen[bytes], deadline: float) -> None:
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


# Which process listens on a port of this machine, as Linux tells it in `/proc`.
#
# A server of ours gets a port that was free. Another user of the machine may have taken it by the
# time the server binds it: then that process would be greeted in its place.

_PROC = Path("/proc")
_LISTEN = "0A"
_TABLES = ("net/tcp", "net/tcp6")


def listening_sockets(port: int) -> frozenset[str] | None:
    """Sockets that listen on a port at any address, by inode; None: this system does not say.

    Those of other users are among them.
    """
    found: set[str] = set()
    tables = [_PROC / "self" / name for name in _TABLES]
    if not tables[0].is_file():
        return None
    for table in tables:
        with suppress(OSError):
            for line in table.read_text().splitlines()[1:]:
                words = line.split()
                if words[3] == _LISTEN and int(words[1].rpartition(":")[2], 16) == port:
                    found.add(words[9])
    return frozenset(found)


def sockets_of_group(group: int) -> frozenset[str]:
    """Sockets that processes of a group, or children of them, have open, by inode."""
    found: set[str] = set()
    for pid in _members(group):
        with suppress(OSError):  # it ended
            for entry in os.scandir(_PROC / str(pid) / "fd"):
                with suppress(OSError):
                    kind, _, inode = os.readlink(entry.path).partition(":[")
                    if kind == "socket":
                        found.add(inode.rstrip("]"))
    return frozenset(found)


def _members(group: int) -> set[int]:
    """Processes of a group and all that descend from them."""
    parents: dict[int, int] = {}
    found: set[int] = set()
    for entry in _PROC.iterdir():
        if entry.name.isdigit():
            with suppress(OSError, IndexError):
                words = (entry / "stat").read_text().rpartition(")")[2].split()
                parents[int(entry.name)] = int(words[1])
                if int(words[2]) == group:
                    found.add(int(entry.name))
    while True:
        more = {pid for pid, parent in parents.items() if parent in found} - found
        if not more:
            return found
        found |= more
