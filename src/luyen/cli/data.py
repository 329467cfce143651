"""`luyen data`: inspect a file of rows, or convert it to our form."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.cli.common import prepare

if TYPE_CHECKING:
    from luyen.data.formats.convert import Converted
    from luyen.data.formats.layout import Part, Stretch
    from luyen.data.formats.read import PromptOptions, RowProblem
    from luyen.data.formats.survey import Repeated, ShownRow, Survey
    from luyen.data.render import Renderer


data = typer.Typer(
    help="Look at files of rows, and convert them.", no_args_is_help=True, rich_markup_mode=None
)
As = Annotated[
    str | None,
    typer.Option("--as", help="Format of the file; default: found out.", metavar="FORMAT"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]
SystemPrompt = Annotated[
    str | None, typer.Option(help="As data.system_prompt of a run.", metavar="TEXT")
]
PromptTemplate = Annotated[
    str | None, typer.Option(help="As data.prompt_template of a run.", metavar="TEXT")
]
PromptKey = Annotated[
    str | None,
    typer.Option(
        help="As data.prompt_key of a run: rows are prompts, in this column.", metavar="COLUMN"
    ),
]
GroundTruthKey = Annotated[
    str | None,
    typer.Option(
        help="As data.ground_truth_key of a run: rows are prompts, answered there.",
        metavar="COLUMN",
    ),
]


@data.command()
def inspect(
    file: Annotated[
        str, typer.Argument(help="A file, a directory or an address of rows.", metavar="FILE")
    ],
    rows: Annotated[int, typer.Option(min=0, help="Rows to show.")] = 3,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="Show and count tokens: a directory, a hub id, or `builtin`.", metavar="PATH"
        ),
    ] = None,
    form: As = None,
    system_prompt: SystemPrompt = None,
    prompt_template: PromptTemplate = None,
    prompt_key: PromptKey = None,
    ground_truth_key: GroundTruthKey = None,
    as_json: AsJson = False,
) -> None:
    """Say which format a file has, show its first rows, and find what is wrong with it.

    What would be learned is in colour, or in double brackets where there is none. Exit code 1 when
    there are problems. Nothing is written. With the prompt options of a run, prompts are those
    that it trains on.
    """
    prompts = _prompts(system_prompt, prompt_template, prompt_key, ground_truth_key)
    code = run_inspect(
        file, shown=rows, tokenizer=tokenizer, form=form, prompts=prompts, as_json=as_json
    )
    raise typer.Exit(code)


@data.command()
def convert(
    source: Annotated[str, typer.Argument(help="A file, directory or address.", metavar="IN")],
    target: Annotated[Path, typer.Argument(help="A new .jsonl or .parquet file.", metavar="OUT")],
    to: Annotated[
        str | None, typer.Option(help="Kind of rows to write; default: the same.", metavar="KIND")
    ] = None,
    form: As = None,
    skip: Annotated[
        bool, typer.Option("--skip", help="Leave out rows with problems, and count them.")
    ] = False,
    system_prompt: SystemPrompt = None,
    prompt_template: PromptTemplate = None,
    prompt_key: PromptKey = None,
    ground_truth_key: GroundTruthKey = None,
    as_json: AsJson = False,
) -> None:
    """Write rows of any known format in the form that Luyen reads everywhere.

    Says what that form cannot hold. Exit code 1, and nothing written, when a row has a problem.
    With the prompt options of a run, it writes the prompts that the run trains on.
    """
    prompts = _prompts(system_prompt, prompt_template, prompt_key, ground_truth_key)
    code = run_convert(
        source, target, to=to, form=form, skip=skip, prompts=prompts, as_json=as_json
    )
    raise typer.Exit(code)


def _prompts(
    system_prompt: str | None,
    template: str | None,
    prompt_key: str | None,
    ground_truth_key: str | None,
) -> "PromptOptions":
    prepare()
    from luyen.data.formats.read import PromptOptions
    from luyen.data.rows import Frame

    return PromptOptions(
        frame=Frame(system_prompt=system_prompt, template=template),
        prompt_key=prompt_key,
        ground_truth_key=ground_truth_key,
    )


# Problems of rows, as text and JSON, grouped by column and reason.

_MOST = 8
"""Row numbers, and kinds of problems, that are listed before the rest is counted."""


def problem_lines(
    problems: "Sequence[RowProblem]", torn: UserError | None, address: str
) -> Iterator[Text]:
    """A line per kind of problem with the rows that have it, and below it the first of them."""
    from luyen.data.formats.read import place

    if torn is not None:
        yield Text(f"The file breaks off: {torn.why}. Fix: {torn.fix}", style="red")
    if not problems:
        return
    rows = {(problem.at.file, problem.at.number) for problem in problems}
    yield Text(f"Problems in {counted(len(rows), 'row')}", style="bold red")
    groups = grouped(problems)
    for (column, why), some in list(groups.items())[:_MOST]:
        first = some[0]
        places = [place(problem.at, address) for problem in some[:_MOST]]
        is_one_file = all(problem.at.file == address for problem in some)
        if is_one_file and len(some) > 1:
            places = [f"rows {', '.join(str(problem.at.number) for problem in some[:_MOST])}"]
        more = f" and {len(some) - _MOST:,} more" if len(some) > _MOST else ""
        yield Text(f"  {column}: {why}", style="red")
        yield Text(f"    {', '.join(places)}{more}")
        yield Text(f"    {first.column} = {first.error.value!r}", style="bright_black")
        yield Text(f"    Fix: {first.error.fix}")
    if len(groups) > _MOST:
        yield Text(f"  ... and {len(groups) - _MOST} more kinds of problems (--json lists all)")


def grouped(problems: "Sequence[RowProblem]") -> "dict[tuple[str, str], list[RowProblem]]":
    """Problems by column and reason; the places inside a list count as one column."""
    found: dict[tuple[str, str], list[RowProblem]] = {}
    for problem in problems:
        column = re.sub(r"\[\d+\]", "[]", problem.column)
        found.setdefault((column, problem.error.why), []).append(problem)
    return found


def problems_json(problems: "Sequence[RowProblem]", torn: UserError | None) -> list[dict[str, Any]]:
    """Every problem as plain data; a file that breaks off is one without a row."""
    rows = [(p.at.file, p.at.number, p.column, p.error) for p in problems]
    whole = [(str(torn.value), None, torn.field, torn)] if torn is not None else []
    return [
        {
            "file": file,
            "row": number,
            "column": column,
            "value": plain(error.value),
            "reason": error.why,
            "fix": error.fix,
        }
        for file, number, column, error in [*rows, *whole]
    ]


def counted(count: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "row"), counted(1200, "row")
        ('1 row', '1,200 rows')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


# `luyen data convert`.


def run_convert(
    source: str,
    target: Path,
    *,
    to: str | None,
    form: str | None,
    skip: bool,
    prompts: "PromptOptions",
    as_json: bool,
) -> int:
    """Convert and print a report; 1 when problems kept the file from being written."""
    prepare()
    from luyen.data.formats.convert import convert

    done = convert(source, target, to=to, form=form, skip=skip, prompts=prompts)
    if as_json:
        typer.echo(json.dumps(plain(converted_json(done, target)), indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in converted_lines(done, source, target):
            console.print(line)
    return 0 if done.is_written else 1


def converted_lines(done: "Converted", source: str, target: Path) -> Iterator[Text]:
    """The report as text."""
    yield Text(f"{source}: {counted(done.read, 'row')} of the format {done.format.form.name}")
    yield Text(f"  because {done.format.why}", style="bright_black")
    for note in done.format.notes:
        yield Text(f"  {note}", style="yellow")
    yield from problem_lines(done.problems, done.torn, source)
    if done.written is None:
        fix = "fix the rows" if done.torn is not None else "fix the rows, or --skip them"
        yield Text(f"Nothing was written: {fix}", style="red")
        return
    yield Text(f"{target}: {counted(done.written, 'row')} of the form {done.kind}", style="green")
    if done.left_out:
        yield Text(f"  left out: {counted(done.left_out, 'row')} with problems", style="yellow")
    if done.texts:
        words = f"  plain text became messages in {counted(done.texts, 'row')}"
        yield Text(words, style="yellow")
    for what, times in done.lost.items():
        yield Text(f"  lost: {what}, {counted(times, 'time')}", style="yellow")
    if not done.lost and not done.left_out:
        yield Text("  nothing was lost")


def converted_json(done: "Converted", target: Path) -> dict[str, Any]:
    """The same as plain data."""
    return {
        "ok": done.is_written,
        "format": done.format.form.name,
        "why": done.format.why,
        "notes": list(done.format.notes),
        "kind": done.kind.value,
        "file": str(target) if done.is_written else None,
        "read": done.read,
        "written": done.written,
        "left_out": done.left_out,
        "plain_text_rows": done.texts,
        "lost": dict(done.lost),
        "problems": problems_json(done.problems, done.torn),
    }


# `luyen data inspect`.

LEARNED = "bold green"
_COLOURS = {
    **dict.fromkeys(("prompt", "user"), "cyan"),
    **dict.fromkeys(("tool", "observation"), "yellow"),
    **dict.fromkeys(("template", "system", "developer"), "bright_black"),
}
_HEAD, _TAIL = 500, 250
"""Characters that are shown of a long stretch, at its beginning and at its end."""
_BAR = 40
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that would move the cursor or change the colours of a terminal."""


