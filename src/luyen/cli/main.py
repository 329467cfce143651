"""The command table of `luyen`."""

import sys
from typing import Annotated

import typer

from luyen import __version__
from luyen.base.errors import UserError
from luyen.cli import model_commands
from luyen.cli.artifacts_command import artifacts
from luyen.cli.bench_command import bench
from luyen.cli.data_command import data
from luyen.cli.diff_command import diff
from luyen.cli.doctor_command import doctor
from luyen.cli.eval_command import evaluate
from luyen.cli.profile_command import profile
from luyen.cli.replay_command import replay
from luyen.cli.report_command import report
from luyen.cli.reproduce_command import reproduce
from luyen.cli.rescore_command import rescore
from luyen.cli.rollout_command import rollout
from luyen.cli.runs_command import runs
from luyen.cli.timeline_command import timeline

app = typer.Typer(
    name="luyen",
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


@app.callback()
def main() -> None:
    """Reinforcement-learning post-training of language models."""


@app.command()
def check(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides.",
            metavar="CONFIG... [KEY=VALUE]...",
        ),
    ],
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    device_memory_gb: Annotated[
        float | None,
        typer.Option(help="Plan for a GPU of this many GiB instead of this machine's."),
    ] = None,
) -> None:
    """Find every problem of a configuration, then show the plan it describes.

    Exit code 1 when there are errors. Nothing is written and no model is loaded.
    """
    from luyen.cli.check import run_check

    raise typer.Exit(run_check(config, as_json=as_json, device_memory_gb=device_memory_gb))


@app.command()
def train(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides. "
            "Without a file: the quickstart.",
            metavar="[CONFIG]... [KEY=VALUE]...",
        ),
    ] = None,
) -> None:
    """Train as a configuration says, after checking it."""
    from luyen.cli.train import run_train

    raise typer.Exit(run_train(config or []))


app.command("eval")(evaluate)
app.command()(model_commands.chat)
app.command()(model_commands.export)
app.command()(model_commands.selftest)
app.command()(model_commands.init)
app.command()(bench)
app.command()(diff)
app.command()(profile)
app.command()(replay)
app.command()(rescore)
app.command()(rollout)
app.command()(doctor)
app.command()(reproduce)
app.command()(report)
app.command()(timeline)
app.command()(runs)
app.add_typer(model_commands.models, name="models")
app.add_typer(data, name="data")
app.add_typer(artifacts, name="artifacts")


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key, a block, a rule's id, or a key of verl.")],
) -> None:
    """Say what a key or a rule means: type, default, limits, and the rules about it."""
    from luyen.config.explain import explain as words

    typer.echo(words(key))


@app.command()
def schema(
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print docs/config.md instead.")
    ] = False,
) -> None:
    """Print the JSON schema of the configuration, for editors."""
    import json

    from luyen.config.document import config_page, json_schema

    typer.echo(config_page() if markdown else json.dumps(json_schema(), indent=2), nl=not markdown)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run() -> None:
    """Entry point: a user's error is printed as such, without a traceback."""
    try:
        app()
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        sys.exit(1)
