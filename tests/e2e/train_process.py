"""Whole commands in children of a process that has everything imported, with any streams.

`python -m tests.e2e.train_process` reads a job a line from its input, as JSON, and answers with a
line: the id of the child that was started, or how a child ended (minus the signal that killed it).
"""

import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self, final

from tests.forked_python import forked_python

ROOT = Path(__file__).parent.parent.parent
CLOSED = ""
"""A stream that is not open."""


@final
class Trainings:
    """The process, from outside."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [forked_python(), "-m", "tests.e2e.train_process"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self, *words: str | Path, **how: Any) -> int:
        """Begin a command; its process id.

        `streams` are paths of standard input, output and error; `ignores` are signals that are
        ignored at the start; `at` is a time to wait for.
        """
        return self._ask({"words": [str(word) for word in words], **how})

    def wait(self, pid: int) -> int:
        """How it ended."""
        return self._ask({"wait": pid})

    def run(self, *words: str | Path, **how: Any) -> int:
        """Begin a command, and wait for its end."""
        return self.wait(self.start(*words, **how))

    def _ask(self, job: dict[str, Any]) -> int:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def wait_until(is_so: Callable[[], bool], *, seconds: float = 120) -> None:
    """Return once something is so."""
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.02)


def _streams(paths: list[str]) -> None:
    for number, path in enumerate(paths):
        if path:
            flags = os.O_RDONLY if number == 0 else os.O_WRONLY | os.O_CREAT | os.O_APPEND
            os.dup2(handle := os.open(path, flags), number)
            os.close(handle)
    for number, path in enumerate(paths):
        if not path:
            os.close(number)
    sys.stdin = open(0, closefd=False) if paths[0] else None  # noqa: SIM115
    sys.stdout = sys.__stdout__ = open(1, "w", closefd=False) if paths[1] else None  # noqa: SIM115
    sys.stderr = sys.__stderr__ = open(2, "w", closefd=False) if paths[2] else None  # noqa: SIM115


def _child(job: dict[str, Any]) -> None:
    from luyen.cli.main import run
    from luyen.train import session

    status: Any = 70
    try:
        session.plot_curves = lambda *_: []  # pictures take longer than the run
        for number in job.get("ignores", ()):
            signal.signal(number, signal.SIG_IGN)
        _streams(job["streams"])
        sys.argv = ["luyen", *job["words"]]
        time.sleep(max(0.0, job.get("at", 0.0) - time.time()))
        run()
    except SystemExit as end:
        status = end.code
    except BaseException:  # noqa: BLE001 - whatever it is, it goes to the log
        traceback.print_exc()
    finally:
        os._exit(status if isinstance(status, int) else 1)


def main() -> None:
    """Serve until the input ends."""
    import torch

    import luyen.pipeline.run  # noqa: F401 - what every child needs
    from luyen.base.process_setup import prepare_process

    prepare_process()
    torch.set_num_threads(1)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    for line in sys.stdin:
        job = json.loads(line)
        if "wait" in job:
            answer = os.waitstatus_to_exitcode(os.waitpid(job["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                _child(job)
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
