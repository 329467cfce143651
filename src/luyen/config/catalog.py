"""What `check` knows about the algorithms without importing them (they import torch).

`luyen.algorithms` registers functions under these names; a test keeps both lists equal, parameters
included. A plugin declares the same facts as literals in its `register(...)` call.
"""

import math
from dataclasses import dataclass
from typing import final

from luyen.base.errors import UserError, did_you_mean


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EstimatorFacts:
    """What an advantage estimator needs from the run.

    Example:
        >>> ADV_ESTIMATORS["rloo"].baseline
        'leave-one-out'
    """

    baseline: str
    """What is subtracted from the reward: the baseline mode in force."""
    group_relative: bool = False
    """Whether it compares the samples of a group, so that a group of one teaches nothing."""
    needs: tuple[str, ...] = ()
    """Streams beyond rewards: `values`, `baselines`, `components`, `sum_pi_squared`, `old_logp`."""
    hparams: tuple[str, ...] = ()
    """Keys of the `algorithm` block, or of `preference`, that it reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LossFacts:
    """What a policy loss needs from the run.

    Example:
        >>> POLICY_LOSSES["gspo"].aggregation
        'seq-mean-token-mean'
    """

    aggregation: str = "token-mean"
    """The aggregation in force when `loss_agg_mode` is null."""
    needs: tuple[str, ...] = ()
    """Streams beyond the common ones: `rollout_logp`."""
    hparams: tuple[str, ...] = ()
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
    hparams: tuple[str, ...] = ()
    """Hyper-parameters that it reads, by the name of their config key."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFacts:
    """What a rollout engine needs, and what it can do.

    Example:
        >>> ROLLOUT_ENGINES["hf"].splits
        False
    """

    package: str | None = None
    """Python package that must be installed."""
    extra: str | None = None
    """Extra of this package that brings it."""
    splits: bool = False
    """Whether it can lay one copy of the model over several devices."""
    is_server: bool = False
    """Whether it generates in a server, whose arithmetic is not the trainer's."""
    server_module: str | None = None
    """Module that a run starts as the server; None: it starts none."""
    takes_weights: bool = True
    """Whether weights can be published to it; without them it samples from a fixed model."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingFacts:
    """What a training engine needs, and what it can do.

    Example:
        >>> TRAINING_ENGINES["single"].splits
        False
    """

    package: str | None = None
    """Python package that must be installed."""
    extra: str | None = None
    """Extra of this package that brings it."""
    splits: bool = False
    """Whether it trains on several devices."""


TRAINING_ENGINES: dict[str, TrainingFacts] = {
    "single": TrainingFacts(),
    "fsdp2": TrainingFacts(splits=True),
    "megatron": TrainingFacts(package="megatron", extra="megatron", splits=True),
}

READ_AS_FSDP2 = {
    "fsdp": "version 1 of FSDP; `fsdp2` shards the same way",
    "deepspeed": "ZeRO; `fsdp2` shards weights, gradients and optimizer state as its stage 3 does",
}
"""Strategies of other tools that are read as `fsdp2` -> what they are there."""


def training_engine(strategy: str, ranks: int) -> str:
    """The training engine of so many ranks: sharded over one device, weights are whole.

    Example:
        >>> training_engine("auto", 1), training_engine("deepspeed", 4), training_engine("mine", 4)
        ('single', 'fsdp2', 'mine')
    """
    if strategy in ("auto", "fsdp2", *READ_AS_FSDP2):
        return "fsdp2" if ranks > 1 else "single"
    return strategy


ROLLOUT_ENGINES: dict[str, EngineFacts] = {
    "native": EngineFacts(splits=True),
    "hf": EngineFacts(),
    "vllm": EngineFacts(
        splits=True, is_server=True, server_module="vllm.entrypoints.openai.api_server"
    ),
    "sglang": EngineFacts(splits=True, is_server=True, server_module="sglang.launch_server"),
    "openai": EngineFacts(is_server=True, takes_weights=False),
}

ADV_ESTIMATORS: dict[str, EstimatorFacts] = {
    "gae": EstimatorFacts(
        baseline="value", needs=("values",), hparams=("gamma", "lam", "whiten_advantages")
    ),
    "grpo": EstimatorFacts(
        baseline="group mean",
        group_relative=True,
        hparams=("norm_adv_by_std_in_grpo", "std_epsilon"),
    ),
    "turn_grpo": EstimatorFacts(
        baseline="per turn",
        group_relative=True,
        hparams=("gamma", "norm_adv_by_std_in_grpo", "std_epsilon"),
    ),
    "grpo_passk": EstimatorFacts(
        baseline="runner-up",
        group_relative=True,
        hparams=("norm_adv_by_std_in_grpo", "std_epsilon"),
    ),
    "gdpo": EstimatorFacts(
        baseline="group mean",
        group_relative=True,
        needs=("components",),
        hparams=("gdpo_reward_keys", "gdpo_reward_weights", "std_epsilon"),
    ),
    "reinforce": EstimatorFacts(baseline="none", hparams=("gamma",)),
    "reinforce_plus_plus": EstimatorFacts(baseline="none", hparams=("gamma",)),
    "reinforce_plus_plus_baseline": EstimatorFacts(baseline="group mean", group_relative=True),
    "rloo": EstimatorFacts(baseline="leave-one-out", group_relative=True),
    "opo": EstimatorFacts(baseline="length-weighted", group_relative=True),
    "remax": EstimatorFacts(baseline="greedy", needs=("baselines",)),
    "gpg": EstimatorFacts(baseline="group mean", group_relative=True),
    "online_dpo": EstimatorFacts(
        baseline="pairs",
        group_relative=True,
        needs=("old_logp",),
        hparams=(
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
        hparams=("handle_zero_tail",),
    ),
    "tir_optimal_token_baseline": EstimatorFacts(
        baseline="per token",
        group_relative=True,
        needs=("sum_pi_squared",),
        hparams=("handle_zero_tail",),
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
    "vanilla": LossFacts(hparams=(*_CLIP, "clip_ratio_c", "ratio_cap")),
    "gpg": LossFacts(),
    "reinforce": LossFacts(),
    "gspo": LossFacts(aggregation="seq-mean-token-mean", hparams=(*_CLIP, "ratio_cap")),
    "gspo_token": LossFacts(aggregation="seq-mean-token-mean", hparams=(*_CLIP, "ratio_cap")),
    "geo_mean": LossFacts(aggregation="seq-mean-token-mean", hparams=_CLIP),
    "cispo": LossFacts(hparams=(*_CLIP, "cispo_cap")),
    "sapo": LossFacts(aggregation="seq-mean-token-mean", hparams=("tau_pos", "tau_neg")),
    "clip_cov": LossFacts(hparams=(*_CLIP, "clip_cov_ratio", "clip_cov_lb", "clip_cov_ub")),
    "kl_cov": LossFacts(hparams=("kl_cov_ratio", "ppo_kl_coef")),
    "dppo_tv": LossFacts(hparams=(*_CLIP, "clip_ratio_c")),
    "dppo_kl": LossFacts(hparams=(*_CLIP, "clip_ratio_c")),
    "dro": LossFacts(hparams=("dro_beta",)),
    "vespo": LossFacts(
        hparams=("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg")
    ),
    "bypass_mode": LossFacts(
        needs=("rollout_logp",), hparams=(*_CLIP, "clip_ratio_c", "ratio_cap", *_CORRECTION)
    ),
}

_DIVERGENCE = ("f_divergence_type", "f_alpha_divergence_coef")
_MARKED = ("beta", "desirable_weight", "undesirable_weight")
_NOISY = ("beta", "label_smoothing")

PREFERENCE_LOSSES: dict[str, PreferenceFacts] = {
    "sigmoid": PreferenceFacts(optional=("margins",), hparams=(*_NOISY, *_DIVERGENCE)),
    "sigmoid_norm": PreferenceFacts(optional=("margins",), hparams=("beta", *_DIVERGENCE)),
    "hinge": PreferenceFacts(optional=("margins",), hparams=("beta", *_DIVERGENCE)),
    "ipo": PreferenceFacts(hparams=("beta", *_DIVERGENCE)),
    "robust": PreferenceFacts(optional=("margins",), hparams=(*_NOISY, *_DIVERGENCE)),
    "exo_pair": PreferenceFacts(optional=("margins",), hparams=(*_NOISY, *_DIVERGENCE)),
    "discopop": PreferenceFacts(
        optional=("margins",), hparams=("beta", "discopop_tau", *_DIVERGENCE)
    ),
    "sft": PreferenceFacts(reference=False),
    "nca_pair": PreferenceFacts(hparams=("beta",)),
    "bco_pair": PreferenceFacts(hparams=("beta",)),
    "sppo_hard": PreferenceFacts(hparams=("beta",)),
    "apo_zero": PreferenceFacts(hparams=("beta",)),
    "apo_down": PreferenceFacts(hparams=("beta",)),
    "aot": PreferenceFacts(needs_step=True, hparams=_NOISY),
    "aot_unpaired": PreferenceFacts(needs_step=True, hparams=_NOISY),
    "orpo": PreferenceFacts(reference=False, hparams=("beta",)),
    "cpo": PreferenceFacts(reference=False, hparams=(*_NOISY, "cpo_alpha")),
    "simpo": PreferenceFacts(reference=False, hparams=(*_NOISY, "simpo_gamma", "cpo_alpha")),
    "alphapo": PreferenceFacts(reference=False, hparams=(*_NOISY, "simpo_gamma", "alpha")),
    "kto": PreferenceFacts(kind="unpaired", needs=("mismatched",), hparams=_MARKED),
    "apo_zero_unpaired": PreferenceFacts(kind="unpaired", hparams=_MARKED),
    "bco": PreferenceFacts(
        kind="unpaired", needs_step=True, optional=("density_ratio", "history"), hparams=_MARKED
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


# Thresholds of the rollout correction as users write them: 2.0, or a band "0.5_2.0".
#
# `check` and `luyen.algorithms` parse them with the same functions, so that what passes one
# is accepted by the other.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Band:
    """Two positive numbers, the lower one first.

    Example:
        >>> read_threshold("rollout_is_threshold", "0.5_2.0")
        Band(low=0.5, high=2.0)
    """

    low: float
    """Smallest value inside."""
    high: float
    """Largest value inside."""


def read_threshold(field: str, value: float | str) -> float | Band:
    """A number as it is, "lo_hi" as a band; anything else is refused under `field`.

    The text is split before it is read as a number: Python takes "1_2" for twelve.
    """
    if isinstance(value, str) and "_" in value:
        parts = value.split("_")
        if len(parts) != 2:
            why = 'a band is written as two numbers, "lo_hi"'
            raise UserError(field, value, why, 'write it as "0.5_2.0"')
        return ordered_band(
            field, value, read_number(field, parts[0]), read_number(field, parts[1])
        )
    return read_number(field, value)


def read_number(field: str, value: float | str) -> float:
    """A positive finite number, from a number or from its text; a bool is not a number here."""
    why = "a threshold is a positive, finite number"
    fix = 'pass a number such as 2.0, or a band such as "0.5_2.0"'
    if isinstance(value, bool):
        raise UserError(field, value, why, fix)
    try:
        number = float(value)
    except ValueError:
        raise UserError(field, value, why, fix) from None
    if not math.isfinite(number) or number <= 0.0:
        raise UserError(field, value, why, fix)
    return number


def ordered_band(field: str, value: float | str, low: float, high: float) -> Band:
    """The band from low to high, refused when it is upside down."""
    if low > high:
        why = f"its lower bound {low} is above its upper bound {high}"
        raise UserError(field, value, why, "write the smaller number first")
    return Band(low=low, high=high)


def read_limits(
    rollout_is_threshold: float | str, rollout_is_floor: float | None
) -> tuple[float | Band, float | None]:
    """Threshold and floor as numbers, refused when they contradict each other."""
    threshold = read_threshold("rollout_is_threshold", rollout_is_threshold)
    if rollout_is_floor is None:
        return threshold, None
    floor = read_number("rollout_is_floor", rollout_is_floor)
    if isinstance(threshold, Band):
        why = f"the band {rollout_is_threshold!r} sets weights below it to 0, so no floor can act"
        fix = "drop rollout_is_floor, or give rollout_is_threshold as one number"
        raise UserError("rollout_is_floor", rollout_is_floor, why, fix)
    if floor > threshold:
        why = f"it is above rollout_is_threshold {threshold}"
        raise UserError("rollout_is_floor", rollout_is_floor, why, "choose a smaller floor")
    return threshold, floor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RejectionRule:
    """One option with its bounds on the statistic.

    Example:
        >>> rejection_rules("seq_mean_k3", 0.01)
        (RejectionRule(option='seq_mean_k3', low=None, high=0.01),)
    """

    option: str
    """One of the catalogue's `REJECTION_CRITERIA`: how a measure is gathered, and which measure."""
    low: float | None
    """Smallest statistic kept; None where the statistic cannot be too small (k2, k3)."""
    high: float
    """Largest statistic kept."""

    @property
    def per_token(self) -> bool:
        """Whether it rejects single tokens instead of whole sequences."""
        return self.option.startswith("token")


