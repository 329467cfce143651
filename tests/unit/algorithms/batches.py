"""Small packed batches in float64 for unit tests."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from luyen.algorithms.layout import Layout
from luyen.algorithms.policy_losses import PolicyInputs
from luyen.algorithms.policy_losses.inputs import TokenLoss


def f64(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def layout_of(*lengths: int, mask: Sequence[bool] | None = None) -> Layout:
    """Sequences of these lengths; every token trains unless a mask is given."""
    total = sum(lengths)
    return Layout(
        mask=torch.tensor([True] * total if mask is None else list(mask), dtype=torch.bool),
        offsets=torch.tensor([0, *lengths]).cumsum(0),
        groups=torch.zeros(len(lengths), dtype=torch.int64),
    )


def one_token(
    logp: float, old_logp: float, advantage: float, statistics: Mapping[str, Tensor] | None = None
) -> PolicyInputs:
    """A step of one sequence of one trainable token."""
    return PolicyInputs(
        logp=f64(logp),
        old_logp=f64(old_logp),
        advantages=f64(advantage),
        layout=layout_of(1),
        statistics=statistics or {},
    )


def metrics_of(loss: TokenLoss) -> dict[str, float]:
    """Metrics as floats."""
    return {name: average.value() for name, average in loss.metrics.items()}
