"""The limits of a configuration in the engine of plain transformers."""

import pytest

from luyen.base.errors import UserError
from luyen.config.schema.actor_rollout_ref import RolloutConfig
from luyen.rollout.engines import hf
from luyen.rollout.protocol import generate
from tests.generation import request, spell
from tests.tiny_models import tiny_policy

POLICY = tiny_policy()


def engine(**limits: int):
    return hf(POLICY, RolloutConfig(**limits), longest=64, decode=spell)


@pytest.mark.parametrize(
    ("limits", "parts"),
    [
        ({}, [5]),
        ({"max_num_seqs": 2}, [2, 2, 1]),
        ({"max_num_batched_tokens": 21}, [3, 2]),
        ({"max_num_batched_tokens": 3}, [1] * 5),
        ({"max_num_seqs": 2, "max_num_batched_tokens": 21}, [2, 2, 1]),
    ],
    ids=str,
)
def test_samples_run_in_parts_that_fit(limits: dict[str, int], parts: list[int]):
    asked, running = request(7, 6, samples=5, temperature=0.0), engine(**limits)
    whole = generate(engine(), [asked])
    running.submit(asked)
    done = [running.advance() for _ in parts]
    assert [len(some) for some in done] == parts
    assert running.is_idle
    found = {(one.request, one.sample): one.tokens for some in done for one in some}
    assert found == {key: one.tokens for key, one in whole.items()}


def test_a_sequence_that_may_become_too_long_is_refused():
    with pytest.raises(UserError, match="at most 12 tokens"):
        engine(max_model_len=12).submit(request(7, 6))
    engine(max_model_len=13).submit(request(7, 6))
    with pytest.raises(UserError, match="at most 64 tokens"):
        engine().submit(request(60, 6))
