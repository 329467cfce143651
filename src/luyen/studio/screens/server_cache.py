"""What the server keeps between requests: tables of metrics, spans and diagnoses, within a bound.

Everything here can be read again from the run directories, so nothing is lost when the process
ends, however it ends.
"""

import os
import subprocess
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar, final

from luyen.base.errors import UserError
from luyen.base.system import read_at
from luyen.studio.metrics_file import open_records
from luyen.studio.screens.folder import KnownRun, RunFolder
from luyen.studio.screens.metric_table import MetricColumns
from luyen.studio.timeline import ProcessSpans, SpanLines, in_order, unreadable

if TYPE_CHECKING:  # loaded by the first screen that needs them: the studio is to start quickly
    from luyen.studio.doctor.vocabulary import TokenText
    from luyen.studio.screens.rollout_index import RolloutIndex

T = TypeVar("T")
_MOST_SPANS = 100_000
"""Of all runs together; one takes some 400 bytes."""
_BLOCK, _LONGEST = 2**22, 2**24
_MOST_TABLE_BYTES = 96 * 2**20
_MOST_FIRST_S = 0.5
"""Seconds that a request waits for a file that is read for the first time."""
_MOST_INDEXED = 6_000_000
"""Rollouts of all indexes."""
_MOST_PROCESS_S = 900.0
_AGAIN_S, _AGAIN_TIMES = 20.0, 25
"""A live run is diagnosed again after so many seconds, and after so many times the seconds that it
took, at the earliest: tabs are not to take a core from training."""


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
    """Spans of the runs that were requested last, read on from where their files ended.

    A tab asks for them every few seconds, from several threads. The spans that are kept have a
    bound; files with more of them are read again each time.
    """

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


