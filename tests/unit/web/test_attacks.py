"""The attacks that `luyen serve` was tried with, on the studio: requests, paths, bodies."""

import gzip
import json
import re
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.unit.web.server import Client, serving

PATH = "/api/v1/check"
JSON = "Content-Type: application/json"
CHANGE = "X-Luyen-Studio: 1"
BODY = json.dumps({"yaml": "trainer: {stage: rl}"}).encode()


@pytest.fixture(scope="module")
def studio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    with serving(tmp_path_factory.mktemp("runs")) as found:
        yield found


@pytest.fixture(autouse=True)
def _still_serves(studio: Client) -> Iterator[None]:
    """The studio that a test attacked answers after it."""
    yield
    assert studio.get("/session")["read_only"] is False


def raw(studio: Client, data: bytes, *, closes: bool = True) -> bytes:
    """What comes back for bytes as they are; empty where the connection was closed."""
    with socket.create_connection(("127.0.0.1", studio.port), timeout=5) as one:
        found = b""
        try:
            one.sendall(data)
            if closes:
                one.shutdown(socket.SHUT_WR)
            while piece := one.recv(65536):
                found += piece
        except OSError:  # late, or closed by the server
            pass
        return found


def statuses(reply: bytes) -> list[int]:
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", reply)]


def request(
    studio: Client,
    *headers: str,
    body: bytes = b"",
    path: str = PATH,
    method: str = "POST",
    is_known: bool = True,
) -> bytes:
    known = [f"Authorization: Bearer {studio.access.token}"] if is_known else []
    first = [f"{method} {path} HTTP/1.1", f"Host: 127.0.0.1:{studio.port}"]
    return "\r\n".join([*first, *known, *headers, "", ""]).encode("latin-1") + body


