"""The knobs of the chosen algorithm, taken from the configuration by their own names."""

from typing import Any

from luyen.config.catalog import EstimatorFacts, LossFacts
from luyen.config.schema.run import RunConfig


def estimator_knobs(config: RunConfig, facts: EstimatorFacts) -> dict[str, Any]:
    """Keyword arguments of the advantage estimator; an empty list stands for its default.

    One that makes pairs reads how they are compared from `preference`.
    """
    given = {**dict(config.preference), **dict(config.algorithm)}
    return {name: given[name] if given[name] != () else None for name in facts.knobs}


def loss_knobs(config: RunConfig, facts: LossFacts) -> dict[str, Any]:
    """Keyword arguments of the policy loss; a null `clip_ratio_c` leaves the loss its own."""
    actor = config.actor_rollout_ref.actor
    given = {
        **dict(actor),
        **dict(actor.policy_loss),
        **dict(config.algorithm.rollout_correction),
    }
    own = {"clip_ratio_c"} if actor.clip_ratio_c is None else set[str]()
    return {name: given[name] for name in facts.knobs if name not in own}
