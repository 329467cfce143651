"""The files of a run as a replay reads them; nothing is written."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from luyen.base.digests import BEGINNING, StepDigest, read_digests
from luyen.base.errors import UserError
from luyen.base.input_files import expanded
from luyen.base.records import Rollout, make_prompt
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import Checkpoint, CheckpointStore, DamagedCheckpoint, verify
from luyen.checkpoint.tensors import load_state
from luyen.config.schema.run import RunConfig
from luyen.config.trust import require_trust
from luyen.pipeline.policy_loading import read_config
from luyen.rollout.single_turn import Group
from luyen.telemetry.metrics import read_metrics
from luyen.telemetry.rollout_files import RecordedRollout, read_rollouts

_UNREAD = make_prompt([])
"""Placeholder prompt: training only needs the tokens in the rollouts."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedStep:
    """The recorded rollouts of a step.

    Example:
        >>> RecordedStep(step=3, rows=()).groups
        []
    """

    step: int
    """The step."""
    rows: tuple[RecordedRollout, ...]
    """Every rollout generated for it, with its advantages."""

    @property
    def rollouts(self) -> list[Rollout]:
        """Every generated rollout."""
        return [row.rollout for row in self.rows]

    @property
    def groups(self) -> list[Group]:
        """The rollouts that the step trained on, by group."""
        found: dict[str, list[Rollout]] = {}
        for row in self.rows:
            if row.advantages is not None:
                found.setdefault(str(row.rollout.group), []).append(row.rollout)
        return [Group(prompt=_UNREAD, rollouts=tuple(some)) for some in found.values()]

    @property
    def baselines(self) -> dict[str, float]:
        """Greedy rewards by group, where the run had them."""
        pairs = [(str(row.rollout.group), row.baseline) for row in self.rows]
        return {group: value for group, value in pairs if value is not None}

    @property
    def advantages(self) -> list[float]:
        """Advantages of every token that trains, in the order of the packed batch."""
        rows = sorted(self.rows, key=lambda row: row.rollout.key)
        used = [row for row in rows if row.advantages is not None]
        lists = [tokens for row in used for tokens in (*row.earlier, row.advantages or ())]
        return [value for tokens in lists for value in tokens if value is not None]


@final
class ReplayRecord:
    """The files of a run directory, read-only."""

    def __init__(self, root: Path | str, *, is_trusted: bool = False) -> None:
        """A UserError when there is no run, or no digests to compare a replay with.

        A run that names code and was not made on this machine is refused unless `is_trusted`.
        """
        self.directory = RunDirectory.open(root)
        require_trust(self.directory, is_trusted=is_trusted)
        self.directory.read_config()  # verifies the checksum
        self.digests: dict[int, StepDigest] = {
            digest.step: digest for digest in read_digests(self.directory.digests)
        }

    @cached_property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics of each step without times; empty if the run wrote no `metrics.jsonl`."""
        path = self.directory.metrics
        return {s.step: s.timeless() for s in read_metrics(path)} if path.is_file() else {}

    def config(self, overrides: Sequence[str] = ()) -> RunConfig:
        """The configuration of the run with overrides."""
        return read_config([self.directory.config], overrides)

    @property
    def is_offline(self) -> bool:
        """Whether the run was offline training, without rollouts."""
        return self.config().trainer.stage != "rl"

    def rows(self) -> int | None:
        """Training rows of the run; None when it was begun by an older version."""
        return self.directory.read_manifest().get("rows", {}).get("train")

    def training_rows(self, step: int) -> str | None:
        """Fingerprint of the training rows in the session that did the step."""
        datasets = begun = self.directory.read_manifest().get("datasets", {})
        for session in self.directory.read_resumptions():
            if (session.get("checkpoint") or 0) < step:
                datasets = session.get("changed", {}).get("datasets", begun)
        return datasets.get("train")

    def demand(self, step: int) -> None:
        """A UserError unless the run did this step."""
        done = sorted(number for number in self.digests if number > 0)
        if step not in done:
            known = f"it did {done[0]} to {done[-1]}" if done else "it did none"
            why = f"the run has no such step: {known}, as {self.directory.digests.name} has it"
            raise UserError("--step", step, why, "give another")

    def step(self, number: int) -> RecordedStep:
        """The rollouts of a step; a UserError if they are missing or were not trained on."""
        path = self.directory.rollouts(number)
        if not path.is_file():
            why = f"the rollouts of step {number} are needed, and the file is missing"
            raise UserError("file", str(path), why, "restore it, or replay a step that needs less")
        found = RecordedStep(step=number, rows=tuple(read_rollouts(path, step=number)))
        if not found.groups:
            why = "none of its rollouts has advantages: no step learned from them"
            raise UserError("file", str(path), why, "restore it from a copy")
        return found

    def checkpoint_before(self, step: int) -> Checkpoint | None:
        """The newest valid checkpoint before the step; None: the run has to start from scratch.

        A checkpoint of a superseded course, from before the run was resumed at an earlier step, is
        skipped. A UserError when there is none and the run itself began from a checkpoint.
        """
        store = CheckpointStore(self.directory.checkpoints)
        for saved in reversed([number for number in store.list() if number < step]):
            try:
                found = store.load(saved)
            except UserError as error:
                warnings.warn(f"{error}; trying an earlier one", DamagedCheckpoint, stacklevel=2)
                continue
            if self._belongs(found):
                return found
        first = self.digests[min(self.digests)]
        if first.previous == BEGINNING:
            return None
        return self._origin(step, first.previous)

    def _belongs(self, checkpoint: Checkpoint) -> bool:
        """Whether a checkpoint belongs to the recorded digest chain."""
        written = self.digests.get(checkpoint.step)
        return written is None or written.chain == load_state(checkpoint.path, "loop")["chain"]

    def _origin(self, step: int, chain: str) -> Checkpoint:
        """The checkpoint of another run that this one was resumed from."""
        trainer = self.config().trainer
        if trainer.resume_from_path is not None and expanded(trainer.resume_from_path).is_dir():
            found = verify(expanded(trainer.resume_from_path))
            if found.step < step:
                return found
        why = f"no checkpoint before step {step} is left, and the run went on from another's"
        why += f" (chain {chain[:12]})"
        raise UserError("--step", step, why, "replay a step after one of its checkpoints")
