"""State of the loop: what a checkpoint keeps, the learner, the snapshot of a step's start."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from typing import Any, final

from torch import Tensor

from luyen.algorithms.controllers import (
    AdaptiveEntropyController,
    AdaptiveKLController,
    FixedKLController,
)
from luyen.algorithms.objective import Objective
from luyen.base.digests import BEGINNING
from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.config.schema.run import RunConfig
from luyen.engine.batch import PackedBatch
from luyen.runtime.futures import PendingUpdate
from luyen.runtime.roles import Roles
from luyen.train.advantages import AdvantageConfig
from luyen.train.batch import RequiredSignals
from luyen.train.monitor import StepProfiler
from luyen.train.rollouts import RolloutHandle


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """Where the loop stands. A run resumed from it goes on as if nothing had happened.

    Example:
        >>> LoopState.from_json(LoopState(step=3, cursor=96).as_json()).cursor
        96
    """

    step: int = 0
    """Steps that are done."""
    cursor: int = 0
    """Rows drawn so far: the sampler is a pure function of it."""
    returned: tuple[int, ...] = ()
    """Rows among them that nothing came of, and that come before further ones."""
    version: int = 0
    """Version of the policy's weights."""
    kl_controller: dict[str, float | None] | None = None
    """State of the KL coefficient."""
    entropy_controller: dict[str, float | None] | None = None
    """State of the entropy coefficient."""
    kl_history: tuple[float, ...] = ()
    """KL to the reference of the latest steps, for its drift."""
    sampler: tuple[int, ...] | None = None
    """What an adaptive sampler learned; None for one that is a function of the cursor alone."""
    skipped: int = 0
    """Optimizer steps left out in a row, because their gradients were not finite."""
    flat_steps: int = 0
    """First steps in which no group differed; -1 once one did."""
    first_validation: dict[str, float] = field(default_factory=dict[str, float])
    """What the first validation found, for the summary."""
    asked: tuple[dict[str, Any], ...] = ()
    """Batches of later steps that were asked for, with their rollouts."""
    reward: dict[str, Any] = field(default_factory=dict[str, Any])
    """What running statistics of the rewards have seen."""
    chain: str = BEGINNING
    """Digest of everything that was done so far, which the next step's digest goes on from."""
    origin: tuple[str, str] | None = None
    """The chain before the last step, and the hash of the weights after it; None: no step yet."""
    lacks_validation: dict[str, Any] | None = None
    """Numbers and hashes of a step that was stopped before its validation was over."""

    def as_json(self) -> dict[str, Any]:
        """Plain data for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> "LoopState":
        """What `as_json` gave; a ValueError or its like where it is something else."""
        for name in ("step", "cursor", "version", "skipped", "flat_steps"):
            if type(saved.get(name, 0)) is not int:
                raise ValueError(f"`{name}` is no whole number")
            if saved.get(name, 0) < 0 and name != "flat_steps":
                raise ValueError(f"`{name}` is below 0")
        if not isinstance(saved.get("first_validation"), dict | None):
            raise TypeError("`first_validation` is no object")
        sampler = saved.get("sampler")
        tuples = {
            "kl_history": tuple(saved["kl_history"]),
            "sampler": tuple(sampler) if sampler is not None else None,
            "asked": tuple(saved.get("asked", ())),
            "returned": tuple(saved.get("returned", ())),
            "origin": tuple(saved["origin"]) if saved.get("origin") else None,
        }
        return cls(**{**saved, **tuples})


def unvalidated_step(metrics: Mapping[str, float], stages: Mapping[str, str]) -> dict[str, Any]:
    """What is known of a step that lacks its validation, as a checkpoint keeps it.

    Example:
        >>> saved = unvalidated_step({"a": 0.5, "b": float("inf")}, {"prompts": "ab"})
        >>> read_unvalidated_step(saved)
        ({'a': 0.5, 'b': inf}, {'prompts': 'ab'})
    """
    return {"metrics": plain(metrics), "stages": dict(stages)}


def read_unvalidated_step(saved: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, str]]:
    """What `unvalidated_step` gave, as numbers and hashes."""
    return {k: float(v) for k, v in saved["metrics"].items()}, dict(saved["stages"])


def first_logged_step(loop: Mapping[str, Any] | None) -> int:
    """The first step that a run writes lines of, which goes on from this loop; None: a new one.

    Example:
        >>> first_logged_step(None), first_logged_step({"step": 4})
        (0, 5)
        >>> first_logged_step({"step": 4, "lacks_validation": {}})
        4
    """
    if loop is None:
        return 0
    if type(loop.get("step")) is not int:
        fix = "resume from an earlier checkpoint"
        raise UserError("step of loop.json", loop.get("step"), "it is no whole number", fix)
    return int(loop["step"]) + (loop.get("lacks_validation") is None)


# The part of a run that learns: roles, rules and coefficients, and how far they have come.
#
# A run in progress is one, with rows, rewards and files beside it; a step that is replayed from
# files is one without them. Both learn by the same functions.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LearningRules:
    """How a configuration learns, as it begins.

    Example:
        >>> sorted(LearningRules.__slots__)[:2]
        ['credit_rules', 'entropy_controller']
    """

    needs: RequiredSignals
    """What is added to a batch before credit."""
    objective: Objective
    """What the policy's update minimises."""
    credit_rules: AdvantageConfig
    """How rewards become advantages."""
    kl_controller: FixedKLController | AdaptiveKLController
    """Coefficient of the KL term in the reward."""
    entropy_controller: AdaptiveEntropyController | None
    """Coefficient of the entropy bonus, where it adapts."""


class Learner:
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


# The last moment at which a run could be saved as it was: when the step in progress began.


@final
class StepSnapshot:
    """The loop as the step began, as long as the weights are still of that moment."""

    def __init__(self) -> None:
        self.state: LoopState | None = None
        """None: the weights are being changed, or no step has begun."""
        self.asked: tuple[RolloutHandle, ...] = ()
        """What was asked for and not taken then."""

    def mark(self, state: LoopState, asked: tuple[RolloutHandle, ...]) -> None:
        """A step begins."""
        self.state, self.asked = state, asked

    def leave(self) -> None:
        """The weights change from now on."""
        self.state = None

    def refusal(self, *, saved: int) -> str | None:
        """Why a run that hangs cannot be saved as it was; None: it can, without any wait."""
        if self.state is None:
            return "the weights are being changed, so that the newest checkpoint stays"
        if self.state.step == saved:
            return f"nothing is to be saved after step {saved}"
        if any(one.needs_other_weights(self.state.version) for one in self.asked):
            return "rollouts of later steps are in progress, so that the newest checkpoint stays"
        return None


def snapshot_rollouts(asked: Sequence[RolloutHandle], version: int) -> list[dict[str, Any]]:
    """What a checkpoint of these weights keeps of rollouts that were asked for.

    Only those are waited for that other weights draw; the others will be drawn again.
    """
    return [one.as_json() if one.needs_other_weights(version) else one.as_it_is() for one in asked]
