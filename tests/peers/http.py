"""A JSON server of routes on a thread, whose answers can be spoiled on purpose."""

import json
import os
import signal
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, cast, final
from urllib.parse import parse_qs, urlsplit

from luyen.base.boundary import boundary

FAULTS_VARIABLE = "LUYEN_PEER_FAULTS"
"""Environment variable of a server's process: faults from its start, as a JSON list."""

FaultName = Literal[
    "hang",
    "error",
    "cut",
    "die",
    "fewer",
    "tokens",
    "nan",
    "null",
    "other_model",
    "old_version",
    "deaf",
]
"""hang: no answer. error: status 500. cut: the connection ends in the middle of the answer.
die: the process ends by SIGKILL while it answers. fewer: a sample is missing. tokens: a
log-probability is missing. nan, null: one is not a number. other_model: answers come from a model
of another name. old_version: the version that is reported never changes. deaf: weights are
acknowledged and not loaded."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong, where, and how often."""

    name: FaultName
    path: str = ""
    """Requests whose path begins with it; empty: all."""
    times: int | None = 1
    """Answers that it spoils; None: all of them."""
    after: int = 0
    """Answers that it leaves alone first."""


@final
class Faults:
    """The faults of a server; each answer uses up those that meet it."""

    def __init__(self, first: list[Fault] | None = None) -> None:
        self._lock = threading.Lock()
        self._left = [[fault, fault.after, fault.times] for fault in first or []]
        self.over = threading.Event()
        """Set when hanging answers may end."""

    @classmethod
    def from_environment(cls) -> "Faults":
        """Those that the environment names."""
        given = json.loads(os.environ.get(FAULTS_VARIABLE, "[]"))
        return cls([Fault(**fault) for fault in given])

    def plan(self, fault: Fault) -> None:
        """From now on, this happens."""
        with self._lock:
            self._left.append([fault, fault.after, fault.times])

    def clear(self) -> None:
        """Nothing is spoiled any more, and what hangs goes on."""
        with self._lock:
            self._left = []
        self.over.set()
        self.over = threading.Event()

    def take(self, path: str, *names: FaultName) -> FaultName | None:
        """The fault that spoils this answer, if there is one of these names."""
        with self._lock:
            for entry in self._left:
                fault = cast(Fault, entry[0])
                if fault.name not in names or not path.startswith(fault.path):
                    continue
                if entry[1]:
                    entry[1] = cast(int, entry[1]) - 1
                elif entry[2] is None:
                    return fault.name
                elif entry[2]:
                    entry[2] = cast(int, entry[2]) - 1
                    return fault.name
        return None


@final
class Refusal(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, body: Any) -> None:
        super().__init__(status, body)
        self.status = status
        self.body = body


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """A request that arrived."""

    path: str
    query: Mapping[str, list[str]]
    body: dict[str, Any]

    def option(self, name: str, default: str) -> str:
        """A value of the query."""
        return self.query.get(name, [default])[0]


Route = Callable[[Call], Any]
Spoil = Callable[[FaultName, Any], Any]


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: "_Server"

    def do_GET(self) -> None:
        self._answer("GET")

    def do_POST(self) -> None:
        self._answer("POST")

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing is printed."""

    def _answer(self, method: str) -> None:
        parts = urlsplit(self.path)
        size = int(self.headers.get("Content-Length") or 0)
        raw = self.rfile.read(size)
        faults = self.server.faults
        wire = faults.take(parts.path, "hang", "error", "die")
        if wire == "hang":
            faults.over.wait()
        elif wire == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        elif wire == "error":
            return self._send(500, {"error": {"message": "Internal Server Error"}})
        status, body = self._result(method, parts.path, parts.query, raw)
        if status == 200:
            broken = faults.take(parts.path, "fewer", "tokens", "nan", "null", "other_model")
            broken = broken or faults.take(parts.path, "old_version")
            body = body if broken is None else self.server.spoil(broken, body)
        self._send(status, body, is_cut=faults.take(parts.path, "cut") is not None)
        return None

    def _result(self, method: str, path: str, query: str, raw: bytes) -> tuple[int, Any]:
        try:
            body = json.loads(raw) if raw else {}
        except ValueError as fault:
            return 400, {"error": {"message": f"not JSON: {fault}"}}
        route = self.server.routes.get(f"{method} {path}")
        if route is None:
            is_known = any(name.endswith(f" {path}") for name in self.server.routes)
            return (405, {"detail": "Method Not Allowed"}) if is_known else (404, _MISSING)
        caught: list[BaseException] = []
        with boundary(caught):
            return 200, route(Call(path=path, query=parse_qs(query), body=body))
        fault = caught[0]
        if isinstance(fault, Refusal):
            return fault.status, fault.body
        return 500, {"error": {"message": f"{type(fault).__name__}: {fault}"}}

    def _send(self, status: int, body: Any, *, is_cut: bool = False) -> None:
        is_text = isinstance(body, str)
        data = body.encode() if is_text else json.dumps(body).encode()
        try:
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if is_cut else data)
            self.wfile.flush()
        except OSError:  # the client is gone
            self.close_connection = True
        if is_cut:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)


_MISSING = {"detail": "Not Found"}


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, port: int, routes: Mapping[str, Route], spoil: Spoil, faults: Faults):
        super().__init__(("127.0.0.1", port), _Handler)
        self.routes = routes
        self.spoil = spoil
        self.faults = faults

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of the server."""


@final
class JsonServer:
    """Serves routes (`METHOD /path` -> function) on a thread until it is closed."""

    def __init__(
        self, routes: Mapping[str, Route], *, spoil: Spoil, faults: Faults, port: int = 0
    ) -> None:
        """Port 0 takes any that is free. `/test/fault` and `/test/clear` switch faults."""
        control: dict[str, Route] = {
            "POST /test/fault": lambda call: faults.plan(Fault(**call.body)),
            "POST /test/clear": lambda _call: faults.clear(),
        }
        self.faults = faults
        self._server = _Server(port, {**routes, **control}, spoil, faults)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(
            target=lambda: self._server.serve_forever(poll_interval=0.02),
            name="peer server",
            daemon=True,
        )
        self._thread.start()

    def wait(self) -> None:
        """Until another thread closes it."""
        self._thread.join()

    def close(self) -> None:
        """Stop to listen."""
        self.faults.clear()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
