"""What foreign code raised, in one line."""

import re
from pathlib import Path
from traceback import extract_tb

from luyen.base.foreign import ForeignExit, boundary
from luyen.base.secrets import masked

_SHOWN = 200
_FOLDERS = re.compile(r"(?:/[^/\s'\"]+){2,}(?=/)")
"""Folders of a path; its last name says what is meant."""


def raised_by(fault: BaseException) -> BaseException:
    """What foreign code raised, without the exception that it may travel in.

    Example:
        >>> raised_by(ForeignExit(SystemExit(0)))
        SystemExit(0)
    """
    return fault.raised if isinstance(fault, ForeignExit) else fault


def last_line(fault: BaseException) -> str:
    """The last line of a traceback, with the place it points at; any file can hold it.

    Half of a surrogate pair, as in a file name that is no UTF-8, becomes a question mark. A line
    that is too long loses the folders of its paths first, and then its end.

    Example:
        >>> last_line(ValueError("no such key"))
        'ValueError: no such key'
        >>> last_line(OSError("\\udcff is missing"))
        'OSError: ? is missing'
        >>> last_line(OSError(f"/home{'/folder' * 40}/file.txt is missing"))
        'OSError: .../file.txt is missing'
        >>> last_line(ForeignExit(SystemExit(0)))
        'SystemExit: 0'
    """
    fault = raised_by(fault)
    said = "it cannot be printed"
    with boundary([]):  # its own __str__ may raise
        said = plain_text(str(fault))
    text = f"{type(fault).__name__}: {said}" if said else type(fault).__name__
    text = masked(text.partition("\n")[0])
    text = text if len(text) <= _SHOWN else _FOLDERS.sub("...", text)
    frames = extract_tb(fault.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return text[:_SHOWN] + where


def plain_text(text: str) -> str:
    """The text as an ordinary string that any file can hold.

    A subclass of `str` may raise later, wherever it is compared or cut.

    Example:
        >>> plain_text("half a pair: \\ud800")
        'half a pair: ?'
    """
    return "".join([text]).encode(errors="replace").decode()
