"""Metrics of rollout correction: the mismatch, the importance weights, each rejection rule.

Every mean runs over trainable tokens, or over the sequences that have some; nothing on a masked
position, NaN included, reaches a metric. Arithmetic is in float64. With nothing trainable there is
nothing to report and the dict is empty.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.correction.importance import LOG_LIMIT, kept_by, raw_weights, rule_statistic
from luyen.algorithms.layout import Layout
from luyen.config.catalog import Band, RejectionRule


def mismatch_metrics(
    old_logp: Float[Tensor, " tok"], rollout_logp: Float[Tensor, " tok"], layout: Layout
) -> dict[str, float]:
    """Perplexities, divergences and differences of probabilities of the two policies.

    Example:
        >>> layout = Layout(mask=torch.tensor([True, True]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> x = torch.tensor([-1.0, -2.0])
        >>> mismatch_metrics(x, x, layout)["rollout_corr/kl"]
        0.0
    """
    if not bool(layout.mask.any()):
        return {}
    trainer = layout.on_mask(old_logp.detach().double())
    sampler = layout.on_mask(rollout_logp.detach().double())
    return {
        **perplexity_metrics(trainer, sampler, layout),
        **divergence_metrics(trainer - sampler, layout),
        **probability_metrics(trainer[layout.mask].exp(), sampler[layout.mask].exp()),
    }


def perplexity_metrics(
    trainer: Float[Tensor, " tok"], sampler: Float[Tensor, " tok"], layout: Layout
) -> dict[str, float]:
    """Perplexity of each sequence under both policies, averaged over sequences.

    `log_ppl_diff` is log-perplexity under the trainer minus that under the sampler.
    """
    live = layout.lengths() > 0
    ours, theirs = -layout.mean(trainer)[live], -layout.mean(sampler)[live]
    gap = ours - theirs
    named = {
        "training_ppl": ours.exp().mean(),
        "training_log_ppl": ours.mean(),
        "rollout_ppl": theirs.exp().mean(),
        "rollout_log_ppl": theirs.mean(),
        "log_ppl_diff": gap.mean(),
        "log_ppl_abs_diff": gap.abs().mean(),
        "log_ppl_diff_max": gap.max(),
        "log_ppl_diff_min": gap.min(),
        "ppl_ratio": gap.exp().mean(),
    }
    return {f"rollout_corr/{name}": float(value) for name, value in named.items()}


def divergence_metrics(log_ratio: Float[Tensor, " tok"], layout: Layout) -> dict[str, float]:
    """Estimates of KL(sampler, trainer) and χ² from the sampled tokens; ℓ is cut at ±20 in `exp`.

    `chi2_seq` uses the log-ratio of a whole sequence, so its noise grows with length.
    """
    tokens = log_ratio[layout.mask]
    safe = tokens.clamp(-LOG_LIMIT, LOG_LIMIT)
    sequences = layout.sum(layout.on_mask(log_ratio))[layout.lengths() > 0]
    named = {
        "kl": 0.0 - tokens.mean(),
        "k3_kl": (safe.expm1() - safe).mean(),
        "chi2_token": (2.0 * safe).exp().mean() - 1.0,
        "chi2_seq": (2.0 * sequences.clamp(-LOG_LIMIT, LOG_LIMIT)).exp().mean() - 1.0,
    }
    return {f"rollout_corr/{name}": float(value) for name, value in named.items()}


def probability_metrics(
    trainer: Float[Tensor, " live"], sampler: Float[Tensor, " live"]
) -> dict[str, float]:
    """Differences between the two probabilities of each sampled token, and their correlation.

    The standard deviation of one token is 0. Where one of the two does not vary, so that no
    correlation exists, it is reported as 1 if both agree on every token and as 0 otherwise.
    """
    gap = (trainer - sampler).abs()
    return {
        "training/rollout_probs_diff_mean": float(gap.mean()),
        "training/rollout_probs_diff_max": float(gap.max()),
        "training/rollout_probs_diff_std": float(sample_std(gap)),
        "training/rollout_actor_probs_pearson_corr": correlation(trainer, sampler),
    }


def correlation(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> float:
    """Pearson's correlation; 1 for equal and 0 for unequal streams when one is constant."""
    if bool((x == x[0]).all()) or bool((y == y[0]).all()):
        return float(torch.equal(x, y))
    dx, dy = x - x.mean(), y - y.mean()
    return float((dx * dy).sum() / (dx.square().sum() * dy.square().sum()).sqrt())


def sample_std(x: Float[Tensor, " n"]) -> Float[Tensor, ""]:
    """Standard deviation with n - 1 below; 0 for a single value."""
    return x.std() if x.numel() > 1 else x.new_zeros(())


# What the correction did: metrics of the importance weights and of each rejection rule.
#
# Units are trainable tokens, or sequences that have some. With none there is nothing to report.

PREFIX = "rollout_corr/rollout_"


def importance_metrics(
    weights: Float[Tensor, " tok"],
    log_ratio: Float[Tensor, " tok"],
    layout: Layout,
    *,
    rollout_is: str,
    limits: tuple[float | Band, float | None],
) -> dict[str, float]:
    """Statistics of the weights before batch normalisation.

    Mean, std (n below), effective sample size and `_seq_*` describe the weights applied;
    `*_fraction_*` and `oob_ratio` say how many raw weights lie beyond the bounds (1/C below, unless
    a floor or a band says otherwise). `max` and `min` are of applied weights per token, of raw ones
    per sequence. The effective sample size is mean(w)² / mean(w²), a fraction; 0 if no weight is.
    """
    if not bool(layout.mask.any()):
        return {}
    threshold, floor = limits
    low, high = usual_range(threshold, floor)
    raw = raw_weights(log_ratio.double(), layout, rollout_is=rollout_is)
    applied = weights.double()[layout.mask]
    per_token = rollout_is == "token"
    units = raw[layout.mask] if per_token else live_mean(raw, layout)
    shown = applied if per_token else units
    square = float(applied.square().mean())
    named: dict[str, Tensor | float] = {
        "mean": applied.mean(),
        "max": shown.max(),
        "min": shown.min(),
        "std": applied.std(correction=0),
        "eff_sample_size": float(applied.mean()) ** 2 / square if square > 0.0 else 0.0,
        "ratio_fraction_high": (units > high).double().mean(),
        "ratio_fraction_low": (units < low).double().mean(),
        **sequence_summary(live_mean(weights.double(), layout), centre=1.0),
        "seq_fraction_high": (live_mean(raw, layout) > high).double().mean(),
        "seq_fraction_low": (live_mean(raw, layout) < low).double().mean(),
    }
    if isinstance(threshold, Band):
        outside = (raw < low) | (raw > high)
        named["oob_ratio"] = outside[layout.mask].double().mean()
    return {f"{PREFIX}is_{name}": float(value) for name, value in named.items()}


def rejection_metrics(
    rules: tuple[RejectionRule, ...],
    keep: Bool[Tensor, " tok"],
    log_ratio: Float[Tensor, " tok"],
    layout: Layout,
) -> dict[str, float]:
    """Statistics of each rule, and the share of tokens and of sequences that lost a token."""
    if not bool(layout.mask.any()):
        return {}
    metrics: dict[str, float] = {}
    for rule in rules:
        metrics |= rule_metrics(rule, log_ratio.double(), layout)
    return metrics | lost_share(f"{PREFIX}rs", keep, layout)


def rule_metrics(
    rule: RejectionRule, log_ratio: Float[Tensor, " tok"], layout: Layout
) -> dict[str, float]:
    """One rule: its statistic over tokens and sequences, and what lies beyond its bounds.

    Mean and std run over tokens, a sequence's number counting once per token; std is that of the
    statistic cut at the bounds. `seq_*` of a token rule are of each sequence's mean.
    """
    statistic = rule_statistic(rule, log_ratio, layout)
    live = layout.lengths() > 0
    tokens = (statistic if rule.per_token else statistic[layout.segment])[layout.mask]
    sequences = layout.mean(statistic)[live] if rule.per_token else statistic[live]
    units = tokens if rule.per_token else sequences
    low = float("-inf") if rule.low is None else rule.low
    named: dict[str, Tensor | float] = {
        "mean": tokens.mean(),
        "max": units.max(),
        "min": units.min(),
        "std": tokens.clamp(low, rule.high).std(correction=0),
        "fraction_high": (units > rule.high).double().mean(),
        "fraction_low": (units < low).double().mean(),
        **sequence_summary(sequences, centre=0.0),
        "seq_fraction_high": (sequences > rule.high).double().mean(),
        "seq_fraction_low": (sequences < low).double().mean(),
    }
    prefix = f"{PREFIX}rs_{rule.option}"
    shares = lost_share(prefix, kept_by(rule, log_ratio, layout), layout)
    return {f"{prefix}_{name}": float(value) for name, value in named.items()} | shares


def sequence_summary(x: Float[Tensor, " live"], *, centre: float) -> dict[str, Tensor | float]:
    """Mean, std (n - 1 below, 0 for one sequence), extremes and largest distance from `centre`."""
    return {
        "seq_mean": x.mean(),
        "seq_std": sample_std(x),
        "seq_max": x.max(),
        "seq_min": x.min(),
        "seq_max_deviation": (x - centre).abs().max(),
    }


def lost_share(prefix: str, keep: Bool[Tensor, " tok"], layout: Layout) -> dict[str, float]:
    """Share of trainable tokens that were rejected, and of sequences that lost at least one."""
    lost = (layout.mask & ~keep).double()
    live = layout.lengths() > 0
    return {
        f"{prefix}_masked_fraction": float(lost[layout.mask].mean()),
        f"{prefix}_seq_masked_fraction": float((layout.sum(lost)[live] > 0).double().mean()),
    }


def usual_range(threshold: float | Band, floor: float | None) -> tuple[float, float]:
    """Where a raw weight counts as low and as high."""
    if isinstance(threshold, Band):
        return threshold.low, threshold.high
    return (1.0 / threshold if floor is None else floor), threshold


def live_mean(x: Float[Tensor, " tok"], layout: Layout) -> Float[Tensor, " live"]:
    """Mean of x in each sequence that has trainable tokens."""
    return layout.mean(x)[layout.lengths() > 0]
