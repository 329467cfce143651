"""Penalties for length. They are negative or zero; the weight of the component sets their force."""

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import Answer, rule_rewards


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


def _limit(max_response_length: int | None) -> int:
    if max_response_length is None:
        raise Unscorable("max_response_length is not set")
    return max_response_length
