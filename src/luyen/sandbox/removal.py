"""Removing what a program left: directories of any depth and mode, names of any kind."""

import os
import stat
from contextlib import suppress

_OPEN = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def remove(work: str) -> None:
    """Remove a directory with all that is in it; nothing is raised.

    Directories are emptied one by one: those inside are first moved up beside them. So neither the
    depth of a tree nor the length of its paths matters, and no more than two are open at once.
    """
    with suppress(OSError):
        os.chmod(work, stat.S_IRWXU)
    with suppress(OSError):
        top = os.open(work, _OPEN)
        try:
            while _thinned(top):
                pass
        finally:
            os.close(top)
    with suppress(OSError):
        os.rmdir(work)


def _thinned(top: int) -> bool:
    """Remove every entry of a directory after moving up what lies in it; whether any went."""
    is_less = False
    for name in os.listdir(top):
        with suppress(OSError):
            if stat.S_ISDIR(os.stat(name, dir_fd=top, follow_symlinks=False).st_mode):
                _move_up(top, name)
                os.rmdir(name, dir_fd=top)
            else:
                os.unlink(name, dir_fd=top)
            is_less = True
    return is_less


def _move_up(top: int, name: str) -> None:
    """Empty a directory: files are removed, directories get a free name beside it."""
    os.chmod(name, stat.S_IRWXU, dir_fd=top)
    inner = os.open(name, _OPEN, dir_fd=top)
    try:
        for number, one in enumerate(os.listdir(inner)):
            with suppress(OSError):
                if stat.S_ISDIR(os.stat(one, dir_fd=inner, follow_symlinks=False).st_mode):
                    os.chmod(one, stat.S_IRWXU, dir_fd=inner)  # its owner may have lost the right
                    free = f"luyen-{os.stat(one, dir_fd=inner).st_ino}-{number}"
                    os.rename(one, free, src_dir_fd=inner, dst_dir_fd=top)
                else:
                    os.unlink(one, dir_fd=inner)
    finally:
        os.close(inner)
