"""A run belongs to one process at a time, and to nobody once that is gone."""

import subprocess
import sys
from pathlib import Path

import pytest

from luyen.base.claims import claim, release
from luyen.base.errors import UserError

CHILD = """
import os, signal, sys
from pathlib import Path
from luyen.base.claims import claim
claim(Path(sys.argv[1]))
print("claimed", flush=True)
sys.stdin.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def manifest(tmp_path: Path) -> Path:
    path = tmp_path / "manifest.json"
    path.write_text("{}")
    return path


def test_another_process_waits_until_the_first_is_gone(manifest: Path):
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(manifest)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "claimed\n"
    with pytest.raises(UserError, match="another process is training it"):
        claim(manifest)
    child.communicate("die\n")
    claim(manifest)
    release(manifest)


def test_claiming_and_releasing_twice_is_allowed(manifest: Path):
    claim(manifest)
    claim(manifest)
    release(manifest)
    release(manifest)
    code = "import sys; from pathlib import Path; from luyen.base.claims import claim;"
    code += "claim(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(manifest)], check=True)
