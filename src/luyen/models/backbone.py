"""The decoder layers of a model over packed sequences: what policies and reward models share."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from luyen.models.attention import AttentionContext, use_our_attention
from luyen.models.fused.patch import FusedReport, fuse_layers
from luyen.models.packed import PackedContext, packed_positions
from luyen.models.picked import picked
from luyen.models.sharing import Sharing, share_prompts
from luyen.models.silence import no_warnings
from luyen.models.single_rows import steady_single_rows
from luyen.models.steady import steady_modules
from luyen.models.varlen import VarlenContext

Read: TypeAlias = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""`(tokens, positions, context) -> last hidden states [tok, hidden]`."""


def prepare_layers(model: PreTrainedModel, device: torch.device) -> FusedReport | None:
    """Give a model our attention and, on this kind of device, layers that are exact or fused."""
    with no_warnings():
        use_our_attention(model)
    if device.type == "cuda":
        return fuse_layers(model)
    steady_modules(model)
    steady_single_rows(model)
    return None


def hidden_at(
    read: Read,
    tokens: Tensor,
    lengths: Sequence[int],
    mask: Tensor,
    where: Tensor,
    *,
    is_exact: bool,
    is_shared: bool = True,
) -> Tensor:
    """Last hidden states at the packed positions `where`.

    With `is_shared`, what several sequences begin with, up to their first True in `mask`, is
    computed once; `where` may point anywhere.
    """
    positions = packed_positions(lengths, tokens.device)
    sharing = share_prompts(tokens, lengths, mask) if is_shared else None
    if sharing is None or sharing.saved == 0:
        context = _context(lengths, tokens.device, None, is_exact=is_exact)
        return read(tokens, positions, context).index_select(0, where)
    context = _context(lengths, tokens.device, sharing, is_exact=is_exact)
    hidden = read(tokens[sharing.first], positions[sharing.first], context)
    return picked(hidden, sharing.place[where])


def _context(
    lengths: Sequence[int], device: torch.device, sharing: Sharing | None, *, is_exact: bool
) -> AttentionContext:
    """Attention for packed sequences on this kind of device."""
    if device.type == "cuda":
        return VarlenContext.of(lengths, device=device, is_exact=is_exact, sharing=sharing)
    return PackedContext.of(lengths, device=device, sharing=sharing)
