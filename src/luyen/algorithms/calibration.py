"""Calibration: of what a model calls 80% sure, does 80% hold? As sums that merge."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from luyen.algorithms.summed import summed

BINS = 15
"""Equal parts of [0, 1]."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Sums over bins of predicted probability; parts of a batch merge into the whole.

    Example:
        >>> said = torch.tensor([0.9, 0.9, 0.9, 0.9])
        >>> held = torch.tensor([1.0, 1.0, 1.0, 0.0])
        >>> found = Calibration.of_probabilities(said, held, torch.ones(4, dtype=torch.bool))
        >>> round(found.error(), 4)
        0.15
    """

    said: Float[Tensor, " bin"]
    """Sum of the predicted probabilities of each bin."""
    held: Float[Tensor, " bin"]
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
        said = torch.where(mask, probability.detach(), 0.0).double()
        held = torch.where(mask, outcome.detach(), 0.0).double()
        place = (said * BINS).long().clamp(0, BINS - 1)
        return cls(
            said=summed(said, place, BINS),
            held=summed(held, place, BINS),
            count=summed(mask.double(), place, BINS),
        )

    @classmethod
    def of_choices(cls, gap: Float[Tensor, " n"], right: Float[Tensor, " n"]) -> "Calibration":
        """From gaps between two scores: the choice is made with probability σ(|gap|)."""
        sure = torch.sigmoid(gap.abs())
        return cls.of_probabilities(sure, right, torch.ones_like(sure, dtype=torch.bool))

    def merge(self, other: "Calibration") -> "Calibration":
        """The calibration over both parts."""
        return Calibration(
            said=self.said + other.said,
            held=self.held + other.held,
            count=self.count + other.count,
        )

    def error(self) -> float:
        """Expected calibration error: mean distance of a bin's probability from its outcomes.

        NaN when nothing was predicted.
        """
        return float((self.said - self.held).abs().sum() / self.count.sum())
