"""Typed rows of a file, one after the other, under the format that the file has.

What is wrong with a row stops the reading, or is kept in `problems` and the row is left out. There
is no third way: no row disappears without being counted.
"""

import csv
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Generic, Literal, TypeAlias, TypeVar, final

from luyen.base.errors import UserError
from luyen.base.input_files import exists, expanded
from luyen.base.records import Prompt
from luyen.config.dataset_facts import TABLE, row_files
from luyen.config.task_urls import FIELD
from luyen.data.formats.cells import Cells, StringPrompts
from luyen.data.formats.dataset_info import described
from luyen.data.formats.detect import FORMS, Format, Kind, detect, find_form
from luyen.data.formats.parse import GROUND_TRUTH, PROMPTS, parse_row
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.raw_values import is_object
from luyen.data.rows import NOTHING, Frame, RowAt
from luyen.data.sources import raw_rows, refuse_repeats

# Raw rows with their positions: every source that training reads, and CSV files.

FILE = "FILE"
"""What errors about the whole file call it."""


def placed_rows(address: str) -> Iterator[tuple[RowAt, Any]]:
    """Place and content of every row behind an address, one after the other."""
    try:
        for file, number, row in _numbered(address):
            yield RowAt(file=file, number=number), row
    except UserError as error:
        if error.field != FIELD:
            raise
        raise UserError(FILE, error.value, error.why, error.fix) from error


def place(at: RowAt, address: str) -> str:
    """Position of a row, relative to the requested address.

    Example:
        >>> place(RowAt(file="a.jsonl", number=3), "a.jsonl")
        'row 3'
        >>> place(RowAt(file="rows/a.jsonl", number=3), "rows")
        'a.jsonl row 3'
    """
    return f"row {at.number}" if at.file == address else f"{Path(at.file).name} row {at.number}"


def _numbered(address: str) -> Iterator[tuple[str, int, Any]]:
    files = [] if "://" in address else row_files(address, tables=True)
    if not files or files[0].suffix.lower() != TABLE:
        yield from raw_rows(address)
    for table in files:
        if table.suffix.lower() == TABLE:
            yield from _read_csv(table, address if len(files) == 1 else str(table))


def _read_csv(path: Path, name: str) -> Iterator[tuple[str, int, Any]]:
    """Rows of text under the names of the first line; the number is the line a row ends on."""
    csv.field_size_limit(2**31 - 1)
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            table = csv.DictReader(lines, restkey="", strict=True)
            refuse_repeats(table.fieldnames or (), path)
            for row in table:
                if "" in row or None in row.values():
                    why = f"line {table.line_num} has another number of cells than the first line"
                    raise UserError(FIELD, name, why, "quote cells that hold a comma or a newline")
                yield name, table.line_num, {k: v for k, v in row.items() if v != ""}
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UserError(FIELD, name, f"cannot be read: {error}", "correct the file") from error


R = TypeVar("R", bound=AnyRow)
OnProblem: TypeAlias = Literal["raise", "skip"]
READ, TEXTS, LEFT_OUT = "read", "plain text made messages", "left out"
_FIRST = 64
"""Rows by which the format is judged."""
RECORDS: Mapping[Kind, type[Any]] = {
    Kind.PROMPTS: Prompt,
    Kind.CONVERSATION: ConversationRow,
    Kind.TEXT: TextRow,
    Kind.PREFERENCE: PreferenceRow,
    Kind.LABELLED: LabelledRow,
    Kind.STEPPED: SteppedRow,
}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RowProblem:
    """What is wrong with one row.

    Example:
        >>> at = RowAt(file="a.jsonl", number=3)
        >>> RowProblem(at=at, error=at.error("label", 7, "no label", "write true")).column
        'label'
    """

    at: RowAt
    """Where the row stands."""
    error: UserError
    """Column, value, reason and fix."""

    @property
    def column(self) -> str:
        """The column, or the place inside it, that is meant."""
        return self.error.field.removeprefix(f"{self.at}: ")


@final
class RowReader(Generic[R]):
    """The rows of one file, and what happened on the way; it is gone through once.

    Example:
        >>> reading = open_rows("arithmetic://sum?size=2")
        >>> [(at.number, row.ground_truth) for at, row in reading], dict(reading.counts)
        ([(1, '104'), (2, '101')], {'read': 2})
    """

    def __init__(
        self,
        format: Format,
        rows: Iterator[tuple[RowAt, Any]],
        *,
        strings: StringPrompts,
        on_problem: OnProblem,
        frame: Frame = NOTHING,
    ) -> None:
        self.format = format
        self.counts: Counter[str] = Counter()
        """Rows read, rows left out, and rows in which plain text became messages."""
        self.problems: list[RowProblem] = []
        """Why each row that was left out was."""
        self.torn: UserError | None = None
        """Where the file itself breaks off, if it does."""
        self._rows = rows
        self._strings: StringPrompts = "user" if frame.template is not None else strings
        self._frame = frame
        self._on_problem: OnProblem = on_problem

    def __iter__(self) -> Iterator[tuple[RowAt, R]]:
        """Place and record of every row that is sound."""
        while True:
            try:
                at, raw = next(self._rows)
            except StopIteration:
                return
            except UserError as error:
                if self._on_problem == "raise":
                    raise
                self.torn = error
                return
            self.counts[READ] += 1
            found = self._parsed(at, raw)
            if found is not None:
                yield at, found

    def _parsed(self, at: RowAt, raw: Any) -> R | None:
        try:
            cells = Cells(raw, at, self.format, self._strings)
            row: Any = parse_row(cells, self._frame)
        except UserError as error:
            if self._on_problem == "raise":
                raise
            self.problems.append(RowProblem(at=at, error=error))
            self.counts[LEFT_OUT] += 1
            return None
        if cells.num_texts:
            self.counts[TEXTS] += 1
        return row


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """How rows become prompts, as the keys of `data` say it.

    Example:
        >>> PromptOptions(prompt_key="query").frame == NOTHING
        True
    """

    frame: Frame = NOTHING
    """What is put around every prompt."""
    prompt_key: str | None = None
    """Column of the prompt; None: by the format."""
    ground_truth_key: str | None = None
    """Column of the answer; None: by the format."""


