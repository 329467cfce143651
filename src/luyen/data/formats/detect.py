"""The known row formats, and which of them a file has: decided in one place, with the reason."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, final

from luyen.base.errors import UserError, did_you_mean, near_names
from luyen.data.raw_values import is_list, is_object

# The known formats: the columns that identify each, and the kind of row it yields.


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
class RowFormat:
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
) -> RowFormat:
    return RowFormat(name=name, kind=kind, needs=needs, may=may, rank=rank)


_LLAMA_FACTORY = ("system", "history")
FORMS: dict[str, RowFormat] = {
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
    """Fields that may hold the speaker; the first one present is used."""
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

    form: RowFormat
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


def find_form(name: str, field: str) -> RowFormat:
    """The format of this name; a UserError about `field` where there is none."""
    if name not in FORMS:
        raise UserError(field, name, "no such format", did_you_mean(name, FORMS))
    return FORMS[name]


_WHERE = "columns"


def detect(columns: Iterable[str], first_rows: Sequence[Mapping[str, Any]]) -> Format:
    """The format of a file with these columns, judged by the columns that its first rows fill.

    Of the formats whose columns are all there, one that needs a subset of another's columns gives
    way, and so does one of lower rank. A UserError where none or more than one is left.

    Example:
        >>> found = detect(["prompt", "chosen", "rejected"],
        ...                [{"prompt": "1+1=", "chosen": "2", "rejected": "3"}])
        >>> found.form.name, found.why
        ('preference', '`chosen` and `rejected` hold text; `prompt` holds text')
    """
    there = [c for c in columns if not first_rows or any(r.get(c) is not None for r in first_rows)]
    renamed = _renamed(there, first_rows)
    names = [*there, *renamed]
    fitting = [form for form in FORMS.values() if set(form.needs) <= set(names)]
    if not fitting or len({"chosen", "rejected"} & set(names)) == 1:
        raise _unknown(there)
    best = _best(fitting)
    if len(best) > 1:
        raise _ambiguous(there, best)
    [form] = best
    if form.name == "prompts" and "messages" in there and not _is_rl(there):
        raise _ambiguous(there, [form, FORMS["conversation"]])
    if form.name == "conversation":
        form = _prompt_kind(form, there, first_rows)
    own = {name: renamed[name] for name in form.needs if name in renamed}
    if form.name == "prompts" and "prompt" not in there:
        own = {"prompt": "messages"}
    return Format(form=form, why=_why(form, own, first_rows), columns=own)


def shape(value: Any) -> str:
    """What a value is, in words.

    Example:
        >>> shape([{"role": "user", "content": "1+1="}]), shape([{"from": "human", "value": "a"}])
        ('messages', 'messages with `from`')
    """
    if isinstance(value, str):
        return "text"
    if isinstance(value, bool):
        return "true or false"
    if isinstance(value, int | float):
        return "numbers"
    if is_object(value):
        return "one message" if "role" in value or "from" in value else "objects"
    if is_list(value):
        first = value[0] if value else None
        if is_object(first) and "role" in first:
            return "messages"
        if is_object(first) and "from" in first:
            return "messages with `from`"
        return f"lists of {shape(first)}"
    return "nothing"


def _renamed(there: Sequence[str], first_rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """`messages` under the name `conversations` where a format of two columns needs that."""
    if "messages" not in there or "conversations" in there:
        return {}
    chosen = next((r["chosen"] for r in first_rows if r.get("chosen") is not None), None)
    if "kto_tag" in there or is_object(chosen):
        return {"conversations": "messages"}
    return {}


def _best(fitting: Sequence[RowFormat]) -> list[RowFormat]:
    own = [f for f in fitting if not any(set(f.needs) < set(other.needs) for other in fitting)]
    highest = max(form.rank for form in own)
    return [form for form in own if form.rank == highest]


def _is_rl(there: Sequence[str]) -> bool:
    return "reward_model" in there or "data_source" in there


def _prompt_kind(
    form: RowFormat, there: Sequence[str], first_rows: Sequence[Mapping[str, Any]]
) -> RowFormat:
    """Conversations that all end before the assistant speaks are prompts."""
    if "prompt" in there and _is_rl(there):
        return FORMS["prompts"]
    talks = [row["messages"] for row in first_rows if is_list(row.get("messages"))]
    ends = [talk[-1] for talk in talks if talk and is_object(talk[-1])]
    if "prompt" in there and any(is_list(row.get("prompt")) for row in first_rows):
        raise _ambiguous(there, [FORMS["prompts"], form])
    is_open = bool(ends) and all(end.get("role") in ("user", "tool") for end in ends)
    return FORMS["prompts"] if is_open else form


def _why(form: RowFormat, own: Mapping[str, str], first_rows: Sequence[Mapping[str, Any]]) -> str:
    def content_of(name: str) -> str:
        column = own.get(name, name)
        return next((shape(r[column]) for r in first_rows if r.get(column) is not None), "nothing")

    named = {name: content_of(name) for name in form.needs}
    said: list[str] = []
    for what in dict.fromkeys(named.values()):
        columns = [own.get(name, name) for name, holds in named.items() if holds == what]
        verb = "hold" if len(columns) > 1 else "holds"
        said.append(f"{_listed(columns)} {verb} {what}")
    besides = [name for name in form.may if any(r.get(name) is not None for r in first_rows)]
    said += [f"`{name}` holds {content_of(name)}" for name in besides]
    if form.name == "preference" and "prompt" not in besides:
        said.append("the prompt is what both begin with")
    if form.name == "prompts" and own:
        said.append("there is no answer yet")
    return "; ".join(said)


def _listed(names: Sequence[str]) -> str:
    quoted = [f"`{name}`" for name in names]
    return quoted[0] if len(quoted) == 1 else f"{', '.join(quoted[:-1])} and {quoted[-1]}"


def _unknown(there: Sequence[str]) -> UserError:
    known = {name for form in FORMS.values() for name in form.needs}
    near = {name: near_names(name, known - set(there), most=1) for name in there}
    meant = [f"`{found[0]}` for `{name}`" for name, found in near.items() if found]
    looked = ", ".join(f"{form.name} ({' + '.join(form.needs)})" for form in FORMS.values())
    why = f"no format has these columns; looked for {looked}"
    fix = "rename the columns, or describe them in a dataset_info.json in its folder"
    return UserError(_WHERE, list(there), why, f"write {' and '.join(meant)}" if meant else fix)


def _ambiguous(there: Sequence[str], found: Sequence[RowFormat]) -> UserError:
    both = " and ".join(f"`{form.name}` ({', '.join(form.needs)})" for form in found)
    names = " or ".join(form.name for form in found)
    return UserError(_WHERE, list(there), f"they fit {both}", f"name the one you mean: {names}")
