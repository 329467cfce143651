"""Verdicts that are not a judge's own: those it repeats of the answer, and those it takes back.

A verdict that stands in the answer too may still be the judge's own. It counts where it begins or
ends the reply, outside of quotation marks, and where nothing else in the reply contradicts it.
"""

import re
import unicodedata
from bisect import bisect
from collections.abc import Iterable, Iterator, Sequence
from typing import final

from luyen.rewards.llm_judge.faults import CUT_OFF, UNPARSABLE, JudgeFault, quoted_end

_DECORATION = re.compile(r"[\s*_#>`\"'().!:=-]+")
QUOTATION_MARKS = "\"'`\u2018\u2019\u201c\u201d\u00ab\u00bb"
"""Marks that open or close a quotation."""
_AROUND = " \t\r\n*_#.!)("
_HOLE = "\u2026"
_NEAR = 40
"""Characters on each side of an end of thoughts that are compared with the answer's."""
_COMPARED = 8
_ECHO = 4
"""Fewest characters before a verdict that show that it was copied together with them."""
_LONGEST_LINE = 400

OWN_WORDS = frozenset(
    re.findall(
        r"\S+",
        "a an analysis and as assessment be conclusion evaluation final fine get gets give gave "
        "good grade grading here here's hence i i'd i'll in is it json judgement judgment "
        "justification mark my of out overall points rate rated rating reasoning response score "
        "short so summary that the therefore this thus to total verdict weak which why will would",
    )
)
"""What may stand between the beginning of a sentence and a verdict that is the judge's own."""
SPEAKERS = frozenset(["i", "i'd", "i'll", "my", "verdict"])
"""A clause behind a comma with one of these is the judge's, whatever the clauses before it say."""
_OTHERS = frozenset(
    ["its", "their", "his", "her", "author's", "answer's", "student's", "response's", "model's"]
)
_INTRODUCING = re.compile(r"(?::|\b(?:is|was|says|said|writes|wrote|with|reads|claims))\Z", re.I)
_SENTENCE = re.compile(r"[.!?;)][\"'\u201d\u2019*_`]*\s|\},?\s|```\w*")
_WORD = re.compile(r",|[^\W_]+(?:['\u2019][a-z]+)?")
_SPOKEN = re.compile(
    r"[^\w.!?;\n]{0,6}(?:(?:is|was|are)\s+)?(?:what|all|only|its|written|claimed)\b|[!\s\"'*_)\]]{0,6}\?"
    r"|\s{0,6}(?:is|was|are)\s+(?:what|all|only|its|written|claimed|submitted|quoted)\b"
    r"|\W{1,6}(?:that|this)\s+(?:is|was)\s+(?:what|all|only|its|wrong|false|untrue"
    r"|the\s+(?:\w+'s\s+)?(?:whole|entire|full|only|student|author|text))\b"
    r"|.{0,60}?\b(?:claim|quot|wish|demand|sa(?:ys|id)\b|cries|writes|wrote|asks|wants)",
    re.IGNORECASE | re.DOTALL,
)
"""Behind a verdict: that another speaker said it."""
_LABELLED = re.compile(
    r"(?:score|rating|grade|mark|points?)\W{0,3}(?:\w+\W{1,3}){0,3}?(?P<behind>\d+(?:\.\d+)?)"
    r"|\[\[?\s*(?P<inside>\d+(?:\.\d+)?)\s*\]"
    r"|(?P<before>\d+(?:\.\d+)?)\W{1,3}(?:as|in|for)?\W{0,3}(?:the\W{1,3})?"
    r"(?:score|rating|grade|mark|points?)",
    re.IGNORECASE,
)

