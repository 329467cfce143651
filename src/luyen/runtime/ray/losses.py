"""What errors of Ray stand for: a process that is gone, or code that broke in one."""

import re

from ray.exceptions import (
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    WorkerCrashedError,
)

from luyen.base.errors import UserError
from luyen.runtime.ray.wire import RanksLost, RemoteError

GONE = (RayActorError, NodeDiedError, WorkerCrashedError, OutOfMemoryError)
"""The process is gone, with its node or without, for whatever reason."""
FAILED_BEFORE = "another call of this rank failed before"
"""What a rank says to every call behind one that broke."""
_ECHOES = re.compile(
    rf"{FAILED_BEFORE}|gloo/|Connection (closed|reset) by peer|ncclRemoteError|ncclSystemError|"
    r"NCCL communicator was aborted|DistNetworkError"
)
"""What a rank says when another is not there any more, or when it broke before."""
_REASONS = (
    r"(?P<said>[^\n]*low on memory[^\n]*)",
    r"Worker exit detail: (?P<said>.*?)(?: Some common causes|\n|$)",
    r"(?P<said>[^\n]*\bnode\b[^\n]*(?:died|dead|terminated)[^\n]*)",
    r"The actor (?:is dead|died) because (?P<said>[^\n]*)",
)
_COLOURS = re.compile(r"\x1b\[\d+m")


def is_echo(error: RayError) -> bool:
    """Whether a rank broke only because it lost the connection to another."""
    is_users = isinstance(error, RayTaskError) and isinstance(error.cause, UserError)
    return isinstance(error, RayTaskError) and not is_users and bool(_ECHOES.search(str(error)))


def meaning(error: RayError, rank: int) -> BaseException:
    """What an error of a rank stands for, to the one who runs."""
    if isinstance(error, GONE):
        return RanksLost(f"rank {rank} is gone: {reason(error)}")
    if isinstance(error, ObjectLostError):
        return RanksLost(f"rank {rank} is gone, and with it what it had to say: {reason(error)}")
    if isinstance(error, RayTaskError):
        cause = error.cause
        if isinstance(cause, UserError):
            return cause
        broken = RemoteError(f"rank {rank}", traceback_of(error))
        if is_echo(error):
            return RanksLost(f"rank {rank} lost the connection to the others\n{broken}")
        return broken
    return error


def holds_lost(error: BaseException) -> bool:
    """Whether what was published is gone with the rank that held it."""
    inner = error.cause if isinstance(error, RayTaskError) else error
    return isinstance(inner, ObjectLostError)


def lost_silent(rank: int, seconds: float) -> RanksLost:
    """What is said of a rank that gives no sign of life."""
    why = f"rank {rank} gave no sign of life for {seconds:.0f} s: its process or node is stopped"
    return RanksLost(f"{why}, overloaded or cut off")


def reason(error: BaseException) -> str:
    """Of the many lines that Ray has to say, the one that tells why."""
    text = _COLOURS.sub("", str(error)).strip()
    for pattern in _REASONS:
        found = re.search(pattern, text)
        if found:
            return " ".join(found["said"].split()).rstrip(".")
    return text.partition("\n")[0].rstrip(".")


def traceback_of(error: RayTaskError) -> str:
    """What was raised in another process, with its place there."""
    first, *rest = _COLOURS.sub("", str(error)).splitlines()
    # Ray drops its own frames from the text, and leaves the carets under them.
    start = next((i for i, line in enumerate(rest) if line.strip(" ^~")), 0)
    return "\n".join([first, *rest[start:]])
