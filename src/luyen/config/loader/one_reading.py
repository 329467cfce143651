"""One reading of a run's configuration: for the look at whose run it is, and for its use.

Another user who owns the folder of a run could replace the file between the two.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

_texts: ContextVar[dict[Path, str] | None] = ContextVar("texts", default=None)


@contextmanager
def one_reading() -> Generator[None]:
    """While entered, in this thread, a file that was looked at is not read again."""
    token = _texts.set({})
    try:
        yield
    finally:
        _texts.reset(token)


def keep_text(file: Path, text: str | None) -> None:
    """Take this for the content of a file; None: what it will hold when it is read.

    Example:
        >>> with one_reading():
        ...     keep_text(Path("a.yaml"), "x: 1")
        ...     known_text(Path("a.yaml"))
        'x: 1'
    """
    texts = _texts.get()
    if texts is not None and text is not None:
        texts[file.absolute()] = text
    elif texts is not None:
        texts.pop(file.absolute(), None)


def known_text(file: Path) -> str | None:
    """The content that was looked at; None: nothing was."""
    return (_texts.get() or {}).get(file.absolute())
