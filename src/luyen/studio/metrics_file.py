"""Single lines of `metrics.jsonl`, found without reading the file as a whole.

A list of runs shows the last step, the last validation and a small curve of each. Files of long
runs have gigabytes, so these are read from the ends, and at evenly spaced places in between.
"""

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

from luyen.base.input_files import parse_json
from luyen.base.system import flags, read_at

_BLOCK = 2**18
_MOST_BACK = 64 * 2**20
"""Bytes from the end in which a validation is looked for."""
_LONGEST = 2**20
"""Bytes of the longest line."""
VALIDATION = (b'"val/', b"/val_")
"""What a line with a validation holds."""


def open_records(path: Path) -> int:
    """A handle of a regular file, opened without waiting; an OSError for anything else."""
    handle = os.open(path, os.O_RDONLY | flags("O_NONBLOCK", "O_CLOEXEC", "O_BINARY"))
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise OSError("it is not a file")
    return handle


def parsed_line(line: bytes) -> dict[str, Any]:
    """The object of a line; empty for a damaged one.

    Example:
        >>> parsed_line(b'{"step": 1}'), parsed_line(b"{")
        ({'step': 1}, {})
    """
    try:
        found = parse_json(line)
    except ValueError:
        return {}
    return cast(dict[str, Any], found) if isinstance(found, dict) else {}


def lines_from_end(handle: int, *, most: int = _MOST_BACK) -> Iterator[bytes]:
    """Whole lines, the last first; a torn last line is left out, and so is what exceeds `most`."""
    end = os.fstat(handle).st_size
    first = max(0, end - most)
    kept = b""
    is_torn = True  # what follows the last newline
    while end > first:
        start = max(first, end - _BLOCK)
        kept = read_at(handle, end - start, start) + kept
        pieces = kept.split(b"\n")
        if is_torn and len(pieces) > 1:
            pieces.pop()
            is_torn = False
        elif is_torn and len(kept) > _LONGEST:
            return
        if not is_torn:
            kept = pieces[0]
            yield from (piece for piece in reversed(pieces[1:]) if piece)
        end = start
    if kept and not is_torn and first == 0:
        yield kept


def first_validation(handle: int) -> dict[str, Any]:
    """The first line with a validation among those of the first block; empty without one."""
    for line in read_at(handle, 4 * _BLOCK, 0).split(b"\n")[:-1]:
        if any(mark in line for mark in VALIDATION):
            return parsed_line(line)
    return {}


def spread_lines(handle: int, count: int) -> list[dict[str, Any]]:
    """At most `count` lines at evenly spaced places of the file, in order."""
    size = os.fstat(handle).st_size
    if size <= 2 * _BLOCK:
        lines = [line for line in read_at(handle, size, 0).split(b"\n")[:-1] if line]
        places = sorted({round(i * (len(lines) - 1) / max(count - 1, 1)) for i in range(count)})
        return [parsed_line(lines[place]) for place in places] if lines else []
    found: dict[int, dict[str, Any]] = {}
    for i in range(count):
        place = i * (size - 1) // max(count, 1)
        line = _line_after(handle, place)
        if line is not None:
            found[line[0]] = parsed_line(line[1])
    last = next(lines_from_end(handle), None)
    return [*(found[place] for place in sorted(found)), *([parsed_line(last)] if last else [])]


def _line_after(handle: int, place: int) -> tuple[int, bytes] | None:
    """Offset and content of the first whole line that begins at or after a place."""
    begins = place == 0
    data = b""
    while len(data) < _LONGEST:
        more = read_at(handle, 2**14, place + len(data))
        if not more:
            return None
        data += more
        start = 0 if begins else data.find(b"\n") + 1
        if start == 0 and not begins:
            continue
        end = data.find(b"\n", start)
        if end >= 0:
            return place + start, data[start:end]
    return None
