"""`luyen replay`: a recorded step once more, as it was or with another hyper-parameter."""

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.cli.common import Trust, prepare

if TYPE_CHECKING:
    from luyen.studio.replay.learner import StepCheck
    from luyen.studio.replay.regenerate import RegeneratedRollout, SampledToken
    from luyen.studio.replay.results import NumberPair, ReplayedStep, StepVariation, TokenChange

_SHOWN = 8
"""Tokens and further numbers that are listed before the rest is counted."""
_FIRST = (
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/pg_clipfrac",
    "actor/ppo_kl",
    "actor/ref_kl",
    "actor/kl_loss",
    "actor/entropy",
    "critic/vf_loss",
    "critic/grad_norm",
    "advantage/mean_abs",
    "advantage/min",
    "advantage/max",
)
"""Numbers that are always shown, where the step has them."""


def replay_lines(found: "ReplayedStep | StepVariation | RegeneratedRollout") -> Iterator[str]:
    """The outcome of any replay."""
    from luyen.studio.replay.regenerate import RegeneratedRollout
    from luyen.studio.replay.results import StepVariation

    if isinstance(found, RegeneratedRollout):
        yield from _regenerated_lines(found)
    elif isinstance(found, StepVariation):
        yield from _varied_lines(found)
    else:
        yield from _replayed_lines(found)


def _replayed_lines(found: "ReplayedStep") -> Iterator[str]:
    yield from _heading(found.run, found.step, found.start, len(found.checks))
    yield from _verdict(found.checks)
    yield ""
    yield from _numbers(found.numbers, ("recorded", "again"))
    yield from _notes(found.notes)


def _varied_lines(found: "StepVariation") -> Iterator[str]:
    yield from _heading(found.run, found.step, found.start, len(found.checks))
    for key, (before, after) in found.keys.items():
        yield f"  {key}: {_value(before)} -> {_value(after)}"
    yield from _verdict(found.checks)
    changed = ", ".join(found.stages)
    yield f"The change acts on its {changed}." if changed else "The change acts on nothing."
    yield ""
    yield from _numbers(found.numbers, ("as it was", "changed"))
    moved = [token for token in found.tokens if token.before != token.after]
    if moved:
        yield ""
        newly = sum(token.after.is_clipped > token.before.is_clipped for token in moved)
        freed = sum(token.after.is_clipped < token.before.is_clipped for token in moved)
        yield f"{len(moved)} tokens changed: {newly} newly clipped, {freed} no longer."
        yield "Those whose part in the loss moved most:"
        for token in moved[:_SHOWN]:
            yield from _token(token)
    yield from _notes(found.notes)


def _regenerated_lines(found: "RegeneratedRollout") -> Iterator[str]:
    turns = f"{found.turns} turn{'' if found.turns == 1 else 's'}"
    yield f"{found.rollout}: {len(found.tokens)} sampled tokens in {turns}, drawn again"
    place = found.difference
    if place is None:
        yield "Every token came again, its log-probability to the last bit."
    else:
        same = sum(token.is_equal for token in found.tokens)
        yield f"First difference: token {place.position} (branch {place.branch}, turn {place.turn})"
        yield f"  recorded  {_sampled_line(place.recorded)}"
        yield f"  again     {_sampled_line(place.regenerated)}"
        yield f"{same} of {len(found.tokens)} tokens came again with the same log-probability."
    yield from _notes(found.notes)


def _heading(run: str, step: int, start: str, count: int) -> Iterator[str]:
    before = f" and {count - 1} recorded step{'' if count == 2 else 's'}" if count > 1 else ""
    yield f"{run}, step {step}, from {start}{before}"


def _verdict(checks: Sequence["StepCheck"]) -> Iterator[str]:
    parting = next((one for one in checks if one.unequal), None)
    if parting is None:
        last = checks[-1]
        yield f"As in the run, to the last bit: {', '.join(last.equal) or 'nothing is recorded'}."
        return
    yield f"It parts from the run at step {parting.step}, in its {parting.parted_at}."
    yield f"  equal: {', '.join(parting.equal) or 'none'}"
    yield f"  different: {', '.join(parting.unequal)}"


def _numbers(numbers: Mapping[str, "NumberPair"], heads: tuple[str, str]) -> Iterator[str]:
    """The numbers that are always shown, and those that differ."""
    first = [name for name in _FIRST if name in numbers]
    different = [n for n, number in numbers.items() if n not in first and not number.is_equal]
    rows = [(n, _value(numbers[n].before), _value(numbers[n].after)) for n in first + different]
    rows = rows[: len(first) + _SHOWN]
    width = max(len(name) for name, _, _ in rows)
    middle = max(len(heads[0]), *(len(before) for _, before, _ in rows))
    yield f"{'':{width}s}  {heads[0]:{middle}s}  {heads[1]}"
    for name, before, after in rows:
        same = "=" if before == after else after
        yield f"{name:{width}s}  {before:{middle}s}  {same}"
    if len(different) > _SHOWN:
        yield f"... and {len(different) - _SHOWN} more that differ (--json lists all)"


