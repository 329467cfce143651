"""A row laid out for looking at: its parts, and in each what is learned and what is only read.

Here the parts are messages, measured in characters, and no tokenizer is needed;
`luyen.data.formats.token_layout` makes them of tokens.
"""

from collections.abc import Iterator, Sequence
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
