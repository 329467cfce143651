"""A file of rows seen as a whole: format, problems, lengths, repetitions, oddities."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from luyen.base.errors import UserError
from luyen.base.records import Prompt
from luyen.data.formats.cells import EXTRA
from luyen.data.formats.forms import Format
from luyen.data.formats.layout import Part, in_words
from luyen.data.formats.lengths import Bar, Figures, Lengths
from luyen.data.formats.oddities import Tally, oddities, tally_lines
from luyen.data.formats.own import own_form
from luyen.data.formats.raw import place
from luyen.data.formats.read import READ, TEXTS, Problem, Reading, open_rows
from luyen.data.formats.records import AnyRow, ConversationRow, TextRow
from luyen.data.rows import RowAt

if TYPE_CHECKING:
    from luyen.data.render import Renderer

_EXAMPLES = 3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Rows that say what an earlier row said.

    Example:
        >>> Repeated(rows=1, examples=(("row 5", "row 2"),)).examples
        (('row 5', 'row 2'),)
    """

    rows: int
    """How many."""
    examples: tuple[tuple[str, str], ...]
    """The first few, each with the row that it repeats."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class ShownRow:
    """One of the first rows, laid out.

    Example:
        >>> ShownRow(at=RowAt(file="a.jsonl", number=1), parts=()).at.number
        1
    """

    at: RowAt
    """Where it stands."""
    parts: tuple[Part, ...]
    """What it consists of."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Survey:
    """Everything that `luyen data inspect` says about a file.

    Example:
        >>> found = survey("arithmetic://sum?size=4", shown=1)
        >>> found.format.form.name, found.rows, found.is_sound
        ('prompts', 4, True)
    """

    address: str
    """The file."""
    format: Format
    """What it holds, and how that is known."""
    rows: int
    """Rows read, sound or not."""
    texts: int
    """Rows in which plain text was taken for messages."""
    problems: tuple[Problem, ...]
    """What is wrong, row by row."""
    torn: UserError | None
    """Where the file itself breaks off, if it does."""
    shown: tuple[ShownRow, ...]
    """The first rows that are sound."""
    unit: str
    """What lengths are counted in."""
    measured: int
    """Rows behind the lengths."""
    figures: Mapping[str, Figures]
    """Lengths by part."""
    histogram: tuple[Bar, ...]
    """Lengths of whole rows."""
    same_prompt: Repeated
    """Rows that ask what an earlier row asked."""
    same_row: Repeated
    """Rows that teach what an earlier row taught; columns that nothing reads are not compared."""
    oddities: tuple[str, ...]
    """What is allowed but worth a look, a sentence each."""
    facts: tuple[str, ...]
    """What the rows are like, a sentence each."""

    @property
    def is_sound(self) -> bool:
        """Whether every row can be used."""
        return not self.problems and self.torn is None


def survey(
    address: str, *, shown: int = 3, renderer: "Renderer | None" = None, form: str | None = None
) -> Survey:
    """Go through the whole file once. Only errors that leave nothing to look at are raised."""
    reading = open_rows(address, form=form, string_prompts="user", on_problem="skip")
    first, lengths, tally = list[ShownRow](), Lengths(), Tally()
    prompts, rows = _Repetition(address), _Repetition(address)
    for at, row in reading:
        asked, taught = _content(row)
        if asked is not None:
            prompts.add(asked, at)
        rows.add(taught, at)
        tally.add(row, at, renderer)
        is_shown, is_measured = len(first) < shown, lengths.wants_next()
        parts = _laid_out(row, at, renderer, reading) if is_shown or is_measured else None
        if parts is not None:
            first += [ShownRow(at=at, parts=parts)] if is_shown else []
            if is_measured:
                lengths.add(parts)
                tally.add_parts(parts, at)
    return Survey(
        address=address,
        format=reading.format,
        rows=reading.counts[READ],
        texts=reading.counts[TEXTS],
        problems=tuple(reading.problems),
        torn=reading.torn,
        shown=tuple(first),
        unit="characters" if renderer is None else "tokens",
        measured=lengths.measured,
        figures=lengths.figures(),
        histogram=tuple(lengths.histogram()),
        same_prompt=prompts.close(),
        same_row=rows.close(),
        oddities=tuple(oddities(tally, address)),
        facts=tuple(tally_lines(tally)),
    )


@final
class _Repetition:
    """Finds content that was there before, by its hash."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._first: dict[bytes, RowAt] = {}
        self._rows = 0
        self._examples: list[tuple[str, str]] = []

    def add(self, content: Any, at: RowAt) -> None:
        """Content of the row at this place."""
        text = json.dumps(content, sort_keys=True, ensure_ascii=False, default=str)
        digest = hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
        earlier = self._first.setdefault(digest, at)
        if earlier is not at:
            self._rows += 1
            if len(self._examples) < _EXAMPLES:
                self._examples.append((place(at, self._address), place(earlier, self._address)))

    def close(self) -> Repeated:
        """What was found."""
        return Repeated(rows=self._rows, examples=tuple(self._examples))


def _content(row: AnyRow) -> tuple[Any, Any]:
    """What the row asks, None where there is no such thing, and all that it teaches."""
    whole = {name: value for name, value in own_form(row).items() if name != EXTRA}
    if isinstance(row, TextRow):
        return None, whole
    if isinstance(row, ConversationRow):
        roles = [message["role"] for message in row.messages]
        return [dict(message) for message in row.messages[: roles.index("assistant")]], whole
    asked = row.messages if isinstance(row, Prompt) else row.prompt
    return [dict(message) for message in asked], whole


def _laid_out(
    row: AnyRow, at: RowAt, renderer: "Renderer | None", reading: Reading[AnyRow]
) -> tuple[Part, ...] | None:
    """The parts of a row; what the chat template refuses joins the problems."""
    if renderer is None:
        return in_words(row)
    from luyen.data.formats.token_layout import in_tokens  # slow to load, and not always needed

    try:
        return in_tokens(row, renderer)
    except UserError as error:
        reading.problems.append(Problem(at=at, error=error))
        return None
