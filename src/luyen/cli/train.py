"""`luyen train`: check, then train."""

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

import typer

from luyen.base.exactness import prepare_process
from luyen.cli.check import check_stages, problem_lines, report_lines, split_words
from luyen.config.artifact_refs import named_artifacts
from luyen.config.check import check
from luyen.config.load import load
from luyen.config.machine import Machine, this_machine
from luyen.config.pipeline import Pipeline, is_pipeline, read_pipeline
from luyen.config.pipeline_check import check_pipeline
from luyen.telemetry.artifacts import require_unchanged


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
    if is_pipeline(files):
        return _train_stages(read_pipeline(files, overrides), machine)
    report = check(files, overrides, machine=machine)
    names = [str(f) for f in files]
    if not report.is_sound:
        for line in problem_lines(report, names):
            typer.echo(line)
        return 1
    if report.problems:
        for line in report_lines(report, names, machine):
            typer.echo(line)
    for key, artifact in named_artifacts(load(files, overrides)).items():
        require_unchanged(artifact, key)
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


def _train_stages(pipeline: Pipeline, machine: Machine) -> int:
    """Check every stage, then run those that are not done; 1 when one has errors."""
    stages = check_pipeline(pipeline, machine=machine)
    if pipeline.problems or not all(stage.report.is_sound for stage in stages):
        return check_stages(pipeline, machine, as_json=False)
    for stage in stages:
        if stage.report.problems:
            for line in problem_lines(stage.report, [f"{pipeline.source}, stage {stage.name}"]):
                typer.echo(line)
    prepare_process()
    from luyen.runtime.ray.wire import RemoteError
    from luyen.train.pipeline import run_pipeline

    try:
        if run_pipeline(pipeline, typer.echo, machine=machine):
            typer.echo(f"Finished: all {len(stages)} stages of {pipeline.name}")
    except RemoteError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 1
    return 0
