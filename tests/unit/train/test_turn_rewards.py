"""Every share of a score reaches the token where its turn ended, and nothing is lost."""

from math import fsum

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from luyen.base.records import Rollout, Score, Source
from luyen.rewards.tree import turn_shares
from luyen.train.batch import pack_groups, token_rewards
from tests.unit.train.conversations import TREES, groups, marks, talk

TWO_TURNS = "pp00tt11"


def scored(value: float, *parts: Score) -> Score:
    return Score(name="reward", value=value, parts=parts)


@given(text=marks(), more=st.lists(marks(first_turn=4), max_size=2), score=TREES)
@settings(max_examples=200, deadline=None)
def test_the_rewards_of_a_rollout_add_up_to_its_score(text: str, more: list[str], score: Score):
    rollout = talk(text, *more, score=score)
    rewards = token_rewards(rollout)
    assert len(rewards) == sum(len(b.tokens) for b in rollout.branches)
    assert score.value is not None
    scale = fsum(abs(share) for _, share in turn_shares(score)) + abs(score.value)
    assert fsum(rewards) == pytest.approx(score.value, abs=1e-13 * scale)


@given(text=marks(), score=TREES)
@settings(max_examples=200, deadline=None)
def test_each_share_stands_at_the_end_of_its_turn(text: str, score: Score):
    expected = [0.0] * len(text)
    places = [i for i, mark in enumerate(text) if mark.isdigit()]
    rest = score.value or 0.0
    for turn, share in by_hand(score, 1.0):
        ended = [i for i in places if int(text[i]) <= turn]
        expected[ended[-1] if ended else places[0] if places else -1] += share
        rest -= share
    expected[places[-1] if places else -1] += rest
    assert token_rewards(talk(text, score=score)) == pytest.approx(expected, abs=1e-9)


def by_hand(score: Score, factor: float) -> list[tuple[int, float]]:
    """Shares of the leaves with the weights on the way multiplied."""
    below = [one for part in score.parts for one in by_hand(part, factor * part.weight)]
    return below + [(turn, factor * share) for turn, share in score.by_turn]


def test_weights_multiply_down_the_tree():
    leaf = Score(name="valid", value=3.0, weight=0.5, by_turn=((0, 1.0),))
    quality = Score(name="quality", value=1.5, weight=0.2, parts=(leaf,))
    right = Score(name="right", value=1.0)
    tree = scored(1.3, right, quality)
    assert token_rewards(talk(TWO_TURNS, score=tree)) == pytest.approx(
        [0, 0, 0, 0.1, 0, 0, 0, 1.2], abs=1e-15
    )


def test_a_score_with_shares_speaks_for_its_parts():
    part = Score(name="part", value=1.0, by_turn=((0, 1.0),))
    tree = Score(name="reward", value=1.0, parts=(part,), by_turn=((1, 0.25),))
    assert list(turn_shares(tree)) == [(1, 0.25)]


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("p0t2", 1),  # turn 1 sampled nothing: its share goes back to turn 0
        ("pt22", 2),  # nothing before it: the first token after
        ("p0t1", 3),
        ("p0tt", 1),
        ("pptt", 3),  # nothing was sampled at all: the outcome must not be lost
    ],
)
def test_a_turn_without_tokens_hands_its_share_on(text: str, place: int):
    share = Score(name="a", value=2.0, by_turn=((1, 2.0),))
    rewards = token_rewards(talk(text, score=scored(2.0, share)))
    assert rewards == [2.0 if i == place else 0.0 for i in range(len(text))]


def test_without_shares_the_last_sampled_token_holds_the_score_to_the_last_bit():
    rewards = token_rewards(talk("p00t1t", score=0.1 + 0.2))
    assert rewards == [0.0, 0.0, 0.0, 0.0, 0.1 + 0.2, 0.0]


def test_the_outcome_stands_in_the_last_branch_and_shares_in_their_own():
    share = Score(name="a", value=0.5, by_turn=((0, 0.5),))
    rollout = talk("p00", "ppt11", score=scored(1.5, share))
    assert token_rewards(rollout) == [0.0, 0.0, 0.5, 0.0, 0.0, 0.0, 0.0, 1.0]


def test_a_batch_holds_the_rewards_and_turns_of_all_branches():
    share = Score(name="a", value=0.5, by_turn=((0, 0.5),))
    packed = pack_groups(
        groups(talk("p00", "ppt11", score=scored(1.5, share)), talk("p0", score=-1.0))
    )
    assert packed.streams["rewards"].tolist() == [0, 0, 0.5, 0, 0, 0, 0, 1.0, 0, -1.0]
    turns = packed.streams["turns"]
    assert turns[packed.layout.mask].tolist() == [0, 0, 1, 1, 0]
    assert turns.dtype == torch.int64


def test_a_rollout_that_was_not_judged_never_trains():
    with pytest.raises(AssertionError, match="without a score"):
        token_rewards(talk("p0", score=Score(name="reward", value=None, error="late")))


def test_the_builder_writes_what_it_says():
    rollout: Rollout = talk("p0t1")
    assert rollout.sources == (Source.PROMPT, Source.SAMPLED, Source.TOOL, Source.SAMPLED)
    assert rollout.turns == (0, 0, 0, 1)
