"""The text of an answer as its tokens arrive: whole characters, and nothing of a stop string."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import final

from luyen.serve.jobs import Job
from luyen.serve.model import ServedModel

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


@final
class AnswerText:
    """Turns tokens into pieces of text that never have to be taken back.

    Example:
        >>> answer = AnswerText(lambda ids: "".join(map(chr, ids)), stops=("END",))
        >>> [answer.add([*map(ord, piece)]) for piece in ("12E", "x", "EN", "D")]
        ['12', 'Ex', '', '']
        >>> answer.finish(), answer.text
        ('', '12Ex')
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
    ) -> None:
        """A stop string counts where it ends after the first `min_tokens` tokens."""
        self._decode = decode
        self._stops = tuple(stops)
        self._min_tokens = min_tokens
        self._floor: int | None = None if min_tokens else 0
        """Characters of the first `min_tokens` tokens, once they are there."""
        self._ids: list[int] = []
        # Tokens are decoded with those before them, since a tokenizer may join them with a blank.
        self._context = 0
        self._read = 0
        self._known = ""
        """Text so far, stop strings included."""
        self._sent = 0
        self._end: int | None = None
        """Where a stop string begins."""

    @property
    def text(self) -> str:
        """What was returned so far, in one piece."""
        return self._known[: self._sent]

    def add(self, tokens: Sequence[int]) -> str:
        """The text that is certain after these tokens."""
        self._ids += tokens
        before = self._decode(self._ids[self._context : self._read])
        after = self._decode(self._ids[self._context :])
        if after.endswith(_INCOMPLETE) or len(after) <= len(before):
            return ""
        self._append(after[len(before) :])
        self._context, self._read = self._read, len(self._ids)
        return self._send(len(self._known) - self._uncertain())

    def finish(self) -> str:
        """The rest, when no more tokens come."""
        before = self._decode(self._ids[self._context : self._read])
        self._append(self._decode(self._ids[self._context :])[len(before) :])
        self._context = self._read = len(self._ids)
        return self._send(len(self._known))

    def _append(self, piece: str) -> None:
        start = len(self._known)
        self._known += piece
        if self._floor is None and len(self._ids) >= self._min_tokens:
            self._floor = len(self._decode(self._ids[: self._min_tokens]))
        if self._end is None and self._floor is not None:
            self._end = self._stop_in(start)

    def _stop_in(self, start: int) -> int | None:
        """Where the first stop string begins that the newest text completes."""
        assert self._floor is not None
        found: list[int] = []
        for stop in self._stops:
            first = max(0, start - len(stop) + 1, self._floor - len(stop) + 1)
            at = self._known.find(stop, first)
            if at >= 0:
                found.append(at)
        return min(found, default=None)

    def _uncertain(self) -> int:
        """Characters at the end that may be the beginning of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        for length in range(min(longest, len(self._known)), 0, -1):
            if any(stop.startswith(self._known[-length:]) for stop in self._stops):
                return length
        return 0

    def _send(self, end: int) -> str:
        if self._end is not None:
            end = min(end, self._end)
        piece = self._known[self._sent : max(end, self._sent)]
        self._sent += len(piece)
        return piece


def answer_text(job: Job, model: ServedModel) -> AnswerText:
    """An empty text that the tokens of one answer are added to."""
    decode = partial(model.tokenizer.decode, skip_special=job.reply.skip_special_tokens)
    decoding = job.decoding
    return AnswerText(decode, stops=decoding.stop, min_tokens=decoding.min_tokens)
