"""What keeps a cluster of our own to this machine and this user.

Its processes listen on the loopback interface, nobody joins without a token that stands in no
file, and its files lie in a folder that only this user can enter, which goes with the cluster.
"""

import fcntl
import os
import secrets
import shutil
import socket
import tempfile
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import final

from luyen.base.errors import UserError

LISTEN = "LUYEN_RAY_LISTEN"
"""The variable that says who may connect: `loopback`, or `all` for every interface."""
FOLDER = "LUYEN_RAY_FOLDER"
"""The variable by which workers know the folder: in it the ranks meet, without a port."""
_PREFIX = "luyen-ray-"
_LOCK = "lock"
_LONGEST = 40
"""Letters of a parent folder: Ray puts Unix sockets below it, whose paths end at 107."""
_YOUNG_S = 3600.0
"""A folder without a lock may be one that is just being made."""
_LOOPBACK = "127.0.0.1"
_NO_CLUSTER = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for machines that are no part of a larger cluster; at 0 it uses the loopback."""
_AUTH = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
_TOKEN = secrets.token_hex(32)
"""One for all clusters of this process: Ray reads it once."""


@final
class SessionFolder:
    """A folder that is this user's alone, locked for as long as its cluster is there."""

    def __init__(self) -> None:
        """Make one, and remove those of clusters that are gone."""
        parent = _parent()
        sweep(parent)
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        self.lock = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        """Whoever has this descriptor holds the folder."""
        fcntl.flock(self.lock, fcntl.LOCK_EX)

    @property
    def temporary(self) -> str:
        """Where Ray may put its files: it lets everybody write there, but nobody gets so far."""
        return str(self.path / "r")

    def close(self) -> None:
        """Let go of it. It is removed by the guard, who holds it too."""
        os.close(self.lock)


def sweep(parent: Path) -> None:
    """Remove the folders below `parent` whose cluster is gone, and which are ours."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            seen = path.lstat()
            if seen.st_uid == os.geteuid() and path.is_dir() and not path.is_symlink():
                _remove_unlocked(path, time.time() - seen.st_mtime)
        except OSError:  # somebody else removes it too
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
    """Whether the user wants the cluster to be reached from other machines."""
    wanted = os.environ.get(LISTEN, "loopback")
    if wanted not in ("loopback", "all"):
        raise UserError(LISTEN, wanted, "it is `loopback` or `all`", f"unset {LISTEN}")
    return wanted == "all"


def local_environment(folder: SessionFolder) -> dict[str, str]:
    """Variables of the workers of a cluster of our own; ranks too speak over the loopback."""
    if listens_to_all():
        return {}
    own = {
        name: os.environ.get(name, "lo") for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    }
    return {**own, FOLDER: str(folder.path)}


def meeting_place(host: str) -> str:
    """Where ranks can meet whose first one runs on `host`, in a process of the cluster.

    On one machine that is a file: the port of torch's store would be open to all interfaces.
    """
    if FOLDER in os.environ:
        return f"file://{os.environ[FOLDER]}/ranks-{secrets.token_hex(8)}"
    with socket.socket() as free:
        free.bind((host, 0))
        return f"tcp://{host}:{free.getsockname()[1]}"


@contextmanager
def kept_to_this_machine() -> Generator[None]:
    """Ray starts a cluster on the loopback interface meanwhile, closed by a token.

    What the variables say is inherited by its processes; afterwards this one is as before.
    """
    before = {name: os.environ.get(name) for name in (_NO_CLUSTER, *_AUTH)}
    if not any(before[name] for name in _AUTH):
        # Ray demands a token of its own accord; without this one it would write one into a file.
        os.environ["RAY_AUTH_TOKEN"] = _TOKEN
    is_kept = not listens_to_all()
    if is_kept:
        os.environ[_NO_CLUSTER] = "0"
    import ray
    from ray._private import ray_constants

    was = ray_constants.ENABLE_RAY_CLUSTER
    # It is read from the variable when Ray is imported, which may have been long ago.
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
