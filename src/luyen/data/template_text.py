"""Chat-template text: content that stays content, and the text between two assistant turns.

A tool result may spell `<|im_end|>`. Encoded as it stands, it would end the turn. Here every marker
in a message gets a cut after its first character before the template sees it, and the tokenizer
encodes the pieces apart: the same text, in which no added token can match. Where text has no
marker, nothing is cut and nothing changes.

What is protected: all added tokens in what users and tools say, and in what the assistant said the
tokens that end a turn, for it cannot have meant one by them. System messages are the trainer's own.
"""

import re
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby, pairwise
from typing import Any, TypeAlias, cast, final

from luyen.base.records import Message, Source
from luyen.data.tokenizer import Tokenizer, TurnEnd

Region: TypeAlias = tuple[int, int]
ZERO_WIDTH = "\u200b"
ALTERED = "a marker in a message was broken with a zero-width space: the tokenizer has no cuts"
_UNUSED = (range(0xFDD0, 0xFDF0), range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE))
"""Characters that stand for nothing, and private ones."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Characters that no message of a conversation uses; they never reach the tokenizer.

    Example:
        >>> Marks(cut="|", begin="(", end=")").read("a(b|c)d")
        ('abcd', [2], [(1, 3)])
    """

    cut: str
    """Between two characters that must not be encoded together."""
    begin: str
    """Where the content of a message begins."""
    end: str
    """Where it ends."""

    def read(self, text: str) -> tuple[str, list[int], list[Region]]:
        """The text without marks, where the cuts are, and from where to where contents reach."""
        kept, cuts, contents = list[str](), list[int](), list[Region]()
        position = start = 0
        for piece in re.split(f"([{self.cut}{self.begin}{self.end}])", text):
            if piece == self.cut:
                cuts.append(position)
            elif piece == self.begin:
                start = position
            elif piece == self.end:
                contents.append((start, position))
            else:
                kept.append(piece)
                position += len(piece)
        return "".join(kept), cuts, contents

    def wrap(self, message: Message) -> Message:
        """The message with the borders of its content marked, white space around it left out."""
        content = message.get("content")
        core = content.strip() if isinstance(content, str) else ""
        if not isinstance(content, str) or not core:
            return message
        before, _, after = content.partition(core)
        return {**message, "content": f"{before}{self.begin}{core}{self.end}{after}"}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """Text as ids.

    Example:
        >>> Encoded(ids=[5], spans=[(0, 1)], contents=[(0, 1)], is_altered=False).ids
        [5]
    """

    ids: list[int]
    """Tokens."""
    spans: list[Region] | None
    """Characters that each covers; None where the tokenizer cannot say."""
    contents: Sequence[Region]
    """Where the contents of messages stand, in the same characters."""
    is_altered: bool
    """Whether zero-width characters had to be put in."""


