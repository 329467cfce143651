"""The offline loop: schedule of batches, optimizer steps, validation, record, checkpoints."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from luyen.base.digests import hash_value
from luyen.checkpoint.tensors import load_state
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.engine.batch import OfflineBatch
from luyen.engine.optim import learning_rate
from luyen.engine.step import UpdateResult
from luyen.engine.supervised import ACCURACY
from luyen.models.weights import tensor_digests
from luyen.runtime.roles import WeightDigests
from luyen.telemetry.display import Display
from luyen.telemetry.spans import SPANS, span
from luyen.train import metric_names
from luyen.train.interrupt import Interruption
from luyen.train.monitor import PhaseWatchdog, StepProfiler
from luyen.train.offline.stage import OfflineStage
from luyen.train.record import Recorder, RunHistory, run_callbacks, update_without_lr
from luyen.train.state import read_unvalidated_step, unvalidated_step

# Digests of an offline step, under the stage names of online steps.


def offline_stages(
    uids: Sequence[str],
    offline_batch: OfflineBatch,
    update: Mapping[str, float],
    weights: WeightDigests,
    state: Mapping[str, Mapping[str, Any]],
) -> dict[str, str]:
    """Digests of an offline step, without its metrics.

    `prompts` are the rows of the batch, `rollouts` their tokens; offline steps have no rewards and
    no advantages. `state` is what the stage keeps besides weights and optimizer.
    """
    # Times differ, and runs of before accuracy was measured keep their digests.
    is_hashed = {name: name != ACCURACY and not name.startswith("time/") for name in update}
    hashed = {name: value for name, value in update.items() if is_hashed[name]}
    return {
        "prompts": hash_value(list(uids)),
        "rollouts": hash_value(tensor_digests(offline_batch.tensors())),
        "gradients": hash_value([update_without_lr(hashed), dict(weights.moments())]),
        "weights": hash_value([dict(weights.weights()), state]),
    }


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
        uids = (self.data.train.prompts[i].uid for i in offline_batch.rows)
        found = update_metrics(self.stage.update(offline_batch, step=step, lr=lr))
        return {**found, **self.data.shares(uids)}

    def stages(self, offline_batch: OfflineBatch, update: Mapping[str, float]) -> dict[str, str]:
        """Digests of the latest step."""
        uids = [self.data.train.prompts[i].uid for i in offline_batch.rows]
        weights, state = self.stage.roles.weight_digests(), self.stage.state()
        return offline_stages(uids, offline_batch, update, weights, state)

    def restore(self, folder: Path) -> None:
        """Restore the stage from a checkpoint."""
        self.stage.roles.load(folder)
        self.stage.restore({name: load_state(folder, name) for name in self.stage.state()})


def update_metrics(done: UpdateResult) -> dict[str, float]:
    """Metrics of an optimizer step, with gradient norm and learning rate."""
    stepped = done.stepped
    return {**done.metrics, "actor/grad_norm": stepped.grad_norm, "actor/lr": stepped.lr}


DECLARED_METRICS = metric_names
"""Importing it declares every metric that a run writes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineProgress:
    """What the finished steps have changed besides the stage; the loop replaces it once per step.

    Example:
        >>> OfflineProgress(step=2, metrics={"sft/nll": 0.5}).step
        2
    """

    step: int = 0
    """Finished steps; the one in progress is the next."""
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    """Metrics of the last step, without its validation."""
    stages: Mapping[str, str] = field(default_factory=dict[str, str])
    """Digests of the last step, without its metrics."""