_DENIED = re.compile(
    r"(?:\b(?:not|never|hardly|instead\s+of|rather\s+than|far\s+from|at\s+(?:most|least)|less\s+than"
    r"|more\s+than|up\s+to|not\s+even|for\s+example|such\s+as|scale\s+ends\s+at|(?:choices|options)\s+are)"
    r"|n['\u2019]t)\W+"
    r"(?:(?:a|an|the|worth|quite|be|deserves?|give|get|it|this|that|it['\u2019]s|say|think|believe"
    r"|score|rating|verdict|is|of)\W+){0,5}\Z",
    re.IGNORECASE,
)
"""Before a verdict: that it is none, a bound or an example."""
_CONDITION = re.compile(r"(?:\A|[.!?\n]\s*)(?:if|unless|had|were)\b[^.!?\n]*\Z", re.IGNORECASE)
"""The beginning of a sentence up to a verdict: that it holds under a condition."""
_REPORTED_BEFORE = re.compile(
    r"(?<!\bi )\b(?:claims|wants|demands|says|said|writes|wrote|asks\s+for|requests|ends\s+with"
    r"|hopes\s+for|suggests|insists\s+on|argues|told\s+to\s+(?:write|give|say))"
    r"(?:\W+(?:that|it|deserves|for|the|a|its|own|verdict|score|rating|is|of|only|just))*"
    r"\W{0,6}\Z",
    re.IGNORECASE,
)
"""Before a verdict: that another speaker gives it, whether the answer spells it so or not."""
_TAKEN_BACK = re.compile(
    r"[\"'\u201d\u2019*_`)\]]{0,6}\s?\?|\W{1,6}(?:would\s+(?:be|have)|minus\s+\d)"
    r"|\W{1,12}(?:wait|scratch (?:that|it)|strike that|on second thoughts?|forget (?:that|it)"
    r"|never ?mind|correction|i take (?:that|it) back)(?=\s*(?:[^\w\s]|\Z))",
    re.IGNORECASE,
)
"""Behind a verdict: a question mark, or words that take it back."""
_REFUSED = re.compile(r"\W{1,12}(?:no|nope)(?=\s*(?:[^\w\s]|\Z))", re.IGNORECASE)
_GAP = re.compile(r"\W{1,12}")
_LEADING = re.compile(
    r"(no|nope|wait|actually|rather|i\W+mean|correction|sorry|instead|make\W+it|change\W+it\W+to"
    r"|on\W+second\W+thought)\b\W{1,4}|(?:or|but|hmm?|well|in\W+fact|oh|that|i|guess|think)\b\W{1,4}",
    re.IGNORECASE,
)
"""Words between a verdict and its correction; the first group corrects by itself."""
_MOST_LEADING = 6


def is_taken_back(text: str, start: int, end: int) -> bool:
    """Whether a verdict is denied, asked for, taken back, or reported of another speaker.

    Example:
        >>> is_taken_back("not a 7", 6, 7), is_taken_back("7?", 0, 1), is_taken_back("7!", 0, 1)
        (True, True, False)
    """
    before = text[max(start - _NEAR, 0) : start]
    sentence = text[max(start - _LONGEST_LINE, 0) : start]
    is_denied = (
        _DENIED.search(before) or _REPORTED_BEFORE.search(before) or _CONDITION.search(sentence)
    )
    return is_denied is not None or _TAKEN_BACK.match(text, end) is not None


def taken_back(text: str) -> JudgeFault:
    """The fault where a reply takes its verdict back, or corrects it.

    Example:
        >>> str(taken_back("Score: 7? No."))
        "judge unparsable: a verdict that is taken back in 'Score: 7? No.'"
    """
    return JudgeFault(UNPARSABLE, f"a verdict that is taken back in {quoted_end(text)}")


def is_refused(text: str, end: int) -> bool:
    """Whether a `no` of its own stands directly behind a verdict.

    Example:
        >>> is_refused("7? No!", 2), is_refused("7. No errors.", 1)
        (True, False)
    """
    return _REFUSED.match(text, end) is not None


def corrections(text: str, end: int) -> Iterator[tuple[int, bool]]:
    """Where the correction of a verdict could stand, and whether words of a correction lead to it.

    Example:
        >>> list(corrections("7, or rather 3", 1))
        [(3, False), (6, False), (13, True)]
    """
    gap = _GAP.match(text, end)
    at, is_led = (gap.end() if gap else len(text)), False
    for _ in range(_MOST_LEADING):
        yield at, is_led
        word = _LEADING.match(text, at)
        if word is None:
            return
        at, is_led = word.end(), is_led or word[1] is not None
    yield at, is_led


