"""What commands share: the option --trust, and process setup before torch loads."""

import os
from typing import Annotated

import typer

from luyen.base.process import prepare_process

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


# What a command does before torch and transformers load.


def prepare() -> None:
    """Settings for exact numbers, and no progress bars of libraries between the lines."""
    prepare_process()
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
