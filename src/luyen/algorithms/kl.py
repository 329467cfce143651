"""KL penalties between the policy and a reference: estimators per token, and the exact sum.

A trailing "+" keeps the value and takes the gradient of k2, the one estimator whose expected
gradient is the gradient of the KL (Tang and Munos 2025, arXiv:2506.09477). Estimators:
J. Schulman, "Approximating KL divergence", 2020.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.base.errors import UserError, did_you_mean

FIELD = "kl_loss_type"
Penalty = Callable[[Tensor, Tensor], Tensor]


def k1(logp: Float[Tensor, "*n"], ref_logp: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """log π - log π_ref: unbiased; its expected gradient is 0."""
    return logp - ref_logp


def absolute(logp: Float[Tensor, "*n"], ref_logp: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """|log π - log π_ref|."""
    return (logp - ref_logp).abs()


def k2(logp: Float[Tensor, "*n"], ref_logp: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """(log π - log π_ref)²/2: biased; its expected gradient is that of the KL."""
    return 0.5 * (logp - ref_logp).square()


def k3(logp: Float[Tensor, "*n"], ref_logp: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
    """e^d - d - 1 with d = log π_ref - log π: unbiased, never negative; d in ±20, result <= 10."""
    d = (ref_logp - logp).clamp(-20.0, 20.0)
    return (d.exp() - d - 1.0).clamp(-10.0, 10.0)


def full_kl(
    logits: Float[Tensor, "*n vocab"], ref_logits: Float[Tensor, "*n vocab"]
) -> Float[Tensor, "*n"]:
    """Exact KL(π ‖ π_ref), summed over the vocabulary; entries of probability 0 add nothing."""
    log_pi = logits.log_softmax(-1)
    difference = log_pi - ref_logits.log_softmax(-1)
    possible = torch.where(log_pi == -torch.inf, 0.0, difference)
    return (log_pi.exp() * possible).sum(-1)


def straight_through(value: Penalty) -> Penalty:
    """The value of a penalty with the gradient of k2."""

    def penalty(logp: Tensor, ref_logp: Tensor) -> Tensor:
        carrier = k2(logp, ref_logp)
        return carrier - carrier.detach() + value(logp, ref_logp).detach()

    return penalty


_PER_TOKEN: dict[str, Penalty] = {
    "k1": k1,
    "kl": k1,
    "abs": absolute,
    "k2": k2,
    "mse": k2,
    "k3": k3,
    "low_var_kl": k3,
}
PENALTIES: dict[str, Penalty] = {
    **_PER_TOKEN,
    **{f"{kind}+": straight_through(value) for kind, value in _PER_TOKEN.items()},
    # Over the whole vocabulary the expected gradient of k2 is the gradient of the KL itself.
    "full": full_kl,
    "full+": full_kl,
}


def kl_penalty(
    kind: str, logp: Float[Tensor, "..."], ref_logp: Float[Tensor, "..."]
) -> Float[Tensor, "..."]:
    """KL penalty of each token. `full` and `full+` take logits, and sum their last dimension out.

    Example:
        >>> kl_penalty("k2", torch.tensor([0.0]), torch.tensor([-2.0]))
        tensor([2.])
    """
    if kind not in PENALTIES:
        raise UserError(FIELD, kind, "no such KL penalty", did_you_mean(kind, PENALTIES))
    return PENALTIES[kind](logp, ref_logp)
