"""The lock of a run directory: one process at a time writes a run.

The claim is a lock of the operating system on a file of its own in the run directory, which is
never replaced, so two processes that make the same directory at once lock the same file. The lock
ends with the process, however that ends. The file says who has it; readers need none.
"""

import json
import os
import platform
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.files import is_running, open_regular, refuse_linked_folders, writing
from luyen.base.input_files import parse_json, read_bytes
from luyen.base.system import in_forked_children, lock, write_at_start

OWNER = ".owner"
"""The file that is locked."""
_TIMEOUT_S = 0.1
"""A reader that looks has the lock for microseconds."""
_NAMED_S = 3.0
"""Within that, a new owner has written its name also on a busy machine."""
_PAUSE_S = 0.005
_MOST_TRIES = 100
"""Directories that vanish while they are claimed, one after the other."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Owner:
    """The process that trains a run.

    Example:
        >>> Owner(pid=4711, host="box", since="2026-01-01T10:00:00+00:00").words()
        'process 4711 on box since 2026-01-01T10:00:00+00:00'
    """

    pid: int
    """Its process id."""
    host: str
    """The machine it runs on."""
    since: str
    """When it claimed the run."""

    def words(self) -> str:
        """For people."""
        return f"process {self.pid} on {self.host} since {self.since}"


@final
class _Claim:
    """A claim of this process: the locked file, and how often it is to be released."""

    def __init__(self, handle: int) -> None:
        self.handle = handle
        self.count = 1


_mine: dict[Path, _Claim] = {}


def _leave_to_parent() -> None:
    """A forked child has no claims: one that outlives its parent must not keep the run."""
    for own in _mine.values():
        os.close(own.handle)
    _mine.clear()


in_forked_children(_leave_to_parent)


def claim(folder: Path) -> None:
    """Make a run directory if need be, and claim it; a UserError when another process has it.

    Claiming what this process has is allowed, and is to be released as often. A file system without
    locks lets everyone in.
    """
    place = folder.resolve()
    if place in _mine:
        _mine[place].count += 1
        return
    fix = "free disk space, change the permissions, or choose another trainer.default_local_dir"
    with writing(folder, field="run directory", fix=fix):
        refuse_linked_folders(place)
        handle = _locked(place)
        if handle is None:
            raise _refusal(folder, _owner_now(place))
        _mine[place] = _Claim(handle)
        _sign(handle)


def refuse_claimed(folder: Path) -> None:
    """A UserError when another process has the run; nothing is made or claimed."""
    place = folder.resolve()
    if place not in _mine and is_claimed(folder):
        raise _refusal(folder, _owner_now(place))


def demand_claim(folder: Path) -> None:
    """A UserError when the directory that this process claimed is gone, or another is in its place.

    Without a claim nothing is demanded.
    """
    place = folder.resolve()
    own = _mine.get(place)
    if own is not None and not _is_at(own.handle, place / OWNER):
        why = "it was removed or replaced while it was trained, and so was its claim"
        fix = "leave the directories of running runs alone; the same command starts a new run"
        raise UserError("run directory", str(folder), why, fix)


def is_claimed(folder: Path) -> bool:
    """Whether some process is training the run; False where the file system has no locks."""
    if folder.resolve() in _mine:
        return True
    try:
        handle = open_regular(folder / OWNER, os.O_RDONLY)
    except OSError:
        return False
    try:
        lock(handle, is_shared=True)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def release(folder: Path) -> None:
    """Release the run lock. Releasing a folder that is not claimed is allowed.

    A directory in which nothing else was made is removed.
    """
    place = folder.resolve()
    own = _mine.get(place)
    if own is None:
        return
    own.count -= 1
    if own.count:
        return
    del _mine[place]
    try:
        if _is_at(own.handle, place / OWNER):
            os.ftruncate(own.handle, 0)
            if os.listdir(place) == [OWNER]:
                (place / OWNER).unlink()
                place.rmdir()
    except OSError:
        pass  # a file system that takes no more: the lock is what counts
    finally:
        os.close(own.handle)


def _locked(place: Path) -> int | None:
    """A handle of the locked file; None when another process has it."""
    for _ in range(_MOST_TRIES):
        try:
            place.mkdir(parents=True, exist_ok=True)
            handle = open_regular(place / OWNER, os.O_RDWR | os.O_CREAT)
        except FileNotFoundError:
            continue  # the directory was removed in between
        except FileExistsError:
            if os.path.lexists(place) and not place.is_dir():
                raise  # a file of that name is in the way
            continue
        if not _lock(handle):
            os.close(handle)
            return None
        if _is_at(handle, place / OWNER):
            return handle
        os.close(handle)  # the lock file was removed with its directory
    why = "it is removed again and again while it is claimed"
    raise UserError("run directory", str(place), why, "end whatever removes it, and start again")


def _lock(handle: int) -> bool:
    """Lock the file; False when another process has it, True where there are no locks."""
    end = time.monotonic() + _TIMEOUT_S
    while True:
        try:
            lock(handle)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(_PAUSE_S)  # the holder may be a reader that checks whether the run is active
        except OSError:
            return True
        else:
            return True


def _is_at(handle: int, path: Path) -> bool:
    """Whether the path still means the file of the handle."""
    try:
        return os.path.samestat(os.fstat(handle), os.stat(path))
    except OSError:
        return False


def _sign(handle: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds")
    said = {"pid": os.getpid(), "host": platform.node(), "since": now}
    os.ftruncate(handle, 0)
    write_at_start(handle, f"{json.dumps(said)}\n".encode())


def _owner_now(place: Path) -> Owner | None:
    """Who has the run; None when it has not written its name, or is gone by now."""
    end = time.monotonic() + _NAMED_S
    while time.monotonic() < end:
        found = _read(place / OWNER)
        if found is not None and not _is_gone(found):
            return found
        time.sleep(_PAUSE_S)
    return None


def _read(path: Path) -> Owner | None:
    try:
        found = parse_json(read_bytes(path))
        return Owner(pid=int(found["pid"]), host=str(found["host"]), since=str(found["since"]))
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _is_gone(owner: Owner) -> bool:
    """Whether a process of this machine has ended: its name is that of the owner before."""
    return owner.host == platform.node() and not is_running(owner.pid)


def _refusal(folder: Path, owner: Owner | None) -> UserError:
    who = owner.words() if owner is not None else "it has not written down who it is"
    why = f"another process is training it ({who}), and two would write over each other"
    fix = "wait until that one has ended, end it, or choose another trainer.experiment_name"
    return UserError("run directory", str(folder), why, fix)
