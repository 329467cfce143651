"""`luyen diff`: two runs, and where they first differ."""

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from luyen.base.digests import STAGES
from luyen.base.errors import UserError
from luyen.base.files import plain

if TYPE_CHECKING:
    from luyen.studio.diff import RolloutDifference, RunDifference
    from luyen.studio.inputs import ChangedInput

_HASH = re.compile(r"((?:sha256|sampled|revision):[0-9a-f]{12})[0-9a-f]+")
_SHOWN = 8
"""Inputs and metrics that are listed before the rest is counted."""


def run_diff(a: Path, b: Path, *, as_json: bool) -> int:
    """Compare and print; 0 when the runs are equal, 1 when not, 2 when that cannot be said."""
    from luyen.studio.diff import compare_runs

    try:
        difference = compare_runs(a, b)
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 2
    if as_json:
        typer.echo(
            json.dumps(plain(difference.as_json()), indent=2, ensure_ascii=True, default=str)
        )
    else:
        for line in lines(difference):
            typer.echo(line)
    return 0 if difference.is_equal else 1


def lines(difference: "RunDifference") -> Iterator[str]:
    """The difference as text."""
    yield f"A  {difference.a}"
    yield f"B  {difference.b}"
    yield ""
    yield "Inputs that differ" if difference.inputs else "No recorded input differs."
    yield from _shortened([input_line(one) for one in difference.inputs])
    yield ""
    yield from _verdict(difference)
    for note in difference.notes:
        yield f"note: {note}"


def _verdict(difference: "RunDifference") -> Iterator[str]:
    parting, common = difference.parting, difference.common
    if parting is None:
        count = f"{len(common)} step{'' if len(common) == 1 else 's'}"
        yield f"Equal in all {count} that both have ({common[0]} to {common[-1]})."
        for name, steps in (("A", difference.only_a), ("B", difference.only_b)):
            if steps:
                yield f"Only {name} has {_steps(steps)}."
        return
    yield f"They part at step {parting.step}, in its {parting.stage}."
    equal = [stage for stage in STAGES if stage not in parting.stages]
    yield f"  equal: {', '.join(equal) or 'none'}"
    yield f"  different: {', '.join(parting.stages)}"
    if difference.found is not None:
        yield from _found(difference.found)
    if difference.metrics:
        yield "Metrics of that step that differ"
        yield from _shortened(
            [f"  {name}: {_value(a)} -> {_value(b)}" for name, (a, b) in difference.metrics.items()]
        )
    yield from _cause(difference)


def _found(found: "RolloutDifference") -> Iterator[str]:
    place = "" if found.place is None else f" {found.place}"
    yield f"First difference: {found.rollout}, {found.what}{place}"
    yield f"  A  {_value(found.a)}"
    yield f"  B  {_value(found.b)}"


def _cause(difference: "RunDifference") -> Iterator[str]:
    if not difference.suspects:
        yield "Which input changed first: nothing that is recorded. Either a number was computed"
        yield "in another order (nondeterminism), or something has changed of which no record is"
        yield "kept: a module that a reward or a tool imports, a service that it asks, a clock."
        return
    yield f"Which input changed first: most likely {_name(difference.suspects[0])}"


def input_line(one: "ChangedInput") -> str:
    """One changed input as text.

    Example:
        >>> from luyen.studio.inputs import ChangedInput
        >>> input_line(ChangedInput(kind="file", name="trainer.plugins.0", a="p.py sha256:0123456"
        ...     "789abcdef0", b="missing", acts_on=None))
        '  content of trainer.plugins.0: p.py sha256:0123456789ab... -> missing'
    """
    acts = f"  (acts on {one.acts_on})" if one.acts_on is not None else ""
    return f"  {_name(one)}: {_short(one.a)} -> {_short(one.b)}{acts}"


def _name(one: "ChangedInput") -> str:
    return f"content of {one.name}" if one.kind == "file" else one.name


def _short(value: Any) -> str:
    """A value with shortened hashes."""
    return _HASH.sub(r"\1...", _value(value))


def _value(value: Any) -> str:
    """A value on one line; `none` stands for what a run does not have.

    Example:
        >>> _value({"id": 5, "logp": -0.5}), _value(None)
        ('id 5, logp -0.5', 'none')
    """
    if value is None:
        return "none"
    if isinstance(value, dict):
        return ", ".join(f"{name} {_value(inner)}" for name, inner in value.items())
    return value if isinstance(value, str) else json.dumps(plain(value), default=str)


def _steps(steps: Sequence[int]) -> str:
    if len(steps) == 1:
        return f"step {steps[0]}"
    return f"{len(steps)} more steps, from {steps[0]} to {steps[-1]}"


def _shortened(rows: Sequence[str]) -> Iterator[str]:
    yield from rows[:_SHOWN]
    if len(rows) > _SHOWN:
        yield f"  ... and {len(rows) - _SHOWN} more (--json lists all)"


def diff(
    run_a: Annotated[Path, typer.Argument(help="A run directory.")],
    run_b: Annotated[Path, typer.Argument(help="Another one.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the difference as JSON.")] = False,
) -> None:
    """Say where two runs first parted: input, step, stage, rollout and token.

    Exit code 0 when they did the same, 1 when not, 2 when their files allow no comparison.
    """
    raise typer.Exit(run_diff(run_a, run_b, as_json=as_json))
