"""Packed batches and how they are cut."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from luyen.base.errors import UserError
from luyen.engine.batch import MicroBatching, by_count, by_tokens, pack

SEQUENCES = [[10, 11, 12], [20, 21], [30], [40, 41, 42, 43]]
MASKS = [[0, 1, 1], [0, 1], [0], [0, 0, 1, 1]]


def batch():
    tokens = torch.tensor([t for row in SEQUENCES for t in row])
    return pack(SEQUENCES, masks=MASKS, groups=[5, 5, 6, 7]).with_streams(twice=2.0 * tokens)


def test_taking_sequences_takes_their_tokens_masks_groups_and_streams():
    part = batch().take([3, 1])
    assert part.tokens.tolist() == [40, 41, 42, 43, 20, 21]
    assert part.lengths == (4, 2)
    assert part.layout.mask.tolist() == [False, False, True, True, False, True]
    assert part.layout.groups.tolist() == [7, 5]
    assert part.layout.offsets.tolist() == [0, 4, 6]
    assert part.streams["twice"].tolist() == [80.0, 82.0, 84.0, 86.0, 40.0, 42.0]


def test_positions_put_a_part_back_in_its_place():
    whole = batch()
    assert whole.positions([3, 1]).tolist() == [6, 7, 8, 9, 3, 4]
    stream = torch.zeros(10)
    for indices in ([3, 1], [0, 2]):
        stream[whole.positions(indices)] = whole.take(indices).streams["twice"]
    assert torch.equal(stream, whole.streams["twice"])


def test_scatter_writes_on_trainable_tokens_only():
    stream = batch().scatter(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], requires_grad=True))
    assert stream.tolist() == [0.0, 1.0, 2.0, 0.0, 3.0, 0.0, 0.0, 0.0, 4.0, 5.0]
    assert stream.requires_grad


def test_the_first_token_cannot_be_trained():
    with pytest.raises(AssertionError, match="the first token cannot be trained"):
        pack([[1, 2]], masks=[[1, 1]], groups=[0])


LENGTHS = st.lists(st.integers(1, 50), min_size=1, max_size=40)


@given(lengths=LENGTHS, room=st.integers(0, 60))
def test_passes_by_tokens_hold_every_sequence_once_within_the_budget(lengths, room: int):
    budget = max(lengths) + room
    passes = by_tokens(lengths, budget=budget)
    assert sorted(i for indices in passes for i in indices) == list(range(len(lengths)))
    sizes = [sum(lengths[i] for i in indices) for indices in passes]
    assert max(sizes) <= budget
    # A first fit never leaves two passes that would fit into one.
    assert all(a + b > budget for n, a in enumerate(sizes) for b in sizes[:n])


@given(lengths=LENGTHS, size=st.integers(1, 9))
def test_passes_by_count_hold_every_sequence_once_in_order(lengths, size: int):
    passes = by_count(lengths, size=size)
    assert [i for indices in passes for i in indices] == list(range(len(lengths)))
    assert all(len(indices) == size for indices in passes[:-1])
    assert 1 <= len(passes[-1]) <= size


def test_a_sequence_beyond_the_budget_is_refused():
    with pytest.raises(UserError, match="a sequence has 9 tokens") as caught:
        MicroBatching(max_tokens=8).of([3, 9])
    assert "at least 9" in caught.value.fix


def test_a_sequence_that_is_too_long_names_the_budget_of_one_rank():
    passes = MicroBatching(max_tokens=10).on_ranks(4)
    assert passes.of([40, 40]) == [[0], [1]]
    with pytest.raises(UserError) as found:
        passes.of([3, 43])
    assert found.value.value == 10
    assert "43 tokens, which 4 ranks compute together," in found.value.why
    assert found.value.fix.startswith("set it to at least 11,")
    with pytest.raises(UserError, match="set it to at least 11, or"):
        by_tokens([11], budget=10)
