"""A run belongs to one process at a time, and to nobody once that is gone."""

import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest

from luyen.base.errors import UserError
from luyen.base.run_lock import OWNER, claim, demand_claim, is_claimed, refuse_claimed, release
from luyen.base.rundir import RunDirectory
from tests.unit.base.claim_races import begin, forked, race, wait_for

CHILD = """
import os, signal, sys
from pathlib import Path
from luyen.base.run_lock import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
PAIRS = 200


def test_of_two_that_begin_the_same_new_run_one_gets_it(tmp_path: Path):
    job = [sys.executable, "-m", "tests.unit.base.claim_races", str(tmp_path), str(PAIRS)]
    done = subprocess.run(job, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["-15"] * PAIRS + ["1"] * PAIRS
    for number in range(PAIRS):
        run = RunDirectory.open(tmp_path / f"run{number}")
        config = f"seed: {run.read_manifest()['seed']}\n"
        assert run.read_config() == config, "all files are those of one process"


def test_what_a_killed_owner_left_is_taken_over_by_one(tmp_path: Path):
    for number in range(5):
        root = tmp_path / f"run{number}"
        start, go = os.pipe()
        pid = forked(lambda root=root: begin(root, 0), start, go)
        os.close(go)
        wait_for(lambda root=root: RunDirectory(root).exists)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(start)
        assert not is_claimed(root)
        assert (root / OWNER).stat().st_size, "its name is still there"
        assert race([lambda root=root: claim(root)] * 4) == [-15, 1, 1, 1]


def test_a_claim_is_on_the_directory_that_is_there_whatever_is_removed_meanwhile(tmp_path: Path):
    root, is_over = tmp_path / "run", Event()

    def remove() -> None:
        while not is_over.is_set():
            shutil.rmtree(root, ignore_errors=True)

    with ThreadPoolExecutor(1) as other:
        removing = other.submit(remove)
        try:
            for _ in range(200):
                claim(root)
                release(root)
        finally:
            is_over.set()
        removing.result()
    claim(root)
    demand_claim(root)
    assert race([lambda: claim(root)] * 2, winners=0) == [1, 1]
    release(root)


def test_a_directory_that_was_removed_or_replaced_is_found_before_the_next_line(tmp_path: Path):
    root = tmp_path / "run"
    begin(root, 1)
    demand_claim(root)
    shutil.rmtree(root)
    with pytest.raises(UserError, match="removed or replaced while it was trained"):
        demand_claim(root)
    code = "import sys; from pathlib import Path; from tests.unit.base.claim_races import begin\n"
    code += "begin(Path(sys.argv[1]), 2)"
    subprocess.run([sys.executable, "-c", code, str(root)], check=True)
    with pytest.raises(UserError, match="removed or replaced"):
        demand_claim(root)
    release(root)
    assert RunDirectory(root).read_manifest()["seed"] == 2, "what came later is left alone"


def test_another_process_waits_until_the_first_is_gone(tmp_path: Path):
    root = tmp_path / "run"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "claimed\n"
    who = re.escape(f"process {child.pid} on {platform.node()} since 20")
    for refused in (claim, refuse_claimed):
        with pytest.raises(UserError, match=f"another process is training it .{who}"):
            refused(root)
    child.communicate("die\n")
    refuse_claimed(root)
    claim(root)
    release(root)


def test_claims_are_counted_and_a_directory_without_content_goes(tmp_path: Path):
    root = tmp_path / "run"
    claim(root)
    claim(root)
    release(root)
    assert race([lambda: claim(root)] * 2, winners=0) == [1, 1], "it is still ours"
    release(root)
    release(root)
    assert not root.exists(), "nothing was begun there"


def test_a_reader_that_looks_does_not_get_in_the_way(tmp_path: Path):
    root = tmp_path / "run"
    claim(root)
    release(root)
    root.mkdir()
    (root / OWNER).touch()
    look = "import sys\nfrom pathlib import Path\nfrom luyen.base.run_lock import is_claimed\n"
    look += "print('looks', flush=True)\nwhile True: is_claimed(Path(sys.argv[1]))"
    with subprocess.Popen(
        [sys.executable, "-c", look, str(root)], stdout=subprocess.PIPE, text=True
    ) as reader:
        assert reader.stdout is not None
        assert reader.stdout.readline() == "looks\n"
        try:
            for _ in range(300):
                claim(root)
                (root / "kept").touch()
                release(root)
        finally:
            reader.kill()


def test_a_forked_child_that_outlives_the_owner_does_not_keep_the_run(tmp_path: Path):
    root = tmp_path / "run"
    told, tell = os.pipe()
    pid = os.fork()
    if pid == 0:
        claim(root)
        if os.fork() == 0:
            os.close(tell)
            os.read(told, 1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    claim(root)
    release(root)
    os.close(told)
    os.close(tell)


def test_a_place_where_nothing_can_be_made_is_named(tmp_path: Path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=r"run directory.*Not a directory.*default_local_dir"):
        claim(tmp_path / "file" / "project" / "run")
    with pytest.raises(UserError, match=r"run directory.*File name too long"):
        claim(tmp_path / ("x" * 300))


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become somebody else")
def test_a_directory_that_may_only_be_read_is_named(tmp_path: Path):
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(0o755)
    (tmp_path / "ours").mkdir()
    claim(tmp_path / "begun")
    (tmp_path / "begun" / "kept").touch()
    release(tmp_path / "begun")
    for root in (tmp_path / "new" / "run", tmp_path / "ours", tmp_path / "begun"):
        source, sink = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                os.setgid(65534)
                os.setuid(65534)
                claim(root)
            except UserError as error:
                os.write(sink, str(error).encode())
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        os.close(sink)
        said = os.read(source, 10_000).decode()
        os.close(source)
        assert said.startswith(f"run directory = '{root}': it could not be written: Permission")
        assert "trainer.default_local_dir" in said