def rejection_rules(
    rollout_rs: str, rollout_rs_threshold: float | str | None
) -> tuple[RejectionRule, ...]:
    """The rules a comma list names, with one threshold for all of them or one for each."""
    options = [option.strip() for option in rollout_rs.split(",") if option.strip()]
    if not options:
        raise UserError(
            "rollout_rs",
            rollout_rs,
            "it names no option",
            "known: " + ", ".join(REJECTION_CRITERIA),
        )
    for option in options:
        if option not in REJECTION_CRITERIA:
            why = f"no rejection option is called {option!r}"
            raise UserError("rollout_rs", rollout_rs, why, did_you_mean(option, REJECTION_CRITERIA))
    if len(set(options)) < len(options):
        raise UserError("rollout_rs", rollout_rs, "an option is named twice", "name it once")
    thresholds = threshold_list(rollout_rs_threshold, len(options))
    return tuple(make_rule(o, t) for o, t in zip(options, thresholds, strict=True))


def threshold_list(value: float | str | None, count: int) -> list[float | str]:
    """One threshold per option: a single one is repeated, a comma list must have `count` parts."""
    field = "rollout_rs_threshold"
    if value is None:
        fix = 'pass a number, or "lo_hi" for k1 options'
        raise UserError(field, None, "rollout_rs rejects nothing without a threshold", fix)
    if not isinstance(value, str):
        return [value] * count
    parts: list[float | str] = [part.strip() for part in value.split(",")]
    if len(parts) == 1:
        return parts * count
    if len(parts) != count:
        why = f"it lists {len(parts)} thresholds for {count} options"
        raise UserError(field, value, why, "pass one threshold, or one for each option")
    return parts


def make_rule(option: str, value: float | str) -> RejectionRule:
    """The rule of one option; k1 takes a band of ratios, k2 and k3 one upper bound."""
    field = "rollout_rs_threshold"
    threshold = read_threshold(field, value)
    if option.endswith("k1"):
        band = threshold
        if not isinstance(band, Band):
            band = ordered_band(field, value, 1.0 / band, band)
        return RejectionRule(option=option, low=math.log(band.low), high=math.log(band.high))
    if isinstance(threshold, Band):
        why = f"{option} is never negative: it takes one upper bound, not a band"
        raise UserError(field, value, why, "pass one number for it")
    return RejectionRule(option=option, low=None, high=threshold)


# Mixtures of experts.

ROUTED_MODELS = ("mixtral", "qwen2_moe", "qwen3_moe")
"""Types of models whose routers are read: their loads, and the load-balance loss."""
