"""How long the controller waits for replicas."""

from dataclasses import dataclass
from typing import final


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long the controller waits, and how often it begins again.

    Example:
        >>> Patience().deaths
        3
    """

    start_s: float = 600.0
    """Seconds without any replica that is ready, before the run is given up."""
    still_s: float = 300.0
    """Seconds in which a replica with work makes no pass, before it is taken for lost."""
    deaths: int = 3
    """Losses in a row that end the run."""
