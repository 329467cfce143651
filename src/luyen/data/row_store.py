"""Rows in the order they came: in memory while they are small, beyond that in a temporary file.

Of a row on disk only its place is held in memory, so files may be larger than memory. The
temporary file has no name: it is gone when the process ends, however that happens.
"""

import os
import pickle
import tempfile
import threading
import weakref
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, Generic, TypeVar, cast, final, overload

from luyen.base.errors import UserError

T = TypeVar("T")
S = TypeVar("S")
MOST_BYTES = 64 * 2**20
"""Bytes of rows, written as JSON, that are held in memory; as objects they take several times as
much."""
_LARGE_FOLDER = Path("/var/tmp")
"""Where Linux keeps large temporary files: /tmp is memory on some machines."""


def temporary_folder() -> str:
    """Folder of rows that do not fit into memory: TMPDIR, or where the system keeps large files.

    Example:
        >>> Path(temporary_folder()).is_dir()
        True
    """
    usual = tempfile.gettempdir()
    is_chosen = any(name in os.environ for name in ("TMPDIR", "TEMP", "TMP"))
    return usual if is_chosen or not _LARGE_FOLDER.is_dir() else str(_LARGE_FOLDER)


@final
class _RowFile:
    """Pickled rows of this process, one after the other, in a file without a name."""

    def __init__(self) -> None:
        self._folder = temporary_folder()
        self._lock = threading.Lock()
        self._end = 0
        try:
            self._file: IO[bytes] = tempfile.TemporaryFile(prefix="luyen-", dir=self._folder)  # noqa: SIM115
        except OSError as error:
            raise self._full(error) from error
        weakref.finalize(self, self._file.close)  # it lives as long as the rows

    def add(self, row: Any) -> tuple[int, int]:
        """Write a row at the end; where it begins, and its bytes."""
        content = pickle.dumps(row, protocol=pickle.HIGHEST_PROTOCOL)
        with self._lock:
            try:
                self._file.seek(self._end)
                self._file.write(content)
            except OSError as error:
                raise self._full(error) from error
            start, self._end = self._end, self._end + len(content)
        return start, len(content)

    def read(self, start: int, size: int) -> Any:
        """The row that was written there."""
        with self._lock:
            self._file.seek(start)
            content = self._file.read(size)
        return pickle.loads(content)

    def flush(self) -> None:
        """Write what is buffered; a UserError where the disk is full."""
        try:
            self._file.flush()
        except OSError as error:
            raise self._full(error) from error

    def _full(self, error: OSError) -> UserError:
        why = f"rows beyond {MOST_BYTES // 2**20} MiB are kept there, and it cannot be written: "
        fix = "set TMPDIR to a folder on a disk with room for the files once more, or twice offline"
        return UserError("TMPDIR", self._folder, f"{why}{error.strerror}", fix)


@final
class StoredRows(Sequence[T]):
    """Rows on disk; reading one decodes it again, so a change to it changes nothing here.

    Example:
        >>> writer = RowWriter[str](most_bytes=0)
        >>> for row in ("a", "b", "c"):
        ...     writer.append(row, num_bytes=1)
        >>> rows = writer.rows()
        >>> type(rows).__name__, rows[-1], rows[:2], list(selected(rows, [2, 0]))
        ('StoredRows', 'c', ('a', 'b'), ['c', 'a'])
    """

    def __init__(self, file: _RowFile, starts: "array[int]", sizes: "array[int]") -> None:
        self._file = file
        self._starts = starts
        self._sizes = sizes

    def __len__(self) -> int:
        return len(self._starts)

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        return cast(T, self._file.read(self._starts[index], self._sizes[index]))

    def __iter__(self) -> Iterator[T]:
        for start, size in zip(self._starts, self._sizes, strict=True):
            yield cast(T, self._file.read(start, size))

    def selected(self, places: Iterable[int]) -> "StoredRows[T]":
        """The rows at these places, without copying them."""
        kept = array("Q", places)
        starts = array("Q", (self._starts[place] for place in kept))
        return StoredRows(self._file, starts, array("Q", (self._sizes[place] for place in kept)))


