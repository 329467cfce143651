"""Who may call: API keys from the environment or a private file, and names of this host."""

import hashlib
import hmac
import ipaddress
import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from luyen.base.errors import UserError
from luyen.base.secrets import remember
from luyen.serve.failures import ApiFailure

_LEAST = 16
"""Characters of a key: a shorter one could be guessed."""
_MOST_BYTES = 64 * 1024


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Keyring:
    """Hashes of the keys that open something.

    Example:
        >>> ring = Keyring.of(["a key of sixteen characters"])
        >>> ring.has("a key of sixteen characters"), ring.has("another"), Keyring().is_empty
        (True, False, True)
    """

    hashes: tuple[bytes, ...] = ()
    """SHA-256 of each key: equal lengths, so that comparing them says nothing of theirs."""

    @classmethod
    def of(cls, keys: Iterable[str]) -> "Keyring":
        """The ring of these keys."""
        return cls(hashes=tuple(_hash(key) for key in keys))

    @property
    def is_empty(self) -> bool:
        """Whether no key opens it."""
        return not self.hashes

    def has(self, key: str) -> bool:
        """Whether it is one of the keys; takes as long for a wrong one as for a right one."""
        given = _hash(key)
        return sum(hmac.compare_digest(given, known) for known in self.hashes) > 0


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()


def read_keys(variable: str, file: Path | None, *, option: str) -> Keyring:
    """Keys of an environment variable and of a file, one a line; `option` names the file's option.

    A file that other users may read is refused.
    """
    found = [("environment variable " + variable, os.environ.get(variable, ""))]
    if file is not None:
        found += [(option, line) for line in _private_text(file, option).splitlines()]
    keys = [(where, key.strip()) for where, key in found if key.strip()]
    for where, key in keys:
        if len(key) < _LEAST or not key.isascii() or not key.isprintable() or " " in key:
            why = f"a key has at least {_LEAST} visible ASCII characters"
            raise UserError(where, "(not shown)", why, "make one: openssl rand -hex 24")
        remember(key)
    return Keyring.of(key for _, key in keys)


def _private_text(file: Path, option: str) -> str:
    try:
        # Checked and read through one descriptor, so that it cannot be exchanged in between.
        with file.open("rb") as opened:
            facts = os.fstat(opened.fileno())
            if not stat.S_ISREG(facts.st_mode):
                raise UserError(option, str(file), "it is no file", "give a file")
            if stat.S_IMODE(facts.st_mode) & 0o077:
                why = "other users of this machine may read or change it"
                raise UserError(option, str(file), why, f"chmod 600 {file}")
            text = opened.read(_MOST_BYTES).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(option, str(file), str(error), "give a readable text file") from None
    if not text.split():
        raise UserError(option, str(file), "it holds no key", "put one key on each line")
    return text


def demand_key(headers: Mapping[str, str], keys: Sequence[Keyring]) -> None:
    """A failure unless the request carries a key of one of the rings."""
    scheme, _, given = headers.get("authorization", "").partition(" ")
    given = given.strip() if scheme.lower() == "bearer" else ""
    if sum(ring.has(given) for ring in keys) == 0:
        what = "a wrong key" if given else "no key"
        message = f"Authorization: {what}. Fix: send `Authorization: Bearer KEY`"
        raise ApiFailure(401, message, param="Authorization", code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """Whether an address is reached from this machine alone.

    Example:
        >>> [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0")]
        [True, True, True, False]
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def refuse_foreign_host(headers: Mapping[str, str]) -> None:
    """A failure for a request to another name than this machine's own.

    A web page may point a name of its own at 127.0.0.1, and have a browser send requests here. A
    server without keys answers only those that call it by a loopback address.
    """
    given = headers.get("host", "")
    host = given[1 : given.find("]")] if given.startswith("[") else given.partition(":")[0]
    if not is_loopback(host):
        message = "Host: it is no name of this machine. Fix: call http://127.0.0.1, or use API keys"
        raise ApiFailure(421, message, param="Host", code="wrong_host")
