"""Files and memory that a program keeps where a guard that only asks the kernel would not look.

Each program runs once as it would here, and once as an ordinary user without namespaces, where
neither a cgroup nor a root of its own counts for the guard.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import luyen
from luyen.sandbox.python import remove
from tests.unit.sandbox.programs import run


def keeping(*, place: str = "", removed: bool = True, then: str = "pass") -> str:
    """A program that writes 160 MB in pieces, and says so where nobody stops it."""
    return f"""
import mmap, os, socket, time
maps, (a, b) = [], socket.socketpair()
for i in range(40):
    file = os.open("{place}f" + str(i), os.O_RDWR | os.O_CREAT)
    os.write(file, b"x" * 2**22)
    if {removed}: os.unlink("{place}f" + str(i))
    {then}
time.sleep(1)
print("kept")
"""


PROGRAMS = {
    "removed and open": keeping(),
    "removed and mapped": keeping(then="maps.append(mmap.mmap(file, 4096)); os.closerange(6, 250)"),
    "in a directory that nobody may list": "import os\nos.mkdir('d', 0o300)\n"
    + keeping(place="d/", removed=False),
    "below a path that is too long": "import os\n"
    + "for _ in range(40): os.mkdir('d' * 250); os.chdir('d' * 250)\n"
    + keeping(removed=False),
    "descriptors under way": keeping(then="socket.send_fds(a, [b'x'], [file]); os.close(file)"),
    "empty files": "import os, time\nfor i in range(50_000): open(str(i), 'w').close()\n"
    "time.sleep(1)\nprint('kept')",
    "shared memory without a name": """
import mmap
for _ in range(3):
    memory = mmap.mmap(-1, 2**29)
    for at in range(0, 2**29, 2**20): memory[at] = 1
    memory.madvise(mmap.MADV_DONTNEED)
print("kept")
""",
    "threads": """
import threading, time
threading.stack_size(2**18)
for _ in range(120): threading.Thread(target=time.sleep, args=(2,), daemon=True).start()
time.sleep(1)
print("kept")
""",
}
DRIVER = """
import asyncio, json, sys
from luyen.sandbox.launch import available
from luyen.sandbox.python import run_python
programs = json.load(sys.stdin)
ran = {name: asyncio.run(run_python(code)) for name, code in programs.items()}
kept = [name for name, one in ran.items() if "kept" in one.stdout]
json.dump({"walls": available(), "kept": kept}, sys.stdout)
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_an_ordinary_user_without_namespaces_hides_nothing():
    interpreter, become = "/usr/bin/python3", shutil.which("setpriv")
    if become is None or not Path(interpreter).exists() or shutil.which("unshare") is None:
        pytest.skip("no `setpriv`, no `unshare`, or no interpreter of the system")
    home = tempfile.mkdtemp(dir="/tmp")
    os.chmod(home, 0o777)
    for part in ("__init__.py", "base", "sandbox"):
        source, target = Path(luyen.__file__).parent / part, Path(home) / "source/luyen" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, target) if source.is_dir() else shutil.copy(source, target)
    (Path(home) / "driver.py").write_text(DRIVER)
    forbid = "echo 0 > /proc/sys/user/max_user_namespaces && exec "
    line = f"{forbid}{interpreter} {home}/driver.py"
    user = [become, "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    done = subprocess.run(
        [*user, "unshare", "-Ur", "sh", "-c", line],
        input=json.dumps(PROGRAMS).encode(),
        capture_output=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{home}/source", "TMPDIR": home},
        check=False,
    )
    left = [one for one in os.listdir(home) if one.startswith("luyen-")]
    shutil.rmtree(home)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert "namespaces" not in found["walls"]
    assert found["kept"] == []
    assert left == []


def test_what_a_program_is_given_does_not_count_as_its_own():
    ran = run("import sys\nlen(sys.stdin.read())", stdin="x" * (20 * 2**20))
    assert (ran.value, ran.killed_for) == (str(20 * 2**20), None)


def test_directories_of_any_depth_and_mode_are_removed(tmp_path):
    work = tmp_path / "work"
    work.mkdir()
    here = os.open(work, os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("d" * 100, dir_fd=here)
        inner = os.open("d" * 100, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = inner
    os.close(os.open("last", os.O_CREAT, dir_fd=here))
    os.close(here)
    (work / "closed").mkdir()
    (work / "closed" / "file").touch()
    (work / "closed").chmod(0)
    (work / "away").symlink_to(tmp_path)
    (tmp_path / "stays").touch()
    remove(str(work))
    assert os.listdir(tmp_path) == ["stays"]