@final
class Aged(Generic[T]):
    """A value that is computed in the background and replaced when its key changes."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._lock = threading.Lock()
        self._values: OrderedDict[str, tuple[Any, float, T]] = OrderedDict()
        """By name: key, when it may be computed again, value."""
        self._open: dict[str, Future[T]] = {}

    def get(
        self, name: str, key: object, make: Callable[[], T], *, wait_s: float, is_urgent: bool
    ) -> tuple[T | None, bool]:
        """The value for a key, and whether it is that; an older one, or None, while it is computed.

        One of another key that is not urgent is begun at the earliest when that is due. The
        request that begins the first value waits a moment for it; later ones do not.
        """
        with self._lock:
            known = self._values.get(name)
            if known is not None and (
                known[0] == key or (time.monotonic() < known[1] and not is_urgent)
            ):
                return known[2], known[0] == key
            work = self._open.get(name)
            has_begun = work is not None
            if work is None:
                begun: list[float] = []

                def timed() -> T:
                    begun.append(time.monotonic())
                    return make()

                work = self._pool.submit(timed)
                self._open[name] = work
                work.add_done_callback(lambda done: self._keep(name, key, done, begun))
        if known is not None:
            return known[2], False
        try:
            return work.result(timeout=0.0 if has_begun else wait_s), True
        except TimeoutError:
            return None, False

    def _keep(self, name: str, key: object, done: "Future[T]", begun: list[float]) -> None:
        with self._lock:
            self._open.pop(name, None)
            if not done.cancelled() and done.exception() is None:
                now = time.monotonic()
                again = now + max(_AGAIN_S, _AGAIN_TIMES * (now - begun[0]))
                self._values[name] = key, again, done.result()
                while len(self._values) > 64:
                    self._values.popitem(last=False)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StudioOptions:
    """How the studio was started.

    Example:
        >>> StudioOptions(folder=Path("runs")).is_read_only
        False
    """

    folder: Path
    """Folder of runs."""
    is_read_only: bool = False
    """Whether nothing can be started."""
    is_trusting: bool = False
    """Whether code of runs of other users may be run."""
    running_limit: int = 1
    """Most jobs that run at once."""


@final
class Studio:
    """The runs of a folder, and what was read of them."""

    def __init__(self, options: StudioOptions) -> None:
        self.options = options
        self.folder = RunFolder(options.folder)
        self.pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="studio")
        self.diagnoses: Aged[dict[str, Any]] = Aged(self.pool)
        self.spans = KeptSpans()
        self._tables: OrderedDict[str, MetricColumns] = OrderedDict()
        self._builders = ThreadPoolExecutor(max_workers=2, thread_name_prefix="index")
        self._indexes: OrderedDict[str, RolloutIndex] = OrderedDict()
        self._texts: dict[str, TokenText] = {}
        self._processes: set[subprocess.Popen[str]] = set()
        self._is_closed = False
        self._lock = threading.Lock()

    def run(self, run_id: str) -> KnownRun:
        """The run of an id; a refusal where it cannot be read."""
        return self.folder.get(run_id)

    def table(self, known: KnownRun, *, seconds: float = _MOST_FIRST_S) -> MetricColumns:
        """The metrics of a run, with what was appended; of a large file what was read in time."""
        with self._lock:
            table = self._tables.get(known.id)
            if table is None:
                table = MetricColumns(known.directory.metrics)
                self._tables[known.id] = table
            self._tables.move_to_end(known.id)
            while len(self._tables) > 1 and (
                sum(one.size for one in self._tables.values()) > _MOST_TABLE_BYTES
            ):
                self._tables.popitem(last=False)[1].end()
        table.follow(self._builders, wait_s=seconds)
        return table

    def rollouts(self, known: KnownRun, split: str) -> "RolloutIndex":
        """The index of the rollouts of a run; while it is built, as far as it is."""
        from luyen.studio.screens.rollout_index import RolloutIndex

        folder = "validation" if split == "validation" else "rollouts"
        name = f"{known.id}/{folder}"
        with self._lock:
            index = self._indexes.get(name)
            if index is None:
                index = RolloutIndex(known.directory.root / folder)
                self._indexes[name] = index
            self._indexes.move_to_end(name)
            while len(self._indexes) > 1 and (
                sum(one.rows for one in self._indexes.values()) > _MOST_INDEXED
            ):
                self._indexes.popitem(last=False)[1].end()
        if index.has_changed():
            index.follow(self._builders, wait_s=_MOST_FIRST_S)
        return index

    def text(self, known: KnownRun) -> "TokenText":
        """The text of the tokens of a run."""
        found = self._texts.get(known.id)
        if found is None:
            found = _text_of(known)
            while len(self._texts) > 8:
                self._texts.pop(next(iter(self._texts)), None)
            self._texts[known.id] = found
        return found

    def run_process(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        """Run a command, which ends with the studio at the latest; its output, and its code."""
        pipe = subprocess.PIPE
        with self._lock:
            if self._is_closed:
                return subprocess.CompletedProcess(command, -1, "", "the studio ends")
            child = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True
            )
            self._processes.add(child)
        try:
            out, err = child.communicate(timeout=_MOST_PROCESS_S)
        except subprocess.TimeoutExpired:
            child.kill()
            out, err = child.communicate()
        finally:
            self._processes.discard(child)
        return subprocess.CompletedProcess(command, child.returncode, out, err)

    def close(self) -> None:
        """End the background work."""
        with self._lock:
            self._is_closed = True
            for child in self._processes:
                child.kill()
        for one in (*self._indexes.values(), *self._tables.values()):
            one.end()
        self.pool.shutdown(wait=False, cancel_futures=True)
        self._builders.shutdown(wait=False, cancel_futures=True)


def _text_of(run: KnownRun) -> "TokenText":
    from luyen.config.schema.model import ModelConfig
    from luyen.studio.doctor.vocabulary import TokenText

    try:
        tree: Any = run.directory.read_settings()
        model = tree["actor_rollout_ref"]["model"]
        path, tokenizer = model["path"], model.get("tokenizer_path")
        return TokenText(ModelConfig(path=path, tokenizer_path=tokenizer))
    except (UserError, LookupError, TypeError, AttributeError, ValueError):
        return TokenText(ModelConfig(path="/nowhere"))
