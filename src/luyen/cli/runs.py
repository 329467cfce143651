"""`luyen runs`: the runs below a folder, a line each."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from luyen.base.errors import UserError
from luyen.base.files import plain

if TYPE_CHECKING:
    from luyen.studio.runs import RunFacts

_COLOURS = {"running": "cyan", "finished": "green", "interrupted": "yellow", "damaged": "red"}
_HEAD = ("run", "stage", "steps", "state", "last validation", "begun", "size")


def run_runs(folder: Path, *, as_json: bool) -> int:
    """Print the list; 0 also when it is empty."""
    from luyen.studio.runs import list_runs

    root = folder.expanduser()
    if not root.is_dir():
        fix = "give the folder that trainer.default_local_dir names"
        raise UserError("DIR", str(folder), "no such folder", fix)
    found = list_runs(root)
    if as_json:
        typer.echo(json.dumps(plain([run.as_json() for run in found]), indent=2))
        return 0
    for line in table(_HEAD, [_row(run) for run in found]) if found else [f"No runs in {folder}"]:
        typer.echo(line)
    for run in found:
        if run.note:
            typer.secho(f"{run.path}: {run.note}", fg=_COLOURS[run.state])
    return 0


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Lines with aligned columns.

    Example:
        >>> list(table(("a", "b"), [("one", "2")]))
        ['a    b', 'one  2']
    """
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        yield "  ".join(cells).rstrip()


def size_words(count: int) -> str:
    """Bytes for people.

    Example:
        >>> size_words(900), size_words(3_500_000)
        ('900 B', '3.3 MiB')
    """
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if amount < 1024 or unit == "GiB":
            break
        amount /= 1024
    return f"{amount:.0f} B" if unit == "B" else f"{amount:.1f} {unit}"


def _row(run: "RunFacts") -> tuple[str, ...]:
    measured = "-" if run.value is None else f"{run.metric} {run.value:.3f}"
    steps = f"{run.steps}/{'?' if run.total is None else run.total}"
    when = run.created.replace("T", " ")[:16] or "?"
    return (run.name, run.stage, steps, run.state, measured, when, size_words(run.bytes))


def runs(
    folder: Annotated[
        Path, typer.Argument(help="A folder of runs, or one run.", metavar="[DIR]")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs: how far each is, what it last measured, and whether it still goes on."""
    raise typer.Exit(run_runs(folder, as_json=as_json))