@pytest.mark.parametrize(
    "headers",
    [
        (f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked"),
        ("Content-Length: 3", f"Content-Length: {len(BODY)}"),
        (f"Content-Length: {len(BODY)}", "Transfer-Encoding: chunked, identity"),
        ("Content-Length: -1",),
        ("Content-Length: 0x10",),
        (f"Content-Length : {len(BODY)}",),
    ],
)
def test_lengths_that_contradict_smuggle_no_second_request(
    studio: Client, headers: tuple[str, ...]
):
    inner = request(studio, path="/api/v1/runs", method="GET")
    found = statuses(raw(studio, request(studio, JSON, CHANGE, *headers, body=BODY + inner)))
    assert all(400 <= status < 500 for status in found)  # none: closed without an answer


def test_requests_of_one_connection_are_let_in_one_by_one(studio: Client):
    first = request(studio, path="/api/v1/runs", method="GET")
    second = request(studio, path="/api/v1/runs", method="GET", is_known=False)
    assert statuses(raw(studio, first + second, closes=False)) == [200, 401]


def test_headers_without_end_are_refused(studio: Client):
    found = raw(studio, request(studio, JSON, "X-Long: " + "y" * 300_000, "Content-Length: 0"))
    assert all(400 <= status < 500 for status in statuses(found))


def test_a_packed_body_is_not_unpacked(studio: Client):
    packed = gzip.compress(b" " * 30_000_000 + BODY)
    sent = request(
        studio, JSON, CHANGE, "Content-Encoding: gzip", f"Content-Length: {len(packed)}",
        body=packed,
    )  # fmt: skip
    assert statuses(raw(studio, sent, closes=False))[0] in (400, 413, 415, 422)


@pytest.mark.parametrize(
    "path",
    [
        "//api/v1/runs",
        "/x/../api/v1/runs",
        "/api%2fv1%2fruns",
        "/API/v1/runs",
        "/api/v1/runs/",
        "/api/v1/runs;x=/",
        "/%2e%2e/api/v1/runs",
        "/index.html/../api/v1/runs",
        "/studio.js/%2e%2e/%2e%2e/app.py",
    ],
)
def test_no_spelling_of_a_path_passes_without_the_token(studio: Client, path: str):
    reply = raw(studio, request(studio, path=path, method="GET", is_known=False))
    assert statuses(reply) == [401]
    assert b'"runs"' not in reply
    known = raw(studio, request(studio, path=path, method="GET"))
    assert b"def build_app" not in known


@pytest.mark.parametrize(
    "spelling", ["Bearer", "Bearer ", "Basic TOKEN", "Bearer TOKENx", "TOKEN", "Bearer TOKEN TOKEN"]
)
def test_nothing_near_the_token_is_the_token(studio: Client, spelling: str):
    value = spelling.replace("TOKEN", studio.access.token)
    reply = studio.ask("/api/v1/runs", headers={"Authorization": value}, is_known=False)
    assert reply.status == 401
    assert studio.access.token not in reply.body.decode()


def test_a_method_in_a_header_is_no_method(studio: Client):
    headers = {"X-HTTP-Method-Override": "POST"}
    assert studio.ask("/api/v1/exports", headers=headers).status in (404, 405)


@pytest.mark.parametrize(
    "body",
    [
        b'{"yaml": ' + b"[" * 20_000 + b"]" * 20_000 + b"}",
        b'{"yaml": "a", "overrides": [' + b"9" * 20_000 + b"]}",
        b'{"yaml": NaN}',
        b'{"yaml": "a", "yaml": 7}',
        b'\xff\xfe{"yaml": "a"}',
        b'{"yaml": "\\ud800"}',
        b'{"yaml": "trainer: {}", "name": "\\ud800"}',
        b'{"yaml": "trainer: {}", "overrides": ["trainer.seed=\\ud800"]}',
        b'{"sources": [{"url": "http://127.0.0.1:9/\\ud800"}]}',
        b'{"yaml": "a: &a [*a]"}',
        b'{"yaml": "a: !!python/object/apply:os.system [id]"}',
        json.dumps({"yaml": "a: &a [x,x]\nb: &b [*a,*a]\n" + "".join(
            f"k{i}: &k{i} [*{'b' if i == 0 else f'k{i - 1}'},*b]\n" for i in range(30)
        )}).encode(),
        b"null",
        b"",
    ],
)  # fmt: skip
def test_bodies_at_the_edges_are_answered_or_refused(studio: Client, body: bytes):
    headers = {"Content-Type": "application/json", "X-Luyen-Studio": "1"}
    for path in (PATH, "/api/v1/jobs", "/api/v1/chats", "/api/v1/servers"):
        reply = studio.ask(path, method="POST", headers=headers, body=body)
        assert reply.status in (200, 400, 422), reply.body[:300]
        assert b"Traceback" not in reply.body
        assert b"site-packages" not in reply.body


def test_idle_slow_and_left_connections_keep_no_one_out(studio: Client):
    with ExitStack() as held:
        for number in range(200):
            address = ("127.0.0.1", studio.port)
            one = held.enter_context(socket.create_connection(address, timeout=5))
            if number % 4 == 1:  # a body that drips
                one.sendall(request(studio, JSON, CHANGE, "Content-Length: 1000"))
            elif number % 4 == 2:  # a header that drips
                one.sendall(b"GET /api/v1/runs HTTP/1.1\r\nHost: 127")
            elif number % 4 == 3:  # a stream that is not read
                one.sendall(request(studio, path="/api/v1/events", method="GET"))
        assert studio.get("/runs")["runs"] == []
        assert studio.ask("/").status == 200


def test_pages_and_errors_show_no_token_and_no_file(studio: Client):
    pages = [
        studio.ask("/"),
        studio.ask("/api/v1/session"),
        studio.ask("/api/v1/docs"),
        studio.ask("/api/v1/runs/a%0d%0aSet-Cookie:%20b"),
        studio.ask("/api/v1/runs/../../etc/passwd"),
        studio.ask("/", is_known=False),
    ]
    for page in pages:
        text = page.body.decode()
        assert studio.access.token not in text
        assert "site-packages" not in text
        assert "set-cookie" not in page.headers


def test_a_job_names_no_option_of_a_command(studio: Client, tmp_path: Path):
    """Text of requests is never a word that a command line reads as an option."""
    for output in ("--help", "-o", "--trust"):
        body = {"run_id": "a-00000000", "output": output}
        assert studio.post("/exports", body).status == 404
    for model in ("--trust", "-x"):
        body = {"sources": [{"url": "http://127.0.0.1:9/v1", "model": model}]}
        chat = studio.post("/chats", body).json["id"]
        reply = studio.post(f"/chats/{chat}/messages", {"message": "a"})
        assert b"event: error" in reply.body
        assert b"no answer from the endpoint" in reply.body
        studio.post(f"/chats/{chat}/close", {})
    assert list(tmp_path.iterdir()) == []
