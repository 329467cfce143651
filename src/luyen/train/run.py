"""A built run: parts, progress and journal keys of online training."""

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

# What the work of a step depends on: a journal is taken up for the very same work only.

_RELEVANT_KEYS = {"seed", "plugins", "device"}
"""Keys of `trainer` that act on rollouts or rewards; the others act on what follows, or nowhere."""


def weights_hash(held: WeightDigests) -> str:
    """The weights of every role that learns, as one hash."""
    return hash_value(dict(held.weights()))


def generation_config_hash(config: RunConfig, facts: Manifest) -> str:
    """Everything that rollouts and rewards depend on besides weights: keys, rows and code.

    What becomes of a call that was under way is decided when the run goes on: a changed mind about
    it must not drop the very record that it is about.
    """
    tree = stored_values(config)
    tree["trainer"] = {name: v for name, v in tree["trainer"].items() if name in _RELEVANT_KEYS}
    del tree["actor_rollout_ref"]["rollout"]["multi_turn"]["on_unknown"]
    return hash_value([tree, facts.files, facts.datasets, facts.code, facts.versions])


@final
class OnlineRun(Learner):
    """Parts (fixed) and progress (changing) of one run."""

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
            profiler=StepProfiler(profile, recorder.directory, others=roles.traces),
            total_steps=total_steps,
        )
        self.data = data
        self.reward = reward
        self.sampling = sampling
        self.recorder = recorder
        self.display = display
        self.trial_steps: int | None = None
        """Where a run ends that is only measured and keeps no checkpoint; None: a whole run."""
        self.settings = ""
        """Hash of everything configured that rollouts and rewards depend on."""
        watchdog, events = config.trainer.watchdog, recorder.directory.events
        self.watchdog = PhaseWatchdog(watchdog, events, rescue=self.rescue)
        self._begin()

    def _begin(self) -> None:
        """Nothing is done yet."""
        self.submitter = RolloutSubmitter(
            self.config,
            self.data,
            self.roles,
            self.sampling,
            has_baselines=self.needs.baselines,
            take_up=self._taken_up,
            begin_work=self._begin_work,
        )
        """How training rows become rollouts."""
        self.supply = build_scheduler(self.config.trainer, self.submitter)
        """What this step and later ones learn from, asked for in time."""
        self.flat_steps = 0
        self.journal: WorkJournal | None = None
        """Where finished work is written down at once; None: nowhere, it is done again."""
        self.validations: list[dict[str, float]] = []
        self.has_validated_later = False
        self.interruption = Interruption()
        self.chain = BEGINNING
        """Digest of everything that was done so far."""
        self.origin: tuple[str, str] | None = None
        """The chain before the last step, and the weights after it, known before the chain is."""
        self.saved = 0
        """Step of the newest checkpoint; the beginning needs none."""
        self.boundary = StepSnapshot()
        self.is_open = False
        """Whether the step that is done still lacks its validation, and so its line of numbers."""
        self.begin_step()

    def begin_step(self) -> None:
        """Forget what belonged to the step before."""
        self.notes: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.stages: dict[str, str] = {}
        self.judged: list[ScoredGroup] = []
        self.broken: list[Rollout] = []
        self.baselines: dict[str, float] = {}
        self.trainer_logp = None

    def steps(self) -> Iterator[int]:
        """Numbers of the steps that are left, counted from 1, unless the user interrupts."""
        while self.step < self.last_step and not self.interruption.is_wanted:
            self.recorder.poll()
            self.begin_step()
            self.boundary.mark(self.state(), self.supply.outstanding)
            with self.profiler.step(self.step + 1):
                yield self.step + 1

    @property
    def last_step(self) -> int:
        """Where it ends."""
        return min(self.total_steps, self.trial_steps or self.total_steps)

    def ask_ahead(self, step: int) -> None:
        """Ask for the rollouts of a step, and of those that may be drawn before it is trained."""
        last = min(step + self.config.trainer.max_staleness, self.last_step)
        self.supply.ask_up_to(last, version=self.version, origin=self._origin())

    def write_work_to(self, journal: WorkJournal | None) -> None:
        """Go on with a journal; the one before is done with."""
        if self.journal is not None and self.journal is not journal:
            self.journal.close()
        self.journal = journal

    def take_up_validation(self) -> None:
        """Go on with the journal of the validation after the step that is done."""
        self.write_work_to(self._taken_up(self.step, "validation", self._origin()))

    def _origin(self) -> ParentDigest:
        """What work depends on besides the configuration: all that was done, and the weights."""
        if self.origin is not None:
            return self.origin
        is_first = self.chain == BEGINNING
        return self.chain, weights_hash(self.roles.weight_digests()) if is_first else None

    def _taken_up(self, step: int, kind: str, origin: ParentDigest | None) -> WorkJournal | None:
        journals = self.recorder.journals
        if journals is None or self.trial_steps is not None:
            return None
        journal = journals.fresh()
        if origin is not None:
            self._begin_work(journal, step, kind, origin)
        return journal

    def _begin_work(
        self, journal: WorkJournal | None, step: int, kind: str, origin: ParentDigest
    ) -> None:
        if journal is None:
            return
        basis = [*origin, self.stages, self.settings]
        known = journal.begin(step, kind=kind, basis=basis)
        if known:
            self.display.waiting(f"step {step}: {known} records of work done are in the journal")

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a part of the step and show it."""
        if self.boundary.state is not None or name in STOPPABLE:
            self.interruption.stop_if_wanted()
        self.display.phase(name)
        if name == "update":
            self.boundary.leave()  # before the watchdog hears of it, which may be saving
        step = self.step if name == "validate" else self.step + 1  # that of a step that is done
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
        """Rollouts of the prompts, drawn at this place of the run; their tokens are sound."""
        count = samples or self.config.actor_rollout_ref.rollout.n
        draws = prompt_requests(prompts, step=step, first=first, samples=count)
        PROGRESS.expect(purpose, step, len(draws) * count, restart=True)
        asked = self.roles.submit(
            draws, sampling, purpose=purpose, version=self.version, journal=self.journal
        )
        with PROGRESS.watching(purpose, step):
            return self.roles.generation.all_compared(asked.result())

    def write_down(self) -> None:
        """Write and show the numbers of the step that is done, validation included."""
        if self.metrics:
            stages = {**self.stages, "metrics": metrics_stage(self.metrics)}
            digest = link(self.chain, step=self.step, stages=stages)
            self.recorder.digest(digest)
            self.recorder.metrics(self.step, self.metrics)
            self.chain = digest.chain
        self.metrics, self.is_open = {}, False

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now.

        An interruption is no end: a resumed run must measure where an uninterrupted one does.
        """
        return self.is_due_after(self.step, every)

    def is_due_after(self, step: int, every: int) -> bool:
        """Whether it happens after this step."""
        return step >= self.total_steps or (every > 0 and step % every == 0)

    def save(self) -> None:
        """A checkpoint of the step that is done, unless it has one."""
        if self.trial_steps is None and self.saved != self.step:
            waits = self.supply.outstanding and not self.interruption.is_wanted
            with self.phase("generate") if waits else nullcontext():
                asked = self.supply.kept()
            self._keep(self.state(), asked)

    def keep_progress(self) -> None:
        """A signal stopped the step: a checkpoint of what is done, unless it has one."""
        state = self.boundary.state or self.state()
        asked = self.boundary.asked if self.boundary.state else self.supply.outstanding
        if self.trial_steps is None and state.step != self.saved:
            self._keep(state, snapshot_rollouts(asked, state.version))

    def rescue(self) -> str:
        """Save the last finished step of a run that hangs, if its weights are still there.

        Any thread may call it once the loop is stopped. It says what became of it.
        """
        state = self.boundary.state
        said = self.boundary.refusal(saved=self.saved if self.trial_steps is None else self.step)
        if state is not None and said is None:
            self._keep(state, [one.as_it_is() for one in self.boundary.asked])
            said = f"step {state.step} is saved"
        assert said is not None
        self.recorder.close()
        return said

    def _keep(self, state: LoopState, asked: Sequence[Mapping[str, Any]]) -> None:
        """Save a state with the rollouts of later steps, and how they were drawn."""
        trees = tuple({**tree, "manner": self.submitter.manner} for tree in asked)
        self.recorder.save(replace(state, asked=trees), self.roles)
        self.saved = state.step

    def state(self) -> LoopState:
        """What a checkpoint keeps besides weights and rollouts of later steps."""
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
            lacks_validation=unvalidated_step(self.metrics, self.stages) if self.is_open else None,
        )

    def restore(self, state: LoopState) -> None:
        """Go on from a checkpoint."""
        self.go_on_from(state)
        self.flat_steps = state.flat_steps
        self.saved = state.step
        self.chain, self.origin = state.chain, state.origin
        if state.lacks_validation is not None:
            self.metrics, self.stages = read_unvalidated_step(state.lacks_validation)
            self.is_open = True
        self.reward.restore(state.reward)
        self.validations = [state.first_validation] if state.first_validation else []
        sampler = self.data.sampler
        if isinstance(sampler, AdaptiveSampler) and state.sampler is not None:
            sampler.state = state.sampler
        self.submitter.cursor, self.submitter.returned = state.cursor, state.returned
        self.supply.restore(state.step, [self._usable(tree) for tree in state.asked])

    def _usable(self, tree: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a checkpoint kept of later steps; no rollouts that were drawn in another way."""
        return tree if tree.get("manner") == self.submitter.manner else {**tree, "drawn": None}
