"""A run in a process of its own, beside the tests of this one."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.engines.conftest import PATIENCE_S
from tests.runs import Ran, read_back

_POLL_S = 5.0


class RunBeside:
    """A run that goes on while this process does other things."""

    def __init__(self, process: subprocess.Popen[bytes], folder: Path, log: Path) -> None:
        self._process = process
        self._folder = folder
        self._log = log
        self._ran: Ran | None = None

    @property
    def ran(self) -> Ran:
        """What it left, once it has ended. It may take as long as its steps take."""
        if self._ran is None:
            steps, seen_at = -1, time.monotonic()
            while self._process.poll() is None:
                if self._steps() > steps:
                    steps, seen_at = self._steps(), time.monotonic()
                assert time.monotonic() < seen_at + PATIENCE_S, self._said(f"stuck at step {steps}")
                time.sleep(_POLL_S)
            assert self._process.returncode == 0, self._said("failed")
            [metrics] = self._folder.rglob("metrics.jsonl")
            self._ran = read_back(metrics.parent)
        return self._ran

    def _steps(self) -> int:
        """Lines of metrics so far."""
        files = self._folder.rglob("metrics.jsonl")
        return sum(len(file.read_bytes().splitlines()) for file in files)

    def _said(self, how: str) -> str:
        return f"the run beside this process {how}:\n{self._log.read_text()[-4000:]}"


@contextmanager
def run_beside(folder: Path, *overrides: str, files: Sequence[Path]) -> Iterator[RunBeside]:
    """A run that has started; it is ended with its context, if it has not ended before."""
    log = folder / "console.log"
    words = [str(file) for file in files] + [f"trainer.default_local_dir={folder}", *overrides]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}  # as many as the runs of this process
    with log.open("wb") as out:
        process = subprocess.Popen(
            [sys.executable, "-m", "luyen", "train", *words],
            stdout=out,
            stderr=out,
            env=environment,
        )
    try:
        yield RunBeside(process, folder, log)
    finally:
        process.terminate()
        process.wait()
