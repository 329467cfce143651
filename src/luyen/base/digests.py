"""Digests of a run's steps, checksums of its small files, and the key that signs runs.

A line hashes what a step did, stage by stage in the order it happened, and the chain of the line
before. Two runs with the same last chain did the same in every step; where they do not, the first
stage that differs in the first step that differs is where they parted.
"""

import hashlib
import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any, cast, final

from luyen.base.errors import UserError
from luyen.base.files import (
    append,
    json_line,
    json_page,
    open_lines,
    plain,
    read_lines,
    temporary_path,
    write_whole,
    writing,
)
from luyen.base.input_files import read_bytes
from luyen.base.system import flags as system_flags
from luyen.base.system import user

SCHEMA = 1
"""Version of the lines and of what is hashed; a reader refuses a later one."""
STAGES = ("prompts", "rollouts", "rewards", "advantages", "gradients", "weights", "metrics")
"""The stages of a step in the order in which each follows from those before it."""
BEGINNING = hashlib.sha256(b"luyen digests 1").hexdigest()
"""The chain of a run that has done nothing."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StepDigest:
    """What one step did, as hashes.

    Example:
        >>> step = link(BEGINNING, step=1, stages={"metrics": hash_value({"loss": 0.5})})
        >>> step.previous == BEGINNING, step.chain == link(BEGINNING, step=1, stages={}).chain
        (True, False)
    """

    step: int
    """The step; 0 is the validation before training."""
    stages: Mapping[str, str]
    """SHA-256 of each stage that the step had, by the names of `STAGES`."""
    previous: str
    """Chain of the line before, or of the checkpoint the run went on from."""
    chain: str
    """SHA-256 of step, stages and `previous`."""


def link(previous: str, *, step: int, stages: Mapping[str, str]) -> StepDigest:
    """The digest of a step that follows a chain."""
    unknown = stages.keys() - set(STAGES)
    assert not unknown, f"unknown stages: {sorted(unknown)}"
    chain = hash_value({"previous": previous, "step": step, "stages": dict(stages)})
    return StepDigest(step=step, stages=dict(stages), previous=previous, chain=chain)


def hash_value(value: Any) -> str:
    """SHA-256 of plain data: equal content gives equal hashes, in any order of keys.

    Example:
        >>> hash_value({"a": 1, "b": (2.0,)}) == hash_value({"b": [2.0], "a": 1})
        True
    """
    return hashlib.sha256(_text(value)).hexdigest()


def hash_parts(parts: Iterable[bytes]) -> str:
    """SHA-256 of byte strings in order; where one ends and the next begins counts.

    Example:
        >>> hash_parts([b"ab", b"c"]) == hash_parts([b"a", b"bc"])
        False
    """
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return hasher.hexdigest()


def _text(value: Any) -> bytes:
    # Escaped, since a policy may write half of a surrogate pair, which UTF-8 cannot hold.
    return json.dumps(value, sort_keys=True, default=str).encode()


@final
class DigestFile:
    """`digests.jsonl`: one line a step, each in one write."""

    def __init__(self, path: Path, *, first_step: int = 0) -> None:
        """Steps from `first_step` on will be done again: their lines are dropped."""
        if path.is_file():
            kept = [d for d in read_digests(path) if d.step < first_step] if first_step else []
            write_whole(path, "".join(_line(digest) for digest in kept))
        self._path = path
        with writing(path):
            self._file = open_lines(path)

    def write(self, digest: StepDigest) -> None:
        """Append the line of a step."""
        append(self._file, _line(digest).encode())

    def sync(self) -> None:
        """Force the lines to the disk, so that no checkpoint is ahead of them."""
        with writing(self._path):
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def read_digests(path: Path) -> list[StepDigest]:
    """The lines of a file of digests; a torn last one is left out, a changed one is an error."""
    if not path.is_file():
        why = "it is missing: the run was supervised, or is older than digests, or it was removed"
        raise UserError("file", str(path), why, "give a run that has one")
    return [_digest(path, number, line) for number, line in enumerate(read_lines(path), 1)]


def _line(digest: StepDigest) -> str:
    return json_line(
        {
            "schema": SCHEMA,
            "step": digest.step,
            "stages": digest.stages,
            "previous": digest.previous,
            "chain": digest.chain,
        }
    )


def _digest(path: Path, number: int, line: dict[str, Any]) -> StepDigest:
    schema = line.get("schema")
    if isinstance(schema, int) and schema > SCHEMA:
        why = f"it follows layout {schema}, and this version reads up to {SCHEMA}"
        raise UserError("file", str(path), why, "install a newer luyen")
    stages, step = line.get("stages"), line.get("step")
    previous = line.get("previous")
    if schema == SCHEMA and isinstance(stages, dict) and isinstance(step, int):
        hashes = cast(dict[str, str], stages)
        if hashes.keys() <= set(STAGES):
            found = link(str(previous), step=step, stages=hashes)
            if found.chain == line.get("chain"):
                return found
    why = f"line {number} is not as it was written: its chain does not follow from its stages"
    fix = "restore it from a copy, or remove the file: a run goes on without the earlier digests"
    raise UserError("file", str(path), why, fix)


# Small files with a checksum of their content.
#
# A JSON object holds the SHA-256 of its other content under `seal`; a text begins with a comment
# line that holds the SHA-256 of what follows. A changed bit is found on reading.

_CHECKSUM_KEY = "seal"
_LINE = re.compile(r"# sha256 of what follows: ([0-9a-f]{64})")
_FIX = "restore it from a copy"


def page_with_checksum(value: Mapping[str, Any]) -> str:
    """Indented JSON with its checksum.

    Example:
        >>> sorted(json.loads(page_with_checksum({"seed": 1})))
        ['seal', 'seed']
    """
    assert _CHECKSUM_KEY not in value, "the content has a key `seal` of its own"
    return json_page({**value, _CHECKSUM_KEY: _checksum_of(value)})


def without_checksum(page: dict[str, Any], path: Path, *, is_demanded: bool) -> dict[str, Any]:
    """What was read from `path` without its checksum; a UserError when the two do not match.

    A page without a checksum is returned as it is, unless one `is_demanded`.

    Example:
        >>> without_checksum({"seed": 1}, Path("manifest.json"), is_demanded=False)
        {'seed': 1}
    """
    if _CHECKSUM_KEY not in page and not is_demanded:
        return page
    body = {name: value for name, value in page.items() if name != _CHECKSUM_KEY}
    if page.get(_CHECKSUM_KEY) != _checksum_of(body):
        raise _changed(path)
    return body


def text_with_checksum(text: str) -> str:
    """The text with its checksum as a first line, which YAML reads as a comment.

    Example:
        >>> text_with_checksum("seed: 1\\n").splitlines()[1]
        'seed: 1'
    """
    return f"# sha256 of what follows: {_hash(text)}\n{text}"


def read_text_with_checksum(path: Path, *, is_demanded: bool) -> str:
    """The text below the checksum; a UserError on a mismatch, or if the file cannot be read.

    A file without a checksum is read as it is, unless one `is_demanded`.
    """
    try:
        # As bytes first: reading as text would make "\r\n" and "\n" the same.
        whole = read_bytes(path).decode()
    except FileNotFoundError as error:
        raise UserError("file", str(path), "it is missing", _FIX) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("file", str(path), f"it cannot be read: {error}", _FIX) from error
    first, _, rest = whole.partition("\n")
    found = _LINE.fullmatch(first)
    if found is None and not is_demanded:
        return whole
    if found is None or found.group(1) != _hash(rest):
        raise _changed(path)
    return rest


def _checksum_of(value: Mapping[str, Any]) -> str:
    return _hash(json.dumps(plain(value), sort_keys=True))


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _changed(path: Path) -> UserError:
    return UserError("file", str(path), "it is not as it was written: checksum mismatch", _FIX)


# The key with which this user signs runs: it lies outside of them, and no other user can read
# it.
#
# `LUYEN_KEY_FILE` says where; else it is `luyen/run_key` below the user's configuration folder.
# It is made when it is first needed.

VARIABLE = "LUYEN_KEY_FILE"
_SIGNED_BY = "key"
_CODE = "hmac"
_LEAST = 32
"""Characters of a key."""
_MOST = 4096
"""Bytes of its file that are looked at."""


class NoKey(Exception):
    """There is no key that could be used; the message says why."""


def key_file() -> Path:
    """Where the key of this user lies, or would."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named).expanduser()
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    try:
        return Path(folder).expanduser() / "luyen" / "run_key"
    except RuntimeError as error:
        raise NoKey("this user has no home folder") from error


