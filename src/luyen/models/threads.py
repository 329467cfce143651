"""How many threads a model is worth."""

import torch
from torch import nn

_SMALL = 10_000_000


def choose_threads(model: nn.Module) -> None:
    """One thread for a tiny model: waiting for a second costs more than it computes."""
    if sum(p.numel() for p in model.parameters()) < _SMALL:
        torch.set_num_threads(1)
