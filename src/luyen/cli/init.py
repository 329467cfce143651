"""`luyen init`: a folder to begin with."""

from pathlib import Path

import typer

from luyen.base.errors import UserError
from luyen.base.files import write_whole, writing
from luyen.cli.starter import files


def run_init(directory: Path) -> int:
    """Write a configuration, a reward and rows; refused where any of these files exists."""
    directory = directory.expanduser()
    if directory.exists() and not directory.is_dir():
        raise UserError("DIR", str(directory), "a file of that name is in the way", "name another")
    wanted = files()
    present = [name for name in wanted if (directory / name).exists()]
    if present:
        why = f"it has a {present[0]} already, and nothing is overwritten"
        raise UserError("DIR", str(directory), why, "give a new directory")
    for name, content in wanted.items():
        path = directory / name
        with writing(path, field="DIR", fix="make room, or mend the permissions"):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
        typer.echo(f"wrote {path}")
    typer.echo(
        f"\nTry next\n  cd {directory}\n  luyen check config.yaml\n  luyen train config.yaml"
    )
    return 0
