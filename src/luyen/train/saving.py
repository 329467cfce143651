"""What a run saves and keeps: how its configuration has it, and never weights that are broken."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from luyen.base.errors import UserError
from luyen.base.paths import expanded
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.retention import METRICS, Best
from luyen.checkpoint.store import Checkpoint, CheckpointStore
from luyen.config.plan import Placement
from luyen.config.schema.trainer import Trainer
from luyen.telemetry.manifest import versions
from luyen.telemetry.metrics_file import CLOCK
from luyen.train.lineage import CheckpointNotes


def open_store(folder: Path, trainer: Trainer) -> CheckpointStore:
    """The checkpoints of a run, with those staying that the configuration wants to keep.

    Each is noted as an artifact of the run, also one that a killed process had no time to note.
    """
    best = Best(count=trainer.keep_best, metric=trainer.best_metric, mode=trainer.best_mode)
    run = RunDirectory(folder.parent)
    if not run.exists:
        return CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, best=best)
    notes = CheckpointNotes(run, expanded(trainer.default_local_dir))
    store = CheckpointStore(folder, keep=trainer.max_ckpt_to_keep, best=best, watcher=notes)
    notes.present([store.path(step) for step in store.list()])
    return store


def saves_aside(trainer: Trainer, where: Placement) -> bool:
    """Whether checkpoints are written while training goes on."""
    if trainer.async_save is None:
        return where.device == "cuda"
    return trainer.async_save


def facts_of(
    directory: RunDirectory, known: Mapping[str, float], *, chain: str | None
) -> dict[str, Any]:
    """What is noted beside a checkpoint: the run, how far it was, and what it measured last.

    Times are left out, so that equal runs note equal facts.
    """
    metrics = {name: value for name, value in known.items() if not name.startswith(CLOCK)}
    noted = {"run_id": directory.run_id, "chain": chain, "versions": versions()}
    return {**noted, METRICS: metrics}


def known_at(checkpoint: Checkpoint | None) -> dict[str, float]:
    """The last known value of each metric when a checkpoint was made; nothing without one."""
    noted = checkpoint.facts.get(METRICS, {}) if checkpoint is not None else {}
    return {name: float(value) for name, value in noted.items()}


def demand_finite(broken: Sequence[str], *, step: int, newest: int | None) -> None:
    """A UserError when a weight, a master or a moment is NaN or infinite: it is never saved.

    `broken` are the names of such tensors.
    """
    if not broken:
        return
    more = f", and {len(broken) - 1} more tensors" if len(broken) > 1 else ""
    last = f"the last good checkpoint is step {newest}" if newest is not None else "there is none"
    raise UserError(
        "weights",
        broken[0],
        f"it holds NaN or infinity after step {step}{more}, so this step is not saved; {last}",
        "lower the learning rate (actor_rollout_ref.actor.optim.lr) or clip_grad, and run again "
        "with trainer.resume_mode=auto to go on from there",
    )


def demand_stage(loop: Mapping[str, Any], stage: str, path: Path) -> None:
    """A UserError unless a checkpoint's loop is of the stage that is to go on from it."""
    made = loop.get("stage", "rl")
    if made != stage:
        why = f"{path} was made by the stage `{made}`, whose loop and optimizer are others"
        fix = "set another trainer.experiment_name, and begin with its exported model"
        raise UserError("trainer.stage", stage, why, fix)
