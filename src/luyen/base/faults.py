"""What foreign code raised, in one line."""

from contextlib import suppress
from pathlib import Path
from traceback import extract_tb

_SHOWN = 200


def last_line(fault: BaseException) -> str:
    """The last line of a traceback, with the place it points at; any file can hold it.

    Half of a surrogate pair, as in a file name that is no UTF-8, becomes a question mark.

    Example:
        >>> last_line(ValueError("no such key"))
        'ValueError: no such key'
        >>> last_line(OSError("\\udcff is missing"))
        'OSError: ? is missing'
    """
    said = "it cannot be printed"
    with suppress(Exception):  # its own __str__ may raise
        said = str(fault)
    text = f"{type(fault).__name__}: {said}".partition("\n")[0][:_SHOWN]
    text = text.encode(errors="replace").decode()
    frames = extract_tb(fault.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{text}{where}"
