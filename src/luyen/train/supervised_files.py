"""What a supervised run leaves behind: metrics and checkpoints."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import final

from luyen.base.claims import release
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.background import CheckpointWriter
from luyen.checkpoint.finite import not_finite
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state
from luyen.engine.supervised import SupervisedEngine
from luyen.models.state import restore_parameters, trained_parameters
from luyen.telemetry.sinks import MetricLog
from luyen.train.saving import demand_finite, facts_of


@final
class SupervisedFiles:
    """Writes into one run directory."""

    def __init__(
        self,
        directory: RunDirectory,
        log: MetricLog,
        store: CheckpointStore,
        *,
        known: Mapping[str, float] | None = None,
        is_async: bool = False,
    ) -> None:
        """`known` is what was measured before; `is_async` writes checkpoints beside training."""
        self.directory = directory
        self.log = log
        self.store = store
        self.known = dict(known or {})
        """The last value of each metric."""
        self._writer = CheckpointWriter(store, is_async=is_async)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of numbers; raises what stopped a checkpoint from being made."""
        self._writer.finished()
        self.log.write(step, metrics)
        self.known |= metrics

    def save(self, step: int, engine: SupervisedEngine) -> None:
        """Weights, optimizer state and the number of steps that are done."""
        parts = {
            "actor": trained_parameters(engine.policy),
            "actor_optimizer": engine.optimizer.state_dict(),
        }
        demand_finite(not_finite(parts), step=step, newest=self.store.latest())
        facts = facts_of(self.directory, self.known, chain=None)
        self._writer.save(step, {**parts, "loop": {"step": step}}, facts=facts)

    def close(self) -> None:
        """Finish every file, the checkpoint in progress first; raises what stopped it."""
        with ExitStack() as ending:
            ending.callback(release, self.directory.manifest)
            ending.callback(self.log.close)
            self.settle()

    def settle(self) -> None:
        """Return when no checkpoint is in progress; raises what stopped one."""
        self._writer.wait()


def restore_supervised(folder: Path, engine: SupervisedEngine) -> int:
    """Go on from a checkpoint; the number of steps that are done."""
    restore_parameters(engine.policy, load_state(folder, "actor"))
    engine.optimizer.load_state_dict(load_state(folder, "actor_optimizer"))
    return int(load_state(folder, "loop")["step"])
