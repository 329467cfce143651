"""A server of this process for tests, and plain HTTP requests to it."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from luyen.rollout.protocol import RolloutEngine
from luyen.serve.access import Keyring
from luyen.serve.app import Gate, build_app
from luyen.serve.dispatch import ServeLimits
from luyen.serve.model import ServedModel, build_engine, open_model
from luyen.serve.server import Access, open_socket, uvicorn_server
from luyen.serve.service import Service
from luyen.serve.serving_thread import ServingThread

JSON = {"Content-Type": "application/json"}
MODEL = "builtin://arithmetic"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reply:
    """What came back. Example: Reply(status=200, headers={}, raw=b"")."""

    status: int
    """HTTP status."""
    headers: Mapping[str, str]
    """Headers, names in lower case."""
    raw: bytes
    """The body."""

    @property
    def body(self) -> Any:
        """The body as JSON."""
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object."""
        return self.body["error"]


def send(
    port: int, method: str, path: str, body: bytes | None, headers: Mapping[str, str]
) -> Reply:
    """One request over a connection of its own."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=60)
    try:
        connection.request(method, path, body=body, headers=dict(headers))
        got = connection.getresponse()
        found = {name.lower(): value for name, value in got.getheaders()}
        return Reply(status=got.status, headers=found, raw=got.read())
    finally:
        connection.close()


def post_json(port: int, path: str, body: Any, **headers: str) -> Reply:
    """A POST request; bytes are sent as they are."""
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    return send(port, "POST", path, raw, {**JSON, **headers})


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A server that runs. Example: see `running`."""

    port: int
    """Its port on the loopback interface."""
    service: Service
    """What it serves."""
    engine: ServingThread
    """Its engine."""

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self.port}"

    def send(self, method: str, path: str, body: bytes | None = None, headers: Any = None) -> Reply:
        """One request over a connection of its own."""
        return send(self.port, method, path, body, headers or {})

    def get(self, path: str, **headers: str) -> Reply:
        """A GET request."""
        return self.send("GET", path, headers=headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        """A POST request; bytes are sent as they are."""
        return post_json(self.port, path, body, **headers)

    def chat(self, content: str = "12+34=", **fields: Any) -> Reply:
        """A chat of one message."""
        messages = [{"role": "user", "content": content}]
        return self.post("/v1/chat/completions", {"messages": messages, **fields})

    def complete(self, prompt: Any = "12+34=", **fields: Any) -> Reply:
        """A completion."""
        return self.post("/v1/completions", {"prompt": prompt, **fields})


@contextmanager
def running(
    model: str | ServedModel = MODEL,
    *,
    limits: ServeLimits | None = None,
    keys: tuple[str, ...] = (),
    admin_keys: tuple[str, ...] = (),
    engine_of: Any = build_engine,
) -> Iterator[Running]:
    """A server on a free port, with its own event loop on a thread."""
    if isinstance(model, str):
        model = open_model(model, name=None, overrides=(), is_trusted=False)
    engine = ServingThread(model, engine_of)
    engine.start()
    service = Service(engine, limits or ServeLimits(), is_trusted=False)
    access = Access(
        host="127.0.0.1", port=0, keys=Keyring.of(keys), admin_keys=Keyring.of(admin_keys)
    )
    with serving(service, access) as port:
        yield Running(port=port, service=service, engine=engine)


@contextmanager
def serving(service: Any, access: Access) -> Iterator[int]:
    """The port of a service that runs on a thread."""
    opened = open_socket(access)
    app = build_app(service, Gate(keys=access.keys, admin_keys=access.admin_keys))
    server = uvicorn_server(app, drain_s=5)
    thread = threading.Thread(target=lambda: server.run(sockets=[opened]))
    thread.start()
    try:
        yield opened.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        opened.close()


class SlowEngine:
    """An engine whose passes take a while, and which counts aborted requests."""

    def __init__(self, inner: RolloutEngine, seconds: float) -> None:
        self.inner = inner
        self.seconds = seconds
        self.aborted: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def advance(self) -> Any:
        time.sleep(self.seconds)
        return self.inner.advance()

    def abort(self, request: str, sample: int | None = None) -> Any:
        self.aborted.append(request)
        return self.inner.abort(request, sample)
