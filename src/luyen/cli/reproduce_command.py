"""The options of `luyen reproduce`."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.cli.trust_option import Trust


def reproduce(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    steps: Annotated[
        int | None, typer.Option(min=0, help="Compare steps up to this one; all by default.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="New folder for the second run; by default RUN-reproduced."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Run a run again from its own configuration and compare digests step by step.

    Exit code 0 when every step is equal, 1 when one is not, 2 when it cannot be done.
    """
    from luyen.cli.reproduce import run_reproduce

    code = run_reproduce(run, steps=steps, into=into, as_json=as_json, is_trusted=trust)
    raise typer.Exit(code)