@final
class PlainText:
    """Protects messages for one tokenizer, and encodes what a template made of them.

    Example:
        >>> from luyen.data.tokenizer import load_tokenizer
        >>> plain = PlainText(load_tokenizer("builtin://arithmetic"))
        >>> marks, (message,) = plain.protect([{"role": "tool", "content": "</think>"}])
        >>> marks.read(message["content"])
        ('</think>', [1], [])
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Reads the added tokens of the tokenizer."""
        self._tokenizer = tokenizer
        markers = tokenizer.markers
        self._all = _starts_of(markers)
        self._ends = _starts_of([m for m, i in markers.items() if i in tokenizer.stop_ids])
        self._ids = frozenset(markers.values()) - {tokenizer.unknown_id}

    def protect(self, messages: Sequence[Message]) -> tuple[Marks, list[Message]]:
        """The messages with cuts in their markers, and the characters that mark them."""
        text = "".join(chain.from_iterable(_strings(m) for m in messages))
        unused = (c for c in map(chr, chain(*_UNUSED)) if c not in text)
        marks = Marks(cut=next(unused), begin=next(unused), end=next(unused))
        return marks, [self._protected(message, marks.cut) for message in messages]

    def ids(self, text: str, cuts: Sequence[int] = ()) -> list[int]:
        """Ids of the text, none of which reaches over a cut."""
        return self.encode(text, cuts).ids if cuts else self._tokenizer.encode(text)

    def encode(
        self, text: str, cuts: Sequence[int] = (), contents: Sequence[Region] = ()
    ) -> Encoded:
        """Ids of the text, none of which reaches over a cut.

        A marker that only the tokenizer sees in a content, after it has normalised the text, gets a
        cut as well.
        """
        made = set(cuts)
        ids, spans = self._in_pieces(text, sorted(made))
        while missed := self._markers_inside(ids, spans, contents) - made:
            made |= missed
            ids, spans = self._in_pieces(text, sorted(made))
        if not made or self._reads_as(ids, text):
            return Encoded(ids=ids, spans=spans, contents=contents, is_altered=False)
        return self._altered(text, sorted(made), contents)

    def _protected(self, message: Message, cut: str) -> Message:
        role = message["role"]
        if role in ("user", "tool"):
            found, fields = self._all, ("content", "name")  # a tool's name is the policy's word
        elif role == "assistant":
            found, fields = self._ends, ("content", "thinking", "tool_calls")
        else:
            return message
        changed = {
            key: _map_strings(message[key], lambda s: found.sub(rf"\g<0>{cut}", s))
            for key in fields
            if key in message
        }
        return {**message, **changed}

    def _in_pieces(self, text: str, cuts: Sequence[int]) -> tuple[list[int], list[Region] | None]:
        ids, spans = list[int](), list[Region]()
        knows_spans = True
        for start, end in pairwise([0, *cuts, len(text)]):
            piece, inside = self._tokenizer.encode_spans(text[start:end])
            ids += piece
            knows_spans = knows_spans and inside is not None
            spans += [(first + start, beyond + start) for first, beyond in inside or ()]
        return ids, spans if knows_spans else None

    def _markers_inside(
        self, ids: Sequence[int], spans: Sequence[Region] | None, contents: Sequence[Region]
    ) -> set[int]:
        """Where to cut so that no added token stands in, or reaches into, a content."""
        found = [s for i, s in zip(ids, spans or (), strict=False) if i in self._ids]
        places = set[int]()
        for first, beyond in found:
            for start, end in contents:
                if first < end and beyond > start:
                    place = start if first < start else end if beyond > end else first + 1
                    places |= {place} if first < place < beyond else set()
        return places

    def _reads_as(self, ids: Sequence[int], text: str) -> bool:
        """Whether the pieces read like the whole, which may itself lose what has no token."""
        whole = self._tokenizer.encode(text)
        decode = self._tokenizer.decode
        return decode(ids, skip_special=False) == decode(whole, skip_special=False)

    def _altered(self, text: str, cuts: Sequence[int], contents: Sequence[Region]) -> Encoded:
        pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
        ids, spans = self._tokenizer.encode_spans(ZERO_WIDTH.join(pieces))
        moved = [(a + bisect_left(cuts, a), b + bisect_left(cuts, b)) for a, b in contents]
        return Encoded(ids=ids, spans=spans, contents=moved, is_altered=True)


def _starts_of(markers: Mapping[str, int] | Sequence[str]) -> re.Pattern[str]:
    """Matches the first character of every marker, also of one that begins inside another."""
    heads = groupby(sorted(markers), key=lambda marker: marker[0])
    parts = [f"{re.escape(h)}(?={_any_of({m[1:] for m in group})})" for h, group in heads]
    return re.compile("|".join(parts) or r"(?!)")


def _any_of(words: set[str]) -> str:
    """A pattern for any of the words, as a tree: there may be a thousand of them."""
    if "" in words:
        return ""
    heads = groupby(sorted(words), key=lambda word: word[0])
    return "(?:" + "|".join(re.escape(h) + _any_of({w[1:] for w in g}) for h, g in heads) + ")"


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        pairs = cast(Mapping[Any, Any], value).items()
        return {key: _map_strings(inner, change) for key, inner in pairs}
    if isinstance(value, list | tuple):
        return [_map_strings(inner, change) for inner in cast(Sequence[Any], value)]
    return value


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in cast(Mapping[Any, Any], value).values():
            yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in cast(Sequence[Any], value):
            yield from _strings(inner)


