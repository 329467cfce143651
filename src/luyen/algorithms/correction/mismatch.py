"""How far the trainer's policy is from the one that sampled, in numbers a dashboard can show.

Every mean runs over trainable tokens, or over the sequences that have some; nothing on a masked
position, NaN included, reaches a metric. Arithmetic is in float64. With nothing trainable there is
nothing to report and the dict is empty.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.correction.limits import LOG_LIMIT
from luyen.algorithms.layout import Layout


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
