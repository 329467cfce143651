"""The part of a run that learns: roles, rules and coefficients, and how far they have come.

A run in progress is one, with rows, rewards and files beside it; a step that is replayed from files
is one without them. Both learn by the same functions.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import final

from torch import Tensor

from luyen.algorithms.controllers import AdaptiveEntropy, AdaptiveKL, FixedKL
from luyen.algorithms.objective import Objective
from luyen.config.schema.run import RunConfig
from luyen.engine.batch import PackedBatch
from luyen.runtime.pending import PendingUpdate
from luyen.runtime.roles import Roles
from luyen.train.credit import CreditRules
from luyen.train.needs import Needs
from luyen.train.profile import StepProfiler
from luyen.train.state import LoopState


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRules:
    """How a configuration learns, as it begins.

    Example:
        >>> sorted(LearningRules.__slots__)[:2]
        ['credit_rules', 'entropy_controller']
    """

    needs: Needs
    """What is added to a batch before credit."""
    objective: Objective
    """What the policy's update minimises."""
    credit_rules: CreditRules
    """How rewards become advantages."""
    kl_controller: FixedKL | AdaptiveKL
    """Coefficient of the KL term in the reward."""
    entropy_controller: AdaptiveEntropy | None
    """Coefficient of the entropy bonus, where it adapts."""


class Learning:
    """Parts (fixed) and progress (changing) of what learns."""

    def __init__(
        self,
        *,
        config: RunConfig,
        roles: Roles,
        rules: LearningRules,
        profiler: StepProfiler,
        total_steps: int,
    ) -> None:
        self.config = config
        self.roles = roles
        self.needs = rules.needs
        self.objective = rules.objective
        self.credit_rules = rules.credit_rules
        self.kl_controller = rules.kl_controller
        self.entropy_controller = rules.entropy_controller
        self.profiler = profiler
        self.total_steps = total_steps
        self.step = 0
        """Steps that are done; the one in progress is the next."""
        self.version = 0
        """Version of the policy's weights."""
        self.skipped = 0
        """Optimizer steps left out in a row, because their gradients were not finite."""
        self.kl_history: tuple[float, ...] = ()
        """KL to the reference of the latest steps."""
        self.trainer_logp: Tensor | None = None
        """Log-probabilities under the weights before the update, once it has measured them."""

    @property
    def seed(self) -> int:
        """The one seed that every random choice derives from."""
        return self.config.trainer.seed

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Around a part of the step; whoever shows or times it says how."""
        del name
        return nullcontext()

    def update_policy(
        self,
        batch: PackedBatch,
        objective: Objective,
        *,
        lr: float,
        seed: int,
        is_last: bool,
    ) -> PendingUpdate:
        """Start one optimizer step of the policy."""
        return self.roles.update_actor(batch, objective, lr=lr, seed=seed, is_last=is_last)

    def entropy_coeff(self) -> float:
        """Weight of the entropy bonus at the next optimizer step."""
        if self.entropy_controller is None:
            return self.config.actor_rollout_ref.actor.entropy_coeff
        return self.entropy_controller.applied

    def follow_entropy(self, entropy: float) -> None:
        """Let an adaptive coefficient see what was measured."""
        if self.entropy_controller is not None:
            self.entropy_controller = self.entropy_controller.update(entropy=entropy)

    def follow_kl(self, kl: float, rollouts: int) -> None:
        """Let the KL coefficient and its drift see what was measured."""
        self.kl_controller = self.kl_controller.update(kl=kl, n_steps=rollouts)
        self.kl_history = (*self.kl_history, kl)[-20:]

    def go_on_from(self, state: LoopState) -> None:
        """Take the progress over from a checkpoint; what is configured stays as configured."""
        self.step, self.version = state.step, state.version
        self.skipped, self.kl_history = state.skipped, state.kl_history
        if state.kl_controller is not None:
            self.kl_controller = self.kl_controller.restore(state.kl_controller)
        if self.entropy_controller is not None and state.entropy_controller is not None:
            self.entropy_controller = self.entropy_controller.restore(state.entropy_controller)
