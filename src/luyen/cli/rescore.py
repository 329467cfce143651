"""`luyen rescore`: recorded rollouts under another reward."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.errors import UserError
from luyen.base.files import json_line, plain, write_whole, writing
from luyen.cli.quiet import prepare
from luyen.cli.rescore_lines import mean_tau, question_of, rescore_lines
from luyen.config.trust import require_trusted_files

if TYPE_CHECKING:
    from luyen.rewards.objectives import Objectives
    from luyen.train.rescore.results import Moved, Rescored


def run_rescore(
    run: Path,
    *,
    changes: Sequence[str],
    file: Path | None,
    step: str | None,
    is_validation: bool,
    shown: int,
    out: Path | None,
    as_json: bool,
    is_trusted: bool,
) -> int:
    """Judge and print; 0 when all could be judged, 1 when some could not, 2 when nothing could."""
    try:
        steps = parse_steps(step)
        if out is not None:
            _demand_elsewhere(out, run)
        require_trusted_files([] if file is None else [file], is_trusted=is_trusted)
        found = _rescored(
            run, changes, file, steps, is_validation=is_validation, is_trusted=is_trusted
        )
        if out is not None:
            with writing(out, field="--out"):
                write_whole(out, "".join(json_line(row) for row in found.rows()))
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 2
    if as_json:
        page = plain(rescored_json(found, shown=shown))
        typer.echo(json.dumps(page, indent=2, ensure_ascii=True, default=str))
    else:
        for line in rescore_lines(found, shown=shown):
            typer.echo(line)
        if out is not None:
            typer.echo(f"wrote {out}")
    return 1 if found.faults else 0


def _demand_elsewhere(out: Path, run: Path) -> None:
    if run.resolve() in out.resolve().parents:
        why = "it lies in the run directory, and nothing of the run is changed"
        raise UserError("--out", str(out), why, "name a file elsewhere")


def parse_steps(text: str | None) -> range | None:
    """`7` or `3:9`, both ends included; a side that is left out is open.

    Example:
        >>> parse_steps("3:9"), parse_steps("7")
        (range(3, 10), range(7, 8))
    """
    if text is None:
        return None
    first, colon, last = text.partition(":")
    try:
        start = int(first) if first or not colon else 0
        end = start if not colon else int(last) if last else 2**62
    except ValueError:
        why = "steps are numbers"
        raise UserError("--step", text, why, "write e.g. --step 10:20") from None
    if end < start or start < 0:
        raise UserError("--step", text, "there is no step in between", "write the lower one first")
    return range(start, end + 1)


def _rescored(
    run: Path,
    changes: Sequence[str],
    file: Path | None,
    steps: range | None,
    *,
    is_validation: bool,
    is_trusted: bool,
) -> "Rescored":
    prepare()
    from luyen.train.rescore.judge import rescore

    console = Console(stderr=True)
    columns = (TextColumn("steps"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("steps", total=None)
        return rescore(
            run,
            file=file,
            overrides=changes,
            steps=steps,
            is_validation=is_validation,
            is_trusted=is_trusted,
            watch=lambda done, total: bar.update(task, completed=done, total=total),
        )


def rescored_json(found: "Rescored", *, shown: int) -> dict[str, Any]:
    """The whole outcome as plain data; of rollouts, those that moved most."""
    changes = [change for _, change in found.changes()]
    before, after = found.objectives()
    return {
        "ok": not found.faults,
        "run": found.run,
        "steps": list(found.steps),
        "groups": len(found.new),
        "rollouts": found.count,
        "broken": found.broken,
        "faults": [f"{r.group}/{r.sample}: {r.fault}" for r in found.faults],
        "components": {
            c.name: {
                "old": c.old,
                "new": c.new,
                "old_faults": c.old_faults,
                "new_faults": c.new_faults,
            }
            for c in found.components()
        },
        "correlation": found.correlation(),
        "compared_groups": len(changes),
        "kendall_tau": mean_tau(changes),
        "groups_with_another_best": sum(change.has_other_best for change in changes),
        "objectives": {"old": _objectives(before), "new": _objectives(after)},
        "moved": [_moved(one) for one in found.moved()[:shown]],
    }


def _objectives(found: "Objectives") -> dict[str, Any]:
    return {
        "means": dict(found.means),
        "with_total": dict(found.with_total),
        "with_other": {f"{one}, {other}": r for (one, other), r in found.with_other.items()},
        "pareto_fraction": found.front,
    }


def _moved(one: "Moved") -> dict[str, Any]:
    rollout = one.both.rollout
    return {
        "rollout": f"{rollout.group}/{rollout.sample}",
        "question": question_of(one),
        "answer": rollout.text,
        "old": one.both.old,
        "new": one.both.new,
        "places": one.places,
        "of": one.of,
    }
