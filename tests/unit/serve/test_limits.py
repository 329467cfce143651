"""Access, limits, disconnects and new weights, over plain HTTP."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luyen.serve.dispatch import ServeLimits
from luyen.serve.model import ServedModel, build_engine
from tests.e2e.tiny import random_model
from tests.serving import MODEL, Running, SlowEngine, running

KEY, ADMIN = "a-client-key-of-24-chars", "an-admin-key-of-24-chars"
LIMITS = ServeLimits(max_queue=4, timeout_s=60.0, body_timeout_s=0.3, max_body_bytes=20_000)
HASTY = ServeLimits(timeout_s=0.3)


@pytest.fixture(scope="module")
def engines() -> list[SlowEngine]:
    return []


@pytest.fixture(scope="module")
def server(engines: list[SlowEngine]) -> Iterator[Running]:
    def slow(model: ServedModel) -> Any:
        engines.append(SlowEngine(build_engine(model), 0.01))
        return engines[-1]

    with running(limits=LIMITS, keys=(KEY,), admin_keys=(ADMIN,), engine_of=slow) as found:
        yield found


AUTH = {"Authorization": f"Bearer {KEY}"}
LONG = {"ignore_eos": True, "max_tokens": 400}
BUSY = {"ignore_eos": True, "max_tokens": 60}


def chat(server: Running, **fields: Any) -> Any:
    messages = [{"role": "user", "content": "1+1="}]
    return server.post("/v1/chat/completions", {"messages": messages, **fields}, **AUTH)


def until_idle(server: Running) -> None:
    end = time.monotonic() + 20
    while server.service.dispatcher.open_sequences and time.monotonic() < end:
        time.sleep(0.02)
    assert server.service.dispatcher.open_sequences == 0


def test_health_is_open_and_everything_else_takes_a_key(server: Running):
    assert server.get("/health").body == {"status": "ok"}
    for path in ("/v1/models", "/metrics"):
        assert server.get(path).status == 401
        assert server.get(path, Authorization="Bearer wrong").status == 401
        assert server.get(path, Authorization=f"Basic {KEY}").status == 401
        assert server.get(path, **AUTH).status == 200
    reply = server.post("/v1/chat/completions", {})
    assert (reply.status, reply.error["code"]) == (401, "invalid_api_key")
    assert reply.headers["www-authenticate"] == "Bearer"


def test_clients_cannot_change_weights(server: Running):
    assert server.post("/admin/weights", {"path": MODEL}, **AUTH).status == 401
    assert server.post("/admin/weights", {"path": MODEL}).status == 401


def test_a_full_queue_says_when_to_come_back(server: Running):
    found: list[Any] = []
    busy = threading.Thread(target=lambda: found.append(chat(server, n=4, **BUSY)))
    busy.start()
    end = time.monotonic() + 10
    while server.service.dispatcher.open_sequences < 4 and time.monotonic() < end:
        time.sleep(0.01)
    reply = chat(server)
    assert (reply.status, reply.error["code"]) == (429, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    busy.join()
    assert found[0].status == 200
    assert chat(server, max_tokens=4).status == 200


def test_more_answers_than_the_queue_holds_are_a_wrong_n(server: Running):
    reply = chat(server, n=5)
    assert (reply.status, reply.error["param"]) == (400, "n")


def test_large_and_slow_bodies_are_refused(server: Running):
    large = chat(server, user="x" * 30_000)
    assert (large.status, large.error["code"]) == (413, "body_too_large")
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n{{"
        )
        raw.sendall(head.encode())
        raw.settimeout(10)
        assert raw.recv(100).startswith(b"HTTP/1.1 408")


def test_a_body_without_a_length_has_the_same_limit(server: Running):
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        head = (
            "POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n"
            f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n"
        )
        raw.sendall(head.encode() + b"7530\r\n" + b" " * 0x7530 + b"\r\n0\r\n\r\n")
        raw.settimeout(10)
        assert raw.recv(100).startswith(b"HTTP/1.1 413")


def test_another_content_type_is_refused(server: Running):
    reply = server.send("POST", "/v1/completions", b"{}", {**AUTH, "Content-Type": "text/plain"})
    assert (reply.status, reply.error["param"]) == (415, "Content-Type")


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_goes_away_aborts_its_request(
    server: Running, engines: list[SlowEngine], is_stream: bool
):
    until_idle(server)
    before = len(engines[-1].aborted)
    body = json.dumps({"prompt": "1+1=", "stream": is_stream, **LONG}).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
        f"Content-Type: application/json\r\nAuthorization: Bearer {KEY}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", server.port)) as raw:
        raw.sendall(head.encode() + body)
        if is_stream:
            assert raw.recv(20).startswith(b"HTTP/1.1 200")
        else:
            time.sleep(0.1)
    end = time.monotonic() + 3.0  # sooner than the answer is there
    while len(engines[-1].aborted) == before and time.monotonic() < end:
        time.sleep(0.01)
    assert len(engines[-1].aborted) == before + 1
    until_idle(server)


def test_a_request_that_takes_too_long_is_ended():
    def slow(model: ServedModel) -> Any:
        return SlowEngine(build_engine(model), 0.02)

    with running(limits=HASTY, engine_of=slow) as hasty:
        whole = hasty.chat(**LONG)
        assert (whole.status, whole.error["code"]) == (504, "timeout")
        stream = hasty.chat(stream=True, **LONG)
        events = [line for line in stream.raw.decode().split("\n\n") if line]
        assert stream.status == 200
        assert "delta" in events[0]
        assert json.loads(events[-1].removeprefix("data: "))["error"]["code"] == "timeout"
        until_idle(hasty)
        assert hasty.chat(max_tokens=1).status == 200


def test_weights_change_while_it_runs_and_no_answer_mixes_them(server: Running, tmp_path: Path):
    other = random_model(tmp_path / "other")
    admin = {"Authorization": f"Bearer {ADMIN}"}
    fields: dict[str, Any] = {"seed": 1, "ignore_eos": True, "max_tokens": 60, "logprobs": True}
    old = chat(server, **fields).body
    found: list[Any] = []
    running_ = threading.Thread(target=lambda: found.append(chat(server, **fields).body))
    running_.start()
    time.sleep(0.2)
    swapped = server.post("/admin/weights", {"path": str(other)}, **admin)
    assert swapped.status == 200
    running_.join()
    assert found[0]["choices"] == old["choices"]
    assert found[0]["system_fingerprint"] == old["system_fingerprint"]
    new = chat(server, **fields).body
    assert new["system_fingerprint"] == swapped.body["system_fingerprint"]
    assert new["system_fingerprint"] != old["system_fingerprint"]
    assert new["choices"] != old["choices"]
    assert server.post("/admin/weights", {"path": MODEL}, **admin).status == 200
    back = chat(server, **fields).body
    assert (back["choices"], back["system_fingerprint"]) == (
        old["choices"],
        old["system_fingerprint"],
    )


@pytest.mark.parametrize("path", ["nowhere/at/all", "builtin://nix", "builtin://tools", "", 7])
def test_weights_that_do_not_fit_change_nothing(server: Running, path: Any):
    admin = {"Authorization": f"Bearer {ADMIN}"}
    before = server.get("/v1/models", **AUTH).body
    reply = server.post("/admin/weights", {"path": path}, **admin)
    assert reply.status == 400
    assert server.get("/v1/models", **AUTH).body == before
    assert chat(server, max_tokens=4).status == 200


def test_a_host_header_does_not_name_the_path_that_needs_no_key(server: Running):
    for path in ("/v1/models", "/metrics"):
        assert server.get(path, Host="127.0.0.1/health?").status == 401


def test_metrics_count_requests_tokens_and_time(server: Running):
    assert chat(server, max_tokens=3, ignore_eos=True).status == 200
    page = server.get("/metrics", **AUTH).raw.decode()
    for name in (
        'luyen_requests_total{path="/v1/chat/completions",status="200"}',
        "luyen_generated_tokens_total",
        "luyen_prompt_tokens_total",
        "luyen_open_sequences 0.0",
        "luyen_request_seconds_bucket",
        "luyen_first_token_seconds_count",
        "luyen_weight_swaps_total 2.0",
        "luyen_aborted_requests_total",
    ):
        assert name in page


def test_without_keys_only_names_of_this_machine_are_answered():
    with running() as open_server:
        assert open_server.get("/v1/models").status == 200
        assert open_server.get("/v1/models", Host=f"localhost:{open_server.port}").status == 200
        reply = open_server.get("/v1/models", Host="evil.example")
        assert (reply.status, reply.error["param"]) == (421, "Host")
        assert open_server.post("/admin/weights", {"path": MODEL}).status == 403
