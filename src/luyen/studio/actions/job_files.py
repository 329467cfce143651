"""The files of jobs below the studio's folder: records, configurations, logs.

A record is signed with the key of this user (`luyen.base.digests`), so that a folder that was
copied from elsewhere brings no job that would be started here, and no process id that would get a
signal. All files are private to the user, and replaced whole.
"""

import json
import os
import re
import secrets
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, final

from luyen.base.digests import NoKey, hash_parts, signed, unsigned
from luyen.base.errors import UserError
from luyen.base.files import json_page, open_regular, write_whole, writing
from luyen.base.input_files import parse_json, read_bytes
from luyen.base.system import lock, unlock

STUDIO = ".studio"
"""Folder of the studio below the folder of runs."""
State = Literal["queued", "running", "finished", "failed", "stopped"]
_ID = re.compile(r"\d{8}-\d{6}-[0-9a-f]{6}")
_MOST_RECORD = 4 * 2**20
_PS_S = 10.0


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """A command of the user that runs, ran or is to run.

    Example:
        >>> JobRecord(id="20260101-100000-00ff00", name="a", words=("train", "a.yaml"), folder="/",
        ...           created="2026-01-01T10:00:00+00:00").state
        'queued'
    """

    id: str
    """Its id, which begins with the time of its making."""
    name: str
    """What the list shows."""
    words: tuple[str, ...]
    """Arguments of `luyen`."""
    folder: str
    """Folder in which the command runs."""
    created: str
    """When it was made."""
    state: State = "queued"
    """Where it stands."""
    run: str | None = None
    """Path of its run below the folder of runs; None: it makes none."""
    total_steps: int | None = None
    """Steps of the run, where they are known before it begins."""
    digest: str | None = None
    """Hash of its configuration file; None: it has none."""
    is_server: bool = False
    """Whether it serves a model until it is stopped; such a job takes no place of the queue."""
    is_stopping: bool = False
    """Whether the user wants it to end."""
    started: float | None = None
    """When its process was started, in seconds since 1970."""
    error: str | None = None
    """The first error that it printed."""


def new_id() -> str:
    """An id that no other job has."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(3)}"


@final
class JobFiles:
    """The jobs of a folder of runs; several studios may share it."""

    def __init__(self, runs: Path) -> None:
        self.runs = runs
        self.folder = runs / STUDIO / "jobs"

    def config(self, job_id: str) -> Path:
        """The configuration that the job trains."""
        return self.folder / f"{job_id}.yaml"

    def log(self, job_id: str) -> Path:
        """What the job printed."""
        return self.folder / f"{job_id}.log"

    def make(self) -> None:
        """Make the folder, private to the user."""
        with writing(self.folder, field="folder", fix="start the studio over a folder of yours"):
            for place in (self.folder.parent, self.folder):
                place.mkdir(mode=0o700, parents=True, exist_ok=True)
                if place.is_symlink():
                    raise OSError(f"`{place.name}` is a link to a folder in another place")

    @contextmanager
    def locked(self) -> Generator[None]:
        """While entered, no other studio changes a record or starts a job."""
        self.make()
        handle = open_regular(self.folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: one studio at a time there
                lock(handle, waits=True)
            yield
            with suppress(OSError):
                unlock(handle)
        finally:
            os.close(handle)

    def write(self, record: JobRecord) -> None:
        """Write a record."""
        self._sign(self.folder / f"{record.id}.json", asdict(record))

    def write_config(self, job_id: str, text: str) -> str:
        """Write the configuration of a job; returns its hash."""
        write_whole(self.config(job_id), text, is_private=True)
        return hash_parts([text.encode()])

    def has_config_of(self, record: JobRecord) -> bool:
        """Whether the configuration is the one that the user sent."""
        if record.digest is None:
            return True
        try:
            return hash_parts([read_bytes(self.config(record.id))]) == record.digest
        except (OSError, ValueError):
            return False

    def read(self, job_id: str) -> JobRecord | None:
        """A record; None where there is none that this user made."""
        if _ID.fullmatch(job_id) is None:
            return None
        page = self._signed(self.folder / f"{job_id}.json")
        try:
            record = JobRecord(**{**page, "words": tuple(page["words"])}) if page else None
        except (TypeError, KeyError):
            return None
        return record if record is not None and record.id == job_id else None

    def records(self) -> list[JobRecord]:
        """Every record of this user, the newest first."""
        try:
            names = sorted((path.stem for path in self.folder.glob("*.json")), reverse=True)
        except OSError:
            return []
        return [record for name in names if (record := self.read(name)) is not None]

    def note_process(self, job_id: str) -> None:
        """Note that this process runs the job."""
        facts = {"id": job_id, "pid": os.getpid(), "start": start_of(os.getpid())}
        self._sign(self.folder / f"{job_id}.process", facts)

    def process(self, job_id: str) -> tuple[int, bool] | None:
        """Id of the process of a job, and whether it runs; None where it noted nothing yet."""
        page = self._signed(self.folder / f"{job_id}.process")
        if page is None or page.get("id") != job_id:
            return None
        start = start_of(page["pid"])
        return page["pid"], start is not None and start == page["start"]

    def note_exit(self, job_id: str, code: int) -> None:
        """Note how the job ended."""
        write_whole(self.folder / f"{job_id}.exit", json.dumps({"code": code}), is_private=True)

    def exit_code(self, job_id: str) -> int | None:
        """How the job ended; None where it has not, or was killed."""
        try:
            found = parse_json(read_bytes(self.folder / f"{job_id}.exit", most_bytes=4096))
            return int(found["code"])
        except (OSError, ValueError, LookupError, TypeError):
            return None

    def _sign(self, path: Path, page: dict[str, Any]) -> None:
        try:
            # As JSON holds it: a signature is of what will be read.
            sealed = signed({**json.loads(json.dumps(page)), "runs": str(self.runs)})
        except NoKey as error:
            fix = "let LUYEN_KEY_FILE name a private file that you may write"
            raise UserError("key", str(path), f"a job cannot be signed: {error}", fix) from None
        write_whole(path, json_page(sealed), is_private=True)

    def _signed(self, path: Path) -> dict[str, Any] | None:
        try:
            page = unsigned(parse_json(read_bytes(path, most_bytes=_MOST_RECORD)))
        except (OSError, ValueError, AttributeError, NoKey):
            return None
        return page if page.pop("runs", None) == str(self.runs) else None


def start_of(pid: int) -> str | None:
    """When a process began, in words that no later process of the same id has; None: it ended."""
    try:
        after = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        if Path("/proc/self/stat").exists():
            return None
    else:
        return None if after[0] in "ZX" else f"{boot} {after[19]}"
    done = subprocess.run(["ps", "-o", "stat=,lstart=", "-p", str(pid)], capture_output=True,
                          text=True, check=False, timeout=_PS_S)  # fmt: skip
    state, _, begun = done.stdout.strip().partition(" ")
    return begun.strip() if begun and "Z" not in state else None


def ended(record: JobRecord, state: State, error: str | None = None) -> JobRecord:
    """The record of a job that is over."""
    return replace(record, state=state, error=error)
