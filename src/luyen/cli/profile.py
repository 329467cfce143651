"""`luyen profile`: profile a short temporary run; only the traces are kept."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Annotated

import typer

from luyen.base.errors import UserError
from luyen.base.process_setup import prepare_process
from luyen.base.rundir import step_name
from luyen.cli.common import Trust

if TYPE_CHECKING:
    from luyen.config.check import Report


def run_profile(words: Sequence[str], *, steps: str, out: Path, is_trusted: bool) -> int:
    """Train up to the last of `steps`, and print the profile; 1 when there are errors."""
    from luyen.cli.check import problem_lines, split_words
    from luyen.cli.train import quickstart
    from luyen.config.trust import require_trusted_files

    numbers = parse_steps(steps)
    files, overrides = split_words(words)
    files = files or [quickstart()]
    require_trusted_files(files, is_trusted=is_trusted)
    with TemporaryDirectory(prefix="luyen-profile-") as folder:
        report = _checked(files, [*overrides, *_forced(numbers, out, folder)])
        if not report.is_sound:
            for line in problem_lines(report, [str(f) for f in files]):
                typer.echo(line)
            return 1
        prepare_process()
        # torch and everything above it load here, after the configuration has been found sound.
        from luyen.train.start import run_training

        run_training(report, trial_steps=max(numbers))
    for line in _found(numbers, out):
        typer.echo(line)
    return 0


def parse_steps(words: str) -> tuple[int, ...]:
    """Numbers of steps, as in `2,3`.

    Example:
        >>> parse_steps("2, 3")
        (2, 3)
    """
    parts = [word.strip() for word in words.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise UserError("--steps", words, "steps are counted from 1", "give numbers, such as 2,3")
    return tuple(sorted({int(part) for part in parts}))


def _forced(steps: tuple[int, ...], out: Path, folder: str) -> list[str]:
    """Overrides that select the profiled steps and a temporary run directory."""
    return [
        f"trainer.profile.steps={list(steps)}",
        f"trainer.profile.save_path={out}",
        f"trainer.default_local_dir={folder}",
        "trainer.resume_mode=auto",
        "trainer.logger=[console, jsonl]",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
    ]


def _checked(files: Sequence[Path], overrides: list[str]) -> "Report":
    """The check of the run; on a GPU the history of memory is wanted too."""
    from luyen.config.check import check
    from luyen.config.machine import this_machine

    machine = this_machine()
    report = check(files, overrides, machine=machine)
    if report.plan.where.device == "cuda":
        report = check(files, [*overrides, "trainer.profile.memory=true"], machine=machine)
    return report


def _found(steps: tuple[int, ...], out: Path) -> Iterator[str]:
    """The table of the last step that was reached, and every file."""
    tables = {step: out / f"operators_{step_name(step)}.txt" for step in steps}
    reached = [step for step, table in tables.items() if table.is_file()]
    if not reached:
        why = "the run was over before the first of them"
        raise UserError("--steps", ",".join(map(str, steps)), why, "name earlier steps")
    yield f"\nHeaviest operators of step {reached[-1]}"
    yield tables[reached[-1]].read_text()
    yield "Files"
    for path in sorted(p for step in reached for p in out.glob(f"*_{step_name(step)}.*")):
        yield f"  {path}"
    yield "Traces open in https://ui.perfetto.dev, snapshots in https://pytorch.org/memory_viz."


def profile(
    config: Annotated[
        list[str] | None,
        typer.Argument(
            help="YAML files, the later over the earlier, then key=value overrides. "
            "Without a file: the quickstart.",
            metavar="[CONFIG]... [KEY=VALUE]...",
        ),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Steps to look at; the run ends after the last.")
    ] = "2,3",
    out: Annotated[Path, typer.Option(help="Folder of the traces.")] = Path("profile"),
    trust: Trust = False,
) -> None:
    """Train for a few steps and show where the time goes.

    Each step leaves a trace for Perfetto with the phases of the loop, a table of its heaviest
    operators and, on a GPU, a snapshot of its memory. Nothing else of the run is kept.
    """
    raise typer.Exit(run_profile(config or [], steps=steps, out=out, is_trusted=trust))
