"""What a supervised run leaves behind: metrics and checkpoints."""

from collections.abc import Mapping
from pathlib import Path
from typing import final

from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state, save_state
from luyen.engine.supervised import SupervisedEngine
from luyen.models.state import restore_parameters, trained_parameters
from luyen.telemetry.sinks import MetricLog


@final
class SupervisedFiles:
    """Writes into one run directory."""

    def __init__(self, directory: RunDirectory, log: MetricLog, store: CheckpointStore) -> None:
        self.directory = directory
        self.log = log
        self.store = store

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        """One line of numbers."""
        self.log.write(step, metrics)

    def save(self, step: int, engine: SupervisedEngine) -> Path:
        """Weights, optimizer state and the number of steps that are done."""

        def write(folder: Path) -> None:
            save_state(folder, "actor", trained_parameters(engine.policy))
            save_state(folder, "actor_optimizer", engine.optimizer.state_dict())
            save_state(folder, "loop", {"step": step})

        return self.store.save(step, write)

    def close(self) -> None:
        """Finish every file."""
        self.log.close()


def restore_supervised(folder: Path, engine: SupervisedEngine) -> int:
    """Go on from a checkpoint; the number of steps that are done."""
    restore_parameters(engine.policy, load_state(folder, "actor"))
    engine.optimizer.load_state_dict(load_state(folder, "actor_optimizer"))
    return int(load_state(folder, "loop")["step"])
