"""The only denominators: one weight per token for losses, averages with their counts for metrics.

A weight follows from the mask of one whole optimizer step. Every loss is
`(weights * per_token).sum()`. The layout given here covers all micro-batches and all ranks of the
step, so the loss and its gradient do not depend on how the step was split.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.checks import require_positive
from luyen.algorithms.layout import Layout, sum_by_index
from luyen.base.errors import UserError, did_you_mean

FIELD = "actor_rollout_ref.actor.loss_agg_mode"


def _token_count(layout: Layout) -> Float[Tensor, ""]:
    return layout.mask.sum().double().clamp(min=1)


def _sequence_count(layout: Layout) -> Float[Tensor, ""]:
    """Sequences with at least one trainable token."""
    return (layout.lengths() > 0).sum().double().clamp(min=1)


def token_mean(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Every trainable token of the step weighs the same (DAPO, arXiv:2503.14476)."""
    del loss_scale_factor
    return layout.mask.double() / _token_count(layout)


def token_sum(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Weight 1 for every trainable token."""
    del loss_scale_factor
    return layout.mask.double()


def seq_mean_token_sum(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Mean over sequences of the sum over tokens."""
    del loss_scale_factor
    return layout.mask.double() / _sequence_count(layout)


def seq_mean_token_mean(layout: Layout, loss_scale_factor: float | None) -> Float[Tensor, " tok"]:
    """Mean over sequences of the mean over tokens (GRPO, arXiv:2402.03300)."""
    del loss_scale_factor
    per_sequence = 1.0 / (layout.lengths().double().clamp(min=1) * _sequence_count(layout))
    return layout.spread(per_sequence)


def seq_mean_token_sum_norm(
    layout: Layout, loss_scale_factor: float | None
) -> Float[Tensor, " tok"]:
    """Mean over sequences of the sum over tokens, over a constant (Dr. GRPO, arXiv:2503.20783)."""
    if loss_scale_factor is None:
        raise UserError(
            "loss_scale_factor",
            None,
            "seq-mean-token-sum-norm divides by a constant length, and packed tokens have none",
            "set actor_rollout_ref.actor.loss_scale_factor, for example to max_response_length",
        )
    require_positive("loss_scale_factor", loss_scale_factor)
    return seq_mean_token_sum(layout, None) / loss_scale_factor


AGGREGATIONS: dict[str, Callable[[Layout, float | None], Tensor]] = {
    "token-mean": token_mean,
    "token-sum": token_sum,
    "seq-mean-token-sum": seq_mean_token_sum,
    "seq-mean-token-mean": seq_mean_token_mean,
    "seq-mean-token-sum-norm": seq_mean_token_sum_norm,
}


def aggregation_weights(
    mode: str,
    layout: Layout,
    *,
    loss_scale_factor: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " tok"]:
    """Weight of each token of one whole optimizer step; 0 on masked tokens.

    Sequences without a trainable token count nowhere. `loss_scale_factor` is read by
    `seq-mean-token-sum-norm` alone. Computed in float64, then cast.

    Example:
        >>> layout = Layout(mask=torch.tensor([True, True, False, True]),
        ...                 offsets=torch.tensor([0, 3, 4]), groups=torch.tensor([0, 0]))
        >>> aggregation_weights("seq-mean-token-mean", layout).tolist()
        [0.25, 0.25, 0.0, 0.5]
    """
    if mode not in AGGREGATIONS:
        raise UserError(FIELD, mode, "no such aggregation", did_you_mean(mode, AGGREGATIONS))
    return AGGREGATIONS[mode](layout, loss_scale_factor).to(dtype)


# Metrics that merge: averages with counts, and calibration; any split gives the same value.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """A sum and the number of things summed; stays on the device until `value` is called.

    Example:
        >>> a = Average.over(torch.tensor([1.0, 3.0, 9.0]), torch.tensor([True, True, False]))
        >>> b = Average.over(torch.tensor([5.0]), torch.tensor([True]))
        >>> a.merge(b).value()
        3.0
    """

    total: Float[Tensor, ""]
    """Sum of the values that count."""
    count: Float[Tensor, ""]
    """How many values count."""

    @classmethod
    def over(cls, x: Float[Tensor, " n"], mask: Bool[Tensor, " n"]) -> "Average":
        """The mean of x where mask is True; what x holds elsewhere does not matter."""
        kept = torch.where(mask, x.detach(), 0.0)
        return cls(total=kept.sum(), count=mask.sum().to(kept.dtype))

    def merge(self, other: "Average") -> "Average":
        """The average over both parts."""
        return Average(total=self.total + other.total, count=self.count + other.count)

    def value(self) -> float:
        """The mean as a float; NaN when nothing counted."""
        return float(self.total / self.count)


# Calibration error over bins of predicted probability, as sums that merge.

BINS = 15
"""Equal parts of [0, 1]."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Sums over bins of predicted probability; parts of a batch merge into the whole.

    Example:
        >>> predicted = torch.tensor([0.9, 0.9, 0.9, 0.9])
        >>> observed = torch.tensor([1.0, 1.0, 1.0, 0.0])
        >>> mask = torch.ones(4, dtype=torch.bool)
        >>> found = Calibration.of_probabilities(predicted, observed, mask)
        >>> round(found.error(), 4)
        0.15
    """

    predicted: Float[Tensor, " bin"]
    """Sum of the predicted probabilities of each bin."""
    observed: Float[Tensor, " bin"]
    """Sum of the outcomes of each bin."""
    count: Float[Tensor, " bin"]
    """Predictions of each bin."""

    @classmethod
    def of_probabilities(
        cls,
        probability: Float[Tensor, " n"],
        outcome: Float[Tensor, " n"],
        mask: Bool[Tensor, " n"],
    ) -> "Calibration":
        """From predictions and outcomes in [0, 1] where the mask is True; sums are in float64."""
        predicted = torch.where(mask, probability.detach(), 0.0).double()
        observed = torch.where(mask, outcome.detach(), 0.0).double()
        place = (predicted * BINS).long().clamp(0, BINS - 1)
        return cls(
            predicted=sum_by_index(predicted, place, BINS),
            observed=sum_by_index(observed, place, BINS),
            count=sum_by_index(mask.double(), place, BINS),
        )

    @classmethod
    def of_choices(cls, gap: Float[Tensor, " n"], right: Float[Tensor, " n"]) -> "Calibration":
        """From gaps between two scores: the choice is made with probability σ(|gap|)."""
        sure = torch.sigmoid(gap.abs())
        return cls.of_probabilities(sure, right, torch.ones_like(sure, dtype=torch.bool))

    def merge(self, other: "Calibration") -> "Calibration":
        """The calibration over both parts."""
        return Calibration(
            predicted=self.predicted + other.predicted,
            observed=self.observed + other.observed,
            count=self.count + other.count,
        )

    def error(self) -> float:
        """Expected calibration error: mean distance of a bin's probability from its outcomes.

        NaN when nothing was predicted.
        """
        return float((self.predicted - self.observed).abs().sum() / self.count.sum())
