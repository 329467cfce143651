"""The score in a judge's reply. What is not clearly one is a fault; nothing is guessed.

An answer can hold what looks like a verdict, and a judge may repeat it. Such a repetition is not
the judge's own, unless the reply ends with it.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from luyen.rewards.llm_judge.faults import (
    NOT_FINITE,
    OUT_OF_RANGE,
    UNPARSABLE,
    JudgeFault,
    quoted_end,
)
from luyen.rewards.llm_judge.quotations import (
    QUOTATION_MARKS,
    JudgeReply,
    corrections,
    is_refused,
    is_taken_back,
    plain,
    taken_back,
    without_thinking,
)
from luyen.rewards.llm_judge.statements import (
    GivenTwice,
    at_key,
    foreign,
    goes_on,
    is_reported,
    is_stated,
    json_objects,
    without_blocks,
    without_void,
)
from luyen.rewards.rules.rule import Unscorable

# Finds the score in a judge's reply. Two different scores, or a range, count as none.

_NUMBER = r"(?<![\w.])[-+]?(?:nan|inf(?:inity)?|(?:\d+(?:\.\d+)?|\.\d+)(?:e[-+]?\d+)?)(?!\w|\.\d)"
_TOTAL = (
    r"(?:(?:\s*[(\[]?\s*(?:/|(?:out\s+)?of)\s*|\s*[,(]?\s*(?:on|in)\s+a\s+scale\s+(?:of|from)\s+\d+"
    r"\s*(?:-|\u2013|to)\s*)(?P<total>\d+(?:\.\d+)?)(?!\w|\.\d)|\s*(?P<percent>%))?"
)
_BETWEEN = r"(?:[^\w.+-]|_){0,6}"
"""What may stand before the number: a sign and a point belong to it."""
_LIMIT = r"\d+(?:\.\d+)?"
_RANGE = rf"(?:\s*[(\[]\s*(?:{_LIMIT}\s*(?:[-\u2013\u2014/]|to)|out of|of|/)\s*{_LIMIT}\s*[)\]])?"
"""The scale in brackets behind the word, as in `Score (0-10): 7`."""
_LABEL = rf"(?<![^\W_])(?:score|rating|grade|mark)s?{_RANGE}"
_WORTH = rf"(?P<number>{_NUMBER}){_TOTAL}"

_BRACKETS = re.compile(rf"\[\[\s*{_WORTH}\s*\]\]", re.IGNORECASE)
_OWN_LINE = re.compile(
    rf"^[ \t*_#>\-]{{0,20}}(?:(?:the|my|final|overall|total)\s+){{0,3}}{_LABEL}"
    rf"{_BETWEEN}(?:\bis\b)?{_BETWEEN}{_WORTH}[ \t*_.!\"')\]`]*$",
    re.IGNORECASE | re.MULTILINE,
)
_STATED = re.compile(rf"{_LABEL}{_BETWEEN}(?:[:=>]|\bis\b){_BETWEEN}{_WORTH}", re.IGNORECASE)
_MENTIONED = re.compile(rf"{_LABEL}{_BETWEEN}(?:\bof\b)?{_BETWEEN}{_WORTH}", re.IGNORECASE)
_ANY = re.compile(_WORTH, re.IGNORECASE)
_OF_A_PART = re.compile(r"(?!(?:the|my|final|overall|total|so|a)\s)\b[^\W\d_]+\s+\Z", re.IGNORECASE)
"""Before a stated score: a word that says what it is the score of, as in `accuracy score`."""
_WORD = 40
_PLACES = (_BRACKETS, _OWN_LINE, _STATED)
"""Where a score may stand, the first that holds one deciding."""

_GOES_ON = re.compile(r"\s*(?:[-\u2013\u2014~±]|\bto\b|\bor\b)\s*\.?\d|,\d", re.IGNORECASE)
"""Behind a number: a range, an alternative, or a comma that could be a point."""
_BOUND = re.compile(r"(?:[<≤≥~≈/]|out\s+of|(?<![\w\"'/])>)\s{0,6}\Z", re.IGNORECASE)
"""Before a number: it is about that, or on one side of it. A tag may stand there."""
_COUNTS = re.compile(
    r"\s+(?!(?:points?|stars?|percent|overall|for|because|since|as|and|but)\b)[^\W\d_]",
    re.IGNORECASE,
)
"""Behind a number that nothing states: it counts something else, as in `2 errors`."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreMention:
    """A number as it is written, and what it is a part of.

    Example:
        >>> ScoreMention(number="7", total="10").total
        '10'
    """

    number: str
    """The score."""
    total: str | None
    """What stands behind `/` or `out of`; 100 for a percent sign."""


