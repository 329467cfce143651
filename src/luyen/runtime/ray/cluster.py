"""The way into a cluster: one that is there, or one of this machine's own for as long as it runs.

Nothing is left behind: the actors of a job end with its controller, and so does every process of a
cluster that the controller started, even when it is killed, and every file of it.
"""

import importlib.util
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from luyen.base.errors import UserError
from luyen.base.exactness import prepare_process
from luyen.config.machine import this_machine
from luyen.runtime.ray import guard
from luyen.runtime.ray.pools import NodeOffer
from luyen.runtime.ray.session import SessionFolder, kept_to_this_machine, local_environment

if TYPE_CHECKING:
    from types import ModuleType

STORE_BYTES = 1 << 30
"""Most memory of the objects of a local cluster: little more than one copy of the weights."""
_ANSWER_S = 10.0
_SETTINGS = {"max_direct_call_object_size": 1 << 20, "prestart_worker_first_driver": False}
"""Of a cluster of our own: bytes that a message carries itself, since through the object store a
batch takes twice as long to get to a rank; and no worker for each core that nobody would use."""
_CARRIED = ("MKL_CBWR", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "HF_HOME")
"""Variables that workers must have before they import anything."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


def require_ray() -> "ModuleType":
    """The package; a UserError that names the extra where it is not installed."""
    if importlib.util.find_spec("ray") is None:
        why = "the package ray is not installed"
        raise UserError("trainer.runtime", "ray", why, 'pip install "luyen[ray]"')
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


@final
class Connection:
    """A cluster that this process is connected to."""

    def __init__(self, ray: "ModuleType", *, guard_process: subprocess.Popen[bytes] | None) -> None:
        self._ray = ray
        self._guard = guard_process

    @property
    def is_own(self) -> bool:
        """Whether the cluster was started here and ends with this process."""
        return self._guard is not None

    def nodes(self) -> tuple[NodeOffer, ...]:
        """Living nodes, with what they have in all."""
        found: list[NodeOffer] = []
        for node in self._ray.nodes():
            has = node["Resources"]
            if node["Alive"]:
                offer = NodeOffer(
                    name=node["NodeID"], cpus=int(has.get("CPU", 0)), gpus=int(has.get("GPU", 0))
                )
                found.append(offer)
        return tuple(found)

    def disconnect(self) -> None:
        """Leave; a cluster of our own ends. Leaving twice is allowed."""
        self._ray.shutdown()
        if self._guard is not None and self._guard.stdin is not None:
            self._guard.stdin.close()
            self._guard.wait()
            self._guard = None


def connect(
    address: str | None = None,
    *,
    cpus: int | None = None,
    threads: int | None = None,
    store_bytes: int = STORE_BYTES,
) -> Connection:
    """Connect to `address` or to RAY_ADDRESS; where neither is given, start a cluster of our own.

    `auto` is the cluster of this machine, `local` starts one, of `cpus` logical cores. Workers see
    the modules that this process sees, and compute with `threads` threads (None: as Ray decides).
    """
    ray = require_ray()
    assert not ray.is_initialized(), "this process is connected already"
    environment = worker_environment(threads)
    # Never a cluster that merely happens to be here: it may be somebody else's.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    known: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": environment},
    }
    with _own_signals():
        if address not in ("local", "auto"):
            _refuse_nobody(address)
        if address != "local":
            try:
                ray.init(address=address, **known)
                return Connection(ray, guard_process=None)
            except ConnectionError as error:
                raise _nobody(address, str(error)) from error
        known["num_cpus"] = cpus or this_machine().cpus
        return _start_local(ray, known, store_bytes)


def _refuse_nobody(address: str) -> None:
    """A UserError at once where nobody listens; Ray itself would try for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        why = "the controller must be a process of the cluster, reached by host:port"
        raise UserError("RAY_ADDRESS", address, why, "start the run on a node of the cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise _nobody(address, str(error)) from error


def _nobody(address: str, reason: str) -> UserError:
    fix = "start one with `ray start --head`, or unset RAY_ADDRESS"
    return UserError("RAY_ADDRESS", address, f"no cluster answers there: {reason}", fix)


def worker_environment(threads: int | None) -> dict[str, str]:
    """Variables of every worker: exact arithmetic, and the modules that this process sees."""
    prepare_process()
    found = {name: os.environ[name] for name in _CARRIED if name in os.environ}
    if threads is not None:
        found["OMP_NUM_THREADS"] = str(threads)
    own = [Path(entry or ".").absolute() for entry in sys.path]
    installed = (Path(sys.prefix), Path(sys.base_prefix))
    seen = [str(p) for p in own if p.is_dir() and not any(p.is_relative_to(i) for i in installed)]
    return {**found, "PYTHONPATH": os.pathsep.join(dict.fromkeys(seen))}


def _start_local(ray: "ModuleType", known: dict[str, Any], store_bytes: int) -> Connection:
    mark, folder = secrets.token_hex(16), SessionFolder()
    known["runtime_env"]["env_vars"] |= local_environment(folder)
    # It must not carry the mark itself, nor hear of a Ctrl-C meant for the run.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, mark, str(folder.path)],
        stdin=subprocess.PIPE,
        pass_fds=(folder.lock,),
        start_new_session=True,
    )
    os.environ[guard.MARK] = mark
    try:
        with kept_to_this_machine():
            ray.init(
                address="local",
                include_dashboard=False,
                object_store_memory=store_bytes,
                _temp_dir=folder.temporary,
                _system_config=_SETTINGS,
                **known,
            )
    finally:
        folder.close()
        # What the run starts later on its own account is not the cluster's.
        del os.environ[guard.MARK]
        if not ray.is_initialized() and watcher.stdin is not None:
            watcher.stdin.close()
    return Connection(ray, guard_process=watcher)


@contextmanager
def _own_signals() -> Generator[None]:
    """Keep the handlers of this process; Ray puts its own in their place."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
