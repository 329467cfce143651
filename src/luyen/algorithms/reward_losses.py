"""Losses of reward models: which answer is better, how good it is, and how good each step is.

Every function returns a loss per pair, answer or step; `luyen.algorithms.preference.step.step_mean`
takes the mean over the optimizer step.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn.functional import logsigmoid

from luyen.algorithms.aggregation import Average, Calibration
from luyen.algorithms.checks import require_not_negative
from luyen.algorithms.preference.inputs import accuracy, over_all


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RewardLoss:
    """A loss for every pair, answer or step, and what it says about the model.

    Example:
        >>> half = torch.tensor([0.5])
        >>> RewardLoss(loss=half, metrics={}, calibration=None).loss
        tensor([0.5000])
    """

    loss: Float[Tensor, " n"]
    """Loss of each; 0 where a step has no label."""
    metrics: Mapping[str, Average]
    """Averages that merge over micro-batches and ranks."""
    calibration: Calibration | None
    """Whether the model is right as often as it is sure; None where it gives no probability."""


def bradley_terry(
    chosen: Float[Tensor, " pair"],
    rejected: Float[Tensor, " pair"],
    *,
    margins: Float[Tensor, " pair"] | None = None,
    center_rewards_coefficient: float = 0.0,
) -> RewardLoss:
    """-log σ(s_c - s_r - margin) + coefficient·(s_c + s_r)² of each pair of scores.

    Bradley and Terry 1952; margins as in Llama 2 (arXiv:2307.09288). The second term keeps scores
    around 0, which their differences leave open (arXiv:2312.09244).

    Example:
        >>> bradley_terry(torch.tensor([1.0]), torch.tensor([1.0])).loss
        tensor([0.6931])
    """
    require_not_negative("center_rewards_coefficient", center_rewards_coefficient)
    gap = chosen - rejected
    logit = gap if margins is None else gap - margins.detach()
    loss = -logsigmoid(logit)
    if center_rewards_coefficient != 0.0:
        loss = loss + center_rewards_coefficient * (chosen + rejected).square()
    right = accuracy(chosen.detach(), rejected.detach())
    metrics = {
        "reward_model/loss": over_all(loss),
        "reward_model/accuracy": over_all(right),
        "reward_model/margin": over_all(gap),
        "reward_model/chosen_score": over_all(chosen),
        "reward_model/rejected_score": over_all(rejected),
    }
    return RewardLoss(
        loss=loss, metrics=metrics, calibration=Calibration.of_choices(gap.detach(), right)
    )


def regression(scores: Float[Tensor, " seq"], targets: Float[Tensor, " seq"]) -> RewardLoss:
    """(s - target)² of each answer.

    Example:
        >>> regression(torch.tensor([1.0, 4.0]), torch.tensor([2.0, 2.0])).loss
        tensor([1., 4.])
    """
    gap = scores - targets.detach()
    metrics = {
        "reward_model/loss": over_all(gap.square()),
        "reward_model/absolute_error": over_all(gap.abs()),
        "reward_model/bias": over_all(gap),
    }
    return RewardLoss(loss=gap.square(), metrics=metrics, calibration=None)


def process_reward(
    logits: Float[Tensor, " step"],
    labels: Float[Tensor, " step"],
    mask: Bool[Tensor, " step"],
) -> RewardLoss:
    """-y·log σ(s) - (1 - y)·log σ(-s) of each labelled step of an answer (arXiv:2305.20050).

    A label is the probability that the step is right, 0 and 1 included. What stands at a step
    without a label reaches neither the loss nor the gradient. The mean is over labelled steps:
    give their number over the whole optimizer step to `step_mean`.

    Example:
        >>> marked = torch.tensor([True, False])
        >>> process_reward(torch.tensor([0.0, 9.0]), torch.tensor([1.0, 0.0]), marked).loss
        tensor([0.6931, 0.0000])
    """
    logits, labels = torch.where(mask, logits, 0.0), torch.where(mask, labels.detach(), 0.0)
    each = -labels * logsigmoid(logits) - (1.0 - labels) * logsigmoid(-logits)
    loss = torch.where(mask, each, 0.0)
    sure = logits.detach()
    right = torch.where(labels == 0.5, 0.5, accuracy((labels - 0.5) * sure, torch.zeros_like(sure)))
    metrics = {
        "reward_model/loss": Average.over(loss, mask),
        "reward_model/accuracy": Average.over(right, mask),
        "reward_model/step_score": Average.over(torch.sigmoid(sure), mask),
    }
    return RewardLoss(
        loss=loss,
        metrics=metrics,
        calibration=Calibration.of_probabilities(torch.sigmoid(sure), labels, mask),
    )
