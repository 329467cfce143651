"""The names that a key may hold where it is one of a list that plugins can add to."""

from luyen.config.catalog import KL_KINDS
from luyen.config.fields import FieldInfo
from luyen.config.plugins import LOGGERS, Known

_KNOWN = Known()
OPEN: dict[str, tuple[str, ...]] = {
    "algorithm.adv_estimator": tuple(_KNOWN.estimators),
    "algorithm.kl_penalty": KL_KINDS,
    "actor_rollout_ref.actor.kl_loss_type": KL_KINDS,
    "actor_rollout_ref.actor.policy_loss.loss_mode": tuple(_KNOWN.losses),
    "actor_rollout_ref.rollout.name": tuple(_KNOWN.engines),
    "actor_rollout_ref.rollout.multi_turn.format": _KNOWN.tool_formats,
    "data.sampler.name": _KNOWN.samplers,
    "preference.loss_type": tuple(_KNOWN.preference_losses),
    "reward.reward_manager.name": _KNOWN.reward_managers,
    "sft.loss": _KNOWN.supervised_losses,
    "trainer.logger": LOGGERS,
}
"""Key -> the names that come with Luyen."""


def choices_of(info: FieldInfo) -> tuple[str, ...]:
    """What a key may be, where it is one of a list; empty where it is anything else."""
    return OPEN.get(info.path, info.choices)
