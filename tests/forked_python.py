"""Python processes that begin with everything imported: forks of one server, behind a launcher.

A process that trains imports for eight seconds of processor time before it does anything, and the
tests start some eighty of them. `forked_python()` is the path of a program that takes the place of
`sys.executable`: `-m luyen`, modules of the tests, `-c CODE` and workers of Ray run in a fork of
the server, with the launcher's arguments, environment, working directory and standard streams;
everything else is given to the real Python. The launcher passes signals on, ends as the fork ends,
and takes the fork with it when it is killed.

Not for tests of what a new process inherits or imports: a fork has the signal dispositions, the
hash seed and the modules of the server, and /proc shows the server's environment for it.

One server is shared by all processes of a test session. It starts when it is first needed, and ends
with the process that called `reserve`.
"""

import atexit
import fcntl
import gc
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

_ROOT = Path(__file__).parent.parent
_FOLDER = "LUYEN_TEST_FORKED_PYTHON"
"""Environment variable: the folder of socket, launcher and locks."""
_PRELOADED = (
    "torch.distributed.fsdp",
    "luyen.cli.diff",
    "luyen.cli.doctor",
    "luyen.cli.eval",
    "luyen.cli.main",
    "luyen.cli.replay",
    "luyen.pipeline.run",
    "luyen.rollout.native.engine",
    "luyen.runtime.worker",
    "luyen.studio.evaluation.evaluator",
    "luyen.studio.replay.replay",
    "luyen.studio.report.page",
    "luyen.train.start",
)
_STREAMS = 3
_MOST_BYTES = 1 << 20
_LOOK_S = 0.5
_START_S = 300.0
_BROKE = 70
_WORKER = "default_worker.py"
_CONTEXT = "--serialized-runtime-env-context="
_OF_SETUP = (_CONTEXT, "--language=")
_LAUNCHER = """#!{python} -IS
import json, os, signal, socket, sys
words = sys.argv[1:]
given = words[1:] if words[:1] == ["-P"] else words
ours = given[:1] == ["-m"] and (given[1] == "luyen" or given[1].startswith("tests."))
if not (ours or given[:1] == ["-c"] or any(word.endswith({worker!r}) for word in words)):
    os.execv({python!r}, [{python!r}, *words])
server = socket.socket(socket.AF_UNIX)
server.connect({address!r})
job = json.dumps({{"words": words, "environment": dict(os.environ), "folder": os.getcwd()}})
streams = []
for number in range(3):
    try:
        os.fstat(number)
        streams.append(number)
    except OSError:
        streams.append(os.open(os.devnull, os.O_RDWR))
socket.send_fds(server, [b"%10d" % len(job.encode())], streams)
server.sendall(job.encode())
answers = server.makefile()
child = int(answers.readline())
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, lambda number, _: os.kill(child, number))
status = int(answers.readline() or "-9")
if status < 0:
    signal.signal(-status, signal.SIG_DFL) if -status != signal.SIGKILL else None
    os.kill(os.getpid(), -status)
os._exit(status)
"""


def reserve() -> Path:
    """The folder of the session's server; this process makes it, unless another one did."""
    if _FOLDER in os.environ:
        return Path(os.environ[_FOLDER])
    folder = Path(tempfile.mkdtemp(prefix="forks-", dir="/tmp"))  # names of sockets must be short
    lock = os.open(folder / "owner", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(lock, fcntl.LOCK_EX)  # to the end of this process: the server looks at it
    os.environ[_FOLDER] = str(folder)
    atexit.register(_remove_unused, folder, os.getpid())
    return folder


def _remove_unused(folder: Path, owner: int) -> None:
    """Where a server was started, it removes the folder itself."""
    if os.getpid() == owner and not (folder / "socket").exists():
        shutil.rmtree(folder, ignore_errors=True)


def forked_python() -> str:
    """The launcher, once the server answers."""
    folder = reserve()
    launcher = folder / "python"
    with (folder / "start").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not launcher.exists():
            _start(folder, launcher)
    return str(launcher)


def _start(folder: Path, launcher: Path) -> None:
    address, log = folder / "socket", folder / "log.txt"
    with log.open("w") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.forked_python", str(folder)],
            cwd=_ROOT,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
            start_new_session=True,  # a Ctrl-C is for the tests
        )
    last = time.monotonic() + _START_S
    while not address.exists():
        if process.poll() is not None or time.monotonic() > last:
            process.kill()
            process.wait()
            raise AssertionError(f"the server did not start:\n{log.read_text()}")
        time.sleep(0.05)
    # It is not waited for: it outlives this process.
    process.returncode = 0
    text = _LAUNCHER.format(python=sys.executable, address=str(address), worker=_WORKER)
    new = launcher.with_suffix(".new")
    new.write_text(text)
    new.chmod(0o755)
    new.rename(launcher)


