"""Policy losses: a ratio, a surrogate and a correction, composed and named.

Importing this package registers every built-in loss.
"""

from luyen.algorithms.policy_losses import (
    bypass,
    clipped,
    covariance,
    weighted,
)
from luyen.algorithms.policy_losses.inputs import (
    PolicyInputs,
    TokenLoss,
    loss_statistics,
    policy_losses,
)

__all__ = [
    "PolicyInputs",
    "TokenLoss",
    "bypass",
    "clipped",
    "covariance",
    "loss_statistics",
    "policy_losses",
    "weighted",
]
