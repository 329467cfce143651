"""Connecting to a Ray cluster, or starting a local one that only this user can reach.

The actors of a job end with its controller. A local cluster ends with the controller too, even if
the controller is killed: all its processes and files are removed.
"""

import fcntl
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.config.machine import this_machine
from luyen.runtime.ray import reaper
from luyen.runtime.ray.pools import NodeOffer

if TYPE_CHECKING:
    from types import ModuleType


# Isolation of a local cluster: its processes listen on the loopback interface, connections need a
# token that is in no file, and its files are in a folder that only this user can enter.

LISTEN = "LUYEN_RAY_LISTEN"
"""Environment variable: the interfaces to listen on, `loopback` or `all`."""
FOLDER = "LUYEN_RAY_FOLDER"
"""Environment variable of workers: the session folder, where ranks rendezvous by file."""
_PREFIX = "luyen-ray-"
_LOCK = "lock"
_LONGEST = 40
"""Longest path of a parent folder: Ray puts Unix sockets below it, limited to 107 characters."""
_YOUNG_S = 3600.0
"""A younger folder without a lock file may be one that is being created."""
_LOOPBACK = "127.0.0.1"
_NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for single-machine clusters; at 0 Ray uses the loopback interface."""
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN = secrets.token_hex(32)
"""The same for all clusters of this process: Ray reads it once."""


@final
class SessionFolder:
    """A private folder of this user, locked for the lifetime of its cluster."""

    def __init__(self) -> None:
        """Create a folder, and remove those of clusters that have ended."""
        parent = _parent()
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        """Descriptor of the lock file; the folder is in use while a process has it open."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    @property
    def temporary(self) -> str:
        """Ray's temporary folder. Ray makes it world-writable; its parent keeps other users out."""
        return str(self.path / "r")

    def close(self) -> None:
        """Release the lock here. The reaper, which has inherited it, removes the folder."""
        os.close(self.lock)


def sweep(parent: Path) -> None:
    """Remove this user's session folders below `parent` whose cluster has ended."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            seen = path.lstat()
            if seen.st_uid == os.geteuid() and path.is_dir() and not path.is_symlink():
                _remove_unlocked(path, time.time() - seen.st_mtime)
        except OSError:  # another process removes it too
            continue


def _remove_unlocked(path: Path, age_s: float) -> None:
    if not (path / _LOCK).is_file():
        if age_s > _YOUNG_S:
            shutil.rmtree(path, ignore_errors=True)
        return
    lock = os.open(path / _LOCK, os.O_RDWR)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    except BlockingIOError:
        return
    finally:
        os.close(lock)


def _parent() -> Path:
    wanted = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
    return Path(wanted) if len(wanted) <= _LONGEST else Path("/tmp")


def listens_to_all() -> bool:
    """Whether a local cluster accepts connections from other machines."""
    wanted = os.environ.get(LISTEN, "loopback")
    if wanted not in ("loopback", "all"):
        raise UserError(LISTEN, wanted, "it is `loopback` or `all`", f"unset {LISTEN}")
    return wanted == "all"


def local_environment(folder: SessionFolder) -> dict[str, str]:
    """Environment variables of a local cluster's workers; collectives use the loopback too."""
    if listens_to_all():
        return {}
    own = {
        name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }
    return {**own, FOLDER: str(folder.path)}


def meeting_place(host: str) -> tuple[str, Any]:
    """Rendezvous address of a process group, for its first rank, which runs on `host`.

    On a local cluster that is a file: torch's store would listen on all interfaces. Elsewhere it is
    the port of the store, which torch finds in this process as long as it is kept: another process
    could take a port that is only free.
    """
    if FOLDER in os.environ:
        return f"file://{os.environ[FOLDER]}/ranks-{secrets.token_hex(8)}", None
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    store = TCPStore(host, 0, is_master=True, wait_for_workers=False, multi_tenant=True)
    return f"tcp://{host}:{store.port}", store


@contextmanager
def kept_to_this_machine() -> Generator[None]:
    """Inside, Ray starts clusters on the loopback interface, protected by a token.

    Its processes inherit the environment variables; at the end those of this process are restored.
    """
    before = {name: os.environ.get(name) for name in (_NO_CLUSTER, *_AUTH)}
    if not any(before[name] for name in _AUTH):
        # Without a token in the environment Ray would write one into a file.
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
    is_kept = not listens_to_all()
    if is_kept:
        os.environ[_NO_CLUSTER] = "0"
    import ray
    from ray._private import ray_constants

    was = ray_constants.ENABLE_RAY_CLUSTER
    # Ray reads the variable at import, which may have happened before.
    ray_constants.ENABLE_RAY_CLUSTER = was and not is_kept
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = was
        _restore(before)
    if is_kept and ray.util.get_node_ip_address() != _LOOPBACK:
        ray.shutdown()
        why = f"ray {ray.__version__} does not keep to the loopback interface"
        fix = f"install another version, or let all interfaces in with {LISTEN}=all"
        raise UserError("trainer.runtime", "ray", why, fix)


