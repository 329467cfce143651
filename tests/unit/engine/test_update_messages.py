"""What a rank says of its update arrives as it was, whatever the types of its numbers."""

import pickle

import pytest
import torch

from luyen.algorithms.aggregation import Average
from luyen.engine.optim import OptimizerStep
from luyen.engine.step import ShardUpdateResult

STEPPED = OptimizerStep(grad_norm=1.5, is_applied=True, lr=0.1)


def average(total: float, count: float, dtype: torch.dtype = torch.float32) -> Average:
    return Average(
        total=torch.tensor(total, dtype=dtype), count=torch.tensor(count, dtype=torch.float32)
    )


@pytest.mark.parametrize(
    "averages",
    [
        {},
        {"a": average(1 / 3, 2.0)},
        {"a": average(1 / 3, 2.0), "b": average(-0.0, 0.0), "c": average(float("inf"), 1.0)},
        {"a": average(1 / 3, 2.0), "b": average(1 / 3, 3.0, torch.float64)},
    ],
    ids=["none", "one", "some", "two types"],
)
def test_averages_arrive_to_the_bit(averages: dict[str, Average]):
    said = ShardUpdateResult(stepped=STEPPED, averages=averages, logp=torch.tensor([-0.5, 0.0]))
    heard = pickle.loads(pickle.dumps(said))
    assert heard.stepped == STEPPED
    assert list(heard.averages) == list(averages)
    for name, one in averages.items():
        for mine, theirs in (
            (one.total, heard.averages[name].total),
            (one.count, heard.averages[name].count),
        ):
            assert (mine.dtype, mine.shape) == (theirs.dtype, theirs.shape)
            bits = [number.reshape(1).view(torch.uint8) for number in (mine, theirs)]
            assert torch.equal(*bits)
    assert torch.equal(heard.logp, said.logp)


def test_what_was_not_measured_stays_unmeasured():
    said = ShardUpdateResult(stepped=STEPPED, averages={})
    assert pickle.loads(pickle.dumps(said)).logp is None
