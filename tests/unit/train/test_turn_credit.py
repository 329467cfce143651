"""Rewards of inner turns reach the advantage, over tool results and over splits."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Rollout, Score
from luyen.train.advantages import AdvantageConfig, compute_advantages
from luyen.train.batch import pack_groups
from tests.unit.train.conversations import groups, marks, talk


def advantages(
    rollouts: tuple[Rollout, ...], name: str, *, values: tuple[float, ...] = (), **hparams: object
) -> list[float]:
    """Advantages of the sampled tokens of all rollouts, in order."""
    batch = pack_groups(groups(*rollouts))
    if values:
        batch = batch.with_streams(values=batch.scatter(torch.tensor(values)))
    rules = AdvantageConfig(
        estimator=name, hparams=hparams, is_group_relative=False, kl_kind=None, correction=None
    )
    found = compute_advantages(batch, rules, kl_coef=0.0).batch
    return found.streams["advantages"][batch.layout.mask].tolist()


def judged(text: str, outcome: float, *shares: tuple[int, float]) -> Rollout:
    """A conversation with an outcome and rewards of turns."""
    total = outcome + sum(share for _, share in shares)
    turns = Score(name="turns", value=total - outcome, by_turn=shares)
    right = Score(name="right", value=outcome)
    return talk(text, score=Score(name="reward", value=total, parts=(right, turns)))


GAE = {"gamma": 0.5, "lam": 0.5, "whiten_advantages": False}


def test_gae_sees_the_reward_of_an_inner_turn_where_the_turn_ends():
    # δ = r + 0.5 V' - V over the tokens 0 0 1 with V = 1, 2, 4 and r = 0, 3, 1
    # δ_2 = 1 - 4 = -3; δ_1 = 3 + 2 - 2 = 3, A_1 = 3 - 0.75; δ_0 = 1 - 1 = 0, A_0 = 0.25 · 2.25
    found = advantages((judged("p00tt1", 1.0, (0, 3.0)),), "gae", values=(1.0, 2.0, 4.0), **GAE)
    assert found == pytest.approx([0.5625, 2.25, -3.0])


def test_gae_does_not_start_anew_after_a_tool_result():
    # With V = 0 and γ = λ = 1 every token sees everything that comes later, over any tool result.
    plain = {"gamma": 1.0, "lam": 1.0, "whiten_advantages": False}
    found = advantages((judged("p0ttt1t2", 1.0, (1, 0.5)),), "gae", values=(0.0,) * 3, **plain)
    assert found == pytest.approx([1.5, 1.5, 1.0])


@given(
    text=marks(most=5).filter(lambda text: any(mark.isdigit() for mark in text)),
    shares=st.lists(st.tuples(st.integers(0, 4), st.integers(-8, 8)), max_size=4),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_tool_results_take_no_time_in_gae(text: str, shares: list[tuple[int, float]], seed: int):
    count = sum(mark.isdigit() for mark in text)
    values = tuple(torch.randn(count, generator=torch.Generator().manual_seed(seed)).tolist())
    bare = "p" + "".join(mark for mark in text if mark.isdigit())
    with_tools = advantages((judged(text, 1.0, *shares),), "gae", values=values, **GAE)
    without = advantages((judged(bare, 1.0, *shares),), "gae", values=values, **GAE)
    assert with_tools == pytest.approx(without, rel=1e-6, abs=1e-6)
    # The formula once more, backwards over the sampled tokens.
    rollout = judged(bare, 1.0, *shares)
    rewards = pack_groups(groups(rollout)).streams["rewards"].tolist()[1:]
    later, advantage, expected = 0.0, 0.0, list[float]()
    for reward, value in reversed(list(zip(rewards, values, strict=True))):
        advantage = reward + 0.5 * later - value + 0.25 * advantage
        later = value
        expected.append(advantage)
    assert with_tools == pytest.approx(expected[::-1], rel=1e-5, abs=1e-5)


def test_gae_flows_over_a_split():
    whole = judged("p0t1", 1.0, (0, 0.5))
    two = replace(talk("p0", "pppt1"), score=whole.score)
    values = (0.25, -0.5)
    assert advantages((two,), "gae", values=values, **GAE) == pytest.approx(
        advantages((whole,), "gae", values=values, **GAE)
    )


def test_turn_rewards_decide_between_siblings_turn_by_turn():
    # Same outcome; the first called well in turn 0, the second in turn 1.
    pair = (judged("p0t1t2", 1.0, (0, 1.0)), judged("p0t1t2", 1.0, (1, 1.0)))
    found = advantages(pair, "turn_grpo", norm_adv_by_std_in_grpo=False)
    assert found == [0.0, -0.5, 0.0, 0.0, 0.5, 0.0]
    assert advantages(pair, "grpo", norm_adv_by_std_in_grpo=False) == [0.0] * 6
