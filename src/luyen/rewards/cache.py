"""The score cache, keyed by a hash of everything that a score depends on, source code included.

A record is written when it is known and survives the death of the process; several runs may share
the file at the same time. Faults are never kept. Each record has a checksum.
"""

import inspect
import json
import pickle
import sqlite3
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from functools import cache
from hashlib import sha256
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast, final

import luyen
from luyen.base.errors import UserError
from luyen.base.rundir import DamagedRecord
from luyen.rewards.calls import Executor, ScoreCall, ScoreOutcome, ScoringCounters
from luyen.rewards.rules.all import rule_rewards
from luyen.telemetry.fingerprints import OURS, source_files

# Fingerprint of a rule's code: every source file that its score can depend on.


def code_of(rule: Callable[..., Any]) -> list[str] | None:
    """Our version, a hash of our rewards and, for a rule of yours, one of each of its files.

    Its files are its own, those of its package, and those that they import, however deep and
    wherever the import stands. Other installed packages count as unchanging. None where the
    rule has no source file.
    """
    file = inspect.getsourcefile(rule)
    if file is None:
        return None
    start = Path(file).resolve()
    found = [luyen.__version__, _rewards_hash()]
    if start.is_relative_to(OURS):
        return found
    files = source_files(start, package=_package_of(rule))
    return found + sorted(f"{f.name}: {sha256(f.read_bytes()).hexdigest()}" for f in files)


@cache
def _rewards_hash() -> str:
    """One hash of everything in this package; it cannot change under a running process."""
    whole = sha256()
    for path in sorted((OURS / "rewards").rglob("*.py")):
        whole.update(sha256(path.read_bytes()).digest())
    return whole.hexdigest()


def _package_of(rule: Callable[..., Any]) -> Path | None:
    """The folder of the outermost package that a rule is defined in."""
    outermost = vars(sys.modules[rule.__module__.partition(".")[0]])
    file = outermost.get("__file__")
    return Path(file).resolve().parent if file and "__path__" in outermost else None


FILE = "reward_cache.sqlite"
"""Name of the cache in a run directory."""
_WAIT_S = 30.0
"""How long another process may hold the file."""


@final
class ScoreCache:
    """A table from hashes to small records. Without a path it lives in memory.

    Example:
        >>> scores = ScoreCache(None, counts=ScoringCounters())
        >>> scores.keep("a1", {"value": 0.5})
        >>> scores.find("a1"), scores.find("b2")
        ({'value': 0.5}, None)
    """

    def __init__(self, path: Path | None, *, counts: ScoringCounters) -> None:
        """A UserError when the file cannot be opened, or is no cache."""
        self._path = path
        self._counts = counts
        self._lock = threading.Lock()
        self._has_warned = False
        with self._user_errors():
            if path is not None:
                path.parent.mkdir(parents=True, exist_ok=True)
            place = ":memory:" if path is None else str(path)
            self._table = sqlite3.connect(
                place, timeout=_WAIT_S, isolation_level=None, check_same_thread=False
            )
            self._table.text_factory = lambda data: data.decode(errors="replace")
            self._table.execute("PRAGMA journal_mode=WAL")
            self._table.execute("PRAGMA synchronous=NORMAL")
            self._table.execute(
                "CREATE TABLE IF NOT EXISTS sealed (key TEXT PRIMARY KEY, body TEXT, seal TEXT)"
            )

    def find(self, key: str) -> Mapping[str, Any] | None:
        """What was kept under a key; a record that is not as it was written is none, and goes."""
        with self._lock, self._user_errors():
            row = self._table.execute(
                "SELECT body, seal FROM sealed WHERE key = ?", (key,)
            ).fetchone()
            if row is not None and row[1] != _checksum_of(key, row[0]):
                self._table.execute("DELETE FROM sealed WHERE key = ?", (key,))
                self._note_damage(key)
                row = None
        self._counts.add("judging/cache_misses" if row is None else "judging/cache_hits")
        return None if row is None else cast(dict[str, Any], json.loads(row[0]))

    def keep(self, key: str, body: Mapping[str, Any]) -> None:
        """Write a record down; the first one under a key stays."""
        text = json.dumps(dict(body), allow_nan=False)
        line = key, text, _checksum_of(key, text)
        with self._lock, self._user_errors():
            self._table.execute("INSERT OR IGNORE INTO sealed VALUES (?, ?, ?)", line)

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        with self._lock:
            self._table.close()

    def _note_damage(self, key: str) -> None:
        self._counts.add("judging/cache_damaged")
        if not self._has_warned:
            self._has_warned = True
            why = f"the entry {key[:12]} is not as it was written, and is recomputed"
            warnings.warn(f"{self._path}: {why}", DamagedRecord, stacklevel=4)

    @contextmanager
    def _user_errors(self) -> Generator[None]:
        try:
            yield
        except (sqlite3.Error, OSError) as error:
            why = f"the cache of scores cannot be used: {error}"
            fix = "name another file, make room on the disk, or set reward.cache.enable=false"
            raise UserError("reward.cache.path", str(self._path), why, fix) from error