def run_inspect(
    file: str,
    *,
    shown: int,
    tokenizer: str | None,
    form: str | None,
    prompts: "PromptOptions",
    as_json: bool,
) -> int:
    """Print what was found; 1 when a row has a problem."""
    prepare()
    from luyen.data.formats.survey import survey

    renderer = _renderer(tokenizer) if tokenizer is not None else None
    found = survey(file, shown=shown, renderer=renderer, form=form, prompts=prompts)
    if as_json:
        typer.echo(json.dumps(plain(survey_json(found)), indent=2, ensure_ascii=False, default=str))
    else:
        console = Console(highlight=False, soft_wrap=True)
        is_plain = console.no_color or console.color_system is None
        bar = "█" if console.encoding.lower().startswith("utf") else "#"
        for line in survey_lines(found, is_plain=is_plain, bar=bar):
            console.print(line)
    return 0 if found.is_sound else 1


def survey_lines(found: "Survey", *, is_plain: bool, bar: str) -> Iterator[Text]:
    """The report as text."""
    yield Text(found.address, style="bold")
    yield Text(f"  {counted(found.rows, 'row')} of the format ").append(
        found.format.form.name, style="bold"
    )
    yield Text(f"  because {found.format.why}", style="bright_black")
    for note in found.format.notes:
        yield Text(f"  {note}", style="yellow")
    if found.texts:
        words = f"  plain text was taken for messages in {counted(found.texts, 'row')}"
        yield Text(f"{words}: training asks for data.string_prompts=user", style="yellow")
    if found.shown:
        yield from (Text(), _legend(found, is_plain=is_plain))
        for row in found.shown:
            yield from _row(row, found, is_plain=is_plain)
    if found.measured:
        yield from _lengths(found, bar)
    yield Text("\nRows", style="bold")
    for fact in found.facts:
        yield Text(f"  {fact}")
    yield _repeated(found.same_row, "repeats another", "repeat an earlier one")
    if found.same_prompt != found.same_row:
        yield _repeated(
            found.same_prompt, "asks what another asked", "ask what an earlier one asked"
        )
    for what in found.oddities:
        yield Text(f"  look: {what}", style="yellow")
    yield Text()
    yield from problem_lines(found.problems, found.torn, found.address)
    if found.is_sound:
        yield Text("No problems", style="green")


