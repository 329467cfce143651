"""The options of `luyen profile`."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.cli.trust_option import Trust


def profile(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides. "
            "Without a file: the quickstart.",
            metavar="[CONFIG]... [KEY=VALUE]...",
        ),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Steps to look at; the run ends after the last.")
    ] = "2,3",
    out: Annotated[Path, typer.Option(help="Folder of the traces.")] = Path("profile"),
    trust: Trust = False,
) -> None:
    """Train for a few steps and show where the time goes.

    Each step leaves a trace for Perfetto with the phases of the loop, a table of its heaviest
    operators and, on a GPU, a snapshot of its memory. Nothing else of the run is kept.
    """
    from luyen.cli.profile import run_profile

    raise typer.Exit(run_profile(config or [], steps=steps, out=out, is_trusted=trust))
