"""The options of `luyen rescore`."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.cli.trust_option import Trust


def rescore(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys of the reward with other values.", metavar="[reward.KEY=VALUE]..."
        ),
    ] = None,
    reward: Annotated[
        Path | None,
        typer.Option(help="YAML file whose `reward` block judges; without it, the run's own."),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Steps to judge: N, or A:B with both ends.", metavar="A:B")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Judge the rollouts of validations instead.")
    ] = False,
    show: Annotated[int, typer.Option(min=0, help="Rollouts to show that moved most.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="Write every rollout with both scores there (JSON lines).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Judge the recorded rollouts of a run by another reward, and show what would change.

    Exit code 0 when every rollout could be judged, 1 when some could not, 2 when it cannot be done.
    Nothing of the run is changed, and nothing is generated.
    """
    from luyen.cli.rescore import run_rescore

    code = run_rescore(
        run,
        changes=changes or [],
        file=reward,
        step=step,
        is_validation=validation,
        shown=show,
        out=out,
        as_json=as_json,
        is_trusted=trust,
    )
    raise typer.Exit(code)
