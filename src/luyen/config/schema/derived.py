"""Values of keys that nobody wrote, where other keys decide them.

A key is declared with `derived=` and the words of its rule; here stands the rule. A value that was
written, in whatever file or on the command line, never changes. A stored configuration holds what
was derived, so that a run goes on with it.
"""

from typing import Any

from luyen.config.catalog import ADV_ESTIMATORS

GROUP = 8
"""Samples of each prompt where an estimator compares them."""
RATES = {"rl": 1e-6, "sft": 1e-5, "preference": 5e-7, "reward_model": 1e-5, "distill": 1e-5}
"""Stage -> peak learning rate of all weights."""
ADAPTER_FACTOR = 10
"""An adapter learns at so many times the rate of all weights."""
SAVE_LEAST, SAVE_MOST = 10, 50
"""Fewest and most steps between checkpoints."""
KEPT = 2
"""Checkpoints that stay where nobody said when to save."""

LR_WORDS = (
    "by stage: rl 1e-6, sft, reward_model and distill 1e-5, preference 5e-7; ten times that with "
    "an adapter (`model.lora_rank`)"
)
ESTIMATOR_WORDS = "`grpo` where `rollout.n` is above 1 and no key of `critic` is set, else `gae`"
N_WORDS = f"{GROUP} where `algorithm.adv_estimator` compares the samples of a prompt, else 1"
MINI_BATCH_WORDS = "`data.train_batch_size`: one optimizer step on all of it"
SAVE_WORDS = (
    f"a tenth of `total_training_steps`, but {SAVE_LEAST} to {SAVE_MOST}, and -1 in a run of fewer "
    f"than {SAVE_LEAST}; {SAVE_MOST} where that is not set"
)
KEPT_WORDS = f"{KEPT} where `save_freq` is not set either, else null"

_ONLINE = (
    "algorithm.adv_estimator",
    "actor_rollout_ref.rollout.n",
    "actor_rollout_ref.actor.ppo_mini_batch_size",
)
"""Keys that only online runs read."""


def derived_values(config: Any) -> dict[str, Any]:
    """Path -> value of every derived key that was not written in a `RunConfig`."""
    arr, trainer = config.actor_rollout_ref, config.trainer
    found: dict[str, Any] = {}
    if "adv_estimator" not in config.algorithm.model_fields_set:
        is_compared = arr.rollout.n > 1 and "n" in arr.rollout.model_fields_set
        has_critic = bool(config.critic.model_fields_set)
        found["algorithm.adv_estimator"] = "grpo" if is_compared and not has_critic else "gae"
    if "n" not in arr.rollout.model_fields_set:
        facts = ADV_ESTIMATORS.get(config.algorithm.adv_estimator)
        is_written = "adv_estimator" in config.algorithm.model_fields_set
        is_group = is_written and facts is not None and facts.group_relative
        found["actor_rollout_ref.rollout.n"] = GROUP if is_group else 1
    if "ppo_mini_batch_size" not in arr.actor.model_fields_set:
        found["actor_rollout_ref.actor.ppo_mini_batch_size"] = config.data.train_batch_size
    if "lr" not in arr.actor.optim.model_fields_set:
        factor = ADAPTER_FACTOR if arr.model.lora_rank > 0 else 1
        found["actor_rollout_ref.actor.optim.lr"] = float(f"{RATES[trainer.stage] * factor:.6g}")
    if "save_freq" not in trainer.model_fields_set:
        most = trainer.total_training_steps or SAVE_MOST * 10
        freq = min(max(most // 10, SAVE_LEAST), SAVE_MOST)
        found["trainer.save_freq"] = -1 if most < SAVE_LEAST else freq
        if "max_ckpt_to_keep" not in trainer.model_fields_set:
            found["trainer.max_ckpt_to_keep"] = KEPT
    return found


def derived_in_force(config: Any) -> dict[str, Any]:
    """The same without keys that a run of this stage does not read."""
    is_rl = config.trainer.stage == "rl"
    found = derived_values(config)
    return {p: value for p, value in found.items() if is_rl or p not in _ONLINE}
