"""A process that has everything imported, and makes a child for every run: a run takes a moment.

`python -m tests.kill.zygote` reads a job a line from its input, as JSON, and writes how the child
ended: its exit status, or minus the signal that killed it.
"""

import json
import os
import subprocess
import sys
import traceback
from pathlib import Path
from typing import Any, Self, final

from tests.forked_python import forked_python

ROOT = Path(__file__).parent.parent.parent
KILLED = -9
_BROKE = 70
"""Exit status of a child that raised something."""


@final
class Zygote:
    """The process, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [forked_python(), "-m", "tests.kill.zygote"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(
        self,
        overrides: list[str],
        *,
        point: str | None = None,
        call: int = 1,
        log: Path | None = None,
        calls: Path | None = None,
    ) -> int:
        """Carry a run out in a child; how it ended. What it says goes to `log`."""
        job = {"overrides": overrides, "point": point, "call": call}
        job |= {"log": str(log or os.devnull), "calls": str(calls or os.devnull)}
        return self._ended(job)

    def train(self, *words: str | Path, log: Path, die: tuple[str, str, int] | None = None) -> int:
        """`luyen train` with these words; `die` names a function, before or after it, which call.

        What it says goes to `log`.
        """
        return self._ended({"words": [str(word) for word in words], "log": str(log), "die": die})

    def _ended(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

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


def _live(job: dict[str, Any]) -> int:
    """The life of a child; its exit status."""
    from luyen.train import session

    session.plot_curves = lambda *_: []  # pictures take longer than the run
    return _train(job) if "words" in job else _run(job)


def _run(job: dict[str, Any]) -> int:
    from luyen.config.check import check
    from luyen.train.start import run_training
    from tests.kill.offline import OFFLINE_POINTS
    from tests.kill.points import POINTS, arm

    os.environ["LUYEN_TEST_CALLS"] = job["calls"]
    if job["point"] is not None:
        arm({**POINTS, **OFFLINE_POINTS}[job["point"]], job["call"])
    run_training(check([], job["overrides"]))
    return 0


def _train(job: dict[str, Any]) -> int:
    from luyen.base.errors import UserError
    from luyen.cli.train import run_train
    from tests.kill.points import Point, arm

    if job["die"] is not None:
        where, when, call = job["die"]
        arm(Point(where=where, when=when, calls=(call,)), call)
    try:
        return run_train(job["words"])
    except UserError as error:
        sys.stdout.write(f"error: {error}\n")
        return 1


def _child(job: dict[str, Any]) -> None:
    status = _BROKE
    try:
        log = os.open(job["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        status = _live(job)
    except BaseException:  # noqa: BLE001 - whatever it is, it goes to the log
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Serve until the input ends."""
    import torch

    import luyen.pipeline.run  # noqa: F401 - what every child needs
    from luyen.base.process_setup import prepare_process

    prepare_process()
    torch.set_num_threads(1)
    for line in sys.stdin:
        job = json.loads(line)
        pid = os.fork()
        if pid == 0:
            _child(job)
        _, status = os.waitpid(pid, 0)
        sys.stdout.write(f"{os.waitstatus_to_exitcode(status)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