def score_in(text: str) -> ScoreMention:
    """The score that a text gives; a JudgeFault where it gives none, or not clearly one.

    The first place that holds a number decides: double brackets, a line that says the score and
    nothing else, what is stated anywhere (`score: 7`, `the rating is 7`), and at last the only
    number of the text. If a place holds different numbers, there is no score.

    Example:
        >>> score_in("A 10 would need a proof.\\nScore (0-10): 7").number
        '7'
    """
    for pattern in (_BRACKETS, _OWN_LINE):
        found = list(pattern.finditer(text))
        if found:
            return _only(_settled(found, text), text)
    stated = list(_STATED.finditer(text))
    if stated:
        return _only(_settled([*stated, *_MENTIONED.finditer(text)], text), text)
    alone = list(_ANY.finditer(text))
    if len(alone) > 1:
        raise JudgeFault(UNPARSABLE, f"several numbers in {quoted_end(text)}")
    if any(_COUNTS.match(text, match.end()) for match in alone):
        raise JudgeFault(
            UNPARSABLE, f"a number that may count something else in {quoted_end(text)}"
        )
    if foreign(JudgeReply(text, answer=""), alone):
        raise JudgeFault(UNPARSABLE, f"a number that may be no score in {quoted_end(text)}")
    return _only(_settled(alone, text), text)


def _settled(found: list[re.Match[str]], text: str) -> list[re.Match[str]]:
    for match in found:
        at = match.start("number")
        if _GOES_ON.match(text, match.end()) or _BOUND.search(text[max(at - 8, 0) : at]):
            raise JudgeFault(
                UNPARSABLE, f"a range, or a number that goes on, in {quoted_end(text)}"
            )
        _stands(text, match.start(), match.end(), float(match["number"]))
    return found


def _stands(text: str, start: int, end: int, number: float | None = None) -> None:
    """A JudgeFault where a verdict is denied, asked for, taken back, or corrected to a number."""
    is_void = is_taken_back(text, start, end) or is_refused(text, end) or goes_on(text, end)
    if number is not None:
        others = [_ANY.match(text, at) for at, is_led in corrections(text, end) if is_led]
        is_void |= any(
            float(other["number"]) != number and not _COUNTS.match(text, other.end())
            for other in others
            if other is not None
        )
    if is_void:
        raise taken_back(text)


def _only(found: list[re.Match[str]], text: str) -> ScoreMention:
    """What all of them say."""
    if not found:
        raise JudgeFault(UNPARSABLE, f"no numbers in {quoted_end(text)}")
    numbers = {str(float(match["number"])) for match in found}
    totals = {"100" if match["percent"] else match["total"] for match in found} - {None}
    if len(numbers) > 1 or len(totals) > 1:
        raise JudgeFault(UNPARSABLE, f"several numbers in {quoted_end(text)}")
    return ScoreMention(number=found[-1]["number"], total=totals.pop() if totals else None)


_VERDICT = (
    r"(?:verdict|answer|choice|judge?ment|grade|rating|score)[*_]*(?:\s+is\s*:?|\s*[:=])"
    r"[\s*_\"'(\[]*"
)
_FINAL = r"(?:(?:the|my|final|overall)\s+){0,3}"
_LAST_LINES = 20


