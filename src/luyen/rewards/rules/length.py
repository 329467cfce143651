"""Rewards and penalties for length and repetition. The component's weight sets their force."""

import math
from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from luyen.base.records import Prompt, Rollout, Source
from luyen.rewards.rules.rule import Answer, Unscorable, rule_rewards


@rule_rewards.register("length")
def length(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    free: int = 0,
    max_response_length: int | None = None,
) -> float:
    """0 up to `free` tokens, then linearly down to -1 at `max_response_length`."""
    most = _limit(max_response_length)
    if not 0 <= free < most:
        raise Unscorable(f"free = {free} leaves nothing to penalise below {most} tokens")
    return -max(0, answer.response_length - free) / (most - free)


@rule_rewards.register("overlong")
def overlong(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    buffer: int,
    penalty_factor: float = 1.0,
    max_response_length: int | None = None,
) -> float:
    """DAPO's soft penalty: 0, then linear over the last `buffer` tokens down to -penalty_factor."""
    most = _limit(max_response_length)
    if not 0 < buffer <= most:
        raise Unscorable(f"a buffer of {buffer} tokens does not fit into {most}")
    return min(-(answer.response_length - (most - buffer)) / buffer * penalty_factor, 0.0)


@rule_rewards.register("cosine")
def cosine(
    prompt: Prompt,  # noqa: ARG001
    answer: Answer,
    *,
    at_zero: float = 1.0,
    at_limit: float = 0.0,
    when_cut: float | None = None,
    max_response_length: int | None = None,
) -> float:
    """From `at_zero` for no token along half a cosine to `at_limit` (arXiv:2502.03373).

    A response of `max_response_length` tokens gets `when_cut`, where that is given: it was cut.
    """
    most = _limit(max_response_length)
    if answer.response_length >= most and when_cut is not None:
        return when_cut
    share = min(answer.response_length / most, 1.0)
    return at_limit + 0.5 * (at_zero - at_limit) * (1.0 + math.cos(math.pi * share))


def _limit(max_response_length: int | None) -> int:
    if max_response_length is None:
        raise Unscorable("max_response_length is not set")
    return max_response_length


# Repetition penalty.

Words: TypeAlias = Sequence[int] | Sequence[str]


@rule_rewards.register("repetition", sees="rollout")
def repetition(
    prompt: Prompt,  # noqa: ARG001
    rollout: Rollout,
    *,
    ngram: int = 4,
    unit: Literal["token", "word"] = "token",
) -> float:
    """Minus the share of n-grams that occurred before: 0 when all differ, towards -1 in a loop.

    Tokens are those that the policy sampled, in all its turns; an n-gram does not reach from one
    stretch of them into the next. Words are those of the last message, in small letters.
    """
    if ngram < 1:
        raise Unscorable(f"ngram = {ngram}: an n-gram has at least one {unit}")
    if unit not in ("token", "word"):
        raise Unscorable(f"unit = {unit!r} is neither token nor word")
    stretches: Iterator[Words] = (
        _sampled(rollout) if unit == "token" else iter([rollout.text.lower().split()])
    )
    grams = [tuple(s[i : i + ngram]) for s in stretches for i in range(len(s) - ngram + 1)]
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


def _sampled(rollout: Rollout) -> Iterator[list[int]]:
    """Stretches of sampled tokens without anything between."""
    for branch in (*rollout.earlier, rollout):
        stretch: list[int] = []
        for token, source in zip(branch.tokens, branch.sources, strict=True):
            if source == Source.SAMPLED:
                stretch.append(token)
            elif stretch:
                yield stretch
                stretch = []
        yield stretch
