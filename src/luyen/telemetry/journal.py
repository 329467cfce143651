"""Write-ahead journal of the step in progress: rollouts, tool calls and scores as they finish.

A process that resumes a killed run reuses these records instead of recomputing them. It does so
only with an equal `basis` (state before the step, configuration, code files), under which every
record equals what the process would have computed itself.

`JournalFile` holds the records. A record goes to the file in one `write`, so it survives the death
of the process. Records are forced to the disk in groups, by a thread: after a loss of power those
of the last moment may be missing or torn. Each line carries a checksum; a line that is not as it
was written counts as work that was never done.
"""

import hashlib
import json
import os
import struct
import threading
import warnings
import zlib
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast, final

from luyen.base.digests import hash_value
from luyen.base.errors import UserError
from luyen.base.files import open_regular, plain, writing
from luyen.base.input_files import parse_json
from luyen.base.records import GroupId, Rollout, Score, ToolCall
from luyen.base.rundir import step_name, step_of
from luyen.telemetry.rollout_codec import (
    PackedStreams,
    call_of,
    call_tree,
    rollout_of,
    rollout_tree,
    score_of,
    score_tree,
)

SCHEMA = 1
"""Version of the lines; a file of another one is not used."""
GROUP_S = 0.5
"""Most seconds between a record and the moment it is forced to the disk."""
_ENCODER = json.JSONEncoder(allow_nan=False, default=repr, check_circular=False)
_CHECK = ', "crc": '
_ROLLOUT, _SCORES, _INTENT, _RESULT = "rollout", "scores", "intent", "result"
_NOWHERE = ""
Metrics: TypeAlias = Mapping[str, float]
T = TypeVar("T")


class DamagedJournal(UserWarning):
    """Records of a journal cannot be used; their work is done again."""


