"""Losses of pairs and of marked answers, put together with the metrics that all of them report."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.preference.inputs import PairInputs, PreferenceLoss, UnpairedInputs
from luyen.algorithms.statistic import Average


def accuracy(
    chosen: Float[Tensor, " pair"], rejected: Float[Tensor, " pair"]
) -> Float[Tensor, " pair"]:
    """1 where the preferred answer has the higher reward, 0 where the other has; a tie is ½.

    A policy that still equals its reference thus has accuracy ½, as a coin has.
    """
    return 0.5 * (1.0 + torch.sign(chosen - rejected))


def over_all(x: Float[Tensor, " n"]) -> Average:
    """The average of every entry."""
    return Average.over(x, torch.ones_like(x, dtype=torch.bool))


def pair_report(
    inputs: PairInputs,
    loss: Float[Tensor, " pair"],
    chosen_reward: Float[Tensor, " pair"],
    rejected_reward: Float[Tensor, " pair"],
) -> PreferenceLoss:
    """The record of a pairwise loss."""
    chosen, rejected = chosen_reward.detach(), rejected_reward.detach()
    metrics = {
        "preference/loss": over_all(loss),
        "preference/accuracy": over_all(accuracy(chosen, rejected)),
        "preference/margin": over_all(chosen - rejected),
        "preference/chosen_reward": over_all(chosen),
        "preference/rejected_reward": over_all(rejected),
        "preference/chosen_logp": over_all(inputs.chosen),
        "preference/rejected_logp": over_all(inputs.rejected),
    }
    rewards = {"chosen": chosen, "rejected": rejected}
    return PreferenceLoss(loss=loss, rewards=rewards, metrics=metrics)


def referenced_report(
    inputs: PairInputs, loss: Float[Tensor, " pair"], beta: float
) -> PreferenceLoss:
    """The record of a loss whose implicit reward is β·log(π/π_ref)."""
    chosen, rejected = beta * inputs.chosen_ratio, beta * inputs.rejected_ratio
    return pair_report(inputs, loss, chosen, rejected)


def answer_report(
    inputs: UnpairedInputs,
    loss: Float[Tensor, " seq"],
    reward: Float[Tensor, " seq"],
    threshold: Float[Tensor, ""],
) -> PreferenceLoss:
    """The record of a loss over marked answers; an answer is right on its side of the threshold."""
    reward, good = reward.detach(), inputs.desirable
    side = torch.where(good, reward - threshold, threshold - reward)
    metrics = {
        "preference/loss": over_all(loss),
        "preference/accuracy": over_all(0.5 * (1.0 + torch.sign(side))),
        "preference/chosen_reward": Average.over(reward, good),
        "preference/rejected_reward": Average.over(reward, ~good),
        "preference/chosen_logp": Average.over(inputs.logp, good),
        "preference/rejected_logp": Average.over(inputs.logp, ~good),
    }
    return PreferenceLoss(loss=loss, rewards={"logp": reward}, metrics=metrics)


def by_mark(
    mark: Bool[Tensor, " seq"], good: Float[Tensor, " seq"], bad: Float[Tensor, " seq"]
) -> Float[Tensor, " seq"]:
    """The loss of each answer by its mark."""
    return torch.where(mark, good, bad)
