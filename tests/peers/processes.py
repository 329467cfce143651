"""Peers as processes of their own, which can be killed."""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self, final
from urllib.error import URLError

from tests.peers.http import FAULTS_VARIABLE, Fault

ROOT = Path(__file__).parents[2]
_LIMIT_S = 60.0


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def call(url: str, body: Any = None, *, timeout: float = 60.0) -> tuple[int, Any]:
    """Status and body of an answer; `body` None makes it a GET."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, data=data, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=timeout) as reply:
            return reply.status, _read(reply.read())
    except urllib.request.HTTPError as refusal:
        with refusal:
            return refusal.code, _read(refusal.read())


def _read(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return raw.decode()


@final
class PeerProcess:
    """A server in a process; leaving the block ends it."""

    def __init__(
        self,
        module: str,
        folder: Path | str,
        *words: str,
        faults: Iterable[Fault] = (),
        environment: dict[str, str] | None = None,
        port: int | None = None,
    ) -> None:
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = [sys.executable, "-m", f"tests.peers.{module}", "--model", str(folder)]
        self._command += ["--port", str(self.port), *words]
        planned = json.dumps([asdict(fault) for fault in faults])
        self._environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            FAULTS_VARIABLE: planned,
            **(environment or {}),
        }
        self.process = self._begin()

    def _begin(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(self._command, cwd=ROOT, env=self._environment)

    def __enter__(self) -> Self:
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def wait(self) -> None:
        """Until it answers."""
        limit = time.monotonic() + _LIMIT_S
        while True:
            try:
                if call(f"{self.url}/health", timeout=2.0)[0] == 200:
                    return
            except (URLError, OSError):
                pass
            assert self.process.poll() is None, "the server ended"
            assert time.monotonic() < limit, "the server did not answer"
            time.sleep(0.05)

    def kill(self) -> None:
        """SIGKILL."""
        self.process.kill()
        self.process.wait()

    def restart(self) -> None:
        """The same command again, at the same address."""
        self.kill()
        self.process = self._begin()
        self.wait()