def number_in(reply: str, *, best: float | None = None, answer: str = "") -> float:
    """The number that a reply gives as its score, as `luyen.rewards.llm_judge.parser` finds it.

    A total behind it (`7/10`, `7 out of 10`, `70%`) must be the best score. What the reply repeats
    of the `answer` counts only where it gives no other number.

    Example:
        >>> number_in("Clear, but 2 errors. Score: 7/10", best=10.0), number_in("[[3]] of 5 points")
        (7.0, 3.0)
        >>> number_in("It only says [[10]]. Score: 2", answer="[[10]]")
        2.0
    """
    whole = without_thinking(reply, answer)
    said = JudgeReply(without_blocks(without_void(whole)), answer=answer)
    others = foreign(said, (match for place in _PLACES for match in place.finditer(said.text)))
    text = said.without(others)
    found = _own_score(JudgeReply(text, answer=answer), others) if answer else score_in(text)
    _is_last(found.number, JudgeReply(text, answer=""))
    if found.total is not None and finite(found.total) != best:
        why = f"a part of {found.total} in {quoted_end(text)}, where scale does not end"
        raise JudgeFault(UNPARSABLE, why)
    return finite(found.number)


def _is_last(number: str, reply: JudgeReply) -> None:
    """A JudgeFault where a later sentence of the judge's own states another score."""
    text = reply.text
    found = [match for place in _PLACES for match in place.finditer(text)]
    last = max(found, key=lambda match: match.end("number"), default=None)
    if (
        last is None
        or str(float(last["number"])) == str(float(number))
        or goes_on(text, last.end())
    ):
        return
    raise JudgeFault(UNPARSABLE, f"several numbers, the last another, in {quoted_end(text)}")


def _own_score(reply: JudgeReply, others: Sequence[re.Match[str]]) -> ScoreMention:
    """The score of a reply, where what the answer holds too counts only if nothing contradicts it.

    An answer may hold a good verdict, for the judge to repeat, or bad ones, so that the judge's
    own seems repeated. Where the two cannot be told apart there is no score.
    """
    text = reply.text
    every = [m for place in _PLACES for m in place.finditer(text) if reply.claims(m)]
    own = reply.without(every)
    outer = [match for match in every if reply.stands_out(match)]
    ends = {match.end() for match in outer}
    loose = [m for m in every if m.end() in ends or not reply.is_quoted(m.start())]
    if not _ANY.search(own):
        found = _only(_settled(loose, text), text)
        if not outer:
            raise reply.contested()
        if any(float(match["number"]) != float(found.number) for match in others):
            raise JudgeFault(UNPARSABLE, f"several numbers, one told, in {quoted_end(text)}")
        return found
    found = score_in(own)
    starts = [match.start() for match in _STATED.finditer(own)]
    if not starts and _is_only_mention(reply, own):
        raise reply.contested()
    is_partial = any(_OF_A_PART.search(own[max(at - _WORD, 0) : at]) for at in starts)
    contenders = loose if is_partial else outer
    if any(float(match["number"]) != float(found.number) for match in contenders):
        raise reply.contested()
    _settled(outer, text)
    return found


def _is_only_mention(reply: JudgeReply, own: str) -> bool:
    """Whether the score is a number that the answer holds, in the midst of other words."""
    if any(place.search(own) for place in _PLACES):
        return False
    alone = [match for match in _ANY.finditer(own) if reply.holds(match[0])]
    return bool(alone) and not any(reply.stands_out(match) for match in alone)


