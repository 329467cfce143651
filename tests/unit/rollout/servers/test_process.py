"""A server of ours: it starts, is started again after a death, and ends with the run."""

import http.server
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.rollout.servers.connection import ServerConnection
from luyen.rollout.servers.dialect import HttpCall
from luyen.rollout.servers.guard import guarded
from luyen.rollout.servers.process import ServerProcess, free_port

SERVE = "import http.server, subprocess, sys; subprocess.Popen(['sleep', '600']);"
SERVE += "print('serving', flush=True);"
SERVE += "http.server.ThreadingHTTPServer(('127.0.0.1', int(sys.argv[1])),"
SERVE += " http.server.SimpleHTTPRequestHandler).serve_forever()"


@contextmanager
def made(folder: Path, code: str, *, timeout_s: float = 20.0) -> Iterator[ServerProcess]:
    connection = ServerConnection(lambda: server.url, timeout_s=5.0)
    server = ServerProcess(
        lambda port: [sys.executable, "-S", "-c", code, str(port)],
        prepare=lambda: {"MARK": "1"},
        log=folder / "logs" / "server.log",
        is_ready=lambda: connection.is_ready(HttpCall(path="/", method="GET")),
        start_timeout_s=timeout_s,
    )
    try:
        yield server
    finally:
        server.stop()
        connection.close()


def members(group: int) -> list[int]:
    """Living processes of a group."""
    found: list[int] = []
    for entry in Path("/proc").iterdir():
        try:
            words = (entry / "stat").read_text().rpartition(")")[2].split()
        except (OSError, IndexError):
            continue
        if entry.name.isdigit() and words[0] != "Z" and int(words[2]) == group:
            found.append(int(entry.name))
    return found


def is_gone(group: int) -> bool:
    deadline = time.monotonic() + 10
    while members(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not members(group)


def test_a_server_is_started_once_and_again_after_a_death(tmp_path: Path):
    with made(tmp_path, SERVE) as server:
        assert server.start()
        assert not server.start()
        first = server.pid
        assert first is not None
        assert len(members(first)) == 3
        os.killpg(first, signal.SIGKILL)
        assert is_gone(first)
        assert server.start()
        second = server.pid
        assert second is not None
        assert second != first
        assert server.last_words().count("serving") == 2
    assert is_gone(second)
    assert server.pid is None


def test_a_server_that_ends_at_once_is_shown_with_its_last_words(tmp_path: Path):
    code = "import sys; print('no such model'); sys.exit(3)"
    with made(tmp_path, code) as server, pytest.raises(UserError) as caught:
        server.start()
    assert "code 3" in str(caught.value)
    assert "no such model" in str(caught.value)


def test_a_server_that_never_answers_is_ended(tmp_path: Path):
    code = "import time; time.sleep(600)"
    with made(tmp_path, code, timeout_s=1.0) as server:
        with pytest.raises(UserError, match="no answer in 1 s"):
            server.start()
        assert server.pid is None


def test_the_guard_ends_a_server_whose_run_was_killed():
    code = "import subprocess, sys, time;"
    code += f"p = subprocess.Popen({guarded(['sleep', '600'])!r}, stdin=subprocess.PIPE,"
    code += " process_group=0); print(p.pid, flush=True); time.sleep(600)"
    run = subprocess.Popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    group = int(run.stdout.readline())
    deadline = time.monotonic() + 10
    while len(members(group)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(members(group)) == 2
    run.kill()
    run.wait()
    run.stdout.close()
    assert is_gone(group)


def test_a_process_that_took_the_port_first_is_never_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """It answers as a healthy server would; the server goes to another port."""
    asked: list[str] = []

    class Impostor(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Impostor) as impostor:
        threading.Thread(target=impostor.serve_forever, daemon=True).start()
        taken = impostor.server_address[1]
        ports = iter([taken, free_port()])
        monkeypatch.setattr("luyen.rollout.servers.process.free_port", lambda: next(ports))
        with made(tmp_path, SERVE) as server:
            assert server.start()
            assert server.url != f"http://127.0.0.1:{taken}"
            assert server.is_listening()
        impostor.shutdown()
    assert asked == []


def test_a_machine_whose_free_ports_are_all_taken_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        taken = impostor.getsockname()[1]
        monkeypatch.setattr("luyen.rollout.servers.process.free_port", lambda: taken)
        with made(tmp_path, SERVE) as server:
            with pytest.raises(UserError, match="another process listened"):
                server.start()
            assert server.pid is None


def test_a_process_that_takes_the_port_of_a_dead_server_is_noticed(tmp_path: Path):
    with made(tmp_path, SERVE) as server:
        server.start()
        pid, port = server.pid, int(server.url.rpartition(":")[2])
        assert pid is not None
        os.killpg(pid, signal.SIGKILL)
        assert is_gone(pid)
        assert not server.is_listening()
        with socket.create_server(("127.0.0.1", port)):
            assert not server.is_listening()
