"""The parameters that learn, out of a model and back into it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that learn, by name; frozen ones come from the model's own files."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def restore_parameters(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write saved values into the parameters that learn; they keep their addresses."""
    own = trained_parameters(module)
    assert own.keys() == saved.keys(), "the checkpoint holds other parameters than the model"
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])
