"""Scores of a divided output layer: the parts of two ranks, completed by hand, are the whole."""

from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from luyen.models.head import Head, TokenScores, score
from luyen.models.rank_splits import score_split
from luyen.models.weights import block_digest, digest_number


@dataclass
class Recorded:
    """A rank whose sums and maxima over the ranks were made before, in the order of its calls."""

    first: int
    rows: int
    known: list[Tensor] = field(default_factory=list)
    own: list[Tensor] = field(default_factory=list)

    def enter(self, x: Tensor) -> Tensor:
        return x

    def sum(self, x: Tensor) -> Tensor:
        return self.reduced(x)

    def max(self, x: Tensor) -> Tensor:
        return self.reduced(x)

    def reduced(self, x: Tensor) -> Tensor:
        self.own.append(x.detach())
        return self.known[len(self.own) - 1] if len(self.own) <= len(self.known) else x


def on_ranks(head: Head, hidden: Tensor, targets: Tensor, ranks: int) -> TokenScores:
    """Scores by ranks that are played one after the other, a reduction at a time."""
    linear = head.linear
    assert isinstance(linear, nn.Linear)
    rows = linear.weight.shape[0] // ranks
    known: list[Tensor] = []
    for number in range(6):
        parts: list[Tensor] = []
        for rank in range(ranks):
            own = nn.Linear(linear.in_features, rows, bias=False)
            own.weight.data = linear.weight.data[rank * rows : (rank + 1) * rows]
            split = Recorded(first=rank * rows, rows=rows, known=known)
            part = Head(linear=own, vocabulary=head.vocabulary)
            found = score_split(
                part,
                split,
                hidden,
                targets,
                temperature=0.7,
                entropy=True,
                sum_pi_squared=True,
                likeliest=True,
            )
            if number == 5:
                return found
            parts.append(split.own[number])
        stacked = torch.stack(parts)
        known.append(stacked.amax(0) if number == 0 else stacked.sum(0))
    raise AssertionError("there are five reductions")


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_of_the_vocabulary_give_the_scores_of_the_whole(ranks: int):
    torch.manual_seed(0)
    head = Head(linear=nn.Linear(6, 16, bias=False), vocabulary=11)
    hidden, targets = torch.randn(5, 6), torch.tensor([0, 3, 7, 8, 10])
    logits = (hidden.double() @ head.linear.weight.detach().double().T)[:, :11] / 0.7
    p = logits.softmax(-1)
    found = on_ranks(head, hidden, targets, ranks)
    wanted = p.log().gather(-1, targets[:, None])[:, 0]
    assert found.logp.detach().tolist() == pytest.approx(wanted.tolist(), abs=1e-6)
    entropy, squares = -(p * p.log()).sum(-1), p.square().sum(-1)
    assert found.entropy is not None
    assert found.sum_pi_squared is not None
    assert found.is_likeliest is not None
    assert found.entropy.detach().tolist() == pytest.approx(entropy.tolist(), abs=1e-6)
    assert found.sum_pi_squared.tolist() == pytest.approx(squares.tolist(), abs=1e-6)
    assert found.is_likeliest.tolist() == (targets == p.argmax(-1)).float().tolist()
    plain = score(head, hidden, targets, temperature=0.7).logp.detach()
    torch.testing.assert_close(found.logp.detach(), plain, rtol=0, atol=1e-6)


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_fused_head_keeps_no_logits_between_the_passes(is_fused: bool):
    """They are computed again, to the same gradient."""
    torch.manual_seed(0)
    linear = nn.Linear(6, 16, bias=False)
    head = Head(linear=linear, vocabulary=11, is_fused=is_fused)
    hidden, targets = torch.randn(5, 6, requires_grad=True), torch.tensor([0, 3, 7, 8, 10])
    kept: list[torch.Size] = []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.shape)
        return x

    split = Recorded(first=0, rows=16)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        found = score_split(head, split, hidden, targets, entropy=True)
    assert (torch.Size((5, 16)) in kept) is not is_fused
    assert found.entropy is not None
    (found.logp.sum() + found.entropy.sum()).backward()
    p = (hidden @ linear.weight.T)[:, :11].log_softmax(-1)
    wanted = p.gather(-1, targets[:, None]).sum() - (p.exp() * p).sum()
    (slope,) = torch.autograd.grad(wanted, hidden)
    torch.testing.assert_close(hidden.grad, slope, rtol=0, atol=1e-5)


@given(
    rows=st.integers(1, 7), columns=st.integers(1, 9), cut=st.integers(0, 9), down=st.integers(0, 7)
)
def test_blocks_of_a_matrix_have_the_digest_of_the_whole(
    rows: int, columns: int, cut: int, down: int
):
    whole = torch.arange(rows * columns, dtype=torch.float32).view(rows, columns) + 1
    across, below = min(cut, columns), min(down, rows)
    blocks = [
        (whole[a:b, c:d], a * columns + c)
        for a, b in ((0, below), (below, rows))
        for c, d in ((0, across), (across, columns))
        if a < b and c < d
    ]
    total = sum(block_digest(block, offset=at, columns=columns) for block, at in blocks)
    assert (total - digest_number(whole)) % 2**64 == 0


def test_the_digest_of_a_block_reaches_over_the_table_of_positions():
    whole = torch.randn(3, 600_000, generator=torch.Generator().manual_seed(0))
    halves = [
        block_digest(whole[:, i : i + 300_000], offset=i, columns=600_000) for i in (0, 300_000)
    ]
    assert (sum(halves) - digest_number(whole)) % 2**64 == 0
