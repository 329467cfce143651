"""An index of the rollouts of a run: a few numbers of each, built once and kept in memory.

Files of rollouts are read by column, the newest step first, in a background thread; a request uses
what is there. A file is read again when its size or time changed, as after a resumption. An entry
takes 32 bytes, so five million rollouts take 160 MB.
"""

import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Executor, Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import pyarrow as pa
import pyarrow.compute
import pyarrow.parquet as pq
from numpy.typing import NDArray

from luyen.base.input_files import parse_json
from luyen.base.rundir import step_of

pc: Any = pyarrow.compute
"""Its functions are made when it is imported, so that no type checker knows them."""

Array = NDArray[Any]
COLUMNS: dict[str, str] = {
    "step": "i4", "draw": "i4", "reward": "f4", "advantage": "f4", "length": "i4", "turns": "i2",
    "stop": "u1", "fault": "u1", "tools": "u4", "version": "i4",
}  # fmt: skip
"""Columns of the index, and their types."""
_BLOCK = 1 << 17
_FIRST_FILE_S = 3.0
"""Seconds that a request waits for the first file of an index."""
_MOST_BYTES = 2**34
_MOST_COLUMN = 2**29
"""Bytes of a column of a file after decompression, by its footer."""
_RELEASE_EVERY = 256
_OLD = ("tokens", "turns", "versions", "advantage")
SUMMARY = ("length", "last_turn", "version", "mean_advantage", "tool_names")
"""Columns that files have so that these need not be read."""
_MOST_NAMES = {"stop": 200, "fault": 200, "tools": 31}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepFile:
    """Where the rollouts of a step are in the index.

    Example:
        >>> StepFile(step=1, block=0, start=0, count=512, stamp=(1, 2, 3)).count
        512
    """

    step: int
    """The step."""
    block: int
    """Index of the block."""
    start: int
    """First place in it."""
    count: int
    """Number of rollouts."""
    stamp: tuple[int, int, int]
    """Inode, size and time of the file when it was read."""


@final
class NameTable:
    """Numbers for the few names of a column, 0 for none; what exceeds the bound is `other`."""

    def __init__(self, most: int) -> None:
        self._most = most
        self.names: list[str] = [""]
        self._codes: dict[str, int] = {"": 0}

    def code(self, name: str) -> int:
        """The number of a name."""
        found = self._codes.get(name)
        if found is None:
            if len(self.names) > self._most:
                return self._most
            name = name if len(self.names) < self._most else "other"
            found = len(self.names)
            self.names.append(name)
            self._codes[name] = found
        return found

    def find(self, name: str) -> int | None:
        """The number of a name; None where no rollout has it."""
        return self._codes.get(name)


