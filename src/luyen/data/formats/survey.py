"""A file of rows as a whole: format, problems, lengths, repetitions, oddities."""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from luyen.base.errors import UserError
from luyen.base.records import Message, Prompt
from luyen.data.formats.cells import EXTRA
from luyen.data.formats.convert import own_form
from luyen.data.formats.detect import Format
from luyen.data.formats.layout import HistogramBar, Lengths, LengthStats, Part, in_words
from luyen.data.formats.read import (
    AS_THEY_ARE,
    READ,
    TEXTS,
    PromptOptions,
    RowProblem,
    RowReader,
    open_leniently,
    place,
)
from luyen.data.formats.records import (
    AnyRow,
    ConversationRow,
    LabelledRow,
    PreferenceRow,
    SteppedRow,
    TextRow,
)
from luyen.data.messages import MARKERS
from luyen.data.rows import RowAt

if TYPE_CHECKING:
    from luyen.data.render import Renderer


# Statistics over all rows, and oddities that are allowed but worth a look.

_TIE = "`chosen` and `rejected` say the same, so there is nothing to learn"
_EMPTY = "an answer is empty"
_UNLEARNED = "no message counts: every weight is 0"
_NO_PLACE = "the chat template has no place for tools, so they would never be seen"
_NO_TOKEN = "the tokenizer has no token for some of the text"
_LAST_IS_OTHERS = "the conversation goes on after the last answer"


