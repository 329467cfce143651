"""Which tokens of a pass a rank computes, and how long it waits for the ranks that share it."""

from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from luyen.engine.sequence_parallel import SequenceRanks, divide_sequences


def ranks(rank: int, size: int) -> SequenceRanks:
    return SequenceRanks(group=dist.group.WORLD, rank=rank, size=size)


@pytest.mark.parametrize(("tokens", "size"), [(6, 2), (7, 4), (3, 4)])
def test_every_place_is_counted_once(tokens: int, size: int):
    places = torch.tensor([0, 2, 2, tokens - 1])
    owned = [ranks(rank, size).own_places(places, tokens) for rank in range(size)]
    counted = [place for own in owned for place in own.index.tolist() if own.weight]
    assert sorted(counted) == [0, 1, 2, 3]
    assert all(own.index.numel() for own in owned), "every rank scores at least one"


def test_a_pass_without_places_has_none_on_any_rank():
    """All tokens of a pass may be masked; an index into nothing would end the run."""
    where = torch.tensor([], dtype=torch.int64)
    for rank in range(2):
        own = ranks(rank, 2).own_places(where, 5)
        assert where[own.index].numel() == own.rows.numel() == 0


def test_ranks_wait_for_each_other_as_long_as_the_configuration_says(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: dict[str, Any] = {}

    def new_subgroups(**options: Any) -> tuple[Any, Any]:
        asked.update(options)
        raise InterruptedError

    monkeypatch.setattr(dist, "new_subgroups", new_subgroups)
    assert divide_sequences(4, 1, timeout_s=7.0) is None
    with pytest.raises(InterruptedError):
        divide_sequences(4, 2, timeout_s=7.0)
    assert asked == {"group_size": 2, "timeout": timedelta(seconds=7)}
