"""`luyen export`: a checkpoint as a Hugging Face directory."""

from pathlib import Path
from typing import Annotated

import typer

from luyen.base.errors import UserError
from luyen.cli.common import Checkpoint, Trust, prepare


def run_export(checkpoint: str, directory: Path, *, merge: bool, is_trusted: bool) -> int:
    """Write the directory, whole or not at all."""
    directory = directory.expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("DIR", str(directory), "it is not empty", "give a new directory")
    if any(_is_of_a_run(above) for above in directory.absolute().parents):
        why = "folders of checkpoints are read, counted and removed by their run"
        raise UserError("DIR", str(directory), why, "give a directory outside of `checkpoints`")
    prepare()
    from luyen.pipeline.export import export_checkpoint
    from luyen.train.interrupt import Stopped, stopped_by_signals

    try:
        with stopped_by_signals():  # so that what is unfinished is removed
            made = export_checkpoint(checkpoint, directory, merge=merge, is_trusted=is_trusted)
    except Stopped as stopped:
        typer.echo(f"interrupted ({stopped}); nothing was written", err=True)
        return stopped.exit_code
    typer.echo(f"{made.source} -> {directory}: {made.what}")
    for file in sorted(directory.iterdir()):
        typer.echo(f"  {file.name:28s} {file.stat().st_size:>12,d} bytes")
    return 0


def _is_of_a_run(folder: Path) -> bool:
    """Whether it is where a run has its checkpoints."""
    return folder.name == "checkpoints" and (folder.parent / "manifest.json").exists()


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
    raise typer.Exit(run_export(checkpoint, directory, merge=merge, is_trusted=trust))
