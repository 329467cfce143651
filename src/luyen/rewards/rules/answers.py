"""Rules that compare the final answer with the ground truth: text, choice, number, math, task."""

import re
from collections.abc import Mapping
from decimal import Context, Decimal, InvalidOperation, localcontext
from typing import Any, Literal

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.rewards.rules.rule import Answer, Unscorable, rule_rewards, truth_of, truths_of


@rule_rewards.register("exact", wrong=0.0)
def exact(
    prompt: Prompt, answer: Answer, *, strip: bool = True, ignore_case: bool = False
) -> float:
    """1 when the answer is the ground truth, or one of its alternatives, letter for letter."""

    def plain(text: str) -> str:
        text = text.strip() if strip else text
        return text.casefold() if ignore_case else text

    return float(plain(answer.text) in {plain(truth) for truth in truths_of(prompt)})


# Multiple choice: one letter, stated as the answer.


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


# Numbers in text: the last one counts.

_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)"
_NUMBER = re.compile(
    rf"(?:(?<![\w.)\]])[-+])?(?:{_DIGITS}(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]+)?"
)
_LONGEST = 10_000
"""Digits beyond this are no answer but noise."""


def last_number(text: str) -> Decimal | None:
    """The last number of a text: signs, thousands separators, decimals and exponents understood.

    Example:
        >>> [str(last_number(text)) for text in ("from 2 to -3", "1,234.50", "2e3", "none")]
        ['-3', '1234.50', '2E+3', 'None']
    """
    written: list[str] = _NUMBER.findall(text.replace("\N{MINUS SIGN}", "-"))
    return next((n for one in reversed(written) if (n := as_number(one)) is not None), None)


def as_number(text: str) -> Decimal | None:
    """A text that is one number; None when it is not, or is beyond all bounds."""
    plain = text.strip().lstrip("$").replace("\N{MINUS SIGN}", "-")
    if len(plain) > _LONGEST or _NUMBER.fullmatch(plain) is None:
        return None
    try:
        return Decimal(plain.replace(",", ""))
    except InvalidOperation:
        return None


def true_numbers(prompt: Prompt) -> list[Decimal]:
    """The ground truth as numbers; a row whose truth is none cannot be scored."""
    truths = {text: as_number(text) for text in truths_of(prompt)}
    wrong = [text for text, number in truths.items() if number is None]
    if wrong:
        raise Unscorable(f"the row's ground truth {wrong[0]!r} is not a number")
    return [number for number in truths.values() if number is not None]


def is_close(a: Decimal, b: Decimal, *, tolerance: float) -> bool:
    """Whether two numbers differ by at most the tolerance; 0 asks for equality, digit for digit."""
    if a == b:
        return True
    with localcontext(Context(prec=60, traps=[])):
        return tolerance > 0 and abs(a - b) <= Decimal(repr(tolerance))


@rule_rewards.register("numeric", wrong=0.0)
def numeric(prompt: Prompt, answer: Answer, *, tolerance: float = 0.0) -> float:
    """1 when the last number of the answer is the ground truth."""
    truths, found = true_numbers(prompt), last_number(answer.text)
    if found is None:
        return 0.0
    return float(any(is_close(found, truth, tolerance=tolerance) for truth in truths))


# Grade-school word problems: the answer follows `####`.

_MARK = "####"
_AROUND = " \t.$*"


def strict_answer(text: str) -> Decimal | None:
    """The number that opens the line after the last `####`.

    Example:
        >>> strict_answer("so 70 + 2 = 72 #### $1,072 apples")
        Decimal('1072')
    """
    _, mark, rest = text.rpartition(_MARK)
    words = rest.strip(" \t").partition("\n")[0].split()
    if not mark or not words:
        return None
    first = words[1] if words[0] == "$" and len(words) > 1 else words[0]
    return as_number(first.lstrip("$*").rstrip(_AROUND))


def flexible_answer(text: str) -> Decimal | None:
    """The last number anywhere."""
    return last_number(text)


@rule_rewards.register("gsm8k", wrong=0.0)
def gsm8k(
    prompt: Prompt,
    answer: Answer,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
) -> float:
    """1 for the right number, `format_score` for another in the right place, 0 for none."""
    if method not in ("strict", "flexible"):
        raise Unscorable(f"method {method!r} is neither strict nor flexible")
    found = (strict_answer if method == "strict" else flexible_answer)(answer.text)
    truths = [
        strict_answer(text) if _MARK in text else as_number(text) for text in truths_of(prompt)
    ]
    if None in truths:
        raise Unscorable(f"the row's ground truth {prompt.ground_truth!r} holds no number")
    if found is None:
        return 0.0
    return 1.0 if found in truths else format_score


# Mathematical equivalence, decided by the math-verify package in a process of its own.


@rule_rewards.register(
    "math",
    isolated=True,
    wrong=0.0,
    deterministic=True,
    door="luyen.rewards.rules.math_verify_adapter",
    package="math_verify",
    extra="math",
)
def math_equal(prompt: Prompt, answer: Answer, *, float_rounding: int = 6) -> float:
    """1 when the answer and the ground truth are the same mathematical object."""
    from luyen.rewards.rules.math_verify_adapter import equivalent

    return float(
        any(
            equivalent(truth, answer.text, float_rounding=float_rounding)
            for truth in truths_of(prompt)
        )
    )


# Tasks of reasoning-gym, scored by the verifier that comes with each.


@rule_rewards.register(
    "reasoning_gym",
    isolated=True,
    wrong=0.0,
    door="luyen.data.reasoning_gym_adapter",
    package="reasoning_gym",
    extra="tasks",
)
def reasoning_gym(prompt: Prompt, answer: Answer, *, tag: str = "answer") -> float:
    """What the task's verifier says about the text inside the last `<tag>`, or about all of it."""
    from luyen.data.reasoning_gym_adapter import verifier

    dataset, entry = task_of(prompt)
    try:
        score = verifier(dataset)
    except UserError as error:
        raise Unscorable(str(error)) from error
    return float(score(tagged(answer.text, tag), entry))


def task_of(prompt: Prompt) -> tuple[str, Mapping[str, Any]]:
    """Name of the task and the entry that the verifier compares with, as the row carries them."""
    task = prompt.extra_info.get("reasoning_gym")
    if not isinstance(task, Mapping) or not {"dataset", "entry"} <= task.keys():
        why = 'the row lacks extra_info["reasoning_gym"] = {"dataset": ..., "entry": {...}}'
        raise Unscorable(f"{why} (data source `{prompt.data_source}`)")
    return str(task["dataset"]), task["entry"]


def tagged(text: str, tag: str) -> str:
    """The text inside the last pair of tags, or the whole text where there is none.

    Example:
        >>> tagged("<answer>1</answer> no: <answer> 2 </answer>", "answer")
        '2'
    """
    begin, end = f"<{tag}>", f"</{tag}>"
    found, at = text, 0
    while (first := text.find(begin, at)) >= 0:
        first += len(begin)
        last = text.find(end, first)
        if last < 0:
            break
        found, at = text[first:last], last + len(end)
    return found.strip()
