"""`luyen export`: a checkpoint as a Hugging Face directory."""

from pathlib import Path

import typer

from luyen.base.errors import UserError
from luyen.cli.quiet import prepare


def run_export(checkpoint: str, directory: Path, *, merge: bool) -> int:
    """Write the directory, whole or not at all."""
    directory = directory.expanduser()
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise UserError("DIR", str(directory), "it is not empty", "give a new directory")
    prepare()
    from luyen.train.exported import export_checkpoint

    made = export_checkpoint(checkpoint, directory, merge=merge)
    typer.echo(f"{made.source} -> {directory}: {made.what}")
    for file in sorted(directory.iterdir()):
        typer.echo(f"  {file.name:28s} {file.stat().st_size:>12,d} bytes")
    return 0
