"""`luyen migrate`: a configuration of verl, TRL, LLaMA-Factory or Axolotl becomes Luyen's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from luyen.base.errors import UserError, printable
from luyen.base.files import writing
from luyen.config.check import check
from luyen.config.migrate.migrate import migrate as migrate_source
from luyen.config.migrate.reader import MigrationRequest
from luyen.config.migrate.report import Migration, migration_json, table_lines, yaml_text
from luyen.data.first_rows import first_row_error


def migrate(
    source: Annotated[
        str,
        typer.Argument(
            help="A YAML file, a shell script, a Python file, or a command in quotes.",
            metavar="FILE|COMMAND",
        ),
    ],
    output: Annotated[
        Path | None, typer.Option(help="File to write; without it, standard output.")
    ] = None,
    devices: Annotated[
        int,
        typer.Option(min=1, help="Devices that it ran on, where batch sizes are for one of them."),
    ] = 1,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the table and the YAML as JSON.")
    ] = False,
) -> None:
    """Translate a configuration of verl, TRL, LLaMA-Factory or Axolotl.

    Every key of it is in the table: carried over, renamed, implied by design, or not available
    with what to do. Nothing of a script is executed.
    """
    if output is not None and output.exists():
        raise UserError("--output", str(output), "it exists", "choose another name")
    migration = migrate_source(MigrationRequest(text=source, output=output, devices=devices))
    text = yaml_text(migration)
    if output is not None:  # first: a reader such as `head` may close standard output
        _write_new(output, text)
    if as_json:
        typer.echo(json.dumps({**migration_json(migration), "yaml": text}, indent=2, default=str))
    else:
        for line in table_lines(migration):
            typer.echo(line, err=output is None)
    if output is None and not as_json:
        typer.echo(text, nl=False)
    if output is not None and not as_json:
        for line in _last_lines(output, migration):
            typer.echo(line)


def _write_new(path: Path, text: str) -> None:
    """Write a file, never over one that came since; none is left where there is no room."""
    with writing(path, field="--output", fix="free disk space, or name another file"):
        file = path.open("x", encoding="utf-8")
        try:
            with file:
                file.write(text)
        except OSError:
            path.unlink(missing_ok=True)
            raise


def _last_lines(output: Path, migration: Migration) -> Iterator[str]:
    """What has to be written by hand, and what `check` still says about the file."""
    report = check([output], starts_a_run=False, row_error=first_row_error)
    left = [problem for problem in report.problems if problem.severity == "error"]
    yield ""
    yield f"Wrote {printable(str(output))}"
    by_hand = [entry for entry in migration.entries if entry.outcome.is_open]
    if by_hand:
        yield "To write by hand"
    for entry in by_hand:
        yield f"  {printable(entry.source)}: {printable(entry.outcome.note)}"
    yield "`luyen check` finds no error in it" if not left else "Left to do on this machine"
    for problem in left:
        yield f"  {problem.id} {problem.field}: {printable(problem.why)}"
