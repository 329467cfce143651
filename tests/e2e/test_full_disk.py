"""A disk that is full stops a run with the reason; with room again it goes on as if nothing was."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.few_inodes_job import FILES
from tests.e2e.full_disk_job import LEFT_KB

ALONE = ["unshare", "--mount", "--map-root-user"]


def may_mount(folder: Path) -> bool:
    """Whether this machine lets a test mount a small file system where only the test sees it."""
    mount = [*ALONE, "mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        return subprocess.run(mount, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def test_a_full_disk_stops_the_run_with_the_reason_and_nothing_is_lost(tmp_path: Path):
    if not may_mount(tmp_path):
        pytest.skip("this machine does not let tests mount a small file system")
    job = [*ALONE, sys.executable, "-m", "tests.e2e.full_disk_job", str(tmp_path)]
    done = subprocess.run(job, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    said = dict(line.split("\t") for line in done.stdout.splitlines())
    assert [int(left) for left in said] == list(LEFT_KB)
    stopped = [words for words in said.values() if words != "None"]
    assert len(stopped) >= 4, "most of the cases stop"
    assert all("it could not be written" in words for words in stopped), said
    assert any("checkpoint = " in words and "No space left" in words for words in stopped), said
    assert any("checkpoint = " not in words for words in stopped), said


def test_a_disk_that_takes_no_more_files_is_named_whatever_was_to_be_made(tmp_path: Path):
    if not may_mount(tmp_path):
        pytest.skip("this machine does not let tests mount a small file system")
    job = [*ALONE, sys.executable, "-m", "tests.e2e.few_inodes_job", str(tmp_path)]
    done = subprocess.run(job, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr
    said = {int(n): words for n, words in (line.split("\t") for line in done.stdout.splitlines())}
    assert tuple(said) == FILES
    assert said[FILES[-1]] == "None", "there it is enough"
    stopped = [words for words in said.values() if words != "None"]
    assert all("could not be written: No space left" in words for words in stopped), said
    for place in ("events", "journal"):
        assert any(place in words for words in stopped), f"no case stopped at {place}: {said}"