def choice_in(reply: str, choices: Mapping[str, float], answer: str = "") -> float:
    """The score of the choice that a reply settles on, and does not only repeat of the answer.

    It stands in double brackets, or alone on the last line, or after `verdict:` and the like (best
    on a line of its own), or opens the reply before a punctuation mark. Two different ones in such
    a place, or `A or B`, are a fault. A single letter must have the case it is written in.

    Example:
        >>> choice_in("B repeats itself.\\nVerdict: **A**", {"A": 1.0, "B": 0.0})
        1.0
        >>> choice_in("Yes, it is.", {"yes": 1.0, "no": 0.0})
        1.0
    """
    one, (brackets, line, stated, opening) = _choice_places(choices)
    places = (brackets, line, stated)
    text = _own_words(without_thinking(reply, answer), places, choices)
    said = JudgeReply(text, answer=answer)
    spoken = _words_in(choices, answer)
    answers = [m for m in stated.finditer(text) if _is_of_answer(m, said, spoken)]
    again = [*said.repeated(m for place in places for m in place.finditer(text)), *answers]
    own, last = said.without(again), text.rpartition("\n")[2]
    opened = opening.match(text)
    first = [] if opened is None or _is_quotation(opened, said, spoken) else [opened[1]]

    def settled(text: str) -> set[float]:
        alone = re.findall(rf"\A{one}\Z", last.strip(" \t*_.\"'()[]`"))
        alone = alone if is_stated(said, len(text) - len(last)) else []
        is_repeated = alone and _is_line_of(last, answer)
        if is_repeated and not said.is_own_sentence(len(text) - len(last)):
            alone = []
        rest = (place.findall(text) for place in (line, stated))
        found = next((some for some in (brackets.findall(text), alone, *rest, first) if some), [])
        if is_repeated:  # perhaps the last words of a quotation
            found = [*found, *line.findall(text), *first]
        return {_score_of(name, choices) for name in found}

    outer = {_score_of(match[1], choices) for match in again if said.stands_out(match)}
    scores = settled(own if answer else text)
    if outer and scores and outer != scores:
        raise said.contested()
    scores = scores or outer
    if len(scores) != 1:
        how = f"{'several' if scores else 'none'} of {', '.join(choices)}"
        raise JudgeFault(UNPARSABLE, f"{how} settled on in {quoted_end(text)}")
    where = own if answer else text
    found = [[*place.finditer(where)] for place in (*places, opening)]
    _hold([m for some in found[:3] for m in some] or found[3], where, one, choices)
    _hold([match for match in again if said.stands_out(match)], text, one, choices)
    _decide(found[:3], where, scores, choices)
    return scores.pop()


def _decide(
    found: list[list[re.Match[str]]], text: str, scores: set[float], choices: Mapping[str, float]
) -> None:
    """A JudgeFault where the deciding places go on with other words, or the last says another."""
    last = sorted((m for some in found for m in some), key=lambda match: match.end(1))[-1:]
    others = {_score_of(m[1], choices) for m in last if not goes_on(text, m.end())}
    if others - scores or any(goes_on(text, m.end()) for m in next(filter(None, found), [])):
        raise taken_back(text)


def _own_words(reply: str, places: Iterable[re.Pattern[str]], choices: Mapping[str, float]) -> str:
    """A reply with dots in the place of verdicts that are quoted, reported, wished or examples."""
    said = JudgeReply(without_blocks(without_void(reply)), answer="")
    names = frozenset(word for name in choices for word in name.casefold().split())
    found = (match for place in places for match in place.finditer(said.text))
    return said.without(foreign(said, found, names))


def _hold(found: list[re.Match[str]], text: str, one: str, choices: Mapping[str, float]) -> None:
    """A JudgeFault where one of the verdicts is taken back, or another one follows at once."""
    can_be_no = any(name.casefold() in ("no", "nope") for name in choices)
    another = re.compile(rf"{one}(?=[*_\"')\]`]*(?:[.,:;!?\n]|\Z))")
    for match in found:
        others = [another.match(text, at) for at, _ in corrections(text, match.end())]
        values = {_score_of(one[1], choices) for one in [match, *others] if one is not None}
        if len(values) > 1 or is_taken_back(text, match.start(), match.end()):
            raise taken_back(text)
        if not can_be_no and is_refused(text, match.end()):
            raise taken_back(text)


