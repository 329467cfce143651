"""Conversations in a run: sampler and trainer agree to the bit, whichever tool answers first."""

from pathlib import Path

import pytest

from luyen.base.records import CallStatus, Source
from luyen.telemetry.rollout_files import read_rollouts
from tests.runs import CHATTY, ROLLOUT, Ran, same_weights, train


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    return train(tmp_path_factory.mktemp("chatty"), *CHATTY)


def test_the_gap_is_exactly_0_over_several_turns(plain: Ran):
    assert plain.course("parity/max_gap") == [0.0, 0.0]
    assert plain.course("parity/exact_fraction") == [1.0, 1.0]
    assert plain.course("turns/drift") == [0.0, 0.0]
    assert max(plain.course("turns/max")) > 1


def test_tools_were_called_and_nothing_of_it_trains(plain: Ran):
    files = sorted((plain.root / "rollouts").glob("step_*.parquet"))
    rollouts = [r.rollout for file in files for r in read_rollouts(file)]
    calls = [call for rollout in rollouts for call in rollout.calls]
    assert {CallStatus.OK, CallStatus.MALFORMED, CallStatus.REFUSED} <= {c.status for c in calls}
    assert any(Source.TOOL in rollout.sources for rollout in rollouts)
    for recorded in (r for file in files for r in read_rollouts(file)):
        pairs = zip(recorded.rollout.sources, recorded.advantages or (), strict=False)
        assert all((a is not None) == (s == Source.SAMPLED) for s, a in pairs)


@pytest.mark.parametrize(
    "limit", [f"{ROLLOUT}.max_num_seqs=4", f"{ROLLOUT}.max_num_batched_tokens=512"]
)
def test_limits_and_the_order_in_which_tools_answer_change_nothing(
    plain: Ran, limit: str, tmp_path: Path
):
    other = train(tmp_path, *CHATTY, limit)
    assert same_weights(plain, other)
    assert plain.metrics == other.metrics
