"""The options of `luyen diff`."""

from pathlib import Path
from typing import Annotated

import typer


def diff(
    run_a: Annotated[Path, typer.Argument(help="A run directory.")],
    run_b: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the difference as JSON.")] = False,
) -> None:
    """Say where two runs first parted: input, step, stage, rollout and token.

    Exit code 0 when they did the same, 1 when not, 2 when their files allow no comparison.
    """
    from luyen.cli.diff import run_diff

    raise typer.Exit(run_diff(run_a, run_b, as_json=as_json))
