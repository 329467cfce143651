"""Which log-probabilities and values a step needs, decided once from the configuration."""

from dataclasses import dataclass
from typing import final

from luyen.config.catalog import EstimatorFacts
from luyen.config.plan import is_off_policy, needs_critic, needs_reference
from luyen.config.schema.run import RunConfig
from luyen.config.signals import has_teacher, is_teacher_alone


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What `annotate` must add to a batch.

    Example:
        >>> Needs(old_logp="skip", reference=False, values=False, sum_pi_squared=False,
        ...       baselines=False, components=False).old_logp
        'skip'
    """

    old_logp: str
    """`compute`; `rollout` (bypass mode: the sampler's own); or `skip`: the one optimizer step of a
    step starts from these very weights, so its own forward pass gives them."""
    reference: bool
    """Log-probabilities of the reference policy."""
    values: bool
    """Values of the critic."""
    sum_pi_squared: bool
    """Σπ² of each token."""
    baselines: bool
    """Rewards of greedy rollouts (ReMax)."""
    components: bool
    """Parts of the reward (GDPO)."""
    teacher: bool = False
    """Log-probabilities of the teacher."""
    reward: bool = True
    """Scores of rollouts; False: the teacher alone decides, and nobody judges them."""


def needs_of(config: RunConfig, estimator: EstimatorFacts) -> Needs:
    """The needs of a run."""
    is_judged = not is_teacher_alone(config)
    asked = estimator.needs if is_judged else ()
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode:
        old = "rollout"
    elif (
        is_off_policy(config)
        or correction.rollout_is is not None
        or correction.rollout_rs is not None
        or config.algorithm.use_kl_in_reward
        or not {"sum_pi_squared", "old_logp"}.isdisjoint(asked)
        or config.distill.on_policy
    ):
        old = "compute"
    else:
        old = "skip"
    return Needs(
        old_logp=old,
        reference=needs_reference(config),
        values=needs_critic(config, estimator),
        sum_pi_squared="sum_pi_squared" in asked,
        baselines="baselines" in asked,
        components="components" in asked,
        teacher=has_teacher(config),
        reward=is_judged,
    )
