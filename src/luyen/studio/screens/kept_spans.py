"""Spans of runs, read on from where their files ended: a tab asks for them every few seconds.

The spans that are kept have a bound; files with more of them are read again each time.
"""

import os
import threading
from collections import OrderedDict
from pathlib import Path
from typing import final

from luyen.base.system import read_at
from luyen.studio.metric_lines import open_records
from luyen.studio.screens.folder import KnownRun
from luyen.studio.timeline import ProcessSpans, SpanLines, in_order, unreadable

_MOST_SPANS = 100_000
"""Of all runs together; one takes some 400 bytes."""
_BLOCK, _LONGEST = 2**22, 2**24


@final
class _SpanFile:
    """One file as far as it was read; a file that was replaced is read from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._begin(inode=0)

    def _begin(self, *, inode: int) -> None:
        self._inode, self._offset = inode, 0
        self.lines = SpanLines(self._path)

    def refresh(self) -> None:
        """Read what was appended."""
        handle = open_records(self._path)
        try:
            facts = os.fstat(handle)
            if facts.st_ino != self._inode or facts.st_size < self._offset:
                self._begin(inode=facts.st_ino)
            rest = b""
            while data := read_at(handle, _BLOCK, self._offset + len(rest)):
                rest += data
                whole = rest.rfind(b"\n") + 1
                if whole == 0 and len(rest) > _LONGEST:
                    whole = len(rest)  # no line of ours: it is passed over
                self.lines.add(rest[:whole])
                self._offset += whole
                rest = rest[whole:]
        finally:
            os.close(handle)


@final
class KeptSpans:
    """The spans of the runs that were asked for last; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: OrderedDict[str, dict[Path, _SpanFile]] = OrderedDict()

    def processes(self, known: KnownRun) -> list[ProcessSpans]:
        """Every process of a run that left spans; a UserError where there is none."""
        paths = sorted(known.directory.events.glob("*.jsonl"))
        with self._lock:
            before = self._files.pop(known.id, {})
            mine = {path: before.get(path) or _SpanFile(path) for path in paths}
            for path, file in mine.items():
                try:
                    file.refresh()
                except OSError as error:
                    raise unreadable(path, error) from error
            self._files[known.id] = mine
            while self._count() > _MOST_SPANS:
                self._files.popitem(last=False)
            found = [process for file in mine.values() for process in file.lines.processes()]
        return in_order(known.directory.root, found)

    def _count(self) -> int:
        return sum(file.lines.count for files in self._files.values() for file in files.values())
