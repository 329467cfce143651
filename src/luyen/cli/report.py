"""`luyen report`: a run as one HTML page."""

from pathlib import Path
from typing import Annotated

import typer


def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default RUN/report.html.")
    ] = None,
) -> None:
    """Write a page about a run: curves, plan, rewards, samples, findings. One file, no network."""
    from luyen.studio.report.page import write_report

    typer.echo(f"wrote {write_report(run, out)}")
