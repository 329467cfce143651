"""`luyen reproduce`: a run once more, compared with the original while it goes on."""

import json
import os
import shutil
import time
from collections.abc import Callable, Sequence, Set
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias, final

import typer

from luyen.base.digests import StepDigest, read_digests
from luyen.base.errors import UserError
from luyen.base.files import plain
from luyen.base.rundir import RunDirectory
from luyen.cli.common import Trust
from luyen.cli.diff import input_line, lines

if TYPE_CHECKING:
    from luyen.studio.diff import RunDifference
    from luyen.studio.inputs import ChangedInput
    from luyen.studio.reproduce import Rerun

Say: TypeAlias = Callable[[str], None]
_LOOK_S = 0.1
"""Seconds between two looks at what the rerun has written."""
_QUIET_S = 1.0
"""Least seconds between two lines about steps that are equal."""
_METRICS_S = 5.0
"""Most seconds to wait for the metrics of a step whose digest is there."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Reproduction:
    """Result of repeating a run.

    Example:
        >>> Reproduction(run="runs/a", into="runs/a-reproduced", equal_steps=(1, 2),
        ...     environment=(), difference=None, notes=()).is_equal
        True
    """

    run: str
    """The run directory."""
    into: str
    """Directory of the rerun."""
    equal_steps: tuple[int, ...]
    """Steps whose digests are equal, in order."""
    environment: "tuple[ChangedInput, ...]"
    """Changes of the environment since the run began."""
    difference: "RunDifference | None"
    """The first difference; None: there is none."""
    notes: tuple[str, ...]
    """Remarks about the original run."""

    @property
    def is_equal(self) -> bool:
        """Whether every step that was compared is equal."""
        return self.difference is None

    def as_json(self) -> dict[str, Any]:
        """Plain data."""
        made = asdict(self) | {"equal": self.is_equal}
        if self.difference is not None:
            made["difference"] = self.difference.as_json()
        return made


def run_reproduce(
    root: Path, *, steps: int | None, into: Path | None, as_json: bool, is_trusted: bool
) -> int:
    """Repeat the run and print the result; 0: equal, 1: not equal, 2: it cannot be done."""

    from luyen.config.trust import require_trust
    from luyen.studio.reproduce import folder_of

    def say(words: str) -> None:
        typer.echo(words, err=as_json)

    try:
        run = RunDirectory.open(root.resolve())
        folder = folder_of(run)
        require_trust(run, is_trusted=is_trusted, folder=folder, is_run_again=True)
        found = run_again(run.root, steps=steps, into=into, say=say)
    except UserError as error:
        typer.secho(f"error: {error}", err=True, fg="red")
        return 2
    if as_json:
        typer.echo(json.dumps(plain(found.as_json()), indent=2, ensure_ascii=True, default=str))
    else:
        _print_end(found, say)
    return 0 if found.is_equal else 1


def run_again(root: Path, *, steps: int | None, into: Path | None, say: Say) -> Reproduction:
    """Repeat a run and compare it step by step, up to the first difference.

    A UserError when it cannot be done: no digests, changed rows or files, a rerun that fails.
    """
    from luyen.studio.reproduce import Rerun, folder_of

    run = RunDirectory.open(root)
    wanted = [d for d in read_digests(run.digests) if steps is None or d.step <= steps]
    if not wanted:
        fix = "let it do a step, or ask for more --steps"
        raise UserError("run", str(root), "it has no digests of the steps to compare", fix)
    notes = _notes(run)
    for note in notes:
        say(f"note: {note}")
    rerun = Rerun(run, (into or root.with_name(f"{root.name}-reproduced")).resolve())
    early = _early_changes(run, say)
    _refuse(early, "file")
    say(f"Running again in {rerun.directory.root}, from {folder_of(run)}")
    with rerun:
        late = _late_changes(run, rerun, early, say)
        equal, is_parted = _follow(wanted, rerun, say)
    difference = _difference(run, rerun) if is_parted else None
    return Reproduction(
        run=str(run.root),
        into=str(rerun.directory.root),
        equal_steps=tuple(equal),
        environment=(*early, *late),
        difference=difference,
        notes=tuple(notes),
    )


def _notes(run: RunDirectory) -> list[str]:
    """Properties of the original run that a single process cannot repeat."""
    notes: list[str] = []
    for entry in run.read_resumptions():
        words = "under another configuration" if entry["is_config_new"] else ""
        changed = ", ".join(entry["changed"])
        words += f"{' and ' if words else ''}with other {changed}" if changed else ""
        if words:
            notes.append(f"the run was resumed at {entry['time']} {words}: it is not one program")
    return notes


def _early_changes(run: RunDirectory, say: Say) -> "list[ChangedInput]":
    """Differences that are known before the rerun starts; prints them."""
    from luyen.studio.reproduce import (
        OVERRIDDEN_KEYS,
        changed_environment,
        environment_of,
        folder_of,
    )

    environment = environment_of(run.read_manifest(), os.environ)
    found = changed_environment(run, folder=folder_of(run), environment=environment)
    shown = [one for one in found if one.name not in OVERRIDDEN_KEYS]
    say("The environment differs from that of the run" if shown else "Same environment so far.")
    for one in shown:
        say(input_line(one))
    return shown


def _late_changes(
    run: RunDirectory, rerun: "Rerun", early: "Sequence[ChangedInput]", say: Say
) -> "list[ChangedInput]":
    """Differences that only the rerun can detect: rows, threads, GPUs."""
    from luyen.studio.inputs import changed_inputs
    from luyen.studio.reproduce import OVERRIDDEN_KEYS

    while not rerun.directory.exists:
        if rerun.has_ended:
            raise rerun.failure()
        time.sleep(_LOOK_S)
    known = {*OVERRIDDEN_KEYS, *(one.name for one in early)}
    found = [one for one in changed_inputs(run, rerun.directory) if one.name not in known]
    # Which packages a process has imported by now depends on how it was started.
    found = [one for one in found if one.kind != "packages"]
    for one in found:
        say(input_line(one))
    if any(one.kind == "dataset" for one in found):
        rerun.stop()
        shutil.rmtree(rerun.directory.root, ignore_errors=True)
    _refuse(found, "dataset")
    return found


def _refuse(changes: "Sequence[ChangedInput]", kind: str) -> None:
    """A UserError for changed rows, code or weights: the rerun would be another run."""
    for one in changes:
        if one.kind == kind:
            what = "the rows are" if kind == "dataset" else "its content is"
            why = f"{what} not what the run had: it was {one.a} and is {one.b}"
            fix = "put it back; or start a new run and compare the two with luyen diff"
            raise UserError(one.name, one.b, why, fix)


def _follow(wanted: Sequence[StepDigest], rerun: "Rerun", say: Say) -> tuple[list[int], bool]:
    """The steps that are equal, and whether one is not; returns as soon as that is known."""
    first = {digest.step: digest.stages for digest in wanted}
    equal: list[int] = []
    last = wanted[-1].step
    printed_at = time.monotonic()
    while True:
        is_over = rerun.has_ended  # before the look, so that nothing comes after the last one
        for digest in rerun.new_steps():
            if first.get(digest.step, digest.stages) != digest.stages:
                say(f"step {digest.step} of {last}: not equal")
                _await_metrics(rerun, digest.step)
                return equal, True
            equal += [digest.step] if digest.step in first else []
            if digest.step >= last or time.monotonic() - printed_at > _QUIET_S:
                printed_at = time.monotonic()
                say(f"step {digest.step} of {last}: equal")
            if digest.step >= last:
                _demand_all(first.keys() - set(equal))
                return equal, False
        if is_over:
            raise rerun.failure()
        time.sleep(_LOOK_S)


def _demand_all(missing: Set[int]) -> None:
    """A UserError when the rerun skipped steps of the run, so that they cannot be compared."""
    if missing:
        why = f"the rerun came to its end without {len(missing)} steps of the run, the first of "
        why += f"them step {min(missing)}: its configuration goes on from a later checkpoint"
        fix = "compare the runs of each part with luyen diff"
        raise UserError("trainer.resume_from_path", None, why, fix)


def _difference(run: RunDirectory, rerun: "Rerun") -> "RunDifference":
    """The result of `luyen diff`, without the inputs that the rerun overrides."""
    from luyen.studio.diff import compare_runs
    from luyen.studio.reproduce import OVERRIDDEN_KEYS

    found = compare_runs(run.root, rerun.directory.root)
    return replace(
        found,
        inputs=tuple(one for one in found.inputs if one.name not in OVERRIDDEN_KEYS),
        suspects=tuple(one for one in found.suspects if one.name not in OVERRIDDEN_KEYS),
    )


def _await_metrics(rerun: "Rerun", step: int) -> None:
    """Wait until the metrics of a step are written, which happens after its digest."""
    end, word = time.monotonic() + _METRICS_S, f'"step": {step},'.encode()
    file = rerun.directory.metrics
    while time.monotonic() < end and not rerun.has_ended:
        if file.is_file() and word in file.read_bytes():
            return
        time.sleep(_LOOK_S)


def _print_end(found: Reproduction, say: Say) -> None:
    say("")
    if found.difference is None:
        count = sum(step > 0 for step in found.equal_steps)  # step 0 is the first validation
        say(f"Reproduced: {count} step{'' if count == 1 else 's'}, equal to the last bit.")
        return
    for line in lines(found.difference):
        say(line)
    if found.environment:
        say("What differs in the environment is a likely cause.")


def reproduce(
    run: Annotated[Path, typer.Argument(help="A run directory.")],
    steps: Annotated[
        int | None, typer.Option(min=0, help="Compare steps up to this one; all by default.")
    ] = None,
    into: Annotated[
        Path | None,
        typer.Option(help="New folder for the second run; by default RUN-reproduced."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the result as JSON; progress goes to stderr.")
    ] = False,
    trust: Trust = False,
) -> None:
    """Run a run again from its own configuration and compare digests step by step.

    Exit code 0 when every step is equal, 1 when one is not, 2 when it cannot be done.
    """
    code = run_reproduce(run, steps=steps, into=into, as_json=as_json, is_trusted=trust)
    raise typer.Exit(code)