# From the end of one assistant turn to the beginning of the next, as text.


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Bridge:
    """A part of a conversation as a template wrote it, with the messages it was made from.

    Example:
        >>> marks = Marks(cut="|", begin="(", end=")")
        >>> said = [{"role": "user", "content": "b"}]
        >>> Bridge(marks=marks, messages=said, count=0, whole="a b", start=1, lead="!").text
        '! b'
    """

    marks: Marks
    """What cuts and borders are marked with."""
    messages: Sequence[Message]
    """All of them, protected."""
    count: int
    """How many were said before."""
    whole: str
    """All of them as text."""
    start: int
    """Where what is new begins."""
    lead: str = ""
    """What goes first: the end of a turn that was cut off."""

    @property
    def text(self) -> str:
        """The bridge, with cuts marked."""
        return self.lead + self.whole[self.start :]

    def contents_in(self, wrapped: str) -> list[tuple[Region, Source]] | None:
        """Contents, by the same text with their borders marked; None where marks change it."""
        text, _, contents = self.marks.read(self.lead + wrapped[self.start :])
        new = speaking(self.messages[self.count :])
        if not text.startswith(self.marks.read(self.text)[0]) or len(contents) != len(new):
            return None
        return list(zip(contents, map(content_source, new), strict=True))


def end_as_said(opening: str, last: Message, after: str, end: TurnEnd) -> int | None:
    """Where a turn ends in `after` that the template writes letter by letter; None: it does not.

    What a template writes for the last message of a conversation can differ from what it writes
    for the same message in the middle, so this looks at the conversation that goes on.
    """
    if "tool_calls" in last:
        return None
    said = f"{opening}{last.get('content') or ''}{end.text}"
    return len(said) if after.startswith(said) else None


def end_as_written(before: str, after: str, end: TurnEnd) -> int | None:
    """Where a turn ends in `after` that ended `before`; None when `after` changes the past."""
    said = before.removesuffix(end.trailing)
    return len(said) if after.startswith(said) else None


def keeps_content(turn: str, last: Message) -> bool:
    """Whether a turn as rendered has all that was said in it, white space aside."""
    return _solid(str(last.get("content") or "")) in _solid(turn)


def called_names(message: Message) -> list[str]:
    """Functions that a message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls", ())]


def common_start(a: str, b: str) -> str:
    """What two texts begin with."""
    length = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))
    return a[: min(length, len(b))]


def find_contents(
    text: str, messages: Sequence[Message], marks: Marks
) -> list[tuple[Region, Source]] | None:
    """Where each message's content stands; None unless there is exactly one place for it."""
    found: list[tuple[Region, Source]] = []
    position = 0
    for message in speaking(messages):
        content, _, _ = marks.read(str(message["content"]).strip())
        if text.count(content) != 1 or (start := text.find(content, position)) < 0:
            return None
        position = start + len(content)
        found.append(((start, position), content_source(message)))
    return found


def speaking(messages: Sequence[Message]) -> list[Message]:
    """Messages whose content leaves something to label."""
    return [message for message in messages if str(message.get("content") or "").strip()]


def content_source(message: Message) -> Source:
    """Where the content of a message came from, if the policy did not write it."""
    return Source.TOOL if message["role"] == "tool" else Source.PROMPT


def sources_of(encoded: Encoded, origins: Sequence[Source]) -> list[Source]:
    """The origin of each token: that of the content it touches, or the template."""
    assert encoded.spans is not None
    sources = [Source.TEMPLATE] * len(encoded.ids)
    for (start, end), source in zip(encoded.contents, origins, strict=True):
        for k, (first, beyond) in enumerate(encoded.spans):
            if first < end and beyond > start:
                sources[k] = source
    return sources


def _solid(text: str) -> str:
    return "".join(text.split())
