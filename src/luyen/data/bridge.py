"""From the end of one assistant turn to the beginning of the next, as text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from luyen.base.records import Message, Source
from luyen.data.plain_text import Encoded, Marks, Region
from luyen.data.tokenizer import TurnEnd


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
