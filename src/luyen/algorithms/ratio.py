"""Probability ratios between the current policy and the one an update starts from.

Token ratios, the sequence ratio of GSPO carried by tokens, and the sequence weight of VESPO.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.layout import Layout

LOG_RATIO_BOUND = 20.0
"""Log-ratios are clamped to ±20 before `exp`: e^20 is huge, and still finite in every dtype."""
SEQUENCE_LOG_BOUND = 10.0
"""Upper clamp of the log of a sequence ratio (GSPO)."""
WEIGHT_LOG_FLOOR = math.log(1e-8)
"""Lower clamp of the log of an importance weight (VESPO)."""


def token_ratio(
    logp: Float[Tensor, " tok"], old_logp: Float[Tensor, " tok"]
) -> Float[Tensor, " tok"]:
    """π/π_old of each token, with the log-ratio clamped to ±20 (no gradient beyond)."""
    return (logp - old_logp).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


def sequence_ratio(
    logp: Float[Tensor, " tok"], old_logp: Float[Tensor, " tok"], layout: Layout
) -> Float[Tensor, " tok"]:
    """GSPO-token's ratio: the value is the sequence's geometric mean, the gradient the token's own.

    s_t = sg[(π(y)/π_old(y))^(1/|y|)] · π_t / sg[π_t] (Zheng et al. 2025, arXiv:2507.18071).
    """
    mean = layout.spread(layout.mean(logp - old_logp)).detach()
    return (mean + logp - logp.detach()).clamp(max=SEQUENCE_LOG_BOUND).exp()


def sequence_log_weight(
    logp: Float[Tensor, " tok"],
    old_logp: Float[Tensor, " tok"],
    layout: Layout,
    is_weights: Float[Tensor, " tok"] | None = None,
) -> Float[Tensor, " tok"]:
    """Log of π(y)/π_old(y) of each token's sequence, a sum without length normalisation; detached.

    Token weights of a rollout correction join the sum as logs. Clamped to [log 1e-8, 20].
    """
    terms = (logp - old_logp).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    if is_weights is not None:
        terms = terms + is_weights.detach().log().clamp(WEIGHT_LOG_FLOOR, LOG_RATIO_BOUND)
    total = layout.sum(layout.on_mask(terms)).clamp(WEIGHT_LOG_FLOOR, LOG_RATIO_BOUND)
    return layout.spread(total)


def geometric_mean(x: Float[Tensor, " tok"], layout: Layout) -> Float[Tensor, " seq"]:
    """Geometric mean of positive x over the trainable tokens of each sequence; 1 if it has none.

    1e-10 is added first, so that a weight of 0 shrinks the mean without erasing the gradient.
    """
    return torch.exp(layout.mean((layout.on_mask(x) + 1e-10).log()))
