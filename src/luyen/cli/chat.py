"""`luyen chat`: talk with a checkpoint, in a terminal or through a pipe."""

import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from luyen.base.errors import UserError
from luyen.cli.common import Checkpoint, Trust, prepare

if TYPE_CHECKING:
    from luyen.studio.chat import ChatSession


def run_chat(
    checkpoint: str,
    *,
    messages: Sequence[str],
    system: str | None,
    temperature: float,
    max_tokens: int | None,
    is_trusted: bool,
) -> int:
    """Answer the given messages, or those read from the terminal or a pipe, one per line."""
    if temperature < 0:
        raise UserError("--temperature", temperature, "it is at least 0", "0 is greedy")
    prepare()
    from luyen.pipeline.policy_loading import open_checkpoint
    from luyen.studio.chat import ChatSession

    opened = open_checkpoint(checkpoint, is_trusted=is_trusted)
    session = ChatSession(opened, system=system, temperature=temperature, max_tokens=max_tokens)
    console = Console()
    try:
        if messages:
            _answer_all(session, iter(messages))
        elif sys.stdin.isatty():
            console.print(f"[dim]{opened.name}; Ctrl-D leaves[/dim]")
            _answer_all(session, _typed(console))
        else:
            _answer_all(session, (line.rstrip("\n") for line in sys.stdin))
    except KeyboardInterrupt:
        typer.echo("")
    return 0


def _answer_all(session: "ChatSession", messages: Iterator[str]) -> None:
    for message in messages:
        if message.strip():
            session.say(message, show=_show)
            typer.echo("")


def _show(piece: str) -> None:
    typer.echo(piece, nl=False)
    sys.stdout.flush()


def _typed(console: Console) -> Iterator[str]:
    """Lines typed in the terminal, until Ctrl-D."""
    while True:
        try:
            yield console.input("[bold green]you[/bold green] ")
        except EOFError:
            typer.echo("")
            return


def chat(
    checkpoint: Checkpoint,
    message: Annotated[
        list[str] | None,
        typer.Option(help="Ask this instead of reading from the terminal; may be repeated."),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(help="System message, in place of the run's `data.system_prompt`; '': none."),
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 takes the likeliest token.")] = 0.0,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Longest answer; default: as in the run.")
    ] = None,
    trust: Trust = False,
) -> None:
    """Talk with a checkpoint. Ctrl-D leaves; a pipe brings one message a line."""
    code = run_chat(
        checkpoint,
        messages=message or [],
        system=system,
        temperature=temperature,
        max_tokens=max_tokens,
        is_trusted=trust,
    )
    raise typer.Exit(code)
