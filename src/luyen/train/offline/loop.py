"""The offline loop: schedule of batches, optimizer steps, validation, record, checkpoints."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from luyen.base.digests import BEGINNING, DigestFile, StepDigest, hash_value, link
from luyen.base.run_lock import demand_claim, release
from luyen.base.rundir import RunDirectory
from luyen.checkpoint.store import CheckpointStore
from luyen.checkpoint.tensors import load_state, not_finite
from luyen.checkpoint.writer import CheckpointWriter
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.engine.batch import OfflineBatch
from luyen.engine.optim import learning_rate
from luyen.engine.step import UpdateResult
from luyen.models.weight_digests import tensor_digests
from luyen.runtime.roles import split_learned_state
from luyen.telemetry.display import Display
from luyen.telemetry.sinks import MetricLog
from luyen.telemetry.spans import SPANS, span
from luyen.train import metric_names
from luyen.train.interrupt import Interruption
from luyen.train.monitor import PhaseWatchdog, StepProfiler
from luyen.train.offline.stage import OfflineStage
from luyen.train.record import checkpoint_facts, metrics_stage, require_finite, update_without_lr
from luyen.train.state import read_unvalidated_step, unvalidated_step

# Digests of an offline step, under the stage names of online steps.

_SMALL = (bool, int, float, str, type(None), list)


def offline_stages(
    uids: Sequence[str],
    offline_batch: OfflineBatch,
    update: Mapping[str, float],
    state: Mapping[str, Any],
) -> dict[str, str]:
    """Digests of an offline step, without its metrics.

    `prompts` are the rows of the batch, `rollouts` their tokens; offline steps have no rewards and
    no advantages.
    """
    roles = {name: part for name, part in state.items() if not is_small(part)}
    moments, weights = split_learned_state(roles)
    small = {name: part for name, part in state.items() if is_small(part)}
    digests = tensor_digests({**moments, **weights})
    return {
        "prompts": hash_value(list(uids)),
        "rollouts": hash_value(tensor_digests(offline_batch.tensors())),
        "gradients": hash_value(
            [update_without_lr(update), {name: digests[name] for name in moments}]
        ),
        "weights": hash_value([{name: digests[name] for name in weights}, small]),
    }


def is_small(part: Any) -> bool:
    """Whether a part of a stage's state is a dict of plain values without tensors."""
    return isinstance(part, dict) and all(isinstance(x, _SMALL) for x in part.values())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSchedule:
    """Batch and learning rate of each step, as pure functions of the step number.

    Example:
        >>> sorted(OfflineSchedule.__slots__)
        ['config', 'data', 'stage', 'total_steps']
    """

    config: RunConfig
    """The whole configuration."""
    data: TrainData
    """The rows as prompts, and the sampler that orders them."""
    stage: OfflineStage
    """The stage that is trained."""
    total_steps: int
    """Steps of the whole run, for learning-rate schedules."""

    def offline_batch(self, step: int) -> OfflineBatch:
        """The batch of a step."""
        size = self.config.data.train_batch_size
        return self.stage.offline_batch(list(self.data.sampler.take((step - 1) * size, size)))

    def update(self, step: int, offline_batch: OfflineBatch) -> dict[str, float]:
        """Run the optimizer step; its metrics, with gradient norm and learning rate."""
        optim = self.config.actor_rollout_ref.actor.optim
        lr = learning_rate(optim, step=step - 1, total_steps=self.total_steps)
        return update_metrics(self.stage.update(offline_batch, lr=lr))

    def stages(self, offline_batch: OfflineBatch, update: Mapping[str, float]) -> dict[str, str]:
        """Digests of the latest step."""
        uids = [self.data.train.prompts[i].uid for i in offline_batch.rows]
        return offline_stages(uids, offline_batch, update, self.stage.state())


def update_metrics(done: UpdateResult) -> dict[str, float]:
    """Metrics of an optimizer step, with gradient norm and learning rate."""
    stepped = done.stepped
    return {**done.metrics, "actor/grad_norm": stepped.grad_norm, "actor/lr": stepped.lr}


DECLARED_METRICS = metric_names
"""Importing it declares every metric that a run writes."""


@final
class OfflineRecorder:
    """Writes metrics, digests and checkpoints of an offline run into its directory."""

    def __init__(
        self,
        directory: RunDirectory,
        log: MetricLog,
        store: CheckpointStore,
        digests: DigestFile,
        *,
        last_metrics: Mapping[str, float] | None = None,
        is_async: bool = False,
    ) -> None:
        """`last_metrics`: those before a resume; `is_async`: write checkpoints in background."""
        self.directory = directory
        self.log = log
        self.store = store
        self.digests = digests
        self.last_metrics = dict(last_metrics or {})
        """The last value of each metric."""
        self._writer = CheckpointWriter(store, is_async=is_async)

    def step(self, digest: StepDigest, metrics: Mapping[str, float]) -> None:
        """Write digest and metrics of a step; raises errors of the checkpoint writer."""
        demand_claim(self.directory.root)
        self._writer.finished()
        self.digests.write(digest)
        self.log.write(digest.step, metrics)
        self.last_metrics |= metrics

    def save(self, state: Mapping[str, Any], loop: Mapping[str, Any]) -> None:
        """Save a checkpoint of the stage and the loop state."""
        step = int(loop["step"])
        require_finite(not_finite(dict(state)), step=step, newest=self.store.latest())
        self.digests.sync()
        facts = checkpoint_facts(self.directory, self.last_metrics, chain=loop["chain"])
        self._writer.save(step, {**state, "loop": dict(loop)}, facts=facts)

    def close(self) -> None:
        """Flush and close all files; raises errors of the writer."""
        with ExitStack() as ending:
            ending.callback(release, self.directory.root)
            ending.callback(self.log.close)
            ending.callback(self.digests.close)
            self.flush()

    def flush(self) -> None:
        """Wait for the checkpoint in progress; raises errors of the writer."""
        self._writer.wait()


