"""Sequential tests of a mean: evidence that may be looked at after every observation.

The evidence against "the mean of d is at most m", for values d in [-1, 1], is the wealth of a
gambler who starts with 1 and stakes a share on every d - m. If the claim is true, no strategy makes
the expected wealth grow, so the probability that it ever reaches 1/alpha is at most alpha (Ville
1939; Waudby-Smith and Ramdas 2024, arXiv:2010.09686). Nothing is assumed of the distribution, and
stopping at any time is allowed. Several shares are staked side by side, and their mean is the
evidence.
"""

import math
from dataclasses import dataclass, replace
from typing import final

_SHARES = (0.01, 0.03, 0.1, 0.2, 0.4, 0.6, 0.8)
"""Stakes as shares of the largest one that cannot lose everything."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class MeanTest:
    """Evidence that the mean of values in [-1, 1] is above a bound.

    Example:
        >>> test = MeanTest(bound=0.0)
        >>> for _ in range(20):
        ...     test = test.observe(0.5)
        >>> test.is_significant(0.05), MeanTest(bound=0.0).observe(-1.0).is_significant(0.05)
        (True, False)
    """

    bound: float
    """The mean is claimed to be at most this, in [-1, 1)."""
    log_wealths: tuple[float, ...] = (0.0,) * len(_SHARES)
    """Logarithm of the wealth of each stake."""
    count: int = 0
    """Values so far."""

    def observe(self, value: float) -> "MeanTest":
        """The test after one more value."""
        if not -1.0 <= value <= 1.0:
            raise ValueError(f"value must be from -1 to 1, got {value}")
        excess, most = value - self.bound, 1.0 / (1.0 + self.bound)
        grown = (
            wealth + math.log1p(share * most * excess)
            for wealth, share in zip(self.log_wealths, _SHARES, strict=True)
        )
        return replace(self, log_wealths=tuple(grown), count=self.count + 1)

    @property
    def log_evidence(self) -> float:
        """Logarithm of the mean wealth: at most log(1/alpha) with probability 1 - alpha."""
        top = max(self.log_wealths)
        total = sum(math.exp(wealth - top) for wealth in self.log_wealths)
        return top + math.log(total / len(self.log_wealths))

    def is_significant(self, alpha: float) -> bool:
        """Whether the evidence refutes the claim at an error rate of `alpha`."""
        return self.log_evidence >= -math.log(alpha)
