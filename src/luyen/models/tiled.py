"""Feed-forward layers a slice of the tokens at a time.

The inner activation, several times as wide as the residual stream, exists for one slice only: the
backward pass computes a slice again before it asks for its gradient. A token's result does not
depend on its neighbours, so slices change no bit where the matrix product promises as much.
"""

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from luyen.base.errors import UserError

_NAME = "mlp"
"""What transformers calls the feed-forward part of a decoder layer."""
_ROUTED = {"experts", "router", "gate"}
"""Parts of a layer that sends tokens to experts: its results are not one tensor a token."""
_ROWS = 256
"""Without gradients slices are not made smaller: a decode step is one slice."""


def tile_feed_forward(model: nn.Module, *, slices: int) -> int:
    """Make every feed-forward layer compute in slices, in place; how many there are.

    To be called last: what changes a layer's forward afterwards undoes it. A UserError when the
    model has none, or when experts are chosen inside them.
    """
    found = [m for name, m in model.named_modules() if name.rpartition(".")[2] == _NAME]
    routed = [m for m in found if _ROUTED & {name for name, _ in m.named_children()}]
    if not found or routed:
        why = "its feed-forward layers send tokens to experts" if routed else "it has no such layer"
        raise UserError(
            "actor_rollout_ref.model.tiled_mlp.enabled",
            True,
            f"{type(model).__name__} cannot be computed in slices: {why}",
            "set it to false",
        )
    for module in found:
        _tile(module, slices)
    return len(found)


def _tile(module: Any, slices: int) -> None:
    module.luyen_whole = module.forward
    module.luyen_slices = slices
    module.forward = MethodType(_tiled_forward, module)


def _tiled_forward(self: Any, x: Tensor) -> Tensor:
    """The layer's own forward on `[..., tok, hidden]`, slice by slice."""
    is_learning = torch.is_grad_enabled()
    size = max(-(-x.shape[-2] // self.luyen_slices), 1 if is_learning else _ROWS)
    if size >= x.shape[-2]:
        return self.luyen_whole(x)
    parts = x.split(size, -2)
    if not is_learning:
        return torch.cat([self.luyen_whole(part) for part in parts], -2)
    # There is no dropout whose mask would have to be drawn again.
    made = [
        checkpoint(self.luyen_whole, part, use_reentrant=False, preserve_rng_state=False)
        for part in parts
    ]
    return torch.cat(made, -2)