def _token(token: "TokenChange") -> Iterator[str]:
    branch = f", branch {token.branch}" if token.branch else ""
    visit = f", visit {token.visit + 1}" if token.visit else ""
    yield f"  {token.rollout} token {token.position}{branch}{visit} {token.text!r}"
    one, other = token.before, token.after
    words = [
        _moved("loss", one.loss, other.loss),
        _moved("weight", one.weight, other.weight),
        _moved("ratio", one.ratio, other.ratio),
        _moved("advantage", one.advantage, other.advantage),
        _moved("gradient", one.gradient, other.gradient),
        _moved("clipped", one.is_clipped, other.is_clipped),
    ]
    yield f"    {'  '.join(words)}"


def _moved(name: str, before: float, after: float) -> str:
    """A value, or how it changed.

    Example:
        >>> _moved("loss", 0.5, 0.25), _moved("clipped", False, True), _moved("ratio", 1.0, 1.0)
        ('loss 0.5 -> 0.25', 'clipped no -> yes', 'ratio 1')
    """
    if before == after:
        return f"{name} {_short(before)}"
    return f"{name} {_short(before)} -> {_short(after)}"


def _short(value: float) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.5g}"


def _value(value: Any) -> str:
    return "none" if value is None else value if isinstance(value, str) else repr(value)


def _sampled_line(token: "SampledToken | None") -> str:
    if token is None:
        return "nothing: the turn had ended"
    return f"id {token.id} {token.text!r}, logp {token.logp!r}"


def _notes(notes: Sequence[str]) -> Iterator[str]:
    for note in notes:
        yield f"note: {note}"


def run_replay(
    run: Path,
    step: int,
    *,
    rollout: str | None,
    changes: Sequence[str],
    tokens: Path | None,
    as_json: bool,
    is_trusted: bool,
) -> int:
    """Replay and print; 0 when it came out as recorded, 1 when not, 2 when it cannot be done."""
    try:
        found = _replayed(run, step, rollout, changes, tokens, is_trusted=is_trusted)
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 2
    for line in _page(found) if as_json else replay_lines(found):
        typer.echo(line)
    return 0 if found.is_equal else 1


def _replayed(
    run: Path,
    step: int,
    rollout: str | None,
    changes: Sequence[str],
    tokens: Path | None,
    *,
    is_trusted: bool,
) -> "ReplayedStep | StepVariation | RegeneratedRollout":
    if rollout is not None and changes:
        why = "a rollout is regenerated as in the run, and a changed key acts on the update"
        raise UserError("--set", " ".join(changes), why, "leave out --set, or --rollout")
    if tokens is not None and (changes or rollout is not None):
        why = "numbers of tokens are those of the whole step as it was"
        raise UserError("--tokens", str(tokens), why, "leave out --set and --rollout")
    prepare()
    from luyen.studio.replay.record import ReplayRecord
    from luyen.studio.replay.replay import replay_rollout, replay_step, vary_step

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

        record = ReplayRecord(run, is_trusted=is_trusted)
        if rollout is not None:
            return replay_rollout(record, step, rollout, watch)
        if changes:
            return vary_step(record, step, changes, watch)
        return replay_step(record, step, watch, tokens=tokens)


def _page(found: "ReplayedStep | StepVariation | RegeneratedRollout") -> Iterator[str]:
    from luyen.studio.replay.results import as_json

    yield json.dumps(plain(as_json(found)), indent=2, ensure_ascii=True, default=str)


def replay(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    step: Annotated[int, typer.Option(help="The step to do again.")],
    rollout: Annotated[
        str | None,
        typer.Option(
            help="Regenerate this rollout instead: `step.draw.uid/sample`, or its beginning."
        ),
    ] = None,
    changes: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Do the step with another value too. May be repeated.",
            metavar="KEY=VALUE",
        ),
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            help="Write log-probability and entropy of every token before the step.",
            metavar="FILE",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
    trust: Trust = False,
) -> None:
    """Repeat a step of a run from its files, as recorded or with changed keys.

    Exit code 0 when it came out as recorded, 1 when not, 2 when the files do not allow it. Nothing
    of the run is changed, and no tool or reward is called.
    """
    code = run_replay(
        run,
        step,
        rollout=rollout,
        changes=changes or [],
        tokens=tokens,
        as_json=as_json,
        is_trusted=trust,
    )
    raise typer.Exit(code)
