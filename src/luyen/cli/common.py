"""Shared by commands: the option --trust, and process setup before torch is imported."""

import os
from typing import Annotated

import typer

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
