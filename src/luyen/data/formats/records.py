"""What a row teaches: conversations, pairs, labelled answers, labelled steps, plain text.

Every format ends in one of these records or, for a prompt without an answer, in
`luyen.base.records.Prompt`. None of them knows a tokenizer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

from luyen.base.records import Message, Prompt

Tools: TypeAlias = tuple[Mapping[str, Any], ...]
STEP_END = "\n"
"""What follows every step of an answer; its last token is where the step is judged."""


def _nothing() -> dict[str, Any]:
    return {}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ConversationRow:
    """A conversation in which the assistant has answered, and what of it is learned.

    Example:
        >>> row = ConversationRow(messages=({"role": "user", "content": "1+1="},
        ...                                 {"role": "assistant", "content": "2"}),
        ...                       weights=(0.0, 1.0))
        >>> row.learned
        (1,)
    """

    messages: tuple[Message, ...]
    """What was said, in order."""
    weights: tuple[float, ...]
    """How much each message counts: 0 is read and not learned; only the assistant's may count."""
    tools: Tools = ()
    """Schemas of the tools on offer."""
    template_kwargs: Mapping[str, Any] = field(default_factory=_nothing)
    """Arguments of the chat template for this row alone."""
    extra_info: Mapping[str, Any] = field(default_factory=_nothing)
    """Columns that no objective reads."""

    def __post_init__(self) -> None:
        assert len(self.messages) == len(self.weights), "a message without a weight"

    @property
    def learned(self) -> tuple[int, ...]:
        """Numbers of the messages that count."""
        return tuple(i for i, weight in enumerate(self.weights) if weight > 0)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceRow:
    """Two continuations of one prompt, the first better than the second.

    Example:
        >>> say = lambda role, text: ({"role": role, "content": text},)
        >>> row = PreferenceRow(prompt=say("user", "1+1="), chosen=say("assistant", "2"),
        ...                     rejected=say("assistant", "3"), margin=0.5)
        >>> row.is_tie
        False
    """

    prompt: tuple[Message, ...]
    """What both answer."""
    chosen: tuple[Message, ...]
    """The better continuation; it begins with the assistant."""
    rejected: tuple[Message, ...]
    """The worse continuation; it begins with the assistant."""
    margin: float | None = None
    """How much better, where the row says so."""
    tools: Tools = ()
    """Schemas of the tools on offer."""
    template_kwargs: Mapping[str, Any] = field(default_factory=_nothing)
    """Arguments of the chat template for this row alone."""
    extra_info: Mapping[str, Any] = field(default_factory=_nothing)
    """Columns that no objective reads."""

    def __post_init__(self) -> None:
        assert self.margin is None or math.isfinite(self.margin), "a margin is a number"

    @property
    def is_tie(self) -> bool:
        """Whether both say the same, so that there is nothing to learn."""
        return self.chosen == self.rejected


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LabelledRow:
    """One continuation of a prompt, and whether it is wanted.

    Example:
        >>> LabelledRow(prompt=({"role": "user", "content": "1+1="},),
        ...             completion=({"role": "assistant", "content": "2"},), label=True).label
        True
    """

    prompt: tuple[Message, ...]
    """What is answered."""
    completion: tuple[Message, ...]
    """The continuation; it begins with the assistant."""
    label: bool
    """Whether answers should be like this."""
    tools: Tools = ()
    """Schemas of the tools on offer."""
    template_kwargs: Mapping[str, Any] = field(default_factory=_nothing)
    """Arguments of the chat template for this row alone."""
    extra_info: Mapping[str, Any] = field(default_factory=_nothing)
    """Columns that no objective reads."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SteppedRow:
    """An answer in steps, each judged by itself: what process rewards are learned from.

    Example:
        >>> row = SteppedRow(prompt=({"role": "user", "content": "2*3+1?"},),
        ...                  steps=("2*3=6", "6+1=8"), labels=(1.0, 0.0))
        >>> row.labels[row.steps.index("6+1=8")]
        0.0
    """

    prompt: tuple[Message, ...]
    """What is answered."""
    steps: tuple[str, ...]
    """The answer, cut into its steps."""
    labels: tuple[float | None, ...]
    """How right each step is, from 0 to 1; None for a step without a label."""
    tools: Tools = ()
    """Schemas of the tools on offer."""
    template_kwargs: Mapping[str, Any] = field(default_factory=_nothing)
    """Arguments of the chat template for this row alone."""
    extra_info: Mapping[str, Any] = field(default_factory=_nothing)
    """Columns that no objective reads."""

    def __post_init__(self) -> None:
        assert len(self.steps) == len(self.labels), "a step without a label"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class TextRow:
    """Text that is learned as it stands, without a chat template.

    Example:
        >>> TextRow(text="Once upon a time").text
        'Once upon a time'
    """

    text: str
    """All of it counts."""
    extra_info: Mapping[str, Any] = field(default_factory=_nothing)
    """Columns that no objective reads."""


AnyRow: TypeAlias = ConversationRow | PreferenceRow | LabelledRow | SteppedRow | TextRow | Prompt
"""Whatever a file of rows may hold."""
