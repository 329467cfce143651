"""Workers of a cluster as children of a process that has everything imported: they begin at once.

A worker of Ray imports for eight seconds before it does anything, and a run on a cluster has four
of them. Raylets are given a launcher for Python: it hands what is to be a worker to the nursery,
which forks, and becomes Python itself for everything else. The parent of such a worker is the
nursery and not its raylet: nodes must be lost elsewhere.

`python -m tests.kill.nursery SOCKET` serves until its standard input ends.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from runpy import run_path
from typing import Any

_ROOT = Path(__file__).parent.parent.parent
_STREAMS = 3
_PRELOADED = (
    "torch.distributed.fsdp",
    "luyen.rollout.native.engine",
    "luyen.runtime.worker",
    "luyen.train.start",
)
_MOST_BYTES = 1 << 20
_OF_SETUP = ("--serialized-runtime-env-context=", "--language=")
_LAUNCHER = """#!{python} -IS
import json, os, socket, sys
words = sys.argv[1:]
if not any(word.endswith("default_worker.py") for word in words):
    os.execv({python!r}, [{python!r}, *words])
with socket.socket(socket.AF_UNIX) as nursery:
    nursery.connect({address!r})
    job = json.dumps({{"words": words, "environment": dict(os.environ), "folder": os.getcwd()}})
    socket.send_fds(nursery, [b"%10d" % len(job.encode())], [0, 1, 2])
    nursery.sendall(job.encode())
    nursery.recv(1)
"""


@contextmanager
def a_nursery() -> Generator[None]:
    """Whoever asks for Python's executable meanwhile gets the launcher: for the start of nodes."""
    folder = Path(tempfile.mkdtemp(prefix="nursery"))
    address, launcher, real = str(folder / "socket"), folder / "python", sys.executable
    launcher.write_text(_LAUNCHER.format(python=real, address=address))
    launcher.chmod(0o755)
    process = subprocess.Popen(
        [real, "-m", "tests.kill.nursery", address],
        cwd=_ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stdout.readline() == b"ready\n"
    sys.executable = str(launcher)
    try:
        yield
    finally:
        sys.executable = real
        process.stdin.close()
        process.wait(timeout=60)
        process.stdout.close()
        shutil.rmtree(folder)


def _received(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """What a launcher asks for, and the streams that it was given."""
    size, streams, _, _ = socket.recv_fds(caller, 10, _STREAMS)
    job = b""
    while len(job) < int(size):
        more = caller.recv(_MOST_BYTES)
        assert more, "a launcher was gone before it had said what to start"
        job += more
    return json.loads(job), streams


def _become_worker(words: list[str], environment: dict[str, str], folder: str) -> None:
    """What setup_worker.py and a new Python do, without a new Python."""
    import torch

    given = dict(word.partition("=")[::2] for word in words if word.startswith("--"))
    context = json.loads(given.get("--serialized-runtime-env-context") or "{}")
    os.environ.clear()
    os.environ.update(environment | context.get("env_vars", {}))
    os.chdir(folder)
    seen = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:0] = [entry for entry in seen if entry and entry not in sys.path]
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    start = next(i for i, word in enumerate(words) if word.endswith("default_worker.py"))
    sys.argv = [word for word in words[start:] if not word.startswith(_OF_SETUP)]
    run_path(words[start], run_name="__main__")


def _child(job: dict[str, Any], streams: list[int]) -> None:
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    status = 1
    try:
        _become_worker(**job)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 - whatever it is, it goes to the log of the worker
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _prepare() -> None:
    """Import what workers need, but Ray, which reads its environment as soon as it is imported."""
    from luyen.base.process_setup import prepare_process

    prepare_process()
    for name in _PRELOADED:
        import_module(name)

    assert "ray" not in sys.modules
    assert threading.active_count() == 1, "a fork would lose threads"


def _ended(children: set[int]) -> set[int]:
    """Those that are over."""
    return {child for child in children if os.waitpid(child, os.WNOHANG)[0] == child}


def main(address: str) -> None:
    """Serve until the input ends; then end whoever is left."""
    _prepare()
    children: set[int] = set()
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(address)
        door.listen(64)
        print("ready", flush=True)
        door.settimeout(0.5)
        os.set_blocking(0, False)
        while sys.stdin.buffer.raw.read(1) != b"":
            children -= _ended(children)
            try:
                caller, _ = door.accept()
            except TimeoutError:
                continue
            with caller:
                caller.settimeout(None)
                job, streams = _received(caller)
                child = os.fork()
                if child == 0:
                    door.close()
                    _child(job, streams)
                children.add(child)
            for stream in streams:
                os.close(stream)
    for child in children - _ended(children):
        os.kill(child, signal.SIGKILL)  # nobody else can have its number before it is waited for


if __name__ == "__main__":
    main(sys.argv[1])
