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
from luyen.models.trained_weights import tensor_digests
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

# What an offline step did, as one hash per stage, under the names that online steps have.

_SMALL = (bool, int, float, str, type(None), list)


def offline_stages(
    uids: Sequence[str],
    offline_batch: OfflineBatch,
    update: Mapping[str, float],
    state: Mapping[str, Any],
) -> dict[str, str]:
    """Every stage of an offline step but its metrics.

    `prompts` are the rows that were drawn, `rollouts` what they are as tokens; there is nothing to
    sample, to reward or to give credit for.
    """
    roles = {name: part for name, part in state.items() if not is_small(part)}
    moments, weights = split_learned_state(roles)
    small = {name: part for name, part in state.items() if is_small(part)}
    held = tensor_digests({**moments, **weights})
    return {
        "prompts": hash_value(list(uids)),
        "rollouts": hash_value(tensor_digests(offline_batch.tensors())),
        "gradients": hash_value(
            [update_without_lr(update), {name: held[name] for name in moments}]
        ),
        "weights": hash_value([{name: held[name] for name in weights}, small]),
    }


def is_small(part: Any) -> bool:
    """Whether a part of a stage's state is a few plain numbers, and no tensors."""
    return isinstance(part, dict) and all(isinstance(x, _SMALL) for x in part.values())


# What each step of an offline run learns from and how fast: a pure function of its number.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class OfflineSchedule:
    """A stage with its rows and its schedule; a run follows it, and a replay follows it again.

    Example:
        >>> sorted(OfflineSchedule.__slots__)
        ['config', 'data', 'stage', 'total_steps']
    """

    config: RunConfig
    """The whole configuration."""
    data: TrainData
    """The rows as prompts, and the order in which they are drawn."""
    stage: OfflineStage
    """What learns."""
    total_steps: int
    """Steps of the whole run, which schedules depend on."""

    def offline_batch(self, step: int) -> OfflineBatch:
        """What a step learns from."""
        size = self.config.data.train_batch_size
        return self.stage.offline_batch(list(self.data.sampler.take((step - 1) * size, size)))

    def update(self, step: int, offline_batch: OfflineBatch) -> dict[str, float]:
        """Take a step; what it measured, with its norm and its learning rate."""
        optim = self.config.actor_rollout_ref.actor.optim
        lr = learning_rate(optim, step=step - 1, total_steps=self.total_steps)
        return update_metrics(self.stage.update(offline_batch, lr=lr))

    def stages(self, offline_batch: OfflineBatch, update: Mapping[str, float]) -> dict[str, str]:
        """Digests of the step that was taken last."""
        uids = [self.data.train.prompts[i].uid for i in offline_batch.rows]
        return offline_stages(uids, offline_batch, update, self.stage.state())


def update_metrics(done: UpdateResult) -> dict[str, float]:
    """What an optimizer step measured, with its norm and its learning rate."""
    stepped = done.stepped
    return {**done.metrics, "actor/grad_norm": stepped.grad_norm, "actor/lr": stepped.lr}


# What an offline run leaves behind: metrics, digests and checkpoints.

DECLARED_METRICS = metric_names
"""Importing it declares every number a run writes."""


@final
class OfflineRecorder:
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
        require_finite(not_finite(dict(state)), step=step, newest=self.store.latest())
        self.digests.sync()
        facts = checkpoint_facts(self.directory, self.known, chain=loop["chain"])
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


@final
class OfflineRun:
    """Parts and progress of a run of one offline stage."""

    def __init__(
        self,
        course: OfflineSchedule,
        files: OfflineRecorder,
        display: Display,
    ) -> None:
        config, stage = course.config, course.stage
        self.course = course
        self.config = config
        self.stage = stage
        self.files = files
        self.display = display
        self.total_steps = course.total_steps
        self.step = 0
        self.chain = BEGINNING
        """Digest of everything that was done so far."""
        self.first: dict[str, float] = {}
        """The first value of each number that the stage is judged by."""
        self.last: dict[str, float] = {}
        """The newest value of each."""
        self.interruption = Interruption()
        self.watchdog = PhaseWatchdog(config.trainer.watchdog, files.directory.events)
        self.profiler = StepProfiler(config.trainer.profile, files.directory)
        self.trial_steps: int | None = None
        """Where a run ends that is only measured and keeps no checkpoint; None: a whole run."""
        self.saved = 0
        """Step of the newest checkpoint; the beginning needs none."""
        self.open: tuple[dict[str, float], dict[str, str]] | None = None
        """Numbers and hashes of the step that is done, until its line is written."""

    def lessons(self) -> Iterator[OfflineBatch]:
        """The lesson of each step that is left; rows are a pure function of the step."""
        while self.step < self.last_step and not self.interruption.is_wanted:
            with self.profiler.step(self.step + 1):
                yield self.course.offline_batch(self.step + 1)

    @property
    def last_step(self) -> int:
        """Where it ends."""
        return min(self.total_steps, self.trial_steps or self.total_steps)

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now."""
        return self.step >= self.total_steps or (every > 0 and self.step % every == 0)

    def measure(self) -> dict[str, float]:
        """What the held-out rows say now."""
        with self.interruption.at_once():
            self.display.phase("validate")
            with self.watchdog.watching(self.step, "validate"), span("validate", step=self.step):
                return self.stage.measure()

    def write_down(self, stages: Mapping[str, str], metrics: Mapping[str, float]) -> None:
        """Write and show the numbers of the step that is done, validation included."""
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
        """A checkpoint of the step that is done, unless it has one."""
        if self.trial_steps is None and self.saved != self.step:
            loop = {
                "stage": self.config.trainer.stage,
                "step": self.step,
                "chain": self.chain,
                "first": self.first,
                "lacks_validation": None if self.open is None else unvalidated_step(*self.open),
            }
            self.files.save(self.stage.state(), loop)
            self.saved = self.step

    def go_on_from(self, loop: Mapping[str, Any]) -> None:
        """Stand where a checkpoint stood; the stage was put there already."""
        self.step = self.saved = int(loop["step"])
        self.chain = str(loop["chain"])
        self.first = dict(loop["first"])
        if loop.get("lacks_validation") is not None:
            self.open = read_unvalidated_step(loop["lacks_validation"])


def train_offline(run: OfflineRun) -> None:
    """Draw, update, measure, until the steps are done or the user interrupts."""
    trainer = run.config.trainer
    if run.open is not None:
        run.saved = -1  # the checkpoint that it goes on from lacks what comes now
        _finish(run, *run.open)
    elif run.step == 0 and trainer.val_before_train and (found := run.measure()):
        run.write_down({}, found)
    for offline_batch in run.lessons():
        metrics = _learn(run, offline_batch)
        run.step += 1
        with span("digest", step=run.step):
            stages = run.course.stages(offline_batch, metrics)
        _finish(run, metrics, dict(stages))
    run.save()


def _finish(run: OfflineRun, metrics: dict[str, float], stages: dict[str, str]) -> None:
    """Measure, write down and save a step that is done, where each is due."""
    run.open = metrics, stages
    measured = run.measure() if run.is_due(run.config.trainer.test_freq) else {}
    run.write_down(stages, {**metrics, **measured})
    run.open = None
    if run.is_due(run.config.trainer.save_freq):
        run.save()


def _learn(run: OfflineRun, offline_batch: OfflineBatch) -> dict[str, float]:
    step = run.step + 1
    run.display.phase("update")
    watched = run.watchdog.watching(step, "update")
    with watched, span("update", step=step), run.profiler.part("update actor"):
        return run.course.update(step, offline_batch)
