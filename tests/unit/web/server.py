"""A studio that listens in a thread of the test, and requests to it."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from luyen.serve.server import Access, open_socket, uvicorn_server
from luyen.studio.screens.server_cache import Studio, StudioOptions
from luyen.web.access import StudioAccess
from luyen.web.app import build_app


class Reply(NamedTuple):
    """What a request got."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body, parse_constant=_refuse)


def _refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


class Client(NamedTuple):
    """Sends requests with the token, unless other headers are given."""

    port: int
    access: StudioAccess
    studio: Studio

    def ask(
        self,
        path: str,
        *,
        method: str = "GET",
        headers: Mapping[str, str] | None = None,
        body: bytes | None = None,
        is_known: bool = True,
    ) -> Reply:
        sent = {"Authorization": f"Bearer {self.access.token}"} if is_known else {}
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request(method, path, body=body, headers={**sent, **(headers or {})})
            found = connection.getresponse()
            named = {name.lower(): value for name, value in found.getheaders()}
            return Reply(found.status, named, found.read())
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        reply = self.ask(f"/api/v1{path}")
        assert reply.status == 200, reply.body
        return reply.json

    def post(self, path: str, value: Any) -> Reply:
        headers = {"Content-Type": "application/json", "X-Luyen-Studio": "1"}
        body = json.dumps(value).encode()
        return self.ask(f"/api/v1{path}", method="POST", headers=headers, body=body)

    def only_run(self) -> str:
        [row] = self.get("/runs")["runs"]
        return row["id"]


@contextmanager
def serving(folder: Path, **options: Any) -> Iterator[Client]:
    """A studio over a folder."""
    opened = open_socket(Access(host="127.0.0.1", port=0))
    port = opened.getsockname()[1]
    access = StudioAccess(port=port)
    studio = Studio(StudioOptions(folder=folder, **options))
    server = uvicorn_server(build_app(studio, access), drain_s=1)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [opened]}, daemon=True)
    thread.start()
    end = time.monotonic() + 30
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    assert server.started
    try:
        yield Client(port, access, studio)
    finally:
        server.should_exit = True
        thread.join(30)
        opened.close()
        assert not thread.is_alive()


def until(found: Any, *, seconds: float = 30.0) -> Any:
    """The first value that is not None or False."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = found()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")
