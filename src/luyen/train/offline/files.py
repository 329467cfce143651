"""What an offline run leaves behind: metrics, digests and checkpoints."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, final

from luyen.base.claims import demand_claim, release
from luyen.base.digests import DigestFile, StepDigest
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.background import CheckpointWriter
from luyen.checkpoint.finite import not_finite
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.telemetry.sinks import MetricLog
from luyen.train import metric_names
from luyen.train.offline.stage import OfflineStage
from luyen.train.saving import demand_finite, facts_of

METRICS = metric_names
"""Importing it declares every number a run writes."""


@final
class OfflineFiles:
    """Writes into one run directory."""

    def __init__(
        self,
        directory: RunDirectory,
        log: MetricLog,
        store: CheckpointStore,
        digests: DigestFile,
        *,
        known: Mapping[str, float] | None = None,
        is_async: bool = False,
    ) -> None:
        """`known` is what was measured before; `is_async` writes checkpoints beside training."""
        self.directory = directory
        self.log = log
        self.store = store
        self.digests = digests
        self.known = dict(known or {})
        """The last value of each metric."""
        self._writer = CheckpointWriter(store, is_async=is_async)

    def step(self, digest: StepDigest, metrics: Mapping[str, float]) -> None:
        """One line of hashes and one of numbers; raises what stopped a checkpoint."""
        demand_claim(self.directory.root)
        self._writer.finished()
        self.digests.write(digest)
        self.log.write(digest.step, metrics)
        self.known |= metrics

    def save(self, state: Mapping[str, Any], loop: Mapping[str, Any]) -> None:
        """A checkpoint of a stage and of where the loop stands."""
        step = int(loop["step"])
        demand_finite(not_finite(dict(state)), step=step, newest=self.store.latest())
        self.digests.sync()
        facts = facts_of(self.directory, self.known, chain=loop["chain"])
        self._writer.save(step, {**state, "loop": dict(loop)}, facts=facts)

    def close(self) -> None:
        """Finish every file, the checkpoint in progress first; raises what stopped it."""
        with ExitStack() as ending:
            ending.callback(release, self.directory.root)
            ending.callback(self.log.close)
            ending.callback(self.digests.close)
            self.settle()

    def settle(self) -> None:
        """Return when no checkpoint is in progress; raises what stopped one."""
        self._writer.wait()


def load_parts(folder: Path, stage: OfflineStage) -> dict[str, Any]:
    """What a checkpoint kept of a stage, by part."""
    return {name: load_state(folder, name) for name in stage.state()}
