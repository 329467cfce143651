"""Mixtures of experts: the load-balance loss, with one denominator for a step, and its metrics.

With f(e) the share of an expert in the choices of k experts a token, and p(e) its mean
probability, over all layers and all tokens of an optimizer step, the loss is E·Σ f(e)·p(e): k where
the load is even. It is that of transformers. Only p has a gradient. f is that of the whole step, so
the loss is a sum over tokens, and its gradient does not depend on how the step is split.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor

from luyen.algorithms.aggregation import Average


def balance_weights(counts: Float[Tensor, "layer expert"], tokens: int) -> Float[Tensor, " expert"]:
    """Derivative of the loss by each expert's probability, for any token of the step.

    `counts` are the choices of each expert, and `tokens` how many tokens the step has.

    Example:
        >>> balance_weights(torch.tensor([[3.0, 1.0]]), tokens=4).tolist()
        [0.375, 0.125]
    """
    layers, experts = counts.shape
    shares = counts.double().sum(0) / (layers * tokens)
    return (experts * shares / (layers * tokens)).float()


def balance_loss(
    probability: Float[Tensor, " expert"], weights: Float[Tensor, " expert"]
) -> Float[Tensor, ""]:
    """This part's share of the loss; `probability` is the sum over its tokens and all layers."""
    return (weights * probability).sum()


def balance_metric(loss: Float[Tensor, ""], *, share: Float[Tensor, ""]) -> Average:
    """The loss of the step, from that of a part which has this share of its tokens."""
    return Average(total=loss.detach(), count=share)


def load_metrics(counts: Float[Tensor, "layer expert"]) -> dict[str, float]:
    """How evenly the tokens of a step were divided over experts.

    Example:
        >>> load_metrics(torch.tensor([[2.0, 2.0], [4.0, 0.0]]))
        {'router/max_load': 2.0, 'router/load_entropy': 0.5, 'router/idle_experts': 0.25}
    """
    experts = counts.shape[1]
    shares = counts.double() / counts.double().sum(1, keepdim=True)
    # An expert without tokens adds nothing, and 0 times infinity is no number.
    parts = torch.where(shares > 0, shares * shares.log(), 0.0)
    entropy = -parts.sum(1) / math.log(max(experts, 2))
    return {
        "router/max_load": float(shares.max() * experts),
        "router/load_entropy": float(entropy.mean()),
        "router/idle_experts": float((counts == 0).double().mean()),
    }