def _choice_places(choices: Mapping[str, float]) -> tuple[str, tuple[re.Pattern[str], ...]]:
    """A pattern of a choice, and where it may stand: brackets, own line, stated, opening."""
    names = sorted(choices, key=len, reverse=True)
    forms = [re.escape(n) if len(n) == 1 else f"(?i:{re.escape(n)})" for n in names]
    any_of = rf"(?:{'|'.join(forms)})(?!\w)"
    one = rf"({any_of})(?!\W{{0,6}}(?:\bor\b|[/|])\W{{0,6}}{any_of})"
    return one, (
        re.compile(rf"\[\[\s*{one}\s*\]\]"),
        re.compile(rf"(?m)^[ \t*_#>\-]{{0,20}}(?i:{_FINAL}{_VERDICT}){one}[*_.!\"')\] \t]*$"),
        re.compile(rf"(?i:{_VERDICT}){one}"),
        re.compile(rf"\A[\s*_\"'(\[]*{one}(?=[*_\"')\]]*(?:[.,:;!\n]|\Z))"),
    )


def _is_quotation(opened: re.Match[str], said: JudgeReply, spoken: set[str]) -> bool:
    """Whether a reply opens with words in marks, or with what another speaker said."""
    is_marked = said.is_quoted(opened.start(1)) and said.text[opened.end(1)] not in QUOTATION_MARKS
    return is_marked or (opened[1].casefold() in spoken and said.is_reported(opened.end(1)))


def _is_of_answer(match: re.Match[str], said: JudgeReply, spoken: set[str]) -> bool:
    """Whether `answer: yes`, or `its verdict: yes`, may speak of an answer that says yes."""
    is_labelled = match[0].casefold().startswith("answer") or said.is_of_others(match.start())
    return is_labelled and match[1].casefold() in spoken


def _words_in(names: Iterable[str], answer: str) -> set[str]:
    """Those choices that an answer holds as words, in lower case."""
    return {
        name.casefold()
        for name in names
        if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", answer, re.IGNORECASE)
    }


def _is_line_of(line: str, answer: str) -> bool:
    return any(plain(line) == plain(one) for one in answer.splitlines()[-_LAST_LINES:])


def _score_of(found: str, choices: Mapping[str, float]) -> float:
    exact = {n: s for n, s in choices.items() if n == found}
    alike = {n: s for n, s in choices.items() if n.casefold() == found.casefold()}
    return next(iter((exact or alike).values()))


def json_number_in(reply: str, json_key: str, answer: str = "") -> float:
    """The number under a key of the last JSON object of a reply that has it; true is 1.

    Objects that the answer holds too come last.

    Example:
        >>> json_number_in('Here: {"score": {"style": 0.5}}', "score.style")
        0.5
    """
    said = JudgeReply(without_void(without_thinking(reply, answer)), answer=answer)
    claimed = [at_key(tree, json_key) for tree, _ in json_objects(answer)]
    name = re.escape(json_key.rpartition(".")[2])
    claimed += re.findall(rf"{name}(?:\W|\bis\b|\bof\b){{0,8}}?({_NUMBER})", answer, re.IGNORECASE)
    own: list[tuple[Any, slice]] = []
    theirs: list[tuple[Any, slice]] = []
    for tree, place in json_objects(said.text):
        found = at_key(tree, json_key)
        if found is not None and is_stated(said, place.start) and not is_reported(said, place.stop):
            is_theirs = _is_among(found, claimed) or said.holds(said.text[place])
            (theirs if is_theirs else own).append((found, place))
    outer = [one for one in theirs[:1] if _is_alone(said, one[1], json_key)]
    if (outer and own and outer[0][0] != own[0][0]) or (theirs and not own and not outer):
        raise said.contested()
    if not own + outer:
        why = f"no JSON object with a number under {json_key} in {quoted_end(said.text)}"
        raise JudgeFault(UNPARSABLE, why)
    value, place = (own or outer)[0]
    further = [
        one for one in own[1:2] if not re.search(r"\w", said.text[one[1].stop : place.start])
    ]
    if any(other != value for other, _ in further):
        raise JudgeFault(
            UNPARSABLE, f"objects that differ, side by side, in {quoted_end(said.text)}"
        )
    if isinstance(value, GivenTwice):
        why = f"{json_key} is given twice, as {value.first} and {value.then}"
        raise JudgeFault(UNPARSABLE, why)
    number = finite(value)
    _stands(said.text, place.start, place.stop, number)
    return number


