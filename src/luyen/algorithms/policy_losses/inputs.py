"""What a policy loss sees and returns (a loss per token, never a mean), and what losses share.

Shared are probability ratios between the current policy and the one an update starts from: of
tokens, the sequence ratio of GSPO carried by tokens, and the sequence weight of VESPO.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast, final

import torch
from jaxtyping import Bool, Float, Shaped
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.algorithms.checks import (
    call_plugin,
    is_built_in,
    kind_of,
    refuse_plugin,
    require_not_negative,
    require_token_stream,
)
from luyen.algorithms.layout import Layout
from luyen.base.registry import Registry


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Packed streams of some sequences of one optimizer step (a micro-batch, or all of them).

    Every stream is cleaned when the record is made: masked positions hold 0, so whatever stood
    there (NaN included) can reach neither a value nor a gradient.

    Example:
        >>> import torch
        >>> layout = Layout(mask=torch.tensor([True, False]), offsets=torch.tensor([0, 2]),
        ...                 groups=torch.tensor([0]))
        >>> x = torch.tensor([-1.0, float("nan")])
        >>> PolicyInputs(logp=x, old_logp=x, advantages=x, layout=layout).logp
        tensor([-1.,  0.])
    """

    logp: Float[Tensor, " tok"]
    """Log-probability under the current parameters; the one stream that carries a gradient."""
    old_logp: Float[Tensor, " tok"]
    """Log-probability under the policy that the update starts from."""
    advantages: Float[Tensor, " tok"]
    """Advantage of each token."""
    layout: Layout
    """Sequences and the mask of trainable tokens."""
    rollout_logp: Float[Tensor, " tok"] | None = None
    """Log-probability the rollout engine sampled with (bypass mode)."""
    is_weights: Float[Tensor, " tok"] | None = None
    """Rollout-correction weight that multiplies the loss of each token after clipping."""
    statistics: Mapping[str, Shaped[Tensor, " *any"]] = field(default_factory=dict[str, Tensor])
    """What the loss's statistics pass found over the whole optimizer step: per-token streams
    (sliced like the other streams) or scalars."""

    def __post_init__(self) -> None:
        for name in ("logp", "old_logp", "advantages", "rollout_logp", "is_weights"):
            stream: Tensor | None = object.__getattribute__(self, name)
            if stream is not None:
                object.__setattr__(self, name, self.layout.on_mask(stream))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLoss:
    """A loss for every token, to be weighted by the aggregation of the whole optimizer step.

    Example:
        >>> import torch
        >>> TokenLoss(per_token=torch.tensor([0.5, 0.0]), metrics={}).per_token.sum()
        tensor(0.5000)
    """

    per_token: Float[Tensor, " tok"]
    """Loss of each token, 0 on masked tokens."""
    metrics: Mapping[str, Average]
    """Averages that merge over micro-batches and ranks."""


PolicyLoss = Callable[..., TokenLoss]
"""`(inputs: PolicyInputs, *, hparams) -> TokenLoss`; hparams are named like their config key."""

Statistics = Callable[..., Mapping[str, Tensor]]
"""`(inputs of the whole step, *, seed, hparams) -> streams`, for losses that select tokens."""

policy_losses: Registry[PolicyLoss] = Registry(
    "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode"
)
loss_statistics: Registry[Statistics] = Registry(
    "statistics pass", "actor_rollout_ref.actor.policy_loss.loss_mode"
)


def call_policy_loss(name: str, inputs: PolicyInputs, hparams: Mapping[str, Any]) -> TokenLoss:
    """The loss of each token by a registered loss, which the gradient flows through."""
    loss = policy_losses.get(name)
    if is_built_in(loss):
        return loss(inputs, **hparams)
    found = call_plugin(policy_losses, name, lambda: loss(inputs, **hparams))
    if not isinstance(cast(object, found), TokenLoss):
        refuse_plugin(policy_losses, name, f"it gave {kind_of(found)}, not a TokenLoss")
    require_token_stream(policy_losses, name, "per_token", found.per_token, inputs.logp)
    return found


# What surrogates share: the clip range, the correction weights, and two common metrics.


def clip_range(
    clip_ratio: float, clip_ratio_low: float | None, clip_ratio_high: float | None
) -> tuple[float, float]:
    """(ε_low, ε_high): each side falls back to `clip_ratio`. A negative side is refused."""
    low = clip_ratio if clip_ratio_low is None else clip_ratio_low
    high = clip_ratio if clip_ratio_high is None else clip_ratio_high
    require_not_negative("clip_ratio" if clip_ratio_low is None else "clip_ratio_low", low)
    require_not_negative("clip_ratio" if clip_ratio_high is None else "clip_ratio_high", high)
    return low, high


def corrected(per_token: Float[Tensor, " tok"], inputs: PolicyInputs) -> Float[Tensor, " tok"]:
    """The loss times the rollout-correction weight of its token, if there are weights."""
    return per_token if inputs.is_weights is None else per_token * inputs.is_weights


def ppo_kl(inputs: PolicyInputs) -> Average:
    """Mean of log π_old - log π over trainable tokens: how far the policy has moved."""
    return Average.over(inputs.old_logp - inputs.logp, inputs.layout.mask)


def fraction(flags: Bool[Tensor, " tok"], inputs: PolicyInputs) -> Average:
    """Share of the trainable tokens that are flagged."""
    return Average.over(flags.to(inputs.logp.dtype), inputs.layout.mask)


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
