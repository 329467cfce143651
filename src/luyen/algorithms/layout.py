"""Packed sequences: which token belongs to which sequence, which trains, which group it is in.

Every function of this package works on flat `[tok]` tensors that hold the sequences of a batch one
after the other, without padding. A `Layout` says where each sequence begins.
"""

from dataclasses import dataclass, field
from typing import final

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from luyen.base.errors import UserError

# Sums by index that repeat to the last bit, wherever they are made.


def sum_by_index(
    x: Float[Tensor, " n"], index: Int[Tensor, " n"], count: int
) -> Float[Tensor, " count"]:
    """Sum of the x of each index below `count`; the order of the terms is fixed on every device.

    Example:
        >>> import torch
        >>> sum_by_index(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([0, 2, 0]), 3)
        tensor([5., 0., 2.])
    """
    zeros = x.new_zeros(count)
    if x.is_cuda:
        # `index_add` takes terms there as threads arrive with them; this sorts them first.
        return zeros.index_put((index,), x, accumulate=True)
    return zeros.index_add(0, index, x)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Where sequences begin, which tokens train, and which sequences share a prompt.

    Example:
        Two sequences of 3 and 2 tokens of one group; the first token of each is a prompt token.

        >>> layout = Layout(
        ...     mask=torch.tensor([False, True, True, False, True]),
        ...     offsets=torch.tensor([0, 3, 5]),
        ...     groups=torch.tensor([7, 7]),
        ... )
        >>> layout.segment.tolist(), layout.lengths().tolist()
        ([0, 0, 0, 1, 1], [2, 1])
    """

    mask: Bool[Tensor, " tok"]
    """True where the token was sampled by the policy and takes part in the loss."""
    offsets: Int[Tensor, " bounds"]
    """Start of each sequence, and the end of the last: `seq + 1` integers."""
    groups: Int[Tensor, " seq"]
    """A label per sequence; equal labels are samples of one prompt request."""
    segment: Int[Tensor, " tok"] = field(init=False)
    """Index of the sequence of each token."""

    def __post_init__(self) -> None:
        sequences = self.offsets.numel() - 1
        if sequences < 0 or self.groups.numel() != sequences:
            raise UserError(
                "groups",
                tuple(self.groups.shape),
                f"offsets of shape {tuple(self.offsets.shape)} describe {sequences} sequences",
                "pass one group label per sequence",
            )
        # On a device the answer would cost a wait, and repeat_interleave checks it there anyway.
        if self.offsets.device.type == "cpu" and int(self.offsets[-1]) != self.mask.numel():
            raise UserError(
                "offsets",
                int(self.offsets[-1]),
                f"the last offset must be the number of tokens, {self.mask.numel()}",
                "build offsets as the running sum of the sequence lengths, starting at 0",
            )
        index = torch.arange(sequences, device=self.offsets.device)
        segment = torch.repeat_interleave(index, self.offsets.diff(), output_size=self.mask.numel())
        object.__setattr__(self, "segment", segment)

    @property
    def num_sequences(self) -> int:
        """How many sequences are packed here, empty and fully masked ones included."""
        return self.groups.numel()

    def lengths(self) -> Int[Tensor, " seq"]:
        """Trainable tokens of each sequence."""
        zeros = torch.zeros(self.num_sequences, dtype=torch.int64, device=self.mask.device)
        return zeros.index_add(0, self.segment, self.mask.long())

    def sum(self, x: Float[Tensor, " tok"]) -> Float[Tensor, " seq"]:
        """Sum of x over each sequence, masked tokens included: clean x first (`on_mask`)."""
        return sum_by_index(x, self.segment, self.num_sequences)

    def mean(self, x: Float[Tensor, " tok"]) -> Float[Tensor, " seq"]:
        """Mean of x over the trainable tokens of each sequence; 0 for a sequence with none."""
        return self.sum(self.on_mask(x)) / self.lengths().clamp(min=1)

    def max(self, x: Float[Tensor, " tok"]) -> Float[Tensor, " seq"]:
        """Largest x over the trainable tokens of each sequence; -inf for a sequence with none."""
        lowest = x.new_full((self.num_sequences,), -torch.inf)
        shown = torch.where(self.mask, x, -torch.inf)
        return lowest.scatter_reduce(0, self.segment, shown, "amax", include_self=True)

    def spread(self, per_sequence: Float[Tensor, " seq"]) -> Float[Tensor, " tok"]:
        """The value of its sequence on every trainable token, 0 on all other tokens."""
        return self.on_mask(per_sequence[self.segment])

    def on_mask(self, x: Float[Tensor, " tok"]) -> Float[Tensor, " tok"]:
        """x with every masked position replaced by 0, whatever it held (NaN included)."""
        return torch.where(self.mask, x, 0.0)