def _checksum_of(key: str, body: Any) -> str:
    """What a record and its key must hash to; a table may hold anything by now."""
    return sha256(f"{key} {body}".encode(errors="replace")).hexdigest()


def content_hash(*parts: Any) -> str:
    """SHA-256 of plain data and records; anything else is hashed as it pickles.

    Example:
        >>> content_hash({"a": 1, "b": 2}) == content_hash({"b": 2, "a": 1}) != content_hash("a")
        True
    """
    text = json.dumps(parts, sort_keys=True, default=_plain, ensure_ascii=True)
    return sha256(text.encode()).hexdigest()


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    if isinstance(value, Mapping):
        return dict(cast(Mapping[Any, Any], value))
    return sha256(pickle.dumps(value)).hexdigest()


@final
class CachedExecutor:
    """Caches the calls of deterministic rules; passes every other call on.

    A score depends on the rule and its code (`luyen.rewards.cache`), its settings, the prompt and
    the answer.
    """

    def __init__(self, inner: Executor, scores: ScoreCache) -> None:
        self._inner = inner
        self._scores = scores
        self._codes: dict[str, list[str] | None] = {}

    async def run(self, calls: Sequence[ScoreCall]) -> list[ScoreOutcome]:
        """What came of each call, in order."""
        keys = [self._key(call) for call in calls]
        found = [None if key is None else self._scores.find(key) for key in keys]
        fresh = [call for call, known in zip(calls, found, strict=True) if known is None]
        made = iter(await self._inner.run(fresh) if fresh else [])
        outcomes: list[ScoreOutcome] = []
        for key, known in zip(keys, found, strict=True):
            outcome = (
                next(made) if known is None else ScoreOutcome(numbers={"score": known["value"]})
            )
            is_plain = outcome.tree is None and not outcome.is_stand_in
            if key is not None and known is None and is_plain and outcome.numbers:
                self._scores.keep(key, {"value": outcome.numbers["score"]})
            outcomes.append(outcome)
        return outcomes

    def _key(self, call: ScoreCall) -> str | None:
        """The key of a call that may be remembered."""
        if not call.rule or not rule_rewards.facts(call.name).get("deterministic", False):
            return None
        try:
            code = self._code(call.name)
            return None if code is None else content_hash(call.name, code, dict(call.arguments))
        except (TypeError, ValueError, AttributeError, RecursionError, pickle.PicklingError):
            return None  # a row that cannot be hashed is scored each time

    def _code(self, rule: str) -> list[str] | None:
        """The code hashes of a rule, with the version of the package it uses."""
        if rule not in self._codes:
            code = code_of(rule_rewards.get(rule))
            package = rule_rewards.facts(rule).get("package")
            versions = [] if package is None else [version(package)]
            self._codes[rule] = None if code is None else code + versions
        return self._codes[rule]
