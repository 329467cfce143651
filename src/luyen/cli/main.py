"""The command table of `luyen`, and the exit code of every command."""

import asyncio
import errno
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, final

import typer
from typer.core import TyperGroup

from luyen import __version__
from luyen.base.boundary import last_line
from luyen.base.errors import UserError
from luyen.base.secrets import mask_tracebacks
from luyen.base.signals import reset_signals
from luyen.cli.artifacts import artifacts
from luyen.cli.bench import bench
from luyen.cli.chat import chat
from luyen.cli.common import Trust
from luyen.cli.data import data
from luyen.cli.diff import diff
from luyen.cli.doctor import doctor
from luyen.cli.eval import evaluate
from luyen.cli.export import export
from luyen.cli.init import init
from luyen.cli.models import models
from luyen.cli.profile import profile
from luyen.cli.replay import replay
from luyen.cli.report import report
from luyen.cli.reproduce import reproduce
from luyen.cli.rescore import rescore
from luyen.cli.rollout import rollout
from luyen.cli.runs import runs
from luyen.cli.selftest import selftest
from luyen.cli.sweep import sweep
from luyen.cli.timeline import timeline
from luyen.telemetry.output import OUTPUT, ensure_streams, flushed, say


@final
class Commands(TyperGroup):
    """The table of commands; turns a SystemExit from user code into a UserError.

    Commands do not raise SystemExit themselves, and most user code is guarded where it is called.
    This catches the rest (tasks, threads, callbacks of libraries), so that user code cannot make a
    failed command exit with code 0.
    """

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a UserError where code inside it tried to end the process."""
        try:
            return super().invoke(ctx)
        except (SystemExit, GeneratorExit, asyncio.CancelledError) as fault:
            why = f"code inside the command ended it: {last_line(fault)}"
            fix = "fix the code that does so: a reward, a plugin, a tool, an environment"
            raise UserError("command", ctx.invoked_subcommand, why, fix) from fault


_READER_GONE = 141
"""Exit code after SIGPIPE, by the convention of shells: 128 plus the signal number."""

app = typer.Typer(
    name="luyen",
    cls=Commands,
    help="Reinforcement-learning post-training of language models.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _say_version(is_wanted: bool) -> None:
    if is_wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[  # noqa: ARG001 - its callback acts
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Reinforcement-learning post-training of language models."""
    mask_tracebacks()  # here, since typer sets a hook of its own when the app is called


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
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume this run with its own configuration; keys may be overridden.",
            metavar="RUN",
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Train as a configuration says, after checking it."""
    from luyen.cli.train import run_train

    raise typer.Exit(run_train(config or [], resume=resume, is_trusted=trust))


app.command("eval")(evaluate)
app.command()(sweep)
app.command()(chat)
app.command()(export)
app.command()(selftest)
app.command()(init)
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
app.add_typer(models, name="models")
app.add_typer(data, name="data")
app.add_typer(artifacts, name="artifacts")


@app.command()
def explain(
    key: Annotated[str, typer.Argument(help="A key, block, rule, key of verl, or words.")],
) -> None:
    """Say what a key or a rule means: type, default, choices, and the rules about it.

    Other words list the keys, rules and pages that have to do with them.
    """
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

    from luyen.config.explain import config_page, json_schema

    typer.echo(config_page() if markdown else json.dumps(json_schema(), indent=2), nl=not markdown)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)


def run() -> None:
    """Entry point: a user's error is printed as such, without a traceback."""
    reset_signals()
    ensure_streams()
    code = exit_code(app)
    fault = flushed()
    if fault is not None and fault.errno == errno.EPIPE:
        code = _READER_GONE
    elif fault is not None:
        why = f"it could not be written: {fault.strerror or fault}"
        fix = "make room, or give it another place"
        code = _failed(UserError("standard output", "stdout", why, fix))
    sys.exit(code)


def exit_code(command: Callable[[], object]) -> str | int | None:
    """Run a command; prints errors that a user can fix, and returns the exit code."""
    try:
        command()
    except UserError as error:
        return _failed(error)
    except MemoryError as error:
        why = (
            f"there is not enough of it: {str(error).splitlines()[0]}" if str(error) else "all gone"
        )
        fix = "raise the limit (ulimit -v), or lower batch, lengths or model"
        return _failed(UserError("memory", _address_limit(), why, fix))
    except OSError as error:
        if error is OUTPUT.fault:
            return 1
        if error.filename is None:
            raise
        why, fix = str(error.strerror or error), "fix the cause, and start again"
        return _failed(UserError("file", str(error.filename), why, fix))
    except SystemExit as end:
        if _is_interrupted(end):
            say("interrupted")
        return end.code
    return 0


def _failed(error: UserError) -> int:
    typer.secho(f"error: {error}", err=True, fg="red")
    return 1


def _is_interrupted(end: SystemExit) -> bool:
    """Whether typer raised it for a Ctrl-C."""
    exit_ = end.__context__
    return exit_ is not None and isinstance(exit_.__cause__, KeyboardInterrupt)


def _address_limit() -> str:
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    return "of this machine" if most == resource.RLIM_INFINITY else f"{most} bytes of addresses"
