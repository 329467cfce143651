"""`luyen train`: check, then train."""

from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated

import typer

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.system import address_limit
from luyen.cli.check import check_stages, problem_lines, report_lines, split_words
from luyen.cli.common import Trust
from luyen.config.check import Report, check
from luyen.config.loader.load import load
from luyen.config.machine import Machine, this_machine
from luyen.config.named_files import named_artifacts
from luyen.config.pipeline import Pipeline, check_pipeline, is_pipeline, read_pipeline
from luyen.config.resume import resume_arguments
from luyen.config.trust import require_trusted_files
from luyen.data.first_rows import first_row_error
from luyen.sandbox.launch import missing
from luyen.telemetry.artifacts import require_unchanged
from luyen.telemetry.output import OUTPUT, say
from luyen.train.interrupt import Stopped, stopped_by_signals

_LEAST_ADDRESSES = 1_100_000_000
_NO_MEMORY = ("can't start new thread", "allocate memory", "out of memory")
"""Parts of error messages of torch and the interpreter about missing memory."""


def quickstart() -> Path:
    """The recipe that runs when none is named."""
    return Path(str(resources.files("luyen") / "builtin" / "quickstart.yaml"))


def run_train(words: Sequence[str], *, resume: Path | None = None, is_trusted: bool = False) -> int:
    """Train and print the summary; returns 0 only when the run reached its end.

    `resume` is a run directory to resume. Returns 1 when the configuration has errors, and 128 plus
    the signal number when a signal ended the run.
    """
    OUTPUT.go_on()
    try:
        with stopped_by_signals():
            return _trained(words, resume, is_trusted=is_trusted)
    except Stopped as stopped:
        say(f"interrupted ({stopped}); luyen train --resume RUN goes on with a run that has begun")
        return stopped.exit_code


def _trained(words: Sequence[str], resume: Path | None, *, is_trusted: bool) -> int:
    files, overrides = split_words(words)
    if resume is not None:
        if files:
            why = "the run has its own configuration"
            raise UserError("--resume", str(resume), why, "give keys (KEY=VALUE), and no file")
        file, place = resume_arguments(resume)
        files, overrides = [file], [*overrides, *place]
    if not files:
        files = [quickstart()]
        typer.echo("No configuration named: training the quickstart (sums, built-in model).")
    require_trusted_files(files, is_trusted=is_trusted)
    machine = this_machine()
    if is_pipeline(files):
        return _train_stages(read_pipeline(files, overrides), machine)
    report = check(
        files, overrides, machine=machine, missing_promises=missing, row_error=first_row_error
    )
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
    return _reported(lambda: _train_run(report))


def _train_run(report: Report) -> int:
    # torch and everything above it load here, after the configuration has been found sound.
    from luyen.train.start import run_training

    summary = run_training(report)
    typer.echo(f"\n{summary.text()}")
    return summary.exit_code


def _train_stages(pipeline: Pipeline, machine: Machine) -> int:
    """Check every stage, then run those that are not done; 1 when one has errors."""
    stages = check_pipeline(
        pipeline, machine=machine, missing_promises=missing, row_error=first_row_error
    )
    if pipeline.problems or not all(stage.report.is_sound for stage in stages):
        return check_stages(pipeline, machine, as_json=False)
    for stage in stages:
        if stage.report.problems:
            for line in problem_lines(stage.report, [f"{pipeline.source}, stage {stage.name}"]):
                typer.echo(line)
    return _reported(lambda: _run_stages(pipeline, machine))


def _run_stages(pipeline: Pipeline, machine: Machine) -> int:
    from luyen.pipeline.run import run_pipeline

    code = run_pipeline(pipeline, typer.echo, machine=machine)
    if not code:
        typer.echo(f"Finished: all {len(pipeline.stages)} stages of {pipeline.name}")
    return code


def _reported(work: Callable[[], int]) -> int:
    """Run `work` and return its exit code; 1 after printing the traceback of a failed worker."""
    _demand_addresses()
    prepare_process()
    from luyen.runtime.ray.messages import RemoteError

    try:
        return work()
    except RemoteError as error:
        # Print the traceback of the worker; that of this process adds nothing.
        typer.secho(f"error: {error}", err=True, fg="red")
        return 1
    except RuntimeError as error:
        if any(words in str(error) for words in _NO_MEMORY):
            raise MemoryError(str(error)) from error
        raise


def _demand_addresses() -> None:
    """A UserError where the address space is so small that libraries crash silently."""
    most = address_limit()
    if most is not None and most < _LEAST_ADDRESSES:
        why = f"loading torch takes {_LEAST_ADDRESSES} bytes of addresses"
        raise UserError("memory", f"{most} bytes of addresses", why, "raise the limit (ulimit -v)")


def train(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides. "
            "Without a file: the quickstart.",
            metavar="[CONFIG]... [KEY=VALUE]...",
        ),
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            help="Resume this run with its own configuration; keys may be overridden.",
            metavar="RUN",
        ),
    ] = None,
    trust: Trust = False,
) -> None:
    """Train as a configuration says, after checking it."""

    raise typer.Exit(run_train(config or [], resume=resume, is_trusted=trust))