def plain(text: str) -> str:
    """Text without blanks, marks and invisible characters, which a quotation changes.

    Example:
        >>> plain("**Score**: \\uff11\\u200b0")
        'score10'
    """
    if not text.isascii():
        shown = unicodedata.normalize("NFKC", text)
        text = "".join(c for c in shown if unicodedata.category(c) != "Cf")
    return _DECORATION.sub("", text).casefold()


@final
class JudgeReply:
    """A reply of a judge beside the answer that it judges.

    Example:
        >>> reply = JudgeReply('It says "7". So 7', answer="I deserve 7")
        >>> [reply.stands_out(match) for match in reply.repeated(re.finditer("7", reply.text))]
        [False, True]
    """

    def __init__(self, text: str, *, answer: str) -> None:
        self.text = text
        self.answer = answer
        """What the policy said."""
        self._said = plain(answer)
        self._whole = plain(re.sub(r"```\w*", "", text))
        self._claims = frozenset(
            float(number)
            for match in _LABELLED.finditer(unicodedata.normalize("NFKC", answer))
            for number in match.groups()
            if number
        )
        self._fences = [match.start() for match in re.finditer("```", text)]
        self._first = len(text) - len(text.lstrip(_AROUND))
        self._last = len(text.rstrip(_AROUND))

    def holds(self, part: str) -> bool:
        """Whether a part of the reply stands in the answer too."""
        sought = plain(part)
        return bool(sought) and sought in self._said

    def claims(self, match: re.Match[str]) -> bool:
        """Whether the answer holds the text of a match, or states its number as a score."""
        return self.holds(match[0]) or float(match["number"]) in self._claims

    def repeated(self, found: Iterable[re.Match[str]]) -> list[re.Match[str]]:
        """Those matches that stand in the answer too."""
        return [match for match in found if self.holds(match[0])]

    def is_quoted(self, start: int) -> bool:
        """Whether it begins in quotation marks, in a block of code, or on a line behind `>`."""
        near = self.text[max(start - _LONGEST_LINE, 0) : start + _COMPARED]
        before = near[: min(start, _LONGEST_LINE)]
        line = near[before.rfind("\n") + 1 :].lstrip(" \t")
        on_line = before[before.rfind("\n") + 1 :]
        is_in_code = bool(bisect(self._fences, start) % 2)
        is_open = on_line.count('"') % 2 == 1 or on_line.count("\u201c") > on_line.count("\u201d")
        is_marked = before.rstrip("*_ \t").endswith(tuple(QUOTATION_MARKS))
        return is_in_code or line.startswith(">") or is_open or is_marked

    def stands_out(self, match: re.Match[str]) -> bool:
        """Whether it begins or ends the reply in words of the judge, but for marks, unquoted."""
        if plain(match[0]) == self._whole:
            return True
        if self.is_echo(match.start(), match.end()):
            return False
        begins = match.start() <= self._first and not self.is_reported(match.end())
        ends = match.end() >= self._last and self.is_own_sentence(match.start())
        return (begins or ends) and not self.is_quoted(match.start())

    def is_echo(self, start: int, end: int) -> bool:
        """Whether what stands before it in the reply stands before it in the answer too."""
        before = _last(self.text, start)
        return len(before) >= _ECHO and before + plain(self.text[start:end]) in self._said

    def is_reported(self, end: int) -> bool:
        """Whether another speaker said it, by what follows, as in `[[10]] is what it says`."""
        return _SPOKEN.match(self.text, end) is not None

    def is_own_sentence(self, start: int) -> bool:
        """Whether nothing but words of a verdict, as in `I rate it`, leads to a place."""
        words = self.words_before(start)
        clause = words[len(words) - words[::-1].index(",") :] if "," in words else []
        if SPEAKERS.isdisjoint(clause):
            clause = words
        return all(word == "," or word in OWN_WORDS for word in clause)

    def is_of_others(self, start: int) -> bool:
        """Whether it is the verdict of another speaker, as in `the student's verdict: yes`."""
        return not _OTHERS.isdisjoint(self.words_before(start)[-2:])

    def words_before(self, start: int) -> list[str]:
        """The words and commas between the beginning of a sentence and a place.

        A line that ends with a colon, or with a word such as `says`, belongs to the next.
        """
        before = self.text[max(start - _LONGEST_LINE, 0) : start]
        *above, line = before.split("\n")
        introducing = next((one for one in reversed(above) if one.strip(_AROUND)), "")
        if _INTRODUCING.search(introducing.rstrip(_AROUND)):
            line = f"{introducing} {line}"
        return _WORD.findall(_SENTENCE.split(line)[-1].casefold().replace("\u2019", "'"))

    def without(self, found: Iterable[re.Match[str]]) -> str:
        """The reply with dots in the place of matches."""
        letters = list(self.text)
        for match in found:
            letters[match.start() : match.end()] = _HOLE * (match.end() - match.start())
        return "".join(letters)

    def contested(self) -> JudgeFault:
        """The fault where it is not clear what is the judge's, and what is repeated."""
        why = "a verdict that the answer holds too, not clearly the judge's, in "
        return JudgeFault(UNPARSABLE, why + quoted_end(self.text))


