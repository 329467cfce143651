"""`luyen data convert`: rows of any format in the form that Luyen writes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.text import Text

from luyen.base.files import plain
from luyen.cli.data_problems import counted, problem_lines, problems_json
from luyen.cli.quiet import prepare

if TYPE_CHECKING:
    from luyen.data.formats.convert import Converted


def run_convert(
    source: str, target: Path, *, to: str | None, form: str | None, skip: bool, as_json: bool
) -> int:
    """Convert, and say what happened; 1 when problems kept the file from being written."""
    prepare()
    from luyen.data.formats.convert import convert

    done = convert(source, target, to=to, form=form, skip=skip)
    if as_json:
        typer.echo(json.dumps(plain(converted_json(done, target)), indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False, soft_wrap=True)
        for line in converted_lines(done, source, target):
            console.print(line)
    return 0 if done.is_written else 1


def converted_lines(done: "Converted", source: str, target: Path) -> Iterator[Text]:
    """The report for people."""
    yield Text(f"{source}: {counted(done.read, 'row')} of the format {done.format.form.name}")
    yield Text(f"  because {done.format.why}", style="bright_black")
    for note in done.format.notes:
        yield Text(f"  {note}", style="yellow")
    yield from problem_lines(done.problems, done.torn, source)
    if done.written is None:
        fix = "mend the rows" if done.torn is not None else "mend the rows, or --skip them"
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
