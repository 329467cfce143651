"""The parameters that learn, out of a model and back into it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from luyen.base.errors import UserError


def trained_parameters(module: nn.Module) -> dict[str, Tensor]:
    """Parameters that learn, by name; frozen ones come from the model's own files."""
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def restore_parameters(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Write saved values into the parameters that learn; they keep their addresses."""
    own = trained_parameters(module)
    _demand_same({n: p.shape for n, p in own.items()}, {n: t.shape for n, t in saved.items()})
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def _demand_same(own: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> None:
    """A UserError that names the first parameter that a checkpoint has not, or has otherwise."""
    for name in [*own, *saved]:
        if own.get(name) == saved.get(name):
            continue
        have, has = (tuple(of[name]) if name in of else "none" for of in (own, saved))
        why = f"it holds other weights than the model: {name} is {has} there and {have} here"
        fix = "give the model and the adapter that the checkpoint was made with"
        raise UserError("checkpoint", name, why, fix)
