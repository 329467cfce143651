"""Equality of texts."""

from luyen.base.records import Prompt
from luyen.rewards.rules.rule import Answer, rule_rewards, truths_of


@rule_rewards.register("exact", wrong=0.0)
def exact(
    prompt: Prompt, answer: Answer, *, strip: bool = True, ignore_case: bool = False
) -> float:
    """1 when the answer is the ground truth, or one of its alternatives, letter for letter."""

    def plain(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return float(plain(answer.text) in {plain(truth) for truth in truths_of(prompt)})
