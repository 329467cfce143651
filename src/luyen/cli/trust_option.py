"""`--trust`, which every command has that acts on what a run directory names."""

from typing import Annotated

import typer

Trust = Annotated[
    bool,
    typer.Option("--trust", help="Run the code that the run names, though it is not yours."),
]