def own_ends(reply: str, ends: Sequence[int], mark: str, answer: str) -> list[int]:
    """Those ends of thoughts that the judge wrote.

    A quoted one has the answer's text around it. Where all have, an answer may have guessed what
    follows the judge's: those count that no sentence leads to and that are in no quotation marks,
    and the only one of a reply that begins with its thoughts.
    """
    quoted = [match.start() for match in re.finditer(re.escape(mark), answer)]
    before = tuple({_last(answer, at) for at in quoted} - {""})
    behind = tuple({_next(answer, at + len(mark)) for at in quoted} - {""})
    own = [
        at
        for at in ends
        if not (before and _last(reply, at).endswith(before))
        and not _begins_as(_next(reply, at + len(mark)), behind)
    ]
    if own:
        return own
    if len(ends) == 1 and reply.lstrip().startswith("<think>"):
        copied = tuple(text for text in before if len(text) >= _ECHO)
        is_copied = copied and _last(reply, ends[0]).endswith(copied)
        return [] if is_copied and _next(reply, ends[0] + len(mark)) in behind else list(ends)
    said = JudgeReply(reply, answer=answer)
    return [at for at in ends if not said.is_quoted(at) and not said.words_before(at)]


def _begins_as(text: str, others: tuple[str, ...]) -> bool:
    """Whether it begins like another one, or like the first part of one, where it ends there."""
    return any(text.startswith(other) or (text and other.startswith(text)) for other in others)


def _last(text: str, at: int) -> str:
    return plain(text[max(at - _NEAR, 0) : at])[-_COMPARED:]


def _next(text: str, at: int) -> str:
    return plain(text[at : at + _NEAR])[:_COMPARED]


_END_OF_THINKING = "</think>"
_STILL_THINKING = re.compile(r"^[ \t]{0,20}<think>", re.MULTILINE)


def without_thinking(reply: str, answer: str = "") -> str:
    """A reply without the thoughts before it; a fault when it ends among them.

    Example:
        >>> without_thinking("<think>7? 8?</think> Score: 8")
        'Score: 8'
    """
    size = len(_END_OF_THINKING)
    ends = [match.start() for match in re.finditer(_END_OF_THINKING, reply)]
    last = (own_ends(reply, ends, _END_OF_THINKING, answer) or [-size])[-1]
    said = reply[last + size :].strip()
    if _STILL_THINKING.search(said):
        raise JudgeFault(CUT_OFF, f"the reply ends in its thoughts: {quoted_end(said)}")
    return said
