"""`OnlineRun`: components and progress of online training; what its journals depend on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, final

from luyen.base.digests import BEGINNING, hash_value, link
from luyen.base.records import Prompt, Rollout
from luyen.config.loader.parse import stored_values
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.samplers import AdaptiveSampler
from luyen.rewards.build import BuiltReward
from luyen.rewards.scoring import ScoredGroup
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group
from luyen.runtime.roles import Roles, WeightDigests
from luyen.telemetry.display import Display
from luyen.telemetry.journal import WorkJournal
from luyen.telemetry.manifest import Manifest
from luyen.telemetry.progress import PROGRESS
from luyen.telemetry.spans import span
from luyen.train.interrupt import STOPPABLE, Interruption
from luyen.train.monitor import PhaseWatchdog, StepProfiler
from luyen.train.record import Recorder, metrics_stage
from luyen.train.rollouts import ParentDigest, RolloutSubmitter, prompt_requests
from luyen.train.schedulers import build_scheduler
from luyen.train.state import (
    Learner,
    LearningRules,
    LoopState,
    StepSnapshot,
    read_unvalidated_step,
    snapshot_rollouts,
    unvalidated_step,
)

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
class OnlineRun(Learner):
    """Components and progress of one online run."""

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
        profile = config.trainer.profile
        super().__init__(
            config=config,
            roles=roles,
            rules=rules,
            profiler=StepProfiler(profile, recorder.directory, workers=roles.traces),
            total_steps=total_steps,
        )
        self.data = data
        self.reward = reward
        self.sampling = sampling
        self.recorder = recorder
        self.display = display
        self.trial_steps: int | None = None
        """Last step of a trial run, which saves no checkpoint; None: a whole run."""
        self.config_hash = ""
        """`generation_config_hash` of the run."""
        watchdog, events = config.trainer.watchdog, recorder.directory.events
        self.watchdog = PhaseWatchdog(watchdog, events, rescue=self.rescue)
        self._begin()

    def _begin(self) -> None:
        """Initialise progress for step 0."""
        self.submitter = RolloutSubmitter(
            self.config,
            self.data,
            self.roles,
            self.sampling,
            has_baselines=self.needs.baselines,
            open_journal=self._open_journal,
            begin_journal=self._begin_journal,
        )
        """Submits rollouts of training rows."""
        self.scheduler = build_scheduler(self.config.trainer, self.submitter)
        """Schedules rollouts of this and later steps."""
        self.flat_steps = 0
        self.journal: WorkJournal | None = None
        """Journal of finished work of the step; None: not journaled, lost work is repeated."""
        self.validations: list[dict[str, float]] = []
        self.has_validated_later = False
        self.interruption = Interruption()
        self.chain = BEGINNING
        """Digest chain of all finished steps."""
        self.origin: tuple[str, str] | None = None
        """Chain before the last step and hash of the weights after it."""
        self.saved = 0
        """Step of the newest checkpoint; step 0 needs none."""
        self.step_start = StepSnapshot()
        self.awaits_validation = False
        """Whether the finished step still lacks its validation, and so its metrics line."""
        self.begin_step()

    def begin_step(self) -> None:
        """Clear the data of the previous step."""
        self.notes: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.stages: dict[str, str] = {}
        self.scored: list[ScoredGroup] = []
        self.broken: list[Rollout] = []
        self.baselines: dict[str, float] = {}
        self.trainer_logp = None

    def steps(self) -> Iterator[int]:
        """Numbers of the remaining steps, counted from 1; ends early on an interruption."""
        while self.step < self.last_step and not self.interruption.is_wanted:
            self.recorder.poll()
            self.begin_step()
            self.step_start.take(self.state(), self.scheduler.outstanding)
            with self.profiler.step(self.step + 1):
                yield self.step + 1

    @property
    def last_step(self) -> int:
        """The last step of this run."""
        return min(self.total_steps, self.trial_steps or self.total_steps)

    def submit_ahead(self, step: int) -> None:
        """Submit the rollouts of a step, and of later ones as far as `max_staleness` allows."""
        last = min(step + self.config.trainer.max_staleness, self.last_step)
        self.scheduler.submit_up_to(last, version=self.version, origin=self._origin())

    def use_journal(self, journal: WorkJournal | None) -> None:
        """Write finished work to this journal; closes the previous one."""
        if self.journal is not None and self.journal is not journal:
            self.journal.close()
        self.journal = journal

    def open_validation_journal(self) -> None:
        """Open the journal of the validation after the finished step."""
        self.use_journal(self._open_journal(self.step, "validation", self._origin()))

    def _origin(self) -> ParentDigest:
        """Parent digest of work that starts now."""
        if self.origin is not None:
            return self.origin
        is_first = self.chain == BEGINNING
        return self.chain, weights_hash(self.roles.weight_digests()) if is_first else None

    def _open_journal(
        self, step: int, kind: str, origin: ParentDigest | None
    ) -> WorkJournal | None:
        journals = self.recorder.journals
        if journals is None or self.trial_steps is not None:
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
        basis = [*origin, self.stages, self.config_hash]
        found = journal.begin(step, kind=kind, basis=basis)
        if found:
            self.display.waiting(f"step {step}: {found} records of work done are in the journal")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time, display, watch and profile a phase of the step."""
        if self.step_start.state is not None or name in STOPPABLE:
            self.interruption.stop_if_wanted()
        self.display.phase(name)
        if name == "update":
            self.step_start.invalidate()  # before the watchdog, which may be saving, sees the phase
        step = (
            self.step if name == "validate" else self.step + 1
        )  # validation belongs to the finished step
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
            requests, sampling, purpose=purpose, version=self.version, journal=self.journal
        )
        with PROGRESS.watching(purpose, step):
            return self.roles.generation.all_compared(future.result())

    def record_step(self) -> None:
        """Write and display metrics and digest of the finished step, validation included."""
        if self.metrics:
            stages = {**self.stages, "metrics": metrics_stage(self.metrics)}
            digest = link(self.chain, step=self.step, stages=stages)
            self.recorder.digest(digest)
            self.recorder.metrics(self.step, self.metrics)
            self.chain = digest.chain
        self.metrics, self.awaits_validation = {}, False

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
        if self.trial_steps is None and self.saved != self.step:
            waits = self.scheduler.outstanding and not self.interruption.is_wanted
            with self.phase("generate") if waits else nullcontext():
                pending = self.scheduler.snapshot()
            self._save(self.state(), pending)

    def save_progress(self) -> None:
        """Save the last finished step after an interruption, unless it has a checkpoint."""
        state = self.step_start.state or self.state()
        pending = self.step_start.pending if self.step_start.state else self.scheduler.outstanding
        if self.trial_steps is None and state.step != self.saved:
            self._save(state, snapshot_rollouts(pending, state.version))

    def rescue(self) -> str:
        """Save the last finished step of a hanging run, if the update has not started.

        May be called from any thread once the loop is stopped. Returns what was done, in words.
        """
        said = self.save_step_start()
        self.recorder.close()
        return said

    def save_step_start(self) -> str:
        """Save the last finished step of a run that ends, unless the update has started.

        Returns what was done, in words.
        """
        state = self.step_start.state
        said = self.step_start.refusal(saved=self.saved if self.trial_steps is None else self.step)
        if said is None:
            assert state is not None, "a snapshot that can be saved has a state"
            self._save(state, [handle.snapshot() for handle in self.step_start.pending])
            said = f"step {state.step} is saved"
        return said

    def _save(self, state: LoopState, pending: Sequence[Mapping[str, Any]]) -> None:
        """Save a state with pending rollouts of later steps and the hash of their sampling."""
        trees = tuple({**tree, "manner": self.submitter.sampling_hash} for tree in pending)
        self.recorder.save(replace(state, asked=trees), self.roles)
        self.saved = state.step

    def state(self) -> LoopState:
        """The loop state for a checkpoint, without rollouts of later steps."""
        entropy, sampler = self.entropy_controller, self.data.sampler
        return LoopState(
            step=self.step,
            cursor=self.submitter.cursor,
            returned=self.submitter.returned,
            version=self.version,
            kl_controller=self.kl_controller.state(),
            entropy_controller=entropy.state() if entropy is not None else None,
            kl_history=self.kl_history,
            sampler=sampler.state if isinstance(sampler, AdaptiveSampler) else None,
            skipped=self.skipped,
            flat_steps=self.flat_steps,
            first_validation=self.validations[0] if self.validations else {},
            reward=self.reward.state(),
            chain=self.chain,
            origin=self.origin,
            lacks_validation=unvalidated_step(self.metrics, self.stages)
            if self.awaits_validation
            else None,
        )

    def restore(self, state: LoopState) -> None:
        """Restore all progress from a checkpoint."""
        self.restore_progress(state)
        self.flat_steps = state.flat_steps
        self.saved = state.step
        self.chain, self.origin = state.chain, state.origin
        if state.lacks_validation is not None:
            self.metrics, self.stages = read_unvalidated_step(state.lacks_validation)
            self.awaits_validation = True
        self.reward.restore(state.reward)
        self.validations = [state.first_validation] if state.first_validation else []
        sampler = self.data.sampler
        if isinstance(sampler, AdaptiveSampler) and state.sampler is not None:
            sampler.state = state.sampler
        self.submitter.cursor, self.submitter.returned = state.cursor, state.returned
        self.scheduler.restore(state.step, [self._reusable(tree) for tree in state.asked])

    def _reusable(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """A saved batch of a later step, without rollouts if the sampling has changed since."""
        return (
            tree if tree.get("manner") == self.submitter.sampling_hash else {**tree, "drawn": None}
        )
