"""System calls that Python does not offer. Every one says whether the kernel agreed."""

import ctypes
import os
import platform
import sys

_LIBC = ctypes.CDLL(None, use_errno=True)
_IS_LINUX = os.uname().sysname == "Linux"

PR_SET_PDEATHSIG = 1
PR_SET_DUMPABLE = 4
PR_SET_SECCOMP = 22
PR_CAPBSET_DROP = 24
PR_SET_CHILD_SUBREAPER = 36
PR_SET_NO_NEW_PRIVS = 38
_CAPABILITY_VERSION = 0x20080522
_KEYCTL, _JOIN_SESSION_KEYRING = {"x86_64": 250, "aarch64": 219}, 1


def ask(name: str, *arguments: int | bytes | None) -> bool:
    """Call a function of the C library; whether it returned 0."""
    return _IS_LINUX and _LIBC[name](*map(_wide, arguments)) == 0


def system_call(number: int, *arguments: int | bytes | None) -> int:
    """Make a system call; its result, negative when it is refused or there is none."""
    if not _IS_LINUX:
        return -1
    return int(_LIBC.syscall(*map(_wide, (number, *arguments))))


def control(option: int, argument: int) -> bool:
    """Set one property of this process."""
    return ask("prctl", option, argument, 0, 0, 0)


def leave_keyrings() -> None:
    """Give this process an empty session keyring: that of the login holds keys of the user."""
    number = _KEYCTL.get(platform.machine())
    if number is not None:
        system_call(number, _JOIN_SESSION_KEYRING, None)


def drop_capabilities() -> None:
    """Give up what root may do beyond its own files, for this process and all it starts."""
    number = 0
    while control(PR_CAPBSET_DROP, number):
        number += 1
    header = _CAPABILITY_VERSION.to_bytes(4, sys.byteorder) + bytes(4)
    ask("capset", header, bytes(24))


def _wide(argument: int | bytes | None) -> object:
    """Integers as wide as a register: the C side would read rubbish above the lower half."""
    return ctypes.c_long(argument) if isinstance(argument, int) else argument
