"""`luyen replay`: a recorded step once more, as it was or with another knob."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.cli.quiet import prepare
from luyen.cli.replay_lines import replay_lines

if TYPE_CHECKING:
    from luyen.train.replay.rebuild import StepCheck
    from luyen.train.replay.regenerate import Regenerated
    from luyen.train.replay.results import Replayed, Varied


def run_replay(
    run: Path,
    step: int,
    *,
    rollout: str | None,
    changes: Sequence[str],
    as_json: bool,
    is_trusted: bool,
) -> int:
    """Replay and print; 0 when it came out as recorded, 1 when not, 2 when it cannot be done."""
    try:
        found = _replayed(run, step, rollout, changes, is_trusted=is_trusted)
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 2
    for line in _page(found) if as_json else replay_lines(found):
        typer.echo(line)
    return 0 if found.is_equal else 1


def _replayed(
    run: Path, step: int, rollout: str | None, changes: Sequence[str], *, is_trusted: bool
) -> "Replayed | Varied | Regenerated":
    if rollout is not None and changes:
        why = "a rollout is drawn again as the run drew it, and a changed key acts on the update"
        raise UserError("--set", " ".join(changes), why, "leave out --set, or --rollout")
    prepare()
    from luyen.train.replay.record import RunRecord
    from luyen.train.replay.replay import replay_rollout, replay_step, vary_step

    console = Console(stderr=True)
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("steps", total=None)
        parted: list[int] = []

        def watch(done: int, total: int, checked: "StepCheck | None") -> None:
            bar.update(task, completed=done, total=total)
            if checked is not None and checked.unequal and not parted:
                parted.append(checked.step)
                words = f"step {checked.step} parts from the run in its {checked.parted_at}"
                typer.echo(words, err=True)

        record = RunRecord(run, is_trusted=is_trusted)
        if rollout is not None:
            return replay_rollout(record, step, rollout, watch)
        if changes:
            return vary_step(record, step, changes, watch)
        return replay_step(record, step, watch)


def _page(found: "Replayed | Varied | Regenerated") -> Iterator[str]:
    from luyen.train.replay.results import as_json

    yield json.dumps(plain(as_json(found)), indent=2, ensure_ascii=True, default=str)
