"""What the correction did: metrics of the importance weights and of each rejection rule.

Units are trainable tokens, or sequences that have some. With none there is nothing to report.
"""

from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.correction.importance import raw_weights
from luyen.algorithms.correction.mismatch import sample_std
from luyen.algorithms.correction.rejection import kept_by, rule_statistic
from luyen.algorithms.layout import Layout
from luyen.config.thresholds import Band, RejectionRule

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
