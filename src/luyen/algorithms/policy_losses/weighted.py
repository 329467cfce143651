"""Policy gradients with a weight that carries no gradient, and two soft surrogates."""

import torch

from luyen.algorithms.aggregation import Average
from luyen.algorithms.checks import require_not_negative, require_positive
from luyen.algorithms.policy_losses.inputs import (
    PolicyInputs,
    TokenLoss,
    clip_range,
    corrected,
    fraction,
    policy_losses,
    ppo_kl,
    sequence_log_weight,
    token_ratio,
)
from luyen.base.errors import UserError


@policy_losses.register("gpg")
def gpg(inputs: PolicyInputs) -> TokenLoss:
    """-A·log π, with no ratio and no metric (GPG, arXiv:2504.02546)."""
    per_token = -inputs.advantages * inputs.logp
    return TokenLoss(per_token=corrected(per_token, inputs), metrics={})


@policy_losses.register("reinforce")
def reinforce(inputs: PolicyInputs) -> TokenLoss:
    """-A·log π (Williams 1992), reporting how far the policy has moved."""
    per_token = -inputs.advantages * inputs.logp
    metrics = {"actor/ppo_kl": ppo_kl(inputs)}
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@policy_losses.register("cispo")
def cispo(
    inputs: PolicyInputs,
    *,
    clip_ratio: float = 0.2,
    clip_ratio_low: float | None = None,
    clip_ratio_high: float | None = None,
    cispo_cap: float | None = None,
) -> TokenLoss:
    """-sg[clip(r)]·A·log π: every token keeps a gradient (CISPO in MiniMax-M1, arXiv:2506.13585).

    clip(r) is clip(r, 1-ε_low, 1+ε_high), or min(r, cispo_cap) when the absolute cap is given.
    """
    low, high = clip_range(clip_ratio, clip_ratio_low, clip_ratio_high)
    ratio = token_ratio(inputs.logp, inputs.old_logp).detach()
    if cispo_cap is None:
        weight = ratio.clamp(1.0 - low, 1.0 + high)
    else:
        require_positive("cispo_cap", cispo_cap)
        weight = ratio.clamp(max=cispo_cap)
    per_token = -weight * inputs.advantages * inputs.logp
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/cispo_clipfrac": fraction(weight != ratio, inputs),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@policy_losses.register("sapo")
def sapo(inputs: PolicyInputs, *, tau_pos: float = 1.0, tau_neg: float = 1.05) -> TokenLoss:
    """-A·(4/τ)·σ(τ(r - 1)), a smooth gate in place of a clip (SAPO, arXiv:2511.20347).

    τ is tau_pos where A > 0 and tau_neg elsewhere. Its own aggregation is seq-mean-token-mean.
    """
    require_positive("tau_pos", tau_pos)
    require_positive("tau_neg", tau_neg)
    ratio = token_ratio(inputs.logp, inputs.old_logp)
    positive = (4.0 / tau_pos) * torch.sigmoid(tau_pos * (ratio - 1.0))
    negative = (4.0 / tau_neg) * torch.sigmoid(tau_neg * (ratio - 1.0))
    gate = torch.where(inputs.advantages > 0, positive, negative)
    metrics = {"actor/ppo_kl": ppo_kl(inputs)}
    return TokenLoss(per_token=corrected(-inputs.advantages * gate, inputs), metrics=metrics)


@policy_losses.register("dro")
def dro(inputs: PolicyInputs, *, dro_beta: float | None = None) -> TokenLoss:
    """-(A·log π - ½·β·ρ²), a quadratic pull to the old policy (DRO, arXiv:2405.19107)."""
    if dro_beta is None:
        why = "loss `dro` has no default strength for its quadratic penalty"
        fix = "set actor_rollout_ref.actor.policy_loss.dro_beta > 0"
        raise UserError("dro_beta", dro_beta, why, fix)
    require_positive("dro_beta", dro_beta)
    penalty = 0.5 * dro_beta * (inputs.logp - inputs.old_logp).square()
    per_token = penalty - inputs.advantages * inputs.logp
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/dro_penalty": Average.over(penalty, inputs.layout.mask),
    }
    return TokenLoss(per_token=corrected(per_token, inputs), metrics=metrics)


@policy_losses.register("vespo")
def vespo(
    inputs: PolicyInputs,
    *,
    vespo_k_pos: float = 2.0,
    vespo_lambda_pos: float = 3.0,
    vespo_k_neg: float = 3.0,
    vespo_lambda_neg: float = 2.0,
) -> TokenLoss:
    """-sg[φ(w)]·A·log π with φ(w) = w^k·e^(λ(1 - w)), w the ratio of the whole sequence (VESPO).

    (k, λ) follow the sign of the token's advantage, and φ(1) = 1 (arXiv:2602.10693). Correction
    weights join w as a sum of logs over the sequence and do not multiply the loss.
    """
    for name, k in (("vespo_k_pos", vespo_k_pos), ("vespo_k_neg", vespo_k_neg)):
        require_not_negative(name, k)
    require_positive("vespo_lambda_pos", vespo_lambda_pos)
    require_positive("vespo_lambda_neg", vespo_lambda_neg)
    layout = inputs.layout
    log_w = sequence_log_weight(inputs.logp, inputs.old_logp, layout, inputs.is_weights)
    w = log_w.exp()
    rewarded = torch.exp(vespo_lambda_pos + vespo_k_pos * log_w - vespo_lambda_pos * w)
    punished = torch.exp(vespo_lambda_neg + vespo_k_neg * log_w - vespo_lambda_neg * w)
    phi = torch.where(inputs.advantages >= 0, rewarded, punished)
    metrics = {
        "actor/ppo_kl": ppo_kl(inputs),
        "actor/vespo_phi_mean": Average.over(layout.mean(phi), layout.lengths() > 0),
    }
    return TokenLoss(per_token=-phi * inputs.advantages * inputs.logp, metrics=metrics)