@final
class RowWriter(Generic[T]):
    """Takes rows one after the other; moves them to disk when there are too many for memory.

    Example:
        >>> writer = RowWriter[str]()
        >>> writer.append("a", num_bytes=1)
        >>> writer.rows()
        ('a',)
    """

    def __init__(self, *, most_bytes: int | None = None) -> None:
        """`most_bytes` of rows are held in memory, counted as `append` says."""
        self._most = MOST_BYTES if most_bytes is None else most_bytes
        self._in_memory: list[T] = []
        self._num_bytes = 0
        self._file: _RowFile | None = None
        self._starts, self._sizes = array("Q"), array("Q")

    def __len__(self) -> int:
        return len(self._in_memory) + len(self._starts)

    def append(self, row: T, *, num_bytes: int) -> None:
        """Add a row that takes about so many bytes."""
        self._num_bytes += num_bytes
        self._in_memory.append(row)
        if self._num_bytes > self._most:
            self._move()

    def _move(self) -> None:
        self._file = self._file or _RowFile()
        for row in self._in_memory:
            start, size = self._file.add(row)
            self._starts.append(start)
            self._sizes.append(size)
        self._in_memory.clear()

    def rows(self) -> Sequence[T]:
        """All rows in order: a tuple, or what reads them from disk."""
        if self._file is None:
            return tuple(self._in_memory)
        self._file.flush()
        return StoredRows(self._file, self._starts, self._sizes)


def selected(rows: Sequence[T], places: Iterable[int]) -> Sequence[T]:
    """The rows at these places, stored as the rest is: in memory, or on disk.

    Example:
        >>> selected(("a", "b", "c"), [2, 0])
        ('c', 'a')
    """
    if isinstance(rows, StoredRows | Origins):
        return cast(Sequence[T], rows.selected(places))
    return tuple(rows[place] for place in places)


def changed(rows: Sequence[T], change: Callable[[int, T], S]) -> Sequence[S]:
    """Every row after a change, which gets its place too, where the rows are.

    Example:
        >>> changed(("a", "b"), lambda place, row: row * (place + 1))
        ('a', 'bb')
    """
    if not isinstance(rows, StoredRows):
        return tuple(change(place, row) for place, row in enumerate(rows))
    writer = RowWriter[S](most_bytes=-1)
    for place, row in enumerate(cast(Sequence[T], rows)):
        writer.append(change(place, row), num_bytes=0)
    return writer.rows()


@final
class Origins(Sequence[str]):
    """File and number of each row, as text: 12 bytes a row.

    Example:
        >>> origins = Origins()
        >>> origins.append("a.jsonl", 3)
        >>> origins[0], list(origins)
        ('a.jsonl row 3', ['a.jsonl row 3'])
    """

    def __init__(self) -> None:
        self._names: list[str] = []
        self._name_of, self._numbers = array("I"), array("Q")

    def __len__(self) -> int:
        return len(self._numbers)

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[str]: ...
    def __getitem__(self, index: int | slice) -> str | Sequence[str]:
        if isinstance(index, slice):
            return tuple(self[place] for place in range(*index.indices(len(self))))
        return f"{self._names[self._name_of[index]]} row {self._numbers[index]}"

    def append(self, file: str, number: int) -> None:
        """Add the place of a row; rows of one file come one after the other."""
        if not self._names or self._names[-1] != file:
            self._names.append(file)
        self._name_of.append(len(self._names) - 1)
        self._numbers.append(number)

    def selected(self, places: Iterable[int]) -> "Origins":
        """Those at these places."""
        found = Origins()
        found._names = self._names
        for place in places:
            found._name_of.append(self._name_of[place])
            found._numbers.append(self._numbers[place])
        return found


def stored_like(origins: Origins, rows: Sequence[Any]) -> Sequence[str]:
    """The origins of these rows: as text where the rows are in memory too.

    Example:
        >>> stored_like(Origins(), ())
        ()
    """
    return origins if isinstance(rows, StoredRows) else tuple(origins)
