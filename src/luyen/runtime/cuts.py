"""How the work of a step is cut for ranks that are elsewhere."""

from dataclasses import dataclass
from typing import final

from luyen.engine.passes import Passes


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Cuts:
    """Micro-batches of each kind of pass, and how tokens weigh in the value loss.

    Example:
        >>> Cuts(actor=Passes(), log_probs=Passes(), reference=Passes()).critic is None
        True
    """

    actor: Passes
    """The policy's update."""
    log_probs: Passes
    """Old log-probabilities."""
    reference: Passes
    """Log-probabilities of the reference."""
    critic: Passes | None = None
    """Values and the critic's update; None: there is no critic."""
    value_aggregation: str = "token-mean"
    """How the value losses of tokens become one number."""
    value_scale: float | None = None
    """Divisor of one of those ways."""
