"""Attention over packed sequences on a GPU: no padding, shared prompts computed once.

The queries of a sequence are its own tokens only; a prompt that several sequences begin with
belongs to the first of them. Keys and values are laid out for every sequence in full.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from luyen.models.cuda.segments import Segments
from luyen.models.kernels import Window
from luyen.models.sharing import Sharing


@final
class _Spread(torch.autograd.Function):
    """Rows of distinct tokens at every place where they stand.

    The gradient of a token sums its places in fp32 and in a fixed order, where PyTorch's own sum
    on a GPU depends on which place comes first.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, sharing: Sharing) -> Tensor:
        ctx.sharing = sharing
        return x.index_select(0, sharing.place)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sharing: Sharing = ctx.sharing
        total = grads[0].index_select(0, sharing.first)
        for distinct, places in sharing.copies:
            every = grads[0].index_select(0, places.flatten())
            summed = every.view(*places.shape, *every.shape[1:]).sum(1, dtype=torch.float32)
            total[distinct] = summed.to(total.dtype)
        return total, None


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VarlenContext:
    """Which packed tokens see each other: those of one sequence, causally.

    Example:
        >>> VarlenContext.of([3, 2], device="cpu", is_exact=True).segments.max_query
        3
    """

    segments: Segments
    """Queries and keys of each sequence."""
    sharing: Sharing | None
    """How keys of shared prompts are laid out; None: nothing is shared."""
    is_exact: bool
    """Whether results must be those of decoding, to the bit."""

    @classmethod
    def of(
        cls,
        lengths: Sequence[int],
        *,
        device: torch.device | str,
        is_exact: bool,
        sharing: Sharing | None = None,
    ) -> "VarlenContext":
        """The context of sequences of these lengths, packed one after the other."""
        own = lengths if sharing is None else sharing.own
        pairs = [(q, n) for q, n in zip(own, lengths, strict=True) if n]
        segments = Segments.packed([q for q, _ in pairs], [n for _, n in pairs], device=device)
        return cls(segments=segments, sharing=sharing, is_exact=is_exact)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        del layer
        from luyen.models.cuda.varlen import flash_varlen, varlen_attention

        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
        if self.sharing is not None:
            k, v = (_spread(x, self.sharing) for x in (k, v))
        is_half = q.dtype in (torch.bfloat16, torch.float16)
        if q.is_cuda and is_half and window.is_fused and not self.is_exact:
            return flash_varlen(q, k, v, self.segments, scale, window.sliding)[None]
        return varlen_attention(
            q,
            k,
            v,
            self.segments,
            scale,
            sliding=window.sliding,
            softcap=window.softcap,
            sinks=window.sinks,
        )[None]


def _spread(x: Tensor, sharing: Sharing) -> Tensor:
    out: Any = _Spread.apply(x, sharing)
    return out