def load_parts(folder: Path, stage: OfflineStage) -> dict[str, Any]:
    """Load the parts of a stage's state from a checkpoint."""
    return {name: load_state(folder, name) for name in stage.state()}


@final
class OfflineRun:
    """Components and progress of a run of one offline stage."""

    def __init__(
        self,
        schedule: OfflineSchedule,
        files: OfflineRecorder,
        display: Display,
    ) -> None:
        config, stage = schedule.config, schedule.stage
        self.schedule = schedule
        self.config = config
        self.stage = stage
        self.files = files
        self.display = display
        self.total_steps = schedule.total_steps
        self.step = 0
        self.chain = BEGINNING
        """Digest chain of all finished steps."""
        self.first: dict[str, float] = {}
        """First value of each goal metric."""
        self.last: dict[str, float] = {}
        """Latest value of each goal metric."""
        self.interruption = Interruption()
        self.watchdog = PhaseWatchdog(config.trainer.watchdog, files.directory.events)
        self.profiler = StepProfiler(config.trainer.profile, files.directory)
        self.trial_steps: int | None = None
        """Last step of a trial run, which saves no checkpoint; None: a whole run."""
        self.saved = 0
        """Step of the newest checkpoint; step 0 needs none."""
        self.unrecorded: tuple[dict[str, float], dict[str, str]] | None = None
        """Metrics and digests of the finished step until they are written; None: written."""

    def batches(self) -> Iterator[OfflineBatch]:
        """Batches of the remaining steps; ends early on an interruption."""
        while self.step < self.last_step and not self.interruption.is_wanted:
            with self.profiler.step(self.step + 1):
                yield self.schedule.offline_batch(self.step + 1)

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return min(self.total_steps, self.trial_steps or self.total_steps)

    def is_due(self, every: int) -> bool:
        """Whether something with period `every`, which also happens at the end, is due now."""
        return self.step >= self.total_steps or (every > 0 and self.step % every == 0)

    def measure(self) -> dict[str, float]:
        """Validation metrics of the current weights."""
        with self.interruption.at_once():
            self.display.phase("validate")
            with self.watchdog.watching(self.step, "validate"), span("validate", step=self.step):
                return self.stage.measure()

    def record_step(self, stages: Mapping[str, str], metrics: Mapping[str, float]) -> None:
        """Write and display metrics and digest of the finished step, validation included."""
        found = {**metrics, **SPANS.drain(self.step)}
        named = {**stages, "metrics": metrics_stage(found)}
        digest = link(self.chain, step=self.step, stages=named)
        self.files.step(digest, found)
        self.chain = digest.chain
        for goal in self.stage.goals:
            if goal.metric in found:
                self.first.setdefault(goal.metric, found[goal.metric])
                self.last[goal.metric] = found[goal.metric]

    def save(self) -> None:
        """Save a checkpoint of the finished step, unless it has one."""
        if self.trial_steps is None and self.saved != self.step:
            loop = {
                "stage": self.config.trainer.stage,
                "step": self.step,
                "chain": self.chain,
                "first": self.first,
                "lacks_validation": None
                if self.unrecorded is None
                else unvalidated_step(*self.unrecorded),
            }
            self.files.save(self.stage.state(), loop)
            self.saved = self.step

    def restore_progress(self, loop: Mapping[str, Any]) -> None:
        """Restore loop progress from a checkpoint; the stage is restored separately."""
        self.step = self.saved = int(loop["step"])
        self.chain = str(loop["chain"])
        self.first = dict(loop["first"])
        if loop.get("lacks_validation") is not None:
            self.unrecorded = read_unvalidated_step(loop["lacks_validation"])


def train_offline(run: OfflineRun) -> None:
    """Batch, update, digest, validate, record, save, until all steps are done or interrupted."""
    trainer = run.config.trainer
    if run.unrecorded is not None:
        run.saved = -1  # its checkpoint lacks the validation, so the step is saved again
        _validate_record_save(run, *run.unrecorded)
    elif run.step == 0 and trainer.val_before_train and (found := run.measure()):
        run.record_step({}, found)
    for offline_batch in run.batches():
        metrics = _update(run, offline_batch)
        run.step += 1
        with span("digest", step=run.step):
            stages = run.schedule.stages(offline_batch, metrics)
        _validate_record_save(run, metrics, dict(stages))
    run.save()


def _validate_record_save(
    run: OfflineRun, metrics: dict[str, float], stages: dict[str, str]
) -> None:
    """Complete a finished step: validate if due, write its metrics, save if due."""
    run.unrecorded = metrics, stages
    measured = run.measure() if run.is_due(run.config.trainer.test_freq) else {}
    run.record_step(stages, {**metrics, **measured})
    run.unrecorded = None
    if run.is_due(run.config.trainer.save_freq):
        run.save()


def _update(run: OfflineRun, offline_batch: OfflineBatch) -> dict[str, float]:
    step = run.step + 1
    run.display.phase("update")
    watched = run.watchdog.watching(step, "update")
    with watched, span("update", step=step), run.profiler.part("update actor"):
        return run.schedule.update(step, offline_batch)
