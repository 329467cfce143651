"""The metrics of a run as columns, kept up to date by reading only what was appended.

The file is followed by its inode and offset. A run that is resumed replaces it; then it is read
again. Memory is bounded: when a table has more cells than it may have, neighbouring rows are
merged, each with its mean, minimum and maximum, so that peaks stay visible. Checksums of lines are
verified by the doctor, not here.
"""

import math
import os
import threading
import time
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from luyen.base.input_files import parse_json
from luyen.base.system import read_at
from luyen.studio.metrics_file import open_records

Column = NDArray[np.float64]
_BLOCK = 2**20
_MOST_CELLS = 1_500_000
"""Cells of a table; each takes 8 bytes, and three times that once rows are merged."""
_LEAST_ROOM = 256
_SLICE_S, _PAUSE_S = 0.02, 0.001
"""Seconds for which reading in the background keeps the table, and for which it leaves it alone."""
_PART = 2**16
"""Bytes of lines between two looks at the clock."""
_MOST_NAMES = 4096
"""Metrics that are kept; a damaged file may hold any number of names."""


@final
class Curve(NamedTuple):
    """A metric in buckets of steps.

    Example:
        >>> Curve([1], [0.5], [0.5], [0.5]).value
        [0.5]
    """

    step: list[int]
    """Last step of each bucket."""
    value: list[float | None]
    """Mean of its finite values; None where there is none."""
    low: list[float | None]
    """Minimum."""
    high: list[float | None]
    """Maximum."""


