"""A process that has everything imported, and makes a child for every command of `luyen`.

`python -m tests.fuzz.server` reads a job a line from its input, as JSON, and writes how the child
ended: its exit status, minus the signal that killed it, or `hang`.
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Self, final

from tests.forked_python import forked_python

ROOT = Path(__file__).parent.parent.parent
_LIMIT_S = 60.0
_HANG = "hang"
_NEEDED = (
    "luyen.cli.diff",
    "luyen.cli.doctor",
    "luyen.cli.eval",
    "luyen.cli.main",
    "luyen.cli.replay",
    "luyen.studio.report.page",
    "luyen.studio.evaluation.evaluator",
    "luyen.studio.replay.replay",
    "luyen.train.start",
    "tests.kill.points",
)
"""What children need, imported once."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Said:
    """How a command ended, and what it said."""

    status: int | None
    """Its exit status; None: it hung and was killed."""
    out: str
    err: str

    @property
    def text(self) -> str:
        """Everything that it said."""
        return self.out + self.err


@final
class Commands:
    """The process, from outside."""

    def __init__(self, folder: Path) -> None:
        """What commands say is written to `folder` on the way."""
        self._folder = folder
        self._process = subprocess.Popen(
            [forked_python(), "-m", "tests.fuzz.server"],
            cwd=ROOT,
            env=os.environ | {"LUYEN_TEST_CALLS": os.devnull},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, *words: str, point: str | None = None, call: int = 1) -> Said:
        """Carry `luyen WORDS` out in a child, which dies at a point of `tests.kill.points`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        out, err = self._folder / "out", self._folder / "err"
        job = {"words": words, "out": str(out), "err": str(err), "point": point, "call": call}
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline().strip()
        status = None if answer == _HANG else int(answer)
        return Said(status=status, out=out.read_text(), err=err.read_text())

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _child(job: dict[str, Any]) -> None:
    from luyen.cli import main
    from luyen.train import session
    from tests.kill.points import POINTS, arm

    if job["point"] is not None:
        arm(POINTS[job["point"]], job["call"])
    session.plot_curves = lambda *_: []  # pictures take longer than the run
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(job[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
    sys.argv = ["luyen", *job["words"]]
    status = 0
    try:
        main.run()
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException:  # noqa: BLE001 - what a user would see is what is looked at
        traceback.print_exc()
        status = 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _ended(pid: int) -> str:
    """Wait for a child, and not for ever."""
    limit = time.monotonic() + _LIMIT_S
    while time.monotonic() < limit:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return str(os.waitstatus_to_exitcode(status))
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return _HANG


def main() -> None:
    """Serve until the input ends."""
    import torch

    from luyen.base.process_setup import prepare_process

    prepare_process()
    torch.set_num_threads(1)
    for name in _NEEDED:
        import_module(name)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(job)
        sys.stdout.write(f"{_ended(pid)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
