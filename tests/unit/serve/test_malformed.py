"""500 malformed requests: always a 4xx that names the field, and a server that goes on.

A table of wrong values for every field of every endpoint, whole bodies that are no JSON object, and
bodies that `hypothesis` makes up. After each part the server must answer as before.
"""

import json
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luyen.base.errors import printable
from tests.serving import JSON, Running, running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "1+1="}]
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": USER, "max_tokens": 2},
    TEXT: {"prompt": "1+1=", "max_tokens": 2},
    "/tokenize": {"prompt": "1"},
    "/detokenize": {"tokens": [5]},
    "/v1/score": {},
}

DEEP: Any = {}
for _ in range(50):
    DEEP = {"a": DEEP}
NO_NUMBERS = ["1", "", True, [], {}, [1], "NaN"]
NO_TEXTS = [1, 1.5, True, [], {}, [None]]
NO_FLAGS = [0, 1, "true", [], {}]
HUGE = 10**400


def number(*more: Any) -> list[Any]:
    return [*NO_NUMBERS, *more]


SHARED: dict[str, list[Any]] = {
    "model": [*NO_TEXTS, "gpt-4", "", "builtin://arithmetic\0", "x" * 5000],
    "n": number(0, -1, 129, 10**9, HUGE, 1.5, 1e308),
    "max_tokens": number(-1, 513, 10**9, HUGE, 1.5),
    "min_tokens": number(-1, 10**9, 3),
    "temperature": number(-0.1, 2.1, 1e308, HUGE),
    "top_p": number(0, -1, 1.1, HUGE),
    "top_k": number(-2, 1.5, 2**40, HUGE),
    "min_p": number(-0.1, 1.1),
    "stop": [1, True, {}, [1], [[]], "", [""], ["a"] * 17, "x" * 257, ["ok", None]],
    "stop_token_ids": [1, "1", {}, [-1], [128], [1.5], ["1"], [True], list(range(33)), [HUGE]],
    "ignore_eos": NO_FLAGS,
    "seed": number(2**63, -(2**63) - 1, 0.5, HUGE),
    "stream": NO_FLAGS,
    "stream_options": [1, "x", [], {"include_usage": 1}, {"nix": True}, {}],
    "skip_special_tokens": NO_FLAGS,
    "return_token_ids": NO_FLAGS,
    "return_tokens_as_token_ids": NO_FLAGS,
    "frequency_penalty": number(0.5, -2),
    "presence_penalty": number(0.5, -2),
    "repetition_penalty": number(1.1, 0),
    "logit_bias": [{"5": 1}, [], 1, "x"],
    "prompts": ["a"],
    "Temperature": [1],
    "": [1],
    "\u202e\x1b[2J": [1],
    "k" * 3000: [1],
    "__proto__": [{}],
}
PART: Any = {"type": "image_url", "image_url": {"url": "http://127.0.0.1/x"}}
CALL: Any = {"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}
MESSAGES: list[Any] = [
    1,
    "hi",
    {},
    [],
    [1],
    ["hi"],
    [{}],
    [{"role": "user"}],
    [{"content": "hi"}],
    [{"role": "god", "content": "hi"}],
    [{"role": "user", "content": 1}],
    [{"role": "user", "content": None}],
    [{"role": "user", "content": [1]}],
    [{"role": "user", "content": [PART]}],
    [{"role": "user", "content": [{"type": "text"}]}],
    [{"role": "user", "content": "hi", "tool_calls": []}],
    [{"role": "user", "content": "hi", "nix": 1}],
    [{"role": "user", "content": "hi", "name": 1}],
    [{"role": "user", "content": "hi", "name": DEEP}],
    [{"role": "tool", "content": "hi"}],
    [{"role": "tool", "content": "hi", "tool_call_id": "x"}],
    [{"role": "assistant", "tool_calls": 1}],
    [{"role": "assistant", "tool_calls": [1]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}],
    [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": []}}]}],
    [CALL, {"role": "tool", "content": "hi", "tool_call_id": 5}],
    [{"role": "user", "content": "1" * 2000}],
    [{"role": "user", "content": "1"}] * 600,
]
TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
FIELDS: dict[str, dict[str, list[Any]]] = {
    CHAT: {
        **SHARED,
        "messages": MESSAGES,
        "tools": [1, "x", {}, [1], [{}], [{"type": "function"}], [{"function": {}}], [TOOL, TOOL]],
        "tool_choice": [1, "any", {}, [], "required", {"type": "x"}, {"function": {"name": 1}}],
        "parallel_tool_calls": NO_FLAGS,
        "response_format": [
            1,
            "json",
            {},
            [],
            {"type": "xml"},
            {"type": "json_schema"},
            {"type": "json_schema", "json_schema": {"schema": 1}},
            {"type": "json_schema", "json_schema": {"schema": {"type": "nix"}}},
            {"type": "json_schema", "json_schema": {"schema": {"$ref": "http://127.0.0.1/x"}}},
            {"type": "json_schema", "json_schema": {"schema": {"pattern": "("}}},
        ],
        "max_completion_tokens": number(0, -1, 513, HUGE, 3),
        "logprobs": NO_FLAGS,
        "top_logprobs": number(-1, 21, 3),
        "modalities": [["audio"], "text", [], 1],
        "functions": [[]],
        "function_call": ["auto"],
        "audio": [{}],
        "web_search_options": [{}],
        "prediction": [{}],
    },
    TEXT: {
        **SHARED,
        "prompt": [
            1,
            True,
            {},
            [],
            "",
            [""],
            [[]],
            [1.5],
            [-1],
            [128],
            [HUGE],
            [True],
            ["a", 1],
            [1, "a"],
            [[1], "", [2]],
            [[1], [999]],
            "1" * 600,
            [5] * 600,
            ["a"] * 1025,
            [None],
        ],
        "logprobs": number(-1, 21, 1.5),
        "echo": NO_FLAGS,
        "best_of": number(0, -1, 129, 2),
        "suffix": [*NO_TEXTS, "x"],
    },
    "/tokenize": {
        "prompt": [*NO_TEXTS, "1" * 1_000_001],
        "messages": [USER, 1],
        "add_special_tokens": [*NO_FLAGS, True],
        "return_token_strs": NO_FLAGS,
        "nix": [1],
    },
    "/detokenize": {"tokens": [1, "5", {}, [], [-1], [128], [1.5], [HUGE]], "nix": [1]},
    "/v1/score": {"messages": [USER]},
}
CASES = [
    (path, name, value)
    for path, fields in FIELDS.items()
    for name, values in fields.items()
    for value in values
]
BODIES = [
    b"",
    b" ",
    b"null",
    b"[]",
    b"7",
    b'"x"',
    b"{",
    b"{}}",
    b"{'a': 1}",
    b'{"a": 1,}',
    b'{"prompt": "a", "prompt": "b"}',
    b'{"temperature": NaN, "prompt": "a"}',
    b'{"temperature": Infinity, "prompt": "a"}',
    b'{"prompt": "\xff\xfe"}',
    b'{"prompt": "\\ud800"}',
    b"\xef\xbb\xbf{}",
    b'{"prompt": "a"} {"prompt": "b"}',
    b"[" * 100_000,
    b'{"a":' * 20_000,
    b'{"prompt": ' + b"[" * 70 + b"]" * 70 + b"}",
    b'{"seed": ' + b"9" * 5000 + b', "prompt": "a"}',
    b"\0" * 100,
    b"prompt=a&n=2",
]


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running() as found:
        yield found


def refused(server: Running, path: str, raw: bytes) -> tuple[list[str], str]:
    """What is wrong with the reply to a malformed request, and the field that it names."""
    reply = server.send("POST", path, raw, JSON)
    if not 400 <= reply.status < 500:
        return [f"status {reply.status}"], ""
    error = reply.error
    problems = [] if error["param"] else ["no field"]
    if set(error) != {"message", "type", "param", "code"}:
        problems.append(f"keys {sorted(error)}")
    if len(reply.raw) > 3000:
        problems.append(f"{len(reply.raw)} bytes")
    words = ("Traceback", "/src/", "site-packages", "actor_rollout_ref")
    return problems + [word for word in words if word in error["message"]], error["param"]


def names(param: str, field: str, path: str) -> bool:
    """Whether an error is about the field, or about something inside of it."""
    wanted = {printable(field)[:100] or "(empty)"}
    if path == "/v1/score":
        wanted |= {"url"}  # there is no such endpoint for a policy
    return param.startswith(tuple(wanted))


def is_well(server: Running) -> bool:
    reply = server.complete("12+34=", temperature=0)
    return reply.status == 200 and reply.body["choices"][0]["finish_reason"] == "stop"


def test_the_table_is_long_enough():
    assert len(CASES) >= 500


@pytest.mark.parametrize("path", FIELDS)
def test_every_wrong_value_is_refused_with_the_name_of_its_field(server: Running, path: str):
    wrong: list[str] = []
    for _, name, value in [case for case in CASES if case[0] == path]:
        raw = json.dumps({**BASE[path], name: value}).encode()
        problems, param = refused(server, path, raw)
        if not problems and not names(param, name, path):
            problems = [f"names {param}"]
        wrong += [f"{name[:40]}={str(value)[:60]}: {problem}" for problem in problems]
    assert wrong == []
    assert is_well(server)


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_bodies_that_are_no_object_are_refused(server: Running, path: str):
    found = {str(raw[:30]): refused(server, path, raw)[0] for raw in BODIES}
    assert {raw: problems for raw, problems in found.items() if problems} == {}
    assert is_well(server)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted({*FIELDS[CHAT], *FIELDS[TEXT]})) | st.text(max_size=12)


@settings(max_examples=120, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([CHAT, TEXT]), st.dictionaries(NAMES, VALUES, max_size=4))
def test_made_up_bodies_are_answered_or_refused(server: Running, path: str, body: Any):
    reply = server.send("POST", path, json.dumps({**BASE[path], **body}).encode(), JSON)
    assert reply.status in (200, 400, 404), reply.raw
    if reply.status != 200:
        assert reply.error["param"] is not None


def test_methods_paths_and_broken_http_are_refused(server: Running):
    for method, path, status in [
        ("GET", CHAT, 405),
        ("DELETE", TEXT, 405),
        ("POST", "/v1/models", 405),
        ("GET", "/", 404),
        ("GET", "/v1/../../etc/passwd", 404),
        ("GET", "/docs", 404),
        ("GET", "/openapi.json", 404),
        ("POST", "/v1/embeddings", 404),
        ("GET", "/v1/models/nix", 404),
    ]:
        reply = server.send(method, path, b"{}" if method == "POST" else None, JSON)
        assert (reply.status, reply.error["type"]) == (status, "invalid_request_error"), path
    for raw in (b"\0\1\2\r\n\r\n", b"GET\r\n\r\n", b"POST / HTTP/9.9\r\n\r\n", b"A" * 200_000):
        with socket.create_connection(("127.0.0.1", server.port)) as connection:
            connection.settimeout(10)
            connection.sendall(raw)
            with suppress(OSError):  # the server may have closed it already
                connection.shutdown(socket.SHUT_WR)
            head = connection.recv(100)
            assert head == b"" or head.startswith(b"HTTP/1.1 4"), head
    assert is_well(server)


def test_clients_that_hang_up_early_leave_nothing_behind(server: Running):
    body = json.dumps({"prompt": "1+1=", "ignore_eos": True, "max_tokens": 500}).encode()
    head = (
        f"POST {TEXT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    ).encode()
    whole = head + body
    for end in (1, 20, len(head) - 2, len(head), len(head) + 5, len(whole) - 1, len(whole)):
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", server.port)) as connection:
                connection.sendall(whole[:end])
    assert is_well(server)
    deadline = time.monotonic() + 20
    while server.service.dispatcher.open_sequences and time.monotonic() < deadline:
        time.sleep(0.02)
    assert server.service.dispatcher.open_sequences == 0
