"""What a run leaves behind: metrics, digests, rollouts, checkpoints."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeAlias, final

from luyen.base.digests import DigestFile, StepDigest
from luyen.base.records import Rollout
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state, save_state
from luyen.engine.batch import PackedBatch
from luyen.runtime.local import LocalRoles
from luyen.telemetry.rollout_files import Advantages, RecordedRollout, write_rollouts
from luyen.telemetry.sinks import MetricLog
from luyen.train import metric_names
from luyen.train.state import LoopState

METRICS = metric_names
"""Importing it declares every number a run writes."""
Address: TypeAlias = tuple[int, int, str, int]
"""`Rollout.key`."""


@final
class Recorder:
    """Writes into one run directory."""

    def __init__(
        self, directory: RunDirectory, log: MetricLog, store: CheckpointStore, digests: DigestFile
    ) -> None:
        self.directory = directory
        self.log = log
        self.store = store
        self.digests = digests

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of numbers."""
        self.log.write(step, metrics)

    def digest(self, digest: StepDigest) -> None:
        """One line of hashes."""
        self.digests.write(digest)

    def rollouts(
        self, step: int, judged: Sequence[Rollout], used: Mapping[Address, Sequence[Advantages]]
    ) -> None:
        """Every rollout of a step, those that were left out included."""
        records = [_recorded(rollout, used.get(rollout.key)) for rollout in judged]
        write_rollouts(self.directory.rollouts(step), records)

    def validation(self, step: int, judged: Sequence[Rollout]) -> None:
        """The rollouts of a validation."""
        path = self.directory.rollouts(step, validation=True)
        write_rollouts(path, [RecordedRollout(rollout=rollout) for rollout in judged])

    def save(self, state: LoopState, roles: LocalRoles) -> Path:
        """A checkpoint of everything a resumed run needs."""

        def write(folder: Path) -> None:
            for name, part in roles.state_dict().items():
                save_state(folder, name, part)
            save_state(folder, "loop", state.as_json())

        self.digests.sync()
        return self.store.save(state.step, write)

    def close(self) -> None:
        """Finish every file."""
        self.log.close()
        self.digests.close()


def restore(folder: Path, roles: LocalRoles) -> LoopState:
    """Weights and optimizer state into the roles; the loop's own state as a record."""
    parts = {name: load_state(folder, name) for name in roles.state_dict()}
    roles.load_state_dict(parts)
    return LoopState.from_json(load_state(folder, "loop"))


def advantages_by_rollout(
    rollouts: Sequence[Rollout], batch: PackedBatch
) -> dict[Address, list[Advantages]]:
    """Advantage of each trainable token by rollout and branch, for the record."""
    stream, mask = batch.streams["advantages"].tolist(), batch.layout.mask.tolist()
    found: dict[Address, list[Advantages]] = {}
    start = 0
    for rollout in rollouts:
        for branch in rollout.branches:
            span = range(start, start + len(branch.tokens))
            row = tuple(stream[i] if mask[i] else None for i in span)
            found.setdefault(rollout.key, []).append(row)
            start = span.stop
    assert start == len(stream), "the batch holds other rollouts than these"
    return found


def _recorded(rollout: Rollout, used: Sequence[Advantages] | None) -> RecordedRollout:
    if used is None:
        return RecordedRollout(rollout=rollout)
    return RecordedRollout(rollout=rollout, advantages=used[-1], earlier=tuple(used[:-1]))
