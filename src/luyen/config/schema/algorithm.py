"""`algorithm`, `critic`, and the blocks `sft`, `preference`, `reward_training` and `distill`."""

from typing import Literal

from luyen.config.schema.actor_rollout_ref import Aggregation, CriticOptimConfig
from luyen.config.schema.block import (
    CORRECTION_WORDS,
    ESTIMATOR_WORDS,
    MOST_DEVICES,
    MOST_MACHINES,
    Block,
    Names,
    Numbers,
    block,
    key,
)


class KlCtrlConfig(Block):
    """The coefficient of the KL term in the reward."""

    type: Literal["fixed", "adaptive"] = key("fixed", "Hold the coefficient, or follow a target.")
    kl_coef: float = key(0.001, "Coefficient, or where an adaptive one starts.", ge=0)
    horizon: int = key(10000, "adaptive: samples over which a correction is spread.", ge=1)
    target_kl: float = key(0.1, "adaptive: KL to hold.", gt=0)


class FilterGroupsConfig(Block):
    """Dynamic sampling: leave out groups that teach nothing."""

    enable: bool = key(False, "Drop groups whose samples all score the same, and generate more.")
    metric: str | None = key(None, "Score that must differ inside a group, e.g. `acc` or `reward`.")
    max_num_gen_batches: int = key(
        0,
        "Most batches generated for a step: the run stops if they do not fill it; 0: no limit.",
        ge=0,
    )


