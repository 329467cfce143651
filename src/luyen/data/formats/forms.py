"""The formats that are known: which columns make each, and what its rows become."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import final

from luyen.base.errors import UserError
from luyen.base.suggest import did_you_mean


class Kind(StrEnum):
    """What a row becomes. The set is closed, and each has one form of our own."""

    PROMPTS = "prompts"
    CONVERSATION = "conversation"
    TEXT = "text"
    PREFERENCE = "preference"
    LABELLED = "labelled"
    STEPPED = "stepped"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """One way to write rows down.

    Example:
        >>> FORMS["alpaca-labelled"].kind, FORMS["alpaca-labelled"].needs
        (<Kind.LABELLED: 'labelled'>, ('instruction', 'output', 'kto_tag'))
    """

    name: str
    """What users call it."""
    kind: Kind
    """What its rows become."""
    needs: tuple[str, ...]
    """Columns without which it is not this format."""
    may: tuple[str, ...] = ()
    """Columns that it reads where they are there."""
    rank: int = 1
    """Which one is meant where several fit: the higher. Equal ranks are ambiguous."""


def _form(
    name: str, kind: Kind, needs: tuple[str, ...], may: tuple[str, ...] = (), *, rank: int
) -> Form:
    return Form(name=name, kind=kind, needs=needs, may=may, rank=rank)


_LLAMA_FACTORY = ("system", "history")
FORMS: dict[str, Form] = {
    form.name: form
    for form in (
        _form("preference", Kind.PREFERENCE, ("chosen", "rejected"), ("prompt", "margin"), rank=3),
        _form("labelled", Kind.LABELLED, ("prompt", "completion", "label"), rank=3),
        _form("stepped", Kind.STEPPED, ("prompt", "completions", "labels"), rank=3),
        _form(
            "alpaca-preference",
            Kind.PREFERENCE,
            ("instruction", "chosen", "rejected"),
            ("input", *_LLAMA_FACTORY, "margin"),
            rank=3,
        ),
        _form(
            "alpaca-labelled",
            Kind.LABELLED,
            ("instruction", "output", "kto_tag"),
            ("input", *_LLAMA_FACTORY),
            rank=3,
        ),
        _form(
            "sharegpt-preference",
            Kind.PREFERENCE,
            ("conversations", "chosen", "rejected"),
            ("system", "margin"),
            rank=3,
        ),
        _form(
            "sharegpt-labelled", Kind.LABELLED, ("conversations", "kto_tag"), ("system",), rank=3
        ),
        _form("prompt-completion", Kind.CONVERSATION, ("prompt", "completion"), rank=2),
        _form(
            "alpaca",
            Kind.CONVERSATION,
            ("instruction", "output"),
            ("input", *_LLAMA_FACTORY),
            rank=2,
        ),
        _form("conversation", Kind.CONVERSATION, ("messages",), rank=2),
        _form("sharegpt", Kind.CONVERSATION, ("conversations",), ("system",), rank=2),
        _form("text", Kind.TEXT, ("text",), rank=1),
        _form("prompts", Kind.PROMPTS, ("prompt",), rank=1),
        _form("question-answer", Kind.CONVERSATION, ("question", "answer"), rank=0),
    )
}
"""Name -> format. The names of kinds are the forms that `luyen data convert` writes."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Tags:
    """What a list of messages calls its fields and its speakers.

    Example:
        >>> Tags(role=("speaker",)).role
        ('speaker',)
    """

    role: tuple[str, ...] = ("role", "from")
    """Fields that may say who speaks, the first that is there."""
    content: tuple[str, ...] = ("content", "value")
    """Fields that may hold what is said."""
    speakers: Mapping[str, str] = field(default_factory=dict[str, str])
    """Further names of roles."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """The format of one file, with its own names for columns and speakers.

    Example:
        >>> Format(form=FORMS["alpaca"], why="asked for").column("output")
        'output'
    """

    form: Form
    """Which one it is."""
    why: str
    """How that is known."""
    columns: Mapping[str, str] = field(default_factory=dict[str, str])
    """Column of the format -> column of the file, where they differ."""
    tags: Tags = Tags()
    """Fields and speakers of its messages."""
    notes: tuple[str, ...] = ()
    """What else should be known about it."""

    @property
    def kind(self) -> Kind:
        """What its rows become."""
        return self.form.kind

    def column(self, name: str) -> str:
        """The file's own name for a column of the format."""
        return self.columns.get(name, name)


def find_form(name: str, field: str) -> Form:
    """The format of this name; a UserError about `field` where there is none."""
    if name not in FORMS:
        raise UserError(field, name, "no such format", did_you_mean(name, FORMS))
    return FORMS[name]
