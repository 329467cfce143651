"""The decoder layers of a model over packed sequences: what policies and reward models share."""

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor
from transformers import PreTrainedModel

from luyen.models.attention import AttentionContext, use_our_attention
from luyen.models.batch_invariant import batch_invariant_modules, gather_rows
from luyen.models.batch_invariant_linear import batch_invariant_single_rows
from luyen.models.fused.patch import FusedReport, fuse_layers
from luyen.models.hf_loading import no_warnings
from luyen.models.packed_attention import (
    PackedContext,
    Sharing,
    VarlenContext,
    packed_positions,
    share_prompts,
)

Read: TypeAlias = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""`(tokens, positions, context) -> last hidden states [tok, hidden]`."""


def prepare_layers(model: PreTrainedModel, device: torch.device) -> FusedReport | None:
    """Give a model our attention and, on this kind of device, layers that are exact or fused."""
    with no_warnings():
        use_our_attention(model)
    if device.type == "cuda":
        return fuse_layers(model)
    batch_invariant_modules(model)
    batch_invariant_single_rows(model)
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
    return gather_rows(hidden, sharing.place[where])


def _context(
    lengths: Sequence[int], device: torch.device, sharing: Sharing | None, *, is_exact: bool
) -> AttentionContext:
    """Attention for packed sequences on this kind of device."""
    if device.type == "cuda":
        return VarlenContext.of(lengths, device=device, is_exact=is_exact, sharing=sharing)
    return PackedContext.of(lengths, device=device, sharing=sharing)
