"""`OnlineRun`: components and progress of online training; what its journals depend on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

from luyen.base.digests import BEGINNING, hash_value
from luyen.base.records import Prompt
from luyen.config.loader.parse import stored_values
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.samplers import AdaptiveSampler
from luyen.rewards.build import BuiltReward
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group, prompt_requests
from luyen.runtime.roles import Roles, WeightDigests
from luyen.telemetry.display import Display
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.progress import PROGRESS
from luyen.telemetry.spans import span
from luyen.train.interrupt import STOPPABLE, Interruption
from luyen.train.monitor import PhaseWatchdog, StepProfiler
from luyen.train.record import Recorder, RunHistory, run_callbacks
from luyen.train.rollouts import ParentDigest, RolloutSubmitter, build_scheduler
from luyen.train.state import (
    LearningRules,
    LoopState,
    RunProgress,
    StepSnapshot,
    salvage_rollouts,
    snapshot_rollouts,
    unvalidated_step,
)
from luyen.train.update import LearningContext

_RELEVANT_KEYS = {"seed", "plugins", "device"}
"""Keys of `trainer` that rollouts or rewards depend on; a journal is reused if they are equal."""


def weights_hash(digests: WeightDigests) -> str:
    """One hash over the weights of all trained roles."""
    return hash_value(dict(digests.weights()))


def generation_config_hash(config: RunConfig, facts: Manifest) -> str:
    """Hash of everything but weights that rollouts and rewards depend on: keys, rows, code.

    `multi_turn.on_unknown` is left out: it decides on resume what to do with a tool call whose
    outcome is unknown, so changing it must not invalidate the journal that recorded the call.
    """
    tree = stored_values(config)
    tree["trainer"] = {name: v for name, v in tree["trainer"].items() if name in _RELEVANT_KEYS}
    del tree["actor_rollout_ref"]["rollout"]["multi_turn"]["on_unknown"]
    return hash_value([tree, facts.files, facts.datasets, facts.code, facts.versions])


@final
class OnlineRun:
    """Components of one online run, and the progress of its finished steps.

    What a step computes travels between the calls of the loop; `advance` takes its result.
    """

    def __init__(
        self,
        *,
        config: RunConfig,
        data: TrainData,
        roles: Roles,
        reward: BuiltReward,
        rules: LearningRules,
        sampling: Sampling,
        recorder: Recorder,
        display: Display,
        total_steps: int,
    ) -> None:
        trainer, directory = config.trainer, recorder.directory
        self.config = config
        self.data = data
        self.roles = roles
        self.reward = reward
        self.rules = rules
        self.sampling = sampling
        self.recorder = recorder
        self.display = display
        self.total_steps = total_steps
        self.profiler = StepProfiler(trainer.profile, directory, workers=roles.traces)
        self.watchdog = PhaseWatchdog(trainer.watchdog, directory.events, rescue=self.rescue)
        self.interruption = Interruption()
        self.learning = self._learning_context()
        """What batches, advantages and updates are computed with."""
        self.submitter = self._rollout_submitter()
        """Submits rollouts of training rows."""
        self.scheduler = build_scheduler(trainer, self.submitter)
        """Schedules rollouts of this and later steps."""
        self.callbacks = run_callbacks(directory, trainer)
        """What is told of steps, validations and checkpoints."""
        self._progress = RunProgress.begin(rules)
        self._step_start = StepSnapshot()
        self._journal: WorkJournal | None = None
        self._trial_steps: int | None = None
        self._config_hash = ""

    def _learning_context(self) -> LearningContext:
        return LearningContext(
            config=self.config,
            roles=self.roles,
            rules=self.rules,
            profiler=self.profiler,
            phase=self.phase,
            total_steps=self.total_steps,
        )

    def _rollout_submitter(self) -> RolloutSubmitter:
        return RolloutSubmitter(
            self.config,
            self.data,
            self.roles,
            self.sampling,
            has_baselines=self.rules.needs.baselines,
            open_journal=self._open_journal,
            begin_journal=self._begin_journal,
        )

    @property
    def progress(self) -> RunProgress:
        """What the finished steps have changed."""
        return self._progress

    @property
    def step(self) -> int:
        """Finished steps; the one in progress is the next."""
        return self._progress.step

    @property
    def version(self) -> int:
        """Version of the policy's weights."""
        return self._progress.version

    @property
    def chain(self) -> str:
        """Digest chain of all written steps."""
        return self.recorder.history.chain

    @property
    def is_recorded(self) -> bool:
        """Whether the finished step has its line, which is written after its validation."""
        return not self._progress.metrics or self.step <= self.recorder.history.step

    def _unrecorded(self) -> tuple[Mapping[str, float], Mapping[str, str]]:
        """Metrics and digests of the finished step until its line is written."""
        progress = self._progress
        return ({}, {}) if self.is_recorded else (progress.metrics, progress.stages)

    @property
    def journal(self) -> WorkJournal | None:
        """Journal of finished work of the step; None: not journaled, lost work is repeated."""
        return self._journal

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

    def open_journals(self, facts: Manifest, *, done: int) -> None:
        """Open the journals of finished work; those of steps up to `done` are dropped."""
        self.recorder.open_journals(done=done)
        self._config_hash = generation_config_hash(self.config, facts)

    def steps(self) -> Iterator[int]:
        """Numbers of the remaining steps, counted from 1; ends early on an interruption."""
        while self.step < self.last_step and not self.is_over:
            self.recorder.poll()
            self._step_start.take(self.state(), self.scheduler.outstanding)
            with self.profiler.step(self.step + 1):
                yield self.step + 1

    def advance(self, progress: RunProgress) -> None:
        """Take the progress after a step: the one change of the run that a step makes."""
        assert progress.step == self.step + 1, "steps are finished one by one"
        self._progress = progress
        self._step_start.finish()

    def submit_ahead(self, step: int) -> None:
        """Submit the rollouts of a step, and of later ones as far as `max_staleness` allows."""
        last = min(step + self.config.trainer.max_staleness, self.last_step)
        self.scheduler.submit_up_to(last, version=self.version, origin=self._origin())

    def use_journal(self, journal: WorkJournal | None) -> None:
        """Write finished work to this journal; closes the previous one."""
        if self._journal is not None and self._journal is not journal:
            self._journal.close()
        self._journal = journal

    def open_validation_journal(self) -> None:
        """Open the journal of the validation after the finished step."""
        self.use_journal(self._open_journal(self.step, "validation", self._origin()))

    def _origin(self) -> ParentDigest:
        """Parent digest of work that starts now."""
        if self._progress.origin is not None:
            return self._progress.origin
        is_first = self.chain == BEGINNING
        return self.chain, weights_hash(self.roles.weight_digests()) if is_first else None

    def _open_journal(
        self, step: int, kind: str, origin: ParentDigest | None
    ) -> WorkJournal | None:
        journals = self.recorder.journals
        if journals is None or self._trial_steps is not None:
            return None
        journal = journals.fresh()
        if origin is not None:
            self._begin_journal(journal, step, kind, origin)
        return journal

    def _begin_journal(
        self, journal: WorkJournal | None, step: int, kind: str, origin: ParentDigest
    ) -> None:
        if journal is None:
            return
        _, stages = self._unrecorded()
        basis = [*origin, dict(stages), self._config_hash]
        found = journal.begin(step, kind=kind, basis=basis)
        if found:
            self.display.waiting(f"step {step}: {found} records of work done are in the journal")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time, display, watch and profile a phase of the step."""
        if self._step_start.state is not None or name in STOPPABLE:
            self.interruption.stop_if_wanted()
        self.display.phase(name)
        if name == "update":  # before the watchdog, which may be saving, sees the phase
            self._step_start.invalidate()
        # A validation belongs to the finished step.
        step = self.step if name == "validate" else self.step + 1
        watched = self.watchdog.watching(step, name)
        soon = self.interruption.at_once() if name in STOPPABLE else nullcontext()
        with watched, span(name, step=step), self.profiler.part(name), soon:
            yield

    def generate(
        self,
        prompts: Sequence[Prompt],
        *,
        step: int,
        first: int,
        sampling: Sampling,
        purpose: str = "rollout",
        samples: int | None = None,
    ) -> list[Group]:
        """Generate rollouts of the prompts at this address; waits, and checks their tokens."""
        count = samples or self.config.actor_rollout_ref.rollout.n
        requests = prompt_requests(prompts, step=step, first=first, samples=count)
        PROGRESS.expect(purpose, step, len(requests) * count, restart=True)
        future = self.roles.submit(
            requests, sampling, purpose=purpose, version=self.version, journal=self._journal
        )
        with PROGRESS.watching(purpose, step):
            return self.roles.generation.all_compared(future.result())

    def record_step(self, *, validation: Mapping[str, float]) -> None:
        """Write and display metrics and digest of the finished step, its validation included."""
        metrics, stages = self._unrecorded()
        if found := {**metrics, **validation}:
            self.recorder.record_step(self.step, found, stages)
            self.callbacks.recorded(self.step, self.total_steps, found, validation)

    def is_due(self, every: int) -> bool:
        """Whether something with period `every`, which also happens at the end, is due now.

        An interruption is no end: a resumed run validates where an uninterrupted one does.
        """
        return self.is_due_after(self.step, every)

    def is_due_after(self, step: int, every: int) -> bool:
        """Whether it is due after this step."""
        return step >= self.total_steps or (every > 0 and step % every == 0)

    def save(self) -> None:
        """Save a checkpoint of the finished step, unless it has one."""
        if self._trial_steps is None and self.recorder.history.saved != self.step:
            waits = self.scheduler.outstanding and not self.interruption.is_wanted
            with self.phase("generate") if waits else nullcontext():
                pending = self.scheduler.snapshot()
            self._save(self.state(), pending)

    def save_progress(self) -> None:
        """Save the last finished step after an interruption, unless it has a checkpoint."""
        state = self._step_start.state or self.state()
        pending = self._step_start.pending if self._step_start.state else self.scheduler.outstanding
        if self._trial_steps is None and state.step != self.recorder.history.saved:
            self._save(state, snapshot_rollouts(pending, state.version))

    def save_without_engines(self) -> None:
        """Save the last finished step when generation is lost, unless it has a checkpoint.

        Rollouts of later steps that are not finished are generated again on resume.
        """
        start = self._step_start
        state, pending = start.state, start.pending
        if state is None and not start.is_updating:
            state, pending = self.state(), self.scheduler.outstanding
        is_new = state is not None and state.step != self.recorder.history.saved
        if state is not None and is_new and self._trial_steps is None:
            self._save(state, salvage_rollouts(pending))

    def rescue(self) -> str:
        """Save the last finished step of a hanging run, if the update has not started.

        May be called from any thread once the loop is stopped. Returns what was done, in words.
        """
        said = self._save_step_start()
        self.recorder.close()
        return said

    def _save_step_start(self) -> str:
        """Save the last finished step of a run that ends, unless the update has started.

        Returns what was done, in words.
        """
        state = self._step_start.state
        is_whole = self._trial_steps is None
        said = self._step_start.refusal(
            saved=self.recorder.history.saved if is_whole else self.step
        )
        if said is None:
            assert state is not None, "a snapshot that can be saved has a state"
            self._save(state, [handle.snapshot() for handle in self._step_start.pending])
            said = f"step {state.step} is saved"
        return said

    def _save(self, state: LoopState, pending: Sequence[Mapping[str, Any]]) -> None:
        """Save a state with pending rollouts of later steps and the hash of their sampling."""
        trees = tuple({**tree, "manner": self.submitter.sampling_hash} for tree in pending)
        self.recorder.save(replace(state, asked=trees), self.roles)
        path = self.recorder.directory.checkpoint(state.step)
        self.callbacks.saved(state.step, self.total_steps, path)

    def state(self) -> LoopState:
        """The loop state for a checkpoint, without rollouts of later steps."""
        history, sampler = self.recorder.history, self.data.sampler
        return replace(
            self._progress.loop_state(),
            cursor=self.submitter.cursor,
            returned=self.submitter.returned,
            sampler=sampler.state if isinstance(sampler, AdaptiveSampler) else None,
            first_validation=history.first_validation,
            reward=self.reward.state(),
            chain=history.chain,
            lacks_validation=None if self.is_recorded else unvalidated_step(*self._unrecorded()),
        )

    def restore(self, state: LoopState) -> None:
        """Restore all progress from a checkpoint."""
        self._progress = self._progress.restored(state)
        self.recorder.resume(RunHistory.read(state))
        self.reward.restore(state.reward)
        sampler = self.data.sampler
        if isinstance(sampler, AdaptiveSampler) and state.sampler is not None:
            sampler.state = state.sampler
        self.submitter.restore_rows(state.cursor, state.returned)
        self.scheduler.restore(state.step, [self._reusable(tree) for tree in state.asked])

    def _reusable(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """A saved batch of a later step, without rollouts if the sampling has changed since."""
        return (
            tree if tree.get("manner") == self.submitter.sampling_hash else {**tree, "drawn": None}
        )