@contextmanager
def forked_executable() -> Generator[None]:
    """Inside, `sys.executable` is the launcher, also for nodes of Ray that this process starts.

    The parent of such a worker is the server and not its raylet: nodes must be lost elsewhere.
    """
    real, sys.executable = sys.executable, forked_python()
    try:
        yield
    finally:
        sys.executable = real


def _prepare() -> None:
    """Import what forks need, but Ray, which reads its environment as soon as it is imported."""
    import torch

    from luyen.base.process_setup import prepare_process

    gc.disable()
    prepare_process()
    torch.set_num_threads(1)
    for name in _PRELOADED:
        import_module(name)
    gc.freeze()
    gc.enable()
    assert "ray" not in sys.modules
    assert threading.active_count() == 1, "a fork would lose threads"


def main(folder: Path) -> None:
    """Serve until the owner of the folder is gone; then end the forks that are left."""
    _prepare()
    keepers: set[int] = set()
    owner = os.open(folder / "owner", os.O_RDWR)
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(str(folder / "new"))
        door.listen(64)
        door.settimeout(_LOOK_S)
        (folder / "new").rename(folder / "socket")
        while not _is_free(owner):
            keepers = {pid for pid in keepers if os.waitpid(pid, os.WNOHANG)[0] == 0}
            try:
                caller, _ = door.accept()
            except TimeoutError:
                continue
            with caller:
                keeper = os.fork()
                if keeper == 0:
                    door.close()
                    os.close(owner)
                    _keep(caller)
                keepers.add(keeper)
    for keeper in keepers:
        os.kill(keeper, signal.SIGTERM)
    shutil.rmtree(folder, ignore_errors=True)


def _is_free(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _keep(caller: socket.socket) -> None:
    """Fork once more; tell the launcher how the fork ended, or end it if the launcher is gone."""
    try:
        caller.settimeout(None)
        job, streams = _received(caller)
        child = os.fork()
        if child == 0:
            caller.close()
            _become(job, streams)
        signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))
        for stream in streams:
            os.close(stream)
        caller.sendall(b"%d\n" % child)
        process = os.pidfd_open(child)
        ready, _, _ = select.select([process, caller], [], [])
        if process not in ready:
            os.kill(child, signal.SIGKILL)
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        caller.sendall(b"%d\n" % status)
    except OSError:  # the launcher is gone
        pass
    finally:
        os._exit(0)


def _received(caller: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """The job of a launcher, and its standard streams."""
    size, streams, _, _ = socket.recv_fds(caller, 10, _STREAMS)
    job = b""
    while len(job) < int(size):
        more = caller.recv(_MOST_BYTES)
        assert more, "a launcher was gone before its job was there"
        job += more
    return json.loads(job), streams


def _become(job: dict[str, Any], streams: list[int]) -> None:
    """The life of a fork, to its end."""
    status: Any = _BROKE
    os.setpgid(0, 0)  # a raylet kills the whole group of a worker that it ends
    try:
        for number, stream in enumerate(streams):
            os.dup2(stream, number)
            os.close(stream)
        for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
            number = ("stdin", "stdout", "stderr").index(name)
            stream = open(number, mode, buffering=-1 if number < 2 else 1, closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)
        _run(**job)
        status = 0
    except SystemExit as end:
        status = end.code or 0
        if not isinstance(status, int):
            sys.stderr.write(f"{status}\n")
            status = 1
    except BaseException:  # noqa: BLE001 - as a new Python does
        traceback.print_exc()
        status = 1
    finally:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError, AttributeError):
                continue
        os._exit(status)


def _run(words: list[str], environment: dict[str, str], folder: str) -> None:
    """What a new Python does with its arguments."""
    import torch

    is_safe_path = words[0] == "-P"
    words = words[1:] if is_safe_path else words
    if words[0] not in ("-m", "-c"):
        given = [word.removeprefix(_CONTEXT) for word in words if word.startswith(_CONTEXT)]
        for context in filter(None, given):
            environment = environment | json.loads(context).get("env_vars", {})
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    tempfile.tempdir = None
    seen = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]
    rest = [entry for entry in sys.path if entry not in seen]
    sys.path[:] = [*seen, *rest] if is_safe_path else [folder, *seen, *rest]
    torch.set_num_threads(int(environment.get("OMP_NUM_THREADS", "1")))
    if words[0] == "-m":
        sys.argv = words[1:]
        runpy.run_module(words[1], run_name="__main__", alter_sys=True)
    elif words[0] == "-c":
        sys.argv = ["-c", *words[2:]]
        main_module = sys.modules["__main__"] = ModuleType("__main__")
        exec(compile(words[1], "<string>", "exec"), vars(main_module))
    else:  # without setup_worker.py, whose work is done above
        start = next(i for i, word in enumerate(words) if word.endswith(_WORKER))
        sys.argv = [word for word in words[start:] if not word.startswith(_OF_SETUP)]
        runpy.run_path(words[start], run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
