"""A cluster of our own is reached from this machine alone, and leaves nothing behind."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from luyen.base.errors import UserError
from luyen.engine.fsdp import join_ranks, leave_ranks
from luyen.runtime.ray import cluster
from luyen.runtime.ray.cluster import LISTEN, SessionFolder, meeting_place, sweep
from tests.unit.runtime.ray.test_cluster import descendants, living

pytest.importorskip("ray", reason="the extra `ray` is not installed")
ROOT = Path(__file__).parents[4]
LISTENING = "0A"
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
GONE_S = 60.0
JOIN = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1])
print("joined")
"""


def sockets() -> dict[str, tuple[str, int]]:
    """Inode of every listening TCP socket -> its address as the kernel writes it, and its port."""
    found: dict[str, tuple[str, int]] = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == LISTENING:
                address, port = words[1].split(":")
                found[words[9]] = (address, int(port, 16))
    return found


def listening(pids: set[int]) -> dict[tuple[str, int], str]:
    """Where processes listen -> what they are called."""
    known, found = sockets(), dict[tuple[str, int], str]()
    for pid in pids:
        try:
            links = [os.readlink(entry) for entry in Path(f"/proc/{pid}/fd").iterdir()]
            name = Path(f"/proc/{pid}/cmdline").read_text().partition("\0")[0]
        except OSError:  # it has ended
            continue
        inodes = [link[len("socket:[") : -1] for link in links if link.startswith("socket:[")]
        found |= {known[inode]: name for inode in inodes if inode in known}
    return found


def folders(parent: Path) -> list[Path]:
    return list(parent.glob("luyen-ray-*"))


def joining(address: str) -> str:
    """What a process hears that would join with a token of its own."""
    words = [sys.executable, "-c", JOIN, address]
    env = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    joined = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
    assert "joined" not in joined.stdout
    return joined.stderr


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose name leaves room for Ray's sockets."""
    made = Path(f"/tmp/ls-{os.getpid()}")
    made.mkdir(exist_ok=True)
    monkeypatch.setenv("RAY_TMPDIR", str(made))
    return made


def test_nothing_of_a_cluster_listens_beyond_the_loopback_or_outlives_its_controller(short: Path):
    words = [sys.executable, "-m", "tests.unit.runtime.ray.two_ranks"]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True) as controller:
        try:
            assert controller.stdout is not None
            assert controller.stdout.readline() == "ready\n"
            [folder] = folders(short)
            assert folder.stat().st_mode & 0o777 == 0o700
            assert list((folder / "r").glob("session_*")), "Ray's own files are not elsewhere"
            places = listening({controller.pid, *descendants(controller.pid)})
            outside = {where: name for where, name in places.items() if where[0] not in LOOPBACK}
            assert outside == {}
            assert any("gcs_server" in name for name in places.values())
            assert any("raylet" in name for name in places.values())
            gcs = next(port for (_, port), name in places.items() if "gcs_server" in name)
            assert "AuthenticationError" in joining(f"127.0.0.1:{gcs}")
            started = descendants(controller.pid)
        finally:
            controller.kill()
    assert len(started) > 5
    last = time.monotonic() + GONE_S
    while (folders(short) or living(started)) and time.monotonic() < last:
        time.sleep(0.1)
    assert folders(short) == []
    assert living(started) == set()
    short.rmdir()


def test_a_folder_whose_cluster_is_gone_is_removed_and_one_in_use_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "_parent", lambda: tmp_path)
    used, dead = SessionFolder(), SessionFolder()
    (dead.path / "r").mkdir()
    dead.close()
    young = tmp_path / "luyen-ray-young"
    young.mkdir()
    old = tmp_path / "luyen-ray-old"
    old.mkdir()
    os.utime(old, (0, 0))
    (tmp_path / "luyen-ray-link").symlink_to(tmp_path / "elsewhere")
    sweep(tmp_path)
    assert sorted(folders(tmp_path)) == sorted([used.path, young, tmp_path / "luyen-ray-link"])
    used.close()


def test_the_guard_holds_the_folder_after_the_controller_has_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(cluster, "_parent", lambda: tmp_path)
    folder = SessionFolder()
    holder = subprocess.Popen(["sleep", "60"], pass_fds=(folder.lock,))
    folder.close()
    sweep(tmp_path)
    assert folder.path.is_dir()
    holder.kill()
    holder.wait()
    sweep(tmp_path)
    assert not folder.path.exists()


def test_only_two_words_say_who_may_connect(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LISTEN, "0.0.0.0")
    with pytest.raises(UserError, match="it is `loopback` or `all`"):
        cluster.listens_to_all()
    monkeypatch.setenv(LISTEN, "all")
    assert cluster.listens_to_all()


def test_ranks_meet_in_a_file_on_one_machine_and_at_a_port_on_several(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv(cluster.FOLDER, raising=False)
    address, store = meeting_place("127.0.0.1")
    assert store is not None
    assert address == f"tcp://127.0.0.1:{store.port}"
    monkeypatch.setenv(cluster.FOLDER, "/tmp/x")
    address, store = meeting_place("127.0.0.1")
    assert address.startswith("file:///tmp/x/ranks-")
    assert store is None


def test_no_other_process_can_take_the_port_where_ranks_meet(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(cluster.FOLDER, raising=False)
    address, store = meeting_place("127.0.0.1")
    assert store is not None
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", store.port))
    try:
        assert join_ranks(0, 1, address).size() == 1
    finally:
        leave_ranks()
