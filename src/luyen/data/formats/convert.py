"""Rows of any format converted to our own and written; what that form cannot hold is listed."""

import importlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, final

from luyen.base.errors import UserError, did_you_mean
from luyen.base.files import in_progress, plain, remove_abandoned_writes, temporary_path, writing
from luyen.base.records import Message, Prompt, make_prompt
from luyen.data.formats.cells import EXTRA, KWARGS, TOOLS
from luyen.data.formats.detect import Format, Kind
from luyen.data.formats.read import (
    AS_THEY_ARE,
    LEFT_OUT,
    READ,
    TEXTS,
    PromptOptions,
    RowProblem,
    RowReader,
    open_leniently,
)
from luyen.data.formats.records import (
    STEP_END,
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.raw_values import is_list, is_object

# Writers: one layout per kind of row, which reads back as the same rows.
#
# In a table (parquet) free-form values become JSON text, since a column has one type.

Lost: TypeAlias = Counter[str]
"""What could not be written -> how often."""
AS_TEXT = "value that JSON does not know, written as text"
_FREE = (TOOLS, KWARGS, EXTRA, "reward_model")


def own_form(row: AnyRow) -> dict[str, Any]:
    """The row as an object with our column names.

    Example:
        >>> own_form(TextRow(text="abc", extra_info={"page": 3}))
        {'text': 'abc', 'extra_info': {'page': 3}}
    """
    if isinstance(row, Prompt):
        return _prompt(row)
    match row:
        case TextRow():
            fields: dict[str, Any] = {"text": row.text}
        case ConversationRow():
            pairs = zip(row.messages, row.weights, strict=True)
            fields = {"messages": [_weighted(message, weight) for message, weight in pairs]}
        case PreferenceRow():
            fields = {
                "prompt": _plain(row.prompt),
                "chosen": _plain(row.chosen),
                "rejected": _plain(row.rejected),
                **({} if row.margin is None else {"margin": row.margin}),
            }
        case LabelledRow():
            fields = {"prompt": _plain(row.prompt), "completion": _plain(row.completion)}
            fields["label"] = row.label
        case SteppedRow():
            fields = {"prompt": _plain(row.prompt), "completions": list(row.steps)}
            fields["labels"] = list(row.labels)
    if not isinstance(row, TextRow):
        fields |= {TOOLS: [dict(tool) for tool in row.tools]} if row.tools else {}
        fields |= {KWARGS: dict(row.template_kwargs)} if row.template_kwargs else {}
    return fields | ({EXTRA: dict(row.extra_info)} if row.extra_info else {})


def write_rows(path: Path, rows: Iterable[AnyRow], lost: Lost) -> int:
    """Write the rows to a new file, whole or not at all; how many there were."""
    writer = WRITERS.get(path.suffix.lower())
    if writer is None:
        why = f"rows are not written to files that end in `{path.suffix}`"
        raise UserError("OUT", str(path), why, did_you_mean(path.suffix, WRITERS))
    if path.exists():
        raise UserError("OUT", str(path), "it exists", "name a new file")
    if not path.parent.is_dir():
        raise UserError("OUT", str(path), "its folder does not exist", f"make {path.parent}")
    remove_abandoned_writes(path)
    unfinished = temporary_path(path)
    try:
        with writing(path, field="OUT"), in_progress(unfinished):
            count = writer(unfinished, rows, lost)
            unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return count


def _write_jsonl(path: Path, rows: Iterable[AnyRow], lost: Lost) -> int:
    count = 0
    with path.open("w", encoding="utf-8") as lines:
        for row in rows:
            lines.write(_json(own_form(row), lost) + "\n")
            count += 1
    return count


def _write_parquet(path: Path, rows: Iterable[AnyRow], lost: Lost) -> int:
    pyarrow: Any = importlib.import_module("pyarrow")  # untyped, and slow to load
    parquet: Any = importlib.import_module("pyarrow.parquet")
    table = [_in_columns(own_form(row), lost) for row in rows]
    names = dict.fromkeys(name for fields in table for name in fields)
    table = [{name: fields.get(name) for name in names} for fields in table]  # the first row rules
    try:
        made = pyarrow.Table.from_pylist(table)
    except (ValueError, TypeError) as error:  # what pyarrow raises about types
        why = f"the rows do not fit one table: {error}"
        raise UserError("OUT", str(path), why, "write a .jsonl file") from error
    parquet.write_table(made, path)
    return len(table)


WRITERS: dict[str, Callable[[Path, Iterable[AnyRow], Lost], int]] = {
    ".jsonl": _write_jsonl,
    ".parquet": _write_parquet,
}
"""Ending of a file's name -> how rows are written to it."""


def _in_columns(fields: dict[str, Any], lost: Lost) -> dict[str, Any]:
    """The fields with JSON text where two rows may disagree about types."""
    found: dict[str, Any] = {}
    for name, value in fields.items():
        if name in _FREE:
            found[name] = _json(value, lost)
        elif is_list(value) and value and is_object(value[0]):
            found[name] = [_calls_as_text(message, lost) for message in value]
        else:
            found[name] = value
    return found


def _calls_as_text(message: Mapping[str, Any], lost: Lost) -> dict[str, Any]:
    if "tool_calls" not in message:
        return dict(message)
    calls = [
        {**c, "function": {**c["function"], "arguments": _json(c["function"]["arguments"], lost)}}
        for c in message["tool_calls"]
    ]
    return {**message, "tool_calls": calls}


def _json(value: Any, lost: Lost) -> str:
    def as_text(odd: Any) -> str:
        lost[AS_TEXT] += 1
        return str(odd)

    return json.dumps(plain(value), ensure_ascii=False, allow_nan=False, default=as_text)


def _prompt(row: Prompt) -> dict[str, Any]:
    fields: dict[str, Any] = {"prompt": _plain(row.messages)}
    fields |= {"data_source": row.data_source} if row.data_source else {}
    truth = row.ground_truth
    fields |= {"reward_model": {"ground_truth": truth}} if truth is not None else {}
    fields |= {TOOLS: [dict(tool) for tool in row.tools]} if row.tools else {}
    return fields | ({EXTRA: dict(row.extra_info)} if row.extra_info else {})


def _plain(messages: Iterable[Message]) -> list[dict[str, Any]]:
    return [dict(message) for message in messages]


def _weighted(message: Message, weight: float) -> dict[str, Any]:
    usual = 1.0 if message["role"] == "assistant" else 0.0
    return dict(message) if weight == usual else {**message, "weight": weight}


Change: TypeAlias = "Callable[[AnyRow, Lost], list[AnyRow]]"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Converted:
    """What a conversion did.

    Example:
        >>> from luyen.data.formats.detect import FORMS
        >>> alpaca = Format(form=FORMS["alpaca"], why="asked for by name")
        >>> Converted(format=alpaca, kind=Kind.CONVERSATION, read=3, written=2, left_out=1, texts=0,
        ...           lost={}, problems=()).written
        2
    """

    format: Format
    """The format of the file that was read."""
    kind: Kind
    """The form that was written."""
    read: int
    """Rows in the file."""
    written: int | None
    """Rows in the new one; None where problems stopped it and there is none."""
    left_out: int
    """Rows with a problem."""
    texts: int
    """Rows in which plain text became messages."""
    lost: Mapping[str, int]
    """What the new form cannot hold -> how often."""
    problems: tuple[RowProblem, ...]
    """What is wrong with rows."""
    torn: UserError | None = None
    """Where the file itself breaks off, if it does."""

    @property
    def is_written(self) -> bool:
        """Whether there is a new file."""
        return self.written is not None


def convert(
    source: str,
    target: Path,
    *,
    to: str | None = None,
    form: str | None = None,
    skip: bool = False,
    prompts: PromptOptions = AS_THEY_ARE,
) -> Converted:
    """Read a file and write it in our form for its kind, or for the kind `to`.

    A row with a problem stops it, and nothing is written, unless `skip` leaves such rows out.
    """
    reading = open_leniently(source, form, prompts)
    kind = _target(reading.format, to)
    lost: Lost = Counter()
    try:
        written = write_rows(target, _changed(reading, kind, lost, skip=skip), lost)
    except _ProblemsFoundError:
        written = None
        lost.clear()
    return Converted(
        format=reading.format,
        kind=kind,
        read=reading.counts[READ],
        written=written,
        left_out=reading.counts[LEFT_OUT],
        texts=reading.counts[TEXTS],
        lost={what: n for what, n in lost.items() if n},
        problems=tuple(reading.problems),
        torn=reading.torn,
    )


class _ProblemsFoundError(Exception):
    """All rows are read, and some are wrong: nothing is written."""


def _target(format: Format, to: str | None) -> Kind:
    if to is None or to == format.kind:
        return format.kind
    possible = [after for before, after in CHANGES if before == format.kind]
    if to not in possible:
        why = f"rows of the kind `{format.kind}` cannot become that"
        known = ", ".join([format.kind, *possible])
        raise UserError("--to", to, why, f"choose among {known}")
    return Kind(to)


def _changed(reading: RowReader[AnyRow], kind: Kind, lost: Lost, *, skip: bool) -> Iterator[AnyRow]:
    change = CHANGES.get((reading.format.kind, kind))
    if reading.format.form.name == "question-answer" and kind is Kind.PROMPTS:
        change = _question_to_prompt
    for _, row in reading:
        yield from [row] if change is None else change(row, lost)
    if reading.torn is not None or (reading.problems and not skip):
        raise _ProblemsFoundError


def _pair_to_answers(row: AnyRow, lost: Lost) -> list[AnyRow]:
    assert isinstance(row, PreferenceRow)
    lost["which two answers were compared"] += 1
    lost["margin"] += row.margin is not None
    return [
        LabelledRow(
            prompt=row.prompt,
            completion=answer,
            label=label,
            tools=row.tools,
            template_kwargs=row.template_kwargs,
            extra_info=row.extra_info,
        )
        for answer, label in ((row.chosen, True), (row.rejected, False))
    ]


def _pair_to_conversation(row: AnyRow, lost: Lost) -> list[AnyRow]:
    assert isinstance(row, PreferenceRow)
    lost["rejected answer"] += 1
    lost["margin"] += row.margin is not None
    return [_conversation(row, row.chosen)]


def _answer_to_conversation(row: AnyRow, lost: Lost) -> list[AnyRow]:
    assert isinstance(row, LabelledRow)
    lost["answer with the label false"] += not row.label
    return [_conversation(row, row.completion)] if row.label else []


def _steps_to_answer(row: AnyRow, lost: Lost) -> list[AnyRow]:
    """Wanted is an answer whose judged steps are all right."""
    assert isinstance(row, SteppedRow)
    judged = [label for label in row.labels if label is not None]
    lost["answer with unlabelled steps only"] += not judged
    lost["label of a step"] += len(judged)
    answer = {"role": "assistant", "content": STEP_END.join(row.steps)}
    labelled = LabelledRow(
        prompt=row.prompt,
        completion=(answer,),
        label=all(label >= 0.5 for label in judged),
        tools=row.tools,
        template_kwargs=row.template_kwargs,
        extra_info=row.extra_info,
    )
    return [labelled] if judged else []


def _to_prompt(row: AnyRow, lost: Lost) -> list[AnyRow]:
    """The prompt of a row; a plain answer to a conversation is kept in `extra_info.answer`."""
    assert isinstance(row, PreferenceRow | LabelledRow | SteppedRow | ConversationRow)
    lost["arguments of the chat template"] += bool(row.template_kwargs)
    if not isinstance(row, ConversationRow):
        lost["answer"] += 2 if isinstance(row, PreferenceRow) else 1
        return [make_prompt(row.prompt, tools=row.tools, extra_info=row.extra_info)]
    last = max(i for i, message in enumerate(row.messages) if message["role"] == "assistant")
    answer, before = row.messages[last], row.messages[:last]
    if not before:
        lost["conversation that the assistant begins"] += 1
        return []
    lost["message after the last answer"] += len(row.messages) - last - 1
    lost["tool call of the last answer"] += "tool_calls" in answer
    extra = {"answer": answer["content"], **row.extra_info}
    return [make_prompt(before, tools=row.tools, extra_info=extra)]


def _question_to_prompt(row: AnyRow, _: Lost) -> list[AnyRow]:
    """The question, with its answer as the ground truth, as training reads such rows."""
    assert isinstance(row, ConversationRow)
    *question, answer = row.messages  # a system message may be before the question
    truth = answer["content"]
    return [make_prompt(question, tools=row.tools, ground_truth=truth, extra_info=row.extra_info)]


CHANGES: dict[tuple[Kind, Kind], Change] = {
    (Kind.PREFERENCE, Kind.LABELLED): _pair_to_answers,
    (Kind.PREFERENCE, Kind.CONVERSATION): _pair_to_conversation,
    (Kind.LABELLED, Kind.CONVERSATION): _answer_to_conversation,
    (Kind.STEPPED, Kind.LABELLED): _steps_to_answer,
    (Kind.PREFERENCE, Kind.PROMPTS): _to_prompt,
    (Kind.LABELLED, Kind.PROMPTS): _to_prompt,
    (Kind.STEPPED, Kind.PROMPTS): _to_prompt,
    (Kind.CONVERSATION, Kind.PROMPTS): _to_prompt,
}
"""(kind, other kind) -> how a row changes, and what is lost."""


def _conversation(row: PreferenceRow | LabelledRow, answer: tuple[Message, ...]) -> ConversationRow:
    """Prompt and answer as one conversation, of which only the answer is learned."""
    learned = tuple(float(message["role"] == "assistant") for message in answer)
    return ConversationRow(
        messages=(*row.prompt, *answer),
        weights=(*(0.0 for _ in row.prompt), *learned),
        tools=row.tools,
        template_kwargs=row.template_kwargs,
        extra_info=row.extra_info,
    )
