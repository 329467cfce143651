"""Rules of the doctor, what they find, and the experiments they suggest in tuning order."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias, final

from luyen.config.problem import Severity
from luyen.config.schema.run import RunConfig
from luyen.studio.doctor.record import RunRecord

Stage: TypeAlias = Literal["repair", "data", "memory", "clip and KL", "learning rate", "loss mode"]
"""What an experiment changes."""
STAGES: tuple[Stage, ...] = (
    "repair",
    "data",
    "memory",
    "clip and KL",
    "learning rate",
    "loss mode",
)
"""The order of tuning: defects are fixed before anything is tuned, and memory settings come before
the algorithm, since changing them invalidates all other measurements."""
SEVERITIES: tuple[Severity, ...] = ("error", "warning", "note")


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """What to try next, and what after that.

    Example:
        >>> Experiment(stage="learning rate", change="halve it").then
        ()
    """

    stage: Stage
    """Where it stands in the order of tuning."""
    change: str
    """The one change to make."""
    then: tuple[str, ...] = ()
    """What to change after that, one at a time, if it does not help."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """Evidence that a rule found in a run.

    Example:
        >>> repair = Experiment(stage="repair", change="fix the reward")
        >>> Symptom(says="every reward is 0", experiment=repair, steps=(4, 5)).steps
        (4, 5)
    """

    says: str
    """One sentence with the numbers."""
    experiment: Experiment
    """What to try."""
    steps: tuple[int, ...] = ()
    """Where it shows."""
    numbers: Mapping[str, float] = field(default_factory=dict[str, float])
    """The evidence by name."""
    rollouts: tuple[str, ...] = ()
    """Rollouts that show it, as group and sample."""
    severity: Severity | None = None
    """How much this one matters; None: as the rule says."""


RuleCheck: TypeAlias = Callable[[RunRecord], Iterator[Symptom]]
"""A rule as a function of the record of a run."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorRule:
    """A named check of a run.

    Example:
        >>> DoctorRule(id="x", severity="note", title="Never.", look=lambda _: iter(())).severity
        'note'
    """

    id: str
    """Stable name."""
    severity: Severity
    """How much it matters, unless a symptom says otherwise."""
    title: str
    """What it looks for."""
    look: RuleCheck
    """The check itself."""
    steps: int = 1
    """Steps that a run must have before the rule can say anything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """A symptom under the name of its rule.

    Example:
        >>> repair = Experiment(stage="repair", change="fix the reward")
        >>> seen = Symptom(says="every reward is 0", experiment=repair)
        >>> Diagnosis(rule="reward-all-equal", severity="error", title="", symptom=seen).is_bad
        True
    """

    rule: str
    """Id of the rule."""
    severity: Severity
    """How much it matters."""
    title: str
    """What the rule looks for."""
    symptom: Symptom
    """What was seen."""

    @property
    def is_bad(self) -> bool:
        """Whether it changes the exit code: a note does not."""
        return self.severity != "note"

    @property
    def rank(self) -> tuple[int, int]:
        """Severity first, then the order of tuning."""
        stage = STAGES.index(self.symptom.experiment.stage)
        return SEVERITIES.index(self.severity), stage

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        seen, experiment = self.symptom, self.symptom.experiment
        return {
            "rule": self.rule,
            "severity": self.severity,
            "title": self.title,
            "says": seen.says,
            "steps": list(seen.steps),
            "numbers": dict(seen.numbers),
            "rollouts": list(seen.rollouts),
            "stage": experiment.stage,
            "try": experiment.change,
            "then": list(experiment.then),
        }


RULES: dict[str, DoctorRule] = {}


def rule(id: str, severity: Severity, *, steps: int = 1) -> Callable[[RuleCheck], RuleCheck]:
    """Declare a rule that needs so many steps; the first line of its docstring is its title."""

    def add(look: RuleCheck) -> RuleCheck:
        assert id not in RULES, f"rule {id} is declared twice"
        title = (look.__doc__ or "").strip().partition("\n")[0]
        RULES[id] = DoctorRule(id=id, severity=severity, title=title, look=look, steps=steps)
        return look

    return add


# Experiments in tuning order: one change at a time, the cheapest to evaluate first.
#
# Memory comes first, then clip and KL, then learning rates and warm-up (the critic's before the
# actor's: a policy that follows a wrong critic looks as if it learned too fast), then the loss
# mode. Changes that the configuration already has are left out.

_ACTOR = "actor_rollout_ref.actor"
_STRONG_KL = 0.05
"""A coefficient from which on the KL term outweighs a reward of order 1."""
_USUAL_CLIP, _TIGHT_CLIP = 0.2, 0.05
"""Clip range of a ratio of tokens, and one so tight that it clips what rounding does."""
_WARM = 10
"""Steps of warm-up that are cheap and usually enough."""

Rung = tuple[Stage, str | None]
"""A stage and its change; None where the configuration has it already."""


def ladder(rungs: Iterable[Rung]) -> Experiment:
    """The open changes in tuning order: the first one is the experiment, the rest follow it."""
    ordered = sorted(rungs, key=lambda rung: STAGES.index(rung[0]))
    stages: list[Stage] = [stage for stage, change in ordered if change is not None]
    changes = [change for _, change in ordered if change is not None]
    assert changes, "a ladder without a rung"
    return Experiment(stage=stages[0], change=changes[0], then=tuple(changes[1:]))


def smaller_updates(record: RunRecord) -> Experiment:
    """For a policy that changes too much in a step."""
    config = record.config
    return ladder(
        [
            ("clip and KL", more_kl(config)),
            ("clip and KL", _narrower_clip(config)),
            ("learning rate", _critic_rate(record)),
            ("learning rate", _actor_rate(config)),
            ("learning rate", _warm_up(config)),
            ("loss mode", _loss_mode(config, "gspo")),
        ]
    )


def less_clipping(record: RunRecord) -> Experiment:
    """For an update of which most is clipped: a usual range first, then smaller steps."""
    actor = record.config.actor_rollout_ref.actor
    by_sequence = actor.policy_loss.loss_mode == "gspo"  # its ranges are a thousand times tighter
    if actor.clip_ratio >= _TIGHT_CLIP or by_sequence:
        return smaller_updates(record)
    rest = smaller_updates(record)
    wider = f"{_ACTOR}.clip_ratio={_USUAL_CLIP:g}"
    return Experiment(stage="clip and KL", change=wider, then=(rest.change, *rest.then))


def more_exploration(record: RunRecord) -> Experiment:
    """For a policy that has stopped exploring."""
    config = record.config
    return ladder(
        [
            ("clip and KL", _clip_higher(config)),
            ("clip and KL", more_kl(config)),
            ("learning rate", _critic_rate(record)),
            ("learning rate", _actor_rate(config)),
            ("loss mode", _loss_mode(config, "clip_cov")),
        ]
    )


def slower_critic(record: RunRecord) -> Experiment:
    """For a critic that does not follow the returns."""
    critic, config = record.config.critic, record.config
    clip = f"critic.cliprange_value={(critic.cliprange_value or 1.0) / 2:g}"
    warm_up = f"trainer.critic_warmup={_WARM}" if config.trainer.critic_warmup < _WARM else None
    return ladder(
        [
            ("clip and KL", clip),
            ("learning rate", _critic_rate(record)),
            ("learning rate", warm_up),
            ("learning rate", _actor_rate(config)),
        ]
    )


def longer_budget(record: RunRecord) -> Experiment:
    """For answers that do not fit: memory first, then length, then a price on length."""
    config = record.config
    model, data = config.actor_rollout_ref.model, config.data
    save = None
    if not model.enable_gradient_checkpointing:
        save = "actor_rollout_ref.model.enable_gradient_checkpointing=true, to make room"
    longer = f"data.max_response_length={2 * data.max_response_length}, if `luyen check` finds room"
    return ladder([("memory", longer), ("memory", save), ("clip and KL", _price(config))])


def shorter_answers(record: RunRecord) -> Experiment:
    """For responses that grow without a gain in reward."""
    config = record.config
    return ladder(
        [
            ("clip and KL", _price(config)),
            ("clip and KL", more_kl(config)),
            ("learning rate", _critic_rate(record)),
            ("learning rate", _actor_rate(config)),
            ("loss mode", f"{_ACTOR}.loss_agg_mode=token-mean, which gives long answers no rebate"),
        ]
    )


def repair(change: str) -> Experiment:
    """For a defect, which is fixed before anything is tuned."""
    return Experiment(stage="repair", change=change)


def change_data(change: str, *then: str) -> Experiment:
    """For rows and rewards without a useful training signal."""
    return Experiment(stage="data", change=change, then=then)


def _price(config: RunConfig) -> str | None:
    """A penalty close to the longest answer (DAPO's)."""
    if config.reward.overlong_buffer.enable:
        return None
    return "reward.reward_manager.name=dapo with reward.overlong_buffer.enable=true"


def more_kl(config: RunConfig) -> str | None:
    """A KL term, or a larger one; None where it is strong already."""
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    if actor.use_kl_loss:
        coef = actor.kl_loss_coef
        return f"{_ACTOR}.kl_loss_coef={3 * coef:g}" if 0 < coef < _STRONG_KL else None
    if algorithm.use_kl_in_reward:
        coef = algorithm.kl_ctrl.kl_coef
        return f"algorithm.kl_ctrl.kl_coef={3 * coef:g}" if 0 < coef < _STRONG_KL else None
    return f"{_ACTOR}.use_kl_loss=true with {_ACTOR}.kl_loss_coef=0.001"


def _narrower_clip(config: RunConfig) -> str | None:
    clip = config.actor_rollout_ref.actor.clip_ratio
    return f"{_ACTOR}.clip_ratio={clip / 2:g}" if clip > 0.1 else None


def _clip_higher(config: RunConfig) -> str | None:
    """Room for unlikely tokens to become likelier (DAPO's clip-higher)."""
    actor = config.actor_rollout_ref.actor
    is_wide = (actor.clip_ratio_high or actor.clip_ratio) >= 0.28
    return None if is_wide else f"{_ACTOR}.clip_ratio_high=0.28"


def _critic_rate(record: RunRecord) -> str | None:
    if not record.has_critic:
        return None
    return f"critic.optim.lr={record.config.critic.optim.lr / 2:g}"


def _actor_rate(config: RunConfig) -> str:
    return f"{_ACTOR}.optim.lr={config.actor_rollout_ref.actor.optim.lr / 2:g}"


def _warm_up(config: RunConfig) -> str | None:
    optim = config.actor_rollout_ref.actor.optim
    has_some = optim.lr_warmup_steps > 0 or (
        optim.lr_warmup_steps < 0 and optim.lr_warmup_steps_ratio > 0
    )
    return None if has_some else f"{_ACTOR}.optim.lr_warmup_steps={_WARM}"


def _loss_mode(config: RunConfig, name: str) -> str | None:
    policy_loss = config.actor_rollout_ref.actor.policy_loss
    return None if policy_loss.loss_mode == name else f"{_ACTOR}.policy_loss.loss_mode={name}"
