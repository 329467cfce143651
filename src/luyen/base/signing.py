"""The key with which this user signs runs: it lies outside of them, and no other user can read it.

`LUYEN_KEY_FILE` says where; else it is `luyen/run_key` below the user's configuration folder. It is
made when it is first needed.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any

from luyen.base.files import json_line, temporary_beside

VARIABLE = "LUYEN_KEY_FILE"
_KEY = "key"
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
    return {**page, _KEY: _name(key), _CODE: _code(page, key)}


def unsigned(page: Mapping[str, Any]) -> dict[str, Any]:
    """What `signed` was given; NoKey where this user did not sign it, or it was changed since."""
    body = {name: value for name, value in page.items() if name not in (_KEY, _CODE)}
    key = _read(key_file())
    if key is None:
        raise NoKey("this user has no key here, so somebody else signed it")
    if page.get(_KEY) != _name(key):
        raise NoKey("it was signed with another key, by another user or on another machine")
    if not hmac.compare_digest(str(page.get(_CODE)), _code(body, key)):
        raise NoKey("its signature is not that of what it holds")
    return body


def _code(page: Mapping[str, Any], key: bytes) -> str:
    return hmac.new(key, json_line(page).encode(), hashlib.sha256).hexdigest()


def _name(key: bytes) -> str:
    return hashlib.sha256(b"luyen run key " + key).hexdigest()[:16]


def _read(path: Path) -> bytes | None:
    """The key in a file; None without one. NoKey where others may know it."""
    try:
        with FileIO(path, "rb", opener=_open) as file:
            seen = os.fstat(file.fileno())
            key = file.read(_MOST).strip()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NoKey(f"{path} cannot be read: {error.strerror}") from error
    if seen.st_uid != os.geteuid() or stat.S_IMODE(seen.st_mode) & 0o077:
        raise NoKey(f"{path} is open to other users; make it yours alone with chmod 600")
    if len(key) < _LEAST:
        raise NoKey(f"{path} holds no key; remove it, and the next run makes one")
    return key


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # a pipe has nothing to say, and is not waited for


def _read_or_make(path: Path) -> bytes:
    found = _read(path)
    if found is not None:
        return found
    unfinished = temporary_beside(path)
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