AS_THEY_ARE = PromptOptions()
"""Prompts as the format of the rows has them."""


def open_rows(
    address: str,
    *,
    form: str | None = None,
    string_prompts: StringPrompts = "refuse",
    on_problem: OnProblem = "raise",
    prompts: PromptOptions = AS_THEY_ARE,
) -> RowReader[AnyRow]:
    """The rows of a file or address, in whatever format it has, or in the one that is named.

    What rows ask is put into the frame, under whose template plain text becomes messages. Where
    `prompts` name a column, rows are prompts, as in online training.
    """
    rows = placed_rows(address)
    taken = list(_first_rows(rows))
    torn = [one for one in taken if isinstance(one, UserError)]
    first = [one for one in taken if not isinstance(one, UserError)]
    if not first:
        raise torn[0] if torn else UserError(FILE, address, "there are no rows in it", "add rows")
    format = _named_columns(form, prompts.prompt_key, prompts.ground_truth_key)
    format = format or _format(address, form, [raw for _, raw in first])
    left = chain(first, _raised(torn), rows)
    return RowReader(
        format, left, strings=string_prompts, on_problem=on_problem, frame=prompts.frame
    )


def open_leniently(address: str, form: str | None, prompts: PromptOptions) -> RowReader[AnyRow]:
    """The rows for a look: plain text is taken for messages, and problems are kept."""
    return open_rows(address, form=form, string_prompts="user", on_problem="skip", prompts=prompts)


def read_preferences(
    address: str, *, string_prompts: StringPrompts = "refuse", on_problem: OnProblem = "raise"
) -> RowReader[PreferenceRow]:
    """Pairs; a UserError where the file holds something else."""
    return _of_kind(Kind.PREFERENCE, address, string_prompts, on_problem)


def read_labelled(
    address: str, *, string_prompts: StringPrompts = "refuse", on_problem: OnProblem = "raise"
) -> RowReader[LabelledRow]:
    """Answers with labels; a UserError where the file holds something else."""
    return _of_kind(Kind.LABELLED, address, string_prompts, on_problem)


def read_stepped(
    address: str, *, string_prompts: StringPrompts = "refuse", on_problem: OnProblem = "raise"
) -> RowReader[SteppedRow]:
    """Answers with a label per step; a UserError where the file holds something else."""
    return _of_kind(Kind.STEPPED, address, string_prompts, on_problem)


def read_conversations(
    address: str, *, string_prompts: StringPrompts = "refuse", on_problem: OnProblem = "raise"
) -> RowReader[ConversationRow]:
    """Conversations to learn from; a UserError where the file holds something else."""
    return _of_kind(Kind.CONVERSATION, address, string_prompts, on_problem)


def _of_kind(
    kind: Kind, address: str, string_prompts: StringPrompts, on_problem: OnProblem
) -> RowReader[Any]:
    found = open_rows(address, string_prompts=string_prompts, on_problem=on_problem)
    if found.format.kind != kind:
        wanted = [", ".join(form.needs) for form in FORMS.values() if form.kind == kind]
        why = f"its rows are of the format `{found.format.form.name}` ({found.format.why})"
        fix = f"give rows of the kind `{kind}`, with columns {' or '.join(wanted)}"
        raise UserError(FILE, address, why, fix)
    return found


def _named_columns(form: str | None, prompt: str | None, truth: str | None) -> Format | None:
    """Prompts in the columns that were named; None where none was."""
    named = {name: column for name, column in (("prompt", prompt), (GROUND_TRUTH, truth)) if column}
    if not named:
        return None
    if form not in (None, PROMPTS):
        option = "--prompt-key" if prompt else "--ground-truth-key"
        why = f"it names a column of prompts, and the rows are to be read as `{form}`"
        raise UserError(option, prompt or truth, why, "drop one of the two options")
    words = [f"`{column}` is named as the column of the {name}" for name, column in named.items()]
    why = " and ".join(words).replace("_", " ")
    return Format(form=FORMS[PROMPTS], why=why, columns=named)


def _format(address: str, form: str | None, first: list[Any]) -> Format:
    if form is not None:
        return Format(form=find_form(form, "--as"), why="asked for by name")
    info = described(expanded(address)) if "://" not in address and exists(address) else None
    if info is not None:
        return info
    rows = [row for row in first if is_object(row)]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    if not columns:
        why = "its rows are not objects with named fields"
        raise UserError(FILE, address, why, "write {...} for every row")
    try:
        return detect(columns, rows)
    except UserError as error:
        raise UserError(f"{address}: {error.field}", error.value, error.why, error.fix) from None


def _first_rows(rows: Iterator[tuple[RowAt, Any]]) -> Iterator[tuple[RowAt, Any] | UserError]:
    """The rows by which the format is judged, and last the error where the file breaks off.

    They are taken one by one: a generator around `rows` would close it when it is dropped.
    """
    for _ in range(_FIRST):
        try:
            yield next(rows)
        except StopIteration:
            return
        except UserError as error:
            yield error
            return


def _raised(torn: list[UserError]) -> Iterator[tuple[RowAt, Any]]:
    """No rows; what was caught while the format was judged is raised in its place."""
    yield from ()
    if torn:
        raise torn[0]