def _legend(found: "Survey", *, is_plain: bool) -> Text:
    text = Text("First rows", style="bold")
    if not any(part.learned for row in found.shown for part in row.parts):
        return text
    if is_plain:
        return text.append("   [[learned]] and only read", style="not bold")
    text.append("   learned", style=LEARNED)
    for word, who in (("prompt", "prompt"), ("tool", "tool"), ("template", "template")):
        text.append(f"  {word}", style=f"not bold {_COLOURS[who]}")
    return text


def _row(row: "ShownRow", found: "Survey", *, is_plain: bool) -> Iterator[Text]:
    from luyen.data.formats.read import place

    unit = found.unit
    yield Text(place(row.at, found.address), style="bold")
    for part in row.parts:
        learned = f", {part.learned:,} learned" if part.learned else ""
        yield Text(f"  {part.name}: {part.length:,} {unit}{learned}", style="underline")
        body = in_words(part, is_plain=is_plain) if unit == "characters" else Text()
        if unit == "tokens":
            for stretch in part.stretches:
                body.append_text(_stretch(stretch, is_plain=is_plain))
        for line in body.split("\n"):
            yield Text("    ").append_text(line)
        for note in part.notes:
            yield Text(f"    note: {note}", style="yellow")


def in_words(part: "Part", *, is_plain: bool) -> Text:
    """Messages, each after its role."""
    lines: list[Text] = []
    for stretch in part.stretches:
        head = Text("" if stretch.who in ("text", "step") else f"{stretch.who}: ", style="dim")
        lines.append(Text().append_text(head).append_text(_stretch(stretch, is_plain=is_plain)))
    return Text("\n").join(lines)


