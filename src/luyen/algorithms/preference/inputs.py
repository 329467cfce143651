"""What a preference loss sees and returns, and the metrics that all of them report.

A sequence enters as the sum of the log-probabilities of its tokens. The engine makes the sums; the
mathematics here never sees a token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.algorithms.aggregation import Average
from luyen.base.errors import UserError
from luyen.base.registry import Registry


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PairInputs:
    """Pairs of one optimizer step: all of them, or a part made by `take`.

    Example:
        >>> import torch
        >>> two, tokens = torch.tensor([-2.0, -3.0]), torch.tensor([4, 6])
        >>> pairs = PairInputs(chosen=two, rejected=two - 1, chosen_tokens=tokens,
        ...                    rejected_tokens=tokens, ref_chosen=two + 1, ref_rejected=two)
        >>> pairs.chosen_ratio, pairs.take(torch.tensor([1])).mean_tokens
        (tensor([-1., -1.]), tensor(5.))
    """

    chosen: Float[Tensor, " pair"]
    """Sum of log-probabilities of the preferred answer under the current parameters."""
    rejected: Float[Tensor, " pair"]
    """The same of the other answer."""
    chosen_tokens: Int[Tensor, " pair"]
    """Trainable tokens of the preferred answer."""
    rejected_tokens: Int[Tensor, " pair"]
    """Trainable tokens of the other answer."""
    ref_chosen: Float[Tensor, " pair"] | None = None
    """The sum of the preferred answer under the reference; None: there is no reference."""
    ref_rejected: Float[Tensor, " pair"] | None = None
    """The sum of the other answer under the reference."""
    margins: Float[Tensor, " pair"] | None = None
    """How much better the preferred answer is, in units of reward; None: unknown."""
    step_tokens: Float[Tensor, ""] | None = None
    """Mean of `chosen_tokens` over the whole step; None: these pairs are the whole step."""

    def __post_init__(self) -> None:
        if (self.ref_chosen is None) != (self.ref_rejected is None):
            why = "a reference scores both answers of a pair or none"
            raise UserError("ref_rejected", None, why, "pass ref_chosen and ref_rejected")
        for name in ("ref_chosen", "ref_rejected", "margins"):
            constant: Tensor | None = object.__getattribute__(self, name)
            if constant is not None:
                object.__setattr__(self, name, constant.detach())

    @property
    def is_whole(self) -> bool:
        """Whether these are all pairs of the step."""
        return self.step_tokens is None

    @property
    def chosen_ratio(self) -> Float[Tensor, " pair"]:
        """log π - log π_ref of the preferred answers."""
        return self.chosen - _referenced(self.ref_chosen)

    @property
    def rejected_ratio(self) -> Float[Tensor, " pair"]:
        """log π - log π_ref of the other answers."""
        return self.rejected - _referenced(self.ref_rejected)

    @property
    def ref_difference(self) -> Float[Tensor, " pair"]:
        """log π_ref of the chosen answers minus that of the rejected ones."""
        return _referenced(self.ref_chosen) - _referenced(self.ref_rejected)

    @property
    def mean_tokens(self) -> Float[Tensor, ""]:
        """Tokens of a preferred answer, mean over the whole step."""
        if self.step_tokens is not None:
            return self.step_tokens
        return self.chosen_tokens.to(self.chosen.dtype).mean().clamp(min=1.0)

    def per_token(self, x: Float[Tensor, " pair"], *, chosen: bool) -> Float[Tensor, " pair"]:
        """x over the number of tokens of the preferred (or the other) answer."""
        return x / (self.chosen_tokens if chosen else self.rejected_tokens).clamp(min=1)

    def policy(self) -> dict[str, Tensor]:
        """The sums that carry a gradient, by field."""
        return {"chosen": self.chosen, "rejected": self.rejected}

    def take(self, index: Int[Tensor, " part"]) -> "PairInputs":
        """The pairs at these places, with what they must know about the whole step."""

        def part(x: Tensor | None) -> Tensor | None:
            return None if x is None else x[index]

        return PairInputs(
            chosen=self.chosen[index],
            rejected=self.rejected[index],
            chosen_tokens=self.chosen_tokens[index],
            rejected_tokens=self.rejected_tokens[index],
            ref_chosen=part(self.ref_chosen),
            ref_rejected=part(self.ref_rejected),
            margins=part(self.margins),
            step_tokens=self.mean_tokens,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class UnpairedInputs:
    """Answers that are each marked good or bad: those of one optimizer step, or a part of them.

    Example:
        >>> import torch
        >>> x = torch.tensor([-2.0, -3.0])
        >>> answers = UnpairedInputs(logp=x, ref_logp=x - 1, desirable=torch.tensor([True, False]))
        >>> answers.ratio
        tensor([1., 1.])
    """

    logp: Float[Tensor, " seq"]
    """Sum of log-probabilities of each answer under the current parameters."""
    ref_logp: Float[Tensor, " seq"]
    """The same under the reference."""
    desirable: Bool[Tensor, " seq"]
    """Whether the answer is a good one."""
    mismatched: Float[Tensor, " other"] | None = None
    """Sums of answers after prompts that they do not belong to, over the whole step (kto)."""
    ref_mismatched: Float[Tensor, " other"] | None = None
    """The same under the reference."""
    density_ratio: Float[Tensor, " seq"] | None = None
    """Weight of each undesirable answer: how likely its prompt is among the good ones (bco)."""
    history: Average | None = None
    """Implicit rewards of all earlier steps (bco); None: this is the first."""
    is_whole: bool = True
    """Whether these are all answers of the step."""

    def __post_init__(self) -> None:
        if (self.mismatched is None) != (self.ref_mismatched is None):
            why = "the policy and the reference score the same mismatched answers"
            raise UserError("ref_mismatched", None, why, "pass mismatched and ref_mismatched")
        for name in ("ref_logp", "mismatched", "ref_mismatched", "density_ratio"):
            constant: Tensor | None = object.__getattribute__(self, name)
            if constant is not None:
                object.__setattr__(self, name, constant.detach())

    @property
    def ratio(self) -> Float[Tensor, " seq"]:
        """log π - log π_ref of each answer."""
        return self.logp - self.ref_logp

    def policy(self) -> dict[str, Tensor]:
        """The sums that carry a gradient, by field."""
        return {"logp": self.logp}

    def take(self, index: Int[Tensor, " part"]) -> "UnpairedInputs":
        """The answers at these places; what is over the whole step stays whole."""
        ratio = self.density_ratio
        return replace(
            self,
            logp=self.logp[index],
            ref_logp=self.ref_logp[index],
            desirable=self.desirable[index],
            density_ratio=None if ratio is None else ratio[index],
            is_whole=False,
        )


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss:
    """A loss for every pair or answer, and the implicit rewards behind it.

    The loss of the step is the mean over its pairs or answers; nothing here is divided by their
    number.

    Example:
        >>> import torch
        >>> half = torch.tensor([0.5])
        >>> PreferenceLoss(loss=half, rewards={"chosen": half}, metrics={}).loss
        tensor([0.5000])
    """

    loss: Float[Tensor, " n"]
    """Loss of each pair or answer."""
    rewards: Mapping[str, Float[Tensor, " n"]]
    """Implicit reward of each `chosen` and `rejected` answer, or of each answer (`logp`), without
    a gradient."""
    metrics: Mapping[str, Average]
    """Averages that merge over micro-batches and ranks."""


Preference = Callable[..., PreferenceLoss]
"""`(inputs: PairInputs | UnpairedInputs, *, hparams) -> PreferenceLoss`."""

preference_losses: Registry[Preference] = Registry("preference loss", "preference.loss_type")


def _referenced(sums: Float[Tensor, " pair"] | None) -> Float[Tensor, " pair"]:
    """The reference's sums; a UserError where the loss needs a reference and has none."""
    if sums is None:
        why = "the loss compares the policy with a reference"
        fix = "pass the reference's log-probabilities, or choose orpo, cpo or simpo"
        raise UserError("ref_chosen", None, why, fix)
    return sums


# Losses of pairs and of marked answers, put together with the metrics that all of them report.


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
