"""Laws of dealing a step out to ranks: nothing is lost, tokens are balanced, passes keep step."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from luyen.engine.batch import (
    MicroBatching,
    PackedBatch,
    balance_by_tokens,
    join_shards,
    pack,
    split_batch,
)

BUDGET = 40
RANKS = st.integers(1, 6)
SEQUENCES = st.lists(st.tuples(st.integers(1, BUDGET), st.integers(0, 4)), min_size=1, max_size=24)
PASSES = st.one_of(
    st.builds(MicroBatching, max_tokens=st.integers(BUDGET, 90)),
    st.builds(MicroBatching, sequences=st.integers(1, 4)),
)


def batch_of(sequences: list[tuple[int, int]]) -> PackedBatch:
    """Sequences of these lengths and groups; every token is a number of its own."""
    counter = iter(range(10_000))
    tokens = [[next(counter) for _ in range(length)] for length, _ in sequences]
    masks = [[0] + [1] * (length - 1) for length, _ in sequences]
    made = pack(tokens, masks=masks, groups=[group for _, group in sequences])
    return made.with_streams(number=made.tokens.double() / 3)


@given(SEQUENCES, PASSES, RANKS)
def test_shares_are_a_partition_and_join_puts_them_back(
    sequences, passes: MicroBatching, ranks: int
):
    batch = batch_of(sequences)
    shares = split_batch(batch, passes, ranks=ranks)
    assert len(shares) == ranks
    places = torch.cat([share.positions for share in shares])
    assert sorted(places.tolist()) == list(range(len(batch.tokens)))
    for share in shares:
        assert torch.equal(batch.tokens[share.positions], share.batch.tokens)
        assert torch.equal(batch.layout.mask[share.positions], share.batch.layout.mask)
    parts = [{**share.batch.streams, "token": share.batch.tokens} for share in shares]
    joined = join_shards(shares, parts, batch)
    assert torch.equal(joined["number"], batch.streams["number"])
    assert torch.equal(joined["token"], batch.tokens)


@given(SEQUENCES, PASSES, RANKS)
def test_every_rank_makes_the_same_number_of_passes_within_the_budget(
    sequences, passes: MicroBatching, ranks: int
):
    shares = split_batch(batch_of(sequences), passes, ranks=ranks)
    assert len({len(share.passes) for share in shares}) == 1
    for share in shares:
        assert sorted(i for part in share.passes for i in part) == list(
            range(len(share.batch.lengths))
        )
        for part in share.passes:
            if passes.max_tokens is not None:
                assert sum(share.batch.lengths[i] for i in part) <= passes.max_tokens
            else:
                assert len(part) <= passes.sequences
    assert any(all(share.passes) for share in shares), "a pass that nobody needs"


@given(SEQUENCES, PASSES)
def test_one_rank_has_the_batch_and_the_passes_that_were_asked_for(
    sequences, passes: MicroBatching
):
    batch = batch_of(sequences)
    (share,) = split_batch(batch, passes, ranks=1)
    assert share.batch is batch
    assert [list(part) for part in share.passes] == passes.of(batch.lengths, batch.labels())


@given(SEQUENCES, RANKS)
def test_tokens_are_balanced_and_the_deal_repeats(sequences, ranks: int):
    lengths, groups = [n for n, _ in sequences], [g for _, g in sequences]
    dealt = balance_by_tokens(lengths, groups, ranks=ranks)
    assert balance_by_tokens(lengths, groups, ranks=ranks) == dealt
    fullest = max(sum(lengths[i] for i in hand) for hand in dealt)
    mean, longest = sum(lengths) / ranks, max(lengths)
    assert fullest <= max(1.1 * max(mean, longest), mean + longest)


@given(st.integers(1, 5), st.integers(1, 30), RANKS, st.integers(1, 4))
def test_equal_groups_that_can_be_dealt_evenly_stay_whole(
    samples: int, length: int, ranks: int, groups_each: int
):
    groups = [g for g in range(ranks * groups_each) for _ in range(samples)]
    dealt = balance_by_tokens([length] * len(groups), groups, ranks=ranks)
    owners = {
        g: {r for r, hand in enumerate(dealt) if any(groups[i] == g for i in hand)} for g in groups
    }
    assert all(len(ranks_of) == 1 for ranks_of in owners.values())