def _restore(before: dict[str, str | None]) -> None:
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


STORE_BYTES = 1 << 30
"""Size of a local cluster's object store: it holds little more than one copy of the weights."""
_ANSWER_S = 10.0
_SETTINGS = {"max_direct_call_object_size": 1 << 20, "prestart_worker_first_driver": False}
"""Of a local cluster: bytes that a message carries inline, since the object store doubles the time
that a batch takes to a rank; and no idle worker per core."""
_CARRIED = ("MKL_CBWR", "OMP_NUM_THREADS", "TOKENIZERS_PARALLELISM", "HF_HUB_OFFLINE", "HF_HOME")
"""Environment variables that workers must have before they import anything."""
_QUIET = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_IGNORE_UNHANDLED_ERRORS": "1",
}


def require_ray() -> "ModuleType":
    """The module `ray`; a UserError that names the extra if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        why = "the package ray is not installed"
        raise UserError("trainer.runtime", "ray", why, 'pip install "luyen[ray]"')
    for name, value in _QUIET.items():
        os.environ.setdefault(name, value)
    import ray

    return ray


@final
class Connection:
    """The connection of this process to a cluster."""

    def __init__(self, ray: "ModuleType", *, guard_process: subprocess.Popen[bytes] | None) -> None:
        self._ray = ray
        self._guard = guard_process

    @property
    def is_own(self) -> bool:
        """Whether the cluster was started by this process and ends with it."""
        return self._guard is not None

    def nodes(self) -> tuple[NodeOffer, ...]:
        """Living nodes with their total resources."""
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
        """Disconnect; a local cluster ends. Disconnecting twice is allowed."""
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
    """Connect to `address` or to RAY_ADDRESS; without either, start a local cluster.

    `auto` is the cluster of this machine, `local` starts one of `cpus` logical cores. Workers have
    the import path of this process, and compute with `threads` threads (None: as Ray decides).
    """
    ray = require_ray()
    assert not ray.is_initialized(), "this process is connected already"
    environment = worker_environment(threads)
    # Never a running cluster that was not named: it may belong to another job.
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    known: dict[str, Any] = {
        "log_to_driver": False,
        "logging_level": logging.ERROR,
        "runtime_env": {"env_vars": environment},
    }
    with _own_signals():
        if address not in ("local", "auto"):
            _refuse_unreachable(address)
        if address != "local":
            try:
                ray.init(address=address, **known)
                return Connection(ray, guard_process=None)
            except ConnectionError as error:
                raise _unreachable(address, str(error)) from error
        known["num_cpus"] = cpus or this_machine().cpus
        return _start_local(ray, known, store_bytes)


def _refuse_unreachable(address: str) -> None:
    """Raise a UserError at once if no process listens there; Ray would retry for minutes."""
    host, _, port = address.rpartition(":")
    if "://" in address or not port.isdigit():
        why = "the controller must be a process of the cluster, reached by host:port"
        raise UserError("RAY_ADDRESS", address, why, "start the run on a node of the cluster")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_ANSWER_S).close()
    except OSError as error:
        raise _unreachable(address, str(error)) from error


def _unreachable(address: str, reason: str) -> UserError:
    fix = "start one with `ray start --head`, or unset RAY_ADDRESS"
    return UserError("RAY_ADDRESS", address, f"no cluster answers there: {reason}", fix)


def worker_environment(threads: int | None) -> dict[str, str]:
    """Environment of every worker: exact arithmetic, and the import path of this process."""
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
    # It must not carry the mark itself, nor receive a Ctrl-C meant for the run.
    watcher = subprocess.Popen(
        [sys.executable, "-I", "-S", reaper.__file__, mark, str(folder.path)],
        stdin=subprocess.PIPE,
        pass_fds=(folder.lock,),
        start_new_session=True,
    )
    os.environ[reaper.MARK] = mark
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
        # Processes that the run starts later do not belong to the cluster.
        del os.environ[reaper.MARK]
        if not ray.is_initialized() and watcher.stdin is not None:
            watcher.stdin.close()
    return Connection(ray, guard_process=watcher)


@contextmanager
def _own_signals() -> Generator[None]:
    """Restore this process's signal handlers at the end; Ray replaces them."""
    logging.getLogger("ray").setLevel(logging.ERROR)
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
