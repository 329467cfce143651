"""Losses that hold back the tokens that drive entropy down (Cui et al. 2025, arXiv:2505.22617).

Where the advantage and the log-probability are high together, an update sharpens the policy. Both
losses pick such tokens over the whole optimizer step, in a statistics pass of the same name that
runs before the micro-batches.
"""

from collections.abc import Mapping

import torch
from jaxtyping import Bool
from torch import Tensor

from luyen.algorithms.knobs import require_not_negative
from luyen.algorithms.policy_losses.clipped import pessimistic
from luyen.algorithms.policy_losses.inputs import (
    PolicyInputs,
    TokenLoss,
    loss_statistics,
    policy_losses,
)
from luyen.algorithms.policy_losses.selection import (
    covariance,
    draw,
    first_by,
    share,
    token_keys,
)
from luyen.algorithms.policy_losses.surrogate import clip_range, corrected, fraction, ppo_kl
from luyen.algorithms.ratio import token_ratio
from luyen.base.errors import UserError


def _require_share(name: str, value: float) -> None:
    if not 0.0 < value <= 1.0:
        why = "it is a share of the tokens of a step"
        raise UserError(name, value, why, f"choose 0 < {name} <= 1")


def _selected(inputs: PolicyInputs, loss: str) -> Bool[Tensor, " tok"]:
    """The tokens that the statistics pass chose."""
    if "selected" not in inputs.statistics:
        why = f"loss `{loss}` chooses tokens over the whole step, and no choice was made"
        fix = "run the statistics pass first and pass its streams as PolicyInputs.statistics"
        raise UserError("statistics", sorted(inputs.statistics), why, fix)
    return inputs.statistics["selected"].bool() & inputs.layout.mask


@loss_statistics.register("clip_cov")
def choose_clip_cov(
    inputs: PolicyInputs,
    *,
    seed: int,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    clip_cov_ratio: float = 0.0002,
    clip_cov_lb: float = 1.0,
    clip_cov_ub: float = 5.0,
) -> Mapping[str, Bool[Tensor, " tok"]]:
    """A random share of the unclipped tokens with clip_cov_lb < covariance < clip_cov_ub.

    The draw is a function of the seed and of each token's key (see `selection`).
    """
    _require_share("clip_cov_ratio", clip_cov_ratio)
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = token_ratio(inputs.logp.detach(), inputs.old_logp)
    plain, clipped = pessimistic(ratio, inputs.advantages, low=low, high=high)
    cov = covariance(inputs)
    eligible = (cov > clip_cov_lb) & (cov < clip_cov_ub) & ~(clipped > plain) & inputs.layout.mask
    drawn = draw(token_keys(inputs), seed)
    return {"selected": first_by((drawn,), eligible, share(clip_cov_ratio, inputs.layout.mask))}


@policy_losses.register("clip_cov")
def clip_cov(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
) -> TokenLoss:
    """PPO's clipped surrogate with the selected tokens taken out of the loss."""
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    selected = _selected(inputs, "clip_cov")
    ratio = token_ratio(inputs.logp, inputs.old_logp)
    plain, clipped = pessimistic(ratio, inputs.advantages, low=low, high=high)
    per_token = torch.where(selected, 0.0, torch.maximum(plain, clipped))
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/pg_clipfrac": fraction(clipped > plain, inputs),
        "actor/clip_cov_selected_fraction": fraction(selected, inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@loss_statistics.register("kl_cov")
def choose_kl_cov(
    inputs: PolicyInputs, *, seed: int, kl_cov_ratio: float = 0.0002
) -> Mapping[str, Bool[Tensor, " tok"]]:
    """The share of the tokens with the largest covariance; ties go by key, so nothing is drawn."""
    del seed
    _require_share("kl_cov_ratio", kl_cov_ratio)
    mask = inputs.layout.mask
    order = (-covariance(inputs), token_keys(inputs))
    return {"selected": first_by(order, mask, share(kl_cov_ratio, mask))}


@policy_losses.register("kl_cov")
def kl_cov(inputs: PolicyInputs, *, ppo_kl_coef: float = 0.1) -> TokenLoss:
    """-A·r, plus ppo_kl_coef·|ρ| on the selected tokens; no clip, and no clamp of the ratio."""
    require_not_negative("ppo_kl_coef", ppo_kl_coef)
    selected = _selected(inputs, "kl_cov")
    log_ratio = inputs.logp - inputs.old_logp
    penalty = torch.where(selected, ppo_kl_coef * log_ratio.abs(), 0.0)
    per_token = penalty - inputs.advantages * log_ratio.exp()
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/kl_cov_selected_fraction": fraction(selected, inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)
