"""The options of `luyen sweep`."""

from typing import Annotated

import typer


def sweep(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, then overrides; KEY=A,B has a run for each value.",
            metavar="CONFIG... [KEY=VALUE[,VALUE]...]...",
        ),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(help="A run by its overrides, separated by spaces; as often as wished."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Train a grid or a list of variants, one after the other, and compare them in a table.

    Every run is checked before the first one starts, and has a run directory named after what it
    varies. The same command again trains only what is not finished.
    """
    from luyen.cli.sweep import run_sweep

    raise typer.Exit(run_sweep(config, run or [], as_json=as_json))
