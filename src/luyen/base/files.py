"""Files that are whole or absent, appended lines that survive a kill, temporary-file cleanup.

A file is written under a temporary name and renamed, so a reader sees the old content or the new
one. A line goes to its file in one `write`, so a killed process leaves whole lines; after a loss of
power the last line may be torn, and only the last.
"""

import errno
import json
import math
import os
import platform
import re
import secrets
import shutil
import stat
import time
import zlib
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any, cast

from luyen.base.errors import UserError
from luyen.base.input_files import parse_json, read_bytes
from luyen.base.system import flags as system_flags
from luyen.base.system import is_process

# Names of unfinished files and folders, and which of them are abandoned.
#
# A name says which process of which machine writes it: what a live one writes is left alone.

TEMPORARY = ".tmp-"
"""How the name of an unfinished file or directory begins."""
_WRITER = re.compile(re.escape(TEMPORARY) + r".+-(\d+)-([0-9a-f]{8}|[0-9a-f]{16})")
_STACKS = re.compile(r"locked-(\d+)\.txt")
"""Where a watchdog would write stacks: empty unless it did, and removed when the run ends."""
_LONGEST = 200
"""Bytes of the final name that go into the unfinished one: file systems take 255 in all."""
_OTHER_MACHINE_S = 24 * 3600.0
"""Processes of another machine cannot be looked up: their writes are abandoned after this age."""
_mine: set[Path] = set()
"""What this process is writing now. Its id alone proves nothing: ids come back after a restart."""


def temporary_path(path: Path) -> Path:
    """A name for work in progress, in the same folder, that no other writer has."""
    name = path.name.encode("utf-8", "surrogateescape")[:_LONGEST].decode("utf-8", "ignore")
    own = f"{_machine()}{secrets.token_hex(4)}"
    return path.with_name(f"{TEMPORARY}{name}-{os.getpid()}-{own}")


@contextmanager
def in_progress(path: Path) -> Generator[None]:
    """While entered, the path is being written by this process."""
    _mine.add(path)
    try:
        yield
    finally:
        _mine.discard(path)


def is_abandoned(path: Path) -> bool:
    """Whether it is an unfinished file or folder of ours whose writer is gone."""
    found = _WRITER.fullmatch(path.name)
    if found is None:
        return False
    writer, own = int(found.group(1)), found.group(2)
    if len(own) == 16 and not own.startswith(_machine()):
        return _is_old(path)
    return path not in _mine if writer == os.getpid() else not is_running(writer)


def remove_abandoned(folder: Path) -> None:
    """Remove what killed writers left in a run directory and in the folders directly below it."""
    for place in (folder, *_folders(folder)):
        for path in _entries(place):
            if is_abandoned(path) or _is_unused(path):
                remove(path)


def remove_abandoned_writes(path: Path) -> None:
    """Remove the temporary files that killed writers of this file or folder left."""
    for other in _entries(path.parent):
        if other.name.startswith(f"{TEMPORARY}{path.name}-") and is_abandoned(other):
            remove(other)


def remove(path: Path) -> None:
    """Remove a file or a whole folder, as far as possible."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
        return
    try:
        path.unlink(missing_ok=True)
    except OSError:
        return  # another time


def is_running(process: int) -> bool:
    """Whether a process of this machine has that id."""
    return is_process(process)


def _machine() -> str:
    """Eight digits for the scope of process ids: a host, or a container on it."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{zlib.crc32(f'{platform.node()} {space}'.encode()):08x}"


def _is_old(path: Path) -> bool:
    try:
        return time.time() - path.stat(follow_symlinks=False).st_mtime > _OTHER_MACHINE_S
    except OSError:
        return False


def _is_unused(path: Path) -> bool:
    """Whether it is the empty file of a watchdog whose process was killed."""
    found = _STACKS.fullmatch(path.name)
    if found is None or is_running(int(found.group(1))):
        return False
    try:
        return path.stat(follow_symlinks=False).st_size == 0
    except OSError:
        return False


