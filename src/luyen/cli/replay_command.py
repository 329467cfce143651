"""The options of `luyen replay`."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.cli.trust_option import Trust


def replay(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[int, typer.Option(help="The step to do again.")],
    rollout: Annotated[
        str | None,
        typer.Option(
            help="Draw this rollout again instead: `step.draw.uid/sample`, or its beginning."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Do the step with another value too. May be repeated.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Do a step of a run again from its files, as it was or under changed keys.

    Exit code 0 when it came out as recorded, 1 when not, 2 when the files do not allow it. Nothing
    of the run is changed, and no tool or reward is called.
    """
    from luyen.cli.replay import run_replay

    code = run_replay(
        run, step, rollout=rollout, changes=changes or [], as_json=as_json, is_trusted=trust
    )
    raise typer.Exit(code)
