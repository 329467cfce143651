"""Metrics that merge: averages with counts, and calibration; any split gives the same value."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.layout import sum_by_index


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
