"""A row laid out for display: its parts, what in each is learned, and how long they are.

Here the parts are messages, measured in characters, and no tokenizer is needed;
`luyen.data.formats.render` makes them of tokens.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from luyen.base.records import Message, Prompt
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)

PROMPT = "prompt"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Text of one origin.

    Example:
        >>> Stretch(text="2", who="assistant", is_learned=True).is_learned
        True
    """

    text: str
    """As it reads, special tokens included."""
    who: str
    """Where it came from: a role, or the origin of its tokens."""
    is_learned: bool
    """Whether it counts in the loss."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A prompt, an answer or a whole conversation.

    Example:
        >>> Part(name="chosen", stretches=(), length=12, learned=11, notes=()).learned
        11
    """

    name: str
    """What it is."""
    stretches: tuple[Stretch, ...]
    """Its text."""
    length: int
    """Tokens in it; characters where there is no tokenizer."""
    learned: int
    """How many of them count in the loss."""
    notes: tuple[str, ...]
    """What the template did that should be known."""
    unknown: int = 0
    """Tokens that stand for text without a token."""


def in_words(row: AnyRow) -> tuple[Part, ...]:
    """The parts of a row as messages, the prompt first.

    Example:
        >>> [(part.name, part.learned) for part in in_words(TextRow(text="abc"))]
        [('text', 3)]
    """
    return tuple(_parts(row))


def _parts(row: AnyRow) -> Iterator[Part]:
    match row:
        case TextRow():
            yield _part("text", [Stretch(text=row.text, who="text", is_learned=True)])
        case Prompt():
            yield _spoken(PROMPT, row.messages)
        case ConversationRow():
            yield _spoken("conversation", row.messages, [weight > 0 for weight in row.weights])
        case PreferenceRow():
            yield _spoken(PROMPT, row.prompt)
            yield _spoken("chosen", row.chosen, _answers(row.chosen))
            yield _spoken("rejected", row.rejected, _answers(row.rejected))
        case LabelledRow():
            yield _spoken(PROMPT, row.prompt)
            yield _spoken(label_of(row), row.completion, _answers(row.completion))
        case SteppedRow():
            yield _spoken(PROMPT, row.prompt)
            for step, label in zip(row.steps, row.labels, strict=True):
                stretch = Stretch(text=step, who="step", is_learned=label is not None)
                yield _part(verdict_of(label), [stretch])


def _spoken(name: str, messages: Sequence[Message], learned: Sequence[bool] = ()) -> Part:
    stretches = [
        Stretch(text=_words(message), who=message["role"], is_learned=bool(learned) and learned[i])
        for i, message in enumerate(messages)
    ]
    return _part(name, stretches)


def _part(name: str, stretches: Sequence[Stretch]) -> Part:
    lengths = [len(stretch.text) for stretch in stretches]
    learned = sum(len(stretch.text) for stretch in stretches if stretch.is_learned)
    return Part(
        name=name, stretches=tuple(stretches), length=sum(lengths), learned=learned, notes=()
    )


def _words(message: Message) -> str:
    calls = [call["function"] for call in message.get("tool_calls", ())]
    said = [f"{call['name']}({call['arguments']})" for call in calls]
    return " ".join(part for part in (message["content"], *said) if part)


def _answers(messages: Sequence[Message]) -> list[bool]:
    return [message["role"] == "assistant" for message in messages]


def label_of(row: LabelledRow) -> str:
    """What a labelled answer is called."""
    return "wanted" if row.label else "unwanted"


def verdict_of(label: float | None) -> str:
    """What a step is called."""
    if label is None:
        return "step, not judged"
    return "right step" if label == 1 else "wrong step" if label == 0 else f"step, {label:g} right"


# Lengths of rows: statistics per part, and a histogram of whole rows.

