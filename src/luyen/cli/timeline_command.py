"""The options of `luyen timeline`."""

from pathlib import Path
from typing import Annotated

import typer


def timeline(
    run: Annotated[Path, typer.Argument(help="A run directory; the run may still go on.")],
    steps: Annotated[
        str | None, typer.Option(help="Steps to look at, such as 3-5; without it, all.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="The trace; by default RUN/timeline.json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Write one trace over all processes of a run, and say who waited for whom.

    Perfetto opens the trace. Nothing else is written.
    """
    from luyen.cli.timeline import run_timeline

    run_timeline(run, steps=steps, out=out, as_json=as_json)
