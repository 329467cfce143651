"""Notes of a run: what happened to it from outside, a line each, for people and `luyen runs`."""

import os
from datetime import UTC, datetime
from pathlib import Path

from luyen.base.errors import UserError
from luyen.base.files import json_line, read_lines
from luyen.base.owned import open_owned

NAME = "notes.jsonl"
"""The file in the run directory."""


def note(run: Path, words: str) -> None:
    """Add a note to a run directory; nothing is raised, since a run is worth more than a note."""
    when = datetime.now(UTC).isoformat(timespec="seconds")
    line = json_line({"time": when, "pid": os.getpid(), "note": words})
    try:
        handle = open_owned(run / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    except OSError:
        return
    try:
        os.write(handle, line.encode())
    except OSError:
        return
    finally:
        os.close(handle)


def last_note(run: Path) -> str:
    """The newest note; nothing where there is none, or where they are damaged.

    Example:
        >>> last_note(Path("/nowhere"))
        ''
    """
    try:
        lines = read_lines(run / NAME)
    except (OSError, UserError):
        return ""
    return str(lines[-1].get("note", "")) if lines else ""
