"""The options of `luyen rollout`."""

from typing import Annotated

import typer

from luyen.cli.trust_option import Trust


def rollout(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, the later over the earlier, or a checkpoint; then overrides.",
            metavar="CONFIG... [KEY=VALUE]...",
        ),
    ],
    n: Annotated[int, typer.Option(min=1, help="Prompts to play.")] = 4,
    samples: Annotated[int, typer.Option(min=1, help="Rollouts of each prompt.")] = 1,
    validation: Annotated[
        bool, typer.Option("--validation", help="Take the validation rows, drawn as there.")
    ] = False,
    pretty: Annotated[
        bool, typer.Option("--pretty", help="Show every token in the colour of its origin.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rollouts as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Play rollouts and show what was said, which tools were called, and the reward.

    Nothing is trained and nothing is written.
    """
    from luyen.cli.rollout import run_rollout

    code = run_rollout(
        config,
        count=n,
        samples=samples,
        is_validation=validation,
        is_pretty=pretty,
        as_json=as_json,
        is_trusted=trust,
    )
    raise typer.Exit(code)
