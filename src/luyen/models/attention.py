"""The one attention function of every Hugging Face model, and its reference arithmetic.

Models pass their forward keyword arguments on to it, so the context travels with the call: a global
could change before a checkpointed layer is recomputed, and gradients would be silently wrong.
"""

from dataclasses import dataclass
from typing import Any, Protocol, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from luyen.base.process_setup import least_rows
from luyen.models.batch_invariant import batch_invariant

# The attention arithmetic itself, for training and for decoding.
#
# Plain attention goes through PyTorch's fused kernel. Soft-capped scores and attention sinks
# are not among its features and are written out.

_BLOCK = 256
"""Keys that are summed at once where attention is written out."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class AttentionWindow:
    """What some architectures add to attention.

    Example:
        >>> AttentionWindow(sliding=128).is_plain
        False
    """

    sliding: int | None = None
    """A query sees this many of the latest keys only."""
    softcap: float | None = None
    """Scores are squashed to plus or minus this value."""
    sinks: Tensor | None = None
    """A logit per head that takes probability and gives nothing."""

    @property
    def is_plain(self) -> bool:
        """Whether causality is all."""
        return self.sliding is None and self.is_fused

    @property
    def is_fused(self) -> bool:
        """Whether PyTorch's kernel can do it, with a mask."""
        return self.softcap is None and self.sinks is None


def causal_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: AttentionWindow
) -> Tensor:
    """`[batch, heads, length, width]` causal attention; grouped heads share keys."""
    if window.is_plain:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    place = torch.arange(q.shape[2], device=q.device)
    mask = place[:, None] >= place[None, :]
    if window.sliding is not None:
        mask &= place[:, None] - place[None, :] < window.sliding
    return masked_attention(q, k, v, mask, scale, window)


def decode_mask(lengths: Tensor, span: int, window: AttentionWindow, dtype: torch.dtype) -> Tensor:
    """What `decode_attention` shows to the query of each row: `[rows, 1, 1, span]`.

    PyTorch's kernel adds a mask of the scores' type; from another one it makes this one each time.
    """
    place = torch.arange(span, device=lengths.device)
    mask = place[None, :] < lengths[:, None]
    if window.sliding is not None:
        mask &= place[None, :] >= lengths[:, None] - window.sliding
    shown = mask[:, None, None, :]
    if not window.is_fused:
        return shown
    return torch.zeros(shown.shape, dtype=dtype, device=shown.device).masked_fill_(
        ~shown, -torch.inf
    )


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, shown: Tensor, scale: float, window: AttentionWindow
) -> Tensor:
    """One query a row: `q [rows, heads, width]` against `k, v [rows, kv heads, length, width]`.

    `shown` is what `decode_mask` gives for the keys of each row that are real, the newest being the
    query's own. The heads that share keys are read as queries of one head, so that keys are read
    once.
    """
    rows, heads, width = q.shape
    # A few rows are multiplied by other code, with other rounding: queries come several times.
    if window.is_fused:
        group = heads // k.shape[1]
        copies = -(-least_rows() // group)
        grouped = q.reshape(rows, k.shape[1], group, width)
        if copies > 1:
            grouped = grouped.repeat(1, 1, copies, 1)
        out = F.scaled_dot_product_attention(grouped, k, v, attn_mask=shown, scale=scale)
        out = out[:, :, :group]
    else:
        several = q[:, :, None].repeat(1, 1, max(2, least_rows()), 1)
        out = masked_attention(several, k, v, shown, scale, window)[:, :, 0]
    return out.reshape(rows, heads, v.shape[-1])


def masked_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, window: AttentionWindow
) -> Tensor:
    """`[batch, heads, queries, width]` over the keys that `mask` shows to each query."""
    if window.is_fused:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = (q @ k.transpose(-1, -2)) * scale
    if window.softcap is not None:
        scores = window.softcap * batch_invariant(torch.tanh, scores / window.softcap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if window.sinks is not None:
        sinks = window.sinks.view(1, -1, 1, 1).expand(scores.shape[0], -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks.to(scores.dtype)], -1)
    wide = torch.promote_types(scores.dtype, torch.float32)
    weights = torch.softmax(scores.to(wide), -1).to(v.dtype)
    return _weighted(weights[..., : k.shape[2]], v)


def _weighted(weights: Tensor, v: Tensor) -> Tensor:
    """`weights @ v` in blocks of keys: how a longer sum is split would depend on its length."""
    blocks = zip(weights.split(_BLOCK, -1), v.split(_BLOCK, -2), strict=True)
    first, *rest = (w @ x for w, x in blocks)
    for part in rest:
        first = first + part
    return first


ATTENTION = "luyen"
"""Name under which the function is registered with transformers."""


class AttentionContext(Protocol):
    """Knows which tokens see each other, and where keys and values are kept."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: AttentionWindow,
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        ...


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    luyen_context: AttentionContext | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend as the context of this call says; a call without one is a mistake of ours."""
    assert luyen_context is not None, "a model was called without an attention context"
    assert dropout == 0.0, "dropout in attention makes log-probabilities random"
    if attention_mask is not None:
        raise ValueError("the model makes a mask of its own, which may hold a bias we do not know")
    layer: Any = module
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    window = AttentionWindow(sliding=sliding_window, softcap=softcap, sinks=s_aux)
    return luyen_context.attend(layer.layer_idx, query, key, value, scale, window), None


def use_our_attention(model: PreTrainedModel) -> None:
    """Make every attention layer of the model call `attention`."""
    AttentionInterface.register(ATTENTION, attention)
    model.set_attn_implementation(ATTENTION)
