"""What foreign code raised, in one line."""

from contextlib import suppress
from pathlib import Path
from traceback import extract_tb

_SHOWN = 200


def last_line(fault: BaseException) -> str:
    """The last line of a traceback, with the place it points at.

    Example:
        >>> last_line(ValueError("no such key"))
        'ValueError: no such key'
    """
    said = "it cannot be printed"
    with suppress(Exception):  # its own __str__ may raise
        said = str(fault)
    text = f"{type(fault).__name__}: {said}".partition("\n")[0][:_SHOWN]
    frames = extract_tb(fault.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{text}{where}"
