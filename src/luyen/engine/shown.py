"""The type a parameter has for the world, where its shards are kept in another one.

A sharded bf16 model keeps fp32 shards. Checkpoints and samplers see bf16 weights and fp32 masters
beside them, as on one device, so that any number of ranks can go on from what another one saved.
"""

from collections.abc import Container, Iterator

import torch
from torch import Tensor, nn

_SHOWN = "luyen_shown_dtype"


def show_as(module: nn.Module, names: Container[str], dtype: torch.dtype | None) -> None:
    """Note that these parameters are weights of this type to everybody else."""
    for name, parameter in module.named_parameters():
        if name in names and dtype is not None and parameter.dtype != dtype:
            vars(parameter)[_SHOWN] = dtype


def shown_dtype(parameter: Tensor) -> torch.dtype:
    """The type that others see."""
    return vars(parameter).get(_SHOWN, parameter.dtype)


def shown_parameters(module: nn.Module) -> dict[str, Tensor]:
    """`luyen.models.state.trained_parameters` as others see them; shards stay shards."""
    return dict(shown_in_turn(module))


def shown_in_turn(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The same, one by one: in another type all of them would take half as much memory again."""
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            # To detach a shard takes longer than to read it; where nothing is recorded, none need.
            own = parameter.detach() if torch.is_grad_enabled() else parameter
            dtype = shown_dtype(parameter)
            yield name, own if own.dtype == dtype else own.to(dtype)