@final
class RolloutIndex:
    """The rollouts of one folder of a run; safe to use from several threads."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._lock = threading.Lock()
        self._blocks: list[dict[str, Array]] = []
        self._used = _BLOCK
        self._files: dict[int, StepFile] = {}
        self._seen: dict[int, tuple[int, int, int]] = {}
        self.damaged: dict[int, str] = {}
        """Steps whose file cannot be read, and why."""
        self.stops, self.faults = NameTable(_MOST_NAMES["stop"]), NameTable(_MOST_NAMES["fault"])
        self.tools = NameTable(_MOST_NAMES["tools"])

        self.half_widths: dict[int, tuple[StepFile, float | None]] = {}
        """Half of the interval of the mean reward of steps, as far as curves were asked for."""
        self._listed = 0
        self._work: Future[None] | None = None
        self._waited_until = 0.0
        self._ended = False
        self._starting = threading.Lock()
        self._some = threading.Event()

    def has_changed(self) -> bool:
        """Whether the folder has other files than when it was last listed, or is not read yet."""
        try:
            now = os.stat(self.folder).st_mtime_ns
        except OSError:
            now = 0
        return now != self._listed or (self._work is not None and not self._work.done())

    def follow(self, pool: Executor, *, wait_s: float) -> None:
        """Have new files read in the background; waits a moment for all of them.

        Only the request that finds new files waits: while many are read, later ones do not.
        """
        with self._starting:
            if self._work is None or self._work.done():
                self._listed = os.stat(self.folder).st_mtime_ns if self.folder.is_dir() else 0
                steps = self.look()
                if not steps:
                    return
                self._work = pool.submit(self._read_all, steps)
                self._waited_until = time.monotonic() + wait_s
            work = self._work
        with suppress(TimeoutError):
            work.result(timeout=max(0.0, self._waited_until - time.monotonic()))
        self._some.wait(_FIRST_FILE_S)

    def _read_all(self, steps: list[int]) -> None:
        pool = pa.default_memory_pool()
        for number, step in enumerate(steps, 1):
            if self._ended:
                return
            self.read(step)
            self._some.set()
            if number % _RELEASE_EVERY == 0 or number == len(steps):
                pool.release_unused()  # it keeps what the columns of every file took

    def end(self) -> None:
        """Stop reading."""
        self._ended = True

    @property
    def rows(self) -> int:
        """Rollouts in the index."""
        return sum(one.count for one in list(self._files.values()))

    @property
    def steps(self) -> list[int]:
        """Steps that have a file, in order."""
        return sorted(self._seen)

    @property
    def indexed_steps(self) -> int:
        """Steps that were read."""
        return len(self._files) + len(self.damaged)

    def look(self) -> list[int]:
        """List the folder; the steps that are to be read, the newest first."""
        found: dict[int, tuple[int, int, int]] = {}
        try:
            with os.scandir(self.folder) as entries:
                for entry in entries:
                    step = step_of(entry.name)
                    if step is not None and entry.name.endswith(".parquet"):
                        facts = entry.stat(follow_symlinks=False)
                        found[step] = facts.st_ino, facts.st_size, facts.st_mtime_ns
        except OSError:
            found = {}
        with self._lock:
            self._seen = found
            for gone in set(self._files) - set(found):
                self._forget(gone)
            known = {step: one.stamp for step, one in self._files.items()}
        new = [
            s for s, stamp in found.items() if known.get(s) != stamp and not self._is_bad(s, stamp)
        ]
        return sorted(new, reverse=True)

    def _is_bad(self, step: int, stamp: tuple[int, int, int]) -> bool:
        return self.damaged.get(step, "").startswith(f"{stamp}")

    def read(self, step: int) -> None:
        """Read the numbers of one file; a damaged one is noted."""
        path = self.path(step)
        try:
            facts = os.stat(path, follow_symlinks=False)
            stamp = facts.st_ino, facts.st_size, facts.st_mtime_ns
            columns = self._columns_of(path)
        except (OSError, ValueError, LookupError, TypeError, pa.ArrowException) as error:
            self.damaged[step] = f"{self._seen.get(step)}: {error}"[:500]
            with self._lock:
                self._forget(step)
            return
        self.damaged.pop(step, None)
        self._append(step, columns, stamp)

    def path(self, step: int) -> Path:
        """The file of a step."""
        return self.folder / f"step_{step:06d}.parquet"

    def _append(self, step: int, columns: Mapping[str, Array], stamp: tuple[int, int, int]) -> None:
        count = len(columns["step"])
        with self._lock:
            if self._used + count > (len(self._blocks[-1]["step"]) if self._blocks else 0):
                size = max(_BLOCK, count) if self._blocks else max(4096, count)
                self._blocks.append({n: np.zeros(size, kind) for n, kind in COLUMNS.items()})
                self._blocks[-1]["step"][:] = -1
                self._used = 0
            for name, values in columns.items():
                self._blocks[-1][name][self._used : self._used + count] = values
            self._blocks[-1]["step"][self._used : self._used + count] = step
            self._forget(step)
            place = StepFile(
                step=step,
                block=len(self._blocks) - 1,
                start=self._used,
                count=count,
                stamp=stamp,
            )
            self._files[step] = place
            self._used += count

    def _forget(self, step: int) -> None:
        """Rows of a step that is removed or was read again no longer count."""
        old = self._files.pop(step, None)
        if old is not None:
            self._blocks[old.block]["step"][old.start : old.start + old.count] = -1

    def blocks(self) -> list[dict[str, Array]]:
        """All columns, block by block; rows whose step is -1 are not used."""
        return list(self._blocks)

    def row_at(self, block: int, place: int) -> tuple[int, int]:
        """Step and row in its file of a place in a block."""
        step = int(self._blocks[block]["step"][place])
        one = self._files.get(step)
        return step, place - one.start if one is not None else 0

    def file(self, step: int) -> StepFile | None:
        """Where a step is in the index; None where it is not."""
        return self._files.get(step)

    def part(self, step: int) -> dict[str, Array] | None:
        """The columns of a step; None where it is not in the index."""
        one = self._files.get(step)
        if one is None:
            return None
        block = self._blocks[one.block]
        return {name: block[name][one.start : one.start + one.count] for name in COLUMNS}

    def _columns_of(self, path: Path) -> dict[str, Array]:
        if os.path.islink(path) or os.stat(path).st_size > _MOST_BYTES:
            raise OSError("it is a link, or larger than what is read")
        with pq.ParquetFile(path) as file:
            known = set(file.schema_arrow.names)
            new = SUMMARY if set(SUMMARY) <= known else (*_OLD, "calls")
            wanted = [n for n in ("draw", "reward", "stop", "fault", *new) if n in known]
            refuse_bombs(file, wanted)
            table = file.read(columns=wanted)
        count = table.num_rows
        found: dict[str, Array] = {
            "step": np.full(count, -1),
            "draw": np.clip(_numbers(table, "draw", count), -(2**31), 2**31 - 1),
            "reward": _numbers(table, "reward", count, missing=np.nan),
            "stop": self._codes(table, "stop", self.stops),
            "fault": self._codes(table, "fault", self.faults),
        }
        make = _summary if set(SUMMARY) <= known else _from_streams
        found |= make(table, count)
        found["tools"] = self._tools(table, count)
        return found

    def _codes(self, table: pa.Table, name: str, names: NameTable) -> Array:
        coded = pc.dictionary_encode(table[name].combine_chunks())
        coded = coded.combine_chunks() if isinstance(coded, pa.ChunkedArray) else coded
        values = [first_line(value) for value in coded.dictionary.to_pylist()]
        codes = np.array([0, *(names.code(value) for value in values)], "u1")
        return codes[pc.fill_null(coded.indices, -1).to_numpy(zero_copy_only=False) + 1]

    def _tools(self, table: pa.Table, count: int) -> Array:
        found = np.zeros(count, "u4")
        if "tool_names" in table.column_names:
            listed = table["tool_names"].to_pylist()
        elif "calls" in table.column_names:
            listed = [_called(text) for text in table["calls"].to_pylist()]
        else:
            listed = []
        for place, names in enumerate(listed):
            for name in names or ():
                found[place] |= np.uint32(1 << (self.tools.code(str(name)[:100]) & 31))
        return found


def refuse_bombs(file: pq.ParquetFile, wanted: list[str]) -> None:
    """A ValueError where columns say that they are larger than any of ours."""
    metadata = file.metadata
    total = 0
    for group in range(metadata.num_row_groups):
        facts = metadata.row_group(group)
        for i in range(facts.num_columns):
            column = facts.column(i)
            if column.path_in_schema.partition(".")[0] in wanted:
                total += column.total_uncompressed_size
    if total > _MOST_COLUMN:
        raise ValueError(f"its columns have {total:,} bytes, which is more than is read")


def first_line(text: str | None) -> str:
    """A fault in short: its first line."""
    return "" if not text else str(text).splitlines()[0][:160]


def _called(text: str | None) -> list[str]:
    if not text or text == "[]":
        return []
    try:
        return [str(call["name"]) for call in parse_json(text)]
    except (ValueError, LookupError, TypeError):
        return []


def _numbers(table: pa.Table, name: str, count: int, *, missing: float = 0) -> Array:
    if name not in table.column_names:
        return np.full(count, missing)
    column = table[name].combine_chunks()
    return pc.fill_null(pc.cast(column, pa.float64()), missing).to_numpy(zero_copy_only=False)


def _summary(table: pa.Table, count: int) -> dict[str, Array]:
    return {
        "length": _numbers(table, "length", count),
        "turns": np.minimum(_numbers(table, "last_turn", count) + 1, 32767),
        "version": _numbers(table, "version", count, missing=-1),
        "advantage": _numbers(table, "mean_advantage", count, missing=np.nan),
    }


def _from_streams(table: pa.Table, count: int) -> dict[str, Array]:
    """The same numbers from the token streams of older files."""
    del count
    lengths = _lists(table, "tokens")[0]
    last_turn = _reduced(table, "turns", np.maximum, 0.0)[1]
    version = _reduced(table, "versions", np.maximum, -1.0)[1]
    return {
        "length": lengths,
        "turns": np.minimum(last_turn + 1, 32767),
        "version": version,
        "advantage": _mean_of_lists(table, "advantage"),
    }


def _lists(table: pa.Table, name: str) -> tuple[Array, pa.Array]:
    column = table[name].combine_chunks()
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy(zero_copy_only=False)
    return lengths, column.flatten()


def _reduced(table: pa.Table, name: str, join: Any, empty: float) -> tuple[Array, Array]:
    lengths, flat = _lists(table, name)
    values = pc.fill_null(pc.cast(flat, pa.float64()), empty).to_numpy(zero_copy_only=False)
    found = np.full(len(lengths), empty)
    has = lengths > 0
    if has.any():
        starts = np.cumsum(lengths) - lengths
        found[has] = join.reduceat(values, starts[has])
    return lengths, found


def _mean_of_lists(table: pa.Table, name: str) -> Array:
    lengths, flat = _lists(table, name)
    values = pc.cast(flat, pa.float64())
    known = pc.is_valid(values).to_numpy(zero_copy_only=False).astype(float)
    filled = pc.fill_null(values, 0.0).to_numpy(zero_copy_only=False)
    found = np.full(len(lengths), np.nan)
    has = lengths > 0
    if has.any():
        starts = (np.cumsum(lengths) - lengths)[has]
        sums, counts = np.add.reduceat(filled, starts), np.add.reduceat(known, starts)
        with np.errstate(invalid="ignore", divide="ignore"):
            found[has] = np.where(counts > 0, sums / counts, np.nan)
    return found