@final
class MetricColumns:
    """Columns of one `metrics.jsonl`; safe to use from several threads."""

    def __init__(self, path: Path, *, most_cells: int = _MOST_CELLS) -> None:
        self._path = path
        self._most_cells = most_cells
        self._lock = threading.Lock()
        self._starting = threading.Lock()
        self._work: Future[None] | None = None
        self._ended = False
        self._begin(inode=0)

    def _begin(self, *, inode: int) -> None:
        self._inode = inode
        self._offset = 0
        self._count = 0
        self._room = _LEAST_ROOM
        self._steps: NDArray[np.int64] = np.zeros(self._room, np.int64)
        self._columns: dict[str, list[Column]] = {}
        self._merged = 1
        self._pending: list[tuple[int, dict[str, float]]] = []
        self.damaged_lines = 0
        """Lines that are no JSON object with a step."""
        self.last: dict[str, float] = {}
        """The newest value of each metric."""
        self.is_whole = False
        """Whether the end of the file was reached."""

    @property
    def size(self) -> int:
        """Bytes that the columns take."""
        return self._room * 8 * (1 + sum(len(parts) for parts in self._columns.values()))

    def follow(self, pool: Executor, *, wait_s: float) -> None:
        """Read what was appended; what takes longer than some seconds is read in the background.

        Until that ends, requests get the part that is read, without waiting.
        """
        with self._starting:
            if self._work is not None and not self._work.done():
                return
            self.refresh(seconds=wait_s)
            if not self.is_whole:
                self._work = pool.submit(self._read_on)

    def _read_on(self) -> None:
        while not self.is_whole and not self._ended:
            self.refresh(seconds=_SLICE_S)
            time.sleep(_PAUSE_S)  # a request that waits gets the table before the next slice

    def end(self) -> None:
        """Stop reading."""
        self._ended = True

    def refresh(self, *, seconds: float = math.inf) -> list[tuple[int, dict[str, float]]]:
        """Read what was appended, for at most some seconds; returns the new lines, at most 1000.

        A missing file leaves an empty table.
        """
        end = time.monotonic() + seconds
        with self._lock:
            try:
                handle = open_records(self._path)
            except OSError:
                self._begin(inode=0)
                self.is_whole = True
                return []
            try:
                facts = os.fstat(handle)
                if facts.st_ino != self._inode or facts.st_size < self._offset:
                    self._begin(inode=facts.st_ino)
                return self._read(handle, facts.st_size, end)
            finally:
                os.close(handle)

    def _read(self, handle: int, size: int, end: float) -> list[tuple[int, dict[str, float]]]:
        new: list[tuple[int, dict[str, float]]] = []
        self.is_whole = False
        while self._offset < size and time.monotonic() < end:
            data = read_at(handle, _BLOCK, self._offset)
            whole = data.rfind(b"\n", 0, _PART) + 1 or data.rfind(b"\n") + 1
            if not data or (whole == 0 and len(data) < _BLOCK):
                break  # a line that is still being written
            if whole == 0:
                self.damaged_lines += 1
                whole = len(data)
            for line in data[:whole].split(b"\n"):
                if line:
                    found = _numbers(line)
                    if found is None:
                        self.damaged_lines += 1
                    else:
                        self._add(*found)
                        new.append(found)
            self._offset += whole
            del new[:-1000]
        else:
            self.is_whole = self._offset >= size
            return new
        self.is_whole = True
        return new

    def _add(self, step: int, values: dict[str, float]) -> None:
        fresh = values.keys() - self._columns.keys()
        if fresh:
            self._fit(len(self._columns) + len(fresh))
        for name in values.keys() & self.last.keys() if len(self.last) >= _MOST_NAMES else values:
            self.last[name] = values[name]
        if self._merged > 1:
            self._pending.append((step, values))
            if len(self._pending) < self._merged:
                return
            rows, self._pending = self._pending, []
            place = self._row(rows[-1][0])
            for name in {name for _, row in rows for name in row}:
                parts = self._column(name)
                found = [row[name] for _, row in rows if name in row and math.isfinite(row[name])]
                if parts is not None and found:
                    for part, value in zip(
                        parts, (sum(found) / len(found), min(found), max(found)), strict=False
                    ):
                        part[place] = value
            return
        place = self._row(step)
        for name, value in values.items():
            parts = self._column(name)
            if parts is not None:
                parts[0][place] = value

    def _row(self, step: int) -> int:
        if self._count == self._room:
            self._grow()
        self._steps[self._count] = step
        self._count += 1
        return self._count - 1

    def _column(self, name: str) -> list[Column] | None:
        parts = self._columns.get(name)
        if parts is None:
            if len(self._columns) >= _MOST_NAMES:
                return None
            kinds = 1 if self._merged == 1 else 3
            parts = [np.full(self._room, np.nan) for _ in range(kinds)]
            self._columns[name] = parts
        return parts

    def _fit(self, columns: int) -> None:
        """Merge rows until the table has room for so many columns: late ones are as long as all."""
        columns = min(columns, _MOST_NAMES)
        while self._room > _LEAST_ROOM:
            kinds = 1 if self._merged == 1 else 3
            if columns * self._room * kinds <= self._most_cells:
                return
            self._merge()
            self._room //= 2
            self._steps = self._steps[: self._room].copy()
            for parts in self._columns.values():
                parts[:] = [part[: self._room].copy() for part in parts]

    def _grow(self) -> None:
        kinds = 1 if self._merged == 1 else 3
        if 2 * self._room * max(len(self._columns), 1) * kinds > self._most_cells:
            self._merge()
            return
        self._room *= 2
        self._steps = np.resize(self._steps, self._room)
        for parts in self._columns.values():
            for i, part in enumerate(parts):
                longer = np.full(self._room, np.nan)
                longer[: self._count] = part[: self._count]
                parts[i] = longer

    def _merge(self) -> None:
        """Make one row of every two neighbours, in place: half of the room is free then."""
        if self._count % 2:  # the last row alone: its neighbour is empty
            self._steps[self._count] = self._steps[self._count - 1]
            self._count += 1
        count = self._count // 2
        self._steps[:count] = self._steps[1 : 2 * count : 2]
        for parts in self._columns.values():
            if len(parts) == 1:
                parts += [parts[0].copy(), parts[0].copy()]
            for part, join in zip(parts, (_mean, np.fmin, np.fmax), strict=True):
                part[:count] = join(part[0 : 2 * count : 2], part[1 : 2 * count : 2])
                part[count:] = np.nan
        self._count = count
        self._merged *= 2

    @property
    def rows_per_point(self) -> int:
        """Lines that a row of the table stands for: 1 until rows were merged."""
        return self._merged

    @property
    def names(self) -> list[str]:
        """Every metric, sorted."""
        with self._lock:
            return sorted(self._columns)

    @property
    def last_step(self) -> int:
        """The newest step; 0 before the first."""
        with self._lock:
            if self._pending:
                return self._pending[-1][0]
            return int(self._steps[self._count - 1]) if self._count else 0

    def curve(
        self, name: str, *, points: int, start: int | None = None, end: int | None = None
    ) -> Curve:
        """A metric between two steps in at most `points` buckets; empty where there is none."""
        with self._lock:
            parts = self._columns.get(name)
            if parts is None:
                return Curve([], [], [], [])
            steps = self._steps[: self._count]
            values = [part[: self._count] for part in (*parts, *parts[:1], *parts[:1])][:3]
            has = ~np.isnan(values[0])
            if start is not None:
                has &= steps >= start
            if end is not None:
                has &= steps <= end
            places = np.flatnonzero(has)
            return _bucketed(steps[places], [value[places] for value in values], max(points, 1))


def _mean(a: Column, b: Column) -> Column:
    both = (a + b) / 2
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, both))


def _bucketed(steps: NDArray[np.int64], values: list[Column], points: int) -> Curve:
    count = len(steps)
    mean, low, high = values
    if count > points:
        edges = (np.arange(points + 1) * count) // points
        firsts = edges[:-1]
        with np.errstate(invalid="ignore"):
            mean = np.add.reduceat(mean, firsts) / np.diff(edges)
        low, high = np.minimum.reduceat(low, firsts), np.maximum.reduceat(high, firsts)
        steps = steps[edges[1:] - 1]
    return Curve([int(s) for s in steps.tolist()], _finite(mean), _finite(low), _finite(high))


def _finite(values: Column) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values.tolist()]


def _numbers(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Step and metrics of a line; None for a damaged one."""
    try:
        entry: Any = parse_json(line)
        step = int(entry.pop("step"))
        entry.pop("check", None)
        if abs(step) >= 2**62:
            return None
        return step, {str(name): float(value) for name, value in entry.items()}
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError):
        return None