@final
class JournalFile:
    """The records of one piece of work; those of an earlier process are found by kind and key."""

    def __init__(self, path: Path, *, basis: str) -> None:
        """`basis` stands for everything that the work depends on.

        What an earlier process wrote on the same basis is kept; anything else is dropped.
        """
        self.path = path
        self._found: dict[tuple[str, str], dict[str, Any]] = {}
        self._places: dict[tuple[str, str], int] = {}
        with writing(path, field="journal"):
            path.parent.mkdir(parents=True, exist_ok=True)
            self._handle = open_regular(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        self._failure: OSError | None = None
        self._written = threading.Event()
        self._closed = threading.Event()
        self._gate = threading.Lock()
        self._take_up(basis)
        self._syncer = threading.Thread(target=self._sync_groups, name="journal", daemon=True)
        self._syncer.start()

    def __len__(self) -> int:
        """How many records of an earlier process there are."""
        return len(self._found)

    def find(self, kind: str, key: str) -> Mapping[str, Any] | None:
        """What an earlier process wrote last under a key; None when it wrote nothing."""
        return self._found.get((kind, key))

    def last(self, key: str, kinds: Sequence[str]) -> str | None:
        """The kind of these that an earlier process wrote last under a key; None: none of them."""
        there = [kind for kind in kinds if (kind, key) in self._places]
        return max(there, key=lambda kind: self._places[kind, key], default=None)

    def append(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        """Write a record; a UserError when the disk takes no more. Nothing, once it is closed."""
        self._write({"kind": kind, "key": key, "body": body})
        self._written.set()

    def sync(self) -> None:
        """Force everything written so far to the disk."""
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise self._broken(error) from error

    def close(self) -> None:
        """Force everything to the disk and close the file. Closing twice is allowed."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._written.set()
        self._syncer.join()
        with self._gate:
            os.close(self._handle)

    def _take_up(self, basis: str) -> None:
        """Read the existing records; without a usable header, start an empty journal."""
        data = self._content()
        whole, damaged = _records(data)
        head = whole[0] if whole else {}
        if head.get("schema") == SCHEMA and head.get("basis") == basis:
            for number, record in enumerate(whole[1:]):
                kind, key, body = record.get("kind"), record.get("key"), record.get("body")
                if not (isinstance(kind, str) and isinstance(key, str) and isinstance(body, dict)):
                    damaged += 1
                    continue
                self._found[kind, key], self._places[kind, key] = body, number
            if damaged:
                self._tell(f"{damaged} records are damaged; their work is done again")
            # Half a record is work that was not done; the next one must not run into it.
            os.ftruncate(self._handle, data.rfind(b"\n") + 1)
        else:
            if damaged and "schema" not in head:
                self._tell("its first record is damaged; the work of all is done again")
            os.ftruncate(self._handle, 0)
            self._write({"schema": SCHEMA, "basis": basis})

    def _tell(self, what: str) -> None:
        warnings.warn(f"{self.path}: {what}", DamagedJournal, stacklevel=5)

    def _content(self) -> bytes:
        """The file as it was found."""
        with os.fdopen(os.dup(self._handle), "rb") as file:
            file.seek(0)
            return file.read()

    def _write(self, record: Mapping[str, Any]) -> None:
        if self._failure is not None:
            raise self._broken(self._failure) from self._failure
        data = _line(record)
        try:
            with self._gate:
                # Another thread may have closed it: the number may mean another file by now.
                written = len(data) if self._closed.is_set() else os.write(self._handle, data)
        except OSError as error:
            raise self._broken(error) from error
        if written != len(data):
            raise self._broken(OSError(f"{written} of {len(data)} bytes were taken"))

    def _broken(self, error: OSError) -> UserError:
        why = f"it could not be written: {error.strerror or error}"
        fix = "free disk space or repair the disk, then resume: the checkpoints are intact"
        return UserError("journal", str(self.path), why, fix)

    def _sync_groups(self) -> None:
        while not self._closed.is_set():
            self._written.wait()
            # Records that arrive during the wait join the same group; closing ends the wait.
            self._closed.wait(GROUP_S)
            self._written.clear()
            try:
                os.fsync(self._handle)
            except OSError as error:
                self._failure = error


def _line(record: Mapping[str, Any]) -> bytes:
    """A record as a line of JSON whose last entry is the checksum of what comes before it."""
    try:
        text = _ENCODER.encode(record)[:-1]
    except ValueError:  # a number that is not finite is written by its name
        text = _ENCODER.encode(plain(record))[:-1]
    return f"{text}{_CHECK}{zlib.crc32(text.encode())}}}\n".encode()


def _records(data: bytes) -> tuple[list[dict[str, Any]], int]:
    """The sound records of a file, and how many of its whole lines are not as they were written."""
    lines = data.split(b"\n")[:-1]
    found = [_record(line) for line in lines]
    return [record for record in found if record is not None], found.count(None)


def _record(line: bytes) -> dict[str, Any] | None:
    text, found, check = line.rpartition(_CHECK.encode())
    if not found or check != b"%d}" % zlib.crc32(text):
        return None
    try:
        value = parse_json(line)
    except ValueError:
        return None
    return cast(dict[str, Any], value) if isinstance(value, dict) else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """State of a tool call in the journal.

    Example:
        >>> CallRecord(is_begun=True, is_ended=False).is_unknown
        True
    """

    is_begun: bool
    """Whether the tool was about to be called."""
    is_ended: bool
    """Whether its result was recorded."""
    call: ToolCall | None = None
    """The finished call; None if it failed or was interrupted and has to be repeated."""
    metrics: Metrics | None = None
    """Metrics of the tool."""

    @property
    def is_unknown(self) -> bool:
        """Whether the call began but its result is unknown: the tool may have acted."""
        return self.is_begun and not self.is_ended


@final
class WorkJournal:
    """The journal of one step, or of one validation, in progress.

    Before `begin` and after `close`, lookups find nothing and writes are dropped.
    """

    def __init__(self, folder: Path, *, run_id: str) -> None:
        """`run_id` makes the keys of tool calls unique across runs."""
        self._folder = folder
        self._run_id = run_id
        self._file: JournalFile | None = None
        self.pack = PackedStreams()
        """Packed streams of rollouts, shared by the journal and the digest of the step."""
        self._name = _NOWHERE

    def begin(self, step: int, *, kind: str, basis: Any) -> int:
        """Open the journal of a step for a basis; returns the number of reusable records."""
        self.close()
        self.pack.forget()
        self._name = f"{step_name(step)}.{kind}"
        self._file = JournalFile(_path(self._folder, step, kind), basis=hash_value(basis))
        return len(self._file)

    @property
    def is_open(self) -> bool:
        """Whether it was begun and not closed."""
        return self._file is not None

    @property
    def has_known(self) -> bool:
        """Whether there are records, for example of an earlier process."""
        return self._file is not None and len(self._file) > 0

    def rollout(self, purpose: str, group: GroupId, sample: int) -> Rollout | None:
        """A finished rollout; None if there is no record of it."""
        found = self._find(_ROLLOUT, f"{purpose} {group}/{sample}")
        return None if found is None else self._decoded(lambda: rollout_of(found))

    def keep_rollout(self, purpose: str, rollout: Rollout) -> None:
        """Record a finished rollout without a fault."""
        assert rollout.fault is None, "a rollout with a fault has to be retried"
        self._keep(
            _ROLLOUT,
            f"{purpose} {rollout.group}/{rollout.sample}",
            rollout_tree(rollout, self.pack),
        )

    def scores(self, purpose: str, rollouts: Sequence[Rollout]) -> list[Score] | None:
        """The scores of a group; None unless exactly these rollouts were scored."""
        found = self._find(_SCORES, _group_key(purpose, rollouts))
        if found is None:
            return None
        scores = self._decoded(lambda: [score_of(tree) for tree in found["scores"]])
        return scores if scores is not None and len(scores) == len(rollouts) else None

    def keep_scores(
        self, purpose: str, rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> None:
        """Record the scores of a group, unless one of them could not be computed."""
        if all(score.value is not None for score in scores):
            trees = [score_tree(score) for score in scores]
            self._keep(_SCORES, _group_key(purpose, rollouts), {"scores": trees})

    def call_key(self, place: Sequence[Any], name: str, arguments: Mapping[str, Any]) -> str:
        """The idempotency key of a call: equal for the same call of the same run.

        It includes the step, so that calls of two validations differ although their `place` does
        not hold the step.
        """
        return hash_value([self._run_id, self._name, list(place), name, dict(arguments)])[:32]

    def call(self, key: str) -> CallRecord:
        """The recorded state of a call."""
        result = self._find(_RESULT, key)
        begun = self._find(_INTENT, key) is not None
        tree = None if result is None else result.get("call")
        if result is None or (tree is None and self._is_begun_again(key)):
            return CallRecord(is_begun=begun, is_ended=False)
        if tree is None:
            return CallRecord(is_begun=begun, is_ended=True, metrics=result.get("metrics"))
        made = self._decoded(lambda: call_of(tree))
        ended = made is not None  # else it is unknown whether the tool acted
        metrics = result.get("metrics") if ended else None
        return CallRecord(is_begun=begun, is_ended=ended, call=made, metrics=metrics)

    def intend(self, key: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Record that a tool is about to be called."""
        self._keep(_INTENT, key, {"name": name, "arguments": dict(arguments)})

    def keep_call(self, key: str, call: ToolCall | None, metrics: Metrics) -> None:
        """Record the result of a call; None if it failed or was interrupted."""
        tree = None if call is None else call_tree(call)
        self._keep(_RESULT, key, {"call": tree, "metrics": dict(metrics)})

    def close(self) -> None:
        """Close the file that is open. Closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_begun_again(self, key: str) -> bool:
        """Whether a failed call was repeated and the result of the repetition is unknown."""
        return self._file is not None and self._file.last(key, (_INTENT, _RESULT)) == _INTENT

    def _decoded(self, decode: Callable[[], T]) -> T | None:
        """What a record holds; None, with a warning, where it is not of the form of its kind."""
        try:
            return decode()
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            odd: Exception = error
        except (RecursionError, struct.error) as error:
            odd = error
        what = f"{self._name}: a record is not as it is written ({type(odd).__name__}: {odd})"
        warnings.warn(f"{what}; its work is done again", DamagedJournal, stacklevel=3)
        return None

    def _find(self, kind: str, key: str) -> Mapping[str, Any] | None:
        return None if self._file is None else self._file.find(kind, key)

    def _keep(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.append(kind, key, body)


@final
class WorkJournals:
    """The journals of a run: one file for each step, and for each validation, in progress."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        """`run_id` makes the keys of tool calls unique across runs."""
        self._folder = folder
        self._run_id = run_id
        self._open: list[WorkJournal] = []

    def fresh(self) -> WorkJournal:
        """A new journal, not begun yet."""
        journal = WorkJournal(self._folder, run_id=self._run_id)
        # The previous journal may not have begun either: its step is submitted, not trained yet.
        self._open = [*(one for one in self._open[:-1] if one.is_open), *self._open[-1:], journal]
        return journal

    def has(self, step: int, *, kind: str) -> bool:
        """Whether there is a journal of a step, regardless of its basis."""
        return _path(self._folder, step, kind).exists()

    def forget(self, step: int) -> None:
        """Remove the journals up to a step, once a checkpoint contains their results."""
        if self._folder.is_dir():
            for path in self._folder.iterdir():
                found = step_of(path.name)
                if found is not None and found <= step:
                    path.unlink(missing_ok=True)

    def close(self) -> None:
        """Close every file that is open. Closing twice is allowed."""
        for journal in self._open:
            journal.close()
        self._open = []


def _path(folder: Path, step: int, kind: str) -> Path:
    return folder / f"{step_name(step)}.{kind}.jsonl"


def _group_key(purpose: str, rollouts: Sequence[Rollout]) -> str:
    """Hash of the content of the rollouts: scores are reused for equal rollouts only."""
    hasher = hashlib.blake2b(digest_size=16)
    for rollout in rollouts:
        # Rewards of tools do not show in the tokens.
        calls = [(c.turn, c.name, c.status, c.result, c.reward) for c in rollout.calls]
        content = f"{rollout.key}{rollout.stop}{rollout.given}{calls}{rollout.text}"
        hasher.update(content.encode(errors="surrogatepass"))
        hasher.update(array("q", rollout.tokens).tobytes())
    return f"{purpose} {hasher.hexdigest()}"
