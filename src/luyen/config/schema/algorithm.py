"""`algorithm`: what is learned: credit, KL, and the correction for off-policy samples."""

from typing import Literal

from luyen.config.schema.block import Block, Names, Numbers, block, key
from luyen.config.schema.derived import ESTIMATOR_WORDS


class KlCtrl(Block):
    """The coefficient of the KL term in the reward."""

    type: Literal["fixed", "adaptive"] = key("fixed", "Hold the coefficient, or follow a target.")
    kl_coef: float = key(0.001, "Coefficient, or where an adaptive one starts.", ge=0)
    horizon: int = key(10000, "adaptive: samples over which a correction is spread.", ge=1)
    target_kl: float = key(0.1, "adaptive: KL to hold.", gt=0)


class FilterGroups(Block):
    """Dynamic sampling: leave out groups that teach nothing."""

    enable: bool = key(False, "Drop groups whose samples all score the same, and draw others.")
    metric: str | None = key(None, "Score that must differ inside a group, e.g. `acc` or `reward`.")
    max_num_gen_batches: int = key(
        0, "Most batches drawn for a step: the run stops if they do not fill it; 0: no limit.", ge=0
    )


class RolloutCorrection(Block):
    """What to do about samples whose sampler was not the current policy."""

    rollout_is: Literal["token", "sequence", "geometric"] | None = key(
        None, "Importance weights: per token, per sequence, or length-normalised; null: none."
    )
    rollout_is_threshold: float | str = key(
        2.0, "A number truncates weights; `lo_hi` zeroes them outside the band (IcePop)."
    )
    rollout_is_floor: float | None = key(
        None, "Lower end of a two-sided truncation (TRL's form).", gt=0
    )
    rollout_is_batch_normalize: bool = key(False, "Divide weights by their mean over the step.")
    rollout_rs: str | None = key(
        None, "Rejection criteria, separated by commas; all must pass; null: none."
    )
    rollout_rs_threshold: float | str | None = key(
        None, "Bound of each criterion: one for all, or one each, separated by commas."
    )
    bypass_mode: bool = key(
        False, "Take the sampler's log-probabilities as the old ones and skip that pass."
    )
    loss_type: Literal["ppo_clip", "reinforce"] = key("ppo_clip", "Loss in bypass mode.")


class Algorithm(Block):
    """Credit assignment, KL in the reward, off-policy correction."""

    adv_estimator: str = key(
        "gae", "Name of a registered advantage estimator.", derived=ESTIMATOR_WORDS
    )
    gamma: float = key(1.0, "Discount of later rewards.", ge=0, le=1)
    lam: float = key(1.0, "GAE's λ.", ge=0, le=1)
    whiten_advantages: bool = key(True, "gae: whiten advantages over the step.")
    norm_adv_by_std_in_grpo: bool = key(True, "Divide by the group's std; false is Dr. GRPO.")
    std_epsilon: float = key(1e-6, "Added to that std (TRL: 1e-4).", gt=0)
    gdpo_reward_keys: Names = key((), "gdpo: reward components to use; empty: all.")
    gdpo_reward_weights: Numbers = key((), "gdpo: weight of each component; empty: ones.")
    handle_zero_tail: bool = key(
        True, "Token baselines: no baseline where only the longest sample is left."
    )
    use_kl_in_reward: bool = key(False, "Subtract a KL term from the reward.")
    kl_penalty: str = key("kl", "Estimator of that KL.")
    kl_ctrl: KlCtrl = block(KlCtrl, "Its coefficient.")
    filter_groups: FilterGroups = block(FilterGroups, "Dynamic sampling.")
    rollout_correction: RolloutCorrection = block(RolloutCorrection, "Off-policy correction.")
