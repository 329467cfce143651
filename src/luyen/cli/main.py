"""The command table of `luyen`, and the exit code of every command."""

import asyncio
import errno
import sys
import webbrowser
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any, TypeAlias, final

import typer
from typer.core import TyperGroup

from luyen import __version__
from luyen.base.boundary import last_line
from luyen.base.errors import UserError
from luyen.base.secrets import mask_tracebacks
from luyen.base.system import address_limit, reset_signals
from luyen.cli.common import Trust
from luyen.config.loader.one_reading import one_reading
from luyen.telemetry.output import OUTPUT, ensure_streams, flushed, say


@final
class Commands(TyperGroup):
    """The table of commands; turns a SystemExit from user code into a UserError.

    Commands do not raise SystemExit themselves, and most user code is guarded where it is called.
    This catches the rest (tasks, threads, callbacks of libraries), so that user code cannot make a
    failed command exit with code 0.

    The module of a command is imported when the command is run, or its help shown: most of them
    load the schema of the configuration, which takes longer than some commands do.
    """

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of help."""
        return [*COMMANDS, *(name for name in super().list_commands(ctx) if name not in COMMANDS)]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name; None where there is none."""
        if cmd_name in COMMANDS and cmd_name not in self.commands:
            self.add_command(_loaded(cmd_name), cmd_name)
        return super().get_command(ctx, cmd_name)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name; an unknown one is compared with all names."""
        if args[0] not in COMMANDS and args[0] not in self.commands:
            for name in COMMANDS:
                self.get_command(ctx, name)
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Run the command; a UserError where code inside it tried to end the process."""
        try:
            with one_reading():
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

COMMANDS = {
    "check": "check",
    "train": "train",
    "eval": "evaluate",
    "sweep": "sweep",
    "chat": "chat",
    "serve": "serve",
    "export": "export",
    "selftest": "selftest",
    "init": "init",
    "migrate": "migrate",
    "bench": "bench",
    "diff": "diff",
    "profile": "profile",
    "replay": "replay",
    "rescore": "rescore",
    "rollout": "rollout",
    "doctor": "doctor",
    "reproduce": "reproduce",
    "timeline": "timeline",
    "runs": "runs",
    "models": "models",
    "data": "data",
    "artifacts": "artifacts",
}
"""Command -> the function or group of commands in the module of that name, in the order of help."""


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


def _loaded(name: str) -> Any:
    """The command of `COMMANDS`, made from its function or group."""
    found = getattr(import_module(f"luyen.cli.{name}"), COMMANDS[name])
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    alone.command(name)(found)
    return typer.main.get_command(alone)


@app.command()
def explain(
    key: Annotated[list[str], typer.Argument(help="A key, block, rule, key of verl, or words.")],
) -> None:
    """Say what a key or a rule means: type, default, choices, and the rules about it.

    Other words list the keys, rules and pages that have to do with them.
    """
    from luyen.config.explain import explain as words

    typer.echo(words(" ".join(key)))


# The options of `luyen plan`.

Simulate: TypeAlias = Annotated[
    bool, typer.Option("--simulate", help="Time of every phase too, from constants of an H200.")
]
Gpus: TypeAlias = Annotated[
    str | None, typer.Option(help="Numbers of GPUs to plan for, such as 8,64; default: as written.")
]
ScaleBatch: TypeAlias = Annotated[
    bool, typer.Option("--scale-batch", help="Batches grow with GPUs, from the first number on.")
]
PromptTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Mean tokens of a prompt; default: data.max_prompt_length.")
]
ResponseTokens: TypeAlias = Annotated[
    int | None, typer.Option(help="Mean tokens of an answer; default: data.max_response_length.")
]
ValRows: TypeAlias = Annotated[int, typer.Option(help="Rows of a validation.", min=0)]
ModelFile: TypeAlias = Annotated[
    Path | None, typer.Option(help="A config.json with the sizes of the model.")
]
Given: TypeAlias = Annotated[
    list[str] | None, typer.Option("--constant", help="NAME=VALUE in place of a constant.")
]
AsJson: TypeAlias = Annotated[bool, typer.Option("--json", help="Print as JSON.")]


@app.command()
def plan(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides.",
            metavar="CONFIG... [KEY=VALUE]...",
        ),
    ],
    simulate: Simulate = False,
    gpus: Gpus = None,
    scale_batch: ScaleBatch = False,
    prompt_tokens: PromptTokens = None,
    response_tokens: ResponseTokens = None,
    val_rows: ValRows = 0,
    model_config: ModelFile = None,
    constant: Given = None,
    as_json: AsJson = False,
) -> None:
    """Plan a configuration for GPUs that need not be here: memory, and by simulation time.

    Exit code 1 where a configuration is refused or does not fit. Nothing is written.
    """
    from luyen.cli.check import print_scales, split_words
    from luyen.config.simulation.hardware import H200
    from luyen.config.simulation.scales import Scenario, given_constants, numbers_of_gpus

    files, overrides = split_words(config)
    scenario = Scenario(
        files=tuple(files),
        overrides=tuple(overrides),
        gpus=numbers_of_gpus(gpus),
        scales_batch=scale_batch,
        hardware=H200.with_values(given_constants(constant or [])),
        model_config=model_config,
        prompt_tokens=prompt_tokens,
        response_tokens=response_tokens,
        val_rows=val_rows,
    )
    raise typer.Exit(print_scales(scenario, simulates=simulate, as_json=as_json))


@app.command()
def report(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; by default RUN/report.html.")
    ] = None,
) -> None:
    """Write a page about a run: curves, plan, rewards, samples, findings. One file, no network."""
    from luyen.cli.common import refuse_run_file
    from luyen.studio.report.page import write_report

    refuse_run_file(out)
    typer.echo(f"wrote {write_report(run, out)}")


@app.command()
def studio(
    folder: Annotated[
        Path, typer.Argument(help="A folder of runs, or one run.", metavar="[FOLDER]")
    ] = Path("runs"),
    host: Annotated[str, typer.Option(help="Loopback address to listen at.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port; 0 takes any that is free.")
    ] = 8787,
    no_open: Annotated[bool, typer.Option("--no-open", help="Open no browser.")] = False,
    read_only: Annotated[
        bool, typer.Option("--read-only", help="Start, stop and change nothing.")
    ] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Most jobs at once; further ones wait.")] = 1,
    trust: Trust = False,
) -> None:
    """Show the runs of a folder in the browser: every run, every rollout, every token.

    The page is for this machine and this user alone: it listens at a loopback address, and its
    address holds a token.
    """
    missing = [name for name in ("fastapi", "uvicorn") if find_spec(name) is None]
    if missing:
        why = "a server takes packages that are not installed"
        raise UserError("luyen studio", ", ".join(missing), why, "pip install luyen[studio]")
    from luyen.studio.screens.server_cache import StudioOptions
    from luyen.web.access import demand_loopback
    from luyen.web.app import run_studio

    demand_loopback(host)

    def announce(address: str) -> None:
        typer.echo(f"Luyen studio over {folder}: {address}")
        if not no_open:
            webbrowser.open(address)

    options = StudioOptions(
        folder=folder.expanduser(),
        is_read_only=read_only,
        is_trusting=trust,
        running_limit=jobs,
    )
    raise typer.Exit(run_studio(options, host=host, port=port, announce=announce))


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
    most = address_limit()
    return "of this machine" if most is None else f"{most} bytes of addresses"