MEASURED = 2000
"""Rows that are measured at most, spread evenly over the file."""
_BARS = 10


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LengthStats:
    """Lengths of one part over the rows.

    Example:
        >>> figures_of([1, 2, 3, 40]).median
        2
    """

    least: int
    """The shortest."""
    median: int
    """Half are not longer."""
    nearly_all: int
    """95 in 100 are not longer."""
    most: int
    """The longest."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramBar:
    """One bar of a histogram.

    Example:
        >>> HistogramBar(low=0, high=9, rows=3).rows
        3
    """

    low: int
    """Shortest length that it counts."""
    high: int
    """Longest length that it counts."""
    rows: int
    """Rows between them."""


@final
class Lengths:
    """Collects lengths of evenly spread rows without knowing how many rows there will be.

    When there are too many, every other one is forgotten and only every other further row is
    measured, so that what is kept is always each so-many-th row from the first on.
    """

    def __init__(self, most: int = MEASURED) -> None:
        self._most = most
        self._stride = 1
        self._seen = 0
        self._kept: list[Mapping[str, int]] = []

    def wants_next(self) -> bool:
        """Whether the next row is to be measured."""
        self._seen += 1
        return (self._seen - 1) % self._stride == 0

    def add(self, parts: Sequence[Part]) -> None:
        """The measures of a row that was wanted."""
        self._kept.append(measures(parts))
        if len(self._kept) > self._most:
            self._kept = self._kept[::2]
            self._stride *= 2

    @property
    def measured(self) -> int:
        """Rows behind the figures."""
        return len(self._kept)

    def figures(self) -> dict[str, LengthStats]:
        """Figures per part, in the order in which the parts came."""
        names = dict.fromkeys(name for measure in self._kept for name in measure)
        if list(names) == [PROMPT, "whole"]:
            del names["whole"]
        return {
            name: figures_of([measure[name] for measure in self._kept if name in measure])
            for name in names
        }

    def histogram(self) -> list[HistogramBar]:
        """The lengths of whole rows in at most ten bars of one round width."""
        return bars([measure["whole"] for measure in self._kept])


def measures(parts: Sequence[Part]) -> dict[str, int]:
    """Lengths by name; `whole` is the longest sequence that the row makes.

    Example:
        >>> def part(name, length):
        ...     return Part(name=name, stretches=(), length=length, learned=0, notes=())
        >>> measures([part("prompt", 5), part("chosen", 2), part("rejected", 3)])
        {'prompt': 5, 'chosen': 2, 'rejected': 3, 'whole': 8}
    """
    prompt = sum(part.length for part in parts if part.name == PROMPT)
    rest = [part for part in parts if part.name != PROMPT]
    steps = [part for part in rest if "step" in part.name]
    if steps:
        total = sum(part.length for part in steps)
        return {PROMPT: prompt, "steps": total, "whole": prompt + total}
    named = {part.name: part.length for part in rest if part.name in ("chosen", "rejected")}
    answers = [part.length for part in rest if part.name in ("wanted", "unwanted")]
    named |= {"answer": answers[0]} if answers else {}
    learned = sum(part.learned for part in rest)
    has_both = not named and any(part.name != "text" for part in rest)
    named |= {"learned": learned} if has_both else {}
    longest = max((part.length for part in rest), default=0)
    return {**({PROMPT: prompt} if prompt else {}), **named, "whole": prompt + longest}


def figures_of(lengths: Sequence[int]) -> LengthStats:
    """The figures of at least one length."""
    ordered = sorted(lengths)
    last = len(ordered) - 1
    return LengthStats(
        least=ordered[0],
        median=ordered[last // 2],
        nearly_all=ordered[-(-last * 95 // 100)],
        most=ordered[-1],
    )


def bars(lengths: Sequence[int]) -> list[HistogramBar]:
    """A histogram with bars of 1, 2 or 5 times a power of ten.

    Example:
        >>> [(bar.low, bar.high, bar.rows) for bar in bars([3, 4, 17])]
        [(2, 3, 1), (4, 5, 1), (6, 7, 0), (8, 9, 0), (10, 11, 0), (12, 13, 0), (14, 15, 0),
         (16, 17, 1)]
    """
    if not lengths:
        return []
    width = _width(min(lengths), max(lengths))
    counts = [0] * (max(lengths) // width - min(lengths) // width + 1)
    first = min(lengths) // width
    for length in lengths:
        counts[length // width - first] += 1
    return [
        HistogramBar(low=(first + i) * width, high=(first + i + 1) * width - 1, rows=rows)
        for i, rows in enumerate(counts)
    ]


def _width(low: int, high: int) -> int:
    size = 1
    while True:
        for width in (size, 2 * size, 5 * size):
            if high // width - low // width < _BARS:
                return width
        size *= 10
