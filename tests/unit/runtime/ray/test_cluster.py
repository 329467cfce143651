"""Into a cluster and out of it: nothing is left behind, and nothing of the process is changed."""

import importlib.util
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.runtime.ray.cluster import connect, worker_environment

pytest.importorskip("ray", reason="the extra `ray` is not installed")
ROOT = Path(__file__).parents[4]
GONE_S = 45.0


def descendants(pid: int) -> set[int]:
    """Processes that a process has started, and those that these have."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                words = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            parents[int(entry.name)] = int(words[1])
    found, fresh = set[int](), {pid}
    while fresh:
        fresh = {child for child, parent in parents.items() if parent in fresh} - found
        found |= fresh
    return found


def living(pids: set[int]) -> set[int]:
    """Those that have not ended; one that nobody has looked after yet has."""
    found: set[int] = set()
    for pid in pids:
        stat = Path(f"/proc/{pid}/stat")
        try:
            state = stat.read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.add(pid)
    return found


@pytest.mark.slow  # with ranks, test_session.py does it in every run of the tests
def test_a_controller_that_is_killed_leaves_no_process():
    words = [sys.executable, "-m", "tests.unit.runtime.ray.controller"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as controller:
        try:
            assert controller.stdout is not None
            said, replica = controller.stdout.readline().split()
            started = descendants(controller.pid)
        finally:
            controller.kill()
    assert said == "ready"
    assert int(replica) in started
    assert len(started) > 5
    last = time.monotonic() + GONE_S
    while living(started) and time.monotonic() < last:
        time.sleep(0.1)
    assert living(started) == set()


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "luyen\[ray\]"'):
        connect("local")


def test_an_address_where_nobody_answers_is_told(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UserError, match="no cluster answers there"):
        connect()


def test_the_client_protocol_is_refused():
    with pytest.raises(UserError, match="must be a process of the cluster"):
        connect("ray://somewhere:10001")


def test_workers_compute_exactly_and_see_the_same_modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "path", ["", "/nowhere", str(ROOT / "tests"), *sys.path])
    monkeypatch.setattr("luyen.base.process_setup.platform.machine", lambda: "x86_64")
    monkeypatch.delenv("MKL_CBWR", raising=False)
    found = worker_environment(3)
    assert "STRICT" in found["MKL_CBWR"]
    assert found["OMP_NUM_THREADS"] == "3"
    seen = found["PYTHONPATH"].split(os.pathsep)
    assert seen[:2] == [str(Path.cwd()), str(ROOT / "tests")]
    assert not any(path.startswith(sys.prefix) for path in seen)


def test_nobody_joins_a_cluster_that_merely_happens_to_be_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    own = object()
    monkeypatch.setattr("luyen.runtime.ray.cluster._start_local", lambda *_: own)
    assert connect() is own
