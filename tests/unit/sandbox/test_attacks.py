"""Attacks of `luyen.sandbox.attacks`, with and without namespaces, as root and as a plain user."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

import luyen
from luyen.sandbox.attacks import _PRELUDE, ATTACKS, SECRET, target
from luyen.sandbox.launch import available
from tests.unit.sandbox import attacking

HERE = [sys.executable, "-m", "tests.unit.sandbox.attacking"]
FORBID = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
needs_everything = pytest.mark.skipif(
    not {"namespaces", "landlock", "seccomp"} <= set(available()), reason="walls are missing here"
)


def report(line: list[str], tmp_path, **more) -> dict:
    paths = os.pathsep.join(entry for entry in sys.path if entry)
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": paths}
    done = subprocess.run(line, capture_output=True, env=environment, check=False, **more)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


def through(found: dict) -> dict[str, list[str]]:
    return {name: lines for name, lines in found["breaches"].items() if lines}


@needs_everything
def test_no_attack_gets_through_the_walls(tmp_path):
    found = report(HERE, tmp_path)
    assert through(found) == {}
    assert {"namespaces", "root"} <= set(found["walls"])


@needs_everything
def test_no_attack_gets_through_without_namespaces(tmp_path):
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` to take namespaces away with")
    found = report(["unshare", "-Ur", "sh", "-c", FORBID + " ".join(HERE)], tmp_path)
    assert through(found) == {}
    assert "namespaces" not in found["walls"]


@needs_everything
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
@pytest.mark.parametrize("forbid", ["", FORBID], ids=["namespaces", "without namespaces"])
def test_no_attack_of_an_ordinary_user_gets_through(forbid, tmp_path):
    """As a user without rights, by an interpreter of the system that this user can read."""
    interpreter = "/usr/bin/python3"
    if shutil.which("setpriv") is None or not Path(interpreter).exists():
        pytest.skip("no `setpriv`, or no interpreter of the system")
    home = tempfile.mkdtemp(dir="/tmp")
    os.chmod(home, 0o777)
    source = Path(home) / "source"
    for part in ("luyen/__init__.py", "luyen/base", "luyen/sandbox"):
        _copy(Path(luyen.__file__).parents[1] / part, source / part)
    _copy(Path(attacking.__file__), source / "attacking.py")
    user = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    line = f"{forbid or 'exec '}{interpreter} {source}/attacking.py"
    apart = ["unshare", "-Ur"] if forbid else []
    environment = {"PATH": os.environ["PATH"], "PYTHONPATH": str(source), "TMPDIR": home}
    done = subprocess.run(
        [*user, *apart, "sh", "-c", line], capture_output=True, env=environment, check=False
    )
    shutil.rmtree(home)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert through(found) == {}
    assert ("namespaces" in found["walls"]) == (not forbid)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)


def test_attacks_succeed_where_there_are_no_walls(tmp_path):
    """Otherwise they would prove nothing: each of these runs as a plain program of this user."""
    wanted = (
        "read a file of the user",
        "write, remove or move it",
        "change its mode, owner, times or attributes",
        "connect to this machine",
        "send a datagram through a pair",
        "make a socket of any family",
        "signal, limit or slow down the trainer",
        "look into the trainer",
        "keep memory in nameless files",
        "keep memory in segments",
        "survive when memory runs out",
    )
    found = {}
    for attack in ATTACKS:
        if attack.name in wanted:
            with target() as outside:
                assert outside.file.read_text() == SECRET
                facts = {
                    "FILE": str(outside.file),
                    "DATAGRAMS": outside.datagrams.getsockname(),
                    "PORT": outside.server.getsockname()[1],
                    "OWNER": _sleeper(),
                }
                code = "\n".join(f"{name} = {value!r}" for name, value in facts.items())
                line = [sys.executable, "-c", f"{code}\n{_PRELUDE}\n{attack.code}"]
                done = subprocess.run(line, capture_output=True, cwd=tmp_path, check=False)
                os.kill(facts["OWNER"], 9)
                os.waitpid(facts["OWNER"], 0)
                found[attack.name] = b"BREACH" in done.stdout
    _forget_segments()
    assert found == dict.fromkeys(wanted, True)


def _sleeper() -> int:
    """A process to attack in the trainer's place."""
    return os.spawnlp(os.P_NOWAIT, "sleep", "sleep", "60")


def _forget_segments() -> None:
    for kind in ("-m", "-q"):
        listed = subprocess.run(["ipcs", kind], capture_output=True, text=True, check=False)
        for row in listed.stdout.splitlines():
            fields = row.split()
            if len(fields) > 2 and fields[0] == "0x00000000" and fields[1].isdigit():
                subprocess.run(["ipcrm", kind, fields[1]], capture_output=True, check=False)


def test_every_promise_is_attacked():
    assert {attack.promise for attack in ATTACKS} == {"files", "network", "processes", "memory"}
    assert attacking.ATTACKS is ATTACKS
