"""A full disk under the scratch directory of programs is no wrong answer."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from luyen.sandbox.launch import SandboxFault
from luyen.sandbox.python import need_room

JUDGE = """
import asyncio, json, sys, tempfile
from luyen.sandbox.launch import SandboxFault
from luyen.sandbox.launch import available
from luyen.sandbox.verify import verify

tempfile.tempdir = sys.argv[1]
walls = available()
right = "open('scratch', 'w').write('y' * 3_000_000)\\ndef f(x): return 2 * x"
said = []
for left in (0, 2 * 2**20, 60 * 2**20):
    with open(sys.argv[1] + "/filler", "wb") as file:
        file.write(bytes(64 * 2**20 - left))
    try:
        said.append(asyncio.run(verify(right, ["assert f(2) == 4"])).passed)
    except SandboxFault as fault:
        said.append("make room" in str(fault))
print(json.dumps(["namespaces" in walls, *said]))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can be sure to mount")
def test_a_right_program_on_a_full_disk_is_a_fault_and_not_wrong(tmp_path: Path):
    if shutil.which("unshare") is None:
        pytest.skip("no `unshare` to mount and to take namespaces away with")
    small, script = tmp_path / "small", tmp_path / "judge.py"
    small.mkdir()
    script.write_text(JUDGE)
    mount = f'mount -t tmpfs -o size=64m tmpfs "{small}"'
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces"
    line = f'{mount} && {forbid} && exec "{sys.executable}" "{script}" "{small}"'
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", line], capture_output=True, text=True, check=False
    )
    if "mount:" in done.stderr:
        pytest.skip(f"nothing can be mounted here: {done.stderr}")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, True, True, 1]


def test_only_programs_without_a_root_of_their_own_need_room_on_the_disk():
    need_room({"measures": ["root"]}, 0.0, file_bytes=1)
    for found in (None, {"measures": ["landlock"]}):
        with pytest.raises(SandboxFault, match="make room"):
            need_room(found, 10.0, file_bytes=2**20)


LIMITED = """
import asyncio, resource, signal, sys
from luyen.sandbox.launch import SandboxFault
from luyen.sandbox.python import run_python

signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
kind, most = getattr(resource, sys.argv[1]), int(sys.argv[2])
resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
try:
    print(asyncio.run(run_python("print(6 * 7)")).stdout)
except SandboxFault as fault:
    print(fault)
"""


@pytest.mark.parametrize(
    ("kind", "most"), [("NOFILE", 12), ("NOFILE", 8), ("FSIZE", 0), ("FSIZE", 100), ("NOFILE", 40)]
)
def test_limits_of_this_process_are_named(tmp_path: Path, kind: str, most: int):
    line = [sys.executable, "-c", LIMITED, f"RLIMIT_{kind}", str(most)]
    environment = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run(line, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    assert ("ulimit" in done.stdout) == (most != 40), done.stdout
