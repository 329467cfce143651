"""Folders and logs of servers: nothing is left behind, and nothing grows without end."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from luyen.rollout.servers import process
from luyen.rollout.servers.temporary import bound_log, sweep, temporary_folder
from tests.unit.rollout.servers.test_process import made

ENDED = 2**22 + 1
"""No process has this id: it is beyond what Linux gives."""


def test_folders_of_processes_that_ended_are_removed_and_no_others(tmp_path: Path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_text("")
    left = tmp_path / f"luyen-server-{ENDED}-abc"
    (left / "model").mkdir(parents=True)
    running = tmp_path / f"luyen-server-{os.getpid()}-abc"
    other = tmp_path / "luyen-server-notes"
    for folder in (running, other):
        folder.mkdir()
    link = tmp_path / f"luyen-server-{ENDED}-def"
    link.symlink_to(outside)
    sweep(tmp_path)
    assert not left.exists()
    assert running.is_dir()
    assert other.is_dir()
    assert (outside / "kept").is_file()


def test_a_folder_is_removed_with_its_process(tmp_path: Path):
    code = "from luyen.rollout.servers.temporary import temporary_folder as t; "
    code += "f = t(); (f / 'a').write_text('x'); print(f)"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert Path(done.stdout.strip()).parent == tmp_path
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_private_and_named_by_its_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = temporary_folder()
    assert folder.name.startswith(f"luyen-server-{os.getpid()}-")
    assert folder.stat().st_mode & 0o077 == 0


def test_a_long_log_keeps_its_end_and_goes_on(tmp_path: Path):
    path = tmp_path / "server.log"
    with path.open("ab") as writer:
        writer.write(b"a" * 500 + b"the end")
        writer.flush()
        bound_log(path, most=507, kept=7)
        assert path.stat().st_size == 507
        bound_log(path, most=506, kept=7)
        writer.write(b" and more")
    assert path.read_bytes() == b"(what came before was cut)\nthe end and more"


def test_a_server_that_runs_has_its_log_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "_LOG_EVERY_S", -1.0)
    monkeypatch.setattr(process, "bound_log", lambda path: bound_log(path, most=1000, kept=10))
    code = "import http.server, sys; print('x' * 5000, flush=True);"
    code += "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])),"
    code += " http.server.SimpleHTTPRequestHandler).serve_forever()"
    with made(tmp_path, code) as server:
        assert server.start()
        log = tmp_path / "logs" / "server.log"
        assert log.stat().st_size > 5000
        assert not server.start()
        assert log.stat().st_size < 1000
