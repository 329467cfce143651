"""A penalty for saying the same thing again."""

from collections.abc import Iterator, Sequence
from typing import Literal, TypeAlias

from luyen.base.records import Prompt, Rollout, Source
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import rule_rewards

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
