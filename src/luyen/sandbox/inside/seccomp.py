"""Seccomp: system calls that the kernel refuses to a program and to all that it starts."""

import ctypes
import errno
import platform
import struct

from luyen.sandbox.inside.kernel import PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, ask, control

_MODE_FILTER = 2
_LOAD, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x15, 0x35, 0x06
_NUMBER, _ARCHITECTURE = 0, 4
_ALLOW, _REFUSE = 0x7FFF0000, 0x00050000 | errno.EPERM
_FOREIGN = 0x40000000
"""From here on calls of the x32 interface: the same calls under other numbers."""

_IO_URING = 425
"""Sets up a queue through which sockets could be made without the call for it."""
_MACHINES: dict[str, tuple[int, int, tuple[int, ...]]] = {
    "x86_64": (0xC000003E, 41, (101, 310, 311, _IO_URING)),
    "aarch64": (0xC00000B7, 198, (117, 270, 271, _IO_URING)),
}
"""Machine to its architecture, the number of `socket`, and those of `ptrace`, `process_vm_readv`,
`process_vm_writev` and `io_uring_setup`."""


def refuse(*, network: bool) -> bool:
    """Refuse sockets (pairs stay), io_uring and other processes' memory; False where unknown."""
    machine = platform.machine()
    if machine not in _MACHINES:
        return False
    architecture, socket, others = _MACHINES[machine]
    program = _program(architecture, others if network else (socket, *others))
    control(PR_SET_NO_NEW_PRIVS, 1)
    text = ctypes.create_string_buffer(program, len(program))
    header = struct.pack("HxxxxxxQ", len(program) // 8, ctypes.addressof(text))
    return ask("prctl", PR_SET_SECCOMP, _MODE_FILTER, header, 0, 0)


def _program(architecture: int, refused: tuple[int, ...]) -> bytes:
    """The filter: one comparison per refused call; another architecture gets nothing at all."""
    last = len(refused) + 1
    lines = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_JUMP_EQUAL, 0, last + 2, architecture),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, last, 0, _FOREIGN),
    ]
    for i, number in enumerate(refused):
        lines.append((_JUMP_EQUAL, last - 1 - i, 0, number))
    lines += [(_RETURN, 0, 0, _ALLOW), (_RETURN, 0, 0, _REFUSE)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)
