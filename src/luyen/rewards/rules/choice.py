"""Multiple choice: one letter, stated as the answer."""

import re

from luyen.base.records import Prompt
from luyen.rewards.outcome import Unscorable
from luyen.rewards.rules.rule import Answer, rule_rewards, truth_of


def chosen(text: str, choices: str) -> str | None:
    """The letter that an answer settles on: the last that is stated, or the only thing said.

    Example:
        >>> chosen("A is tempting, but the answer is (C).", "ABCD")
        'C'
        >>> chosen("A bird in the hand", "ABCD") is None
        True
    """
    capital, small = re.escape(choices.upper()), re.escape(choices.lower())
    last = r"(?=[.)\]*\s]*(?:\n|\Z))"  # a small letter may be a word: "the answer is a mystery"
    # What was taken is never given back: a million blanks or stars are looked at once.
    letter = rf"[*$]*+[(\[]?+[*]*+((?-i:[{capital}])(?![\w'])|(?-i:[{small}]){last})[*]*+[)\]]?+"
    stated = (
        rf"answer(?:\s++choice)?+[*]*+(?:\s++is\s*+:?+|\s*+[:=])[*]*+\s*+(?:option\s++)?+{letter}"
    )
    boxed = rf"\\boxed\{{\s*+(?:\\text\{{)?+\s*+{letter}"
    tagged = rf"<answer>\s*+{letter}\s*+</answer>"
    found = re.finditer(f"{stated}|{boxed}|{tagged}", text, re.IGNORECASE)
    letters = [group for match in found for group in match.groups() if group]
    alone = re.fullmatch(rf"\s*+{letter}[.\s]*+", text)
    if letters:
        return letters[-1].upper()
    return alone.group(1).upper() if alone else None


@rule_rewards.register("choice", wrong=0.0)
def choice(prompt: Prompt, answer: Answer, *, choices: str = "ABCD") -> float:
    """1 when the stated letter is the ground truth: a letter, or its index from 0."""
    truth = truth_of(prompt)
    is_index = isinstance(truth, int) and not isinstance(truth, bool)
    if is_index and not 0 <= truth < len(choices):
        raise Unscorable(f"the row's ground truth {truth} is no index into {choices!r}")
    letter = choices[truth] if is_index else str(truth).strip().strip("()").upper()
    if len(letter) != 1 or letter not in choices:
        raise Unscorable(f"the row's ground truth {truth!r} is none of the choices {choices!r}")
    return float(chosen(answer.text, choices) == letter)
