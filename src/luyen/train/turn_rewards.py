"""Where the reward of a rollout stands: shares of turns at their end, the rest at the very end."""

from math import fsum

from luyen.base.records import Rollout, Score, Source
from luyen.rewards.shares import turn_shares


def token_rewards(rollout: Rollout) -> list[float]:
    """Reward of each token, all branches one after the other; their sum is the score."""
    rewards = [0.0] * _length(rollout)
    for place, reward in placed_rewards(rollout).items():
        rewards[place] = reward
    return rewards


def placed_rewards(rollout: Rollout) -> dict[int, float]:
    """Rewards by the index of their token, all branches one after the other; others get 0.

    A share stands on the last sampled token of its turn. A turn without one gives it to the last
    sampled token before, or to the first of all. Without any sampled token everything stands on the
    last token: an outcome is not lost because nothing trains.
    """
    length, drawn, score = _length(rollout), Source.SAMPLED, _judged(rollout)
    shares = list(turn_shares(score)) if score.by_turn or score.parts else []
    if not shares and rollout.sources and rollout.sources[-1] is drawn:  # most are like this
        return {length - 1: 0.0 + reward_of(rollout)}
    if not length:
        return {}
    parts = (*rollout.earlier, rollout)  # a rollout has the streams of its last branch
    sources = [source for part in parts for source in part.sources]
    sampled = [i for i, source in enumerate(sources) if source is drawn]
    first, last = (sampled[0], sampled[-1]) if sampled else (length - 1, length - 1)
    turns = [turn for part in parts for turn in part.turns] if shares else []
    ends = {turns[i]: i for i in sampled} if shares else {}
    rewards: dict[int, float] = {}
    for turn, share in shares:
        place = max((end for other, end in ends.items() if other <= turn), default=first)
        rewards[place] = rewards.get(place, 0.0) + share
    rest = fsum([reward_of(rollout), *(-share for _, share in shares)])
    rewards[last] = rewards.get(last, 0.0) + rest
    return rewards


def _length(rollout: Rollout) -> int:
    if not rollout.earlier:  # most are like this
        return len(rollout.sources)
    return sum(len(part.sources) for part in (*rollout.earlier, rollout))


def reward_of(rollout: Rollout) -> float:
    """The judged value; a rollout without one must have been dropped before."""
    value = _judged(rollout).value
    assert value is not None, "a rollout reached training without a score"
    return value


def _judged(rollout: Rollout) -> Score:
    assert rollout.score is not None, "a rollout reached training without being judged"
    return rollout.score
