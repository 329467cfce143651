"""The two kernels around a decode step do what the plain form of `RowState` does."""

import copy

import pytest
import torch

from luyen.rollout.native.paged.device_state import ROUND, RowState
from luyen.rollout.native.sampler import NextTokens

pytestmark = pytest.mark.gpu

ROWS, USED, PAGES, STOPS = 13, 11, 4, 8


def some_state(seed: int) -> RowState:
    torch.manual_seed(seed)
    state = RowState(ROWS, PAGES, STOPS, device=torch.device("cpu"))
    state.active[:] = torch.rand(ROWS) < 0.7
    state.lengths[:] = torch.randint(0, 250, (ROWS,))
    state.tables[:] = torch.randint(0, 99, (ROWS, PAGES)).int()
    state.limits[:] = 5
    state.generated[:] = torch.randint(0, 6, (ROWS,))
    state.stops[:, 0] = 3
    state.stops[:, 5] = torch.randint(0, 6, (ROWS,))
    state.tick[0] = seed % ROUND
    return state


def tensors(state: RowState) -> dict[str, torch.Tensor]:
    return {name: value for name, value in vars(state).items() if torch.is_tensor(value)}


@pytest.mark.parametrize("seed", range(6))
def test_a_step_begins_and_ends_as_in_plain_pytorch(device: str, seed: int):
    from luyen.models.cuda.decode_step import begin_step, end_step

    here, is_cached = slice(0, USED), seed % 2 == 0
    plain = some_state(seed)
    other = copy.deepcopy(plain)
    for name, value in tensors(other).items():
        setattr(other, name, value.to(device))
    begun = begin_step(other.active[here], other.lengths[here], other.tables[here])
    for mine, theirs in zip(begun, plain.begin(here), strict=True):
        assert torch.equal(mine.cpu(), theirs)
    draws = NextTokens(tokens=torch.randint(0, 6, (USED,)), logps=torch.randn(USED), kept=None)
    plain.accept(here, draws, is_cached=is_cached)
    end_step(
        draws.tokens.to(device),
        draws.logps.to(device),
        tokens=other.tokens[here],
        lengths=other.lengths[here],
        num_generated=other.generated[here],
        limits=other.limits[here],
        active=other.active[here],
        stops=other.stops[here],
        tick=other.tick,
        out_tokens=other.out_tokens[:, here],
        out_logps=other.out_logps[:, here],
        is_cached=is_cached,
    )
    for name, value in tensors(plain).items():
        assert torch.equal(tensors(other)[name].cpu(), value), name