def _stretch(stretch: "Stretch", *, is_plain: bool) -> Text:
    text = _CONTROL.sub(lambda found: repr(found[0])[1:-1], shortened(stretch.text))
    if stretch.is_learned and not text.strip():
        text = repr(text)[1:-1]  # white space shows no colour
    if is_plain:
        return Text(f"[[{text}]]" if stretch.is_learned else text)
    return Text(text, style=LEARNED if stretch.is_learned else _COLOURS.get(stretch.who, ""))


def shortened(text: str) -> str:
    """The text, or its beginning and its end.

    Example:
        >>> shortened("ab"), len(shortened("a" * 5000)) < 1000
        ('ab', True)
    """
    left = len(text) - _HEAD - _TAIL
    if left < 50:
        return text
    return f"{text[:_HEAD]} ... {left:,} more characters ... {text[-_TAIL:]}"


def _lengths(found: "Survey", block: str) -> Iterator[Text]:
    is_all = found.measured >= found.rows - len(found.problems)
    some = "" if is_all else f" of {found.measured:,} rows, evenly spread"
    yield Text(f"\nLengths in {found.unit}{some}", style="bold")
    wide = max(len(name) for name in found.figures)
    yield Text(f"  {'':{wide}}  shortest    median      95 %   longest", style="bright_black")
    for name, one in found.figures.items():
        numbers = (one.least, one.median, one.nearly_all, one.most)
        yield Text(f"  {name:{wide}}" + "".join(f"  {number:>8,}" for number in numbers))
    most = max(bar.rows for bar in found.histogram)
    labels = [
        f"{bar.low:,}-{bar.high:,}" if bar.high > bar.low else f"{bar.low:,}"
        for bar in found.histogram
    ]
    place = max(map(len, labels))
    yield Text()
    for label, bar in zip(labels, found.histogram, strict=True):
        size = max(round(bar.rows / most * _BAR), 1 if bar.rows else 0)
        yield (
            Text(f"  {label:>{place}}  ")
            .append(block * size, style="cyan")
            .append(f" {bar.rows:,}")
        )


def _repeated(found: "Repeated", none: str, some: str) -> Text:
    if not found.rows:
        return Text(f"  no row {none}")
    named = ", ".join(f"{one} as {earlier}" for one, earlier in found.examples)
    more = ", ..." if found.rows > len(found.examples) else ""
    verb = some if found.rows > 1 else some.replace("repeat", "repeats").replace("ask ", "asks ")
    return Text(f"  {counted(found.rows, 'row')} {verb} ({named}{more})")


def survey_json(found: "Survey") -> dict[str, Any]:
    """The whole report as plain data."""
    return {
        "ok": found.is_sound,
        "file": found.address,
        "format": found.format.form.name,
        "kind": found.format.kind.value,
        "why": found.format.why,
        "notes": list(found.format.notes),
        "rows": found.rows,
        "plain_text_rows": found.texts,
        "first_rows": [
            {"row": row.at.number, "parts": [asdict(part) for part in row.parts]}
            for row in found.shown
        ],
        "lengths": {
            "unit": found.unit,
            "rows": found.measured,
            "parts": {name: asdict(figures) for name, figures in found.figures.items()},
            "histogram": [asdict(bar) for bar in found.histogram],
        },
        "repeated_rows": asdict(found.same_row),
        "repeated_prompts": asdict(found.same_prompt),
        "facts": list(found.facts),
        "look_at": list(found.oddities),
        "problems": problems_json(found.problems, found.torn),
    }


def _renderer(tokenizer: str) -> "Renderer":
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it warns of rows longer than usual
    from luyen.data.render import Renderer
    from luyen.data.tokenizer import load_tokenizer

    return Renderer(load_tokenizer("builtin://arithmetic" if tokenizer == "builtin" else tokenizer))
