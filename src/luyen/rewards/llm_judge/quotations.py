"""What a judge repeats of the answer, by which the answer would score itself.

A verdict that stands in the answer too may still be the judge's own. It counts where it begins or
ends the reply, outside of quotation marks, and where nothing else in the reply contradicts it.
"""

import re
import unicodedata
from bisect import bisect
from collections.abc import Iterable, Sequence
from typing import final

from luyen.rewards.llm_judge.faults import UNPARSABLE, JudgeFault, quoted_end

_DECORATION = re.compile(r"[\s*_#>`\"'().!-]+")
_MARKS = "\"'`\u2018\u2019\u201c\u201d\u00ab\u00bb"
_AROUND = " \t\r\n*_#.!)("
_HOLE = "\u2026"
_NEAR = 40
"""Characters on each side of an end of thoughts that are compared with the answer's."""
_COMPARED = 8
_LONGEST_LINE = 400


def plain(text: str) -> str:
    """Text without blanks, marks and invisible characters, which a quotation changes.

    Example:
        >>> plain("**Score**: \\uff11\\u200b0")
        'score:10'
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
        self._fences = [match.start() for match in re.finditer("```", text)]
        self._first = len(text) - len(text.lstrip(_AROUND))
        self._last = len(text.rstrip(_AROUND))

    def holds(self, part: str) -> bool:
        """Whether a part of the reply stands in the answer too."""
        sought = plain(part)
        return bool(sought) and sought in self._said

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
        is_marked = before.rstrip("*_ \t").endswith(tuple(_MARKS))
        return is_in_code or line.startswith(">") or is_open or is_marked

    def stands_out(self, match: re.Match[str]) -> bool:
        """Whether it begins or ends the reply, but for marks, and is not quoted."""
        is_outer = match.start() <= self._first or match.end() >= self._last
        return is_outer and not self.is_quoted(match.start())

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
    follows the judge's: those count that are in no quotation marks.
    """
    quoted = [match.start() for match in re.finditer(re.escape(mark), answer)]
    before = tuple({_last(answer, at) for at in quoted} - {""})
    behind = tuple({_next(answer, at + len(mark)) for at in quoted} - {""})
    own = [
        at
        for at in ends
        if not (before and _last(reply, at).endswith(before))
        and not (behind and _next(reply, at + len(mark)).startswith(behind))
    ]
    if own:
        return own
    said = JudgeReply(reply, answer=answer)
    return [at for at in ends if not said.is_quoted(at)]


def _last(text: str, at: int) -> str:
    return plain(text[max(at - _NEAR, 0) : at])[-_COMPARED:]


def _next(text: str, at: int) -> str:
    return plain(text[at : at + _NEAR])[:_COMPARED]
