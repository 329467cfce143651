"""Shared by commands: the option --trust, files to write, setup before torch is imported."""

import os
from pathlib import Path
from typing import Annotated

import typer

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process

Checkpoint = Annotated[
    str,
    typer.Argument(
        help="A checkpoint, a run directory (its newest one), or a Hugging Face directory.",
        metavar="CHECKPOINT",
    ),
]

Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code that the run names, though it is not yours."),
]


def prepare() -> None:
    """Set up the process before torch and transformers are imported: exact numbers, no bars."""
    prepare_process()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")


_PAGES = ("report.html", "timeline.json")
"""Files of a run that commands may write again."""


def refuse_run_file(out: Path | None, *, field: str = "--out") -> None:
    """A UserError if a command would overwrite what a run recorded; links are replaced, not read.

    Example:
        >>> refuse_run_file(None)
    """
    if out is None or out.is_symlink() or not out.exists() or out.name in _PAGES:
        return
    for folder in out.resolve().parents:
        if (folder / "manifest.json").is_file() and (folder / "config.yaml").is_file():
            why = f"it is a file of the run {folder}"
            raise UserError(field, str(out), why, "name a file that does not exist")
