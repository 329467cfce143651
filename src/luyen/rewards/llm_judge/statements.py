"""What a judge states itself: which words may lead to a verdict, and which may follow it.

Both are lists of what is allowed. A verdict behind other words may be reported, wished, denied, or
an example, in more ways than a list of those could name.
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast, final

from luyen.rewards.llm_judge.faults import UNPARSABLE, JudgeFault, quoted_end
from luyen.rewards.llm_judge.quotations import OWN_WORDS, SPEAKERS, JudgeReply

_LABELS = frozenset(
    [
        "assessment",
        "conclusion",
        "decision",
        "evaluation",
        "feedback",
        "grade",
        "grading",
        "judgement",
        "judgment",
        "mark",
        "rate",
        "rating",
        "score",
        "summary",
        "total",
        "verdict",
    ]
)
_MATTERS = frozenset(
    [
        "answer",
        "one",
        "reply",
        "response",
        "solution",
        "student",
        "submission",
        "text",
        "user",
        "work",
    ]
)
"""What is judged: a colon behind one of these introduces it, and not a verdict about it."""
_ALLOWED = (
    OWN_WORDS
    | _LABELS
    | _MATTERS
    | frozenset(
        [
            "after",
            "answers",
            "assign",
            "assigned",
            "at",
            "award",
            "awarded",
            "balance",
            "believe",
            "better",
            "breakdown",
            "choice",
            "clear",
            "complete",
            "correct",
            "deserves",
            "earns",
            "end",
            "excellent",
            "explanation",
            "finally",
            "find",
            "follows",
            "for",
            "gets",
            "giving",
            "hence",
            "lastly",
            "merits",
            "now",
            "on",
            "poor",
            "quality",
            "receives",
            "reflection",
            "review",
            "right",
            "scored",
            "scores",
            "then",
            "think",
            "winner",
            "wrong",
        ]
    )
) - {"one", "user"}
_SAID = _ALLOWED | {","}
_CONSEQUENT = frozenset(
    ["finally", "hence", "lastly", "now", "overall", "so", "then", "therefore", "thus"]
)
_JOINING = frozenset([",", "and", "but", "hence", "so", "therefore", "thus"])
_CONSIDERED = frozenset(
    ["all", "as", "based", "because", "considering", "given", "overall", "since", "taking"]
)
"""The beginning of a sentence whose last clause may give the verdict without `I` or `so`."""
_MOODS = frozenset(["would", "i'd"])
_ASKING = frozenset(["how", "should", "why", "would"])
_CONDITIONS = frozenset(
    [
        "assuming",
        "had",
        "if",
        "once",
        "only",
        "otherwise",
        "perfect",
        "provided",
        "should",
        "unless",
        "until",
        "were",
        "when",
        "with",
        "without",
    ]
)

_FENCE = re.compile(r"\A\s*```")
_BEHIND = re.compile(
    r"[\s\"'\u201d\u2019*_]{0,6}(?:is|was|are|were|would|will|if|unless|only)\b", re.IGNORECASE
)
_NEAR = 60
_ROLE = re.compile(r"(?:<\|[^|\n]{0,30}\|>|<start_of_turn>)\s*(?:user|assistant|system|model)\s*\Z")
"""The beginning of a turn, as a chat template writes it: what follows is quoted."""
_MARKS = re.compile(r"(?:[ \t$\"'\u201d\u2019*_`)\]|}]|</\w{1,20}>)*+")
_UNITS = re.compile(
    r"(?:points?|stars?|marks?|percent|overall|in\s+total|clearly|definitely)\b", re.IGNORECASE
)
_ARITHMETIC = re.compile(r"\s*[\^*\u00d7\u00f7+]\s*[-+]?\.?\d|\s*(?:=|->|\u2192|\u21d2)")
_TURN = re.compile(
    r"[\s,;:(\-\u2013\u2014]+(?:but\s+)?(?:only\b|if\b|unless\b|provided\b|assuming\b|were\b|had\b"
    r"|would\b)",
    re.IGNORECASE,
)
"""Words that make a condition of what stands before them."""
_REST = re.compile(r"[^.!?\n]{0,120}")
_LATER = re.compile(
    r"\b(?:unless|only\s+(?:if|for)|requested|demanded|not\s+what|changed\s+to|reduced"
    r"|lowered|deduct\w{0,4})\b|\bonly\W*;|\bonly\W*\Z",
    re.IGNORECASE,
)
"""Words further on in its sentence that void a verdict."""
_FOLLOWING = re.compile(
    r"(?:of\s+\d|out\s+of\b|(?:because|since|for|as\s+(?:said|it|all|there|every|no|nothing|i)|and"
    r"|but|though|although|given|due|which|while|so|in\s+my)\b)"
    r"|is\s+(?:my|(?:the\s+)?(?:better|best|right|correct|fair|stronger|clearer|superior"
    r"|preferred|preferable|winner))\b",
    re.IGNORECASE,
)
"""Words that go on in the sentence of a verdict and leave it as it is."""

_QUOTED_LINE = re.compile(r"^[ \t]*+>[^\n]*+", re.MULTILINE)
_LONGEST_GAP = 200
_MOST_PLACES = 500
_VOID = (
    ("~~", "~~"),
    ("<!--", "-->"),
    *((f"<{tag}>", f"</{tag}>") for tag in ("del", "s", "strike", "blockquote", "q")),
    *((f"<{tag}>", f"</{tag}>") for tag in ("thinking", "thought", "reasoning", "analysis")),
    *((f"<{tag}>", f"</{tag}>") for tag in ("student", "submission", "response", "student_answer")),
    ("[THINK]", "[/THINK]"),
    ("\u25c1think\u25b7", "\u25c1/think\u25b7"),
)
"""What stands between these is crossed out, quoted, or a thought."""
_BLOCKS = (("```", "```"), ("~~~", "~~~"), ("<answer>", "</answer>"))
_HOLE = "\u2026"


def without_void(text: str) -> str:
    """A reply with dots in the place of what is crossed out, quoted by a tag, or a thought.

    Example:
        >>> without_void("~~9~~ Score: 2")
        '\u2026\u2026\u2026\u2026\u2026 Score: 2'
    """
    for opening, closing in _VOID:
        text = _without(text, opening, closing)
    return text


def without_blocks(text: str) -> str:
    """A reply with dots in the place of what it quotes: blocks and answers that text follows.

    Example:
        >>> without_blocks("```\\nScore: 9\\n``` is all")[-6:]
        'is all'
    """
    for opening, closing in _BLOCKS:
        text = _without(text, opening, closing, is_last_kept=True)
    unquoted = _QUOTED_LINE.sub(lambda line: _HOLE * len(line[0]), text)
    return unquoted if re.search(r"\w", unquoted) else text


def _without(text: str, opening: str, closing: str, *, is_last_kept: bool = False) -> str:
    parts: list[str] = []
    done, at = 0, text.find(opening)
    while at >= 0 and (end := text.find(closing, at + len(opening))) >= 0:
        end += len(closing)
        if is_last_kept and not re.search(r"\w", text[end : end + _LONGEST_GAP]):
            break
        parts += [text[done:at], _HOLE * (end - at)]
        done, at = end, text.find(opening, end)
    return "".join([*parts, text[done:]])


def is_stated(reply: JudgeReply, start: int, names: frozenset[str] = frozenset()) -> bool:
    """Whether nothing but words of a verdict, as in `it is clear, so I rate it`, lead to a place.

    Example:
        >>> reply = JudgeReply("It asks me to print [[10]]. So I give [[2]]", answer="")
        >>> is_stated(reply, 20), is_stated(reply, 38)
        (False, True)
    """
    if _ROLE.search(reply.text[max(start - _NEAR, 0) : start]):
        return False
    words = [word for word in reply.words_before(start) if word not in names]
    if not words:
        return True
    is_titled = words[0] in ("my", "final", "overall") and _LABELS.intersection(words[1:2])
    if is_titled and reply.text[max(start - _NEAR, 0) : start].rstrip(" \t\r\n*_").endswith(":"):
        return True
    first = len(words)
    while first and (words[first - 1] in _SAID or words[first - 1].isdecimal()):
        first -= 1
    starts = [at for at in range(first, len(words)) if not at or words[at - 1] in _JOINING]
    return any(_is_verdict(words, at) for at in starts)


def _is_verdict(words: list[str], at: int) -> bool:
    """Whether the allowed words from a place on are a clause that leads to a verdict."""
    clause, before = words[at:], words[:at]
    if clause[0] in _ASKING:
        return False
    is_speaking = not SPEAKERS.isdisjoint(clause)
    if _MOODS.intersection(clause) and (
        not is_speaking or not _CONDITIONS.isdisjoint(before) or clause[0] == "it"
    ):
        return False
    if clause[-1] in {"is", "was"}:
        clause = clause[:-1]
    is_of_matter = not _MATTERS.isdisjoint(clause[-1:]) or (
        clause[:1] in (["a"], ["an"]) and not _MATTERS.isdisjoint(clause)
    )
    if is_of_matter and not is_speaking and _LABELS.isdisjoint(clause):
        return False
    return not before or clause[0] in _CONSEQUENT or is_speaking or before[0] in _CONSIDERED


def foreign(
    reply: JudgeReply, found: Iterable[re.Match[str]], names: frozenset[str] = frozenset()
) -> list[re.Match[str]]:
    """Those matches that other words lead to than those of a verdict, and the choices' names.

    A JudgeFault where there are so many that the reply only repeats itself.
    """
    every = list(found)
    if len(every) > _MOST_PLACES:
        raise JudgeFault(UNPARSABLE, f"{len(every)} verdicts in {quoted_end(reply.text)}")
    return [match for match in every if not is_stated(reply, match.start(), names)]


def is_reported(reply: JudgeReply, end: int) -> bool:
    """Whether the words behind an object say that another speaker wants or wrote it.

    Example:
        >>> text = '{"score": 9} is the score that the answer wants'
        >>> is_reported(JudgeReply(text, answer=""), 12)
        True
    """
    rest = _FENCE.sub("", reply.text[end : end + _NEAR], count=1)
    return _BEHIND.match(rest) is not None


def goes_on(text: str, end: int) -> bool:
    """Whether the sentence of a verdict goes on with words that may void it.

    Example:
        >>> [goes_on(text, 2) for text in ("10 is too much", "10 points.", "10, if it were right")]
        [True, False, True]
    """
    at = end
    while True:
        marks = _MARKS.match(text, at)
        at = marks.end() if marks else at
        unit = _UNITS.match(text, at)
        if unit is None:
            break
        at = unit.end()
    if _ARITHMETIC.match(text, end) or _ARITHMETIC.match(text, at):
        return True
    turn = _TURN.match(text, at)
    if turn is not None and "\n\n" not in turn[0]:
        return True
    rest = _REST.match(text, at)
    if rest is not None and _LATER.search(rest[0]):
        return True
    following = text[at : at + 1]
    return following.isalnum() and not following.isupper() and _FOLLOWING.match(text, at) is None


# JSON objects in the midst of text, and what stands under a key of theirs.

_STARTS = 200
"""How many braces of a reply are tried as the beginning of JSON."""


def at_key(tree: Any, json_key: str) -> "str | int | float | GivenTwice | None":
    """What stands under a key, if it can be a number."""
    for name in json_key.split("."):
        tree = cast(Any, tree).get(name) if isinstance(tree, Mapping) else None
    return tree if isinstance(tree, str | int | float | GivenTwice) else None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class GivenTwice:
    """Two values of one key of an object: what an unescaped quotation of the answer can make.

    Example: `{"score": 9, "score": 2}` has GivenTwice(first=9, then=2) under "score".
    """

    first: Any
    """The value that stands first."""
    then: Any
    """The last other value."""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        is_other = name in found and found[name] != value
        found[name] = GivenTwice(first=found[name], then=value) if is_other else value
    return found


def json_objects(text: str) -> list[tuple[Any, slice]]:
    """Every JSON object that a text holds and that lies in no other, the last one first."""
    decoder = json.JSONDecoder(object_pairs_hook=_without_twins)
    found: list[tuple[Any, slice]] = []
    start = text.find("{")
    for _ in range(_STARTS):
        if start < 0:
            break
        try:
            tree, end = decoder.raw_decode(text, start)
            found.append((tree, slice(start, end)))
        except (ValueError, RecursionError):
            end = start + 1
        start = text.find("{", end)
    return found[::-1]