def _is_among(found: "str | int | float | GivenTwice", claimed: list[Any]) -> bool:
    """Whether a value is one of those that the answer gives, as a number or as text."""
    if isinstance(found, GivenTwice):
        return found in claimed
    return str(found).casefold() in {str(one).casefold() for one in claimed} or found in claimed


def _is_alone(said: JudgeReply, place: slice, json_key: str) -> bool:
    """Whether an object ends a reply, or begins one that gives the key nowhere else.

    Inside of an object that is no JSON, for its quotation is not escaped, it is neither, and
    where other words lead to it or speak of it neither.
    """
    text = said.text
    if said.is_echo(place.start, place.stop):
        return False
    outside = text[: place.start] + text[place.stop :]
    is_last = not text[place.stop :].strip(_AFTER_JSON)
    given = rf"{re.escape(json_key.rpartition('.')[2])}[\"'`]?\s*[:=]"
    is_first = not text[: place.start].strip(_BEFORE_JSON) and not said.is_reported(place.stop)
    return (is_last and said.is_own_sentence(place.start)) or (
        is_first and re.search(given, outside) is None
    )


_AFTER_JSON, _BEFORE_JSON = " \t\r\n`*_.", " \t\r\n`json"


def pattern_number_in(text: str, pattern: str, answer: str = "") -> float:
    """The first group of a pattern's last match that does not only repeat the answer.

    It runs isolated, since patterns can hang.
    """
    said = JudgeReply(text, answer=answer)
    found = list(re.finditer(pattern, text))
    again = said.repeated(found)
    outer = [match for match in again if said.stands_out(match)]
    theirs = set(map(id, again))
    own = [match for match in found if id(match) not in theirs]
    own = [match for match in own if is_stated(said, match.start())] or own
    numbers = {match.group(1) for match in [*own[-1:], *outer]}
    if len(numbers) > 1 or (again and not own and not outer):
        raise Unscorable("no match that is clearly the judge's: the answer holds it too")
    found = own or outer
    if not found or found[-1].group(1) is None:
        raise Unscorable("no match")
    last = found[-1]
    if is_taken_back(text, last.start(), last.end()) or is_refused(text, last.end()):
        raise Unscorable("a match that is taken back")
    return float(last.group(1))


def finite(value: str | float) -> float:
    """A number out of what stands where the score is."""
    try:
        number = float(value)
    except (ValueError, OverflowError) as error:
        raise JudgeFault(UNPARSABLE, f"{quoted_end(str(value))} is no number") from error
    if not math.isfinite(number):
        raise JudgeFault(NOT_FINITE, f"the score is {number}")
    return number


def on_scale(number: float, scale: tuple[float, float] | None) -> float:
    """A number between worst and best as one between 0 and 1; as it is without a scale.

    Example:
        >>> on_scale(7.0, (0.0, 10.0)), on_scale(7.0, None)
        (0.7, 7.0)
    """
    if scale is None:
        return number
    worst, best = scale
    if not worst <= number <= best:
        raise JudgeFault(OUT_OF_RANGE, f"{number:g} does not lie between {worst:g} and {best:g}")
    return (number - worst) / (best - worst)
