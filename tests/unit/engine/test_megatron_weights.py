"""Megatron's fused weights, against the rows that its layers read."""

import torch

from luyen.engine.megatron.fused_weights import AttentionHeads, join_gate, split_gate

HEADS = AttentionHeads(groups=2, queries=3, width=2)


def rows(first: int, count: int) -> torch.Tensor:
    """Rows that say which they are."""
    return torch.arange(first, first + count)[:, None].expand(count, 5).float()


def test_each_head_of_keys_follows_the_queries_that_read_it():
    joined = HEADS.join([rows(0, 12), rows(100, 4), rows(200, 4)])
    first = [*range(6), 100, 101, 200, 201]
    second = [*range(6, 12), 102, 103, 202, 203]
    assert joined[:, 0].tolist() == first + second


def test_biases_are_joined_as_weights_are():
    joined = HEADS.join([rows(0, 12)[:, 0], rows(100, 4)[:, 0], rows(200, 4)[:, 0]])
    assert torch.equal(joined, HEADS.join([rows(0, 12), rows(100, 4), rows(200, 4)])[:, 0])


def test_what_was_joined_is_split_again():
    for parts, join, split in (
        ([rows(0, 12), rows(100, 4), rows(200, 4)], HEADS.join, HEADS.split),
        ([rows(0, 6), rows(50, 6)], join_gate, split_gate),
    ):
        for part, found in zip(parts, split(join(parts)), strict=True):
            assert torch.equal(part, found)


def test_ranks_join_their_own_heads_to_their_rows_of_the_whole():
    whole = [rows(0, 12), rows(100, 4), rows(200, 4)]
    one = AttentionHeads(groups=1, queries=3, width=2)
    parts = [one.join([part.chunk(2)[rank] for part in whole]) for rank in range(2)]
    assert torch.equal(torch.cat(parts), HEADS.join(whole))
