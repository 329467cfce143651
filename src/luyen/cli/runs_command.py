"""The options of `luyen runs`."""

from pathlib import Path
from typing import Annotated

import typer


def runs(
    folder: Annotated[
        Path, typer.Argument(help="A folder of runs, or one run.", metavar="[DIR]")
    ] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON.")] = False,
) -> None:
    """List runs: how far each is, what it last measured, and whether it still goes on."""
    from luyen.cli.runs import run_runs

    raise typer.Exit(run_runs(folder, as_json=as_json))
