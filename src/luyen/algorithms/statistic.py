"""Metrics that merge: a mean carries its count, so any split of a batch gives the same value."""

from dataclasses import dataclass
from typing import final

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Average:
    """A sum and the number of things summed; stays on the device until `value` is asked.

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