def _folders(folder: Path) -> list[Path]:
    return [path for path in _entries(folder) if path.is_dir() and not path.is_symlink()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


_RESUME = "free disk space or change the permissions, and resume; earlier checkpoints are intact"


def sync(path: Path) -> None:
    """Force a file, or the entries of a directory, to the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_whole(path: Path, content: bytes | str, *, is_private: bool = False) -> None:
    """Write the content to `path` atomically: a reader sees the old content or all of the new.

    A private file is readable by its owner alone, from its first byte on. A device such as
    `/dev/null` is refused: root would replace it by a file.
    """
    _refuse_device(path)
    data = content.encode() if isinstance(content, str) else content
    unfinished = temporary_path(path)
    with writing(path), in_progress(unfinished):
        try:
            if is_private:
                unfinished.touch(0o600, exist_ok=False)
            unfinished.write_bytes(data)
            sync(unfinished)
            unfinished.replace(path)
            sync(path.parent)
        finally:
            unfinished.unlink(missing_ok=True)


def _refuse_device(path: Path) -> None:
    is_device = path.absolute().parent == Path("/dev")
    with suppress(OSError):
        is_device |= stat.S_ISCHR(path.stat().st_mode) or stat.S_ISBLK(path.stat().st_mode)
    if is_device:
        raise UserError("file", str(path), "it is a device, not a file", "name an ordinary file")


@contextmanager
def writing(path: Path, *, field: str = "file", fix: str = _RESUME) -> Generator[None]:
    """Turn what the disk refuses inside into a UserError that names the file and the reason.

    Example:
        >>> try:
        ...     with writing(Path("metrics.jsonl")):
        ...         raise OSError(28, "No space left on device")
        ... except UserError as error:
        ...     print(error.value, error.why)
        metrics.jsonl it could not be written: No space left on device
    """
    try:
        yield
    except OSError as error:
        why = f"it could not be written: {error.strerror or error}"
        raise UserError(field, str(path), why, fix) from error


def append(file: FileIO, data: bytes) -> None:
    """Add data to an unbuffered file in one write; a UserError when the disk does not take it."""
    with writing(Path(str(file.name))):
        taken = file.write(data)
        if taken != len(data):  # the last room of a disk takes a part, and the next write fails
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def plain(value: Any) -> Any:
    """The value as standard JSON can hold it: a float that is not finite becomes its name.

    `float` reads the names back, so nothing is lost where a number is expected.

    Example:
        >>> plain({"loss": float("nan"), "steps": (1, 2)})
        {'loss': 'nan', 'steps': [1, 2]}
    """
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {str(name): plain(inner) for name, inner in pairs}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in cast(Sequence[Any], value)]
    return value


def json_line(value: Mapping[str, Any]) -> str:
    """One line of JSON with sorted keys: equal content gives equal bytes."""
    return _in_utf8(json.dumps(plain(value), sort_keys=True, ensure_ascii=False, allow_nan=False))


def json_page(value: Mapping[str, Any]) -> str:
    """Indented JSON for a file that people open."""
    return _in_utf8(json.dumps(plain(value), indent=2, ensure_ascii=False, allow_nan=False))


def _in_utf8(text: str) -> str:
    """The text and a newline; bytes of a path that are no UTF-8 become escapes, as JSON has it."""
    return text.encode(errors="backslashreplace").decode() + "\n"


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; a UserError when it is missing, unreadable or damaged."""
    try:
        found = parse_json(read_bytes(path))
    except FileNotFoundError as error:
        raise UserError("file", str(path), "it is missing", "restore it from a copy") from error
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise UserError("file", str(path), why, "check its type and permissions") from error
    except ValueError as error:
        why = f"it is damaged: {error}"
        raise UserError("file", str(path), why, "restore it from a copy") from error
    if not isinstance(found, dict):
        why = "it holds no JSON object"
        raise UserError("file", str(path), why, "restore it from a copy")
    return cast(dict[str, Any], found)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; a torn last line is left out, any other damage is an error."""
    found: list[dict[str, Any]] = []
    for number, entry in enumerate(read_entries(path), 1):
        if entry is None:
            why = f"line {number} is damaged"
            raise UserError("file", str(path), why, "restore it from a copy, or remove the line")
        found.append(entry)
    return found


def read_entries(path: Path) -> list[dict[str, Any] | None]:
    """The object of each line of a JSONL file, None for a damaged line.

    A torn last line is left out. A UserError where the file cannot be read.
    """
    try:
        data = read_bytes(path)
    except FileNotFoundError:
        raise
    except OSError as error:
        why = f"it cannot be read: {error.strerror or error}"
        raise UserError("file", str(path), why, "check its type and permissions") from error
    whole = data.split(b"\n")[:-1]  # what follows the last newline is torn, or empty
    return [_entry(line) for line in whole]


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        found = parse_json(line)
    except ValueError:
        return None
    return cast(dict[str, Any], found) if isinstance(found, dict) else None


# Files of a run directory that are written in place: opened where they are, and nowhere else.
#
# A folder that other users can write to may hold a link under the name of such a file. Appending to
# it, or truncating it, would then change any file of the user; and opening a pipe would block for
# ever.

_LINK = "it is a link, and what is written there would land in another place"
_SAFE = system_flags("O_NOFOLLOW", "O_NONBLOCK", "O_CLOEXEC", "O_BINARY")
_MAY_BE_LINKED = "checkpoints"
_SECOND = "it is a file that has another name (a hard link), which would change with it"


def open_regular(path: Path | str, flags: int, mode: int = 0o644) -> int:
    """A handle of a regular file, made where there is none if the flags say so.

    An OSError for a link and for anything else that is no file; nothing is waited for. One that
    is to be written must have no second name.

    Example:
        >>> open_regular("/dev/null", os.O_WRONLY)
        Traceback (most recent call last):
        OSError: it is no file
    """
    safe = flags & ~os.O_TRUNC | _SAFE
    try:
        handle = os.open(path, safe, mode)
    except OSError as error:
        raise OSError(_LINK) if error.errno == errno.ELOOP else error from None
    facts = os.fstat(handle)
    is_written = bool(flags & (os.O_WRONLY | os.O_RDWR))
    if not stat.S_ISREG(facts.st_mode) or (is_written and facts.st_nlink > 1):
        os.close(handle)
        raise OSError(_SECOND if stat.S_ISREG(facts.st_mode) else "it is no file")
    if flags & os.O_TRUNC:
        os.ftruncate(handle, 0)
    return handle


def refuse_linked_folders(folder: Path) -> None:
    """An OSError where a folder of a run directory is a link, but for `checkpoints`.

    Files are made, replaced and removed in it by names that files of the user may have too. In
    `checkpoints` only folders `step_*` are, and people keep those on another disk.
    """
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if path.name != _MAY_BE_LINKED and path.is_symlink() and path.is_dir():
            raise OSError(f"`{path.name}` is a link to a folder in another place")


def open_lines(path: Path) -> FileIO:
    """The file, to add lines to its end, each in one write."""
    return FileIO(path, "ab", opener=open_regular)
