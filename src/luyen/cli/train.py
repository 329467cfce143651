"""`luyen train`: check, then train."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import typer

from luyen.base.exactness import prepare_process
from luyen.cli.check import problem_lines, report_lines, split_words
from luyen.config.check import check
from luyen.config.machine import this_machine


def quickstart() -> Path:
    """The recipe that runs when none is named."""
    return Path(str(resources.files("luyen") / "builtin" / "quickstart.yaml"))


def run_train(words: Sequence[str]) -> int:
    """Train, and print what was reached; 1 when the configuration has errors."""
    files, overrides = split_words(words)
    if not files:
        files = [quickstart()]
        typer.echo("No configuration named: training the quickstart (sums, built-in model).")
    machine = this_machine()
    report = check(files, overrides, machine=machine)
    names = [str(f) for f in files]
    if not report.is_sound:
        for line in problem_lines(report, names):
            typer.echo(line)
        return 1
    if report.problems:
        for line in report_lines(report, names, machine):
            typer.echo(line)
    prepare_process()
    # torch and everything above it load here, after the configuration has been found sound.
    from luyen.runtime.ray.wire import RemoteError
    from luyen.train.start import run_training

    try:
        typer.echo(f"\n{run_training(report).text()}")
    except RemoteError as error:
        # Its traceback is the one to read; where this process heard of it helps nobody.
        typer.secho(f"error: {error}", err=True, fg="red")
        return 1
    return 0
