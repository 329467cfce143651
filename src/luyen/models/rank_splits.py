"""How ranks divide a pass, as a model sees it: the tokens, the vocabulary, or the experts."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from luyen.models.attention import AttentionContext
from luyen.models.head import Head, TokenScores, log_of_sum, sum_exponentials

# Tokens of a pass over ranks.

Read: TypeAlias = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""`(tokens, positions, context) -> last hidden states [tok, hidden]`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OwnPlaces:
    """The places of a pass whose hidden states this rank computes.

    Example:
        >>> import torch
        >>> OwnPlaces(index=torch.tensor([2]), rows=torch.tensor([0]), weight=1.0).weight
        1.0
    """

    index: Tensor
    """Which of the places."""
    rows: Tensor
    """Their rows among this rank's hidden states."""
    weight: float
    """1; or 0, where the rank has no place and computes one that does not count."""


class SequenceSplit(Protocol):
    """Divides the tokens of a pass over ranks that all call it with the same pass."""

    def read(
        self, read: Read, tokens: Tensor, positions: Tensor, context: AttentionContext
    ) -> Tensor:
        """Last hidden states of this rank's tokens."""
        ...

    def own_places(self, places: Tensor, tokens: int) -> OwnPlaces:
        """Which places this rank's tokens have, of a pass over so many tokens."""
        ...

    def join(self, values: Tensor, own: OwnPlaces, count: int) -> Tensor:
        """Values at all `count` places, from those that each rank has at its own."""
        ...


# Experts of a layer over ranks.


@final
@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ExpertSplit:
    """Ranks that each have some experts of a layer whole, and all hidden states.

    A rank's part of a layer's output is that of its experts; the parts are summed.

    Example:
        >>> from types import SimpleNamespace
        >>> split = ExpertSplit(ranks=SimpleNamespace(enter=abs, sum=abs), first=2, count=2)
        >>> split.own(torch.tensor([[0, 2], [3, 5]])).tolist()
        [[2, 0], [1, 2]]
    """

    ranks: "RankSums"
    """How they add their parts up."""
    first: int
    """First expert of this rank."""
    count: int
    """Experts of this rank."""

    def own(self, experts: Tensor) -> Tensor:
        """Each expert's number among those of this rank; `count` stands for another rank's."""
        mine = experts - self.first
        return mine.masked_fill((mine < 0) | (mine >= self.count), self.count)


# Rows of the output layer over ranks.
#
# A rank computes its logits only; maxima and sums over the vocabulary are completed over the ranks.
# Every rank then has the scores of all tokens.

_CHUNK_NUMBERS = {"cuda": 1 << 27, "cpu": 1 << 24}
"""Logits that exist at once on a rank."""


class RankSums(Protocol):
    """Ranks that compute parts of a sum from the same values."""

    def enter(self, x: Tensor) -> Tensor:
        """The same values, whose gradient is summed over the ranks."""
        ...

    def sum(self, x: Tensor) -> Tensor:
        """The sum over the ranks; every rank has its gradient."""
        ...


class VocabularySplit(RankSums, Protocol):
    """Ranks that each have some rows of the output layer, and all hidden states."""

    @property
    def first(self) -> int:
        """First row of this rank."""
        ...

    @property
    def rows(self) -> int:
        """Rows of this rank."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """The largest of the ranks, without a gradient."""
        ...


def score_split(
    head: Head,
    split: VocabularySplit,
    hidden: Tensor,
    targets: Tensor,
    *,
    temperature: float = 1.0,
    entropy: bool = False,
    entropy_gradient: bool = True,
    sum_pi_squared: bool = False,
    likeliest: bool = False,
) -> TokenScores:
    """`luyen.models.head.score` over the ranks' rows, with the same numbers up to rounding."""
    size = max(1, _CHUNK_NUMBERS[hidden.device.type] // split.rows)
    is_made_again = (head.is_fused or hidden.shape[0] > size) and torch.is_grad_enabled()

    def chunk(h: Tensor, t: Tensor) -> tuple[Tensor, ...]:
        return _score_rows(head, split, h, t, temperature, entropy_gradient=entropy_gradient)

    entered = split.enter(hidden)
    chunks = [
        checkpoint(chunk, h, t, use_reentrant=False) if is_made_again else chunk(h, t)
        for h, t in zip(entered.split(size), targets.split(size), strict=True)
    ]
    logp, spread, peaked, is_top = (torch.cat(column) for column in zip(*chunks, strict=True))
    return TokenScores(
        logp=logp,
        entropy=spread if entropy else None,
        sum_pi_squared=peaked if sum_pi_squared else None,
        is_likeliest=is_top if likeliest else None,
    )


def _score_rows(
    head: Head,
    split: VocabularySplit,
    hidden: Tensor,
    targets: Tensor,
    temperature: float,
    *,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Log-probability, entropy, sum of squares, and whether no token is likelier."""
    x = replace(head, vocabulary=split.rows).logits(hidden, temperature=temperature)
    known = torch.arange(split.rows, device=x.device) < head.vocabulary - split.first
    x = x.masked_fill(~known, -torch.inf)
    top = split.max(x.detach().amax(-1))
    lse = log_of_sum(top, split.sum(sum_exponentials(x, top)))
    own = targets - split.first
    is_own = (own >= 0) & (own < split.rows)
    chosen = x.gather(-1, own.clamp(0, split.rows - 1)[:, None])[:, 0]
    chosen = split.sum(torch.where(is_own, chosen, 0.0))
    # Ranks use the sum for their own rows: its gradient is the sum of theirs.
    logp = x - split.enter(lse)[:, None] if entropy_gradient else (x - lse[:, None]).detach()
    # What has no probability adds nothing, and 0 times infinity is no number.
    share = logp.exp()
    spread = -split.sum((share * logp.masked_fill(~known, 0.0)).sum(-1))
    peaked = split.sum(share.detach().square().sum(-1))
    return chosen - lse, spread, peaked, (chosen.detach() >= top).float()
