"""`luyen rescore`: recorded rollouts scored by another reward."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.errors import UserError
from luyen.base.files import json_line, plain, write_whole, writing
from luyen.cli.common import Trust, prepare

if TYPE_CHECKING:
    from luyen.rewards.metrics import Objectives
    from luyen.studio.rescore_results import ComponentChange, RankChange, RankMove, RescoreResult

_CONFLICT = -0.1
"""Correlation of two components below which one is bought with the other."""
_ROUNDING = 1e-9
_LONGEST = 100
"""Characters of a question or an answer that are shown."""


def rescore_lines(found: "RescoreResult", *, shown: int) -> Iterator[str]:
    """The outcome, part by part."""
    steps = found.steps
    which = (
        f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps, {steps[0]} to {steps[-1]}"
    )
    yield f"{found.run}, {which}: {found.count} rollouts of {len(found.new)} groups scored again"
    if found.broken:
        yield f"{found.broken} rollouts failed before they could be scored, and are left out"
    yield from _faults(found)
    yield ""
    yield from _means(found.components())
    yield ""
    yield from _orders(found)
    before, after = found.objectives()
    yield from _trade_offs("in the run", before)
    yield from _trade_offs("now", after)
    moved = found.moved()[:shown]
    if moved:
        yield ""
        yield "Moved most among their siblings:"
        for one in moved:
            yield from _one_moved(one)


def mean_tau(changes: "Sequence[RankChange]") -> float | None:
    """Mean of Kendall's tau over the groups that have one."""
    known = [change.tau for change in changes if change.tau is not None]
    return fmean(known) if known else None


def question_of(one: "RankMove") -> str:
    """The last message that the rollout answers."""
    messages = one.both.prompt.messages
    return str(messages[-1].get("content") or "") if messages else ""


def _faults(found: "RescoreResult") -> Iterator[str]:
    lost = found.faults
    if lost:
        first = lost[0]
        yield f"{len(lost)} of {found.count} could not be scored and have no reward; the first:"
        yield f"  {first.group}/{first.sample}: {_short(first.fault or '')}"


def _means(components: "Sequence[ComponentChange]") -> Iterator[str]:
    width = max(len("mean"), *(len(c.name) for c in components)) if components else len("mean")
    yield f"{'mean':{width}s}  {'in the run':>10s}  {'now':>10s}"
    for c in components:
        faults = [
            f"{n} faults {when}" for n, when in ((c.old_faults, "then"), (c.new_faults, "now")) if n
        ]
        rest = f"  ({', '.join(faults)})" if faults else ""
        yield f"{c.name:{width}s}  {_number(c.old):>10s}  {_number(c.new):>10s}{rest}"


def _orders(found: "RescoreResult") -> Iterator[str]:
    changes = [change for _, change in found.changes()]
    taus = [change.tau for change in changes if change.tau is not None]
    if not changes:
        yield "No group has two rollouts with both rewards: there is no order to compare."
    elif not taus:
        yield f"Order: no group of {len(changes)} is ranked by both rewards."
    else:
        same = sum(tau > 1 - _ROUNDING for tau in taus)
        yield (
            f"Order: Kendall's tau {fmean(taus):.3f}, mean of {len(taus)} groups that both rewards "
            f"rank; {same} keep their order"
        )
    if changes:
        changed = sum(change.has_other_best for change in changes)
        yield f"Another best rollout: {changed} of {len(changes)} groups"
    both = found.correlation()
    if both is not None:
        yield f"Correlation of the two rewards over all rollouts: {both:.3f}"


def _trade_offs(when: str, found: "Objectives") -> Iterator[str]:
    if len(found.means) < 2:
        return
    yield ""
    front = "" if found.front is None else f": {found.front:.1%} of a group on its Pareto front"
    yield f"Components {when}{front}"
    for (one, other), value in sorted(found.with_other.items(), key=lambda pair: pair[1]):
        words = "  conflict" if value < _CONFLICT else ""
        yield f"  {one} and {other}: correlation {value:.3f}{words}"


def _one_moved(one: "RankMove") -> Iterator[str]:
    rollout = one.both.rollout
    way = "down" if one.places > 0 else "up"
    yield (
        f"  {rollout.group}/{rollout.sample}: {abs(one.places):g} of {one.of} places {way}, "
        f"reward {one.both.old:.4g} -> {one.both.new:.4g}"
    )
    yield f"    {_short(question_of(one))}"
    yield f"    {_short(rollout.text)}"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4f}"


def _short(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _LONGEST else flat[: _LONGEST - 3] + "..."


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
    """Score and print; 0 when all could be scored, 1 when some could not, 2 when none could."""
    from luyen.config.trust import require_trusted_files

    try:
        steps = parse_steps(step)
        if out is not None:
            _demand_other_folder(out, run)
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


def _demand_other_folder(out: Path, run: Path) -> None:
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
) -> "RescoreResult":
    prepare()
    from luyen.studio.rescore import rescore

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


def rescored_json(found: "RescoreResult", *, shown: int) -> dict[str, Any]:
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


def _moved(one: "RankMove") -> dict[str, Any]:
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


def rescore(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    changes: Annotated[
        list[str] | None,
        typer.Argument(
            help="Keys of the reward with other values.", metavar="[reward.KEY=VALUE]..."
        ),
    ] = None,
    reward: Annotated[
        Path | None,
        typer.Option(help="YAML file whose `reward` block is used; without it, the run's own."),
    ] = None,
    step: Annotated[
        str | None, typer.Option(help="Steps to score: N, or A:B with both ends.", metavar="A:B")
    ] = None,
    validation: Annotated[
        bool, typer.Option("--validation", help="Score the rollouts of validations instead.")
    ] = False,
    show: Annotated[int, typer.Option(min=0, help="Rollouts to show that moved most.")] = 5,
    out: Annotated[
        Path | None, typer.Option(help="Write every rollout with both scores there (JSON lines).")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Score the recorded rollouts of a run with another reward, and show what would change.

    Exit code 0 when every rollout could be scored, 1 when some could not, 2 when it cannot be done.
    Nothing of the run is changed, and nothing is generated.
    """
    code = run_rescore(
        run,
        changes=changes or [],
        file=reward,
        step=step,
        is_validation=validation,
        shown=show,
        out=out,
        as_json=as_json,
        is_trusted=trust,
    )
    raise typer.Exit(code)