def signed(page: Mapping[str, Any]) -> dict[str, Any]:
    """The page with the name of the key and its code; the key is made if there is none.

    Raises NoKey where none can be had.
    """
    key = _read_or_make(key_file())
    return {**page, _SIGNED_BY: _name(key), _CODE: _code(page, key)}


def unsigned(page: Mapping[str, Any]) -> dict[str, Any]:
    """What `signed` was given; NoKey where this user did not sign it, or it was changed since."""
    body = {name: value for name, value in page.items() if name not in (_SIGNED_BY, _CODE)}
    key = _read(key_file())
    if key is None:
        raise NoKey("this user has no key here, so another user signed it")
    if page.get(_SIGNED_BY) != _name(key):
        raise NoKey("it was signed with another key, by another user or on another machine")
    if not hmac.compare_digest(str(page.get(_CODE)), _code(body, key)):
        raise NoKey("its signature is not that of what it holds")
    return body


def _code(page: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, json_line(page).encode(), hashlib.sha256).hexdigest()


def _name(key: bytes) -> str:
    return hashlib.sha256(b"luyen run key " + key).hexdigest()[:16]


def _read(path: Path) -> bytes | None:
    """The key in a file; None without one. NoKey if other users can read it."""
    try:
        with FileIO(path, "rb", opener=_open) as file:
            seen = os.fstat(file.fileno())
            key = file.read(_MOST).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoKey(f"{path} cannot be read: {error.strerror}") from error
    owner = user()
    if owner is not None and (seen.st_uid != owner or stat.S_IMODE(seen.st_mode) & 0o077):
        raise NoKey(f"{path} is open to other users; make it yours alone with chmod 600")
    if len(key) < _LEAST:
        raise NoKey(f"{path} holds no key; remove it, and the next run makes one")
    return key


def _open(path: str, flags: int) -> int:
    # A pipe has nothing to say, and is not waited for.
    return os.open(path, flags | system_flags("O_NONBLOCK"))


def _read_or_make(path: Path) -> bytes:
    found = _read(path)
    if found is not None:
        return found
    unfinished = temporary_path(path)
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unfinished.touch(0o600, exist_ok=False)
        unfinished.write_text(secrets.token_hex(32) + "\n")
        with suppress(FileExistsError):  # another process was first, and its key it is
            os.link(unfinished, path)
    except OSError as error:
        raise NoKey(f"{path} cannot be made: {error.strerror}") from error
    finally:
        with suppress(OSError):
            unfinished.unlink(missing_ok=True)
    made = _read(path)
    assert made is not None, f"{path} was made and is gone"
    return made
