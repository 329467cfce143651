"""The options of `luyen doctor`."""

from pathlib import Path
from typing import Annotated

import typer


def doctor(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may still go on.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is wrong with a run, by its files, and what to try next.

    Exit code 1 when there are errors or warnings, 2 when RUN is no run. Nothing is written.
    """
    from luyen.cli.doctor import run_doctor

    raise typer.Exit(run_doctor(run, as_json=as_json))
