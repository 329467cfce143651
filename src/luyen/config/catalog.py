"""What `check` knows about the algorithms without importing them (they import torch).

The mathematics registers functions under these names; a test holds the two lists equal, knobs
included. A plugin declares the same facts as literals in its `register(...)` call.
"""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFacts:
    """What an advantage estimator needs from the run.

    Example:
        >>> estimator_facts("rloo").baseline
        'leave-one-out'
    """

    baseline: str
    """What is subtracted from the reward: the baseline mode in force."""
    group_relative: bool = False
    """Whether it compares the samples of a group, so that a group of one teaches nothing."""
    needs: tuple[str, ...] = ()
    """Streams beyond rewards: `values`, `baselines`, `components`, `sum_pi_squared`, `old_logp`."""
    knobs: tuple[str, ...] = ()
    """Keys of the `algorithm` block, or of `preference`, that it reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What a policy loss needs from the run.

    Example:
        >>> loss_facts("gspo").aggregation
        'seq-mean-token-mean'
    """

    aggregation: str = "token-mean"
    """The aggregation in force when `loss_agg_mode` is null."""
    needs: tuple[str, ...] = ()
    """Streams beyond the common ones: `rollout_logp`."""
    knobs: tuple[str, ...] = ()
    """Keys of the `actor`, `policy_loss` and `rollout_correction` blocks that it reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceFacts:
    """What a preference loss needs from the run.

    Example:
        >>> PREFERENCE_LOSSES["simpo"].reference
        False
    """

    kind: str = "pair"
    """What it reads: a `pair` of answers, or `unpaired` answers that are marked good or bad."""
    reference: bool = True
    """Whether it compares the policy with a reference."""
    needs_step: bool = False
    """Whether it looks at the sums of the whole optimizer step before the step is split."""
    needs: tuple[str, ...] = ()
    """Numbers beyond the common ones: `mismatched`."""
    optional: tuple[str, ...] = ()
    """Numbers that it reads where they are given: `margins`, `density_ratio`, `history`."""
    knobs: tuple[str, ...] = ()
    """Hyper-parameters that it reads, by the name of their config key."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a rollout engine needs, and what it can do.

    Example:
        >>> ROLLOUT_ENGINES["native"].splits
        False
    """

    package: str | None = None
    """Python package that must be installed."""
    extra: str | None = None
    """Extra of this package that brings it."""
    splits: bool = False
    """Whether it can lay one copy of the model over several devices."""


ROLLOUT_ENGINES: dict[str, EngineFacts] = {"native": EngineFacts(), "hf": EngineFacts()}

ADV_ESTIMATORS: dict[str, EstimatorFacts] = {
    "gae": EstimatorFacts(
        baseline="value", needs=("values",), knobs=("gamma", "lam", "whiten_advantages")
    ),
    "grpo": EstimatorFacts(
        baseline="group mean",
        group_relative=True,
        knobs=("norm_adv_by_std_in_grpo", "std_epsilon"),
    ),
    "turn_grpo": EstimatorFacts(
        baseline="per turn",
        group_relative=True,
        knobs=("gamma", "norm_adv_by_std_in_grpo", "std_epsilon"),
    ),
    "grpo_passk": EstimatorFacts(
        baseline="runner-up",
        group_relative=True,
        knobs=("norm_adv_by_std_in_grpo", "std_epsilon"),
    ),
    "gdpo": EstimatorFacts(
        baseline="group mean",
        group_relative=True,
        needs=("components",),
        knobs=("gdpo_reward_keys", "gdpo_reward_weights", "std_epsilon"),
    ),
    "reinforce": EstimatorFacts(baseline="none", knobs=("gamma",)),
    "reinforce_plus_plus": EstimatorFacts(baseline="none", knobs=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorFacts(baseline="group mean", group_relative=True),
    "rloo": EstimatorFacts(baseline="leave-one-out", group_relative=True),
    "opo": EstimatorFacts(baseline="length-weighted", group_relative=True),
    "remax": EstimatorFacts(baseline="greedy", needs=("baselines",)),
    "gpg": EstimatorFacts(baseline="group mean", group_relative=True),
    "online_dpo": EstimatorFacts(
        baseline="pairs",
        group_relative=True,
        needs=("old_logp",),
        knobs=(
            "loss_type",
            "loss_weights",
            "beta",
            "label_smoothing",
            "f_divergence_type",
            "f_alpha_divergence_coef",
            "discopop_tau",
            "cpo_alpha",
            "simpo_gamma",
            "alpha",
            "ld_alpha",
        ),
    ),
    "optimal_token_baseline": EstimatorFacts(
        baseline="per token",
        group_relative=True,
        needs=("sum_pi_squared",),
        knobs=("handle_zero_tail",),
    ),
    "tir_optimal_token_baseline": EstimatorFacts(
        baseline="per token",
        group_relative=True,
        needs=("sum_pi_squared",),
        knobs=("handle_zero_tail",),
    ),
}

_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high")
_CORRECTION = (
    "rollout_is",
    "rollout_is_threshold",
    "rollout_is_floor",
    "rollout_is_batch_normalize",
    "rollout_rs",
    "rollout_rs_threshold",
    "loss_type",
)

POLICY_LOSSES: dict[str, LossFacts] = {
    "vanilla": LossFacts(knobs=(*_CLIP, "clip_ratio_c", "ratio_cap")),
    "gpg": LossFacts(),
    "reinforce": LossFacts(),
    "gspo": LossFacts(aggregation="seq-mean-token-mean", knobs=(*_CLIP, "ratio_cap")),
    "gspo_token": LossFacts(aggregation="seq-mean-token-mean", knobs=(*_CLIP, "ratio_cap")),
    "geo_mean": LossFacts(aggregation="seq-mean-token-mean", knobs=_CLIP),
    "cispo": LossFacts(knobs=(*_CLIP, "cispo_cap")),
    "sapo": LossFacts(aggregation="seq-mean-token-mean", knobs=("tau_pos", "tau_neg")),
    "clip_cov": LossFacts(knobs=(*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    "kl_cov": LossFacts(knobs=("kl_cov_ratio", "ppo_kl_coef")),
    "dppo_tv": LossFacts(knobs=(*_CLIP, "clip_ratio_c")),
    "dppo_kl": LossFacts(knobs=(*_CLIP, "clip_ratio_c")),
    "dro": LossFacts(knobs=("dro_beta",)),
    "vespo": LossFacts(
        knobs=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    ),
    "bypass_mode": LossFacts(
        needs=("rollout_logp",), knobs=(*_CLIP, "clip_ratio_c", "ratio_cap", *_CORRECTION)
    ),
}

_DIVERGENCE = ("f_divergence_type", "f_alpha_divergence_coef")
_MARKED = ("beta", "desirable_weight", "undesirable_weight")
_NOISY = ("beta", "label_smoothing")

PREFERENCE_LOSSES: dict[str, PreferenceFacts] = {
    "sigmoid": PreferenceFacts(optional=("margins",), knobs=(*_NOISY, *_DIVERGENCE)),
    "sigmoid_norm": PreferenceFacts(optional=("margins",), knobs=("beta", *_DIVERGENCE)),
    "hinge": PreferenceFacts(optional=("margins",), knobs=("beta", *_DIVERGENCE)),
    "ipo": PreferenceFacts(knobs=("beta", *_DIVERGENCE)),
    "robust": PreferenceFacts(optional=("margins",), knobs=(*_NOISY, *_DIVERGENCE)),
    "exo_pair": PreferenceFacts(optional=("margins",), knobs=(*_NOISY, *_DIVERGENCE)),
    "discopop": PreferenceFacts(
        optional=("margins",), knobs=("beta", "discopop_tau", *_DIVERGENCE)
    ),
    "sft": PreferenceFacts(reference=False),
    "nca_pair": PreferenceFacts(knobs=("beta",)),
    "bco_pair": PreferenceFacts(knobs=("beta",)),
    "sppo_hard": PreferenceFacts(knobs=("beta",)),
    "apo_zero": PreferenceFacts(knobs=("beta",)),
    "apo_down": PreferenceFacts(knobs=("beta",)),
    "aot": PreferenceFacts(needs_step=True, knobs=_NOISY),
    "aot_unpaired": PreferenceFacts(needs_step=True, knobs=_NOISY),
    "orpo": PreferenceFacts(reference=False, knobs=("beta",)),
    "cpo": PreferenceFacts(reference=False, knobs=(*_NOISY, "cpo_alpha")),
    "simpo": PreferenceFacts(reference=False, knobs=(*_NOISY, "simpo_gamma", "cpo_alpha")),
    "alphapo": PreferenceFacts(reference=False, knobs=(*_NOISY, "simpo_gamma", "alpha")),
    "kto": PreferenceFacts(kind="unpaired", needs=("mismatched",), knobs=_MARKED),
    "apo_zero_unpaired": PreferenceFacts(kind="unpaired", knobs=_MARKED),
    "bco": PreferenceFacts(
        kind="unpaired", needs_step=True, optional=("density_ratio", "history"), knobs=_MARKED
    ),
}

SUPERVISED_LOSSES = ("nll", "dft")

AGGREGATIONS = (
    "token-mean",
    "token-sum",
    "seq-mean-token-sum",
    "seq-mean-token-mean",
    "seq-mean-token-sum-norm",
)

KL_KINDS = tuple(
    kind + suffix
    for kind in ("k1", "kl", "abs", "k2", "mse", "k3", "low_var_kl", "full")
    for suffix in ("", "+")
)

REJECTION_CRITERIA = (
    *(f"token_k{i}" for i in (1, 2, 3)),
    *(f"seq_sum_k{i}" for i in (1, 2, 3)),
    *(f"seq_mean_k{i}" for i in (1, 2, 3)),
    *(f"seq_max_k{i}" for i in (2, 3)),
)


def estimator_facts(name: str) -> EstimatorFacts:
    """Facts of a built-in advantage estimator."""
    return ADV_ESTIMATORS[name]


def loss_facts(name: str) -> LossFacts:
    """Facts of a built-in policy loss."""
    return POLICY_LOSSES[name]


def own_aggregation(name: str) -> str:
    """The aggregation a built-in policy loss uses when none is asked for."""
    return POLICY_LOSSES[name].aggregation
