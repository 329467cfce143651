"""`luyen sweep`: runs that differ in a few keys, one after the other, and a table of them."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, final

import typer

from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.base.input_files import expanded
from luyen.base.system import signals
from luyen.cli.runs import table

if TYPE_CHECKING:
    from luyen.config.sweep import Variant
    from luyen.studio.runs import RunFacts

SIGNALS = signals("SIGINT", "SIGTERM", "SIGHUP")
"""Signals that a run of the sweep is given."""
_HEAD = ("run", "steps", "state", "last validation")
_BY_KERNEL, _LOOK_S = 128, 0.2
"""The origin of a terminal's signals (SI_KERNEL); seconds between two looks at the program."""
_STOPPED = 128
"""Exit codes from here on mean that a signal ended the process."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class SweepRun:
    """A run of the sweep, checked.

    Example:
        >>> from luyen.config.sweep import Variant
        >>> SweepRun(variant=Variant(words=("a.b=1",)), words=(), root=Path("runs")).variant.name
        'b=1'
    """

    variant: "Variant"
    """Its overrides."""
    words: tuple[str, ...]
    """Arguments of `luyen train`."""
    root: Path
    """Its run directory."""


def run_sweep(
    words: Sequence[str],
    listed: Sequence[str],
    *,
    as_json: bool = False,
    train: Callable[[Sequence[str]], int] | None = None,
) -> int:
    """Check every run, train those that are not finished, and show all; 1 when one failed."""
    queue = _queued(words, listed)
    if queue is None:
        return 1
    failed = 0
    for number, one in enumerate(queue, 1):
        if _state(one) == "finished":
            typer.echo(f"[{number}/{len(queue)}] {one.variant.name}: finished already")
            continue
        typer.echo(f"[{number}/{len(queue)}] {one.variant.name}: luyen train {' '.join(one.words)}")
        code = (train or _train)(one.words)
        if code >= _STOPPED:
            typer.echo("stopped; the same command goes on with the runs that are not finished")
            return code
        failed += code != 0
    _show(queue, as_json=as_json)
    return 1 if failed else 0


def _queued(words: Sequence[str], listed: Sequence[str]) -> list[SweepRun] | None:
    """The runs; None after printing the problems of the first invalid one."""
    from luyen.cli.check import problem_lines, split_words
    from luyen.config.check import check
    from luyen.config.sweep import variants

    files, overrides = split_words(words)
    if not files:
        raise UserError("CONFIG", " ".join(words), "no file is named", "name a YAML file")
    shared, found = variants(overrides, listed)
    base = check(files, shared).config.trainer
    is_named = any(word.lstrip("+").startswith("trainer.experiment_name=") for word in shared)
    stem = base.experiment_name if is_named else files[0].stem
    queue: list[SweepRun] = []
    for variant in found:
        name = f"trainer.experiment_name='{stem}.{variant.name}'"
        own = [*shared, *variant.words, name]
        report = check(files, own)
        if not report.is_sound:
            for line in problem_lines(report, [*map(str, files), *variant.words]):
                typer.echo(line)
            return None
        trainer = report.config.trainer
        root = expanded(trainer.default_local_dir) / trainer.project_name / trainer.experiment_name
        queue.append(SweepRun(variant=variant, words=(*map(str, files), *own), root=root))
    return queue


def _train(words: Sequence[str]) -> int:
    """Train in a new process, so that runs do not share memory."""
    code = run_with_signals([sys.executable, "-P", "-m", "luyen", "train", *words])
    return _STOPPED - code if code < 0 else code


def run_with_signals(command: Sequence[str]) -> int:
    """How a program ended, which is given the signals of this process and time to save its work.

    A terminal signals both by itself.
    """
    process = subprocess.Popen(command)
    if sys.platform == "darwin":  # it cannot wait for a signal
        return process.wait()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        while process.poll() is None:
            found = signal.sigtimedwait(SIGNALS, _LOOK_S)
            if found is not None and found.si_code != _BY_KERNEL:
                process.send_signal(found.si_signo)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return process.returncode


def _facts(one: SweepRun) -> "RunFacts | None":
    from luyen.studio.runs import list_runs

    if not one.root.is_dir():
        return None
    found = [run for run in list_runs(one.root.parent) if Path(run.path).name == one.root.name]
    return found[0] if found else None


def _state(one: SweepRun) -> str:
    facts = _facts(one)
    return "not begun" if facts is None else facts.state


def _show(queue: Sequence[SweepRun], *, as_json: bool) -> None:
    facts = {one.variant.name: _facts(one) for one in queue}
    if as_json:
        page = {name: None if one is None else one.as_json() for name, one in facts.items()}
        typer.echo(json.dumps(plain(page), indent=2))
        return
    rows = [_row(name, one) for name, one in facts.items()]
    for line in table(_HEAD, rows):
        typer.echo(line)


def _row(name: str, run: "RunFacts | None") -> tuple[str, ...]:
    if run is None:
        return (name, "-", "not begun", "-")
    measured = "-" if run.value is None else f"{run.metric} {run.value:.3f}"
    return (name, f"{run.steps}/{'?' if run.total is None else run.total}", run.state, measured)


def sweep(
    config: Annotated[
        list[str],
        typer.Argument(
            help="YAML files, then overrides; KEY=A,B has a run for each value.",
            metavar="CONFIG... [KEY=VALUE[,VALUE]...]...",
        ),
    ],
    run: Annotated[
        list[str] | None,
        typer.Option(help="A run by its overrides, separated by spaces; as often as wished."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON.")] = False,
) -> None:
    """Train a grid or a list of variants, one after the other, and compare them in a table.

    Every run is checked before the first one starts, and has a run directory named after what it
    varies. The same command again trains only what is not finished.
    """
    raise typer.Exit(run_sweep(config, run or [], as_json=as_json))
