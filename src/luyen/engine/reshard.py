"""Sharded weights at rest between passes."""

from torch import nn
from torch.distributed.fsdp import FSDPModule


def reshard(model: nn.Module) -> None:
    """Let go of whole weights that a pass without gradients has left behind on a sharded model.

    They would be taken for the current ones after the shards have changed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
