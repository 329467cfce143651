"""The commands below `luyen artifacts`; without one of their names, `list` is meant."""

from pathlib import Path
from typing import Annotated, Any, final

import typer
from typer.core import TyperGroup


@final
class ListUnlessNamed(TyperGroup):
    """`luyen artifacts DIR` is `luyen artifacts list DIR`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Put `list` in front of anything that is neither a command nor a call for help."""
        is_named = bool(args) and (args[0] in self.commands or args[0] == "--help")
        return super().parse_args(ctx, args if is_named else ["list", *args])


artifacts = typer.Typer(
    cls=ListUnlessNamed,
    help="What runs read and made, known by content.",
    rich_markup_mode=None,
)
_RUNS = Path("runs")
Folder = Annotated[Path, typer.Argument(help="The folder of runs.", metavar="[DIR]")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@artifacts.command("list")
def list_artifacts(folder: Folder = _RUNS, as_json: AsJson = False) -> None:
    """List rows, models, checkpoints and exports with their hashes and parents."""
    from luyen.cli.artifacts import run_list

    raise typer.Exit(run_list(folder, as_json=as_json))


@artifacts.command()
def verify(folder: Folder = _RUNS, as_json: AsJson = False) -> None:
    """Hash every file again; exit code 1 when one has changed or is missing."""
    from luyen.cli.artifacts import run_verify

    raise typer.Exit(run_verify(folder, as_json=as_json))


@artifacts.command()
def show(
    name: Annotated[str, typer.Argument(help="A name, NAME@HASH, or the beginning of a hash.")],
    folder: Folder = _RUNS,
    as_json: AsJson = False,
) -> None:
    """Show what an artifact was made from, back to rows and models that no run made."""
    from luyen.cli.artifacts import run_show

    raise typer.Exit(run_show(name, folder, as_json=as_json))


@artifacts.command()
def rebuild(folder: Folder = _RUNS) -> None:
    """Write the index of a folder anew from its run directories."""
    from luyen.cli.artifacts import run_rebuild

    raise typer.Exit(run_rebuild(folder))
