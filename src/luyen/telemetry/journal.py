"""Write-ahead journal of the step in progress: rollouts, tool calls and scores as they finish.

A process that resumes a killed run reuses these records instead of recomputing them. It does so
only with an equal `basis` (state before the step, configuration, code files), under which every
record equals what the process would have computed itself.
"""

import hashlib
import struct
import warnings
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, final

from luyen.base.digests import hash_value
from luyen.base.journal import DamagedJournal, JournalFile
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

_ROLLOUT, _SCORES, _INTENT, _RESULT = "rollout", "scores", "intent", "result"
_NOWHERE = ""
Metrics: TypeAlias = Mapping[str, float]
T = TypeVar("T")


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
