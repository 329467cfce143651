"""How the layers reach the pages while prompts are read and while tokens are drawn."""

from dataclasses import dataclass
from typing import final

from torch import Tensor

from luyen.models.fused.rotary import Joint
from luyen.models.kernels import Window
from luyen.models.paged import Chunks, Groups, decode, decode_grouped, prefill, store
from luyen.models.paged_joint import decode_joint
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
    arrivals: Tensor
    """A counter for each row and key head, 0 between two layers."""
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
            ways = {"is_split": self.is_split, "arrivals": self.arrivals}
            return decode(*read, scale, window, **ways)[None]
        return decode_grouped(*read, self.groups, scale, window, is_split=self.is_split)[None]

    def attend_joint(self, layer: int, joint: Joint, scale: float, window: Window) -> Tensor:
        """The same, with turning and storing in the kernel that attends; `[1, rows, heads, width]`.

        Rows that read in groups have kernels that expect both to be done.
        """
        if self.groups is not None or not joint.qkv.is_cuda:
            query, key, value = (x.transpose(0, 1)[None] for x in joint.turned())
            return self.attend(layer, query, key, value, scale, window)
        return decode_joint(
            joint,
            self.cache.layer(layer),
            self.tables,
            self.lengths,
            scale,
            window,
            is_split=self.is_split,
            arrivals=self.arrivals,
        )[None]