class RolloutCorrectionConfig(Block):
    """What to do about samples whose sampler was not the current policy."""

    rollout_is: Literal["token", "sequence", "geometric"] | None = key(
        None,
        "Importance weights: per token, per sequence, or length-normalised; null: none.",
        derived=CORRECTION_WORDS,
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


class AlgorithmConfig(Block):
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
    kl_ctrl: KlCtrlConfig = block(KlCtrlConfig, "Its coefficient.")
    filter_groups: FilterGroupsConfig = block(FilterGroupsConfig, "Dynamic sampling.")
    rollout_correction: RolloutCorrectionConfig = block(
        RolloutCorrectionConfig, "Off-policy correction."
    )


# `critic`: the value model of estimators that need one.


class CriticModelConfig(Block):
    """The critic's weights."""

    path: str | None = key(None, "Directory or hub id; null: as the actor, with a value head.")


class CriticConfig(Block):
    """The value model and its update."""

    enable: bool | None = key(None, "Train a critic; null: exactly when the estimator needs one.")
    model: CriticModelConfig = block(CriticModelConfig, "The critic's weights.")
    ppo_mini_batch_size: int | None = key(
        None, "Prompts of one optimizer step; null: as the actor.", ge=1
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences of one forward pass; null: as the actor.", ge=1
    )
    use_dynamic_bsz: bool | None = key(None, "Fill micro-batches by tokens; null: as the actor.")
    ppo_max_token_len_per_gpu: int | None = key(
        None, "Token budget of a micro-batch; null: as the actor.", ge=1
    )
    ppo_epochs: int | None = key(None, "Passes over a step's samples; null: as the actor.", ge=1)
    cliprange_value: float | None = key(
        0.5,
        "How far a value may move from its old one before the loss clips; null: no clip.",
        gt=0,
    )
    loss_agg_mode: Aggregation | None = key(None, "Aggregation; null: as the actor.")
    nnodes: int = key(
        0,
        "Machines that only the critic has; 0: it shares the devices of the actor.",
        ge=0,
        le=MOST_MACHINES,
    )
    n_gpus_per_node: int | None = key(
        None,
        "Devices of each of these machines; null: `trainer.n_gpus_per_node`.",
        ge=1,
        le=MOST_DEVICES,
    )
    optim: CriticOptimConfig = block(CriticOptimConfig, "Optimizer and schedule.")


# `sft`: learning from the conversations that are given.


class SftConfig(Block):
    """Which tokens of a conversation are learned, and how."""

    loss: str = key(
        "nll",
        "nll: negative log-likelihood; dft: each token's is weighted by its own probability, "
        "without a gradient through the weight (arXiv:2508.05629).",
    )
    learn: Literal["assistant", "last_turn", "completion"] = key(
        "assistant",
        "Which tokens count. assistant: all that the assistant says; last_turn: its last turn; "
        "completion: what follows the last message of another role, which in rows of prompt and "
        "completion is the completion.",
    )


# `preference`: learning which of two answers is better, or whether one is good.


class PreferenceConfig(Block):
    """A loss over pairs or over marked answers, or a mixture of such."""

    loss_type: Names = key(
        ("sigmoid",),
        "Registered preference loss, or several that are added up: sigmoid (DPO), ipo, hinge, "
        "robust, exo_pair, nca_pair, bco_pair, sppo_hard, aot, aot_unpaired, apo_zero, apo_down, "
        "discopop, sigmoid_norm, sft, orpo, cpo, simpo, alphapo; of marked answers kto, "
        "apo_zero_unpaired, bco.",
    )
    loss_weights: Numbers = key((), "Weight of each loss of a mixture; empty: 1.")
    beta: float | None = key(
        None, "How strongly the reference binds, or the scale of the reward; null: 0.1.", gt=0
    )
    label_smoothing: float | None = key(
        None, "Chance that the two answers of a pair were swapped; null: 0.", ge=0, le=0.5
    )
    f_divergence_type: (
        Literal["reverse_kl", "forward_kl", "js_divergence", "alpha_divergence"] | None
    ) = key(None, "Divergence from the reference behind the loss; null: reverse_kl.")
    f_alpha_divergence_coef: float | None = key(None, "alpha of alpha_divergence; null: 0.5.", gt=0)
    discopop_tau: float | None = key(None, "discopop: temperature; null: 0.05.", gt=0)
    cpo_alpha: float | None = key(
        None, "cpo, simpo: weight of the likelihood of chosen answers; null: the loss's own.", ge=0
    )
    simpo_gamma: float | None = key(None, "simpo, alphapo: target margin; null: 0.5.")
    alpha: float | None = key(None, "alphapo: shape of the reward; null: 0.25.")
    desirable_weight: float | None = key(
        None, "kto, apo_zero_unpaired, bco: weight of good answers; null: 1.", ge=0
    )
    undesirable_weight: float | None = key(
        None, "kto, apo_zero_unpaired, bco: weight of bad answers; null: 1.", ge=0
    )
    ld_alpha: float | None = key(
        None,
        "Weight of the tokens that only the longer answer of a pair has (LD-DPO); null: 1.",
        ge=0,
        le=1,
    )
    use_margins: bool = key(False, "Use the column `margin`, where a loss reads margins.")
    reference: Literal["live", "precomputed"] = key(
        "live",
        "Where the reference's log-probabilities come from. live: from a frozen copy at every "
        "step, or from the policy with its adapter off; precomputed: once for all rows before the "
        "first step, so that no copy stays in memory.",
    )


# `reward_training`: training a reward model.


class RewardTrainingConfig(Block):
    """What a reward model learns from."""

    objective: Literal["bradley_terry", "regression", "process"] = key(
        "bradley_terry",
        "bradley_terry: which of two answers is better; regression: the number that a row gives an "
        "answer; process: whether each step of an answer is right.",
    )
    center_rewards_coefficient: float = key(
        0.0,
        "bradley_terry: weight of the squared sum of both scores, which keeps scores around 0.",
        ge=0,
    )
    use_margins: bool = key(
        False, "bradley_terry: demand the column `margin` between the two scores."
    )
    target_key: str = key(
        "score",
        "regression: column with the number; rows that have a `label` instead count as 1 and 0.",
    )


# `distill`: learning from a teacher, on given answers or on the student's own.


class DistillConfig(Block):
    """A teacher, and what of it the student learns.

    `trainer.stage: distill` learns on the answers of the rows. `on_policy` puts the teacher into
    `trainer.stage: rl`, where the student learns on what it samples.
    """

    teacher_path: str | None = key(
        None,
        "Directory, hub id or `builtin://` name of the teacher, whose tokenizer must be the "
        "student's.",
    )
    divergence: Literal["reverse_kl", "forward_kl", "jsd", "topk_forward_kl"] = key(
        "forward_kl",
        "What is made small at each token of a given answer. reverse_kl: KL(student, teacher); "
        "forward_kl: KL(teacher, student); jsd: between the two; topk_forward_kl: forward_kl over "
        "the teacher's likeliest tokens and one bucket for the rest.",
    )
    beta: float = key(0.5, "jsd: share of the teacher in the middle distribution.", ge=0, le=1)
    top_k: int = key(64, "topk_forward_kl: likeliest tokens of the teacher to compare.", ge=1)
    temperature: float = key(
        1.0, "Both distributions over given answers are flattened by it before they meet.", gt=0
    )
    nll_weight: float = key(
        0.0, "Weight of the likelihood of the given answers, added to the divergence.", ge=0
    )
    on_policy: bool = key(
        False,
        "In `trainer.stage: rl`: how much likelier than the student the teacher finds each sampled "
        "token is its advantage.",
    )
    task_weight: float = key(
        0.0,
        "on_policy: weight of the advantages of `algorithm.adv_estimator`, added to the teacher's; "
        "at 0 training needs no reward and computes none.",
        ge=0,
    )