@final
class OfflineRun:
    """Components of a run of one offline stage, and the progress of its finished steps."""

    def __init__(self, schedule: OfflineSchedule, recorder: Recorder, display: Display) -> None:
        config, directory = schedule.config, recorder.directory
        self.schedule = schedule
        self.config = config
        self.stage = schedule.stage
        self.roles = schedule.stage.roles
        self.recorder = recorder
        self.display = display
        self.total_steps = schedule.total_steps
        self.first: Mapping[str, float] = {}
        """First value of each goal metric."""
        self.last: Mapping[str, float] = {}
        """Latest value of each goal metric."""
        self.interruption = Interruption()
        self.watchdog = PhaseWatchdog(config.trainer.watchdog, directory.events)
        self.profiler = StepProfiler(config.trainer.profile, directory, workers=self.roles.traces)
        self.callbacks = run_callbacks(directory, config.trainer)
        """What is told of steps, validations and checkpoints."""
        self._progress = OfflineProgress()
        self._trial_steps: int | None = None

    @property
    def step(self) -> int:
        """Finished steps; the one in progress is the next."""
        return self._progress.step

    @property
    def is_recorded(self) -> bool:
        """Whether the finished step has its line, which is written after its validation."""
        return not self._progress.metrics or self.step <= self.recorder.history.step

    def _unrecorded(self) -> tuple[Mapping[str, float], Mapping[str, str]]:
        """Metrics and digests of the finished step until its line is written."""
        progress = self._progress
        return ({}, {}) if self.is_recorded else (progress.metrics, progress.stages)

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return min(self.total_steps, self._trial_steps or self.total_steps)

    @property
    def is_over(self) -> bool:
        """Whether no further step is made: a signal has come, or a callback asks for the end."""
        return self.interruption.is_wanted or self.callbacks.reason is not None

    def limit(self, trial_steps: int | None) -> None:
        """Make it a trial run, which ends after this step without a checkpoint; None: it is not."""
        self._trial_steps = trial_steps

    def batches(self) -> Iterator[OfflineBatch]:
        """Batches of the remaining steps; ends early on an interruption."""
        while self.step < self.last_step and not self.is_over:
            with self.profiler.step(self.step + 1):
                yield self.schedule.offline_batch(self.step + 1)

    def advance(self, progress: OfflineProgress) -> None:
        """Take the progress after a step: the one change of the run that a step makes."""
        assert progress.step == self.step + 1, "steps are finished one by one"
        self._progress = progress

    def is_due(self, every: int) -> bool:
        """Whether something with period `every`, which also happens at the end, is due now."""
        return self.step >= self.total_steps or (every > 0 and self.step % every == 0)

    def measure(self) -> dict[str, float]:
        """Validation metrics of the current weights."""
        with self.interruption.at_once():
            self.display.phase("validate")
            with self.watchdog.watching(self.step, "validate"), span("validate", step=self.step):
                return self.stage.measure()

    def record_step(self, *, validation: Mapping[str, float]) -> None:
        """Write and display metrics and digest of the finished step, its validation included."""
        metrics, stages = self._unrecorded()
        found = {**metrics, **validation, **SPANS.drain(self.step), **self.roles.metrics()}
        self.recorder.poll()
        self.recorder.record_step(self.step, found, stages)
        self.callbacks.recorded(self.step, self.total_steps, found, validation)
        goals = {g.metric: found[g.metric] for g in self.stage.goals if g.metric in found}
        new = {name: value for name, value in goals.items() if name not in self.first}
        self.first, self.last = {**self.first, **new}, {**self.last, **goals}

    def save(self) -> None:
        """Save a checkpoint of the finished step, unless it has one."""
        history = self.recorder.history
        if self._trial_steps is None and history.saved != self.step:
            loop = {
                "stage": self.config.trainer.stage,
                "step": self.step,
                "chain": history.chain,
                "first": dict(self.first),
                "lacks_validation": None
                if self.is_recorded
                else unvalidated_step(*self._unrecorded()),
            }
            self.recorder.save_stage(self.roles, {**self.stage.state(), "loop": loop})
            path = self.recorder.directory.checkpoint(self.step)
            self.callbacks.saved(self.step, self.total_steps, path)

    def save_progress(self) -> None:
        """Save the last finished step after an interruption, unless it has a checkpoint."""
        self.save()

    def restore_progress(self, loop: Mapping[str, Any]) -> None:
        """Restore loop progress from a checkpoint; the stage is restored separately."""
        step, unvalidated = int(loop["step"]), loop.get("lacks_validation")
        metrics, stages = read_unvalidated_step(unvalidated)
        self._progress = OfflineProgress(step=step, metrics=metrics, stages=stages)
        written = step - (unvalidated is not None)
        self.recorder.resume(RunHistory(chain=str(loop["chain"]), step=written, saved=step))
        self.first = dict(loop["first"])


def train_offline(run: OfflineRun) -> None:
    """Batch, update, digest, validate, record, save, until all steps are done or interrupted."""
    trainer = run.config.trainer
    if not run.is_recorded:
        run.recorder.require_save()
        _validate_record_save(run)
    elif run.step == 0 and trainer.val_before_train and (found := run.measure()):
        run.record_step(validation=found)
    for offline_batch in run.batches():
        metrics = _update(run, offline_batch)
        with span("digest", step=run.step + 1):
            stages = run.schedule.stages(offline_batch, metrics)
        run.advance(OfflineProgress(step=run.step + 1, metrics=metrics, stages=stages))
        _validate_record_save(run)
    run.save()


def _validate_record_save(run: OfflineRun) -> None:
    """Complete a finished step: validate if due, write its metrics, save if due."""
    trainer = run.config.trainer
    validation = run.measure() if run.is_due(trainer.test_freq) else {}
    run.record_step(validation=validation)
    if run.is_due(trainer.save_freq):
        run.save()


def _update(run: OfflineRun, offline_batch: OfflineBatch) -> dict[str, float]:
    step = run.step + 1
    run.display.phase("update")
    watched = run.watchdog.watching(step, "update")
    begun = time.perf_counter()
    with watched, span("update", step=step), run.profiler.part("update actor"):
        metrics = run.schedule.update(step, offline_batch)
    tokens, seconds = sum(offline_batch.batch.lengths), time.perf_counter() - begun
    return {**metrics, "time/tokens_per_s": tokens / seconds}
