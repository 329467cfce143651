"""A wired run: the parts that the loop uses, and how far it has come."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import final

from luyen.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL
from luyen.algorithms.objective import Objective
from luyen.base.digests import BEGINNING, link
from luyen.base.records import Prompt, Rollout
from luyen.config.schema.run import RunConfig
from luyen.data.build import TrainData
from luyen.data.samplers import AdaptiveSampler
from luyen.rewards.build import BuiltReward
from luyen.rewards.step import Scored
from luyen.rollout.protocol import Sampling
from luyen.rollout.single_turn import Group
from luyen.runtime.local import LocalRoles
from luyen.telemetry.display import Display
from luyen.telemetry.spans import span
from luyen.train.credit import CreditRules
from luyen.train.digests import metrics_stage
from luyen.train.draws import draws_of
from luyen.train.interrupt import Interruption
from luyen.train.needs import Needs
from luyen.train.profile import StepProfiler
from luyen.train.recorder import Recorder
from luyen.train.state import LoopState


@final
class OnlineRun:
    """Parts (fixed) and progress (changing) of one run."""

    def __init__(
        self,
        *,
        config: RunConfig,
        data: TrainData,
        roles: LocalRoles,
        reward: BuiltReward,
        needs: Needs,
        objective: Objective,
        credit_rules: CreditRules,
        sampling: Sampling,
        kl_controller: FixedKL | AdaptiveKL,
        entropy_controller: AdaptiveEntropy | None,
        recorder: Recorder,
        display: Display,
        total_steps: int,
    ) -> None:
        self.config = config
        self.data = data
        self.roles = roles
        self.reward = reward
        self.needs = needs
        self.objective = objective
        self.credit_rules = credit_rules
        self.sampling = sampling
        self.kl_controller = kl_controller
        self.entropy_controller = entropy_controller
        self.recorder = recorder
        self.display = display
        self.total_steps = total_steps
        profile, is_cuda = config.trainer.profile, roles.device.type == "cuda"
        self.profiler = StepProfiler(profile, recorder.directory, is_cuda=is_cuda)
        self.trial_steps: int | None = None
        """Where a run ends that is only measured and keeps no checkpoint; None: a whole run."""
        self._begin()

    def _begin(self) -> None:
        """Nothing is done yet."""
        self.step = 0
        """Steps that are done; the one in progress is the next."""
        self.cursor = 0
        self.version = 0
        self.skipped = 0
        self.flat_steps = 0
        self.kl_history: tuple[float, ...] = ()
        self.validations: list[dict[str, float]] = []
        self.interruption = Interruption()
        self.chain = BEGINNING
        """Digest of everything that was done so far."""
        self.saved = 0
        """Step of the newest checkpoint; the beginning needs none."""
        self.begin_step()

    @property
    def seed(self) -> int:
        """The one seed that every random choice derives from."""
        return self.config.trainer.seed

    def begin_step(self) -> None:
        """Forget what belonged to the step before."""
        self.notes: dict[str, float] = {}
        self.metrics: dict[str, float] = {}
        self.stages: dict[str, str] = {}
        self.judged: list[Scored] = []
        self.broken: list[Rollout] = []
        self.baselines: dict[str, float] = {}

    def steps(self) -> Iterator[int]:
        """Numbers of the steps that are left, counted from 1, unless the user interrupts."""
        last = min(self.total_steps, self.trial_steps or self.total_steps)
        while self.step < last and not self.interruption.is_wanted:
            self.begin_step()
            with self.profiler.step(self.step + 1):
                yield self.step + 1

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Time a part of the step and show it."""
        return self._phase(name)

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        self.display.phase(name)
        with span(name, step=self.step + 1), self.profiler.part(name):
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
        """Rollouts of the prompts, drawn at this place of the run."""
        count = samples or self.config.actor_rollout_ref.rollout.n
        draws = draws_of(prompts, step=step, first=first, samples=count)
        return self.roles.generate(draws, sampling, purpose=purpose, version=self.version)

    def rollouts_of(self, groups: Sequence[Group]) -> list[Rollout]:
        """The rollouts in the order of the packed batch."""
        return sorted((r for g in groups for r in g.rollouts), key=lambda r: r.key)

    def entropy_coeff(self) -> float:
        """Weight of the entropy bonus at the next optimizer step."""
        if self.entropy_controller is None:
            return self.config.actor_rollout_ref.actor.entropy_coeff
        return self.entropy_controller.applied

    def follow_entropy(self, entropy: float) -> None:
        """Let an adaptive coefficient see what was measured."""
        if self.entropy_controller is not None:
            self.entropy_controller = self.entropy_controller.update(entropy=entropy)

    def follow_success(self, share: float) -> None:
        """Let an adaptive sampler see how much of the step was solved."""
        if isinstance(self.data.sampler, AdaptiveSampler):
            self.data.sampler.record(self.cursor, share)

    def follow_kl(self, kl: float, rollouts: int) -> None:
        """Let the KL coefficient and its drift see what was measured."""
        self.kl_controller = self.kl_controller.update(kl=kl, n_steps=rollouts)
        self.kl_history = (*self.kl_history, kl)[-20:]

    def note_validation(self, found: dict[str, float]) -> None:
        """Remember a validation, for the summary."""
        self.validations.append(found)

    def write_down(self) -> None:
        """Write and show the numbers of the step that is done, validation included."""
        if self.metrics:
            stages = {**self.stages, "metrics": metrics_stage(self.metrics)}
            digest = link(self.chain, step=self.step, stages=stages)
            self.recorder.digest(digest)
            self.recorder.metrics(self.step, self.metrics)
            self.chain = digest.chain
        self.metrics = {}

    def is_due(self, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens now.

        An interruption is no end: a resumed run must measure where an uninterrupted one does.
        """
        return self.step >= self.total_steps or (every > 0 and self.step % every == 0)

    def save(self) -> None:
        """A checkpoint of the step that is done, unless it has one."""
        if self.trial_steps is None and self.saved != self.step:
            self.recorder.save(self.state(), self.roles)
            self.saved = self.step

    def state(self) -> LoopState:
        """What a checkpoint keeps besides weights."""
        entropy, sampler = self.entropy_controller, self.data.sampler
        return LoopState(
            step=self.step,
            cursor=self.cursor,
            version=self.version,
            kl_controller=self.kl_controller.state(),
            entropy_controller=entropy.state() if entropy is not None else None,
            kl_history=self.kl_history,
            sampler=sampler.state if isinstance(sampler, AdaptiveSampler) else None,
            skipped=self.skipped,
            flat_steps=self.flat_steps,
            first_validation=self.validations[0] if self.validations else {},
            chain=self.chain,
        )

    def restore(self, state: LoopState) -> None:
        """Go on from a checkpoint."""
        self.step, self.cursor, self.version = state.step, state.cursor, state.version
        self.saved = state.step
        self.chain = state.chain
        self.kl_history = state.kl_history
        self.skipped, self.flat_steps = state.skipped, state.flat_steps
        self.validations = [state.first_validation] if state.first_validation else []
        sampler = self.data.sampler
        if isinstance(sampler, AdaptiveSampler) and state.sampler is not None:
            sampler.state = state.sampler
        if state.kl_controller is not None:
            self.kl_controller = self.kl_controller.restore(state.kl_controller)
        if self.entropy_controller is not None and state.entropy_controller is not None:
            self.entropy_controller = self.entropy_controller.restore(state.entropy_controller)
