"""How the layers reach the pages while prompts are read and while tokens are drawn."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from luyen.models.kernels import Window
from luyen.models.paged import Chunks, Groups, decode, decode_grouped, prefill, store
from luyen.rollout.native.paged.pool import KeyValues


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ReadContext:
    """Chunks of prompts: each looks at what its sequence has in its pages, and at itself.

    Example:
        Made by `PagedEngine` for every pass that reads prompts.
    """

    cache: KeyValues
    """Pages of all layers."""
    slots: Tensor
    """Where each packed token is stored."""
    tables: Tensor
    """`[chunks, pages]`."""
    chunks: Chunks
    """Lengths of the chunks and of what precedes them."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, tok, width]` in, `[1, tok, heads, width]` out."""
        pages = self.cache.layer(layer)
        store(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots)
        q = query[0].transpose(0, 1)
        return prefill(q, pages, self.tables, self.chunks, scale, window)[None]


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class DrawContext:
    """One new token for each row.

    Example:
        Made by `PagedEngine` for every decode step.
    """

    cache: KeyValues
    """Pages of all layers."""
    slots: Tensor
    """Where each row's new token is stored; below 0: the row rests."""
    tables: Tensor
    """`[rows, pages]`."""
    lengths: Tensor
    """Keys of each row with the new one; 0: the row rests."""
    is_split: bool
    """Whether a row is spread over several programs."""
    groups: Groups | None = None
    """Rows that read common pages together, in another order of sums; None: none does."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: Window
    ) -> Tensor:
        """`[1, heads, rows, width]` in, `[1, rows, heads, width]` out."""
        pages = self.cache.layer(layer)
        store(pages, key[0].transpose(0, 1), value[0].transpose(0, 1), self.slots)
        q = query[0].transpose(0, 1)
        read = q, pages, self.tables, self.lengths
        if self.groups is None:
            return decode(*read, scale, window, is_split=self.is_split)[None]
        return decode_grouped(*read, self.groups, scale, window, is_split=self.is_split)[None]
