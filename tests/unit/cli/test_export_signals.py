"""An export that a signal ends leaves nothing beside its target."""

import subprocess
import sys
from pathlib import Path

ENDED = """
import os, signal, sys
from pathlib import Path
import luyen.pipeline.export as export

def fill(path, folder, merge, is_trusted):
    (folder / "model.safetensors").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGTERM)
    raise AssertionError("the signal came")

export._policy = fill
export.find_checkpoint = lambda path: None
from luyen.cli.export import run_export
sys.exit(run_export("a-model", Path(sys.argv[1]), merge=False, is_trusted=False))
"""


def test_an_export_that_sigterm_ends_leaves_no_unfinished_folder(tmp_path: Path):
    command = [sys.executable, "-c", ENDED, str(tmp_path / "target")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 143, done.stderr
    assert "interrupted (SIGTERM); nothing was written" in done.stderr
    assert list(tmp_path.iterdir()) == []
