"""Where the reward of a rollout stands: shares of turns at their end, the rest at the very end."""

from math import fsum

from luyen.base.records import Rollout, Score, Source
from luyen.rewards.shares import turn_shares


def token_rewards(rollout: Rollout) -> list[float]:
    """Reward of each token, all branches one after the other; their sum is the score.

    A share stands on the last sampled token of its turn. A turn without one gives it to the last
    sampled token before, or to the first of all. Without any sampled token everything stands on the
    last token: an outcome is not lost because nothing trains.
    """
    shares = list(turn_shares(_judged(rollout)))
    drawn = Source.SAMPLED
    if not shares and rollout.sources and rollout.sources[-1] is drawn:  # most are like this
        before = sum(len(part.sources) for part in rollout.earlier) + len(rollout.sources) - 1
        return [*([0.0] * before), 0.0 + reward_of(rollout)]
    parts = (*rollout.earlier, rollout)  # a rollout has the streams of its last branch
    sources = [source for part in parts for source in part.sources]
    rewards = [0.0] * len(sources)
    if not sources:
        return rewards
    sampled = [i for i, source in enumerate(sources) if source is drawn]
    first, last = (sampled[0], sampled[-1]) if sampled else (-1, -1)
    turns = [turn for part in parts for turn in part.turns] if shares else []
    ends = {turns[i]: i for i in sampled} if shares else {}
    for turn, share in shares:
        rewards[max((end for other, end in ends.items() if other <= turn), default=first)] += share
    rewards[last] += fsum([reward_of(rollout), *(-share for _, share in shares)])
    return rewards


def reward_of(rollout: Rollout) -> float:
    """The judged value; a rollout without one must have been dropped before."""
    value = _judged(rollout).value
    assert value is not None, "a rollout reached training without a score"
    return value


def _judged(rollout: Rollout) -> Score:
    assert rollout.score is not None, "a rollout reached training without being judged"
    return rollout.score
