"""A file of work that is done, written record by record as the work completes.

A record goes to the file in one `write`, so it survives the death of the process. Records are
forced to the disk in groups, by a thread: after a loss of power those of the last moment may be
missing or torn. Each line carries a checksum; a line that is not as it was written counts as work
that was never done.
"""

import json
import os
import threading
import warnings
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.files import open_regular, plain, writing
from luyen.base.input_files import parse_json

SCHEMA = 1
"""Version of the lines; a file of another one is not used."""
GROUP_S = 0.5
"""Most seconds between a record and the moment it is forced to the disk."""
_ENCODER = json.JSONEncoder(allow_nan=False, default=repr, check_circular=False)
_CHECK = ', "crc": '


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
