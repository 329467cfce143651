"""`actor_rollout_ref.actor`: batches, loss and optimizer of the policy update."""

from typing import Literal

from luyen.config.schema.block import Block, block, key
from luyen.config.schema.derived import MINI_BATCH_WORDS
from luyen.config.schema.fsdp import Fsdp
from luyen.config.schema.optim import Optim

Aggregation = Literal[
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
]


class PolicyLoss(Block):
    """Which policy loss, and the knobs that only some losses have."""

    loss_mode: str = key("vanilla", "Name of a registered policy loss.")
    clip_cov_ratio: float = key(2e-4, "clip_cov: share of tokens set aside.", gt=0, le=1)
    clip_cov_lb: float = key(1.0, "clip_cov: covariance above which a token may be set aside.")
    clip_cov_ub: float = key(5.0, "clip_cov: covariance below which a token may be set aside.")
    kl_cov_ratio: float = key(2e-4, "kl_cov: share of tokens that get a KL penalty.", gt=0, le=1)
    ppo_kl_coef: float = key(0.1, "kl_cov: weight of that penalty.", ge=0)
    dro_beta: float | None = key(None, "dro: weight of the quadratic term; no default.", gt=0)
    ratio_cap: float | None = key(
        None, "vanilla, gspo: upper cap of the unclipped ratio (TRL's `delta`).", gt=1
    )
    cispo_cap: float | None = key(
        None, "cispo: absolute cap of the ratio without a lower bound (TRL's form).", gt=0
    )
    vespo_k_pos: float = key(2.0, "vespo: k where the advantage is not negative.", ge=0)
    vespo_lambda_pos: float = key(3.0, "vespo: λ where the advantage is not negative.", gt=0)
    vespo_k_neg: float = key(3.0, "vespo: k where the advantage is negative.", ge=0)
    vespo_lambda_neg: float = key(2.0, "vespo: λ where the advantage is negative.", gt=0)


class AdaptiveEntropy(Block):
    """An entropy coefficient that follows a target."""

    enable: bool = key(False, "Move the entropy coefficient towards a target entropy.")
    target: float = key(0.2, "Entropy to hold, in nats a token.", ge=0)
    delta: float = key(0.005, "Change of the coefficient at each optimizer step.", gt=0)
    min: float = key(0.0, "Smallest coefficient.", ge=0)
    max: float = key(1.0, "Largest coefficient.", ge=0)


class Actor(Block):
    """The policy update."""

    strategy: Literal["auto", "single", "fsdp", "fsdp2"] = key(
        "auto", "Training engine; auto: single for one device, fsdp2 for more. fsdp means fsdp2."
    )
    fsdp_config: Fsdp = block(Fsdp, "How weights are sharded over several devices.")
    ppo_mini_batch_size: int = key(
        256,
        "Prompts of one optimizer step, over the whole cluster.",
        derived=MINI_BATCH_WORDS,
        ge=1,
    )
    ppo_micro_batch_size_per_gpu: int | None = key(
        None, "Sequences of one forward pass on one device, when `use_dynamic_bsz` is off.", ge=1
    )
    use_dynamic_bsz: bool = key(True, "Fill micro-batches by tokens instead of counting sequences.")
    ppo_max_token_len_per_gpu: int = key(
        16384, "Hard token budget of a micro-batch, when `use_dynamic_bsz` is on.", ge=1
    )
    ppo_epochs: int = key(1, "Passes over the samples of a step.", ge=1)
    shuffle: bool = key(False, "Draw mini-batches in a seeded random order.")
    policy_loss: PolicyLoss = block(PolicyLoss, "Which policy loss, and its own knobs.")
    clip_ratio: float = key(0.2, "Clip range of the ratio on both sides.", gt=0)
    clip_ratio_low: float | None = key(None, "Lower clip range; null: `clip_ratio`.", gt=0)
    clip_ratio_high: float | None = key(None, "Upper clip range; null: `clip_ratio`.", gt=0)
    clip_ratio_c: float | None = key(
        None, "Dual clip or ratio cap; null: the loss's own (vanilla 3, dppo 20).", gt=1
    )
    tau_pos: float = key(1.0, "sapo: temperature where the advantage is positive.", gt=0)
    tau_neg: float = key(1.05, "sapo: temperature elsewhere.", gt=0)
    loss_agg_mode: Aggregation | None = key(
        None, "How token losses become one number; null: the loss's own aggregation."
    )
    loss_scale_factor: float | None = key(
        None, "Divisor of seq-mean-token-sum-norm; null: `data.max_response_length`.", gt=0
    )
    entropy_coeff: float = key(0.0, "Weight of the entropy bonus.")
    adaptive_entropy: AdaptiveEntropy = block(AdaptiveEntropy, "A coefficient with a target.")
    use_kl_loss: bool = key(False, "Add a KL term to the reference policy to the loss.")
    kl_loss_coef: float = key(0.001, "Weight of the KL term in the loss.", ge=0)
    kl_loss_type: str = key("low_var_kl", "Estimator of that KL; a trailing + is straight-through.")
    calculate_sum_pi_squared: bool = key(
        False, "Record Σπ² of each token, which the optimal token baselines need."
    )
    optim: Optim = block(Optim, "Optimizer and schedule.")
