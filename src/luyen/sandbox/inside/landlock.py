"""Landlock: which files may be read and written, enforced by the kernel without privileges."""

import os
import stat
import struct
from collections.abc import Iterable

from luyen.sandbox.inside.kernel import PR_SET_NO_NEW_PRIVS, control, system_call

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_ASK_VERSION, _BENEATH = 1, 1
_EXECUTE, _WRITE, _READ, _LIST = 1, 2, 4, 8
_TRUNCATE, _IOCTL = 1 << 14, 1 << 15
_SCOPES = 3
"""No abstract socket and no signal to a process outside."""
KNOWS_TRUNCATE, KNOWS_SIGNALS = 3, 6
"""Versions from which on files cannot be emptied, and processes outside not signalled."""


def restrict(*, readable: Iterable[str], writable: Iterable[str]) -> int:
    """Refuse this process every file that is not beneath these; the version in force, 0: none."""
    version = system_call(_CREATE, None, 0, _ASK_VERSION)
    if version < 1:
        return 0
    handled = _known(version)
    attributes = struct.pack("QQQ", handled, 0, _SCOPES if version >= KNOWS_SIGNALS else 0)
    size = 24 if version >= KNOWS_SIGNALS else 8
    ruleset = system_call(_CREATE, attributes, size, 0)
    if ruleset < 0:
        return 0
    for path in readable:
        _allow(ruleset, path, (_EXECUTE | _READ | _LIST) & handled)
    for path in writable:
        _allow(ruleset, path, handled & ~_IOCTL)
    control(PR_SET_NO_NEW_PRIVS, 1)
    done = system_call(_RESTRICT, ruleset, 0) == 0
    os.close(ruleset)
    return version if done else 0


def _known(version: int) -> int:
    """The rights on files that this version of the kernel can refuse."""
    rights = (1 << 13) - 1
    rights |= (1 << 13) if version >= 2 else 0  # moving files between directories
    rights |= _TRUNCATE if version >= KNOWS_TRUNCATE else 0
    return rights | (_IOCTL if version >= 5 else 0)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:  # not on this machine, so there is nothing to allow
        return
    if not stat.S_ISDIR(os.fstat(place).st_mode):
        rights &= _EXECUTE | _WRITE | _READ | _TRUNCATE
    system_call(_ADD, ruleset, _BENEATH, struct.pack("=Qi", rights, place), 0)
    os.close(place)
