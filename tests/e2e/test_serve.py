"""`luyen serve` as a process: it starts, answers, drains, and ends with the right exit code."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from luyen.cli.serve import EngineOptions, demand_extra
from tests.e2e.tiny import luyen

URL = re.compile(r"at http://127\.0\.0\.1:(\d+)/v1")


def started(*words: str, **env: str) -> tuple[subprocess.Popen[str], int]:
    """A server process, and its port once it said that it listens."""
    command = [sys.executable, "-m", "luyen", "serve", "builtin://arithmetic", "--port", "0"]
    process = subprocess.Popen(
        [*command, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, **env},
    )
    assert process.stdout is not None
    said = process.stdout.readline()
    found = URL.search(said)
    if found is None:
        process.kill()
    assert found is not None, said + process.stdout.read()
    return process, int(found[1])


def chat(port: int, **fields: Any) -> tuple[int, Any]:
    body = {"messages": [{"role": "user", "content": "12+34="}], **fields}
    headers = {"Content-Type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())


def test_ctrl_c_lets_running_requests_finish():
    """SIGTERM ends the server of the examples in docs/serving.md."""
    process, port = started()
    found: list[tuple[int, Any]] = []
    fields = {"ignore_eos": True, "max_tokens": 450}
    asking = threading.Thread(target=lambda: found.append(chat(port, **fields)))
    asking.start()
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=60)
    asking.join()
    assert process.returncode == 130, said
    assert "Traceback" not in said
    assert found[0][0] == 200
    assert found[0][1]["usage"]["completion_tokens"] == 450


def test_a_port_that_is_taken_is_said_before_anything_is_loaded():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        done = luyen("serve", "builtin://arithmetic", "--port", port)
    assert done.exit_code == 1
    assert "another process listens there" in str(done.exception)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_other_machines_need_a_key(host: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("LUYEN_API_KEY", raising=False)
    done = luyen("serve", "builtin://arithmetic", "--host", host, "--port", "0")
    assert done.exit_code == 1
    assert "without a key" in str(done.exception)


def test_a_key_file_that_others_can_read_is_refused(tmp_path: Path):
    file = tmp_path / "keys"
    file.write_text("a-key-of-sixteen-characters")
    file.chmod(0o640)
    done = luyen("serve", "builtin://arithmetic", "--api-key-file", str(file))
    assert done.exit_code == 1
    assert "chmod 600" in str(done.exception)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("--max-model-len", "4096"), "reads at most 512"),
        (("--dtype", "int3"), "dtype"),
        (("--tool-format", "nix"), "nix"),
        (("actor_rollout_ref.nix=1",), "nix"),
        (("--host", "no.such.host.invalid"), "--host"),
    ],
)
def test_options_that_cannot_be_met_are_errors(words: tuple[str, ...], why: str):
    done = luyen("serve", "builtin://arithmetic", "--port", "0", *words)
    assert done.exit_code == 1
    assert why in str(done.exception)


def test_a_model_that_is_not_there_is_an_error():
    done = luyen("serve", "runs/nowhere", "--port", "0")
    assert done.exit_code == 1
    assert "no such folder" in str(done.exception)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("luyen.cli.serve.find_spec", lambda name: None)
    with pytest.raises(Exception, match=r"pip install luyen\[serve\]"):
        demand_extra()


def test_options_become_keys():
    assert EngineOptions(dtype="bfloat16", max_model_len=64).overrides() == [
        'actor_rollout_ref.model.dtype="bfloat16"',
        "actor_rollout_ref.rollout.max_model_len=64",
    ]
