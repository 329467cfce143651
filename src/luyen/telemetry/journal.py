"""The work of the step in progress: rollouts, tool calls and scores, each written when it is done.

A process that goes on after another was killed takes what is here instead of doing it again. It may
do so only on the same basis: the same state before the step, the same configuration, the same files
of code. Then every piece is what it would have made itself.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from luyen.base.digests import hash_value
from luyen.base.journal import JournalFile
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


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class CallRecord:
    """What the journal knows of a tool call.

    Example:
        >>> CallRecord(is_begun=True, is_ended=False).is_unknown
        True
    """

    is_begun: bool
    """Whether the tool was about to be called."""
    is_ended: bool
    """Whether it is known how that ended."""
    call: ToolCall | None = None
    """What came of it; None when it broke or was cut off, and is to be made again."""
    metrics: Metrics | None = None
    """What the tool measured."""

    @property
    def is_unknown(self) -> bool:
        """Whether the tool may or may not have acted."""
        return self.is_begun and not self.is_ended


@final
class WorkJournal:
    """The journal of one step, or of one validation, in progress.

    Before it begins and after it is closed nothing is found, and nothing is kept.
    """

    def __init__(self, folder: Path, *, run_id: str) -> None:
        """`run_id` keeps the keys of tool calls apart from those of any other run."""
        self._folder = folder
        self._run_id = run_id
        self._file: JournalFile | None = None
        self.pack = PackedStreams()
        """Packs the streams of rollouts, once for the journal and for the digest of the step."""
        self._name = _NOWHERE

    def begin(self, step: int, *, kind: str, basis: Any) -> int:
        """Take up the work of a step on a basis; how many records there are to go on from."""
        self.close()
        self.pack.forget()
        self._name = f"{step_name(step)}.{kind}"
        self._file = JournalFile(_path(self._folder, step, kind), basis=hash_value(basis))
        return len(self._file)

    @property
    def is_open(self) -> bool:
        """Whether it has begun and was not closed."""
        return self._file is not None

    @property
    def has_known(self) -> bool:
        """Whether an earlier process left work to go on from."""
        return self._file is not None and len(self._file) > 0

    def rollout(self, purpose: str, group: GroupId, sample: int) -> Rollout | None:
        """A rollout that was finished."""
        found = self._find(_ROLLOUT, f"{purpose} {group}/{sample}")
        return None if found is None else rollout_of(found)

    def keep_rollout(self, purpose: str, rollout: Rollout) -> None:
        """Write down a rollout that is finished and sound."""
        assert rollout.fault is None, "what broke is to be tried again"
        self._keep(
            _ROLLOUT,
            f"{purpose} {rollout.group}/{rollout.sample}",
            rollout_tree(rollout, self.pack),
        )

    def scores(self, purpose: str, rollouts: Sequence[Rollout]) -> list[Score] | None:
        """The scores of a group, if these very rollouts were judged."""
        found = self._find(_SCORES, _group_key(purpose, rollouts))
        return None if found is None else [score_of(tree) for tree in found["scores"]]

    def keep_scores(
        self, purpose: str, rollouts: Sequence[Rollout], scores: Sequence[Score]
    ) -> None:
        """Write down the scores of a group, unless one of them could not be computed."""
        if all(score.value is not None for score in scores):
            trees = [score_tree(score) for score in scores]
            self._keep(_SCORES, _group_key(purpose, rollouts), {"scores": trees})

    def call_key(self, place: Sequence[Any], name: str, arguments: Mapping[str, Any]) -> str:
        """The idempotency key of a call: the same for the same call of the same run, ever.

        The step counts even where `place` leaves it out, as every validation does: what two of
        them ask for are two calls.
        """
        return hash_value([self._run_id, self._name, list(place), name, dict(arguments)])[:32]

    def call(self, key: str) -> CallRecord:
        """What is known of a call."""
        result = self._find(_RESULT, key)
        begun = self._find(_INTENT, key) is not None
        tree = None if result is None else result["call"]
        if result is None or (tree is None and self._is_begun_again(key)):
            return CallRecord(is_begun=begun, is_ended=False)
        made = None if tree is None else call_of(tree)
        return CallRecord(is_begun=begun, is_ended=True, call=made, metrics=result["metrics"])

    def intend(self, key: str, name: str, arguments: Mapping[str, Any]) -> None:
        """Write down that a tool is about to be called."""
        self._keep(_INTENT, key, {"name": name, "arguments": dict(arguments)})

    def keep_call(self, key: str, call: ToolCall | None, metrics: Metrics) -> None:
        """Write down how a call ended; None when it broke or was cut off."""
        tree = None if call is None else call_tree(call)
        self._keep(_RESULT, key, {"call": tree, "metrics": dict(metrics)})

    def close(self) -> None:
        """Close the file that is open. Closing twice is allowed."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _is_begun_again(self, key: str) -> bool:
        """Whether a call that broke was made once more, of which nothing is known."""
        return self._file is not None and self._file.last(key, (_INTENT, _RESULT)) == _INTENT

    def _find(self, kind: str, key: str) -> Mapping[str, Any] | None:
        return None if self._file is None else self._file.find(kind, key)

    def _keep(self, kind: str, key: str, body: Mapping[str, Any]) -> None:
        if self._file is not None:
            self._file.append(kind, key, body)


@final
class WorkJournals:
    """The journals of a run: one file for each step, and for each validation, in progress."""

    def __init__(self, folder: Path, *, run_id: str) -> None:
        """`run_id` keeps the keys of tool calls apart from those of any other run."""
        self._folder = folder
        self._run_id = run_id
        self._open: list[WorkJournal] = []

    def fresh(self) -> WorkJournal:
        """A journal that has not begun."""
        journal = WorkJournal(self._folder, run_id=self._run_id)
        # The one before may not have begun either: its step is asked for and not yet learned.
        self._open = [*(one for one in self._open[:-1] if one.is_open), *self._open[-1:], journal]
        return journal

    def has(self, step: int, *, kind: str) -> bool:
        """Whether there is a journal of a step, of whatever basis."""
        return _path(self._folder, step, kind).exists()

    def forget(self, step: int) -> None:
        """Remove the work of a step and of all before it: a checkpoint holds what came of it."""
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
    """Names the rollouts and what they say: a score belongs to nothing else."""
    hasher = hashlib.blake2b(digest_size=16)
    for rollout in rollouts:
        # Rewards of tools are in no token.
        calls = [(c.turn, c.name, c.status, c.result, c.reward) for c in rollout.calls]
        said = f"{rollout.key}{rollout.stop}{rollout.given}{calls}{rollout.text}"
        hasher.update(said.encode(errors="surrogatepass"))
        hasher.update(array("q", rollout.tokens).tobytes())
    return f"{purpose} {hasher.hexdigest()}"
