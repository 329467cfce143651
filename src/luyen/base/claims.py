"""One process at a time writes a run.

The claim is a lock of the operating system on the manifest, so it ends with the process, however
that ends, and leaves nothing behind. Readers need none.
"""

import fcntl
import os
from pathlib import Path

from luyen.base.errors import UserError

_mine: dict[Path, int] = {}
"""Handles of the manifests that this process has claimed."""


def claim(manifest: Path) -> None:
    """Claim a run by its manifest; a UserError when another process has it.

    A file system without locks lets everyone in.
    """
    place = manifest.resolve()
    if place in _mine:
        return
    handle = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        why = "another process is training it, and two would write over each other"
        fix = "wait until that one has ended, end it, or choose another trainer.experiment_name"
        raise UserError("run directory", str(manifest.parent), why, fix) from error
    except OSError:
        os.close(handle)
        return
    _mine[place] = handle


def is_claimed(manifest: Path) -> bool:
    """Whether some process is training the run; False where the file system has no locks."""
    if manifest.resolve() in _mine:
        return True
    try:
        handle = os.open(manifest, os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


def release(manifest: Path) -> None:
    """Let others have the run. Releasing what is not claimed is allowed."""
    handle = _mine.pop(manifest.resolve(), None)
    if handle is not None:
        os.close(handle)