@final
class Tally:
    """Counts over rows; it remembers where each thing was seen first."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums: Counter[str] = Counter()
        """What tells the rows apart -> how often."""
        self.odd: Counter[str] = Counter()
        """What is worth a look -> rows in which it was seen."""
        self.first: dict[str, RowAt] = {}
        """The first such row."""

    def add(self, row: AnyRow, at: RowAt, renderer: "Renderer | None") -> None:
        """Look at one row."""
        self.rows += 1
        for what in (*_odd(row), *_marked(row, renderer), *self._unseen_tools(row, renderer)):
            self._note(what, at)
        self.sums.update(_counts(row))

    def add_parts(self, parts: Sequence[Part], at: RowAt) -> None:
        """Look at the tokens of a row."""
        if any(part.unknown for part in parts):
            self._note(_NO_TOKEN, at)

    def _note(self, what: str, at: RowAt) -> None:
        self.odd[what] += 1
        self.first.setdefault(what, at)

    def _unseen_tools(self, row: AnyRow, renderer: "Renderer | None") -> Iterator[str]:
        """Whether the template hides tools; that is a matter of the template, so one row tells."""
        if renderer is None or isinstance(row, TextRow) or not row.tools or self.sums["tools"]:
            return
        messages = _spoken(row)
        try:
            is_hidden = renderer.text(messages, row.tools) == renderer.text(messages)
        except UserError:  # the row is refused when it is laid out, with the reason
            return
        if is_hidden:
            yield _NO_PLACE


def oddities(tally: Tally, address: str) -> Iterator[str]:
    """What is worth a look, with the number of rows and the first of them."""
    for what, rows in tally.odd.most_common():
        first = place(tally.first[what], address)
        yield f"{what} ({first if rows == 1 else f'{rows:,} rows, first in {first}'})"
    labels = tally.sums["label true"], tally.sums["label false"]
    if sum(labels) and 0 in labels:
        yield f"every label is {'true' if labels[0] else 'false'}: there is nothing to tell apart"


def tally_lines(tally: Tally) -> Iterator[str]:
    """What the rows are like."""
    sums = tally.sums
    if sums["pairs"]:
        share = sums["chosen is longer"] / sums["pairs"]
        yield f"the chosen answer has more characters than the rejected in {share:.0%} of pairs"
    if sums["label true"] or sums["label false"]:
        yield f"labels: {sums['label true']:,} true, {sums['label false']:,} false"
    if sums["steps"]:
        judged = sums["steps"] - sums["unlabelled steps"]
        yield f"{sums['right steps']:,} of {judged:,} judged steps are right"
    if sums["answers"]:
        yield f"{sums['learned']:,} of {sums['answers']:,} assistant messages are learned"
    for what in ("margin", "tools", "tool calls", "chat_template_kwargs"):
        if sums[what]:
            yield f"{what} in {sums[what]:,} of {tally.rows:,} rows"


def _odd(row: AnyRow) -> Iterator[str]:
    if isinstance(row, PreferenceRow) and row.is_tie:
        yield _TIE
    if isinstance(row, ConversationRow):
        if not row.learned:
            yield _UNLEARNED
        if row.messages[-1]["role"] != "assistant":
            yield _LAST_IS_OTHERS
    if any(not str(m["content"]).strip() and "tool_calls" not in m for m in _answers(row)):
        yield _EMPTY
    if isinstance(row, TextRow) and not row.text.strip():
        yield "the text is empty"


def _marked(row: AnyRow, renderer: "Renderer | None") -> Iterator[str]:
    """Markers of a chat template inside what is said: the row was probably rendered before."""
    special = renderer.tokenizer.special_tokens if renderer is not None else ()
    text = row.text if isinstance(row, TextRow) else "\n".join(_contents(row))
    for marker in dict.fromkeys((*MARKERS, *special)):
        if marker in text:
            yield f"the template marker {marker} stands in the text"


def _counts(row: AnyRow) -> dict[str, int]:
    match row:
        case PreferenceRow():
            found = {"pairs": 1, "margin": row.margin is not None}
            found["chosen is longer"] = _size(row.chosen) > _size(row.rejected)
        case LabelledRow():
            found = {f"label {str(row.label).lower()}": 1}
        case SteppedRow():
            found = {"steps": len(row.steps), "unlabelled steps": row.labels.count(None)}
            found["right steps"] = sum(label is not None and label >= 0.5 for label in row.labels)
        case ConversationRow():
            found = {"answers": len(_answers(row)), "learned": len(row.learned)}
        case _:
            found: dict[str, int] = {}
    if isinstance(row, TextRow):
        return found
    found |= {"tools": bool(row.tools)}
    found |= {"tool calls": any("tool_calls" in message for message in _spoken(row))}
    kwargs: Any = () if isinstance(row, Prompt) else row.template_kwargs
    return found | {"chat_template_kwargs": bool(kwargs)}


def _spoken(row: AnyRow) -> tuple[Message, ...]:
    """Every message of a row, the better of two answers."""
    match row:
        case ConversationRow() | Prompt():
            return row.messages
        case PreferenceRow():
            return (*row.prompt, *row.chosen)
        case LabelledRow():
            return (*row.prompt, *row.completion)
        case SteppedRow():
            return row.prompt
        case TextRow():
            return ()


def _answers(row: AnyRow) -> list[Message]:
    rejected = row.rejected if isinstance(row, PreferenceRow) else ()
    prompt = row.prompt if isinstance(row, PreferenceRow | LabelledRow | SteppedRow) else ()
    said = () if isinstance(row, Prompt) else (*_spoken(row)[len(prompt) :], *rejected)
    return [message for message in said if message["role"] == "assistant"]


def _contents(row: AnyRow) -> list[str]:
    steps = row.steps if isinstance(row, SteppedRow) else ()
    rejected = row.rejected if isinstance(row, PreferenceRow) else ()
    return [*(str(message["content"]) for message in (*_spoken(row), *rejected)), *steps]


def _size(messages: tuple[Message, ...]) -> int:
    return sum(len(message["content"]) for message in messages)


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
    problems: tuple[RowProblem, ...]
    """What is wrong, row by row."""
    torn: UserError | None
    """Where the file itself breaks off, if it does."""
    shown: tuple[ShownRow, ...]
    """The first rows that are sound."""
    unit: str
    """What lengths are counted in."""
    measured: int
    """Rows behind the lengths."""
    figures: Mapping[str, LengthStats]
    """Lengths by part."""
    histogram: tuple[HistogramBar, ...]
    """Lengths of whole rows."""
    same_prompt: Repeated
    """Rows that repeat the prompt of an earlier row."""
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
    address: str,
    *,
    shown: int = 3,
    renderer: "Renderer | None" = None,
    form: str | None = None,
    prompts: PromptOptions = AS_THEY_ARE,
) -> Survey:
    """Go through the whole file once. Only errors that leave nothing to look at are raised."""
    reading = open_leniently(address, form, prompts)
    first, lengths, tally = list[ShownRow](), Lengths(), Tally()
    questions, rows = _Repetition(address), _Repetition(address)
    for at, row in reading:
        prompt, taught = _content(row)
        questions.add(prompt, at)
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
        same_prompt=questions.close(),
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
        """Content of the row at this place; None: it has none."""
        if content is None:
            return
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
    """The prompt of the row, or None, and its whole content."""
    whole = {name: value for name, value in own_form(row).items() if name != EXTRA}
    if isinstance(row, TextRow):
        return None, whole
    if isinstance(row, ConversationRow):
        roles = [message["role"] for message in row.messages]
        return [dict(message) for message in row.messages[: roles.index("assistant")]], whole
    prompt = row.messages if isinstance(row, Prompt) else row.prompt
    return [dict(message) for message in prompt], whole


def _laid_out(
    row: AnyRow, at: RowAt, renderer: "Renderer | None", reading: RowReader[AnyRow]
) -> tuple[Part, ...] | None:
    """The parts of a row; what the chat template refuses joins the problems."""
    if renderer is None:
        return in_words(row)
    from luyen.data.formats.render import in_tokens  # slow to load, and not always needed

    try:
        return in_tokens(row, renderer)
    except UserError as error:
        reading.problems.append(RowProblem(at=at, error=error))
        return None
